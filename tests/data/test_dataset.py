"""The data set of a run found again, and whether it is of chats."""

import json
from pathlib import Path

import pytest

from data.dataset import Dataset
from data.making.tokenizers import make_tokenizer
from data.prepare import of_run, prepared, resolve

BYTE = make_tokenizer("byte")


def quiet(line: str) -> None:
    """What is said, to nobody."""


def made(path: Path, records: list[dict]) -> Dataset:
    """Samples as `--dataset=PATH` opens them."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Dataset(resolve(str(path), "byte", quiet))


def chats(n: int = 40) -> list[dict]:
    return [{"messages": [{"role": "user", "content": f"What is {i}?"},
                          {"role": "assistant", "content": f"It is {i}."}]} for i in range(n)]


def test_a_run_finds_its_data_again(tmp_path):
    """By a name, by a path, by the text that it was made of, which may be gone, or by nothing."""
    data = made(tmp_path / "chats.jsonl", chats())
    text = str(tmp_path / "chats.jsonl")
    for name in (data.folder.name, str(data.folder), text, "other", "", None, "\0"):
        assert prepared(data.hash, name) == data.folder
        assert of_run(data.hash, name, BYTE).hash == data.hash
    (tmp_path / "chats.jsonl").unlink()
    assert prepared(data.hash, text) == data.folder


def test_the_one_of_the_name_comes_first(tmp_path):
    data = made(tmp_path / "chats.jsonl", chats())
    copy = data.folder.with_name("a-copy")
    copy.mkdir()
    for path in data.folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert prepared(data.hash) == copy and prepared(data.hash, data.folder.name) == data.folder


def test_what_is_not_here_is_none(tmp_path):
    data = made(tmp_path / "chats.jsonl", chats())
    name = data.folder.name
    assert prepared(None, name) is None and prepared("0" * 64, name) is None
    assert of_run(data.hash, name, make_tokenizer("char", ["abc"])) is None
    next(data.folder.glob("*train*.bin")).unlink()
    assert prepared(data.hash, name) and of_run(data.hash, name, BYTE) is None
    (data.folder / "dataset.json").write_text("{")
    assert prepared(data.hash, name) is None


def test_other_broken_sets_do_not_hide_it(tmp_path):
    data = made(tmp_path / "chats.jsonl", chats())
    for name, content in (("a", "{"), ("b", "[]"), ("c", "[" * 100_000)):
        folder = data.folder.with_name(name)
        folder.mkdir()
        (folder / "dataset.json").write_text(content)
    assert prepared(data.hash) == data.folder


PAIRS = [{"prompt": f"Say {i}:", "completion": f" {i}"} for i in range(40)]


@pytest.mark.parametrize("records, expected", [
    (chats(), True),
    ([{"messages": [{"role": "system", "content": "Be brief."}, *c["messages"]]} for c in chats()],
     True),
    ([{"messages": [{"role": "assistant", "content": f"Hello {i}."}]} for i in range(40)], True),
    (PAIRS, False),
    ([{"prompt": f"{word}\n", "completion": f" {i}"} for i in range(20)
      for word in ("user", "yes")], False),
    ([{"prompt": f"user\nis {i}<|endoftext|>assistant\n", "completion": "x"} for i in range(40)],
     False)],
    ids=["chats", "system", "greetings", "pairs", "words", "forged"])
def test_chats_are_told_from_prompts(tmp_path, records, expected):
    assert made(tmp_path / "set.jsonl", records).is_chat is expected


def test_text_is_no_chat(tmp_path, text_file):
    assert Dataset(resolve(str(text_file), "byte", quiet)).is_chat is False
