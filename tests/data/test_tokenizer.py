"""Lossless, unforgeable, self-sufficient: what every tokenizer promises."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from data import DataError, canonical_hash, read_json, tokenizer
from data.tokenizer import GPT2_PATTERN, BPETokenizer, CharTokenizer, from_json, make_tokenizer

CLONE = Path(__file__).parents[2]
LESSON = ["the cat sat on the mat, the cat's hat\n", "😀 ça va, 你好 你好 <|endoftext|>\r\n\0"] * 4
EVERY_KIND = ("byte", "char", "bpe:300", "gpt2")


@pytest.fixture(scope="module")
def tokenizers(gpt2_cache) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(gpt2_cache))
        return {spec: make_tokenizer(spec, LESSON) for spec in EVERY_KIND}


def reforged(value: dict, **changes) -> dict:
    """Change a tokenizer's JSON the way a forger would, with a hash that fits."""
    body = {key: item for key, item in (copy.deepcopy(value) | changes).items() if key != "hash"}
    return body | {"hash": canonical_hash(body)}


# ------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("spec", ("byte", "bpe:300", "gpt2"))
@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_any_text_survives(tokenizers, spec, text):
    tokenizer = tokenizers[spec]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= id < tokenizer.vocab_size and id != tokenizer.eot for id in ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(min_size=1))
def test_any_text_survives_its_own_alphabet(text):
    tokenizer = make_tokenizer("char", [text])
    assert tokenizer.vocab_size == len(set(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_odd_text_survives(tokenizers, spec):
    text = "the\r\n\0  cat 😀😀\n\n<|endoftext|> 你好\n   "
    tokenizer = tokenizers[spec]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    bytes_of_ids = b"".join(tokenizer.token_bytes(id) for id in tokenizer.encode(text))
    assert bytes_of_ids == text.encode("utf-8")


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_a_batch_gives_what_each_text_gives_alone(tokenizers, spec):
    texts = [*LESSON, "", "cat"]
    batch = tokenizers[spec].encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [tokenizers[spec].encode(text) for text in texts]


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_a_lone_surrogate_is_refused_with_its_position(tokenizers, spec):
    with pytest.raises(DataError, match=r"ud83d.* position 3"):
        tokenizers[spec].encode("the\ud83d cat")


def test_half_a_character_becomes_a_replacement_character(tokenizers):
    ids = tokenizers["byte"].encode("a😀")
    assert tokenizers["byte"].decode(ids[:3]) == "a\ufffd"


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_an_id_outside_the_vocabulary_is_named(tokenizers, spec):
    size = tokenizers[spec].vocab_size
    for id in (size, -1):
        with pytest.raises(DataError, match=rf"{id} .*{size} ids"):
            tokenizers[spec].decode([id])


# ------------------------------------------------------------------------------------- separators


@pytest.mark.parametrize("spec", ("byte", "bpe:300", "gpt2"))
def test_text_never_forges_the_separator(tokenizers, spec):
    tokenizer = tokenizers[spec]
    ids = tokenizer.encode("<|endoftext|>")
    assert len(ids) > 1 and tokenizer.eot not in ids
    assert tokenizer.token_bytes(tokenizer.eot) == b"<|endoftext|>"


def test_char_has_no_separator(tokenizers):
    assert tokenizers["char"].eot is None and tokenizers["char"].special == {}


# ------------------------------------------------------------------------------------------ kinds


def test_byte_ids_are_the_bytes(tokenizers):
    byte = tokenizers["byte"]
    assert byte.encode("aé") == [97, 195, 169]
    assert (byte.vocab_size, byte.eot) == (257, 256)


def test_char_ids_follow_code_points():
    char = make_tokenizer("char", ["ba", "😀c"])
    assert char.encode("abc😀") == [0, 1, 2, 3]


def test_char_names_an_unseen_character(tokenizers):
    char = tokenizers["char"]
    with pytest.raises(DataError, match=rf"'ß' at position 4 .*{char.vocab_size}"):
        char.encode("the ß")
    with pytest.raises(DataError, match=r"'🧠' at position 0"):  # beyond the last of the alphabet
        char.encode("🧠")
    assert char.decode(char.encode("thße🧠", unknown="skip")) == "the"


def test_char_needs_a_character():
    with pytest.raises(DataError, match="at least one character"):
        make_tokenizer("char", [""])


def test_gpt2_ids_are_the_known_ones(tokenizers):
    gpt2 = tokenizers["gpt2"]
    assert (gpt2.vocab_size, gpt2.eot) == (50257, 50256)
    assert gpt2.encode("hello world") == [31373, 995]
    assert gpt2.encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]


def test_bpe_size_counts_the_separator():
    exact = make_tokenizer("bpe:260", LESSON)
    assert (exact.vocab_size, exact.eot) == (260, 259)
    assert make_tokenizer("bpe:257", LESSON).encode("the") != exact.encode("the")
    short = make_tokenizer("bpe:9999", ["ababab"])  # twice or more it has "ab" and "abab" only
    assert (short.vocab_size, short.eot) == (259, 258)


@pytest.mark.parametrize("size", (0, 256, 1_000_001))
def test_bpe_refuses_senseless_sizes(size):
    with pytest.raises(DataError, match="257"):
        make_tokenizer(f"bpe:{size}", LESSON)


def test_bpe_learns_from_pieces_of_a_long_text(monkeypatch):
    text = "".join(LESSON)
    pieces = [text[i:i + 50] for i in range(0, len(text), 50)]
    expected = make_tokenizer("bpe:300", [*pieces, "cat"]).hash
    monkeypatch.setattr(tokenizer, "LESSON", 50)
    assert make_tokenizer("bpe:300", [text, "", "cat"]).hash == expected


def test_bpe_merges_the_lowest_rank_first():
    """The engine against the algorithm as the paper tells it, one word at a time."""
    tokenizer = make_tokenizer("bpe:400", ["banana bandana cabana ananas bananas"] * 3)
    ranks = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size - 1)}
    for word in ("bananabandana", "ananas", "cabananas", "xbanx"):
        parts = [bytes([b]) for b in word.encode()]
        while pairs := [(ranks[two], i) for i in range(len(parts) - 1)
                        if (two := parts[i] + parts[i + 1]) in ranks]:
            i = min(pairs)[1]
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        assert tokenizer.encode(word) == [ranks[part] for part in parts]
        assert word == "xbanx" or len(parts) < len(word) / 2


