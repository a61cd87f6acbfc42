"""Token shards on disk, in the layout of llm.c (https://github.com/karpathy/llm.c, dev/data).

A shard is a header of 256 little-endian int32, `[0]` magic, `[1]` version, `[2]` number of tokens,
the rest zero, and then the tokens: uint16, or uint32 for vocabularies above 65,536.

Which window of a split is training row number i is computed, never stored. Each epoch takes every
window once, in an order of its own and from starts that an offset of its own shifts. Both follow
from (seed, epoch), so to resume with another batch size takes no state but a count of rows.
"""

import hashlib
import os
from bisect import bisect_right
from pathlib import Path

import numpy as np

from data import DataError

HEADER_BYTES = 256 * 4
DTYPES = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}  # by magic and version
_ROUNDS = 4  # pairs of Feistel rounds, and
_MIN_BITS = 6  # of its domain: with fewer of either, small permutations fail a chi-square test
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class ShardWriter:
    """Writes one split as a stream of ids, in files <split>_000000.bin, ... of a folder.

    shards: the finished ones, {file, tokens, sha256} each; one at least, if without tokens.
    """

    def __init__(self, folder: Path, split: str, vocab_size: int, shard_tokens: int = 100_000_000):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.shards: list[dict] = []
        self._magic, self._dtype = list(DTYPES.items())[vocab_size > 2**16]
        self._begin()

    def write(self, ids: np.ndarray) -> None:
        """Append ids, integers (n,), all below vocab_size."""
        ids = np.asarray(ids).astype(self._dtype)
        while ids.size:
            if self._tokens == self.shard_tokens:
                self.finish()
                self._begin()
            part, ids = np.split(ids, [self.shard_tokens - self._tokens])
            with open(self._path, "ab") as file:
                file.write(part.tobytes())
            self._tokens += part.size

    def finish(self) -> None:
        """Complete the shard that is being written: header, fsync, hash."""
        header = np.zeros(256, dtype="<i4")
        header[:3] = *self._magic, self._tokens  # the count is known only now
        sha256 = hashlib.sha256()
        with open(self._path, "r+b") as file:
            file.write(header.tobytes())
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            while chunk := file.read(1 << 20):
                sha256.update(chunk)
        self.shards.append(
            {"file": self._path.name, "tokens": self._tokens, "sha256": sha256.hexdigest()})

    def _begin(self) -> None:
        self._path = self.folder / f"{self.split}_{len(self.shards):06d}.bin"
        self._path.write_bytes(bytes(HEADER_BYTES))
        self._tokens = 0


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
            f"{path} is no token shard: it begins with {magic}, {version} and not with one of "
            f"{list(DTYPES)} (as nanoGPT's .bin files); prepare the text with data.prepare")
    size, expected = path.stat().st_size, HEADER_BYTES + count * dtype.itemsize
    if size != expected or count < 0:
        raise DataError(f"{path} is torn: its {count:,} tokens make {expected:,} bytes, but it has "
                        f"{size:,}; prepare or download it again")
    return count, dtype


