"""Where text comes from: files, folders, hubs and pipes, each a stream of documents."""

import json
import os
import re
import shutil
import sys
import sysconfig
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path

from tqdm import tqdm

from data import DataError, canonical_hash, formats
from data.formats import Piece

KEYWORDS = ("stdlib", "shakespeare")
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
STDLIB_MIN_BYTES = 2_000_000  # a whole one has 10 MB and more
HUB_SPLITS = ("train", "validation", "test")


def data_root() -> Path:
    """The folder of prepared sets: $BONSAI_DATA, else `data/` of this clone."""
    return Path(os.environ.get("BONSAI_DATA") or Path(__file__).parent).absolute()


def documents(source: str, errors: str = "strict", text_column: str | None = None,
              skipped: dict[str, int] | None = None) -> Iterator[Piece]:
    """Every document of a source, in an order that depends on nothing but names.

    source: `stdlib` (Python's own library), `shakespeare` (downloaded once), a file or a folder (of
    files, without hidden ones). ./stdlib is a path, not the keyword. Lines of .jsonl and .ndjson
    and rows of .parquet are documents; any other file is one, as text; .gz is unpacked first.
    errors: "strict" refuses what is not UTF-8, "replace" puts U+FFFD in its place. text_column: of
    lines and rows; None takes "text", or all of an instruction sample (see `instruct.has_form`).
    skipped: counts what is left out, under "empty", "binary" and "without target".
    """
    skipped = {} if skipped is None else skipped
    for name, path in _files(source):
        named = path == Path(source)
        yield from formats.read(name, path, named, errors, text_column, skipped)


@contextmanager
def fetched(sources: list[str], text_column: str | None = None,
            say: Callable[[str], None] = print) -> Iterator[list[tuple[str, str]]]:
    """(name for the manifest, source for `documents`) of each source, in their order.

    `hf:NAME[:CONFIG][:SPLIT]` and standard input, which cannot be read twice, are first written
    to a file in .cache; standard input's is deleted in the end. Where a source lies on somebody's
    disk is no part of its name.
    """
    cache, spools, found = data_root() / ".cache", [], []
    if sources.count("-") > 1:
        raise DataError("standard input (-) can be given only once")
    _clear(cache)
    try:
        for source in sources:
            if source == "-":
                cache.mkdir(parents=True, exist_ok=True)
                spools += [cache / f"stdin-{os.getpid()}{ending}" for ending in ("", ".jsonl")]
                found.append(("stdin", str(_spool(*spools, say))))
            elif source.startswith("hf:"):
                found.append(_download(source, cache, text_column, say))
            else:
                found.append((Path(source).name or source, source))
        yield found
    finally:
        for spool in spools:
            spool.unlink(missing_ok=True)


def _spool(path: Path, as_lines: Path, say: Callable[[str], None]) -> Path:
    """Write standard input to `path`, or to the other one if it begins with a JSON object."""
    if sys.stdin is None:
        raise DataError("standard input is closed; pipe a text into it")
    if sys.stdin.isatty():
        say("reading what is typed, until Ctrl-D (Ctrl-Z and Enter on Windows)")
    with open(path, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file, formats.BLOCK)
    if not formats.begins_with_object(path):
        return path
    say("standard input begins with a JSON object: its lines are taken as documents")
    return path.rename(as_lines)


def _clear(cache: Path) -> None:
    """Delete what processes that were killed have left in the cache."""
    for path in cache.glob("*-*") if os.name != "nt" else ():  # where os.kill(pid, 0) kills
        if left := re.fullmatch(r"(?:stdin|\.tmp)-(?:.*-)?(\d+)(?:\.jsonl)?", path.name):
            try:
                os.kill(int(left[1]), 0)
            except ProcessLookupError:
                path.unlink(missing_ok=True)
            except OSError:  # it lives, and is somebody else's
                pass


