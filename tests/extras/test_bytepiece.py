"""BytePiece behind the interface of every tokenizer, with its package and without."""

import json
import math
import sys
import types
from base64 import b64decode, b64encode
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import data_root, prepare
from data.dataset import Dataset
from data.making.tokenizers import identity, make_tokenizer
from data.tokenizer import from_json
from extras import bytepiece as ours
from kit.errors import UserError

PIECES = {b"th": 90, b"the": 60, b" the": 50, b" c": 20, b"at": 70, b" cat": 30, b" s": 12,
          b" sat": 9, "你".encode(): 5, "é".encode(): 8, b"\xf0\x9f\x98": 4, b"<|endoftext|>": 3}
ODD = ("\0", "\r\n", "\t", "\n\n", "\u2028", "😀", "e\u0301", "\u212b", "\u1100\u1161", "שלום",
       "\ufffe", "\ufdd0", "\U0010ffff", "<pad>", "<|endoftext|>", " the cat")
odd_text = st.lists(st.one_of(st.text(max_size=9), st.sampled_from(ODD)), max_size=12).map("".join)


def model(pieces: dict[bytes, int] = PIECES) -> dict:
    """A model file's content: the single bytes first, as they are the shortest."""
    counts = {bytes([b]): 1 + b % 7 for b in range(256)} | pieces
    return {b64encode(piece).decode(): [3 + i, piece.decode(errors="ignore"), count]
            for i, (piece, count) in enumerate(counts.items())}


class Engine:
    """What the package computes, in plain words: the most likely pieces of one line."""

    def __init__(self, pieces: dict):
        total = math.log(sum(count for *_, count in pieces.values()))
        tokens = bytes_of(pieces)
        self.scores = {token: math.log(count) - total
                       for token, (*_, count) in zip(tokens, pieces.values(), strict=True)}
        self.longest = max(map(len, tokens))

    def _tokenize(self, line: bytes) -> list[bytes]:
        best = [(0.0, [])]
        for end in range(1, len(line) + 1):
            candidates = [(best[start][0] + self.scores[line[start:end]],
                           [*best[start][1], line[start:end]])
                          for start in range(max(0, end - self.longest), end)
                          if line[start:end] in self.scores]
            best.append(max(candidates, key=lambda candidate: candidate[0]))
        return best[-1][1]


def bytes_of(pieces: dict) -> list[bytes]:
    return [b64decode(key) for key in pieces]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "my.model"
    path.write_text(json.dumps(model(), ensure_ascii=False), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=("plain words", "package"))
def tokenizer(request, file):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "package":
            pytest.importorskip("bytepiece")
        else:
            patch.setitem(sys.modules, "bytepiece", types.SimpleNamespace(Tokenizer=Engine))
        yield make_tokenizer(f"bytepiece:{file}")