class Split:
    """The tokens of one split, in one or more shards, read as if they were one array.

    Opening checks every shard: it exists, has a known header and the size that this promises, and
    a sample of its ids is below vocab_size, as all are when they are read. DataError if not.
    It reads by seeking: threads and forked processes need one each.
    """

    def __init__(self, name: str, paths: list[Path], vocab_size: int):
        self.name, self.paths, self.vocab_size = name, paths, vocab_size
        counts, self._dtypes = zip(*map(check_header, paths), strict=True)
        self._bounds = np.cumsum([0, *counts]).tolist()  # of the shards, in tokens of the split
        self.n_tokens: int = self._bounds[-1]
        # Plain files, not memory maps: pages touched through a map count as resident, so that a
        # run over much data seems to eat all memory (nanoGPT PR#428).
        self._files = [open(path, "rb", buffering=0) for path in paths]
        for begin, count in zip(self._bounds, counts, strict=False):
            n = min(4096, count)
            for start in np.linspace(begin, begin + count - n, 16).astype(int).tolist():
                self.read(start, n)

    def require(self, block_size: int) -> None:
        """DataError unless one window of block_size + 1 tokens fits."""
        if self.n_tokens < block_size + 1:
            raise DataError(
                f"the {self.name} split has {self.n_tokens:,} tokens, but --block_size={block_size}"
                f" needs {block_size + 1:,}; set a smaller --block_size or prepare more text")

    def read(self, start: int, n: int) -> np.ndarray:
        """Tokens start .. start + n - 1, int64 (n,); DataError where one is >= vocab_size."""
        out, done = np.empty(n, dtype=np.int64), 0
        while done < n:
            shard = bisect_right(self._bounds, start + done) - 1
            path, dtype = self.paths[shard], self._dtypes[shard]
            at = start + done - self._bounds[shard]
            count = min(n - done, self._bounds[shard + 1] - start - done)
            self._files[shard].seek(HEADER_BYTES + at * dtype.itemsize)
            raw = self._files[shard].read(count * dtype.itemsize)
            if len(raw) < count * dtype.itemsize:
                raise DataError(f"{path} was cut while in use; prepare it again")
            ids = np.frombuffer(raw, dtype)
            if ids.max() >= self.vocab_size:
                i = int(np.argmax(ids >= self.vocab_size))
                raise DataError(
                    f"{path}: token {at + i} has id {ids[i]}, but the vocabulary has "
                    f"{self.vocab_size} ids; the tokenizer is not the shards' own")
            out[done:done + count] = ids
            done += count
        return out

    def rows(self, first: int, n: int, block_size: int, seed: int) -> np.ndarray:
        """Training rows first .. first + n - 1, int64 (n, block_size + 1).

        [:, :-1] are inputs and [:, 1:] targets. A pure function of its arguments: row i of a seed
        is the same whatever was read before and in whatever batches (see `window_starts`).
        """
        self.require(block_size)
        out = np.empty((n, block_size + 1), dtype=np.int64)
        starts = window_starts(first, n, self.n_tokens, block_size, seed)
        for row, start in zip(out, starts, strict=True):
            row[:] = self.read(start, block_size + 1)
        return out

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
            x[:targets], y[:targets] = tokens[:-1], tokens[1:]
        return x.reshape(n, block_size), y.reshape(n, block_size)


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers so that near ones land far apart (the finalizer of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _feistel(x: np.ndarray, key: np.ndarray, bits: int) -> np.ndarray:
    """One bijection of [0, 2**bits) per key: each half is XORed with a hash of the other."""
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64(2**(bits // 2) - 1), np.uint64(2**(bits - bits // 2) - 1)
    low, high = x & low_mask, x >> low_bits
    for _ in range(_ROUNDS):
        key = key + _GOLDEN
        low = low ^ (_mix(high + key) & low_mask)
        high = high ^ (_mix(low - key) & high_mask)
    return (high << low_bits) | low


def permute(index: np.ndarray, key: np.ndarray, size: int) -> np.ndarray:
    """Permute [0, size): indices (n,) and a key for each (n,), uint64, to (n,) uint64.

    The network covers a power of two; what lands outside walks on along its cycle until it is
    inside (Black and Rogaway 2002), which is still a bijection.
    """
    bits = max(_MIN_BITS, (size - 1).bit_length())
    out = _feistel(index, key, bits)
    while (outside := np.flatnonzero(out >= size)).size:
        out[outside] = _feistel(out[outside], key[outside], bits)
    return out


def window_starts(first: int, n: int, n_tokens: int, block_size: int, seed: int) -> list[int]:
    """First token of each of the rows first .. first + n - 1.

    Windows lie block_size tokens apart. An epoch's offset is anywhere up to the number of tokens
    left over when all windows stand end to end, so every token gets its turn.
    """
    windows = max(1, (n_tokens - 1) // block_size - 1)  # one fewer than fit: room for the shift
    epoch, index = np.divmod(np.arange(first, first + n, dtype=np.uint64), np.uint64(windows))
    key = _mix(_mix(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN) + epoch)
    offset = _mix(key ^ _GOLDEN) % np.uint64(n_tokens - windows * block_size)
    return (offset + permute(index, key, windows) * np.uint64(block_size)).tolist()
