"""Inspect a dataset: what is in it, whether it is still as it was made, how long documents are."""

import os
import sys
from argparse import Namespace
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.dataset import SPLITS, Dataset
from data.prepare import Parser, resolve, run
from kit.errors import UserError, visible

CHUNK = 1 << 20  # tokens that are read at once
SEED = 1337  # train.py's default: the window shown is the first that such a run sees


class Scan:
    """What one pass over a split finds; its documents are the samples of instruction data.

    counts: of each id, int64 (vocab_size,). lengths: {tokens without separator: documents}.
    longest: (tokens, first position) of three. targets: ones in the mask.
    """

    def __init__(self, dataset: Dataset, name: str, bar: tqdm):
        part, separator = getattr(dataset, name), dataset.separator
        samples = part if dataset.kind == "instruct" else None
        self.name, self.tokens, self.targets = name, samples.tokens if samples else part, 0
        self.counts = np.zeros(dataset.vocab_size, np.int64)
        self.lengths: Counter[int] = Counter()
        self.longest: list[tuple[int, int]] = []
        begin = 0  # of the document that goes on
        for at in range(0, part.n_tokens, CHUNK):
            ids = self.tokens.read(at, min(CHUNK, part.n_tokens - at))
            self.counts += np.bincount(ids, minlength=dataset.vocab_size)
            if samples:
                ends = samples.starts[slice(*np.searchsorted(samples.starts, (at, at + ids.size)))]
                self.targets += int(samples.mask.read(at, ids.size).sum())
            else:
                ends = at + np.flatnonzero(ids == (-1 if separator is None else separator))
            begins = np.append(begin, ends + (samples is None))  # behind the separator
            self._add(begins[:-1], ends)
            begin = begins[-1]
            bar.update(ids.size)
        self._add(np.array([begin]), np.array([part.n_tokens]))

    def _add(self, begins: np.ndarray, ends: np.ndarray) -> None:
        begins, ends = begins[ends > 0], ends[ends > 0]  # what begins a split ends nothing
        lengths = ends - begins
        self.lengths.update(lengths.tolist())
        top = np.argsort(-lengths, kind="stable")[:3]
        self.longest += zip(lengths[top].tolist(), begins[top].tolist(), strict=True)
        self.longest = sorted(self.longest, key=lambda found: -found[0])[:3]


def quantile(lengths: Counter[int], q: float) -> int:
    """The smallest length that a share q of the documents does not exceed."""
    values = sorted(lengths)
    reached = np.cumsum([lengths[value] for value in values])
    return values[int(np.searchsorted(reached, q * reached[-1]))]


def line(label: str, text: str) -> None:
    """Print one fact."""
    print(f"{label:<11}{text}")


def show_origin(dataset: Dataset, name: str) -> None:
    """Print what the dataset was made from, and how; UserError if it is no longer the same."""
    meta = dataset.meta
    line("dataset", visible(f"{name} in {dataset.folder}"))
    line("tokenizer", f"{dataset.tokenizer.spec}, {dataset.vocab_size:,} ids, " + (
        "no separator between documents" if dataset.separator is None else
        f"separator {dataset.separator} {dataset.tokenizer.decode([dataset.separator])}"))
    for source in meta.get("sources", []):
        line("source", f"{visible(source['source'])}: {source['documents']:,} documents, "
             f"{source['bytes']:,} bytes, sha256 {source['sha256'][:12]}")
    if "skipped" in meta:
        line("skipped", ", ".join(f"{count} {what}" for what, count in meta["skipped"].items()))
    if "val_below" not in meta:
        line("split", "as published")
    elif meta["val_below"] is None:
        line("split", "one text was cut: it begins in train and ends in val")
    else:
        share = int(meta["val_below"], 16) / 2**64
        line("split", f"val has the documents with the lowest {share:.1%} of all hashes")
    dataset.verify()
    files = [file for part in meta["splits"].values() for key in ("shards", "mask", "starts")
             for file in part.get(key, ())]
    line("hashes", f"{len(files)} shards as recorded" if "sha256" in files[0] else
         f"none are recorded; the ids in {len(files)} shards are of the vocabulary")


