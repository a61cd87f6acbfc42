"""Convert nanoGPT's train.bin and val.bin into a dataset folder, as data.prepare writes one.

Those files are bare uint16 ids and say nothing of their vocabulary; meta.pkl would, but to open a
pickle is to run it. So the tokenizer is named, or found out from the text, and where there is a
text (a single one, cut in two, as in nanoGPT's Shakespeare sets) all tokens are compared with it.
"""

from collections.abc import Iterator
from hashlib import sha256
from os.path import commonprefix
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.dataset import FORMAT, SPLITS
from data.making.folder import replacing, write_json
from data.making.tokenizers import make_tokenizer
from data.making.writer import ShardWriter
from data.prepare import Parser, run
from data.shards import LAYOUTS
from data.tokenizer import Tokenizer
from kit.errors import UserError

CHUNK = 1 << 20  # tokens or characters that are held at once


def convert(source: Path, name: str, spec: str | None = None, text: Path | None = None,
            overwrite: bool = False) -> Path:
    """Write the dataset `name` from source/{train,val}.bin and return its folder.

    spec: the tokenizer; None is char where there is a text and no id beyond its alphabet, else
    gpt2. text: None is source/input.txt, if it exists. UserError for other files, an id outside
    the vocabulary, or another text.
    """
    if text is None and (source / "input.txt").is_file():
        text = source / "input.txt"
    files = [source / f"{split}.bin" for split in SPLITS]
    with replacing(name) as building:
        for file in files:
            _check(file)
        made = _tokenizer(source, spec, text)
        records = [_scan(file, made) for file in files]
        if text is not None:
            _compare(files, made, text)
        meta = {"format": FORMAT, "name": name, "kind": "text", "tokenizer": made.spec,
                "tokenizer_hash": made.hash, "vocab_size": made.vocab_size, "separator": made.eot,
                "align": None, "sources": records, "val_fraction": None, "val_below": None,
                "splits": {}, "skipped": {"empty": 0, "binary": 0, "without target": 0}}
        if not overwrite:
            building.refuse_other(meta)
        folder = building.begin()
        for split, file, record in zip(SPLITS, files, records, strict=True):
            writer = ShardWriter(folder, split, made.vocab_size)
            for ids in _separator_first(file, made.eot):
                writer.write(ids)
            writer.finish()
            part = {key: record[key] for key in ("documents", "bytes")}
            part["tokens"] = sum(shard["tokens"] for shard in writer.shards)
            meta["splits"][split] = part | {"shards": writer.shards}
            print(f"{split}: {part['documents']:,} documents, {part['tokens']:,} tokens")
        write_json(folder / "tokenizer.json", made.to_json())
        write_json(folder / "dataset.json", meta)
    print(f"written to {building.folder} ({made.spec}, {made.vocab_size:,} ids)")
    return building.folder


def _check(file: Path) -> None:
    size = file.stat().st_size if file.is_file() else None
    if not size:
        raise UserError(f"{file} is {'missing' if size is None else 'empty'}; give the folder with "
                        "nanoGPT's train.bin and val.bin")
    if size % 2:
        raise UserError(f"{file} has {size:,} bytes, an odd number, so it is no uint16 tokens or "
                        "was cut; make or copy it again")
    if tuple(np.fromfile(file, "<i4", 2).tolist()) in LAYOUTS["tokens"]:
        raise UserError(f"{file} has llm.c's header: it is a shard already; train on it as it is, "
                        f"with --dataset={file.parent}")


def _read(file: Path, n: int) -> Iterator[np.ndarray]:
    """The first n tokens of a file, in chunks."""
    for at in tqdm(range(0, n, CHUNK), file.name, unit="M tokens", disable=None):
        yield np.fromfile(file, "<u2", min(CHUNK, n - at), offset=2 * at)


def _size_and_ends(file: Path) -> tuple[int, int, int]:
    """Number of tokens, the first one and the last."""
    n = file.stat().st_size // 2
    return n, *(int(np.fromfile(file, "<u2", 1, offset=2 * at)[0]) for at in (0, n - 1))


