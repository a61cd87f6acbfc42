"""Byte pair encoding: merges learned here or OpenAI's, kept in one form and run by one engine."""

import base64
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

import numpy as np

from data import DataError
from data.tokenizer import EOT, Tokenizer, check_utf8

MAX_SIZE = 1_000_000  # of a trained vocabulary: beyond lies a typing error
# Where words begin (GPT-2's rule, in tiktoken's possessive spelling): no token straddles two words.
GPT2_PATTERN = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"
                r"|\s++$|\s+(?!\S)|\s")


class BPETokenizer(Tokenizer):
    """Byte pair encoding over bytes (Sennrich et al. 2016; Radford et al. 2019), run by tiktoken.

    tokens: bytes of each id, in the order of merging; None where an id is special or unused.
    special: {name: id}; no text can yield these, because the engine is not told of them.
    """

    kind = "bpe"

    def __init__(self, spec: str, pattern: str, tokens: list[bytes | None],
                 special: dict[str, int]):
        import tiktoken

        self._pattern, self._merged = pattern, tokens
        ranks = {token: id for id, token in enumerate(tokens) if token is not None}
        self._engine = tiktoken.Encoding(
            spec, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        names = {id: name.encode("utf-8") for name, id in special.items()}
        filled = [names.get(id, token or b"") for id, token in enumerate(tokens)]
        super().__init__(spec, filled, special)

    def _encode(self, text: str, unknown: str) -> np.ndarray:
        return self._engine.encode_to_numpy(text, disallowed_special=())

    def _body(self) -> dict:
        tokens = [t if t is None else base64.b64encode(t).decode("ascii") for t in self._merged]
        return {"pattern": self._pattern, "special": self.special, "tokens": tokens}


def from_json(body: dict) -> BPETokenizer:
    """Build from JSON after checking what the engine takes on trust; ValueError tells what."""
    tokens = [t if t is None else base64.b64decode(t, validate=True) for t in body["tokens"]]
    known = {token for token in tokens if token is not None}
    if len(known) != len(tokens) - tokens.count(None):
        raise ValueError("two ids have the same bytes")
    if not known.issuperset(bytes([b]) for b in range(256)):
        raise ValueError("some of the 256 bytes have no id")
    special = list(body["special"].values())
    if len(set(special)) < len(special) or any(
            not 0 <= id < len(tokens) or tokens[id] is not None for id in special):
        raise ValueError("a special id is taken")
    if not isinstance(body["spec"], str):
        raise TypeError("spec is no text")
    return BPETokenizer(body["spec"], body["pattern"], tokens, body["special"])


def train(spec: str, size: int, texts: Iterable[str]) -> BPETokenizer:
    """Learn up to `size` ids from texts with Hugging Face `tokenizers`; the last one is eot.

    There are fewer if the texts have no more pairs that occur twice. The engine is tiktoken all
    the same: on the standard library it gave the same ids as `tokenizers`, five times faster.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if not 257 <= size <= MAX_SIZE:
        raise DataError(f"{spec}: expected a size of 257 (bytes and end-of-text) to {MAX_SIZE:,}")
    letters = _byte_letters()
    trainer = trainers.BpeTrainer(vocab_size=size - 1, min_frequency=2, show_progress=False,
                                  initial_alphabet=list(letters))
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.train_from_iterator(_pieces(texts), trainer)
    vocabulary = learner.get_vocab()
    tokens = [bytes(map(letters.get, token)) for token in sorted(vocabulary, key=vocabulary.get)]
    return BPETokenizer(spec, GPT2_PATTERN, [*tokens, None], {EOT: len(tokens)})


def _pieces(texts: Iterable[str], length: int = 1 << 20) -> Iterator[str]:
    """Texts, long ones in pieces: the trainer makes an object of each word it is given at once."""
    for text in texts:
        for start in range(0, len(text), length):
            yield check_utf8(text[start:start + length])


def _byte_letters() -> dict[str, int]:
    """The letters that stand for bytes in GPT-2's vocabulary files, all of them printable."""
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def from_tiktoken(name: str) -> BPETokenizer:
    """One of OpenAI's encodings; tiktoken fetches its vocabulary once and then has it cached."""
    import tiktoken

    names = tiktoken.list_encoding_names()
    if name not in names:
        near = get_close_matches(name, ["byte", "char", "bpe:2048", *names], n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise DataError(f"--tokenizer={name} is unknown{hint}; there are byte, char, bpe:N, a path "
                        f"to a tokenizer.json, and tiktoken's {', '.join(names)}")
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(
            f"the vocabulary of {name} could not be fetched ({type(error).__name__}); without "
            "network set TIKTOKEN_CACHE_DIR to a folder with tiktoken's cached file") from None
    ranks = {id: token for token, id in encoding._mergeable_ranks.items()}
    tokens = [ranks.get(id) for id in range(encoding.n_vocab)]
    return BPETokenizer(name, encoding._pat_str, tokens, dict(encoding._special_tokens))
