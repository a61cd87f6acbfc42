"""Lossless, unforgeable, self-sufficient: what every tokenizer promises."""

import copy
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from data import canonical_hash, read_json, tokenizer
from data.making.tokenizers import identity, make_tokenizer
from data.making.vocabulary import GPT2_PATTERN
from data.tokenizer import BPETokenizer, CharTokenizer, from_json
from kit.errors import UserError

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


ODD = ("\0", "\r\n", "\r", "\t", "\u00a0", "\u2028", "\x1c", "\x85", "  ", "   \n", "'s",
       "<|endoftext|>", "😀", "\U0001f469\u200d\U0001f467", "e\u0301", "\u0301", "ǅ", "ﬁ", "\u212b",
       "\u1100\u1161", "שלום", "\u202e", "\ufeff", "\ufffe", "\ufdd0", "\U0010ffff", "\ufffd")
odd_text = st.lists(st.one_of(st.text(max_size=9), st.sampled_from(ODD)), max_size=12).map("".join)


def survives(tokenizer, text: str) -> None:
    """Text comes back as it was, out of ids that are text's, whose bytes are the text's."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode("utf-8")
    assert not {*ids} & {*tokenizer.special.values()} and max(ids, default=0) < tokenizer.vocab_size


@pytest.mark.parametrize("spec", ("byte", "bpe:300", "gpt2"))
@settings(max_examples=200, deadline=None)
@given(text=odd_text)
def test_any_text_survives(tokenizers, spec, text):
    survives(tokenizers[spec], text)


@settings(max_examples=200, deadline=None)
@given(text=odd_text.filter(bool))
def test_any_text_survives_its_own_alphabet(text):
    tokenizer = make_tokenizer("char", [text])
    assert tokenizer.vocab_size == len(set(text))
    survives(tokenizer, text)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ("byte", "bpe:300", "gpt2"))
@settings(max_examples=1500, deadline=None)
@given(text=odd_text)
def test_many_texts_survive(tokenizers, spec, text):
    survives(tokenizers[spec], text)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(text=odd_text.filter(bool))
def test_many_texts_survive_their_own_alphabet(text):
    survives(make_tokenizer("char", [text]), text)


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_an_array_holds_the_same_ids_in_few_bytes(tokenizers, spec):
    size = {"byte": 1, "char": 1}.get(spec, 4)
    for text in [*LESSON, "", "cat"]:
        ids = tokenizers[spec].encode_array(text)
        assert ids.tolist() == tokenizers[spec].encode(text)
        assert ids.dtype.kind == "u" and ids.itemsize == size


@pytest.mark.parametrize("spec", EVERY_KIND)
@pytest.mark.parametrize("half", ("\ud83d", "\ude00", "\udc80"), ids=ascii)
def test_a_lone_surrogate_is_refused_with_its_position(tokenizers, spec, half):
    with pytest.raises(UserError, match=re.escape(f"{half!r} at position 3 is no text")):
        tokenizers[spec].encode(f"the{half} cat")


def test_half_a_character_becomes_a_replacement_character(tokenizers):
    ids = tokenizers["byte"].encode("a😀")
    assert tokenizers["byte"].decode(ids[:3]) == "a\ufffd"


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_an_id_outside_the_vocabulary_is_named(tokenizers, spec):
    size = tokenizers[spec].vocab_size
    for id in (size, -1):
        with pytest.raises(UserError, match=rf"{id} .*{size} ids"):
            tokenizers[spec].decode([id])


# ------------------------------------------------------------------------------------- separators


@pytest.mark.parametrize("spec", ("byte", "bpe:300", "gpt2"))
def test_text_never_forges_the_separator(tokenizers, spec):
    tokenizer = tokenizers[spec]
    ids = tokenizer.encode("<|endoftext|>")
    assert len(ids) > 1 and tokenizer.eot not in ids
    assert tokenizer.token_bytes(tokenizer.eot) == b"<|endoftext|>"


@pytest.mark.parametrize("spec", ("byte", "bpe:300", "gpt2"))
@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.sampled_from(["<|endoftext|>", "<|end", "oftext|>", " ", "<", "a\n"])))
def test_no_text_that_spells_it_forges_it_either(tokenizers, spec, parts):
    tokenizer, text = tokenizers[spec], "".join(parts)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < tokenizer.vocab_size and tokenizer.eot not in ids


def test_many_special_names_are_all_text():
    names = ["<|endoftext|>", "<|fim_prefix|>", "<|endofprompt|>", "th", "é", ""]
    special = {name: 300 + i for i, name in enumerate(names)}
    tokens = [bytes([b]) for b in range(256)] + [b"th", b"he"] + [None] * 50
    tokenizer = BPETokenizer("many", GPT2_PATTERN, tokens, special)
    for text in ("".join(names), " ".join(names), *names):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and max(ids, default=0) < 258
    assert tokenizer.decode(special.values()) == "".join(names)


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
    with pytest.raises(UserError, match=rf"'ß' at position 4 .*{char.vocab_size}"):
        char.encode("the ß")
    with pytest.raises(UserError, match=r"'🧠' at position 0"):  # beyond the last of the alphabet
        char.encode("🧠")
    assert char.decode(char.encode("thße🧠", unknown="skip")) == "the"


def test_char_needs_a_character():
    with pytest.raises(UserError, match="at least one character"):
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
    with pytest.raises(UserError, match="257"):
        make_tokenizer(f"bpe:{size}", LESSON)


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
    code = ("import data.making.tokenizers as t; "
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


# ---------------------------------------------------------------------------------------- trouble


def test_a_million_spaces_before_a_word(tokenizers):
    """tiktoken gives up on these, or panics in older versions."""
    for spec in ("bpe:300", "gpt2"):
        tokenizer = tokenizers[spec]
        for space in " ", "\n", "\u00a0":
            text = f"cat!{space * 1_000_000}x{space * 3}y"
            parts = "cat!", space * 999_999, f"{space}x", space * 2, f"{space}y"
            assert tokenizer.encode(text) == sum(map(tokenizer.encode, parts), [])


@pytest.mark.parametrize("text", ("a" * 300_000, "=" * 300_000, "\n" * 300_000, "7" * 300_000,
                                  "\0" * 300_000, "你" * 100_000, "<|endoftext|>" * 20_000,
                                  "Qk9OU0FJ8w" * 30_000), ids=lambda text: repr(text[:2]))
def test_one_endless_word_takes_no_time(tokenizers, text):
    start = time.perf_counter()
    for spec in ("byte", "bpe:300", "gpt2"):
        assert tokenizers[spec].decode(tokenizers[spec].encode(text)) == text
    assert time.perf_counter() - start < 15  # it takes 0.5; quadratic, it would be minutes


@pytest.mark.parametrize("error", (BaseException, ValueError), ids=("panic", "error"))
def test_what_stops_tiktoken_is_one_line(tokenizers, monkeypatch, error):
    class Engine:
        def encode_to_numpy(self, *args, **kwargs):
            raise type("PanicException", (error,), {})("stack overflow")

    broken = copy.copy(tokenizers["gpt2"])
    monkeypatch.setattr(broken, "_engine", Engine)
    with pytest.raises(UserError, match=r"gives up on a text of 3 characters \(stack overflow\)"):
        broken.encode("cat")


def test_ctrl_c_is_no_panic(tokenizers, monkeypatch):
    class Engine:
        def encode_to_numpy(self, *args, **kwargs):
            raise KeyboardInterrupt

    busy = copy.copy(tokenizers["gpt2"])
    monkeypatch.setattr(busy, "_engine", Engine)
    with pytest.raises(KeyboardInterrupt):
        busy.encode("cat")


# ------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("spec, near", (
    ("gpt3", "gpt2"), ("chars", "char"), ("bpe2048", "bpe:2048")))
def test_an_unknown_name_lists_what_there_is(spec, near):
    message = rf"{spec} is none of byte, char, bpe:N.*gpt2.*did you mean {near}\?"
    with pytest.raises(UserError, match=message):
        make_tokenizer(spec)


def test_what_a_file_names_is_known_by_its_content(tokenizers, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizers["bpe:300"].to_json()), encoding="utf-8")
    assert identity(str(path)) == tokenizers["bpe:300"].hash
    assert identity("gpt2:/some/folder") == identity("gpt2") == "gpt2"
    assert identity("gpt2:encoder.json") == "gpt2"
    assert [identity(spec) for spec in ("byte", "bpe:300", "no:such")] == [
        "byte", "bpe:300", "no:such"]


PLUGIN = '''
from data.tokenizer import CharTokenizer

def make(argument: str) -> CharTokenizer:
    return load({"alphabet": argument})

def load(value: dict) -> CharTokenizer:
    made = CharTokenizer(value["alphabet"])
    made._json["kind"] = "letters"
    made.hash = "0"
    return made
'''


@pytest.fixture
def plugin(tmp_path, monkeypatch) -> Path:
    """A clone whose extras/ has a tokenizer `letters` and a file that is something else."""
    folder = tmp_path / "extras"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "letters.py").write_text(PLUGIN, encoding="utf-8")
    (folder / "os.py").write_text("def load(path): 1 / 0", encoding="utf-8")
    (folder / "not-a-name.py").write_text(PLUGIN, encoding="utf-8")
    monkeypatch.setattr(tokenizer, "EXTRAS", folder)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "extras"]:
        monkeypatch.delitem(sys.modules, name)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "extras"]:
        del sys.modules[name]


def test_extras_add_kinds(plugin):
    letters = make_tokenizer("letters:abc")
    assert letters.encode("cab") == [2, 0, 1]
    assert from_json(letters.to_json()).encode("cab") == [2, 0, 1]
    assert identity("letters:abc") == letters.hash
    with pytest.raises(UserError, match=r"char, bpe, letters; add the extras/gone\.py that wrote"):
        from_json(letters.to_json() | {"kind": "gone"})


@pytest.mark.parametrize("name", ("os", "not-a-name", "../letters", "letters.x", "Letters", ""))
def test_nothing_else_is_imported(plugin, name):
    with pytest.raises(UserError, match="none of byte, char, bpe:N.* letters:"):
        make_tokenizer(f"{name}:abc")
    with pytest.raises(UserError, match="none of byte, char, bpe, letters"):
        from_json({"format": 1, "kind": name})
    assert "extras.os" not in sys.modules


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
            with pytest.raises(UserError):
                from_json(bad)
            if key not in ("hash", "spec"):
                with pytest.raises(UserError):
                    from_json(reforged(bad))


def test_a_swapped_pair_of_ids_is_refused(tokenizers):
    bad = tokenizers["bpe:300"].to_json()
    bad["tokens"] = [*bad["tokens"][:260], bad["tokens"][261], bad["tokens"][260],
                     *bad["tokens"][262:]]
    with pytest.raises(UserError, match="hash"):
        from_json(bad)


@pytest.mark.parametrize("changes", (
    {"format": 0}, {"kind": "char"}, {"vocab_size": 10**12}, {"eot": 5}, {"pattern": "(("},
    {"pattern": 7}, {"tokens": []}, {"tokens": ["%%%"]}, {"extra": 1}), ids=str)
def test_forged_json_is_refused_though_its_hash_fits(tokenizers, changes):
    good = tokenizers["bpe:300"].to_json()
    assert from_json(reforged(good)).hash == tokenizers["bpe:300"].hash
    with pytest.raises(UserError, match="broken tokenizer JSON|expected 1; restore the file"):
        from_json(reforged(good, **changes))


def test_a_newer_format_is_told_from_a_broken_one(tokenizers):
    good = tokenizers["byte"].to_json()
    with pytest.raises(UserError, match="format 2, expected 1; a newer version wrote it, update"):
        from_json(good | {"format": 2})
    with pytest.raises(UserError, match="format '2', expected 1; restore the file"):
        from_json(good | {"format": "2"})


def test_a_kind_from_elsewhere_is_named(tokenizers):
    with pytest.raises(UserError, match="kind 'pickle' is none of byte, char, bpe"):
        from_json(tokenizers["byte"].to_json() | {"kind": "pickle"})


# As version 0.1.0 wrote them: files like these are in people's folders and checkpoints.
GOLDEN_BYTE = {
    "format": 1, "kind": "byte", "spec": "byte", "vocab_size": 257, "eot": 256,
    "hash": "eddedb2a40e909e0e8ce9539be79c6a868bb5dd5b80c04413e8fe5c1c16d4770"}
GOLDEN_CHAR = {
    "format": 1, "kind": "char", "spec": "char", "vocab_size": 4, "eot": None,
    "alphabet": "\nabé",
    "hash": "44a4b0c08ec08f1a99f7d41b27b329e95e0eca1fbf25df6ed809781ef8b72051"}
GOLDEN_BPE = {
    "format": 1, "kind": "bpe", "spec": "bpe:260", "vocab_size": 6, "eot": 5,
    "pattern": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "special": {"<|endoftext|>": 5}, "tokens": ["YQ==", "Yg==", "IA==", "YWI=", "IGFi", None],
    "hash": "6fc17147c6bedb61c03d0e064749a15a5a9ed6b5b4ff6412add180ccaaf108e1"}


@pytest.mark.parametrize("value, text, ids", (
    (GOLDEN_BYTE, "hé", [104, 195, 169]), (GOLDEN_CHAR, "aéb", [1, 3, 2]),
    (GOLDEN_BPE, "abab ab", [3, 3, 4])), ids=("byte", "char", "bpe"))
def test_files_of_format_1_stay_loadable(value, text, ids):
    tokenizer = from_json(value)
    assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == text
    assert tokenizer.to_json() == value and tokenizer.hash == value["hash"]


@pytest.mark.parametrize("content", (b"", b"\xff", b"[1]", b"{", b"[" * 100_000), ids=len)
def test_a_file_that_is_no_json_object_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        make_tokenizer(str(path))


@pytest.mark.parametrize("value", (None, [], "x", {}, {"format": 1}), ids=str)
def test_json_that_is_no_tokenizer_is_refused(value):
    with pytest.raises(UserError, match="broken"):
        from_json(value)


def test_char_alphabets_agree_whatever_the_order():
    assert CharTokenizer("cab").hash == CharTokenizer("abcabc").hash
    assert np.array_equal(CharTokenizer("cab").encode("bac"), [1, 0, 2])


@pytest.mark.parametrize("id", (97, 9999, -1, 1.5, "x"))
def test_a_special_id_is_none_of_a_token(id):
    """However well the hash fits: else a text could forge it."""
    value = {k: v for k, v in make_tokenizer("bpe:257", ["ab"]).to_json().items() if k != "hash"}
    value |= {"special": {"<|endoftext|>": id}, "eot": id}
    with pytest.raises(UserError, match="a special id is that of a token, or none"):
        from_json(value | {"hash": canonical_hash(value)})
