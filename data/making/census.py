"""What documents there are, and which of them are held out.

A single text is cut: its first int(0.9 n) characters train (nanoGPT's rule). Of many documents one
is held out if and only if its own content hash lies below a threshold, so it stays on its side
whatever is added, removed or reordered around it (but see `threshold` for very few), and twins are
never on both sides.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from data.making.sources import Piece, documents
from kit.errors import UserError

TRAIN_SHARE = 0.9  # of the characters of a single text
VAL_SHARE = 0.05  # of many documents
MIN_VAL_SHARE, MIN_VAL_BYTES = 0.01, 10_000_000  # of many documents: the lesser of the two


class Census:
    """A pass over the sources, and what it saw: 16 bytes for a document, however long it is.

    records: {source, sha256, documents, bytes} of each source; skipped: counts of what was left
    out; places: where each document lies in [0, 2**64); sizes: in bytes; chars: in all.
    """

    def __init__(self, found: list[tuple[str, str]], errors: str = "strict",
                 text_column: str | None = None, split_at: str | None = None):
        self._pass = found, errors, text_column, split_at
        self.records, self.chars, self.forms = [], 0, set()
        self.skipped = {"empty": 0, "binary": 0, "without target": 0}
        self.places, self.sizes = array("Q"), array("Q")

    def pieces(self) -> Iterator[Piece]:
        """Every piece of every document, counted on its way."""
        found, errors, text_column, split_at = self._pass
        for name, source in found:
            first, together, alone = len(self.sizes), sha256(), None
            for piece in documents(source, errors, text_column, self.skipped, split_at):
                if piece.starts:
                    self._close(alone, together)
                    alone = sha256()
                    self.sizes.append(0)
                    self.forms.add(piece.sample)
                try:
                    raw = piece.text.encode("utf-8")
                except UnicodeEncodeError:  # JSON can write half a pair of UTF-16
                    raise UserError(f"{piece.place} has a lone surrogate, which is no text; mend "
                                    "it, or put U+FFFD there with --errors=replace") from None
                alone.update(raw)
                self.sizes[-1] += len(raw)
                self.chars += len(piece.text)
                yield piece
            self._close(alone, together)
            count = len(self.sizes) - first
            digest = alone if count == 1 else together  # one text's own, or that of all the hashes
            self.records.append({"source": name, "sha256": digest.hexdigest(), "documents": count,
                                 "bytes": sum(self.sizes[first:])})
        if len(self.forms) > 1:
            raise UserError("the sources hold both plain text and instruction samples; prepare "
                            "them as two datasets")
        self.kind = "instruct" if True in self.forms else "text"  # samples, or documents

    def _close(self, document: "sha256 | None", together: "sha256") -> None:
        if document:
            together.update(document.digest())
            self.places.append(place(document.digest()))

    def again(self) -> Iterator[tuple[int, Piece]]:
        """(number of its document, piece) once more; UserError where they are not the same."""
        other, last = Census(*self._pass), "a document"
        for piece in other.pieces():
            done, n = len(other.places), len(other.sizes)
            if other.places[done - 1:done] != self.places[done - 1:done] or n > len(self.sizes):
                break
            yield n - 1, piece
            last = piece.place
        if (other.places, len(other.sizes)) != (self.places, len(self.sizes)):
            raise UserError(f"{last} changed while the sources were being read; run this again")

    def spell(self) -> str:
        text = "skipped: {empty:,} empty and {binary:,} binary files".format(**self.skipped)
        if n := self.skipped["without target"]:
            text += (f", {n:,} samples without a target, which is what the role `assistant` says, "
                     "or a completion")
        return text


def place(digest: bytes) -> int:
    """Where a document lies in [0, 2**64): the first 8 bytes of its SHA-256 and nothing else."""
    return int.from_bytes(digest[:8], "big")


class Rule(NamedTuple):
    """Who is held out: documents placed below `limit`, or what a text has from `cut` on."""

    limit: int | None  # None for a single text
    cut: int = 0


def rule(census: Census, val_fraction: float | None) -> Rule:
    """The rule for these documents; val_fraction: None is TRAIN_SHARE or VAL_SHARE."""
    if val_fraction is not None and not 0 <= val_fraction < 1:
        raise UserError(f"--val_fraction={val_fraction}: expected at least 0 and below 1")
    if len(census.places) > 1:
        share = VAL_SHARE if val_fraction is None else val_fraction
        return Rule(threshold(census.places, census.sizes, share))
    if census.kind == "instruct":
        return Rule(0)  # a sample cannot be cut
    share = TRAIN_SHARE if val_fraction is None else 1 - val_fraction
    return Rule(None, int(share * census.chars))


def threshold(places: Sequence[int], sizes: Sequence[int], val_fraction: float) -> int:
    """Documents placed below it are held out, of two or more.

    It is val_fraction of the range, raised until validation holds MIN_VAL_SHARE of the bytes or
    MIN_VAL_BYTES, and lowered where no document would be left to train on.
    """
    places, sizes = np.array(places, np.uint64), np.array(sizes)
    order = np.argsort(places)
    held_bytes = np.cumsum(sizes[order])  # if all up to here were held out
    wanted = min(MIN_VAL_SHARE * held_bytes[-1], MIN_VAL_BYTES)
    enough = np.searchsorted(held_bytes, wanted)
    limit = max(int(val_fraction * 2**64), int(places[order[enough]]) + 1)
    return min(limit, int(places.max()))


def divide(census: Census, rule: Rule) -> Iterator[tuple[str, Piece]]:
    """(split, piece) of each piece, or of the two parts of the one that is cut."""
    at = 0
    for document, piece in census.again():
        if rule.limit is not None:
            yield ("val" if census.places[document] < rule.limit else "train"), piece
            continue
        head = piece.text[:max(0, rule.cut - at)]
        if head or piece.starts:
            yield "train", piece._replace(text=head)
        if len(head) < len(piece.text):
            starts = at <= rule.cut == at + len(head)
            yield "val", piece._replace(text=piece.text[len(head):], starts=starts)
        at += len(piece.text)