def show_content(dataset: Dataset, scans: list[Scan], lengths: Counter[int]) -> None:
    """Print a table of the splits (documents as recorded, else as found) and what is in them."""
    counts, byte_lengths = sum(scan.counts for scan in scans), dataset.token_byte_lengths()
    print("\n        documents           bytes          tokens  bytes/token  shards   share")
    for scan in scans:
        n, n_bytes = scan.tokens.n_tokens, int(scan.counts @ byte_lengths)
        documents = dataset.meta["splits"][scan.name].get("documents", scan.lengths.total())
        print(f"{scan.name:<6}{documents:>11,}{n_bytes:>16,}{n:>16,}{n_bytes / max(1, n):>13.2f}"
              f"{len(scan.tokens.paths):>8,}{n / counts.sum():>8.1%}")
    mean = sum(n * documents for n, documents in lengths.items()) / lengths.total()
    print()
    line("lengths", f"min {min(lengths):,}, median {quantile(lengths, 0.5):,}, mean {mean:,.1f}, "
         f"p90 {quantile(lengths, 0.9):,}, max {max(lengths):,} tokens")
    if dataset.separator is None:
        line("", "(without a separator each split counts as one document)")
    longest = sorted(((n, at, scan) for scan in scans for n, at in scan.longest),
                     key=lambda found: -found[0])
    for label, (n, at, scan) in zip(("longest", "", ""), longest, strict=False):
        start = dataset.tokenizer.decode(scan.tokens.read(at, min(n, 240)).tolist())
        line(label, f"{n:,} tokens of {scan.name} from {at}: {visible(start[:60])}")
    unused = int((counts == 0).sum())
    line("ids", f"{unused:,} of {counts.size:,} are never used ({unused / counts.size:.1%})")
    if dataset.kind == "instruct":
        line("targets", ", ".join(f"{scan.targets / max(1, scan.tokens.n_tokens):.1%} of "
                                  f"{scan.name}" for scan in scans))
    print()


def show_window(dataset: Dataset, name: str, at: int | None, n: int) -> None:
    """Print n tokens from `at` on, or of instruction data the whole samples that these touch.

    Targets are green, or in «...» where there is no colour. at: None is the first row of training.
    """
    part, tokens, mask = getattr(dataset, name), getattr(dataset, name), None
    if at is None and dataset.kind == "text" and name == "train" and n < part.n_tokens:
        at = part.row_starts(0, 1, n, SEED)[0]
    bounds = [at or 0, min((at or 0) + n, part.n_tokens)]
    if dataset.kind == "instruct":
        tokens, mask, known = part.tokens, part.mask, np.append(part.starts, part.n_tokens)
        after, last = np.searchsorted(known, (bounds[0] + 1, bounds[1]))
        bounds = known[after - 1:last + 1].tolist()
    green = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    on, off = ("\x1b[32m", "\x1b[0m") if green else ("«", "»")
    for start, stop in pairwise(bounds):
        ids, text = tokens.read(start, stop - start), ""
        marked = mask.read(start, stop - start) if mask else np.zeros(stop - start)
        turns = np.flatnonzero(np.diff(marked)) + 1
        for turn, target in zip(np.split(ids, turns), np.split(marked, turns), strict=True):
            words = visible(dataset.tokenizer.decode(turn.tolist()), "\n\t")
            text += f"{on}{words}{off}" if target.any() else words
        line("window", f"{stop - start} tokens of {name} from {start}" + (
            f", {marked.sum()} {on}targets{off}" if mask else ""))
        print("  | " + text.replace("\n", "\n  | ") + "\n")


