"""Text to ids and back: bytes, characters, or byte pairs (see `bpe`).

Every tokenizer is lossless and keeps special ids apart from text: `<|endoftext|>` in a text is
thirteen characters like any others. Each turns into one self-sufficient JSON object, so that a
checkpoint which carries it needs neither network nor dataset to speak.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data import DataError

FORMAT = 1  # of the JSON
EOT = "<|endoftext|>"


class Tokenizer:
    """What all kinds share; a kind adds `_encode` and what its JSON holds beyond the rest.

    spec: how a user names it. vocab_size: ids are 0 .. vocab_size - 1. special: {name: id} of ids
    that are no text. eot: the one that stands before every document, None without (char).
    """

    kind: str

    def __init__(self, spec: str, tokens: list[bytes], special: dict[str, int]):
        self.spec, self.vocab_size = spec, len(tokens)
        self.special, self.eot = special, special.get(EOT)
        self._tokens = tokens

    def encode(self, text: str, unknown: str = "error") -> list[int]:
        """Ids of a text, none of them special.

        DataError, with the position, for a lone surrogate (UTF-8 has none) and for a character
        that a `char` alphabet lacks; unknown="skip" drops the latter.
        """
        return self._encode(check_utf8(text), unknown).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of several texts, an integer array (n,) for each, by several threads."""
        with ThreadPoolExecutor() as pool:
            return list(pool.map(lambda text: self._encode(check_utf8(text), "error"), texts))

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

    @functools.cached_property
    def hash(self) -> str:
        """Hex SHA-256 of the canonical JSON: equal hash, equal tokenizer."""
        return canonical_hash(self._json)

    @functools.cached_property
    def _json(self) -> dict:
        return {"format": FORMAT, "kind": self.kind, "spec": self.spec,
                "vocab_size": self.vocab_size, "eot": self.eot, **self._body()}

    def _encode(self, text: str, unknown: str) -> np.ndarray:
        raise NotImplementedError

    def _body(self) -> dict:
        return {}


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and end-of-text."""

    kind = "byte"

    def __init__(self) -> None:
        super().__init__("byte", [bytes([b]) for b in range(256)] + [EOT.encode()], {EOT: 256})

    def _encode(self, text: str, unknown: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)


class CharTokenizer(Tokenizer):
    """One id for each character of an alphabet, in the order of code points (as in nanoGPT)."""

    kind = "char"

    def __init__(self, alphabet: Iterable[str]):
        self.alphabet = check_utf8("".join(sorted(set(alphabet))))
        if not self.alphabet:
            raise DataError("a `char` tokenizer needs text with at least one character")
        super().__init__("char", [c.encode("utf-8") for c in self.alphabet], {})
        codes = _code_points(self.alphabet)
        self._ids = np.full(int(codes[-1]) + 2, self.vocab_size, dtype=np.uint32)  # by code point
        self._ids[codes] = np.arange(self.vocab_size)

    def _encode(self, text: str, unknown: str) -> np.ndarray:
        ids = self._ids[_code_points(text).clip(max=self._ids.size - 1)]
        known = ids < self.vocab_size
        if unknown != "skip" and not known.all():
            position = int(np.argmin(known))
            raise DataError(f"the character {text[position]!r} at position {position} is none of "
                            f"the {self.vocab_size} in this `char` vocabulary; leave it out, or "
                            "train with another tokenizer")
        return ids[known]

    def _body(self) -> dict:
        return {"alphabet": self.alphabet}


def make_tokenizer(spec: str, texts: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer a user names: byte, char, bpe:N, a tiktoken encoding, or a tokenizer.json.

    texts are read once, by `char` for its alphabet and by `bpe:N` for its merges. DataError for an
    unknown name, with those there are, and for a vocabulary that cannot be fetched.
    """
    from data import bpe

    if spec == "byte":
        return ByteTokenizer()
    if spec == "char":
        return CharTokenizer(set().union(*map(set, texts)))
    if size := re.fullmatch(r"bpe:([0-9]{1,9})", spec):
        return bpe.train(spec, int(size[1]), texts)
    if spec.endswith(".json"):
        return from_json(read_json(Path(spec)))
    return bpe.from_tiktoken(spec)


def from_json(value: dict) -> Tokenizer:
    """The tokenizer that `to_json` described; DataError when anything in it does not fit."""
    from data import bpe

    kinds = {"byte": lambda body: ByteTokenizer(),
             "char": lambda body: CharTokenizer(body["alphabet"]),
             "bpe": bpe.from_json}
    try:
        body = {key: item for key, item in value.items() if key != "hash"}
        if body["format"] != FORMAT:
            raise ValueError(f"its format is {body['format']!r}, expected {FORMAT}")
        if canonical_hash(body) != value["hash"]:
            raise ValueError("its hash does not fit its content")
        tokenizer = kinds[body["kind"]](body)
        if tokenizer.to_json() != value:
            raise ValueError("its fields contradict one another")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"broken tokenizer JSON ({type(error).__name__}: {error}); restore the "
                        "file, or prepare the dataset again") from None
    return tokenizer


def canonical_hash(value: object) -> str:
    """Hex SHA-256 of a JSON value, whatever the order of its keys and the spaces in its file."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def read_json(path: Path) -> dict:
    """Read a JSON object; DataError when the file is missing or holds no such thing."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} is missing; prepare the dataset again") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); prepare the dataset again") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object; prepare the dataset again")
    return value


def check_utf8(text: str) -> str:
    """Return the text if UTF-8 can write it; DataError names the lone surrogate if not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"lone surrogate {text[error.start]!r} at position {error.start} is no "
                        "text; read the file as UTF-8, with --errors=replace if need be") from None
    return text


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")
