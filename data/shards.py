"""Token shards on disk, in the layout of llm.c (https://github.com/karpathy/llm.c, dev/data).

A shard is a header of 256 little-endian int32, `[0]` magic, `[1]` version, `[2]` number of tokens,
the rest zero, and then the tokens: uint16, or uint32 for vocabularies above 65,536.
"""

import bisect
import hashlib
import io
import os
from pathlib import Path

import numpy as np

from data import DataError
from data.order import window_starts

HEADER_BYTES = 256 * 4
DTYPES = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}  # by magic and version


class ShardWriter:
    """Writes one split as a stream; of it only what `write` was just given lies in memory.

    A shard is named `.tmp-...` until it is complete and on disk, then `<split>_000000.bin`.
    Used as a context manager, an error removes the unfinished one.
    """

    def __init__(self, folder: str | Path, split: str, vocab_size: int,
                 shard_tokens: int = 100_000_000):
        self.folder, self.split, self.shard_tokens = Path(folder), split, shard_tokens
        self.shards: list[dict] = []  # the finished ones: {file, tokens, sha256}
        self._magic, self._dtype = list(DTYPES.items())[vocab_size > 2**16]
        self._file: io.BufferedRandom | None = None

    def write(self, ids: np.ndarray) -> None:
        """Append ids, integers (n,), all below vocab_size."""
        ids = np.asarray(ids).astype(self._dtype)
        while ids.size:
            if self._file is None:
                self._open()
            part, ids = np.split(ids, [self.shard_tokens - self._tokens])
            self._file.write(part.tobytes())
            self._tokens += part.size
            if self._tokens == self.shard_tokens:
                self._finish()

    def close(self) -> list[dict]:
        """Finish the last shard and return all of them, [{file, tokens, sha256}, ...].

        A split without tokens gets one shard all the same, so that a reader can say so.
        """
        if self._file is None and not self.shards:
            self._open()
        if self._file is not None:
            self._finish()
        return self.shards

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            self.close()
        elif self._file is not None:
            self._file.close()
            self._temporary.unlink()

    def _open(self) -> None:
        name = f"{self.split}_{len(self.shards):06d}.bin"
        self._path, self._temporary = self.folder / name, self.folder / f".tmp-{name}"
        self._file = open(self._temporary, "w+b")
        self._file.write(bytes(HEADER_BYTES))
        self._tokens = 0

    def _finish(self) -> None:
        header = np.zeros(256, dtype="<i4")
        header[:3] = *self._magic, self._tokens  # the count is known only now
        self._file.seek(0)
        self._file.write(header.tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.seek(0)
        sha256 = hashlib.sha256()
        while chunk := self._file.read(1 << 20):
            sha256.update(chunk)
        self._file.close()
        self._file = None
        os.replace(self._temporary, self._path)
        self.shards.append(
            {"file": self._path.name, "tokens": self._tokens, "sha256": sha256.hexdigest()})


def check_header(path: Path) -> tuple[int, np.dtype]:
    """Number of tokens of a shard, and their type; DataError says what is wrong with the file."""
    if not path.is_file():
        raise DataError(f"{path} is missing; prepare the dataset again")
    with open(path, "rb") as file:
        raw = file.read(12)
    magic, version, count = np.frombuffer(raw.ljust(12, b"\0"), dtype="<i4").tolist()
    dtype = DTYPES.get((magic, version))
    if dtype is None:
        raise DataError(
            f"{path} is no token shard: magic and version are {magic}, {version}, expected one of "
            f"{', '.join(map(str, DTYPES))} (nanoGPT's .bin files have no header); prepare the "
            "text with `python -m data.prepare`")
    size, expected = path.stat().st_size, HEADER_BYTES + count * dtype.itemsize
    if size != expected or count < 0:
        raise DataError(f"{path} is torn: its {count:,} tokens make {expected:,} bytes, but it has "
                        f"{size:,}; prepare or download it again")
    return count, dtype


class Split:
    """The tokens of one split, in one or more shards, read as if they were one array.

    Opening checks every shard: it exists, has a known header and the size that this promises, and
    holds no id >= vocab_size (in a sample; `rows` looks at all it reads). DataError names the first
    that fails. A Split reads by seeking: threads and forked processes need one each.
    """

    def __init__(self, name: str, paths: list[str | Path], vocab_size: int):
        if not paths:
            raise DataError(f"the {name} split has no shards; prepare the dataset again")
        self.name, self.paths, self.vocab_size = name, [Path(p) for p in paths], vocab_size
        counts, dtypes = zip(*map(check_header, self.paths), strict=True)
        if len(set(dtypes)) > 1:
            raise DataError(f"the {name} split in {self.paths[0].parent} mixes uint16 and uint32 "
                            "shards; keep one kind")
        self._dtype = dtypes[0]
        self._ends = np.cumsum(counts).tolist()  # of each shard, in tokens of the split
        self.n_tokens: int = self._ends[-1]
        # Plain files, not memory maps: pages touched through a map count as resident, so that a
        # run over much data seems to eat all memory (nanoGPT PR#428). This stays flat.
        self._files = [io.FileIO(path) for path in self.paths]
        for end, count in zip(self._ends, counts, strict=True):
            self._check_sample(end - count, end)

    def close(self) -> None:
        """Close the files; nothing can be read any more."""
        for file in getattr(self, "_files", ()):
            file.close()

    __del__ = close

    def require(self, block_size: int) -> None:
        """DataError unless one window of block_size + 1 tokens fits."""
        if self.n_tokens < block_size + 1:
            raise DataError(
                f"the {self.name} split has {self.n_tokens:,} tokens, but --block_size={block_size}"
                f" needs {block_size + 1:,}; set a smaller --block_size or prepare more text")

    def read(self, start: int, n: int) -> np.ndarray:
        """Tokens start .. start + n - 1 as they lie on disk, uint16 or uint32 (n,)."""
        if not 0 <= start <= start + n <= self.n_tokens:
            raise IndexError(f"tokens {start} to {start + n} of {self.n_tokens}")
        out = np.empty(n, dtype=self._dtype)
        self._read_into(start, out)
        return out

    def windows_per_epoch(self, block_size: int) -> int:
        """Rows in an epoch: one window fewer than fit, which leaves room for the shifts."""
        return max(1, (self.n_tokens - 1) // block_size - 1)

    def rows(self, first: int, n: int, block_size: int, seed: int) -> np.ndarray:
        """Training rows first .. first + n - 1, int64 (n, block_size + 1).

        [:, :-1] are inputs and [:, 1:] targets. A pure function of its arguments: row i of a seed
        is the same whatever was read before and in whatever batches (see `order`).
        """
        self.require(block_size)
        windows = self.windows_per_epoch(block_size)
        slack = self.n_tokens - 1 - windows * block_size
        starts = window_starts(first, n, windows, block_size, slack, seed)
        out = np.empty((n, block_size + 1), dtype=self._dtype)
        for row, start in zip(out, starts, strict=True):
            self._read_into(start, row)
        if out.max(initial=0) >= self.vocab_size:
            for row, start in zip(out, starts, strict=True):
                self._check_ids(row, start)
        return out.astype(np.int64)

    def fixed_windows(self, block_size: int) -> int:
        """Number of evaluation windows: every token but the first is a target exactly once."""
        return max(0, -(-(self.n_tokens - 1) // block_size))

    def window(self, i: int, n: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Evaluation windows i .. i + n - 1: inputs and targets, each int64 (n, block_size).

        Past the end of the split inputs are 0 and targets -1: for the rest of a ragged last window
        and for whole windows, so that one rank may ask for as many as any other.
        """
        x = np.zeros(n * block_size, dtype=np.int64)
        y = np.full(n * block_size, -1, dtype=np.int64)
        start = i * block_size
        targets = min(n * block_size, self.n_tokens - 1 - start)
        if targets > 0:
            tokens = self.read(start, targets + 1)
            self._check_ids(tokens, start)
            x[:targets], y[:targets] = tokens[:-1], tokens[1:]
        return x.reshape(n, block_size), y.reshape(n, block_size)

    def _read_into(self, start: int, out: np.ndarray) -> None:
        """Fill a contiguous array (n,) with the tokens from `start` on, across shards."""
        if not out.size:
            return
        shard = bisect.bisect_right(self._ends, start)
        file, begin = self._files[shard], self._ends[shard - 1] if shard else 0
        part = out[:self._ends[shard] - start]
        file.seek(HEADER_BYTES + (start - begin) * out.itemsize)
        if file.readinto(part) != part.nbytes:
            raise DataError(f"{self.paths[shard]} was cut while in use; prepare it again")
        self._read_into(start + part.size, out[part.size:])

    def _check_sample(self, begin: int, end: int, chunks: int = 16, length: int = 4096) -> None:
        """Look for foreign ids in the first, the last and some chunks between of one shard."""
        last = max(begin, end - length)
        for start in sorted(set(np.linspace(begin, last, chunks).astype(int).tolist())):
            self._check_ids(self.read(start, min(length, end - start)), start)

    def _check_ids(self, ids: np.ndarray, start: int) -> None:
        """DataError when one of these ids, which lie at `start`, is >= vocab_size."""
        if ids.max(initial=0) >= self.vocab_size:
            position = start + int(np.argmax(ids >= self.vocab_size))
            shard = bisect.bisect_right(self._ends, position)
            within = position - (self._ends[shard - 1] if shard else 0)
            raise DataError(
                f"{self.paths[shard]}: token {within} has id {ids[position - start]}, but the "
                f"vocabulary has {self.vocab_size} ids; the tokenizer is not the shards' own")
