"""Prepare text for training: SOURCE... becomes a dataset folder, ready for `--dataset=NAME`."""

import argparse
import errno
import os
import re
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, NoReturn

from data import canonical_hash, data_root, read_json
from data.dataset import SPLITS, Dataset
from data.tokenizer import Tokenizer
from kit.errors import UserError, did_you_mean


class Recipe(NamedTuple):
    """What is prepared by its name alone."""

    source: str
    tokenizer: str
    val_fraction: float | None = None


KNOWN = {
    "stdlib": Recipe("stdlib", "bpe:4096"),
    "shakespeare_char": Recipe("shakespeare", "char"),
    "shakespeare": Recipe("shakespeare", "gpt2"),
    # From the Hugging Face hub. Half a thousandth is held out, as nanoGPT does with openwebtext.
    "tinystories": Recipe("hf:roneneldan/TinyStories", "gpt2", 0.005),  # 2 GB of text
    "openwebtext": Recipe("hf:Skylion007/openwebtext", "gpt2", 0.0005),  # 40 GB
    "fineweb_edu_10b": Recipe("hf:HuggingFaceFW/fineweb-edu:sample-10BT", "gpt2", 0.0005),  # 45 GB
}
DEFAULT_TOKENIZER = "bpe:2048"


def resolve(dataset: str, tokenizer: str | None = None,
            say: Callable[[str], None] = print) -> Path:
    """The folder that `--dataset=` means, prepared now if it was not; open it with `Dataset`.

    dataset: a prepared or known name, a folder of shards, or a text file or folder of texts, which
    is prepared once, as <stem>-<hash of content and tokenizer>; ./name is a path, not the name.
    tokenizer: None takes that of the dataset, or bpe:2048 for new text.
    """
    root, path, wanted = data_root(), Path(dataset), tokenizer or DEFAULT_TOKENIZER
    if not re.fullmatch(r"\w+|bpe:\d+", wanted):  # a file, or a name with its files
        from data.making.tokenizers import identity

        wanted = identity(wanted)
    there = sorted(p.parent.name for p in root.glob("[!.]*/dataset.json"))
    recipe, name = KNOWN.get(dataset), dataset
    if recipe and tokenizer and wanted != recipe.tokenizer:  # never under the plain name
        name = f"{dataset}-{sha256(wanted.encode()).hexdigest()[:10]}"
    elif is_text(dataset):
        from data.making.census import Census

        source = str(path.absolute())  # Path("./stdlib") alone reads like the keyword
        census = Census([(path.name, source)])
        deque(census.pieces(), maxlen=0)
        content = f"{census.records[0]['sha256']} {wanted}".encode()
        name = f"{stem(source)}-{sha256(content).hexdigest()[:10]}"
        recipe = Recipe(source, DEFAULT_TOKENIZER)
    if recipe and name not in there:
        from data.making.build import prepare

        say(f"preparing {name}")
        prepare([recipe.source], name, tokenizer or recipe.tokenizer,
                val_fraction=recipe.val_fraction, again=False, say=say)
    if recipe or name in there:
        path = root / name
    if (path / "dataset.json").is_file():
        meta = read_json(path / "dataset.json")
        if tokenizer and wanted not in (meta.get("tokenizer"), meta.get("tokenizer_hash")):
            raise UserError(
                f"{path} was prepared with --tokenizer={meta.get('tokenizer')}, not {tokenizer}; "
                "drop --tokenizer, or make another with python -m data.prepare")
        return path
    if dataset and _has_shards(path):
        return path
    if path.is_file() and path.suffix == ".bin":
        raise UserError(f"--dataset={dataset} is one file of tokens; give the folder it lies in")
    names = sorted({*there, *KNOWN})
    raise UserError(f"--dataset={dataset} is no file, no folder and none of the names "
                    f"{', '.join(names[:20])}{', ...' * (len(names) > 20)}"
                    f"{did_you_mean(dataset, names)}; other sources are for python -m data.prepare")


def prepares_for(dataset: str, tokenizer: Path) -> bool:
    """Whether `--dataset=` means text, and there is no set of it for this tokenizer.json yet."""
    recipe, made = KNOWN.get(dataset), data_root() / dataset / "dataset.json"
    if not recipe:
        return is_text(dataset)
    wanted = read_json(tokenizer)
    if made.is_file():
        return read_json(made).get("tokenizer_hash") != wanted.get("hash")
    learned = recipe.tokenizer == "char" or recipe.tokenizer.startswith("bpe:")
    return learned or recipe.tokenizer != wanted.get("spec")


