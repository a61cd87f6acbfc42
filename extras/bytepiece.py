"""BytePiece, a unigram model over bytes (Su Jianlin, https://github.com/bojone/bytepiece).

    python -m data.prepare my.txt --tokenizer=bytepiece:MODEL_FILE

MODEL_FILE is what `bytepiece.Trainer` saves. The package and the automaton below it are built from
source, the latter for bytes instead of str, with a C compiler:

    AHOCORASICK_BYTES=1 pip install --no-binary pyahocorasick pyahocorasick cython setuptools wheel
    pip install --no-build-isolation "bytepiece>=0.6.3,<0.7"

A checkpoint carries the pieces, so to decode takes no package; to encode does.
"""

import re
from base64 import b64decode, b64encode
from functools import cached_property
from math import inf
from pathlib import Path

import numpy as np

from data import read_json
from data.tokenizer import EOT, Tokenizer
from kit.errors import UserError

SPECIAL = ("<pad>", "<bos>", "<eos>")  # ids 0, 1, 2 of every model
# Lines, as BytePiece cuts its text, but none beyond 10,000 characters (as its own trainer has it):
# its time grows with the square of a line.
LINE = re.compile(r".{0,10000}\n{1,10000}|.{1,10000}")


class BytePieceTokenizer(Tokenizer):
    """The pieces of a model under its own ids, and end-of-text after the last of them.

    model: {piece in base64: [id, readable, count]}, as BytePiece saves it. The most likely pieces
    are taken, never a sample of them. ValueError for a model that cannot encode every text.
    """

    def __init__(self, model: dict):
        entries = sorted((id, b64decode(key), count) for key, (id, _, count) in model.items())
        pieces = [piece for _, piece, _ in entries]
        if [id for id, _, _ in entries] != list(range(3, 3 + len(entries))):
            raise ValueError("its ids do not run from 3 on")
        if not all(0 < count < inf for _, _, count in entries):
            raise ValueError("it has counts that are none")
        if not {bytes([b]) for b in range(256)} <= {*pieces}:
            raise ValueError("it lacks some of the 256 bytes")
        if len({*pieces, b""}) <= len(pieces):
            raise ValueError("one of its pieces is empty or there twice")
        written = {b64encode(piece).decode("ascii"): [id, piece.decode(errors="ignore"), count]
                   for id, piece, count in entries}
        names = {name: id for id, name in enumerate(SPECIAL)} | {EOT: 3 + len(pieces)}
        tokens = [*map(str.encode, SPECIAL), *pieces, EOT.encode()]
        super().__init__("bytepiece", "bytepiece", tokens, names, {"model": written})
        self._ids = {piece: id for id, piece, _ in entries}
        self._type = np.min_scalar_type(self.vocab_size)

    @cached_property
    def _engine(self):
        try:
            import bytepiece

            return bytepiece.Tokenizer(self._json["model"])
        except (ImportError, TypeError) as error:  # a TypeError where the automaton is for str
            raise UserError(
                f"the bytepiece tokenizer needs its package ({error}): AHOCORASICK_BYTES=1 pip "
                "install --no-binary pyahocorasick pyahocorasick cython setuptools wheel && pip "
                "install --no-build-isolation bytepiece") from None

    def encode_array(self, text: str, unknown: str = "error") -> np.ndarray:
        # Not `Tokenizer.encode` of the package: it composes characters (NFC), which loses text.
        cut, ids = self._engine._tokenize, self._ids
        return np.array([ids[piece] for line in LINE.findall(text)
                         for piece in cut(line.encode("utf-8"))], self._type)


def make(argument: str) -> BytePieceTokenizer:
    """The tokenizer of a model file; UserError without the package, or for what is no model."""
    if not Path(argument).is_file():
        raise UserError(f"there is no file {argument!r}; expected bytepiece:MODEL_FILE, a model "
                        "that bytepiece.Trainer saved")
    try:
        tokenizer = BytePieceTokenizer(read_json(Path(argument)))
    except (AttributeError, TypeError, ValueError, UserError) as error:
        raise UserError(f"{argument} is no BytePiece model ({error}); give one that "
                        "bytepiece.Trainer saved") from None
    tokenizer._engine  # noqa: B018  told now, not after the first pass over the text
    return tokenizer


def load(value: dict) -> BytePieceTokenizer:
    """The tokenizer that its `to_json` described."""
    return BytePieceTokenizer(value["model"])
