"""Token shards on disk, in the layout of llm.c (https://github.com/karpathy/llm.c, dev/data).

A shard is a header of 256 little-endian int32, `[0]` magic, `[1]` version, `[2]` number of tokens,
the rest zero, and then the tokens: uint16, or uint32 for vocabularies above 65,536. Instruction
data has two files more of that form: what is trained on, and where samples begin.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.order import window_starts, windows
from kit.errors import UserError
from kit.files import sha256_of

HEADER_BYTES = 256 * 4
LAYOUTS = {  # what a file holds: its magic, version and type
    "tokens": {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")},
    "mask": {(20261129, 1): np.dtype("u1")},  # 1 where a token is trained on
    "starts": {(20261130, 1): np.dtype("<i8")},  # of samples, in tokens of their split
}
CHUNK = 1 << 20  # numbers or bytes held when a whole file is read
OPEN_FILES = 64  # of a split at a time: a Mac grants a process 256, and 10B tokens have 100 shards


def check_header(path: Path, kind: str = "tokens") -> tuple[int, np.dtype]:
    """How many numbers a file holds, and their type; UserError says what is wrong with it."""
    if not path.is_file():
        raise UserError(f"{path} is missing; prepare the dataset again")
    with open(path, "rb") as file:
        raw = file.read(12)
    magic, version, count = np.frombuffer(raw.ljust(12, b"\0"), dtype="<i4").tolist()
    dtype = LAYOUTS[kind].get((magic, version))
    if dtype is None:
        raise UserError(
            f"{path} is no {kind.rstrip('s')} shard: it begins with {magic}, {version} and not one "
            f"of {list(LAYOUTS[kind])}; prepare the text with data.prepare, or convert nanoGPT's "
            ".bin files with extras.nanogpt_bin")
    size, expected = path.stat().st_size, HEADER_BYTES + count * dtype.itemsize
    if size != expected or count < 0:
        raise UserError(f"{path} is torn: its {count:,} {kind} make {expected:,} bytes, but it has "
                        f"{size:,}; prepare or download it again")
    return count, dtype


class Shards:
    """The numbers of one split, in one or more shards, read as if they were one array.

    Opening checks each file: its header, its size, and that a sample of its numbers is below limit,
    as all are when they are read; UserError if not. Threads and forked processes need one each.
    """

    def __init__(self, paths: Sequence[Path], kind: str = "tokens", limit: int = 2**62):
        self.paths, self.kind, self.limit = list(paths), kind, limit
        counts, self._dtypes = zip(*(check_header(path, kind) for path in paths), strict=True)
        self._widest = max(self._dtypes, key=lambda dtype: dtype.itemsize)
        self._bounds = np.cumsum([0, *counts]).tolist()  # of the shards, in tokens of the split
        self.n: int = self._bounds[-1]
        # Plain files: pages touched through a memory map count as resident (nanoGPT PR#428).
        files = self.paths  # not self: a cycle would keep the files open
        self._open = lru_cache(OPEN_FILES)(lambda i: open(files[i], "rb", buffering=0))
        for begin, count in zip(self._bounds, counts, strict=False):
            n = min(4096, count)
            for start in np.linspace(begin, begin + count - n, 16).astype(int).tolist():
                self.read(start, n)

    def read(self, start: int, n: int) -> np.ndarray:
        """Numbers start .. start + n - 1, int64 (n,); UserError where one is not below limit."""
        return self.read_rows([start], n)[0]

    def read_rows(self, starts: Sequence[int], n: int) -> np.ndarray:
        """n numbers from each start on, int64 (len(starts), n); UserError as in `read`."""
        out = np.empty((len(starts), n), self._widest)
        for row, start in zip(out, starts, strict=True):
            self._fill(row, start)
        if out.size and out.max() >= self.limit:
            i, j = np.argwhere(out >= self.limit)[0].tolist()
            at, whole = starts[i] + j, "the vocabulary" if self.kind == "tokens" else "a mask"
            shard = bisect_right(self._bounds, at) - 1
            raise UserError(
                f"{self.paths[shard]}: token {at - self._bounds[shard]} has id {out[i, j]}, but "
                f"{whole} has {self.limit} ids; give the tokenizer of the shards, or prepare again")
        return out.astype(np.int64)

    def _fill(self, row: np.ndarray, start: int) -> None:
        while row.size:
            shard = bisect_right(self._bounds, start) - 1
            part = row[:self._bounds[shard + 1] - start]
            dtype, file = self._dtypes[shard], self._open(shard)
            raw = part if part.dtype == dtype else np.empty(part.size, dtype)
            file.seek(HEADER_BYTES + (start - self._bounds[shard]) * dtype.itemsize)
            if file.readinto(raw) < raw.nbytes:
                raise UserError(f"{self.paths[shard]} was cut while in use; prepare it again")
            if raw is not part:
                part[:] = raw
            row, start = row[part.size:], start + part.size

    def verify(self, recorded: list[dict]) -> None:
        """Read everything: each file has the recorded hash, and each number is below limit."""
        for path, record in zip(self.paths, recorded, strict=True):
            if record.get("sha256") and (got := sha256_of(path)) != record["sha256"]:
                raise UserError(f"{path} has SHA-256 {got}, but dataset.json says "
                                f"{record['sha256']}; prepare or download it again")
        chunks = range(0, self.n, CHUNK)
        for start in tqdm(chunks, "checking ids", unit=" Mi", leave=False, disable=None):
            self.read(start, min(CHUNK, self.n - start))


class Split(Shards):
    """The tokens of one split, and which of them are a training row or an evaluation window."""

    def __init__(self, name: str, paths: Sequence[Path], vocab_size: int):
        super().__init__(paths, "tokens", vocab_size)
        self.name, self.vocab_size, self.n_tokens = name, vocab_size, self.n
        self.align: int | None = None  # or the separator: rows begin with one where they can

    def require(self, block_size: int) -> None:
        """UserError unless one window of block_size + 1 tokens fits."""
        if self.n_tokens < block_size + 1:
            smaller = "set a smaller --block_size or " if self.n_tokens > 1 else ""
            raise UserError(
                f"the {self.name} split has {self.n_tokens:,} tokens, but --block_size={block_size}"
                f" needs {block_size + 1:,}; {smaller}prepare more text")

    def rows(self, first: int, n: int, block_size: int, seed: int) -> np.ndarray:
        """Training rows first .. first + n - 1, int64 (n, block_size + 1), a pure function."""
        self.require(block_size)
        return self.read_rows(self.row_starts(first, n, block_size, seed), block_size + 1)

    def row_starts(self, first: int, n: int, block_size: int, seed: int) -> list[int]:
        """The first token of each of these training rows."""
        starts = window_starts(first, n, self._span(block_size), block_size, seed)
        return starts if self.align is None else [self._aligned(s, block_size) for s in starts]

    def _span(self, block_size: int) -> int:
        """How many tokens windows are laid out over; aligned ones have room to move at the end."""
        return max(block_size + 1, self.n_tokens - (0 if self.align is None else block_size))

    def _aligned(self, start: int, block_size: int) -> int:
        """Where the first document begins in the block_size tokens from start on, else start."""
        n = min(block_size, self.n_tokens - block_size - start)
        begins = np.flatnonzero(self.read(start, n) == self.align)
        return start + int(begins[0]) if begins.size else start

    def batch(self, first: int, n: int, block_size: int, seed: int) -> tuple[np.ndarray, ...]:
        """Inputs and targets of rows first .. first + n - 1, each int64 (n, block_size)."""
        rows = self.rows(first, n, block_size, seed)
        return rows[:, :-1], rows[:, 1:]

    def epoch_rows(self, block_size: int) -> int:
        """Rows of an epoch, from which on they come again in another order."""
        return windows(self._span(block_size), block_size)

    def fixed_windows(self, block_size: int) -> int:
        """Number of evaluation windows: every token but the first is a target exactly once."""
        return max(0, -(-(self.n_tokens - 1) // block_size))

    def window(self, i: int, n: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Evaluation windows i .. i + n - 1: inputs and targets, each int64 (n, block_size).

        Past the end inputs are 0 and targets -1, so that one rank may ask for as many as another.
        """
        x = np.zeros(n * block_size, dtype=np.int64)
        y = np.full(n * block_size, -1, dtype=np.int64)
        start = i * block_size
        targets = min(n * block_size, self.n_tokens - 1 - start)
        if targets > 0:
            tokens = self.read(start, targets + 1)
            x[:targets], y[:targets] = tokens[:-1], tokens[1:]
        return x.reshape(n, block_size), y.reshape(n, block_size)
