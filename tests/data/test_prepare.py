"""From text to a dataset folder and back: the split, the files, the names, the command."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import canonical_hash
from data import prepare as command
from data.dataset import Dataset
from data.making import build
from data.making.build import prepare
from data.making.census import MIN_VAL_BYTES, MIN_VAL_SHARE, Rule, divide, place, threshold
from data.making.folder import replacing
from data.making.sources import Piece
from data.prepare import KNOWN, Recipe, resolve, stem
from kit.errors import UserError

CLONE = Path(__file__).parents[2]
SHAKESPEARE = CLONE.parent / "shared/data/tinyshakespeare.txt"


def quiet(line: str) -> None:
    pass


def visible(data_folder: Path) -> list[str]:
    """All that lies in the data folder but .cache, which has locks, and half-made things."""
    return sorted(p.name for p in data_folder.iterdir() if p.name != ".cache")


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
        census = SimpleNamespace(places=places, chars=0, again=lambda: enumerate(
            Piece("", text) for text in texts))
        return {piece.text: side for side, piece in divide(census, Rule(limit))}

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
    assert set(held) == set(sorted(places)[:len(held)])


def test_a_small_validation_split_is_topped_up_by_lowest_hash():
    places = [2**63 + 3, 2**63 + 1, 2**63 + 2, 2**64 - 1]
    limit = threshold(places, [1, 1, 1000, 99_000], 0.05)  # all lie above; 1% are 1,000 bytes
    assert [place < limit for place in places] == [False, True, True, False]


def test_twins_are_never_on_both_sides(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("same", encoding="utf-8")
    dataset = Dataset(prepare([str(tmp_path)], "twins", "byte", say=quiet))
    assert (dataset.train.n_tokens, dataset.val.n_tokens) == (10, 0)
    with pytest.raises(UserError, match="val split has 0 tokens"):
        dataset.val.require(4)


@pytest.mark.parametrize("fraction", (-0.1, 1, float("nan")))
def test_a_senseless_fraction_is_refused(folder, fraction):
    with pytest.raises(UserError, match="val_fraction"):
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
    assert dataset.meta["skipped"] == {"empty": 1, "binary": 1, "without target": 0}


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
    monkeypatch.setattr(build, "JOB", 100)  # batches are nothing that one sees either
    second = prepare(["./texts"], "texts", "bpe:300", workers=7, say=quiet)
    names = sorted(path.name for path in first.iterdir())
    assert names == ["dataset.json", "tokenizer.json", "train_000000.bin", "val_000000.bin"]
    assert names == sorted(path.name for path in second.iterdir())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    assert Dataset(first).hash == Dataset(second).hash


def test_a_replacement_character_is_asked_for(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("café".encode("latin-1") * 10)
    with pytest.raises(UserError, match="not UTF-8"):
        prepare([str(path)], "x", "char", say=quiet)
    dataset = Dataset(prepare([str(path)], "x", "char", errors="replace", say=quiet))
    assert "\ufffd" in dataset.tokenizer.alphabet


def test_half_a_pair_of_utf_16_is_refused_or_replaced(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "half \\ud800", "completion": "a"}\n')
    with pytest.raises(UserError, match="line 1 has a lone surrogate.*--errors=replace"):
        prepare([str(path)], "x", "byte", say=quiet)
    path.write_text('{"text": "fine"}\n{"text": "half \\ud800"}\n')
    with pytest.raises(UserError, match="line 2 has a lone surrogate.*--errors=replace"):
        prepare([str(path)], "x", "byte", say=quiet)
    dataset = Dataset(prepare([str(path)], "x", "byte", errors="replace", say=quiet))
    assert dataset.meta["sources"][0]["bytes"] == len("finehalf \ufffd".encode())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    code = ("import sys, re; from data.making.build import prepare; prepare([sys.argv[1]], "
            "sys.argv[2], 'byte', say=lambda line: None); "  # ru_maxrss would have the parent's
            "print(re.search('VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])")
    peaks = []
    for documents in (150, 450):  # of about 100 kB
        for i in range(documents):
            (tmp_path / f"{i}.txt").write_bytes(b"%d " % i * 30_000)
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path), f"of-{documents}"],
                              stdout=subprocess.PIPE, check=True, cwd=CLONE)
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 15_000  # kB; the second corpus has 35,000 kB more


def test_no_text_at_all_is_refused(tmp_path, data_folder):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"no text in .*empty\.txt \(skipped: 1 empty and 0"):
        prepare([str(tmp_path / "empty.txt")], "x", "byte", say=quiet)
    assert visible(data_folder) == []


@pytest.mark.parametrize("name", ("", ".", "..", ".x", "a/b", "a\\b", "-x", "x.", "a b", "é", "a\n",
                                  "x" * 101))
def test_a_name_that_is_no_folder_name_is_refused(text, name):
    with pytest.raises(UserError, match="expected up to 100 letters"):
        prepare([text], name, "byte", say=quiet)


def test_only_the_same_dataset_is_replaced(text, data_folder):
    say: list[str] = []
    prepare([text], "mine", "byte", say=say.append)
    prepare([text], "mine", "byte", say=say.append)
    with pytest.raises(UserError, match="with another tokenizer \\(byte, now char\\).*--overwrite"):
        prepare([text], "mine", "char", say=quiet)
    Path(text).write_text("other text", encoding="utf-8")
    with pytest.raises(UserError, match="made from other text.*--overwrite"):
        prepare([text], "mine", "byte", say=quiet)
    assert Dataset(data_folder / "mine").meta["sources"][0]["bytes"] == 40 * 29
    prepare([text], "mine", "char", overwrite=True, say=quiet)
    assert Dataset(data_folder / "mine").tokenizer.spec == "char"
    assert visible(data_folder) == ["mine"]


def test_what_is_no_dataset_is_never_replaced(text, data_folder):
    (data_folder / "photos").mkdir(parents=True)
    with pytest.raises(UserError, match="photos exists and is no dataset"):
        prepare([text], "photos", "byte", overwrite=True, say=quiet)


@pytest.mark.parametrize("stop", (KeyboardInterrupt, OSError("disk full")), ids=str)
def test_whatever_stops_it_leaves_nothing(text, data_folder, monkeypatch, stop):
    prepare([text], "mine", "byte", say=quiet)
    before = {path: path.read_bytes() for path in (data_folder / "mine").iterdir()}

    def fail(path, value):
        raise stop

    monkeypatch.setattr(build, "write_json", fail)
    with pytest.raises((KeyboardInterrupt, OSError)):
        prepare([text], "mine", "byte", say=quiet)
    assert visible(data_folder) == ["mine"]
    assert {path: path.read_bytes() for path in (data_folder / "mine").iterdir()} == before


@pytest.mark.parametrize("edit, named", (
    (lambda folder: (folder / "07.txt").write_text("edited"), r"07\.txt"),
    (lambda folder: (folder / "39.txt").write_text("edited"), r"39\.txt"),
    (lambda folder: (folder / "39.txt").unlink(), r"38\.txt"),  # what follows it has gone
    (lambda folder: (folder / "zz.txt").write_text("more"), "39"),
), ids=("first", "last", "shrunk", "grown"))
@pytest.mark.parametrize("spec", ("byte", "bpe:300"))
def test_a_source_that_changes_meanwhile_is_named(folder, data_folder, monkeypatch, edit, named,
                                                  spec):
    def edit_then_divide(*args):
        edit(Path(folder))
        return divide(*args)

    monkeypatch.setattr(build, "divide", edit_then_divide)
    with pytest.raises(UserError, match=f"{named}.* changed while the sources"):
        prepare([folder], "texts", spec, say=quiet)
    assert visible(data_folder) == []


# --------------------------------------------------------------------------------------- --dataset=


def test_a_prepared_name_is_taken(text, data_folder):
    made = prepare([text], "mine", "byte", say=quiet)
    assert resolve("mine", say=quiet) == made == data_folder / "mine"
    assert resolve("mine", "byte", say=quiet) == made
    assert resolve(str(made / "tokenizer.json").replace("tokenizer.json", ""), say=quiet) == made
    with pytest.raises(UserError, match="--tokenizer=byte, not char; drop --tokenizer, or make an"):
        resolve("mine", "char", say=quiet)
    with pytest.raises(UserError, match="--tokenizer=byte, not char"):
        resolve(str(made), "char", say=quiet)


def test_a_known_name_is_prepared_when_missing(data_folder, monkeypatch):
    said: list[str] = []
    monkeypatch.setitem(command.KNOWN, "stdlib", Recipe("stdlib", "char"))
    made = resolve("stdlib", say=said.append)
    assert made == data_folder / "stdlib" and Dataset(made).tokenizer.spec == "char"
    assert said[0] == "preparing stdlib"
    assert resolve("stdlib", say=pytest.fail) == made  # found, nothing said, nothing made


@pytest.mark.parametrize("first", ["char", "byte"])
def test_a_known_name_with_another_tokenizer_lies_elsewhere(data_folder, monkeypatch, first):
    """Whichever comes first: the plain name always has the tokenizer that belongs to it."""
    monkeypatch.setitem(command.KNOWN, "stdlib", Recipe("stdlib", "char"))
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
    with pytest.raises(UserError, match="drop --tokenizer"):
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
    hint = f"did you mean {near}" if near else "none of the names fineweb_edu_10b, mine"
    with pytest.raises(UserError, match=f"--dataset={name} is no file.*{hint}"):
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
    assert lines[0].startswith("1 documents, 1,160 bytes; shards will take 2,322 bytes")
    assert lines[1].startswith("train: 1 documents, 1,044 bytes,") and "bytes each" in lines[1]
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
    (["TEXT", "--name="], "--name= is empty"),
    (["TEXT", "--tokenizer="], "--tokenizer= is empty"),
    (["TEXT", "--text_column="], "--text_column= is empty"),
    (["TEXT", "--tokenizer=byte", "--workers=-1"], "--workers=-1: expected 0 to 1024"),
    (["TEXT", "--tokenizer=gpt2", "--align=line"], "--align: invalid choice"),
    ([""], "there is no file or folder ''"),
    (["-"], "standard input has no name; give the dataset one: --name=NAME"),
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
    assert not data_folder.exists() or visible(data_folder) == []


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

    monkeypatch.setattr(build, "encode", interrupted)
    assert command.main([text]) == 130
    assert capsys.readouterr().err == "interrupted; nothing was written\n"
    assert visible(data_folder) == []


def test_a_known_name_brings_its_tokenizer(monkeypatch):
    calls: list[tuple] = []
    monkeypatch.setattr("data.making.build.prepare",
                        lambda *args, **options: calls.append(args) or Path(args[1]))
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
            "'model', 'kit.device', 'data.making'}; print(sorted(heavy & set(sys.modules)))")
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
    with pytest.raises(UserError, match="dataset.json is broken"):
        Dataset(folder)


# ------------------------------------------------------------------------- workers, locks, crashes


@pytest.mark.parametrize("spec", ("byte", "char", "bpe:300", "gpt2"))
def test_the_number_of_workers_changes_no_byte(folder, text, spec, tmp_path, monkeypatch,
                                               gpt2_offline):
    monkeypatch.setattr(build, "JOB", 300)
    made = []
    for workers in (0, 1, 2, 9):
        monkeypatch.setenv("BONSAI_DATA", str(tmp_path / f"by {workers}"))
        there = prepare([text, folder], "mixed", spec, workers=workers, say=quiet)
        made.append({path.name: path.read_bytes() for path in there.iterdir()})
    assert made[0] == made[1] == made[2] == made[3] and len(made[0]) == 4


@pytest.mark.parametrize("workers", (0, 1, 3))
def test_a_worker_s_error_names_the_document(folder, data_folder, monkeypatch, workers):
    """A mistake in one line; a fault of ours with its traceback, and the document's name too."""
    monkeypatch.setattr(build, "JOB", 300)

    def fail(error):
        def encode_array(self, text, unknown="error"):
            if "document 23" in text:
                raise error
            return np.frombuffer(text.encode(), np.uint8)
        monkeypatch.setattr("data.tokenizer.ByteTokenizer.encode_array", encode_array)

    fail(UserError("cannot be encoded"))
    with pytest.raises(UserError, match=r"23\.txt: cannot be encoded"):
        prepare([folder], "x", "byte", workers=workers, say=quiet)
    fail(ZeroDivisionError("by us"))
    with pytest.raises(RuntimeError, match=r"23\.txt: by us") as caught:
        prepare([folder], "x", "byte", workers=workers, say=quiet)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert visible(data_folder) == []


