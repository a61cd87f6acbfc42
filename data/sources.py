"""Where text comes from: a keyword, a text file or a folder becomes a stream of documents."""

import os
import sysconfig
import urllib.request
from collections.abc import Callable, Iterator
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path

from data import DataError

KEYWORDS = ("stdlib", "shakespeare")
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
STDLIB_MIN_BYTES = 2_000_000  # a whole one has 10 MB and more
BINARY_PROBE_BYTES = 8192  # a NUL among the first ones marks a file in a folder as binary


def data_root() -> Path:
    """The folder of prepared sets: $BONSAI_DATA, else `data/` of this clone."""
    return Path(os.environ.get("BONSAI_DATA") or Path(__file__).parent).absolute()


def documents(source: str, errors: str = "strict",
              skipped: dict[str, int] | None = None) -> Iterator[tuple[str, str]]:
    """(name, text) of each document of a source, in an order that depends on nothing but names.

    source: `stdlib` (Python's own library), `shakespeare` (downloaded once), a text file (one
    document) or a folder (one a file, without hidden ones). ./stdlib is a path, not the keyword.
    errors: "strict" refuses bytes that are not UTF-8, "replace" puts U+FFFD in their place.
    skipped: counts what is left out, under "empty" and "binary".
    """
    skipped = {"empty": 0, "binary": 0} if skipped is None else skipped
    for name, path in _files(source):
        with open(path, "rb") as file:  # not as text, which would change line ends
            head = file.read(BINARY_PROBE_BYTES)
            if b"\0" in head and name != source:  # a file that was named itself is taken as text
                skipped["binary"] += 1
                continue
            raw = head + file.read()
        if not raw:
            skipped["empty"] += 1
            continue
        try:
            yield name, raw.decode("utf-8", errors=errors)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8; save "
                "the file as UTF-8, or put U+FFFD there with --errors=replace") from None


def _files(source: str) -> list[tuple[str, Path]]:
    """Name and path of every file of a source."""
    path = Path(source)
    if source == "stdlib":
        return _stdlib(Path(sysconfig.get_path("stdlib")))
    if source == "shakespeare":
        return [(source, _shakespeare())]
    if path.is_file():
        return [(source, path)]
    if path.is_dir():
        return _walk(path, lambda name: not name.startswith("."))
    raise DataError(f"there is no file or folder {source!r}; a source is a text file, a folder of "
                    f"texts or one of {', '.join(KEYWORDS)}")


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
