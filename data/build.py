"""From documents to a dataset folder, in three passes that each hold a batch of them at most.

One for hashes and sizes, from which the split follows; one for the tokenizer, where it learns from
text; one that writes tokens. The same text gives the same folder, to the byte.

The split: a single text is cut, its first int(0.9 n) characters train (nanoGPT's rule). Of many
documents one is held out if and only if its own content hash lies below a threshold, so it stays on
its side whatever is added, removed or reordered around it, and twins are never on both sides.
"""

import json
import os
import re
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import DataError, read_json
from data.dataset import FORMAT, SPLITS
from data.shards import ShardWriter
from data.sources import data_root, documents
from data.tokenizer import Tokenizer, make_tokenizer

BATCH = 8_000_000  # characters of text that are encoded at once
TRAIN_SHARE = 0.9  # of the characters of a single text
MIN_VAL_SHARE = 0.01  # of the bytes of many documents, and at least one document


def prepare(sources: list[str], name: str, tokenizer: str, errors: str = "strict",
            val_fraction: float = 0.05, overwrite: bool = False,
            say: Callable[[str], None] = print) -> Path:
    """Write the dataset `name` and return its folder; whatever stops it, nothing half-made is left.

    sources and errors: see `sources.documents`; tokenizer: see `make_tokenizer`; val_fraction: of
    many documents, the share that is held out. overwrite: replace a dataset of that name even if
    it was made from other text or with another tokenizer.
    """
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,98}[A-Za-z0-9_-])?", name):
        raise DataError(f"--name={name}: expected up to 100 letters, digits, '-', '_' and '.', "
                        "with a letter or digit first and no '.' last")
    records, skipped, places, sizes = scan(sources, errors)
    limit = threshold(places, sizes, val_fraction)

    def parts() -> Iterator[tuple[str, str]]:
        return divide(chain.from_iterable(documents(s, errors) for s in sources), places, limit)

    # An alphabet must know every character; merges are learned, so from training text alone.
    lesson = (text for split, text in parts() if split == "train" or tokenizer == "char")
    made = make_tokenizer(tokenizer, lesson)
    meta = {"format": FORMAT, "name": name, "tokenizer": made.spec, "tokenizer_hash": made.hash,
            "vocab_size": made.vocab_size, "separator": made.eot, "sources": records,
            "skipped": skipped, "val_below": limit and f"{limit:016x}"}  # null: cut, see above
    folder = data_root() / name
    if folder.exists():
        if not (folder / "dataset.json").exists():
            raise DataError(f"{folder} exists and is no dataset; choose another --name")
        there = meta if overwrite else read_json(folder / "dataset.json")
        if any(there.get(key) != meta[key] for key in ("sources", "tokenizer_hash")):
            raise DataError(f"{folder} was made from other text or with another tokenizer "
                            f"({there.get('tokenizer')}, now {made.spec}); choose another --name, "
                            "or replace it with --overwrite")
    temporary, old = (folder.with_name(f".tmp-{name}-{os.getpid()}{end}") for end in ("", "-old"))
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process that had our id
    temporary.mkdir(parents=True)
    try:
        meta["splits"] = _write_shards(temporary, parts(), made, len(places))
        _write_json(temporary / "tokenizer.json", made.to_json())
        _write_json(temporary / "dataset.json", meta)
        if folder.exists():  # folders cannot be exchanged, so the old one steps aside first
            os.rename(folder, old)
        os.rename(temporary, folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _report(folder, meta, say)
    return folder


def scan(sources: list[str], errors: str = "strict") -> tuple[list[dict], dict, array, array]:
    """Read every document once; returns 16 bytes for each, however long it is.

    A record {source, sha256, documents, bytes} of each source; counts of files skipped as "empty"
    and "binary"; the `place` of each document; its size in bytes.
    """
    records, skipped = [], {"empty": 0, "binary": 0}
    places, sizes = array("Q"), array("Q")
    for source in sources:
        first, together = len(sizes), sha256()
        for _, text in documents(source, errors, skipped):
            raw = text.encode("utf-8")
            alone = sha256(raw)
            together.update(alone.digest())
            places.append(place(alone.digest()))
            sizes.append(len(raw))
        count = len(sizes) - first
        name = Path(source).name or source  # where it lay on somebody's disk is no part of it
        digest = alone if count == 1 else together  # one text's own, or that of all the hashes
        records.append({"source": name, "sha256": digest.hexdigest(), "documents": count,
                        "bytes": sum(sizes[first:])})
    if not sizes:
        raise DataError(f"there is no text in {', '.join(sources)} ({skipped['empty']} empty and "
                        f"{skipped['binary']} binary files skipped)")
    return records, skipped, places, sizes


def place(digest: bytes) -> int:
    """Where a document lies in [0, 2**64): the first 8 bytes of its SHA-256 and nothing else."""
    return int.from_bytes(digest[:8], "big")


def threshold(places: Sequence[int], sizes: Sequence[int], val_fraction: float) -> int | None:
    """Documents placed below it are held out; None for a single text, which is cut instead.

    It is val_fraction of the range, raised until validation holds MIN_VAL_SHARE of the bytes (so
    the lowest hashes top it up) and lowered where no document would be left to train on.
    """
    if not 0 <= val_fraction < 1:
        raise DataError(f"--val_fraction={val_fraction}: expected at least 0 and below 1")
    if len(places) == 1:
        return None
    places, sizes = np.array(places, np.uint64), np.array(sizes)
    order = np.argsort(places)
    held_bytes = np.cumsum(sizes[order])  # if all up to here were held out
    enough = np.searchsorted(held_bytes, MIN_VAL_SHARE * held_bytes[-1])
    limit = max(int(val_fraction * 2**64), int(places[order[enough]]) + 1)
    return min(limit, int(places.max()))


def divide(texts: Iterable[tuple[str, str]], places: Iterable[int],
           limit: int | None) -> Iterator[tuple[str, str]]:
    """(split, text) of each (name, text), or of the two parts of a single one if limit is None.

    DataError where the documents are no longer those that were scanned.
    """
    for document, scanned in zip_longest(texts, places):
        name, text = document or ("a document", "")
        here = place(sha256(text.encode("utf-8")).digest())
        if here != scanned:
            raise DataError(f"{name} changed while the sources were being read; run this again")
        if limit is None:
            cut = int(TRAIN_SHARE * len(text))
            yield "train", text[:cut]
            yield "val", text[cut:]
        else:
            yield ("val" if here < limit else "train"), text


def _batches(parts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Parts in lists of BATCH characters or little more; no part is cut."""
    batch, size = [], 0
    for split, text in parts:
        batch.append((split, text))
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def _write_shards(folder: Path, parts: Iterable[tuple[str, str]], tokenizer: Tokenizer,
                  documents: int) -> dict:
    """Encode everything into shards; returns {split: {documents, bytes, tokens, shards}}."""
    writers = {name: ShardWriter(folder, name, tokenizer.vocab_size) for name in SPLITS}
    splits = {name: {"documents": 0, "bytes": 0} for name in SPLITS}
    separator = np.array([] if tokenizer.eot is None else [tokenizer.eot], np.uint32)
    for batch in _batches(tqdm(parts, "encoding", documents, unit=" documents", disable=None)):
        for name, writer in writers.items():
            texts = [text for split, text in batch if split == name]
            ids = [part for ids in tokenizer.encode_batch(texts) for part in (separator, ids)]
            writer.write(np.concatenate([separator[:0], *ids]))
            splits[name]["documents"] += len(texts)
            splits[name]["bytes"] += sum(len(text.encode("utf-8")) for text in texts)
    for name, writer in writers.items():
        writer.finish()
        splits[name]["tokens"] = sum(shard["tokens"] for shard in writer.shards)
        splits[name]["shards"] = writer.shards
    return splits


def _write_json(path: Path, value: dict) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _report(folder: Path, meta: dict, say: Callable[[str], None]) -> None:
    for name, part in meta["splits"].items():
        say(f"{name}: {part['documents']:,} documents, {part['bytes']:,} bytes, "
            f"{part['tokens']:,} tokens ({part['bytes'] / max(1, part['tokens']):.2f} bytes each)")
    say("skipped: {empty:,} empty and {binary:,} binary files".format(**meta["skipped"]))
    say(f"written to {folder} ({meta['tokenizer']}, {meta['vocab_size']:,} ids)")
