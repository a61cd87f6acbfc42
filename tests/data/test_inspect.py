"""What `python -m data.inspect` says: numbers counted by hand, damage, odd data, odd consoles."""

import io
import json
import os
import random
import statistics
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from data import inspect as command
from data.dataset import SPLITS, Dataset
from data.inspect import Scan, quantile, visible
from data.making.writer import ShardWriter
from data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer

CLONE = Path(__file__).parents[2]
EOT = 256
MASK, STARTS = "mask", "starts"


def write(folder: Path, split: str, ids: list[int], kind: str = "tokens", vocab_size: int = 257,
          shard_tokens: int = 1000) -> list[dict]:
    writer = ShardWriter(folder, split, vocab_size, shard_tokens, kind)
    writer.write(np.array(ids, np.int64))
    writer.finish()
    return writer.shards


def dataset_of(folder: Path, train: list[int], val: list[int], tokenizer: Tokenizer | None = None,
               sidecars: dict | None = None, shard_tokens: int = 1000, **meta) -> Path:
    """A dataset folder of these ids, as data.prepare writes it."""
    folder.mkdir(parents=True)
    tokenizer, splits = tokenizer or ByteTokenizer(), {}
    for name, ids in zip(SPLITS, (train, val), strict=True):
        splits[name] = {"documents": list(ids).count(tokenizer.eot), "bytes": 1, "tokens": len(ids),
                        "shards": write(folder, name, ids, vocab_size=tokenizer.vocab_size,
                                        shard_tokens=shard_tokens)}
        for kind, numbers in (sidecars or {}).get(name, {}).items():
            splits[name][kind] = write(folder, name, numbers, kind, 0)
    meta = {"format": 1, "name": "mine", "tokenizer": tokenizer.spec, "splits": splits,
            "tokenizer_hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size,
            "separator": tokenizer.eot, "val_below": None, "skipped": {"empty": 2, "binary": 1},
            "sources": [{"source": "a.txt", "sha256": "ab" * 32, "documents": 3, "bytes": 1234}],
            **meta}
    (folder / "dataset.json").write_text(json.dumps(meta), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_json()), encoding="utf-8")
    return folder


def tokens_of(*documents: str) -> list[int]:
    return [id for text in documents for id in (EOT, *text.encode())]


@pytest.fixture
def mine(tmp_path) -> Path:
    """Documents of 5, 30, 200, 0 and 7 tokens in train, one of 11 in val; shards of 100."""
    train = tokens_of("hello", "x" * 30, "line\n\x1b[31m" * 20, "", "abc!!!!")
    return dataset_of(tmp_path / "mine", train, tokens_of("held out ab"), shard_tokens=100)


@pytest.fixture
def chat(tmp_path) -> Path:
    """Two samples in train, one in val; what is trained on is in capitals, and the end after it."""
    samples = {"train": ["hi|HELLO<>|", "one|TWO<>|three|FOUR<>|"], "val": ["a|B<>|"]}
    ids, sidecars = {}, {}
    for name, texts in samples.items():
        ids[name], mask, starts = [], [], []
        for text in texts:
            starts.append(len(ids[name]))
            for part in text.split("|"):
                end = [EOT] if part.endswith("<>") else []
                said = list(part.removesuffix("<>").encode())
                ids[name] += said + end
                mask += [int(bool(end))] * len(said + end)
        sidecars[name] = {MASK: mask, STARTS: starts}
    return dataset_of(tmp_path / "chat", ids["train"], ids["val"], sidecars=sidecars,
                      kind="instruct")