def is_text(dataset: str) -> bool:
    """Whether `--dataset=` names text of the user's own, to be prepared by its content."""
    path = Path(dataset)
    folders = [path, data_root() / dataset] if path.name == dataset else [path]
    if not dataset or dataset in KNOWN or path.suffix == ".bin" and path.is_file():
        return False
    return path.exists() and not _has_shards(path) and not any(
        (folder / "dataset.json").is_file() for folder in folders)


def _has_shards(folder: Path) -> bool:
    return any(any(folder.glob(f"*{split}*.bin")) for split in SPLITS)


def prepared(hash: str | None, name: str | None = None) -> Path | None:
    """The folder of a prepared data set of this hash: that of the name, else any in data_root().

    None if it is not here, or is another by now. A run of --dataset=my.jsonl has that as its name.
    """
    root = data_root()
    named = [root / name, Path(name)] if name else []
    for folder in [*named, *sorted(root.glob("[!.]*"))] if hash else ():
        with suppress(UserError, OSError):
            path = folder / "dataset.json"
            if path.is_file() and canonical_hash(read_json(path)) == hash:
                return folder
    return None


def of_run(hash: str | None, name: str | None, tokenizer: Tokenizer) -> Dataset | None:
    """`prepared`, opened; None also if it is damaged or of another tokenizer."""
    folder = prepared(hash, name)
    try:
        data = Dataset(folder) if folder else None
    except (UserError, OSError):
        return None
    return data if data and data.tokenizer.hash == tokenizer.hash else None


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
    from data.making.build import prepare
    from data.making.census import MIN_VAL_BYTES, MIN_VAL_SHARE, TRAIN_SHARE, VAL_SHARE
    from data.making.sources import KEYWORDS

    parser = Parser(prog="python -m data.prepare", description=__doc__, allow_abbrev=False)
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
    add("--split_at", metavar="TEXT", help="what stands between documents in a text file, such as "
        "'<|endoftext|>'; without, a file is one document and such a mark is text like any other")
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
    known = args.sources[0] if len(args.sources) == 1 else None
    recipe = KNOWN.get(known, Recipe("", DEFAULT_TOKENIZER))
    for name in ("name", "tokenizer", "text_column", "split_at"):
        if getattr(args, name) == "":
            parser.error(f"--{name}= is empty; leave it out to take the default")
    if args.sources[0] == "-" and not args.name:
        parser.error("standard input has no name; give the dataset one: --name=NAME")

    def prepared() -> None:
        sources = [recipe.source] if recipe.source else args.sources
        name, tokenizer = args.name or stem(args.sources[0]), args.tokenizer or recipe.tokenizer
        fraction = recipe.val_fraction if args.val_fraction is None else args.val_fraction
        folder = prepare(sources, name, tokenizer, args.errors, fraction, args.overwrite,
                         args.text_column, args.align, args.workers,
                         split_at=args.split_at, say=tell)
        tell(f"next: python train.py config/small.py --dataset={folder.name}")

    return run(prepared, args.debug)


def run(command: Callable[[], None], debug: bool) -> int:
    """Run what a command line of this room asks for; returns its exit code."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None where it was closed
    sys.stderr = sys.stderr or open(os.devnull, "w")
    if sys.stdout.errors == "strict":  # a path may have letters that the output's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    if hasattr(sys.stdout, "reconfigure"):  # a log has each line when it is said
        sys.stdout.reconfigure(line_buffering=True)
    try:
        command()
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads on, as behind `| head`
        sys.stdout = open(os.devnull, "w")
    except (UserError, OSError) as error:
        if debug:
            raise
        elsewhere = "; make room, or set BONSAI_DATA to a folder that can be written"
        refused = getattr(error, "errno", None) in (errno.ENOSPC, errno.EACCES, errno.EROFS)
        print(f"{error}{elsewhere if refused else ''}", file=sys.stderr)
        return 2
    return 0


def tell(line: str) -> None:
    """Print a line; work goes on where nobody reads it any more."""
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ModuleNotFoundError as error:
        if not error.name.startswith("data."):
            raise
        print(f"this needs {error.name.replace('.', '/')}, which is not in this clone",
              file=sys.stderr)
        sys.exit(2)
