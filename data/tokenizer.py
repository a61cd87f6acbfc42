"""Text to ids and back: bytes, characters, or byte pairs.

Every tokenizer is lossless and keeps special ids apart from text: `<|endoftext|>` in a text is
thirteen characters like any others. Each turns into one self-sufficient JSON object, so that a
checkpoint which carries it needs neither network nor dataset to speak.
"""

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np

from data import DataError, canonical_hash, did_you_mean, read_json

FORMAT = 1  # of the JSON
EOT = "<|endoftext|>"
MAX_SIZE = 1_000_000  # of a trained vocabulary: beyond lies a typing error
LESSON = 1 << 20  # characters; the trainer makes an object of each word in what it gets at once
# Where words begin (GPT-2's rule, in tiktoken's possessive spelling): no token straddles two words.
GPT2_PATTERN = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"
                r"|\s++$|\s+(?!\S)|\s")


class Tokenizer:
    """What all kinds share; a kind adds `_encode(text, unknown)`.

    spec: how a user names it. vocab_size: ids are 0 .. vocab_size - 1. special: {name: id} of ids
    that are no text. eot: the one that stands before every document, None without (char).
    hash: equal hash, equal tokenizer.
    """

    def __init__(self, kind: str, spec: str, tokens: list[bytes], special: dict[str, int],
                 content: dict):  # what its JSON holds beyond the rest
        self.spec, self.vocab_size = spec, len(tokens)
        self.special, self.eot = special, special.get(EOT)
        self._tokens = tokens
        self._json = {"format": FORMAT, "kind": kind, "spec": spec,
                      "vocab_size": self.vocab_size, "eot": self.eot, **content}
        self.hash = canonical_hash(self._json)

    def encode(self, text: str, unknown: str = "error") -> list[int]:
        """Ids of a text, none special; unknown="skip" leaves out what a `char` alphabet lacks."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"lone surrogate {text[error.start]!r} at position {error.start} is no "
                            "text; give the text as UTF-8") from None
        return self._encode(text, unknown).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of several texts decoded from UTF-8, integers (n,) each, by several threads."""
        with ThreadPoolExecutor() as pool:
            return list(pool.map(self._encode, texts))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are not UTF-8, as of half a character, become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one id: a special one's are its name, an unused one has none."""
        if not 0 <= id < self.vocab_size:
            raise DataError(f"token id {id} is not in the vocabulary of {self.vocab_size} ids")
        return self._tokens[id]

    def to_json(self) -> dict:
        """All that `from_json` needs, in JSON's types, with the hash of the rest."""
        return {**self._json, "hash": self.hash}


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and end-of-text."""

    def __init__(self) -> None:
        tokens = [bytes([b]) for b in range(256)] + [EOT.encode()]
        super().__init__("byte", "byte", tokens, {EOT: 256}, {})

    def _encode(self, text: str, unknown: str = "error") -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)


class CharTokenizer(Tokenizer):
    """One id for each character of an alphabet, in the order of code points (as in nanoGPT)."""

    def __init__(self, alphabet: Iterable[str]):
        self.alphabet = "".join(sorted(set(alphabet)))
        if not self.alphabet:
            raise DataError("a `char` tokenizer needs text with at least one character")
        self._codes = _code_points(self.alphabet)
        tokens = [c.encode("utf-8") for c in self.alphabet]
        super().__init__("char", "char", tokens, {}, {"alphabet": self.alphabet})

    def _encode(self, text: str, unknown: str = "error") -> np.ndarray:
        codes = _code_points(text)
        ids = np.searchsorted(self._codes, codes).clip(max=self.vocab_size - 1)
        known = self._codes[ids] == codes
        if unknown != "skip" and not known.all():
            position = int(np.argmin(known))
            raise DataError(f"the character {text[position]!r} at position {position} is none of "
                            f"the {self.vocab_size} in this `char` vocabulary; leave it out, or "
                            "train with another tokenizer")
        return ids[known]


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


class BPETokenizer(Tokenizer):
    """Byte pair encoding over bytes (Sennrich et al. 2016; Radford et al. 2019), run by tiktoken.

    tokens: bytes of each id, in the order of merging; None where an id is special or unused.
    special: {name: id}; no text can yield these, because the engine is not told of them.
    """

    def __init__(self, spec: str, pattern: str, tokens: list[bytes | None], special: dict):
        import tiktoken

        ranks = {token: id for id, token in enumerate(tokens) if token is not None}
        self._engine = tiktoken.Encoding(
            spec, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        names = {id: name.encode("utf-8") for name, id in special.items()}
        filled = [names.get(id, token or b"") for id, token in enumerate(tokens)]
        written = [t if t is None else b64encode(t).decode("ascii") for t in tokens]
        super().__init__("bpe", spec, filled, special,
                         {"pattern": pattern, "special": special, "tokens": written})

    def _encode(self, text: str, unknown: str = "error") -> np.ndarray:
        return self._engine.encode_to_numpy(text, disallowed_special=())


def make_tokenizer(spec: str, texts: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer a user names: byte, char, bpe:N, a tiktoken encoding, or a tokenizer.json.

    texts are read once, by `char` for its alphabet and by `bpe:N` for its merges.
    """
    if spec == "byte":
        return ByteTokenizer()
    if spec == "char":
        return CharTokenizer(chain.from_iterable(texts))
    if size := re.fullmatch(r"bpe:([0-9]{1,9})", spec):
        return _train_bpe(spec, int(size[1]), texts)
    if spec.endswith(".json"):
        return from_json(read_json(Path(spec)))
    return _from_tiktoken(spec)


