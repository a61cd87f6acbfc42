"""Token shards, written; data/shards.py says what is in them, and reads them."""

import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from data.shards import HEADER_BYTES, LAYOUTS
from kit.files import sha256_of


class ShardWriter:
    """Writes one split as a stream of numbers, in files <split>_000000.bin, ... of a folder.

    kind: one of LAYOUTS; files of another than "tokens" have it in their name, before `.bin`.
    shards: the finished ones, {file, tokens, sha256} each; one at least, if without tokens.
    """

    def __init__(self, folder: Path, split: str, vocab_size: int = 0,
                 shard_tokens: int = 100_000_000, kind: str = "tokens"):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.shards: list[dict] = []
        self._suffix = ".bin" if kind == "tokens" else f".{kind}.bin"
        self._magic, self._dtype = list(LAYOUTS[kind].items())[vocab_size > 2**16]
        self._begin()

    def write(self, ids: np.ndarray) -> None:
        """Append integers (n,); token ids are all below vocab_size."""
        ids = np.asarray(ids).astype(self._dtype, copy=False)
        while ids.size:
            if self._tokens == self.shard_tokens:
                self.finish()
                self._begin()
            part, ids = np.split(ids, [self.shard_tokens - self._tokens])
            self._file.write(np.ascontiguousarray(part))
            self._tokens += part.size

    def finish(self) -> None:
        """Complete the shard that is being written: header, fsync, hash."""
        header = np.zeros(256, dtype="<i4")
        header[:3] = *self._magic, self._tokens  # the count is known only now
        with self._file as file:
            file.seek(0)
            file.write(header)
            file.flush()
            os.fsync(file.fileno())
        self.shards.append(
            {"file": self._path.name, "tokens": self._tokens, "sha256": sha256_of(self._path)})

    def close(self) -> None:
        """Let go of the file, however far it came; a system may not remove it before."""
        with suppress(OSError):
            self._file.close()

    def _begin(self) -> None:
        self._path = self.folder / f"{self.split}_{len(self.shards):06d}{self._suffix}"
        self._file = open(self._path, "wb")
        self._file.write(bytes(HEADER_BYTES))
        self._tokens = 0
