"""Byte pairs as GPT-2's files spell them: each byte a letter, each token a word of letters.

Hugging Face's tokenizers and llama.cpp read merges, ours reads tokens in the order of merging. Of
such a vocabulary one follows from the other.
"""

from collections.abc import Sequence

# Itself where a byte is a printable character of Latin-1 other than the space, else from U+0100 on
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1),
             *range(ord("®"), ord("ÿ") + 1)]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
LETTERS = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(OTHERS)}
BYTES = {letter: b for b, letter in LETTERS.items()}


def spell(token: bytes) -> str:
    """b" the" -> "Ġthe" """
    return "".join(map(LETTERS.__getitem__, token))


def unspell(word: str) -> bytes:
    """"Ġthe" -> b" the"; KeyError for a letter that stands for no byte."""
    return bytes(map(BYTES.__getitem__, word))


def merges(tokens: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Tokens in the order of merging -> the pair that each one of several bytes is made of.

    That is what is left of its bytes when only earlier tokens may be merged, the earliest first
    (the way of tiktoken's users, as in its issue 60). ValueError for a token that no pair makes.
    """
    rank = {token: i for i, token in enumerate(tokens)}
    return [pair_of(token, rank) for token in tokens if len(token) > 1]


def pair_of(token: bytes, rank: dict[bytes, int]) -> tuple[bytes, bytes]:
    parts, limit = [token[i : i + 1] for i in range(len(token))], rank[token]
    ranks = [rank.get(token[i : i + 2], limit) for i in range(len(token) - 1)]  # of part i and next
    while len(parts) > 2:
        first = min(ranks)
        if first >= limit:
            raise ValueError(f"no two earlier tokens make {token!r}")
        i = ranks.index(first)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del ranks[i]
        for j in range(max(i - 1, 0), min(i + 1, len(ranks))):  # its neighbours' alone are others
            ranks[j] = rank.get(parts[j] + parts[j + 1], limit)
    return parts[0], parts[1]
