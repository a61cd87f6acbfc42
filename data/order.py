"""Which window is row number i? A shuffle that is computed, never stored.

Training reads an endless list of rows. Each epoch takes every window of the split once, in an
order of its own and from starts that an offset of its own shifts. Both follow from (seed, epoch),
so row i can be named without those before it: to resume, to change the batch size or the number of
ranks takes no state but a count of rows, and no table as long as the data.
"""

import functools

import numpy as np

_ROUNDS = 4  # pairs of Feistel rounds, and
_MIN_BITS = 6  # of its domain: with fewer of either, small permutations fail a chi-square test
_BLOCK = 1024  # rows named in one go: naming twelve costs as much as naming a thousand
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers so that near ones land far apart (the finalizer of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _feistel(x: np.ndarray, key: np.ndarray, bits: int) -> np.ndarray:
    """One bijection of [0, 2**bits) per key, elementwise.

    A Feistel network: each half is XORed with a hash of the other, which can be undone whatever
    the hash. With an odd number of bits the high half has one more.
    """
    low_bits, high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    one = np.uint64(1)
    low, high = x & ((one << low_bits) - one), x >> low_bits
    for _ in range(_ROUNDS):
        key = key + _GOLDEN
        low = low ^ (_mix(high + key) & ((one << low_bits) - one))
        high = high ^ (_mix(low - key) & ((one << high_bits) - one))
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


@functools.lru_cache(maxsize=4)
def _block_of_starts(block: int, windows: int, block_size: int, slack: int, seed: int) -> list[int]:
    row = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64)
    epoch, index = np.divmod(row, np.uint64(windows))
    key = _mix(_mix(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN) + epoch)
    offset = _mix(key ^ _GOLDEN) % np.uint64(slack + 1)
    return (offset + permute(index, key, windows) * np.uint64(block_size)).tolist()


def window_starts(first: int, n: int, windows: int, block_size: int, slack: int,
                  seed: int) -> list[int]:
    """First token of each of the rows first .. first + n - 1.

    Windows lie block_size tokens apart. An epoch's offset is anywhere in [0, slack], the tokens
    that are left over when all windows stand end to end, so every token gets its turn.
    """
    starts: list[int] = []
    while len(starts) < n:
        block, skip = divmod(first + len(starts), _BLOCK)
        ready = _block_of_starts(block, windows, block_size, slack, seed)
        starts += ready[skip:skip + n - len(starts)]
    return starts
