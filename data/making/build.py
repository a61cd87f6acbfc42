"""From documents to a dataset folder, in passes that hold a few megabytes of them at most.

One for hashes and sizes, from which the split follows; one for the tokenizer, where it learns from
text; one that writes tokens. The same text gives the same folder, to the byte, for any number of
workers. They are threads: tiktoken lets go of Python's lock, and a thread cannot die alone.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data import instruct
from data.dataset import FORMAT, SPLITS
from data.making.census import Census, Rule, divide, rule
from data.making.folder import replacing, write_json
from data.making.sources import Piece, fetched
from data.making.tokenizers import make_tokenizer
from data.making.writer import ShardWriter
from data.tokenizer import Tokenizer
from kit.errors import UserError

JOB = 1 << 20  # characters of text that a worker gets at once
LESSON_BYTES = 1_000_000_000  # of training text at most, for a tokenizer that learns from it


def prepare(sources: list[str], name: str, tokenizer: str, errors: str = "strict",
            val_fraction: float | None = None, overwrite: bool = False,
            text_column: str | None = None, align: str | None = None, workers: int | None = None,
            again: bool = True, split_at: str | None = None,
            say: Callable[[str], None] = print) -> Path:
    """Write the dataset `name` and return its folder; whatever stops it, nothing half-made is left.

    sources, errors, text_column, split_at: see `sources.documents`; tokenizer: see
    `make_tokenizer`; val_fraction: see `census.rule`; align="document": rows begin with one;
    workers: threads that encode, None for one a core; overwrite: even a dataset that was made
    otherwise; again=False: leave one that is there as it is.
    """
    workers = cores() if workers is None else workers
    if not 0 <= workers <= 1024:
        raise UserError(f"--workers={workers}: expected 0 to 1024 (default: one a core)")
    with replacing(name, say) as building:
        if building.there and not again:
            return building.folder
        with fetched(sources, text_column, say) as found:
            census = Census(found, errors, text_column, split_at)
            deque(tqdm(census.pieces(), "reading", unit=" documents", disable=None), maxlen=0)
            if not census.sizes:
                raise UserError(f"there is no text in {', '.join(sources)} ({census.spell()})")
            held_out = rule(census, val_fraction)
            made = make_tokenizer(tokenizer, tqdm(
                _lesson(census, held_out, tokenizer == "char"), "learning", unit=" pieces",
                disable=None if tokenizer.startswith(("char", "bpe:")) else True))
            _check_separator(made, census.kind, align)
            meta = {"format": FORMAT, "name": name, "kind": census.kind, "tokenizer": made.spec,
                    "tokenizer_hash": made.hash, "vocab_size": made.vocab_size,
                    "separator": made.eot, "align": align, "sources": census.records,
                    "skipped": census.skipped, "val_fraction": val_fraction, "val_below":
                    None if held_out.limit is None else f"{held_out.limit:016x}"}
            if not overwrite:
                building.refuse_other(meta)
            folder = building.begin()
            n, size = len(census.sizes), sum(census.sizes)
            say(f"{n:,} documents, {size:,} bytes; shards will take "
                f"{(n + size) * (4 if made.vocab_size > 2**16 else 2):,} bytes at most")
            meta["splits"] = _write_shards(folder, census, held_out, made, workers)
            write_json(folder / "tokenizer.json", made.to_json())
            write_json(folder / "dataset.json", meta)
    _report(building.folder, meta, census, say)
    return building.folder


def _check_separator(tokenizer: Tokenizer, kind: str, align: str | None) -> None:
    if align and kind == "instruct":
        raise UserError("--align=document is for texts, not for instruction data; leave it out")
    if tokenizer.eot is None and (align or kind == "instruct"):
        raise UserError(f"--tokenizer={tokenizer.spec} has no separator, which "
                        f"{'--align=document' if align else 'instruction data'} needs; take byte, "
                        "bpe:N or a tiktoken encoding")


def cores() -> int:
    """How many cores this process may use, 32 at most: each engine takes up to 40 MB."""
    allowed = getattr(os, "sched_getaffinity", None)  # not on a Mac or Windows
    return min(32, len(allowed(0)) if allowed else os.cpu_count() or 1)


class Encoded(NamedTuple):
    """What became of a job, some documents of one split."""

    split: str
    tokens: np.ndarray  # (n,)
    mask: np.ndarray  # uint8 (n,); of instruction samples only, else empty
    starts: np.ndarray  # first token of each sample, counted within tokens; else empty
    documents: int
    bytes: int


def encode(job: tuple[str, list[Piece]], tokenizer: Tokenizer) -> Encoded:
    """The tokens of a split's pieces, each document with the separator before it."""
    split, pieces = job
    dtype = np.uint32 if tokenizer.vocab_size > 2**16 else np.uint16
    separator = np.array([] if tokenizer.eot is None else [tokenizer.eot], dtype)
    tokens, masks, n_bytes = [separator[:0]], [np.empty(0, np.uint8)], 0
    for piece in pieces:
        try:
            text = instruct.text_of(piece.text) if piece.sample else piece.text
            if piece.sample:
                ids, mask = instruct.encode(piece.text, tokenizer)
                masks.append(mask)
            else:
                ids = tokenizer.encode_array(text)
                if piece.starts:
                    tokens.append(separator)
        except Exception as error:
            known = isinstance(error, UserError)
            raise (UserError if known else RuntimeError)(f"{piece.place}: {error}") from error
        tokens.append(ids)
        n_bytes += len(text.encode("utf-8"))
    starts = np.cumsum([mask.size for mask in masks], dtype=np.int64)[:-1]
    return Encoded(split, np.concatenate(tokens, dtype=dtype, casting="unsafe"),
                   np.concatenate(masks), starts, sum(piece.starts for piece in pieces), n_bytes)


