"""From text to a dataset folder and back: the split, the files, the names, the command."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import DataError, build
from data import prepare as command
from data.build import MIN_VAL_SHARE, divide, place, prepare, scan, threshold
from data.dataset import Dataset
from data.prepare import resolve, stem

CLONE = Path(__file__).parents[2]
SHAKESPEARE = CLONE.parent / "shared/data/tinyshakespeare.txt"


def quiet(line: str) -> None:
    pass


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "my text.txt"
    path.write_text("the cat sat on the mat 😀\r\n" * 40, encoding="utf-8", newline="")
    return str(path)


@pytest.fixture
def folder(tmp_path) -> str:
    """Forty documents, an empty one and a binary one."""
    path = tmp_path / "texts"
    path.mkdir()
    for i in range(40):
        (path / f"{i:02d}.txt").write_text(f"document {i} " * 20, encoding="utf-8")
    (path / "empty.txt").touch()
    (path / "image.png").write_bytes(bytes(20))
    return str(path)


def documents_of(dataset: Dataset, name: str) -> list[str]:
    """The documents of a split, read back from its tokens."""
    split = getattr(dataset, name)
    decoded = dataset.tokenizer.decode(split.read(0, split.n_tokens))
    assert decoded.startswith("<|endoftext|>")
    return decoded.split("<|endoftext|>")[1:]


# --------------------------------------------------------------------------------------- the split


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="not beside this clone")
def test_tiny_shakespeare_has_nanogpt_s_counts():
    dataset = Dataset(prepare([str(SHAKESPEARE)], "shakespeare_char", "char", say=quiet))
    assert dataset.vocab_size == 65 and dataset.separator is None
    assert (dataset.train.n_tokens, dataset.val.n_tokens) == (1_003_854, 111_540)
    assert dataset.meta["sources"][0]["sha256"].startswith("86c4e6aa9db7")
    assert dataset.tokenizer.decode(dataset.train.read(0, 14)) == "First Citizen:"


def test_a_single_text_is_cut_after_nine_tenths_of_its_characters(text):
    content = Path(text).read_bytes().decode()
    cut = int(0.9 * len(content))
    char = Dataset(prepare([text], "char", "char", say=quiet))
    assert (char.train.n_tokens, char.val.n_tokens) == (cut, len(content) - cut)
    for spec in ("byte", "bpe:270"):
        dataset = Dataset(prepare([text], spec.replace(":", ""), spec, say=quiet))
        assert documents_of(dataset, "train") == [content[:cut]]
        assert documents_of(dataset, "val") == [content[cut:]]


def test_an_alphabet_knows_the_held_out_part_and_merges_do_not(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("ab" * 90 + "xy" * 10, encoding="utf-8")
    assert "x" in Dataset(prepare([str(path)], "char", "char", say=quiet)).tokenizer.alphabet
    bpe = Dataset(prepare([str(path)], "bpe", "bpe:300", say=quiet)).tokenizer
    assert len(bpe.encode("abab")) < 4 and len(bpe.encode("xyxy")) == 4


@settings(max_examples=40, deadline=None)
@given(numbers=st.sets(st.integers(), min_size=60, max_size=120), extra=st.sets(st.integers()))
def test_a_document_never_changes_sides(numbers, extra):
    """Whatever is added, and in any order; here validation never needs topping up."""
    def sides(texts: list[str]) -> dict[str, str]:
        places = [place(hashlib.sha256(text.encode()).digest()) for text in texts]
        limit = threshold(places, [1] * len(texts), val_fraction=0.4)
        return {text: side for side, text in divide([("", t) for t in texts], places, limit)}

    few, many = [str(n) for n in sorted(numbers)], [str(n) for n in numbers | extra]
    before, after = sides(few), sides(many)
    assert set(before.values()) == {"train", "val"}
    assert all(after[text] == side for text, side in before.items())
    for text, side in before.items():
        fraction = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64
        assert (side == "val") == (fraction < 0.4)


@settings(max_examples=100, deadline=None)
@given(places=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=30, unique=True),
       size=st.integers(1, 10**6), fraction=st.floats(0, 1, exclude_max=True))
def test_neither_side_is_ever_empty(places, size, fraction):
    limit = threshold(places, [size] * len(places), fraction)
    held = [place for place in places if place < limit]
    assert 0 < len(held) < len(places)
    assert len(held) >= MIN_VAL_SHARE * len(places)
    assert held == sorted(places)[:len(held)] or set(held) == set(sorted(places)[:len(held)])


def test_a_small_validation_split_is_topped_up_by_lowest_hash():
    places = [2**63 + 3, 2**63 + 1, 2**63 + 2, 2**64 - 1]
    limit = threshold(places, [1, 1, 1000, 99_000], 0.05)  # all lie above; 1% are 1,000 bytes
    assert [place < limit for place in places] == [False, True, True, False]


def test_twins_are_never_on_both_sides(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("same", encoding="utf-8")
    dataset = Dataset(prepare([str(tmp_path)], "twins", "byte", say=quiet))
    assert (dataset.train.n_tokens, dataset.val.n_tokens) == (10, 0)
    with pytest.raises(DataError, match="val split has 0 tokens"):
        dataset.val.require(4)


@pytest.mark.parametrize("fraction", (-0.1, 1, float("nan")))
def test_a_senseless_fraction_is_refused(folder, fraction):
    with pytest.raises(DataError, match="val_fraction"):
        prepare([folder], "x", "byte", val_fraction=fraction, say=quiet)


# --------------------------------------------------------------------------------------- the folder


@pytest.mark.parametrize("spec", ("byte", "bpe:300", "gpt2"))
def test_every_document_arrives_whole_behind_a_separator(folder, spec, gpt2_offline):
    dataset = Dataset(prepare([folder], "texts", spec, val_fraction=0.3, say=quiet))
    train, val = documents_of(dataset, "train"), documents_of(dataset, "val")
    assert sorted(train + val) == sorted(f"document {i} " * 20 for i in range(40))
    assert 3 < len(val) < 25
    for name, documents in (("train", train), ("val", val)):
        part = dataset.meta["splits"][name]
        assert part["documents"] == len(documents)
        assert part["bytes"] == sum(map(len, documents))
        assert part["tokens"] == getattr(dataset, name).n_tokens
        for shard in part["shards"]:
            raw = (dataset.folder / shard["file"]).read_bytes()
            assert hashlib.sha256(raw).hexdigest() == shard["sha256"]
    assert dataset.meta["skipped"] == {"empty": 1, "binary": 1}


def test_five_documents_are_enough(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"text {i}", encoding="utf-8")
    dataset = Dataset(prepare([str(tmp_path)], "five", "char", say=quiet))
    assert dataset.train.n_tokens + dataset.val.n_tokens == 5 * 6
    assert dataset.val.n_tokens >= 6


def test_several_sources_make_one_dataset(folder, text):
    dataset = Dataset(prepare([text, folder], "both", "byte", say=quiet))
    assert [s["documents"] for s in dataset.meta["sources"]] == [1, 40]
    assert [s["source"] for s in dataset.meta["sources"]] == ["my text.txt", "texts"]
    content = Path(text).read_bytes()
    assert dataset.meta["sources"][0]["sha256"] == hashlib.sha256(content).hexdigest()
    assert sum(part["documents"] for part in dataset.meta["splits"].values()) == 41


def test_the_same_text_gives_the_same_folder_to_the_byte(folder, tmp_path, monkeypatch):
    first = prepare([folder], "texts", "bpe:300", say=quiet)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BONSAI_DATA", str(tmp_path / "there"))
    monkeypatch.setattr(os, "getpid", lambda: 4242)
    monkeypatch.setattr(build, "BATCH", 100)  # batches are nothing that one sees either
    second = prepare(["./texts"], "texts", "bpe:300", say=quiet)
    names = sorted(path.name for path in first.iterdir())
    assert names == ["dataset.json", "tokenizer.json", "train_000000.bin", "val_000000.bin"]
    assert names == sorted(path.name for path in second.iterdir())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    assert Dataset(first).hash == Dataset(second).hash


def test_a_replacement_character_is_asked_for(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("café".encode("latin-1") * 10)
    with pytest.raises(DataError, match="not UTF-8"):
        prepare([str(path)], "x", "char", say=quiet)
    dataset = Dataset(prepare([str(path)], "x", "char", errors="replace", say=quiet))
    assert "\ufffd" in dataset.tokenizer.alphabet


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kB on Linux only")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    code = ("import sys, resource; from data.build import prepare; prepare([sys.argv[1]], "
            "sys.argv[2], 'byte', say=lambda line: None); "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
    peaks = []
    for documents in (150, 450):  # of about 100 kB: two batches, six batches
        for i in range(documents):
            (tmp_path / f"{i}.txt").write_bytes(b"%d " % i * 30_000)
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path), f"of-{documents}"],
                              stdout=subprocess.PIPE, check=True, cwd=CLONE)
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 15_000  # kB; the second corpus has 35,000 kB more


def test_no_text_at_all_is_refused(tmp_path, data_folder):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"no text in .*empty\.txt \(1 empty and 0 binary"):
        prepare([str(tmp_path / "empty.txt")], "x", "byte", say=quiet)
    assert not data_folder.exists()


@pytest.mark.parametrize("name", ("", ".", "..", ".x", "a/b", "a\\b", "-x", "x.", "a b", "é", "a\n",
                                  "x" * 101))
def test_a_name_that_is_no_folder_name_is_refused(text, name):
    with pytest.raises(DataError, match="expected up to 100 letters"):
        prepare([text], name, "byte", say=quiet)


def test_only_the_same_dataset_is_replaced(text, data_folder):
    say: list[str] = []
    prepare([text], "mine", "byte", say=say.append)
    prepare([text], "mine", "byte", say=say.append)
    with pytest.raises(DataError, match="with another tokenizer \\(byte, now char\\).*--overwrite"):
        prepare([text], "mine", "char", say=quiet)
    Path(text).write_text("other text", encoding="utf-8")
    with pytest.raises(DataError, match="made from other text.*--overwrite"):
        prepare([text], "mine", "byte", say=quiet)
    assert Dataset(data_folder / "mine").meta["sources"][0]["bytes"] == 40 * 29
    prepare([text], "mine", "char", overwrite=True, say=quiet)
    assert Dataset(data_folder / "mine").tokenizer.spec == "char"
    assert [path.name for path in data_folder.iterdir()] == ["mine"]


def test_what_is_no_dataset_is_never_replaced(text, data_folder):
    (data_folder / "photos").mkdir(parents=True)
    with pytest.raises(DataError, match="photos exists and is no dataset"):
        prepare([text], "photos", "byte", overwrite=True, say=quiet)


@pytest.mark.parametrize("stop", (KeyboardInterrupt, OSError("disk full")), ids=str)
def test_whatever_stops_it_leaves_nothing(text, data_folder, monkeypatch, stop):
    prepare([text], "mine", "byte", say=quiet)
    before = {path: path.read_bytes() for path in (data_folder / "mine").iterdir()}

    def fail(path, value):
        raise stop

    monkeypatch.setattr(build, "_write_json", fail)
    with pytest.raises((KeyboardInterrupt, OSError)):
        prepare([text], "mine", "byte", say=quiet)
    assert [path.name for path in data_folder.iterdir()] == ["mine"]
    assert {path: path.read_bytes() for path in (data_folder / "mine").iterdir()} == before


def test_a_source_that_changes_meanwhile_is_named(folder, data_folder, monkeypatch):
    def scan_then_edit(*args):
        found = scan(*args)
        (Path(folder) / "07.txt").write_text("edited", encoding="utf-8")
        return found

    monkeypatch.setattr(build, "scan", scan_then_edit)
    with pytest.raises(DataError, match=r"07\.txt changed while"):
        prepare([folder], "texts", "byte", say=quiet)
    assert list(data_folder.iterdir()) == []


@pytest.mark.parametrize("edit", ("remove", "add"))
def test_a_source_that_grows_or_shrinks_meanwhile_is_named(folder, monkeypatch, edit):
    def scan_then_edit(*args):
        found = scan(*args)
        if edit == "remove":
            (Path(folder) / "39.txt").unlink()
        else:
            (Path(folder) / "zz.txt").write_text("more", encoding="utf-8")
        return found

    monkeypatch.setattr(build, "scan", scan_then_edit)
    with pytest.raises(DataError, match="changed while"):
        prepare([folder], "texts", "byte", say=quiet)


# --------------------------------------------------------------------------------------- --dataset=


def test_a_prepared_name_is_taken(text, data_folder):
    made = prepare([text], "mine", "byte", say=quiet)
    assert resolve("mine", say=quiet) == made == data_folder / "mine"
    assert resolve("mine", "byte", say=quiet) == made
    assert resolve(str(made / "tokenizer.json").replace("tokenizer.json", ""), say=quiet) == made
    with pytest.raises(DataError, match="--tokenizer=byte, not char; drop --tokenizer, or make an"):
        resolve("mine", "char", say=quiet)
    with pytest.raises(DataError, match="--tokenizer=byte, not char"):
        resolve(str(made), "char", say=quiet)


def test_a_known_name_is_prepared_when_missing(data_folder, monkeypatch):
    said: list[str] = []
    monkeypatch.setitem(command.KNOWN, "stdlib", (["stdlib"], "char"))
    made = resolve("stdlib", say=said.append)
    assert made == data_folder / "stdlib" and Dataset(made).tokenizer.spec == "char"
    assert said[0] == "preparing stdlib"
    assert resolve("stdlib", say=pytest.fail) == made  # found, nothing said, nothing made


@pytest.mark.parametrize("first", ["char", "byte"])
def test_a_known_name_with_another_tokenizer_lies_elsewhere(data_folder, monkeypatch, first):
    """Whichever comes first: the plain name always has the tokenizer that belongs to it."""
    monkeypatch.setitem(command.KNOWN, "stdlib", (["stdlib"], "char"))
    made = {spec: resolve("stdlib", spec, say=quiet)
            for spec in sorted(("char", "byte"), key=lambda spec: spec != first)}
    assert made["char"] == data_folder / "stdlib" == resolve("stdlib", say=pytest.fail)
    assert made["byte"].name.startswith("stdlib-")
    assert resolve("stdlib", "byte", say=pytest.fail) == made["byte"]
    assert [Dataset(made[spec]).tokenizer.spec for spec in made] == list(made)
    tokenizer = str(made["byte"] / "tokenizer.json")  # as of a run that is to be gone on from
    assert Dataset(resolve("stdlib", tokenizer, say=quiet)).tokenizer.spec == "byte"


def test_the_user_s_text_is_prepared_once(text, data_folder, tmp_path):
    made = resolve(text, "byte", say=quiet)
    assert made.parent == data_folder and made.name.startswith("my-text-")
    assert resolve(text, "byte", say=pytest.fail) == made
    copy = tmp_path / "elsewhere" / "my text.txt"
    copy.parent.mkdir()
    copy.write_bytes(Path(text).read_bytes())
    assert resolve(str(copy), "byte", say=pytest.fail) == made  # the same content
    assert resolve(text, "char", say=quiet) != made
    copy.write_text("changed", encoding="utf-8")
    assert resolve(str(copy), "byte", say=quiet) != made
    assert Dataset(resolve(text, say=quiet)).tokenizer.spec == "bpe:2048"


def test_the_user_s_text_may_bring_a_tokenizer(text, folder):
    tokenizer = resolve(folder, "bpe:300", say=quiet) / "tokenizer.json"
    made = resolve(text, str(tokenizer), say=quiet)
    assert Dataset(made).tokenizer.hash == Dataset(tokenizer.parent).tokenizer.hash
    assert resolve(made.name, str(tokenizer), say=pytest.fail) == made
    other = resolve(text, "byte", say=quiet) / "tokenizer.json"
    with pytest.raises(DataError, match="drop --tokenizer"):
        resolve(made.name, str(other), say=quiet)


def test_a_path_is_relative_to_where_the_user_stands(text, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve("my text.txt", "byte", say=quiet) == resolve(text, "byte", say=quiet)
    assert resolve("texts", "byte", say=quiet) == resolve(folder, "byte", say=quiet)
    (tmp_path / "stdlib").write_text("my own library" * 9, encoding="utf-8")
    mine = resolve("./stdlib", "byte", say=quiet)
    assert Dataset(mine).meta["sources"][0]["bytes"] == 126


def test_a_folder_of_shards_is_taken_as_it_is(tmp_path):
    for name in ("train", "val"):
        (tmp_path / f"{name}_000000.bin").touch()
    assert resolve(str(tmp_path), say=pytest.fail) == tmp_path


@pytest.mark.parametrize("name, near", (("stdlb", "stdlib"), ("mien", "mine"), ("", ""),
                                        ("shakespear_char", "shakespeare_char")))
def test_an_unknown_name_gets_the_nearest(text, name, near):
    prepare([text], "mine", "byte", say=quiet)
    hint = f"did you mean {near}" if near else "none of the names mine, shakespeare"
    with pytest.raises(DataError, match=f"--dataset={name} is no file.*{hint}"):
        resolve(name, say=quiet)


@pytest.mark.parametrize("source, name", (
    ("a/My Text (1).txt", "My-Text-1"), (".hidden", "hidden"), ("😀.txt", "text"),
    ("a.b.txt", "a-b"), ("x" * 200, "x" * 80), ("folder/", "folder")))
def test_a_source_gives_a_sane_name(source, name):
    assert stem(source) == name


# -------------------------------------------------------------------------------------- the command


def run(*arguments: str, cwd: Path = CLONE, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "data.prepare", *arguments], capture_output=True, cwd=cwd,
        timeout=60, check=False, encoding="utf-8", errors="replace",
        env={**os.environ, "PYTHONPATH": str(CLONE), **environment})


def test_the_command_prepares_and_says_what_comes_next(text, data_folder):
    done = run(text)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("train: 1 documents, 1,044 bytes,") and "bytes each" in lines[0]
    assert str(data_folder / "my-text") in lines[-2]
    assert lines[-1] == "next: python train.py config/small.py --dataset=my-text"
    assert Dataset(data_folder / "my-text").meta["tokenizer"] == "bpe:2048"


def test_the_locale_does_not_matter(tmp_path, data_folder):
    """A C locale and no UTF-8 mode, text and file name with an emoji, a path with spaces."""
    path = tmp_path / "a folder" / "😀 text.txt"
    path.parent.mkdir()
    path.write_bytes("😀 née\n".encode() * 30)
    strange = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run(str(path), "--tokenizer=char", "--name=emoji", **strange)
    assert (done.returncode, done.stderr) == (0, "")
    dataset = Dataset(data_folder / "emoji")
    assert dataset.tokenizer.decode(dataset.train.read(0, 6)) == "😀 née\n"
    strange["BONSAI_DATA"] = str(tmp_path / "données 😀")
    assert "données 😀" in run(str(path), "--name=emoji", **strange).stdout
    for encoding in ("ascii", "cp1252", "utf-8"):
        done = run(str(path), "--name=emoji", PYTHONIOENCODING=encoding, **strange)
        assert (done.returncode, done.stderr) == (0, "")
    missing = run(str(path.with_name("😀.txt")), **strange)
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments, message", (
    ([], "required: SOURCE"),
    (["nowhere.txt"], "no file or folder 'nowhere.txt'"),
    (["TEXT", "--tokeniser=char"], "--tokeniser=char; did you mean --tokenizer?"),
    (["TEXT", "--nmae=x"], "--nmae=x; did you mean --name?"),
    (["TEXT", "-x"], "unrecognized arguments: -x"),
    (["TEXT", "--name"], "--name: expected one argument"),
    (["TEXT", "--name=../x"], "--name=../x: expected up to 100 letters"),
    (["TEXT", "--tokenizer=chr"], "did you mean char?"),
    (["TEXT", "--tokenizer=bpe:10"], "bpe:10: expected a size of 257"),
    (["TEXT", "--tokenizer=none.json"], "none.json is missing"),
    (["TEXT", "--errors=ignore"], "--errors: invalid choice"),
    (["TEXT", "--val_fraction=a"], "--val_fraction: invalid float value: 'a'"),
    (["TEXT", "--val_fraction=1"], "--val_fraction=1.0: expected at least 0 and below 1"),
))
def test_a_mistake_is_one_line_and_exit_2(text, data_folder, capsys, arguments, message):
    arguments = [text if argument == "TEXT" else argument for argument in arguments]
    try:
        code = command.main(arguments)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert message in err and err.count("\n") == 1
    assert not data_folder.exists()


def test_a_mistake_in_a_real_process_is_one_line_too(tmp_path):
    for arguments in (["nowhere.txt"], ["x", "--overwirte"], [str(tmp_path)]):
        done = run(*arguments)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert "Traceback" in run("nowhere.txt", "--debug").stderr


def test_a_folder_that_cannot_be_written_is_one_line(text, tmp_path):
    (tmp_path / "file").touch()
    done = run(text, BONSAI_DATA=str(tmp_path / "file"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "file" in done.stderr


def test_ctrl_c_is_one_line_and_exit_130(text, data_folder, monkeypatch, capsys):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(build.Tokenizer, "encode_batch", interrupted)
    assert command.main([text]) == 130
    assert capsys.readouterr().err == "interrupted; nothing was written\n"
    assert list(data_folder.iterdir()) == []


def test_a_known_name_brings_its_tokenizer(monkeypatch):
    calls: list[tuple] = []
    monkeypatch.setattr(command, "prepare", lambda *args: calls.append(args) or Path(args[1]))
    command.main(["shakespeare_char"])
    command.main(["stdlib", "--tokenizer=byte", "--name=x"])
    command.main(["stdlib", "shakespeare"])
    assert [call[:3] for call in calls] == [
        (["shakespeare"], "shakespeare_char", "char"), (["stdlib"], "x", "byte"),
        (["stdlib", "shakespeare"], "stdlib", "bpe:2048")]


def test_help_shows_every_default(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for part in ("bpe:2048", "shakespeare_char char", "default: strict", "default: 0.05", "1%"):
        assert part in " ".join(out.split())


def test_the_room_stands_alone():
    """Without torch, and without loading what only some tokenizers need."""
    code = ("import sys, data.prepare, data.dataset; heavy = {'torch', 'tiktoken', 'tokenizers', "
            "'model', 'kit'}; print(sorted(heavy & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CLONE,
                          check=True)
    assert done.stdout.strip() == "[]"


def test_dataset_json_says_how_it_was_split(folder, text):
    many = Dataset(prepare([folder], "many", "byte", say=quiet)).meta
    one = Dataset(prepare([text], "one", "byte", say=quiet)).meta
    assert int(many["val_below"], 16) >= int(0.05 * 2**64) and one["val_below"] is None


@pytest.mark.parametrize("splits", [None, {}, {"train": 3, "val": []}, {"train": {"shards": [1]}}])
def test_a_dataset_json_broken_by_hand_is_named(splits, tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 50)
    folder = prepare([str(tmp_path / "a.txt")], "broken", "byte", say=lambda text: None)
    meta = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps(meta | {"splits": splits}))
    with pytest.raises(DataError, match="dataset.json is broken"):
        Dataset(folder)