def test_an_error_stops_the_workers_at_once(tmp_path, monkeypatch):
    """No job that has not begun is begun for the sake of an error."""
    for i in range(50):
        (tmp_path / f"{i:02d}.txt").write_text(f"document {i}", encoding="utf-8")
    begun = []

    def encode(job, tokenizer):
        begun.append(job)
        time.sleep(0.01)
        raise UserError("no")

    monkeypatch.setattr(build, "JOB", 1)
    monkeypatch.setattr(build, "encode", encode)
    with pytest.raises(UserError):
        prepare([str(tmp_path)], "x", "byte", workers=2, say=quiet)
    assert len(begun) < 10


@pytest.mark.parametrize("workers", (-1, 100_000))
def test_a_senseless_number_of_workers_is_refused(text, workers):
    with pytest.raises(UserError, match=f"--workers={workers}: expected 0 to"):
        prepare([text], "x", "byte", workers=workers, say=quiet)


def test_two_that_prepare_the_same_wait_for_each_other(text, data_folder):
    """As processes of one training do that all find their dataset missing."""
    with replacing("mine"):
        waiting = subprocess.Popen(
            [sys.executable, "-m", "data.prepare", text, "--name=mine"], cwd=CLONE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert waiting.stdout.readline() == "waiting for another process that is preparing mine\n"
        assert waiting.poll() is None and visible(data_folder) == []
    out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0 and "written to" in out and err == ""


def test_what_was_prepared_while_one_waited_is_taken(text, monkeypatch):
    made = prepare([text], "mine", "byte", say=quiet)
    before = (made / "dataset.json").stat().st_mtime_ns
    assert prepare([text], "mine", "char", again=False, say=pytest.fail) == made
    assert (made / "dataset.json").stat().st_mtime_ns == before


def test_what_a_killed_process_left_is_removed(text, data_folder):
    (data_folder / ".cache").mkdir(parents=True)
    (data_folder / ".cache" / "other.lock").touch()  # as whoever built it has left
    for leftover in (".tmp-mine", ".tmp-other", ".old-other", ".tmp-theirs", ".old-photos"):
        (data_folder / leftover).mkdir()
        (data_folder / leftover / "train_000000.bin").write_bytes(bytes(100))
    with replacing("other"):  # at work: its folder is not touched
        (data_folder / ".tmp-other").mkdir()
        prepare([text], "mine", "byte", say=quiet)
        assert visible(data_folder) == [".old-photos", ".tmp-other", ".tmp-theirs", "mine"]
        (data_folder / ".tmp-other").rmdir()
    (data_folder / ".tmp-other").mkdir()
    prepare([text], "mine", "byte", say=quiet)
    assert visible(data_folder) == [".old-photos", ".tmp-theirs", "mine"]  # not ours


def test_a_dataset_killed_between_two_renames_comes_back(text, data_folder):
    made = prepare([text], "mine", "byte", say=quiet)
    os.rename(made, data_folder / ".old-mine")
    prepare([text], "another", "byte", say=quiet)
    assert visible(data_folder) == ["another", "mine"]
    assert Dataset(made).tokenizer.spec == "byte"


def test_a_script_without_a_main_guard_may_prepare_where_processes_are_spawned(text, tmp_path):
    """As on a Mac or Windows: nothing is started anew, so no guard is needed."""
    script = tmp_path / "mine.py"
    script.write_text("import multiprocessing, sys\nmultiprocessing.set_start_method('spawn')\n"
                      "from data.making.build import prepare\n"
                      "print(prepare([sys.argv[1]], 'mine', 'bpe:270', workers=2))\n")
    done = subprocess.run([sys.executable, str(script), text], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(CLONE)}, timeout=60, check=True)
    assert done.stdout.count("written to") == 1 and Dataset(done.stdout.split("\n")[-2]).train


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 here")
def test_kill_9_at_any_moment_costs_nothing_but_time(tmp_path, data_folder):
    """Ten random moments; the same command again ends in the shards of an undisturbed run."""
    source = tmp_path / "texts.jsonl"
    with open(source, "w", encoding="utf-8") as file:
        for i in range(3000):
            file.write(json.dumps({"text": f"document {i}: " + f"{i * i} née 😀\n" * 40}) + "\n")
    command = [sys.executable, "-m", "data.prepare", str(source), "--name=x", "--tokenizer=bpe:300"]

    def start() -> subprocess.Popen:
        return subprocess.Popen(command, cwd=CLONE, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)

    def content() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in (data_folder / "x").iterdir()}

    begun = time.perf_counter()
    assert start().wait() == 0
    seconds, expected, dice = time.perf_counter() - begun, content(), random.Random(7)
    for _ in range(10):
        if dice.random() < 0.5:
            shutil.rmtree(data_folder / "x", ignore_errors=True)
        process = start()
        time.sleep(dice.uniform(0.3, 1) * seconds)
        process.kill()
        process.wait()
        if (data_folder / "x").exists():  # whole, or not there at all
            assert content() == expected
    assert start().wait() == 0
    assert content() == expected and visible(data_folder) == ["x"]