def _lesson(census: Census, held_out: Rule, everything: bool) -> Iterator[str]:
    """Training text that a tokenizer learns from, every n-th piece of much; or everything."""
    step = 1 if everything else -(-sum(census.sizes) // LESSON_BYTES)
    for i, (split, piece) in enumerate(divide(census, held_out)):
        if everything or split == "train" and i % step == 0:
            yield instruct.text_of(piece.text) if piece.sample else piece.text


def _jobs(parts: Iterable[tuple[str, Piece]]) -> Iterator[tuple[str, list[Piece]]]:
    """Pieces of one split together, JOB characters or little more, in their order."""
    jobs, sizes = {name: [] for name in SPLITS}, dict.fromkeys(SPLITS, 0)
    for split, piece in parts:
        jobs[split].append(piece)
        sizes[split] += len(piece.text) + 100  # of short ones the overhead counts
        if sizes[split] >= JOB:
            yield split, jobs[split]
            jobs[split], sizes[split] = [], 0
    yield from jobs.items()


def _in_order(work: Callable, jobs: Iterable, workers: int) -> Iterator:
    """work(job) of each job, in order; threads run a few jobs ahead, never more."""
    with ThreadPoolExecutor(workers) as pool:
        ahead = deque()
        try:
            for job in jobs:
                ahead.append(pool.submit(work, job))
                if len(ahead) > 2 * workers:
                    yield ahead.popleft().result()
            for future in ahead:
                yield future.result()
        finally:  # an error or Ctrl-C waits for no job that has not begun
            pool.shutdown(wait=False, cancel_futures=True)


def _write_shards(folder: Path, census: Census, held_out: Rule, tokenizer: Tokenizer,
                  workers: int) -> dict:
    """Encode everything into shards; returns {split: {documents, bytes, tokens, shards, ...}}."""
    kinds = ("tokens", "mask", "starts") if census.kind == "instruct" else ("tokens",)
    writers = {split: {kind: ShardWriter(folder, split, tokenizer.vocab_size, kind=kind)
                       for kind in kinds} for split in SPLITS}
    splits = {split: Counter(documents=0, bytes=0, tokens=0) for split in SPLITS}

    def write(encoded: Encoded) -> int:
        so_far = splits[encoded.split]
        encoded.starts[:] += so_far["tokens"]
        for kind, writer in writers[encoded.split].items():
            writer.write(getattr(encoded, kind))
        so_far.update(documents=encoded.documents, bytes=encoded.bytes, tokens=encoded.tokens.size)
        return encoded.bytes

    jobs = _jobs(divide(census, held_out))
    encoded = _in_order(partial(encode, tokenizer=tokenizer), jobs, max(1, workers))
    with ExitStack() as stack:
        for writer in (writer for of_split in writers.values() for writer in of_split.values()):
            stack.callback(writer.close)
        bar = stack.enter_context(tqdm(desc="encoding", total=sum(census.sizes), unit="B",
                                       unit_scale=True, disable=None))
        for n_bytes in _in_order(write, encoded, 1):
            bar.update(n_bytes)
        for split, of_split in writers.items():
            for kind, writer in of_split.items():
                writer.finish()
                splits[split]["shards" if kind == "tokens" else kind] = writer.shards
    return splits


def _report(folder: Path, meta: dict, census: Census, say: Callable[[str], None]) -> None:
    what = "samples" if census.kind == "instruct" else "documents"
    for name, part in meta["splits"].items():
        say(f"{name}: {part['documents']:,} {what}, {part['bytes']:,} bytes, "
            f"{part['tokens']:,} tokens ({part['bytes'] / max(1, part['tokens']):.2f} bytes each)")
        if not part["tokens"]:
            say(f"{name} is empty: give two {what} that differ, or one text, which is cut in two")
    say(census.spell())
    say(f"written to {folder} ({meta['tokenizer']}, {meta['vocab_size']:,} ids)")