def _download(source: str, cache: Path, text_column: str | None,
              say: Callable[[str], None]) -> tuple[str, str]:
    """Write a data set of the hub, or a local one, as JSON lines, unless they are there."""
    parts = re.fullmatch(r"hf:((?:[A-Za-z]:[\\/])?[^:]+)(?::([^:]*))?(?::([^:]+))?", source)
    if not parts:
        raise DataError(f"{source}: expected hf:NAME, hf:NAME:CONFIG, hf:NAME:SPLIT, "
                        "hf:NAME:CONFIG:SPLIT or hf:NAME::SPLIT")
    name, config, split = parts.groups()
    if split is None and config in HUB_SPLITS:
        config, split = None, config
    local = [path for path in sorted(Path(name).rglob("*")) if path.is_file()]
    state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in local]
    key = canonical_hash([source, text_column, state])[:10]  # a local folder may change
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", source[3:]).strip("-.")[-80:]
    path = cache / f"hf-{readable}-{key}.jsonl"
    shown = source.replace(name, Path(name).absolute().name) if local else source
    if path.exists():
        say(f"{source}: using {path} ({path.stat().st_size:,} bytes), downloaded before; it may be "
            "deleted")
        return shown, str(path)
    cache.mkdir(parents=True, exist_ok=True)
    say(f"{source}: writing to {path}, on a disk with {shutil.disk_usage(cache).free / 1e9:,.1f} "
        "GB of room")
    temporary = cache / f".tmp-{path.stem}-{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            records = _stream(source, name, config or None, split or "train", text_column)
            for record in tqdm(records, source, unit=" documents", disable=None):
                # Of what JSON lacks, as dates, comes null: `documents` says that it is no text.
                record = formats.without_null(record)
                file.write(json.dumps(record, ensure_ascii=False, default=lambda _: None) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return shown, str(path)


def _stream(source: str, name: str, config: str | None, split: str,
            text_column: str | None) -> Iterator[dict]:
    """The records of a data set, with the columns that are needed."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{source} needs the library `datasets`: pip install datasets") from None
    try:
        stream = datasets.load_dataset(name, config, split=split, streaming=True)
        there = stream.column_names or next(iter(stream), {})
        if there:
            yield from stream.select_columns(formats.columns(there, source, text_column))
    except DataError:
        raise
    except Exception as error:  # the library's, and those of the ones below it, share no base
        reason = formats.one_line(error)
        if "script" in reason:
            way = ("loader scripts are no longer run; give a data set without one, or a folder of "
                   "its parquet or jsonl files")
        elif isinstance(error, ValueError):
            way = "expected hf:NAME, hf:NAME:CONFIG, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT"
        else:
            way = ("check name and network, or download its parquet or jsonl files elsewhere and "
                   "give their folder")
        raise DataError(f"{source}: {type(error).__name__}: {reason}; {way}") from None


def _files(source: str) -> list[tuple[str, Path]]:
    """Name and path of every file of a source."""
    path = Path(source)
    if source == "stdlib":
        return _stdlib(Path(sysconfig.get_path("stdlib")))
    if source == "shakespeare":
        return [(source, _shakespeare())]
    if path.is_file():
        return [(source, path)]
    if path.is_dir() and source:
        return _walk(path, lambda name: not name.startswith("."))
    if path.exists() and source:
        raise DataError(f"{source} is a pipe or a device, which cannot be read twice; pipe it into "
                        f"standard input: python -m data.prepare - --name=NAME < {source}")
    raise DataError(f"there is no file or folder {source!r}; a source is a text, .jsonl or "
                    ".parquet file, a folder of them, hf:NAME, - (standard input) or one of "
                    f"{', '.join(KEYWORDS)}")


def _stdlib(folder: Path) -> list[tuple[str, Path]]:
    """Python's own library, without its tests and what was installed beside it."""
    found = _walk(folder, lambda name: name not in STDLIB_EXCLUDED) if folder.is_dir() else []
    found = [(name, path) for name, path in found if name.endswith(".py")]
    size = sum(path.stat().st_size for _, path in found)
    if size < STDLIB_MIN_BYTES:
        raise DataError(f"Python's standard library in {folder} is zipped, absent or stripped: "
                        f"{size:,} bytes of source, expected {STDLIB_MIN_BYTES:,} or more; give a "
                        "text file or a folder of texts instead, as --dataset=my.txt")
    return found


def _walk(folder: Path, wanted: Callable[[str], bool]) -> list[tuple[str, Path]]:
    """The regular files below a folder, through folders that are wanted too and are no links."""
    def refuse(error: OSError) -> None:  # os.walk would pass over what it may not read
        raise error

    found = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = filter(wanted, folders)
        found += [Path(parent, name) for name in filter(wanted, files)]
    return sorted((p.relative_to(folder).as_posix(), p) for p in found if p.is_file())


def _shakespeare() -> Path:
    """Tiny Shakespeare, downloaded unless the copy that is kept has the right hash."""
    path = data_root() / ".cache" / "tinyshakespeare.txt"
    if path.exists() and sha256(path.read_bytes()).hexdigest() == SHAKESPEARE_SHA256:
        return path
    elsewhere = ("give a local copy instead: python -m data.prepare input.txt "
                 "--name=shakespeare_char --tokenizer=char")
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response:
            content = response.read()
    except (OSError, HTTPException) as error:
        raise DataError(f"could not download {SHAKESPEARE_URL} ({error}); {elsewhere}") from None
    got = sha256(content).hexdigest()
    if got != SHAKESPEARE_SHA256:
        raise DataError(f"{SHAKESPEARE_URL} ({len(content):,} bytes) has SHA-256 {got}, expected "
                        f"{SHAKESPEARE_SHA256}; try again, or {elsewhere}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)
    return path