def said(capsys, *arguments: object) -> str:
    assert command.main([str(a) for a in arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def mistake(capsys, *arguments: object) -> str:
    try:
        code = command.main([str(a) for a in arguments])
    except SystemExit as stop:
        code = stop.code
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1
    return err


# ------------------------------------------------------------------------------------- the numbers


def test_the_numbers_are_those_counted_by_hand(mine, capsys):
    out = said(capsys, mine)
    lines = {line[:11].strip(): line[11:] for line in out.splitlines() if line[:1].strip()}
    assert lines["dataset"] == f"mine in {mine}"
    assert lines["tokenizer"] == "byte, 257 ids, separator 256 <|endoftext|>"
    assert lines["source"] == "a.txt: 3 documents, 1,234 bytes, sha256 abababababab"
    assert lines["skipped"] == "2 empty, 1 binary"
    assert lines["split"].startswith("one text was cut")
    assert lines["hashes"] == "4 shards as recorded"
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()
            if line.startswith(SPLITS)}
    assert rows["train"] == ["5", "242", "247", "0.98", "3", "95.4%"]  # 5 separators, 242 bytes
    assert rows["val"] == ["1", "11", "12", "0.92", "1", "4.6%"]
    assert lines["lengths"] == "min 0, median 7, mean 42.2, p90 200, max 200 tokens"
    used = len(set("hello" + "x" + "line\n\x1b[31m" + "abc!!!!" + "held out ab")) + 1
    assert lines["ids"] == f"{257 - used} of 257 are never used ({(257 - used) / 257:.1%})"
    text = "line\\n\\x1b[31m" * 6  # sixty characters
    assert lines["longest"] == f"200 tokens of train from 38: {text}"
    assert "30 tokens of train from 7: xxxxxx" in out and "11 tokens of val from 1: held" in out
    assert "\x1b" not in out


def test_what_is_recorded_goes_before_what_is_found(tmp_path, capsys):
    folder = dataset_of(tmp_path / "x", [1, 2, 3], [4], val_below=f"{2**60:016x}")
    meta = json.loads((folder / "dataset.json").read_bytes())
    meta["splits"]["train"]["documents"] = 4321
    (folder / "dataset.json").write_text(json.dumps(meta), encoding="utf-8")
    out = said(capsys, folder)
    assert "train       4,321" in out
    assert "the lowest 6.2% of all hashes" in out


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.sampled_from([1, 2, EOT]), max_size=60), chunk=st.integers(1, 9))
def test_documents_are_found_across_chunks_and_shards(tmp_path_factory, ids, chunk):
    folder = dataset_of(tmp_path_factory.mktemp("x") / "x", ids, [7], shard_tokens=7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "CHUNK", chunk)
        scan = Scan(Dataset(folder), "train", tqdm(disable=True))
    documents, at = [], 0  # (tokens, first position); what precedes the first separator is one
    for text in "".join(map(chr, ids)).split(chr(EOT)):
        if ids and (at or text):
            documents.append((len(text), at))
        at += len(text) + 1
    assert scan.lengths == Counter(n for n, _ in documents)
    assert scan.longest == sorted(documents, key=lambda found: -found[0])[:3]
    assert scan.counts.sum() == len(ids) and scan.counts[EOT] == ids.count(EOT)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1))