# --------------------------------------------------------------------- long texts, samples, recipes


def test_a_long_text_in_pieces_gives_the_same_tokens(tmp_path, monkeypatch, gpt2_offline):
    content = "".join(f"line {i}: it's {i * 37 % 1000}, isn't it?\n\n  " for i in range(2000))
    (tmp_path / "long.txt").write_text(content, encoding="utf-8", newline="")
    whole = [prepare([str(tmp_path / "long.txt")], f"whole-{spec[:3]}", spec, say=quiet)
             for spec in ("char", "byte", "gpt2", "bpe:400")]
    monkeypatch.setattr("data.making.formats.PIECE", 1000)
    monkeypatch.setattr(build, "JOB", 3000)
    for folder in whole:
        spec = Dataset(folder).tokenizer.spec
        parts = prepare([str(tmp_path / "long.txt")], f"parts-{spec[:3]}", spec, say=quiet)
        for path in folder.glob("*.bin"):
            assert (parts / path.name).read_bytes() == path.read_bytes()


CHAT = [{"messages": [{"role": "user", "content": f"{i}?"},
                      {"role": "assistant", "content": f"<|endoftext|> it is {i * i}."}]}
        for i in range(60)] + [{"prompt": "only asked", "completion": ""}]


@pytest.fixture
def chat(tmp_path) -> str:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in CHAT), encoding="utf-8")
    return str(path)


