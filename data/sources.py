"""Where text comes from: a keyword, a text file or a folder becomes a stream of documents."""

import hashlib
import os
import sysconfig
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from data import DataError

KEYWORDS = ("stdlib", "shakespeare")
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
STDLIB_MIN_BYTES = 2_000_000  # a complete one has 10 MB and more; less is a stripped installation
BINARY_PROBE_BYTES = 8192  # a NUL among the first ones marks a file in a folder as binary
TIMEOUT_S = 30


class Document(NamedTuple):
    """One text and where it came from."""

    name: str
    text: str


def data_root() -> Path:
    """The folder of prepared sets: $BONSAI_DATA, else `data/` of this clone."""
    return Path(os.environ.get("BONSAI_DATA") or Path(__file__).parent).absolute()


def documents(source: str, errors: str = "strict", skipped: Counter[str] | None = None,
              root: Path | None = None) -> Iterator[Document]:
    """The documents of a source, one at a time, in an order that depends on nothing but names.

    source: `stdlib` (Python's own library), `shakespeare` (Tiny Shakespeare, downloaded once into
    root), a text file (one document) or a folder (one document a file, hidden ones and binaries
    left out). A keyword is always the keyword: write ./stdlib for a file or folder of that name.
    errors: "strict" refuses bytes that are not UTF-8, "replace" puts U+FFFD in their place.
    skipped: counts what is left out, under "empty" and "binary".
    DataError: nothing there, not UTF-8, not what was expected.
    """
    if errors not in ("strict", "replace"):
        raise DataError(f"--errors={errors}: expected strict or replace")
    skipped = Counter() if skipped is None else skipped
    for name, path in _files(source, root or data_root(), skipped):
        text = _decode(path, errors)
        if text:
            yield Document(name, text)
        else:
            skipped["empty"] += 1


def _files(source: str, root: Path, skipped: Counter[str]) -> Iterator[tuple[str, Path]]:
    """Name and path of every document of a source."""
    if source == "stdlib":
        yield from _stdlib_files()
    elif source == "shakespeare":
        yield source, _shakespeare(root / ".cache")
    elif (path := Path(source)).is_file():
        yield source, path
    elif path.is_dir():
        for name, file in _walk(path, lambda name: name.startswith(".")):
            if _is_binary(file):
                skipped["binary"] += 1
            else:
                yield name, file
    else:
        raise DataError(f"there is no file or folder {source!r}; a source is a text file, a folder "
                        f"of texts or one of {', '.join(KEYWORDS)}")


def _walk(folder: Path, excluded: Callable[[str], bool]) -> Iterator[tuple[str, Path]]:
    """All regular files below a folder, by POSIX path; links to folders are not followed."""
    def refuse(error: OSError) -> None:  # os.walk would pass over what it may not read
        raise error

    found = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not excluded(name)]
        found += [Path(parent, name) for name in files if not excluded(name)]
    names = {path.relative_to(folder).as_posix(): path for path in found if path.is_file()}
    yield from sorted(names.items())


def _is_binary(path: Path) -> bool:
    with open(path, "rb") as file:
        return b"\0" in file.read(BINARY_PROBE_BYTES)


def _decode(path: Path, errors: str) -> str:
    """The text of a file, byte for byte: read as binary, so that line ends survive."""
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8", errors=errors)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8; save the "
            "file as UTF-8, or put U+FFFD there with --errors=replace") from None


def _stdlib_files() -> list[tuple[str, Path]]:
    """The modules of Python's own library, without its tests and what was installed beside it."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not folder.is_dir():
        raise DataError(f"this Python keeps no standard library as files ({folder}); give a text "
                        "file or a folder of texts instead")
    found = [(name, path) for name, path in _walk(folder, STDLIB_EXCLUDED.__contains__)
             if name.endswith(".py")]
    size = sum(path.stat().st_size for _, path in found)
    if size < STDLIB_MIN_BYTES:
        raise DataError(f"the standard library in {folder} has only {size:,} bytes of Python, "
                        f"expected {STDLIB_MIN_BYTES:,} or more; give a text file or a folder of "
                        "texts instead")
    return found


def _shakespeare(cache: Path) -> Path:
    """Tiny Shakespeare in the cache, downloaded if it is not there; its hash is checked either way.

    A copy that is not what it was, or changed upstream, is never used silently.
    """
    path = cache / "tinyshakespeare.txt"
    if path.exists():
        _check_sha256(path.read_bytes(), str(path), "delete it and run this again")
        return path
    elsewhere = ("give a local copy instead: python -m data.prepare input.txt "
                 "--name=shakespeare_char --tokenizer=char")
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=TIMEOUT_S) as response:
            content = response.read()
    except (OSError, HTTPException) as error:
        raise DataError(f"could not download {SHAKESPEARE_URL} ({error}); {elsewhere}") from None
    _check_sha256(content, SHAKESPEARE_URL, f"try again, or {elsewhere}")
    cache.mkdir(parents=True, exist_ok=True)
    temporary = cache / f".tmp-{os.getpid()}-{path.name}"
    temporary.write_bytes(content)
    os.replace(temporary, path)
    return path


def _check_sha256(content: bytes, name: str, remedy: str) -> None:
    got = hashlib.sha256(content).hexdigest()
    if got != SHAKESPEARE_SHA256:
        raise DataError(f"{name} ({len(content):,} bytes) has SHA-256 {got}, expected "
                        f"{SHAKESPEARE_SHA256}; {remedy}")