def test_bpe_is_the_same_in_every_process():
    code = ("import data.tokenizer as t; "
            "print(t.make_tokenizer('bpe:500', [open(t.__file__, encoding='utf-8').read()]).hash)")
    hashes = [subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True,
                             cwd=CLONE, env={**os.environ, "PYTHONHASHSEED": seed}).stdout.strip()
              for seed in ("1", "2")]
    assert len(hashes[0]) == 64 and hashes[0] == hashes[1]


def test_an_unused_id_is_no_bytes():
    tokens = [bytes([b]) for b in range(256)] + [None, b"th", None]
    tokenizer = BPETokenizer("gap", GPT2_PATTERN, tokens, {"<|endoftext|>": 258})
    assert tokenizer.encode("th") == [257]
    assert tokenizer.decode([257, 256, 258]) == "th<|endoftext|>"
    assert from_json(tokenizer.to_json()).to_json() == tokenizer.to_json()


# ------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("spec, near", (
    ("gpt3", "gpt2"), ("chars", "char"), ("bpe2048", "bpe:2048")))
def test_an_unknown_name_lists_what_there_is(spec, near):
    message = rf"{spec} is none of byte, char, bpe:N.*gpt2.*did you mean {near}\?"
    with pytest.raises(DataError, match=message):
        make_tokenizer(spec)


def test_a_vocabulary_out_of_reach_says_where_to_put_it(monkeypatch):
    def offline(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(DataError, match=r"cl100k_base could not be fetched.*TIKTOKEN_CACHE_DIR"):
        make_tokenizer("cl100k_base")


# ------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_json_is_all_it_takes(tokenizers, spec, tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizers[spec].to_json()), encoding="utf-8")
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: pytest.fail("asked tiktoken"))
    for again in (from_json(read_json(path)), make_tokenizer(str(path))):
        assert again.encode(LESSON[1]) == tokenizers[spec].encode(LESSON[1])
        assert (again.spec, again.vocab_size, again.eot) == (
            spec, tokenizers[spec].vocab_size, tokenizers[spec].eot)
        assert again.hash == tokenizers[spec].hash == again.to_json()["hash"]


def test_the_hash_tells_tokenizers_apart(tokenizers):
    others = (make_tokenizer("char", ["abc"]), make_tokenizer("bpe:299", LESSON))
    hashes = {tokenizer.hash for tokenizer in (*tokenizers.values(), *others)}
    assert len(hashes) == 6


@pytest.mark.parametrize("spec", ("byte", "char", "bpe:300"))
def test_tampered_json_is_refused(tokenizers, spec):
    good = tokenizers[spec].to_json()
    for key in good:
        for bad in ({k: v for k, v in good.items() if k != key}, good | {key: None if good[key]
                    is not None else 7}, good | {key: [good[key]]}):
            with pytest.raises(DataError):
                from_json(bad)
            if key not in ("hash", "spec"):
                with pytest.raises(DataError):
                    from_json(reforged(bad))


def test_a_swapped_pair_of_ids_is_refused(tokenizers):
    bad = tokenizers["bpe:300"].to_json()
    bad["tokens"] = [*bad["tokens"][:260], bad["tokens"][261], bad["tokens"][260],
                     *bad["tokens"][262:]]
    with pytest.raises(DataError, match="hash"):
        from_json(bad)


@pytest.mark.parametrize("changes", (
    {"format": 2}, {"kind": "pickle"}, {"vocab_size": 10**12}, {"eot": 5}, {"pattern": "(("},
    {"pattern": 7}, {"tokens": []}, {"tokens": ["%%%"]}, {"extra": 1}), ids=str)
def test_forged_json_is_refused_though_its_hash_fits(tokenizers, changes):
    good = tokenizers["bpe:300"].to_json()
    assert from_json(reforged(good)).hash == tokenizers["bpe:300"].hash
    with pytest.raises(DataError, match="broken tokenizer JSON"):
        from_json(reforged(good, **changes))


def test_another_format_is_named(tokenizers):
    with pytest.raises(DataError, match="format is 2, expected 1"):
        from_json(tokenizers["byte"].to_json() | {"format": 2})


@pytest.mark.parametrize("content", (b"", b"\xff", b"[1]", b"{", b"[" * 100_000), ids=len)
def test_a_file_that_is_no_json_object_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        make_tokenizer(str(path))


@pytest.mark.parametrize("value", (None, [], "x", {}, {"format": 1}), ids=str)
def test_json_that_is_no_tokenizer_is_refused(value):
    with pytest.raises(DataError, match="broken"):
        from_json(value)


def test_char_alphabets_agree_whatever_the_order():
    assert CharTokenizer("cab").hash == CharTokenizer("abcabc").hash
    assert np.array_equal(CharTokenizer("cab").encode("bac"), [1, 0, 2])