def test_instruction_data_is_prepared_with_its_mask(chat, monkeypatch):
    monkeypatch.setattr(build, "JOB", 500)
    dataset = Dataset(prepare([chat], "chat", "byte", val_fraction=0.2, say=quiet))
    assert dataset.kind == "instruct" and dataset.meta["skipped"]["without target"] == 1
    seen = set()
    for samples in (dataset.train, dataset.val):
        bounds = [*samples.starts.tolist(), samples.n_tokens]
        part = dataset.meta["splits"][samples.name]
        assert part["documents"] == len(samples.starts) and part["tokens"] == samples.n_tokens
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            ids = samples.tokens.read(start, end - start)
            mask = samples.mask.read(start, end - start)
            assert ids[0] == ids[-1] == 256
            said = dataset.tokenizer.decode(ids[mask == 1][:-1])
            i = int(bytes(ids[6:8].astype(np.uint8).tolist()).decode().rstrip("?"))
            assert said == CHAT[i]["messages"][1]["content"]
            seen.add(i)
    assert seen == set(range(60))
    dataset.verify()


def test_instruction_data_needs_a_separator_and_stands_alone(chat, text):
    with pytest.raises(UserError, match="--tokenizer=char has no separator, which instruction"):
        prepare([chat], "x", "char", say=quiet)
    with pytest.raises(UserError, match="both plain text and instruction samples"):
        prepare([chat, text], "x", "byte", say=quiet)


