"""Prepare text for training: SOURCE... becomes a dataset folder, ready for `--dataset=NAME`."""

import argparse
import errno
import os
import re
import sys
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, NoReturn

from data import DataError, did_you_mean, read_json
from data.build import prepare
from data.census import MIN_VAL_BYTES, MIN_VAL_SHARE, TRAIN_SHARE, VAL_SHARE, Census
from data.dataset import SPLITS
from data.sources import KEYWORDS, data_root
from data.tokenizer import identity


class Recipe(NamedTuple):
    """What is prepared by its name alone."""

    source: str
    tokenizer: str
    val_fraction: float | None = None


KNOWN = {
    "stdlib": Recipe("stdlib", "bpe:4096"),
    "shakespeare_char": Recipe("shakespeare", "char"),
    "shakespeare": Recipe("shakespeare", "gpt2"),
    # Large ones, downloaded from the Hugging Face hub. Half a thousandth is held out, as nanoGPT
    # does with openwebtext; data.census has a least number of bytes besides.
    "tinystories": Recipe("hf:roneneldan/TinyStories", "gpt2", 0.005),  # 2 GB of text
    "openwebtext": Recipe("hf:Skylion007/openwebtext", "gpt2", 0.0005),  # 40 GB
    "fineweb_edu_10b": Recipe("hf:HuggingFaceFW/fineweb-edu:sample-10BT", "gpt2", 0.0005),  # 45 GB
}
DEFAULT_TOKENIZER = "bpe:2048"
WAYS_OUT = {  # of what the system refuses
    errno.ENOSPC: "; make room, or set BONSAI_DATA to a folder on another disk",
    errno.EACCES: "; to write elsewhere set BONSAI_DATA to a folder of yours",
    errno.EROFS: "; set BONSAI_DATA to a folder that can be written",
}


def resolve(dataset: str, tokenizer: str | None = None,
            say: Callable[[str], None] = print) -> Path:
    """The folder that `--dataset=` means, prepared now if it was not; open it with `Dataset`.

    dataset: a prepared or known name, a folder of shards, or a text file or folder of texts, which
    is prepared once, as <stem>-<hash of content and tokenizer>. Write ./name for a path that is
    spelled like a name. tokenizer: None takes that of the dataset, or bpe:2048 for new text.
    """
    root, path = data_root(), Path(dataset)
    wanted = identity(tokenizer or DEFAULT_TOKENIZER)
    prepared = sorted(p.parent.name for p in root.glob("[!.]*/dataset.json"))
    if dataset in KNOWN:
        recipe = KNOWN[dataset]
        other = tokenizer and wanted != recipe.tokenizer  # never under the plain name
        name = f"{dataset}-{sha256(wanted.encode()).hexdigest()[:10]}" if other else dataset
        if name not in prepared:
            say(f"preparing {name}")
            prepare([recipe.source], name, tokenizer or recipe.tokenizer,
                    val_fraction=recipe.val_fraction, again=False, say=say)
        path = root / name
    elif dataset in prepared:
        path = root / dataset
    if (path / "dataset.json").is_file():
        meta = read_json(path / "dataset.json")
        if tokenizer and wanted not in (meta.get("tokenizer"), meta.get("tokenizer_hash")):
            raise DataError(
                f"{path} was prepared with --tokenizer={meta.get('tokenizer')}, not {tokenizer}; "
                "drop --tokenizer, or make another: python -m data.prepare SOURCE --name=NAME "
                f"--tokenizer={tokenizer}")
        return path
    if dataset and _has_shards(path):
        return path
    if path.is_file() and path.suffix == ".bin":
        raise DataError(f"--dataset={dataset} is one file of tokens; give the folder that it lies "
                        "in, with *train*.bin and *val*.bin")
    if dataset and path.exists():
        source = str(path.absolute())  # Path("./stdlib") alone reads like the keyword
        census = Census([(path.name, source)], "strict", None)
        deque(census.pieces(), maxlen=0)
        content = f"{census.records[0]['sha256']} {wanted}".encode()
        name = f"{stem(source)}-{sha256(content).hexdigest()[:10]}"
        if not (root / name / "dataset.json").is_file():
            say(f"preparing {path} as {name}")
            prepare([source], name, tokenizer or DEFAULT_TOKENIZER, again=False, say=say)
        return root / name
    names = sorted({*prepared, *KNOWN})
    raise DataError(f"--dataset={dataset} is no file, no folder and none of the names "
                    f"{', '.join(names[:20])}{', ...' * (len(names) > 20)}"
                    f"{did_you_mean(dataset, names)}; other sources are for python -m data.prepare")


