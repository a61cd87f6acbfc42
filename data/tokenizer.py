"""Text to ids and back: bytes, characters, or byte pairs.

Every tokenizer is lossless and keeps special ids apart from text: `<|endoftext|>` in a text is
thirteen characters like any others. Each turns into one self-sufficient JSON object, so that a
checkpoint which carries it needs neither network nor dataset to speak.
"""

import re
import sys
import threading
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np

from data import canonical_hash
from kit.errors import UserError

FORMAT = 1  # of the JSON
EOT = "<|endoftext|>"
EXTRAS = Path(__file__).parent.parent / "extras"


class Tokenizer(ABC):
    """What all kinds share; a kind adds `encode_array`.

    spec: how a user names it. special: {name: id} of ids that are no text; eot: the one before
    every document, None without (char). hash: equal hash, equal tokenizer.
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
            raise UserError(f"lone surrogate {text[error.start]!r} at position {error.start} is no "
                            "text; give the text as UTF-8") from None
        return self.encode_array(text, unknown).tolist()

    @abstractmethod
    def encode_array(self, text: str, unknown: str = "error") -> np.ndarray:
        """`encode` of a text that came from UTF-8: unsigned integers (n,) of 1, 2 or 4 bytes."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are not UTF-8, as of half a character, become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one id: a special one's are its name, an unused one has none."""
        if not 0 <= id < self.vocab_size:
            raise UserError(f"token id {id} is not in the vocabulary of {self.vocab_size} ids")
        return self._tokens[id]

    def to_json(self) -> dict:
        """All that `from_json` needs, in JSON's types, with the hash of the rest."""
        return {**self._json, "hash": self.hash}


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and end-of-text."""

    def __init__(self) -> None:
        tokens = [bytes([b]) for b in range(256)] + [EOT.encode()]
        super().__init__("byte", "byte", tokens, {EOT: 256}, {})

    def encode_array(self, text: str, unknown: str = "error") -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)


class CharTokenizer(Tokenizer):
    """One id for each character of an alphabet, in the order of code points (as in nanoGPT)."""

    def __init__(self, alphabet: Iterable[str]):
        self.alphabet = "".join(sorted(set(alphabet)))
        if not self.alphabet:
            raise UserError("a `char` tokenizer needs text with at least one character")
        size = len(self.alphabet)
        self._ids = np.full(sys.maxunicode + 1, size, np.min_scalar_type(size))  # size: unknown
        self._ids[_code_points(self.alphabet)] = np.arange(size)
        tokens = [c.encode("utf-8") for c in self.alphabet]
        super().__init__("char", "char", tokens, {}, {"alphabet": self.alphabet})

    def encode_array(self, text: str, unknown: str = "error") -> np.ndarray:
        ids = self._ids[_code_points(text)]
        known = ids < self.vocab_size
        if known.all():
            return ids
        if unknown != "skip":
            at = int(np.argmin(known))
            raise UserError(f"the character {text[at]!r} at position {at} is none of the alphabet "
                            f"of {self.vocab_size}; leave it out, or take another tokenizer")
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

        self._pattern = pattern
        ranks = {token: id for id, token in enumerate(tokens) if token is not None}
        unused = {id for id, token in enumerate(tokens) if token is None}
        if not all(isinstance(id, int) and id in unused for id in special.values()):
            raise ValueError("a special id is that of a token, or none")
        # One special token that no text yields, as `_run` allows none, with an id beyond the last:
        # without any, tiktoken looks for "" at every character and is half as fast.
        self._make_engine = partial(tiktoken.Encoding, spec, pat_str=pattern, mergeable_ranks=ranks,
                                    special_tokens={EOT: len(tokens)})
        # Each thread has its own: two that share one wait for the scratch memory of its pattern and
        # encode at 11 to 22 MB/s together, at 27 apart (2 cores, gpt2). To make one takes 25 ms.
        self._of_thread = threading.local()
        self._engine()
        names = {id: name.encode("utf-8") for name, id in special.items()}
        filled = [names.get(id, token or b"") for id, token in enumerate(tokens)]
        written = [t if t is None else b64encode(t).decode("ascii") for t in tokens]
        super().__init__("bpe", spec, filled, special,
                         {"pattern": pattern, "special": special, "tokens": written})

    def encode_array(self, text: str, unknown: str = "error") -> np.ndarray:
        try:
            return self._run(text)
        except UserError:  # tried again in parts, if it has more than one
            from data.making.vocabulary import cut

            return np.concatenate([self._run(part) for part in cut(text, self._pattern)])

    def _engine(self):
        if not hasattr(self._of_thread, "engine"):
            self._of_thread.engine = self._make_engine()
        return self._of_thread.engine

    def _run(self, text: str) -> np.ndarray:
        engine = self._engine()
        try:
            return engine.encode_to_numpy(text, disallowed_special=())
        except BaseException as error:  # as a panic in Rust is no Exception
            if type(error).__name__ not in ("PanicException", "ValueError"):
                raise
            raise UserError(f"tiktoken gives up on a text of {len(text):,} characters ({error}); "
                            "shorten runs of 100,000 spaces, if it has any") from None


def from_json(value: dict) -> Tokenizer:
    """The tokenizer that `to_json` described; UserError when it would describe itself otherwise."""
    try:
        kind, version = value["kind"], value["format"]
        if version != FORMAT:
            newer = isinstance(version, int) and version > FORMAT
            way = "a newer version wrote it, update this clone" if newer else "restore the file"
            raise UserError(f"a tokenizer JSON of format {version!r}, expected {FORMAT}; {way}")
        if kind == "byte":
            tokenizer = ByteTokenizer()
        elif kind == "char":
            tokenizer = CharTokenizer(value["alphabet"])
        elif kind == "bpe":
            tokens = [t if t is None else b64decode(t) for t in value["tokens"]]
            tokenizer = BPETokenizer(value["spec"], value["pattern"], tokens, value["special"])
        elif kind in plugins():
            tokenizer = import_module(f"extras.{kind}").load(value)
        else:
            known = ", ".join(["byte", "char", "bpe", *plugins()])
            raise UserError(f"a tokenizer JSON of kind {kind!r} is none of {known}; add the "
                            f"extras/{kind}.py that wrote it")
        if tokenizer.to_json() != value:
            raise ValueError("its hash does not fit its content")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"broken tokenizer JSON ({type(error).__name__}: {error}); restore the "
                        "file, or prepare the dataset again") from None
    return tokenizer


def plugins() -> list[str]:
    """Files of extras/ with a tokenizer, imported by name so that a checkpoint with one opens."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(EXTRAS.glob("*.py"))}
    return [name for name, text in texts.items() if re.fullmatch("[a-z0-9_]+", name) and
            "\ndef make(argument: str)" in text and "\ndef load(value: dict)" in text]