def from_json(value: dict) -> Tokenizer:
    """The tokenizer that `to_json` described; DataError when it would describe itself otherwise."""
    try:
        if value["format"] != FORMAT:
            raise ValueError(f"its format is {value['format']!r}, expected {FORMAT}")
        if value["kind"] == "byte":
            tokenizer = ByteTokenizer()
        elif value["kind"] == "char":
            tokenizer = CharTokenizer(value["alphabet"])
        else:
            tokens = [t if t is None else b64decode(t) for t in value["tokens"]]
            tokenizer = BPETokenizer(value["spec"], value["pattern"], tokens, value["special"])
        if tokenizer.to_json() != value:
            raise ValueError("its hash does not fit its content")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"broken tokenizer JSON ({type(error).__name__}: {error}); restore the "
                        "file, or prepare the dataset again") from None
    return tokenizer


def _train_bpe(spec: str, size: int, texts: Iterable[str]) -> BPETokenizer:
    """Learn up to `size` ids from texts with Hugging Face `tokenizers`; the last one is eot.

    There are fewer if the texts have no more pairs that occur twice. The engine is tiktoken all
    the same: on the standard library it gave the same ids as `tokenizers`, five times faster.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if not 257 <= size <= MAX_SIZE:
        raise DataError(f"{spec}: expected a size of 257 (bytes and end-of-text) to {MAX_SIZE:,}")
    # GPT-2's vocabulary files write each byte as a letter, itself where it is printable.
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    letters = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    trainer = trainers.BpeTrainer(vocab_size=size - 1, min_frequency=2, show_progress=False,
                                  initial_alphabet=list(letters))
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = (text[i:i + LESSON] for text in texts for i in range(0, len(text), LESSON))
    learner.train_from_iterator(pieces, trainer)
    vocabulary = learner.get_vocab()
    tokens = [bytes(map(letters.get, token)) for token in sorted(vocabulary, key=vocabulary.get)]
    return BPETokenizer(spec, GPT2_PATTERN, [*tokens, None], {EOT: len(tokens)})


def _from_tiktoken(name: str) -> BPETokenizer:
    """One of OpenAI's encodings; tiktoken fetches its vocabulary once and then has it cached."""
    import tiktoken

    names = tiktoken.list_encoding_names()
    if name not in names:
        hint = did_you_mean(name, ["byte", "char", "bpe:2048", *names])
        raise DataError(f"--tokenizer={name} is none of byte, char, bpe:N, a path to a "
                        f"tokenizer.json, and tiktoken's {', '.join(names)}{hint}")
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(
            f"the vocabulary of {name} could not be fetched ({type(error).__name__}); without "
            "network set TIKTOKEN_CACHE_DIR to a folder with tiktoken's cached file") from None
    ranks = {id: token for token, id in encoding._mergeable_ranks.items()}
    tokens = [ranks.get(id) for id in range(encoding.n_vocab)]
    return BPETokenizer(name, encoding._pat_str, tokens, dict(encoding._special_tokens))