def is_text(dataset: str) -> bool:
    """Whether `--dataset=` names text of the user's own, to be prepared by its content."""
    path, prepared = Path(dataset), data_root() / dataset / "dataset.json"
    return path.exists() and dataset not in KNOWN and not prepared.is_file() and not (
        (path / "dataset.json").is_file() or _has_shards(path))


def _has_shards(folder: Path) -> bool:
    return any(any(folder.glob(f"*{split}*.bin")) for split in SPLITS)


def stem(source: str) -> str:
    """A dataset name for a source: without folder and ending, and only what names may have."""
    name = Path(source.removesuffix(".gz")).absolute().stem
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:80] or "text"


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line, and an unknown option gets the nearest one named."""

    def error(self, message: str) -> NoReturn:
        word = message.removeprefix("unrecognized arguments: ").partition("=")[0]
        hint = did_you_mean(word, self._option_string_actions)
        self.exit(2, f"{self.prog}: {message}{hint} (see --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, 2 for a mistake or 130 for Ctrl-C."""
    parser = Parser(prog="python -m data.prepare", description=__doc__.splitlines()[0],
                    allow_abbrev=False)
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="a text file or .jsonl (either also as .gz), "
        f".parquet, a folder of such, hf:NAME[:CONFIG][:SPLIT] from the Hugging Face hub, - "
        f"for standard input, {' or '.join(KEYWORDS)}; or one of the names {', '.join(KNOWN)}")
    add("--name", help="of the dataset (default: that of the first source)")
    add("--tokenizer", metavar="SPEC", help="byte, char, bpe:N, a tiktoken encoding (gpt2:FOLDER "
        f"takes its files from there) or a tokenizer.json (default: {DEFAULT_TOKENIZER}; for the "
        "names " + ", ".join(f"{name} {recipe.tokenizer}" for name, recipe in KNOWN.items()) + ")")
    add("--text_column", metavar="NAME", help="of .jsonl, .parquet and hf: the column with the "
        "text (default: messages, else prompt and completion, else text)")
    add("--errors", choices=("strict", "replace"), default="strict", help="what is not UTF-8 is "
        "refused, or replaced by U+FFFD (default: %(default)s)")
    add("--val_fraction", type=float, help="share to hold out; of many documents at least "
        f"{100 * MIN_VAL_SHARE:.0f}%% of their bytes or {MIN_VAL_BYTES / 1e6:.0f} MB (default: "
        f"{VAL_SHARE} of them, {1 - TRAIN_SHARE:.1f} of a single text; less of the large names)")
    add("--align", choices=("document",), help="begin training rows with a document where one is")
    add("--workers", type=int, help="threads that encode (default: one a core)")
    add("--overwrite", action="store_true", help="replace a dataset that has the name")
    add("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv)
    recipe = Recipe("", DEFAULT_TOKENIZER)
    if len(args.sources) == 1 and args.sources[0] in KNOWN:
        recipe = KNOWN[args.sources[0]]

    for name in ("name", "tokenizer", "text_column"):
        if getattr(args, name) == "":
            parser.error(f"--{name}= is empty; leave it out to take the default")
    if args.sources[0] == "-" and not args.name:
        parser.error("standard input has no name; give the dataset one: --name=NAME")

    def prepared() -> None:
        fraction = recipe.val_fraction if args.val_fraction is None else args.val_fraction
        folder = prepare([recipe.source] if recipe.source else args.sources,
                         args.name or stem(args.sources[0]), args.tokenizer or recipe.tokenizer,
                         args.errors, fraction, args.overwrite, args.text_column, args.align,
                         args.workers, say=tell)
        tell(f"next: python train.py config/small.py --dataset={folder.name}")

    return run(prepared, args.debug)


def run(command: Callable[[], None], debug: bool) -> int:
    """Run what a command line of this room asks for; returns its exit code."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # it was closed
            setattr(sys, stream, open(os.devnull, "w"))
    if sys.stdout.errors == "strict":  # a path may have letters that the output's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        command()
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    except (DataError, OSError) as error:
        if debug:
            raise
        print(f"{error}{WAYS_OUT.get(getattr(error, 'errno', None), '')}", file=sys.stderr)
        return 2
    return 0


def tell(line: str) -> None:
    """Print a line; work goes on where nobody reads it any more."""
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")


if __name__ == "__main__":
    sys.exit(main())
