"""The order in which training rows take what there is, computed and never stored.

Each epoch takes everything once, in an order of its own and from an offset of its own. Both follow
from (seed, epoch): to resume, even with another batch size, takes no state but a count of rows.
"""

from functools import lru_cache

import numpy as np

AT_ONCE = 1024  # rows
_ROUNDS = 4  # pairs of Feistel rounds, and
_MIN_BITS = 6  # of its domain: with fewer of either, small permutations fail a chi-square test
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


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
    inside, which is still a bijection (Black and Rogaway 2002).
    """
    bits = max(_MIN_BITS, (size - 1).bit_length())
    out = _feistel(index, key, bits)
    while (outside := np.flatnonzero(out >= size)).size:
        out[outside] = _feistel(out[outside], key[outside], bits)
    return out


def epoch_order(first: int, n: int, size: int, seed: int) -> np.ndarray:
    """Which of `size` things rows first .. first + n - 1 are, int64 (n,): each once an epoch."""
    key, index = _epochs(first, n, size, seed)
    return permute(index, key, size).astype(np.int64)


def _epochs(first: int, n: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A key of the epoch and the place within it for each of the rows, uint64 (n,)."""
    epoch, index = np.divmod(np.arange(first, first + n, dtype=np.uint64), np.uint64(size))
    return _mix(_mix(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN) + epoch), index


def window_starts(first: int, n: int, n_tokens: int, block_size: int, seed: int) -> list[int]:
    """First token of each of the rows first .. first + n - 1.

    Windows lie end to end, from an offset of the epoch's own on, so every token gets its turn.
    """
    starts = []
    for chunk in range(first // AT_ONCE, (first + n - 1) // AT_ONCE + 1):
        starts += _starts(chunk, n_tokens, block_size, seed)
    return starts[first % AT_ONCE:][:n]


@lru_cache(8)
def _starts(chunk: int, n_tokens: int, block_size: int, seed: int) -> list[int]:
    """Those of AT_ONCE rows: for a few, the calls of numpy would take longer than the reading."""
    size = windows(n_tokens, block_size)
    key, index = _epochs(chunk * AT_ONCE, AT_ONCE, size, seed)
    offset = _mix(key ^ _GOLDEN) % np.uint64(n_tokens - size * block_size)
    return (offset + permute(index, key, size) * np.uint64(block_size)).tolist()


def windows(n_tokens: int, block_size: int) -> int:
    """How many windows an epoch has: one fewer than fit, which makes room for the offset."""
    return max(1, (n_tokens - 1) // block_size - 1)
