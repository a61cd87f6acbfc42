"""Which text trains the model and which only judges it.

A single text is cut: its first int(0.9 n) characters train (nanoGPT's rule). Of many documents one
is held out if and only if its own content hash lies below a threshold, so it stays on its side
whatever is added, removed or reordered around it, and twins are never on both sides.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np

from data import DataError
from data.sources import Document, documents

TRAIN_SHARE = 0.9  # of the characters of a single text
MIN_VAL_SHARE = 0.01  # of the bytes of many documents, and at least one document


@dataclass
class Scan:
    """What a first pass over all documents found: 16 bytes for each, however long it is.

    sources: {source, sha256, documents, bytes} of each. skipped: counts of "empty" and "binary".
    places: where each document lies in [0, 2**64), see `place`. sizes: its UTF-8 bytes.
    """

    sources: list[dict] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    places: array = field(default_factory=lambda: array("Q"))
    sizes: array = field(default_factory=lambda: array("Q"))

    @property
    def sha256(self) -> str:
        """Identity of the content, whatever the files are called."""
        return hashlib.sha256("".join(s["sha256"] for s in self.sources).encode()).hexdigest()


def scan(sources: list[str], errors: str, root: Path) -> Scan:
    """Read every document of every source once. DataError when there is no text in them."""
    found = Scan()
    for source in sources:
        first, together = len(found.sizes), hashlib.sha256()
        for document in documents(source, errors, found.skipped, root):
            raw = document.text.encode("utf-8")
            digest = hashlib.sha256(raw)
            together.update(digest.digest())
            found.places.append(place(digest.digest()))
            found.sizes.append(len(raw))
        count = len(found.sizes) - first
        found.sources.append({
            # The name alone: where it lay on somebody's disk is not part of what it is.
            "source": Path(source).name or source,
            # Of one text its own hash, as `sha256sum` tells it; of many, the hash of their hashes.
            "sha256": (digest if count == 1 else together).hexdigest(),
            "documents": count,
            "bytes": sum(found.sizes[first:]),
        })
    if not found.sizes:
        raise DataError(f"there is no text in {', '.join(sources)} ({found.skipped['empty']} empty "
                        f"and {found.skipped['binary']} binary files skipped)")
    return found


def place(digest: bytes) -> int:
    """Where a document lies in [0, 2**64): the first 8 bytes of its SHA-256 and nothing else."""
    return int.from_bytes(digest[:8], "big")


def threshold(found: Scan, val_fraction: float) -> int | None:
    """Documents placed below it are held out; None for a single text, which is cut instead.

    It is val_fraction of the range, raised until validation holds MIN_VAL_SHARE of the bytes (so
    the lowest hashes top it up) and lowered where no document would be left to train on.
    """
    if not 0 <= val_fraction < 1:
        raise DataError(f"--val_fraction={val_fraction}: expected at least 0 and below 1")
    if len(found.sizes) == 1:
        return None
    places, sizes = np.asarray(found.places), np.asarray(found.sizes)
    order = np.argsort(places)
    held_bytes = np.cumsum(sizes[order])  # if all up to here were held out
    enough = np.searchsorted(held_bytes, MIN_VAL_SHARE * held_bytes[-1])
    limit = max(int(val_fraction * 2**64), int(places[order[enough]]) + 1)
    limit = min(limit, int(places.max()))
    if places.min() >= limit:
        raise DataError(f"all {len(sizes)} documents are the same text, so none can be held out; "
                        "give one of them alone, or others beside it")
    return limit


def divide(texts: Iterable[Document], found: Scan, limit: int | None) -> Iterator[tuple[str, str]]:
    """(split, text) of each document, or of the two parts of a single one where limit is None.

    DataError where the documents are no longer those that were scanned.
    """
    for document, scanned in zip_longest(texts, found.places):
        text = document.text if document else ""
        here = place(hashlib.sha256(text.encode("utf-8")).digest())
        if here != scanned:
            name = document.name if document else "a document"
            raise DataError(f"{name} changed while the sources were being read; run this again")
        if limit is None:
            cut = int(TRAIN_SHARE * len(text))
            yield "train", text[:cut]
            yield "val", text[cut:]
        else:
            yield ("val" if here < limit else "train"), text