def test_rows_may_be_aligned_to_documents(folder):
    dataset = Dataset(prepare([folder], "aligned", "byte", align="document", say=quiet))
    split, size = dataset.train, 300  # documents have about 240 bytes: one begins in each window
    rows = split.rows(0, split.epoch_rows(size), size, seed=1)
    assert (rows[:, 0] == 256).all()
    assert len({row.tobytes() for row in rows}) == len(rows)  # each begins with another one
    short = split.rows(0, split.epoch_rows(50), 50, seed=1)
    assert 0 < (short[:, 0] == 256).sum() < len(short)
    free = Dataset(dataset.folder, align="off").train.rows(0, 20, size, seed=1)
    assert (free[:, 0] != 256).any()
    assert (split.rows(7, 3, size, seed=1) == rows[7:10]).all()
    asked = Dataset(prepare([folder], "off", "byte", say=quiet), align="document")
    assert (asked.train.rows(0, 20, size, seed=1)[:, 0] == 256).all()


def test_without_separators_nothing_can_be_aligned(text, chat):
    with pytest.raises(UserError, match="--tokenizer=char has no separator, which --align"):
        prepare([text], "x", "char", align="document", say=quiet)
    plain = prepare([text], "char", "char", say=quiet)
    with pytest.raises(UserError, match="--align=document: .* without separators"):
        Dataset(plain, align="document")
    with pytest.raises(UserError, match="--align=document: .* instruction data"):
        Dataset(prepare([chat], "chat", "byte", say=quiet), align="document")


