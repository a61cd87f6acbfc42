"""Prepare text for training: SOURCE... becomes a dataset folder, ready for `--dataset=NAME`.

The command, `python -m data.prepare`, and what `--dataset=` of the other scripts understands.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

from data import DataError
from data.build import prepare
from data.dataset import foreign_shards
from data.sources import KEYWORDS, data_root
from data.split import MIN_VAL_SHARE, scan
from data.tokenizer import read_json

KNOWN = {  # name: (sources, tokenizer); these are prepared by name alone
    "stdlib": (["stdlib"], "bpe:2048"),
    "shakespeare_char": (["shakespeare"], "char"),
    "shakespeare": (["shakespeare"], "gpt2"),
}
DEFAULT_TOKENIZER = "bpe:2048"


def resolve(dataset: str, tokenizer: str | None = None, say: Callable[[str], None] = print,
            root: Path | None = None) -> Path:
    """The folder that `--dataset=` means, prepared now if it was not; open it with `Dataset`.

    dataset: a prepared or a known name, else a path: a folder of shards is taken as it is, a text
    file or folder of texts is prepared, once, as <stem>-<hash of content and tokenizer>. A name
    wins over a path that is spelled the same; write ./name for the path.
    tokenizer: as for `prepare`; None takes that of the dataset, or bpe:2048 for new text.
    DataError for what is none of these, with the nearest name, and for a prepared dataset that has
    another tokenizer than the given one.
    """
    root, path = root or data_root(), Path(dataset)
    prepared = sorted(p.parent.name for p in root.glob("[!.]*/dataset.json"))
    if dataset in prepared:
        return _with_tokenizer(root / dataset, tokenizer)
    if dataset in KNOWN:
        sources, default = KNOWN[dataset]
        say(f"preparing {dataset}")
        return prepare(sources, dataset, tokenizer or default, say=say, root=root)
    if (path / "dataset.json").is_file():
        return _with_tokenizer(path, tokenizer)
    if path.is_dir() and foreign_shards(path, "train"):
        return path
    if dataset and path.exists():
        return _prepare_text(path, tokenizer or DEFAULT_TOKENIZER, say, root)
    names = sorted({*prepared, *KNOWN})
    near = difflib.get_close_matches(dataset, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise DataError(f"--dataset={dataset} is no file, no folder and none of the names "
                    f"{', '.join(names)}{hint}")


def _with_tokenizer(folder: Path, tokenizer: str | None) -> Path:
    """Return a prepared folder if its tokenizer is the given one, else say how to go on."""
    meta = read_json(folder / "dataset.json")
    made = (meta.get("tokenizer"), meta.get("tokenizer_hash"))
    if tokenizer is not None and _identity(tokenizer) not in made:
        raise DataError(
            f"{folder} was prepared with --tokenizer={made[0]}, not {tokenizer}; drop --tokenizer, "
            f"or make another: python -m data.prepare SOURCE --name=NAME --tokenizer={tokenizer}")
    return folder


def _identity(tokenizer: str) -> str:
    """What tells a tokenizer from others: its name, or the hash in its JSON file."""
    return read_json(Path(tokenizer)).get("hash", "") if tokenizer.endswith(".json") else tokenizer


def _prepare_text(path: Path, tokenizer: str, say: Callable[[str], None], root: Path) -> Path:
    """A user's text, under a name that follows from what it says, not from where it lies."""
    source = str(path.absolute())  # Path("./stdlib") alone has lost what tells it from the keyword
    content = f"{scan([source], 'strict', root).sha256} {_identity(tokenizer)}"
    name = f"{stem(source)}-{sha256(content.encode()).hexdigest()[:10]}"
    if (root / name / "dataset.json").is_file():
        return root / name
    say(f"preparing {path} as {name}")
    return prepare([source], name, tokenizer, say=say, root=root)


def stem(source: str) -> str:
    """A dataset name for a source: without folder and ending, and only what names may have."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(source).absolute().stem).strip("-_")[:80] or "text"


# ----------------------------------------------------------------------------------- the command


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line, and an unknown option gets the nearest one named."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(r"unrecognized arguments: (-[^\s=]*)", message):
            near = difflib.get_close_matches(unknown[1], self._option_string_actions, n=1)
            message = f"unknown option {unknown[1]}"
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m data.prepare", description=__doc__.splitlines()[0],
                     allow_abbrev=False)
    add = parser.add_argument
    add("sources", nargs="*", metavar="SOURCE",
        help=f"a text file, a folder of texts, {' or '.join(KEYWORDS)}")
    add("--name", help="of the dataset (default: that of the first source)")
    add("--tokenizer", metavar="SPEC", help="byte, char, bpe:N, a tiktoken encoding or a "
        f"tokenizer.json (default: {DEFAULT_TOKENIZER}; for the names "
        + ", ".join(f"{name} {spec}" for name, (_, spec) in KNOWN.items()) + ")")
    add("--errors", choices=("strict", "replace"), default="strict", help="what is not UTF-8 is "
        "refused, or replaced by U+FFFD (default: %(default)s)")
    add("--val_fraction", type=float, default=0.05, help="share of many documents to hold out, at "
        f"least {100 * MIN_VAL_SHARE:.0f}%% of their bytes (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace a dataset that has the name")
    add("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv)
    if not args.sources:  # asked for here, not by argparse, which would not name an unknown option
        parser.error("give at least one SOURCE")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, 2 for a mistake or 130 for Ctrl-C."""
    args = _arguments(argv)
    if sys.stdout.errors == "strict":  # a path may have letters that the output's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    sources, tokenizer = args.sources, DEFAULT_TOKENIZER
    if len(sources) == 1 and sources[0] in KNOWN:
        sources, tokenizer = KNOWN[sources[0]]
    try:
        prepare(sources, args.name or stem(args.sources[0]), args.tokenizer or tokenizer,
                args.errors, args.val_fraction, args.overwrite)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    except (DataError, OSError) as error:
        if args.debug:
            raise
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