def test_a_quantile_is_one_of_the_lengths(lengths):
    assert quantile(Counter(lengths), 0.5) == statistics.median_low(lengths)
    nearest = sorted(lengths)[-(-9 * len(lengths) // 10) - 1]
    assert quantile(Counter(lengths), 0.9) == nearest


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_nothing_reaches_a_terminal_that_it_obeys(text):
    assert visible(text).isprintable()
    if text.isprintable():
        assert visible(text) == text


def test_char_has_no_documents_to_tell_apart(tmp_path, capsys):
    tokenizer = CharTokenizer("abc")
    out = said(capsys, dataset_of(tmp_path / "c", [0, 1, 2, 0] * 9, [1] * 4, tokenizer))
    assert "char, 3 ids, no separator between documents" in out
    assert "min 4, median 4, mean 20.0, p90 36, max 36 tokens" in out
    assert "each split counts as one document" in out and "0 of 3 are never used (0.0%)" in out


def test_published_shards_are_inspected_too(tmp_path, capsys):
    write(tmp_path, "news_train", tokens_of("abc", "de")[1:])  # begins within a document
    write(tmp_path, "news_val", tokens_of("fgh"))
    out = said(capsys, tmp_path, "--tokenizer=byte")
    assert f"dataset    {tmp_path.name} in {tmp_path}\n" in out and "as published" in out
    assert "none are recorded; the ids in 2 shards are of the vocabulary" in out
    assert "train           2               5               6         0.83       1" in out
    assert "3 tokens of train from 0: abc" in out and "2 tokens of train from 4: de" in out


def test_an_empty_validation_split_is_no_trouble(tmp_path, capsys):
    folder = dataset_of(tmp_path / "x", tokens_of("all of it"), [])
    out = said(capsys, folder)
    assert "val             0               0               0         0.00       1    0.0%" in out
    assert "min 9, median 9, mean 9.0, p90 9, max 9 tokens" in out
    assert "0 tokens of val from 0" in said(capsys, folder, "--split=val")
    assert "x has shards without tokens" in mistake(capsys, dataset_of(tmp_path / "y/x", [], []))


# -------------------------------------------------------------------------------------- the window


def window_of(out: str) -> str:
    """The text of the window; each of its lines has a margin."""
    lines = out[out.index("\nwindow"):].splitlines()
    return "\n".join(line[4:] for line in lines if line.startswith("  | "))


@pytest.mark.parametrize("align", (None, "document"))
def test_the_window_is_the_first_that_training_sees(tmp_path, capsys, align):
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdef", k=rng.randrange(30))) for _ in range(200)]
    folder = dataset_of(tmp_path / "x", tokens_of(*texts), tokens_of("abc"), align=align)
    dataset = Dataset(folder)
    for n in (64, 10):
        row = dataset.train.rows(0, 1, n, 1337)[0, :n].tolist()
        assert (row[0] == EOT) == (align is not None and n == 64)
        out = said(capsys, folder, *[f"--tokens={n}"] * (n != 64))
        assert window_of(out) == dataset.tokenizer.decode(row)
        at = out.partition("window ")[2].split()[5]
        assert dataset.train.read(int(at), n).tolist() == row


def test_the_window_is_where_one_asks_for_it(mine, capsys):
    out = said(capsys, mine, "--at=38", "--tokens=12")
    assert "window     12 tokens of train from 38\n  | line\n  | \\x1b[31mli\n" in out
    out = said(capsys, mine, "--split=val", "--at=6")
    assert "window     6 tokens of val from 6\n  | out ab\n" in out  # to its end
    assert window_of(said(capsys, mine, "--split=val")) == "<|endoftext|>held out ab"
    assert "of train from 0\n" in said(capsys, mine, "--tokens=247")  # no row has so many


@pytest.mark.parametrize("arguments, message", (
    (["--at=247"], "a place below 247, the tokens of train"),
    (["--at=12", "--split=val"], "a place below 12, the tokens of val"),
    (["--at=-1"], "--at=-1"), (["--tokens=0"], "--tokens=0: expected one token"),
    (["--at=x"], "--at: invalid int value: 'x'"), (["--split=test"], "--split: invalid choice"),
    (["--splti=val"], "did you mean --split?"), (["--out=a.pdf"], "a.pdf: expected a file that"),
    (["--tokenizer=char"], "was prepared with --tokenizer=byte"),
))
def test_a_mistake_is_one_line_and_exit_2(mine, capsys, arguments, message):
    assert message in mistake(capsys, mine, *arguments)
    assert not (mine / "documents.png").exists()


def test_a_name_that_is_none_is_one_line(capsys):
    assert "--dataset=nowhere is no file" in mistake(capsys, "nowhere")


def test_ctrl_c_is_one_line_and_exit_130(mine, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "Scan", interrupted)
    assert command.main([str(mine)]) == 130
    assert capsys.readouterr().err.startswith("interrupted")


# ------------------------------------------------------------------------------------------ damage


def test_a_changed_shard_is_named_with_both_hashes(mine, capsys):
    path = mine / "train_000001.bin"
    raw = bytearray(path.read_bytes())
    raw[1024 + 2 * 50] ^= 1
    path.write_bytes(raw)
    recorded = json.loads((mine / "dataset.json").read_bytes())["splits"]["train"]["shards"][1]
    err = mistake(capsys, mine)
    assert str(path) in err and recorded["sha256"] in err
    assert len([word for word in err.replace(",", " ").replace(";", " ").split()
                if len(word) == 64]) == 2


def test_an_id_above_the_vocabulary_is_found_wherever_it_is(tmp_path, capsys):
    ids = np.zeros(300_000, np.int64)
    ids[123_456] = 999  # between the places that are looked at on opening
    write(tmp_path, "a_train", ids, vocab_size=1000, shard_tokens=10**6)
    write(tmp_path, "a_val", [1, 2])
    Dataset(tmp_path, "byte")
    err = mistake(capsys, tmp_path, "--tokenizer=byte")
    assert "a_train_000000.bin: token 123456 has id 999" in err


@pytest.mark.parametrize("kind", (MASK, STARTS))
def test_a_changed_sidecar_is_found(chat, capsys, kind):
    path = chat / f"train_000000.{kind}.bin"
    raw = bytearray(path.read_bytes())
    raw[-8 if kind == STARTS else -1] ^= 1
    path.write_bytes(raw)
    assert path.name in mistake(capsys, chat)


# -------------------------------------------------------------------------------- instruction data


def test_samples_are_shown_whole_with_their_targets_marked(chat, capsys):
    out = said(capsys, chat)
    end = "<|endoftext|>"
    assert window_of(out) == f"hi«HELLO{end}»\none«TWO{end}»three«FOUR{end}»"
    assert "window     8 tokens of train from 0, 6 «targets»\n" in out
    assert "window     17 tokens of train from 8, 9 «targets»\n" in out
    assert "targets    60.0% of train, 66.7% of val" in out  # 15 of 25, 2 of 3
    assert "6 shards as recorded" in out
    assert "min 3, median 8, mean 9.3, p90 17, max 17 tokens" in out
    assert "17 tokens of train from 8: oneTWO<|endoftext|>threeFOUR<|endoftext|>" in out


@pytest.mark.parametrize("at, n, starts", ((0, 1, [0]), (7, 1, [0]), (7, 2, [0, 8]), (8, 1, [8]),
                                           (24, 64, [8])))
def test_the_samples_shown_are_those_that_are_touched(chat, capsys, at, n, starts):
    out = said(capsys, chat, f"--at={at}", f"--tokens={n}")
    shown = [line.split()[6] for line in out.splitlines() if line.startswith("window")]
    assert [int(start.rstrip(",")) for start in shown] == starts


@pytest.mark.parametrize("terminal, no_color, coloured", (
    (True, None, True), (True, "", True), (True, "1", False), (False, None, False)))
def test_targets_are_green_on_a_terminal_alone(chat, monkeypatch, terminal, no_color, coloured):
    class Output(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stdout", Output())
    assert command.main([str(chat)]) == 0
    out = sys.stdout.getvalue()
    assert ("hi\x1b[32mHELLO<|endoftext|>\x1b[0m" in out) == coloured
    assert ("hi«HELLO<|endoftext|>»" in out) != coloured


# -------------------------------------------------------------------------------------- the figure


def size_of(path: Path) -> tuple[int, int]:
    raw = path.read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n" and len(raw) > 5000
    return int.from_bytes(raw[16:20], "big"), int.from_bytes(raw[20:24], "big")


@pytest.mark.parametrize("train", (
    [1], [EOT], tokens_of("one text of one length"), tokens_of(*["a"] * 9),
    tokens_of(*("a" * 2**k for k in range(12)), ""), tokens_of(*("a" * k for k in range(50)))),
    ids=("a token", "no text", "one", "equal", "wide", "even"))
def test_a_figure_is_drawn_whatever_the_lengths(tmp_path, capsys, train):
    folder = dataset_of(tmp_path / "a $x^$ 😀 set", train, [])
    assert str(folder / "documents.png") in said(capsys, folder)
    assert size_of(folder / "documents.png") == (960, 540)


def test_the_figure_goes_where_one_wants_it(mine, tmp_path, capsys):
    path = tmp_path / "mine.png"
    assert f"figure     {path}\n" in said(capsys, mine, f"--out={path}")
    size_of(path)
    assert not (mine / "documents.png").exists()
    assert "nowhere" in mistake(capsys, mine, f"--out={tmp_path / 'nowhere' / 'a.png'}")


def test_a_folder_that_cannot_be_written_is_one_line(mine, capsys):
    (mine / "documents.png").mkdir()  # as good as a folder without permission, for root too
    out = said(capsys, mine)
    assert out.splitlines()[-1].startswith("figure     not written, try --out=FILE.png (")


# --------------------------------------------------------------------------------- a real process


@pytest.mark.parametrize("encoding", (None, "ascii", "cp1252", "utf-8"))
def test_the_locale_does_not_matter(tmp_path, encoding):
    folder = dataset_of(tmp_path / "données 😀", tokens_of("née 😀 \ufeff"), tokens_of("a\ud7ff"))
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
                   "MPLCONFIGDIR": str(tmp_path / "matplotlib")}
    if encoding:
        environment["PYTHONIOENCODING"] = encoding
    done = subprocess.run([sys.executable, "-m", "data.inspect", str(folder), "--debug"], cwd=CLONE,
                          capture_output=True, env=environment, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr and b"documents.png" in done.stdout
    assert ("née 😀".encode() in done.stdout) == (encoding == "utf-8")


def test_memory_does_not_grow_with_the_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "CHUNK", 4096)
    peaks = []
    for n_tokens in (50_000, 500_000):
        ids = np.random.default_rng(0).integers(0, 257, n_tokens)
        folder = dataset_of(tmp_path / str(n_tokens), ids, [1], shard_tokens=200_000)
        dataset, bar = Dataset(folder), tqdm(disable=True)
        tracemalloc.start()
        scan = Scan(dataset, "train", bar)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert scan.lengths.total() > n_tokens / 300
    assert peaks[1] - peaks[0] < 100_000  # bytes; of tokens there are 900,000 more