def _separator_first(file: Path, eot: int | None) -> Iterator[np.ndarray]:
    """All tokens, with a separator before each document.

    nanoGPT has it behind each: the last one moves to the front, and all others stand between two
    documents as they should. Where one is at neither end (a single text), one is added.
    """
    n, first, last = _size_and_ends(file)
    if eot is not None and (last == eot or first != eot):
        yield np.array([eot])
    yield from _read(file, n - (last == eot))


def _scan(file: Path, made: Tokenizer) -> dict:
    """The record of a file: source, sha256, documents, bytes (of text); UserError for a wrong id.
    """
    (n, *ends), done, digest = _size_and_ends(file), 0, sha256()
    counts = np.zeros(made.vocab_size, np.int64)
    for ids in _read(file, n):
        if ids.max() >= made.vocab_size:
            at = int(np.argmax(ids >= made.vocab_size))
            raise UserError(f"{file}: token {done + at:,} has id {ids[at]}, but {made.spec} has "
                            f"{made.vocab_size:,} ids; give the --tokenizer that made the file")
        digest.update(ids)
        counts += np.bincount(ids, minlength=made.vocab_size)
        done += ids.size
    documents = 1 if made.eot is None else int(counts[made.eot]) + (made.eot not in ends)
    counts[list(made.special.values())] = 0
    n_bytes = sum(int(counts[id]) * len(made.token_bytes(int(id))) for id in np.flatnonzero(counts))
    return {"source": file.name, "sha256": digest.hexdigest(), "documents": documents,
            "bytes": n_bytes}


def _characters(text: Path) -> Iterator[str]:
    """A text in parts, read as nanoGPT does: every kind of line end becomes one character."""
    try:
        with open(text, encoding="utf-8") as opened:
            while part := opened.read(CHUNK):
                yield part
    except UnicodeDecodeError as error:
        raise UserError(f"{text} is not UTF-8 ({error})") from None


def _tokenizer(source: Path, spec: str | None, text: Path | None) -> Tokenizer:
    if text is None:
        if spec == "char" or spec is None and (source / "meta.pkl").exists():
            raise UserError(f"{source}: the characters are taken from the text, as meta.pkl is a "
                            "pickle and never opened; give it with --text=input.txt")
        return make_tokenizer(spec or "gpt2")
    if spec is None:
        char = make_tokenizer("char", _characters(text))
        if np.fromfile(source / "train.bin", "<u2", 1000).max() < char.vocab_size:
            return char
    return make_tokenizer(spec or "gpt2", _characters(text))


def _compare(files: list[Path], made: Tokenizer, text: Path) -> None:
    """UserError unless the tokens of the files, end to end, are the text."""
    parts, rest, done, special = _characters(text), b"", 0, set(made.special.values())
    for file in files:
        for ids in _read(file, file.stat().st_size // 2):
            got = b"".join(made.token_bytes(id) for id in ids.tolist() if id not in special)
            while len(rest) < len(got) and (part := next(parts, "")):
                rest += part.encode("utf-8")
            if not rest.startswith(got):
                at = len(commonprefix([rest, got]))
                raise UserError(f"{file} is not {text} in tokens of {made.spec}: from byte "
                                f"{done + at:,} on the text has {rest[at:at + 9]!r} and the tokens "
                                f"{got[at:at + 9]!r}; give the --text and --tokenizer they are of")
            rest, done = rest[len(got):], done + len(got)
    if rest or next(parts, ""):
        raise UserError(f"{text} goes on after the {done:,} bytes that the tokens have; give the "
                        "--text they are of")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, 2 for a mistake or 130 for Ctrl-C."""
    parser = Parser(prog="python -m extras.nanogpt_bin", description=__doc__.splitlines()[0],
                    allow_abbrev=False)
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="where train.bin and val.bin are")
    add("--name", required=True, help="of the dataset")
    add("--tokenizer", metavar="SPEC", help="of the tokens (default: char if it can be, or gpt2)")
    add("--text", type=Path, help="that the tokens are of (default: FOLDER/input.txt, if any)")
    add("--overwrite", action="store_true", help="replace a dataset that has the name")
    add("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv)

    def converted() -> None:
        folder = convert(args.folder, args.name, args.tokenizer, args.text, args.overwrite)
        print(f"next: python train.py config/small.py --dataset={folder.name}")

    return run(converted, args.debug)