def draw(path: str | Path, scans: list[Scan], lengths: Counter[int], title: str) -> None:
    """Write a PNG: the share of each split's documents that have such a length."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, PercentFormatter

    low, high, median = max(1, min(lengths)), max(1, *lengths), quantile(lengths, 0.5)
    wide, bins = high > 30 * quantile(lengths, 0.1), min(50, 10 + int(lengths.total()**0.5))
    edges = (np.geomspace if wide else np.linspace)(low, high + 1, bins)
    edges = np.unique(edges.round()) - 0.5  # so that no bin lies between two whole lengths
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for scan in scans:
        values = [max(low, value) for value in scan.lengths]  # 0 has no logarithm
        found, _ = np.histogram(values, edges, weights=list(scan.lengths.values()))
        style = {"fill": True, "alpha": 0.4} if scan.name == "train" else {"linewidth": 2}
        label = f"{scan.name}, {found.sum():,} documents"
        axes.stairs(found / max(1, found.sum()), edges, label=label, **style)
    axes.axvline(median, color="black", linestyle="--", linewidth=1, label=f"median {median:,}")
    axes.set_title(title.encode("ascii", "backslashreplace").decode(), parse_math=False)
    axes.set(xlabel="tokens in a document", ylabel="share of the split's documents")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if high < 10_000 * low else (1,)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend()
    figure.savefig(path, format="png")


def inspect(folder: Path, args: Namespace) -> None:
    """Print everything about a dataset, and draw the figure into its folder or to --out."""
    if sys.stdout.errors == "surrogateescape":  # a C locale: it would pass paths, but not texts
        sys.stdout.reconfigure(errors="backslashreplace")
    dataset, at, out = Dataset(folder, args.tokenizer), args.at, args.out
    n_tokens = {name: getattr(dataset, name).n_tokens for name in SPLITS}
    if args.tokens < 1 or at is not None and not 0 <= at < n_tokens[args.split]:
        raise UserError(f"--at={at or 0} --tokens={args.tokens}: expected one token at least, and "
                        f"a place below {n_tokens[args.split]}, the tokens of {args.split}")
    if out and not out.endswith(".png"):
        raise UserError(f"--out={out}: expected a file that ends in .png")
    total = sum(n_tokens.values())
    if not total:
        raise UserError(f"{folder} has shards without tokens; prepare more text")
    name = visible(dataset.meta.get("name") or folder.absolute().name)
    show_origin(dataset, name)
    with tqdm(total=total, desc="counting", unit=" tokens", unit_scale=True, leave=False,
              disable=None) as bar:
        scans = [Scan(dataset, split, bar) for split in SPLITS]
    lengths = sum((scan.lengths for scan in scans), Counter())
    show_content(dataset, scans, lengths)
    show_window(dataset, args.split, at, args.tokens)
    path = out or folder / "documents.png"
    try:
        draw(path, scans, lengths, f"{name}: {lengths.total():,} documents, {total:,} tokens")
        line("figure", visible(str(path)))
    except OSError as error:
        if out:
            raise
        line("figure", f"not written, try --out=FILE.png ({error})")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, 2 for a mistake or 130 for Ctrl-C."""
    parser = Parser(prog="python -m data.inspect", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("dataset", metavar="DATASET", help="a prepared name, or a folder of token shards")
    add("--tokenizer", metavar="SPEC", help="of published shards (default: gpt2)")
    add("--split", choices=SPLITS, default="train", help="to show (default: %(default)s)")
    add("--at", type=int, metavar="N", help="token to show from on (default: the first row's)")
    add("--tokens", type=int, metavar="N", default=64, help="to show (default: %(default)s)")
    add("--out", metavar="FILE.png", help="figure (default: documents.png beside the shards)")
    add("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv)
    return run(lambda: inspect(resolve(args.dataset, args.tokenizer), args), args.debug)


if __name__ == "__main__":
    sys.exit(main())
