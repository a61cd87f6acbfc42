"""Where text comes from: files, folders, hubs and pipes, each a stream of documents."""

import json
import os
import re
import shutil
import sys
import sysconfig
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path

from tqdm import tqdm

from data import canonical_hash, data_root
from data.making import formats
from data.making.formats import Piece
from kit.errors import UserError
from kit.files import replacing

KEYWORDS = ("stdlib", "shakespeare")
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
STDLIB_MIN_BYTES = 2_000_000  # a whole one has 10 MB and more


def documents(source: str, errors: str = "strict", text_column: str | None = None,
              skipped: dict[str, int] | None = None, split_at: str | None = None
              ) -> Iterator[Piece]:
    """Every document of a source, in an order that depends on nothing but names.

    source: `stdlib` (Python's own library), `shakespeare` (downloaded once), a file or a folder,
    without its hidden files. ./stdlib is a path, not the keyword. Lines of .jsonl and .ndjson and
    rows of .parquet are documents; any other file is one, as text; .gz is unpacked first.
    errors: "strict", or "replace" what is not UTF-8 by U+FFFD. text_column: of lines and rows; None
    takes "text", or an instruction sample. skipped: counts of "empty", "binary", "without target".
    split_at: what stands between the documents of a text file; None: each file is one.
    """
    skipped = {} if skipped is None else skipped
    for name, path in _files(source):
        yield from formats.read(name, path, path == Path(source), errors, text_column, skipped,
                                split_at)


@contextmanager
def fetched(sources: list[str], text_column: str | None = None,
            say: Callable[[str], None] = print) -> Iterator[list[tuple[str, str]]]:
    """(name for the manifest, source for `documents`) of each source, in their order.

    `hf:NAME[:CONFIG][:SPLIT]` and standard input, which cannot be read twice, are first written
    to .cache, the latter for the time being. Where a source lies on a disk is not in its name.
    """
    cache, found = data_root() / ".cache", []
    if sources.count("-") > 1:
        raise UserError("standard input (-) can be given only once")
    _clear(cache)
    cache.mkdir(parents=True, exist_ok=True)
    with ExitStack() as spooled:
        for source in sources:
            if source == "-":
                found.append(("stdin", str(spooled.enter_context(_spool(cache, say)))))
            elif source.startswith("hf:"):
                found.append(_download(source, cache, text_column, say))
            else:
                found.append((Path(source).name or source, source))
        yield found


@contextmanager
def _spool(cache: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Standard input as a file, of JSON lines if it begins with an object."""
    if sys.stdin is None:
        raise UserError("standard input is closed; pipe a text into it")
    if sys.stdin.isatty():
        say("reading what is typed, until Ctrl-D (Ctrl-Z and Enter on Windows)")
    head = sys.stdin.buffer.readline(16 * formats.PIECE)
    if lines := formats.is_object(head):
        say("standard input begins with a JSON object: its lines are taken as documents")
    path = cache / f"stdin-{os.getpid()}{'.jsonl' if lines else ''}"
    try:
        with open(path, "wb") as file:
            file.write(head)
            shutil.copyfileobj(sys.stdin.buffer, file, formats.BLOCK)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _clear(cache: Path) -> None:
    """Delete what processes that were killed have left in the cache."""
    for path in cache.glob("*-*") if os.name != "nt" else ():  # where os.kill(pid, 0) kills
        if left := re.fullmatch(r"(?:stdin|\.tmp)-(\d+)\b.*", path.name):
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
        raise UserError(f"{source}: expected hf:NAME[:CONFIG][:SPLIT] or hf:NAME::SPLIT")
    name, config, split = parts.groups()
    if split is None and config in ("train", "validation", "test"):
        config, split = None, config
    local = [path for path in sorted(Path(name).rglob("*")) if path.is_file()]
    state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in local]
    key = canonical_hash([source, text_column, state])[:10]  # a local folder may change
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", source[3:]).strip("-.")[-80:]
    path = cache / f"hf-{readable}-{key}.jsonl"
    shown = source.replace(name, Path(name).absolute().name) if local else source
    if path.exists():
        say(f"{source}: using {path}, {path.stat().st_size:,} bytes, which may be deleted")
        return shown, str(path)
    room = shutil.disk_usage(cache).free / 1e9
    say(f"{source}: writing to {path}, on a disk with {room:,.1f} GB of room")
    with replacing(path) as aside, open(aside, "wb") as file:
        records = _stream(source, name, config or None, split or "train", text_column)
        for record in tqdm(records, source, unit=" documents", disable=None):
            # Of what JSON lacks, as dates, comes a number: `documents` says that it is no text.
            line = json.dumps(record, ensure_ascii=False, default=lambda _: 0) + "\n"
            file.write(line.encode("utf-8"))
    return shown, str(path)


def _stream(source: str, name: str, config: str | None, split: str,
            text_column: str | None) -> Iterator[dict]:
    """The records of a data set, with the columns that are needed."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{source} needs the library `datasets`: pip install datasets") from None
    try:
        stream = datasets.load_dataset(name, config, split=split, streaming=True)
        there = stream.column_names or next(iter(stream), {})
        if there:
            yield from stream.select_columns(formats.columns(there, source, text_column))
    except UserError:
        raise
    except Exception as error:  # the library's, and those of the ones below it, share no base
        reason = formats.one_line(error)
        why = "loader scripts are no longer run" if "script" in reason else "check name and network"
        raise UserError(f"{source}: {type(error).__name__}: {reason}; {why}, or download its "
                        "parquet or jsonl files and give their folder") from None


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
        raise UserError(f"{source} is a pipe or a device, which cannot be read twice; give it as "
                        f"standard input: python -m data.prepare - --name=NAME < {source}")
    raise UserError(f"there is no file or folder {source!r}; give a text, .jsonl or .parquet file, "
                    f"a folder of them, hf:NAME, - (standard input) or {', '.join(KEYWORDS)}")


def _stdlib(folder: Path) -> list[tuple[str, Path]]:
    """Python's own library, without its tests and what was installed beside it."""
    found = _walk(folder, lambda name: name not in STDLIB_EXCLUDED) if folder.is_dir() else []
    found = [(name, path) for name, path in found if name.endswith(".py")]
    size = sum(path.stat().st_size for _, path in found)
    if size < STDLIB_MIN_BYTES:
        raise UserError(f"Python's standard library in {folder} is zipped, absent or stripped, "
                        f"with {size:,} bytes of source; give your own text, as --dataset=my.txt")
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
    elsewhere = ("give a local copy: python -m data.prepare input.txt --name=shakespeare_char "
                 "--tokenizer=char")
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response:
            content = response.read()
    except (OSError, HTTPException) as error:
        raise UserError(f"could not download {SHAKESPEARE_URL} ({error}); {elsewhere}") from None
    if (got := sha256(content).hexdigest()) != SHAKESPEARE_SHA256:
        raise UserError(f"{SHAKESPEARE_URL} ({len(content):,} bytes) has SHA-256 {got}, expected "
                        f"{SHAKESPEARE_SHA256}; try again, or {elsewhere}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        aside.write_bytes(content)
    return path
