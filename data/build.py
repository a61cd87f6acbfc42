"""From documents to a dataset folder, in three passes that each hold a batch of them at most.

One pass for hashes and sizes, from which the split follows; one for the tokenizer, where it learns
from text; one that writes tokens. The same text gives the same folder, to the byte.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import DataError
from data.dataset import FORMAT, SPLITS
from data.shards import ShardWriter
from data.sources import data_root, documents
from data.split import TRAIN_SHARE, Scan, divide, scan, threshold
from data.tokenizer import Tokenizer, make_tokenizer, read_json

BATCH = 8_000_000  # characters of text that are encoded at once


def prepare(sources: list[str], name: str, tokenizer: str, errors: str = "strict",
            val_fraction: float = 0.05, overwrite: bool = False,
            say: Callable[[str], None] = print, root: Path | None = None) -> Path:
    """Write the dataset `name` and return its folder, `<root>/<name>/`.

    sources and errors: see `sources.documents`; tokenizer: see `make_tokenizer`; val_fraction: of
    many documents, the share that is held out (see `split`). overwrite: replace a dataset of that
    name made from other text or with another tokenizer; made from the same, it is replaced anyway.
    root: where prepared sets lie, `data/` of the clone unless given.
    DataError for any mistake. Whatever stops it, nothing half-made is left behind.
    """
    root = root or data_root()
    folder, temporary = root / check_name(name), root / f".tmp-{name}-{os.getpid()}"
    found = scan(sources, errors, root)
    limit = threshold(found, val_fraction)

    def parts() -> Iterator[tuple[str, str]]:
        everything = chain.from_iterable(documents(s, errors, root=root) for s in sources)
        return divide(everything, found, limit)

    # An alphabet must know every character; merges are learned, so from training text alone.
    lesson = (text for split, text in parts() if split == "train" or tokenizer == "char")
    made = make_tokenizer(tokenizer, lesson)
    if folder.exists():
        _check_replaceable(folder, found, made, overwrite)
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process that had our id
    temporary.mkdir(parents=True)
    try:
        splits = _write_splits(temporary, parts(), made, sum(found.sizes))
        meta = _describe(name, found, made, limit, val_fraction, splits)
        _write_json(temporary / "tokenizer.json", made.to_json())
        _write_json(temporary / "dataset.json", meta)
        _put_in_place(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _report(folder, meta, say)
    return folder


def check_name(name: str) -> str:
    """Return a name that can be a folder's on any system; DataError for others."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,98}[A-Za-z0-9_-])?", name):
        raise DataError(f"--name={name}: expected up to 100 letters, digits, '-', '_' and '.', "
                        "with a letter or digit first and no '.' last")
    return name


def _check_replaceable(folder: Path, found: Scan, tokenizer: Tokenizer, overwrite: bool) -> None:
    """DataError if what has the name is no dataset, or another one and overwrite is not set."""
    if not (folder / "dataset.json").exists():
        raise DataError(f"{folder} exists and is no dataset; choose another --name")
    if overwrite:
        return
    meta = read_json(folder / "dataset.json")
    if meta.get("sources") != found.sources:
        raise DataError(f"{folder} was made from other text; choose another --name, or replace it "
                        "with --overwrite")
    if meta.get("tokenizer_hash") != tokenizer.hash:
        raise DataError(f"{folder} was made with --tokenizer={meta.get('tokenizer')}, now given "
                        f"{tokenizer.spec}; choose another --name, or replace it with --overwrite")


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


def _write_splits(folder: Path, parts: Iterable[tuple[str, str]], tokenizer: Tokenizer,
                  total_bytes: int) -> dict[str, dict]:
    """Encode everything into shards; returns {split: {documents, bytes, tokens, shards}}."""
    splits = {name: {"documents": 0, "bytes": 0} for name in SPLITS}
    separator = [] if tokenizer.eot is None else [np.array([tokenizer.eot], np.uint32)]
    with ExitStack() as stack:
        writers = {name: stack.enter_context(ShardWriter(folder, name, tokenizer.vocab_size))
                   for name in SPLITS}
        bar = stack.enter_context(tqdm(
            total=total_bytes, desc="encoding", unit="B", unit_scale=True, disable=None))
        for batch in _batches(parts):
            ids: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
            encoded = tokenizer.encode_batch([text for _, text in batch])
            for (name, text), tokens in zip(batch, encoded, strict=True):
                ids[name] += [*separator, tokens]
                size = len(text.encode("utf-8"))
                splits[name]["documents"] += 1
                splits[name]["bytes"] += size
                bar.update(size)
            for name in SPLITS:
                if ids[name]:
                    writers[name].write(np.concatenate(ids[name]))
        for name in SPLITS:
            shards = writers[name].close()
            splits[name] |= {"tokens": sum(s["tokens"] for s in shards), "shards": shards}
    return splits


def _describe(name: str, found: Scan, tokenizer: Tokenizer, limit: int | None,
              val_fraction: float, splits: dict[str, dict]) -> dict:
    """What dataset.json says; nothing in it depends on when or where it was made."""
    if limit is None:
        rule = {"rule": f"the first {TRAIN_SHARE:.0%} of the characters train, the rest validates"}
    else:
        rule = {"rule": "documents whose SHA-256 begins below the limit validate, others train",
                "limit": f"{limit:016x}", "val_fraction": val_fraction}
    return {
        "format": FORMAT,
        "name": name,
        "tokenizer": tokenizer.spec,
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.eot,
        "sources": found.sources,
        "skipped": {reason: found.skipped[reason] for reason in ("empty", "binary")},
        "split": rule,
        "splits": splits,
    }


def _write_json(path: Path, value: dict) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename the finished folder; an old one steps aside first, as folders cannot be exchanged."""
    old = temporary.with_name(f"{temporary.name}-old")
    if folder.exists():
        os.rename(folder, old)
    os.rename(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)


def _report(folder: Path, meta: dict, say: Callable[[str], None]) -> None:
    for name, part in meta["splits"].items():
        say(f"{name}: {part['documents']:,} documents, {part['bytes']:,} bytes, "
            f"{part['tokens']:,} tokens ({part['bytes'] / max(1, part['tokens']):.2f} bytes each)")
    if sum(meta["skipped"].values()):
        say("skipped: {empty:,} empty and {binary:,} binary files".format(**meta["skipped"]))
    say(f"written to {folder} ({meta['tokenizer']}, {meta['vocab_size']:,} ids)")
    say(f"next: python train.py config/small.py --dataset={meta['name']}")
