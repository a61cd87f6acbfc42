"""Prepare text for training: SOURCE... becomes a dataset folder, ready for `--dataset=NAME`."""

import argparse
import re
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

from data import DataError, did_you_mean, read_json
from data.build import MIN_VAL_SHARE, prepare, scan
from data.sources import KEYWORDS, data_root

KNOWN = {  # name: (sources, tokenizer); these are prepared by name alone
    "stdlib": (["stdlib"], "bpe:4096"),
    "shakespeare_char": (["shakespeare"], "char"),
    "shakespeare": (["shakespeare"], "gpt2"),
}
DEFAULT_TOKENIZER = "bpe:2048"


def resolve(dataset: str, tokenizer: str | None = None,
            say: Callable[[str], None] = print) -> Path:
    """The folder that `--dataset=` means, prepared now if it was not; open it with `Dataset`.

    dataset: a prepared or known name, a folder of shards, or a text file or folder of texts, which
    is prepared once, as <stem>-<hash of content and tokenizer>. Write ./name for a path that is
    spelled like a name. tokenizer: None takes that of the dataset, or bpe:2048 for new text.
    """
    root, path = data_root(), Path(dataset)
    chosen = tokenizer or DEFAULT_TOKENIZER
    identity = read_json(Path(chosen)).get("hash") if chosen.endswith(".json") else chosen
    prepared = sorted(p.parent.name for p in root.glob("[!.]*/dataset.json"))
    if dataset in KNOWN:
        sources, default = KNOWN[dataset]
        other = tokenizer and identity != default  # never under the plain name
        name = f"{dataset}-{sha256(identity.encode()).hexdigest()[:10]}" if other else dataset
        if name not in prepared:
            say(f"preparing {name}")
            prepare(sources, name, tokenizer or default, say=say)
        path = root / name
    elif dataset in prepared:
        path = root / dataset
    if (path / "dataset.json").is_file():
        meta = read_json(path / "dataset.json")
        if tokenizer and identity not in (meta.get("tokenizer"), meta.get("tokenizer_hash")):
            raise DataError(
                f"{path} was prepared with --tokenizer={meta.get('tokenizer')}, not {tokenizer}; "
                "drop --tokenizer, or make another: python -m data.prepare SOURCE --name=NAME "
                f"--tokenizer={tokenizer}")
        return path
    if any(path.glob("*train*.bin")):
        return path
    if dataset and path.exists():
        source = str(path.absolute())  # Path("./stdlib") alone reads like the keyword
        (record,), *_ = scan([source])
        content = f"{record['sha256']} {identity}".encode()
        name = f"{stem(source)}-{sha256(content).hexdigest()[:10]}"
        if not (root / name / "dataset.json").is_file():
            say(f"preparing {path} as {name}")
            prepare([source], name, chosen, say=say)
        return root / name
    names = sorted({*prepared, *KNOWN})
    raise DataError(f"--dataset={dataset} is no file, no folder and none of the names "
                    f"{', '.join(names)}{did_you_mean(dataset, names)}")


def is_text(dataset: str) -> bool:
    """Whether `--dataset=` names text of the user's own, to be prepared by its content."""
    path, prepared = Path(dataset), data_root() / dataset / "dataset.json"
    return path.exists() and dataset not in KNOWN and not prepared.is_file() and not (
        (path / "dataset.json").is_file() or any(path.glob("*train*.bin")))


def stem(source: str) -> str:
    """A dataset name for a source: without folder and ending, and only what names may have."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(source).absolute().stem).strip("-_")[:80] or "text"


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line, and an unknown option gets the nearest one named."""

    def error(self, message: str) -> NoReturn:
        word = message.removeprefix("unrecognized arguments: ").partition("=")[0]
        hint = did_you_mean(word, self._option_string_actions)
        self.exit(2, f"{self.prog}: {message}{hint} (see --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, 2 for a mistake or 130 for Ctrl-C."""
    parser = _Parser(prog="python -m data.prepare", description=__doc__.splitlines()[0],
                     allow_abbrev=False)
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE",
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

    if sys.stdout.errors == "strict":  # a path may have letters that the output's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    sources, tokenizer = args.sources, DEFAULT_TOKENIZER
    if len(sources) == 1 and sources[0] in KNOWN:
        sources, tokenizer = KNOWN[sources[0]]
    try:
        folder = prepare(sources, args.name or stem(args.sources[0]), args.tokenizer or tokenizer,
                         args.errors, args.val_fraction, args.overwrite)
        print(f"next: python train.py config/small.py --dataset={folder.name}")
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