@pytest.mark.parametrize("name", ("chat", "texts"))
def test_verify_reads_every_byte(chat, folder, name):
    made = prepare([chat if name == "chat" else folder], name, "byte", say=quiet)
    Dataset(made, verify=True)
    for path in sorted(made.glob("*.bin")):
        raw = path.read_bytes()
        at = len(raw) - 8  # of the last tokens, and another one that there is, or a start
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1:])
        with pytest.raises(UserError, match=f"{path.name} has SHA-256 .* dataset.json says"):
            Dataset(made, verify=True)
        path.write_bytes(raw)


def test_large_corpora_hold_out_a_stated_number_of_bytes():
    places = list(range(0, 2**64, 2**64 // 1000))
    limit = threshold(places, [10**8] * len(places), 0.0005)  # 100 GB
    held = sum(place < limit for place in places)
    assert held * 10**8 >= MIN_VAL_BYTES and held == 1


def test_recipes_are_names_of_the_hub_without_scripts():
    assert {recipe.source for recipe in KNOWN.values() if recipe.source.startswith("hf:")} == {
        "hf:roneneldan/TinyStories", "hf:Skylion007/openwebtext",
        "hf:HuggingFaceFW/fineweb-edu:sample-10BT"}
    assert all(0 < recipe.val_fraction <= 0.01 for recipe in KNOWN.values()
               if recipe.source.startswith("hf:"))


def test_what_is_held_out_of_a_single_text_can_be_chosen(text):
    content = Path(text).read_bytes().decode()
    for fraction in (0.25, 0.0):
        dataset = Dataset(prepare([text], "x", "char", val_fraction=fraction, overwrite=True,
                                  say=quiet))
        assert dataset.train.n_tokens == int((1 - fraction) * len(content))


@pytest.mark.parametrize("option, words", (
    ({"val_fraction": 0.5}, "with another --val_fraction"),
    ({"align": "document"}, "with another --align"),
    ({"tokenizer": "bpe:300"}, "with another tokenizer \\(byte, now bpe:300\\)"),
    ({"val_fraction": 0.5, "align": "document"}, "with another --align and with another"),
))
def test_another_split_or_alignment_is_no_silent_replacement(folder, option, words):
    """A run that goes on would have held-out documents among those it trains on."""
    prepare([folder], "mine", "byte", say=quiet)
    with pytest.raises(UserError, match=f"mine was made {words}.*; choose"):
        prepare([folder], "mine", **{"tokenizer": "byte", **option}, say=quiet)
    prepare([folder], "mine", **{"tokenizer": "byte", **option}, overwrite=True, say=quiet)


def test_alignment_is_refused_before_a_set_of_samples_is_written(chat, data_folder):
    with pytest.raises(UserError, match="--align=document is for texts"):
        prepare([chat], "chat", "byte", align="document", say=quiet)
    assert visible(data_folder) == []


def test_a_single_sample_is_said_to_be_too_few(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}')
    said: list[str] = []
    dataset = Dataset(prepare([str(path)], "one", "byte", say=said.append))
    assert dataset.meta["val_below"] == "0" * 16 and dataset.val.n_tokens == 0
    assert any(line.startswith("val is empty") for line in said)
    with pytest.raises(UserError, match="none of the val split's 0 samples"):
        dataset.val.require(8)


def test_samples_that_nobody_answers_are_explained(tmp_path):
    path = tmp_path / "bot.jsonl"
    path.write_text('{"messages": [{"role": "Bot", "content": "hello"}]}\n' * 3)
    with pytest.raises(UserError, match="3 samples without a target, which is what the role `ass"):
        prepare([str(path)], "x", "byte", say=quiet)


def test_json_lines_may_come_through_a_pipe(data_folder):
    done = subprocess.run([sys.executable, "-m", "data.prepare", "-", "--name=piped"], cwd=CLONE,
                          input='{"text": "abc "}\n' * 3, capture_output=True, text=True)
    assert done.returncode == 0 and "its lines are taken as documents" in done.stdout
    assert Dataset(data_folder / "piped").meta["sources"][0]["documents"] == 3


def test_a_line_is_in_the_file_when_it_is_said(tmp_path, monkeypatch):
    """Whatever the command prints, as data.inspect does."""
    with open(tmp_path / "log", "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        seen = []
        command.run(lambda: (print("a line"), seen.append((tmp_path / "log").read_text())), False)
    assert seen == ["a line\n"]


@pytest.mark.skipif(os.name == "nt", reason="a shell's way to close a stream")
@pytest.mark.parametrize("streams", ("1>&-", "2>&-", "1>&- 2>&-", "| true", "1>/dev/full", "0<&-"))
def test_streams_that_nobody_reads_stop_nothing(text, data_folder, streams):
    line = f"set -o pipefail; {sys.executable} -m data.prepare '{text}' --name=x {streams}"
    done = subprocess.run(["bash", "-c", line], cwd=CLONE, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert Dataset(data_folder / "x").train.n_tokens


@pytest.mark.parametrize("edit, where", (
    ({"kind": "vision"}, "of kind 'vision'"), ({"kind": None}, "of kind None"),
    ({"sources": None}, "sources"), ({"sources": [{}]}, r"sources\[0\].source"),
    ({"sources": []}, "sources"), ({"skipped": 3}, "skipped"), ({"val_below": 7}, "val_below"),
    ({"val_below": "no"}, "val_below"), ({"name": 3}, "name"), ({"kind": "instruct"}, "mask"),
), ids=str)
def test_a_dataset_json_of_another_shape_is_named(text, edit, where):
    made = prepare([text], "mine", "byte", say=quiet)
    meta = json.loads((made / "dataset.json").read_text())
    (made / "dataset.json").write_text(json.dumps(meta | edit))
    with pytest.raises(UserError, match=where):
        Dataset(made)


def test_a_dataset_json_without_its_threshold_is_named(text):
    made = prepare([text], "mine", "byte", say=quiet)
    meta = json.loads((made / "dataset.json").read_text())
    del meta["val_below"]
    (made / "dataset.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="broken at val_below"):
        Dataset(made)


@pytest.mark.parametrize("name", ("../mine/train_000000.bin", "/etc/passwd", "..", "a\\b", ""))
def test_a_dataset_names_no_file_of_another_folder(text, name):
    made = prepare([text], "mine", "byte", say=quiet)
    meta = json.loads((made / "dataset.json").read_text())
    meta["splits"]["train"]["shards"][0]["file"] = name
    (made / "dataset.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="no file of this folder|is missing|no token shard"):
        Dataset(made)


def test_one_file_of_tokens_is_no_text(text):
    made = prepare([text], "mine", "byte", say=quiet)
    with pytest.raises(UserError, match="is one file of tokens; give the folder"):
        resolve(str(made / "train_000000.bin"), say=quiet)
    with pytest.raises(UserError, match="train_000000.bin is not read as it is"):
        prepare([str(made / "train_000000.bin")], "x", "byte", say=quiet)
    for other in ("train_000000.bin", "dataset.json"):
        (made / other).unlink()
    with pytest.raises(UserError, match="neither dataset.json nor train shards"):
        Dataset(resolve(str(made), say=quiet))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk at hand")
def test_what_the_system_refuses_has_a_way_out(text, monkeypatch, capsys):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build, "_write_shards", full)
    assert command.main([text, "--name=x"]) == 2
    assert "make room, or set BONSAI_DATA" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of that kind")
@pytest.mark.parametrize("share", (0.5, 0.999))
def test_a_disk_that_fills_up_at_any_write_leaves_no_torn_set(tmp_path, data_folder, share):
    """The last write counts too, and what the operating system writes only in part."""
    (tmp_path / "text.txt").write_text("some text " * 60_000, encoding="utf-8")
    limit = int(share * 2 * 0.9 * 600_000)  # bytes of a file: less than the shard of train has
    code = ("import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
            f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
            "from data.prepare import main; sys.exit(main(sys.argv[1:]))")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "text.txt"), "--name=x",
                           "--tokenizer=byte"], cwd=CLONE, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert visible(data_folder) == []


def test_a_vocabulary_learned_from_other_text_is_not_said_to_be_another_one(folder):
    prepare([folder], "mine", "bpe:300", say=quiet)
    (Path(folder) / "new.txt").write_text("a new note " * 30, encoding="utf-8")
    with pytest.raises(UserError, match="mine was made from other text; choose"):
        prepare([folder], "mine", "bpe:300", say=quiet)


def test_a_file_of_many_stories_is_split_on_request(tmp_path, data_folder, capsys):
    (tmp_path / "stories.txt").write_text("<|endoftext|>".join(f"story {i} " for i in range(30)))
    assert command.main([str(tmp_path / "stories.txt"), "--split_at=<|endoftext|>",
                         "--tokenizer=byte"]) == 0
    assert Dataset(data_folder / "stories").meta["sources"][0]["documents"] == 30
    assert command.main([str(tmp_path / "stories.txt"), "--tokenizer=byte", "--name=one"]) == 0
    assert Dataset(data_folder / "one").meta["sources"][0]["documents"] == 1


def test_a_path_is_never_taken_for_a_prepared_name(tmp_path, monkeypatch, data_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "poems").mkdir()
    for path in (tmp_path / "notes", tmp_path / "poems" / "a.txt"):
        path.write_text("some text " * 30)
    for name, source in (("notes", "notes"), ("poems", "poems")):
        prepare([source], name, "char", say=quiet)
        assert resolve(name, say=pytest.fail) == data_folder / name
        for path in (f"./{name}", f"{name}/" if name == "poems" else str(tmp_path / name)):
            made = resolve(path, "byte", say=quiet)
            assert made.name.startswith(f"{name}-") and Dataset(made).tokenizer.spec == "byte"


def test_files_are_closed_when_a_preparation_fails(text, monkeypatch):
    """Or Windows would keep the folder that is to be removed."""
    opened = []
    begin = build.ShardWriter._begin
    monkeypatch.setattr(build.ShardWriter, "_begin",
                        lambda self: (begin(self), opened.append(self._file))[0])
    monkeypatch.setattr(build.ShardWriter, "write", lambda self, ids: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare([text], "x", "byte", say=quiet)
    assert len(opened) == 2 and all(file.closed for file in opened)


def test_a_set_of_the_first_release_opens_with_the_hash_it_had(text):
    """Or every run that goes on with one would say that its data changed."""
    made = prepare([text], "mine", "byte", say=quiet)
    meta = json.loads((made / "dataset.json").read_text())
    for key in ("kind", "align", "val_fraction"):  # it did not have these
        del meta[key]
    (made / "dataset.json").write_text(json.dumps(meta))
    old = Dataset(made)
    assert old.kind == "text" and old.hash == canonical_hash(meta)
    assert prepare([text], "mine", "byte", say=quiet) == made  # made in the same way