def survives(tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode("utf-8")
    assert not {*ids} & {*tokenizer.special.values()}


@settings(max_examples=200, deadline=None)
@given(text=odd_text)
def test_any_text_survives(tokenizer, text):
    survives(tokenizer, text)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(text=odd_text)
def test_many_texts_survive(tokenizer, text):
    survives(tokenizer, text)


def test_it_takes_the_most_likely_pieces(tokenizer):
    assert [tokenizer.token_bytes(id) for id in tokenizer.encode("the cat sat é\n the")] == [
        b"the", b" cat", b" sat", b" ", "é".encode(), b"\n", b" the"]
    assert tokenizer.encode("\0a") == [3, 3 + ord("a")]


def test_it_is_like_every_other_tokenizer(tokenizer, file):
    size = 3 + 256 + len(PIECES) + 1
    assert (tokenizer.spec, tokenizer.vocab_size, tokenizer.eot) == ("bytepiece", size, size - 1)
    assert tokenizer.special == {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<|endoftext|>": size - 1}
    assert tokenizer.decode([0, tokenizer.eot]) == "<pad><|endoftext|>"
    assert tokenizer.encode_array("the cat").dtype == "uint16"
    assert identity(f"bytepiece:{file}") == tokenizer.hash
    again = from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert again.hash == tokenizer.hash and again.encode(" the cat") == tokenizer.encode(" the cat")
    with pytest.raises(UserError, match="lone surrogate .* position 1"):
        tokenizer.encode("a\ud83d")


def test_the_package_agrees_where_it_loses_nothing(file):
    package = pytest.importorskip("bytepiece").Tokenizer(str(file))
    mine = make_tokenizer(f"bytepiece:{file}")
    for text in ("the cat sat\n\n on the café 你好 😀\n" * 3, "", "\n", "x" * 3000):
        assert mine.encode(text) == package.encode(text)
    assert package.decode(package.encode("\u212b")) != "\u212b"  # why `encode` is not used


def test_a_dataset_is_prepared_with_it(tokenizer, file, tmp_path):
    (tmp_path / "cat.txt").write_text(" the cat sat\n" * 50, encoding="utf-8")
    assert prepare.main([str(tmp_path / "cat.txt"), f"--tokenizer=bytepiece:{file}"]) == 0
    dataset = Dataset(data_root() / "cat")
    assert dataset.tokenizer.spec == "bytepiece" and dataset.tokenizer.hash == tokenizer.hash
    assert dataset.tokenizer.decode(dataset.train.read(1, 4)) == " the cat sat\n"


def test_a_line_without_end_takes_no_time(file):
    pytest.importorskip("bytepiece")
    survives(make_tokenizer(f"bytepiece:{file}"), "the cat " * 60_000 + "\n" * 300_000)


def test_without_the_package_a_line_says_how_to_get_it(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "bytepiece", None)
    with pytest.raises(UserError, match=r"needs its package .*: AHOCORASICK_BYTES=1 pip") as e:
        make_tokenizer(f"bytepiece:{file}")
    assert "\n" not in str(e.value)


def test_an_automaton_for_str_is_no_use_either(file, monkeypatch):
    def unicode_only(pieces):
        raise TypeError("string expected")

    monkeypatch.setitem(sys.modules, "bytepiece", types.SimpleNamespace(Tokenizer=unicode_only))
    with pytest.raises(UserError, match=r"needs its package \(string expected\): AHOCORASICK"):
        make_tokenizer(f"bytepiece:{file}")


def test_a_checkpoint_speaks_without_the_package(tokenizer, monkeypatch):
    written, ids = tokenizer.to_json(), tokenizer.encode("the cat é")
    monkeypatch.setitem(sys.modules, "bytepiece", None)
    again = from_json(written)
    assert again.decode(ids) == "the cat é"
    with pytest.raises(UserError, match="needs its package"):
        again.encode("the")


def broken(**changes) -> dict:
    return {key: value for key, value in (model() | changes).items() if value is not None}


@pytest.mark.parametrize("content", (
    "", "[1]", "{}", "{" * 100_000, json.dumps(broken(**{"AA==": None})),
    json.dumps(broken(dGg=[900, "th", 1])), json.dumps(broken(dGg=["a", "th", 1])),
    json.dumps(broken(dGg=[260, "th", 0])), json.dumps(broken(dGg=[260, "th", -math.inf])),
    json.dumps(broken(dGg=[260, "th"])), json.dumps(broken(dGg=7)),
    json.dumps({**broken(), "": [271, "", 1]})), ids=lambda text: text[-20:])
def test_what_is_no_model_is_named(tmp_path, content):
    path = tmp_path / "other.model"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"other\.model is no BytePiece model \("):
        make_tokenizer(f"bytepiece:{path}")


def test_a_model_that_is_not_there_is_named():
    for argument in ("", "gone.model"):
        with pytest.raises(UserError, match=rf"no file '{argument}'; expected bytepiece:MODEL_F"):
            make_tokenizer(f"bytepiece:{argument}")


def test_a_tampered_model_is_refused(tokenizer):
    for change in {"model": model({b"xy": 1})}, {"model": 7}, {"eot": 5}, {"vocab_size": 9}:
        with pytest.raises(UserError, match="broken tokenizer JSON"):
            from_json(tokenizer.to_json() | change)


def test_other_counts_are_another_tokenizer():
    counted = ours.BytePieceTokenizer(model(PIECES | {b"th": 91}))
    assert counted.hash != ours.BytePieceTokenizer(model()).hash
