"""Files that are whole or absent, sealed with their own hash, and read within bounds.

What is unfinished begins with `.tmp-`. Nothing read here is ever executed.
"""

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kit.errors import UserError

FORMAT = 2  # 1 had no seal
DISK = {getattr(errno, name, errno.EIO) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO")}
LARGEST_JSON = 64 << 20  # bytes; the largest that we write is a tokenizer of a few megabytes


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name == "nt":  # Windows opens no folders
        return
    fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` when the block ends well and else is removed.

    A reader sees the old file or the new one, and a full disk leaves the old one as it was; an
    error of the disk names `path`.
    """
    aside = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    aside.unlink(missing_ok=True)  # or we might write through a link that somebody laid there
    try:
        yield aside
        sync(aside)
        os.replace(aside, path)
        sync(path.parent)
    except BaseException as e:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        name_file(e, aside, path)
        raise


def name_file(error: BaseException, aside: Path, path: Path) -> None:
    """Let an error of the disk name what was to be written, and not the place aside or nothing."""
    if isinstance(error, OSError) and error.errno in DISK:
        error.filename = str(error.filename or path).replace(str(aside), str(path), 1)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", newline="\n")


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with its own hash at its end."""
    rest = {k: v for k, v in value.items() if k != "seal"}
    bare = {k: v for k, v in rest.items() if k != "format" or v != 1}  # 1 left it out
    return rest | {"seal": hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()}


def to_text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object with the format's version and a seal."""
    write_text(path, to_text(sealed({"format": FORMAT, **value})))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object as we wrote it, to the last character; UserError for anything else."""
    try:
        if size_of(path) > LARGEST_JSON:
            raise UserError(f"{path}: larger than {LARGEST_JSON >> 20} MiB, so not ours")
        text = path.read_bytes().decode()  # without translating line ends
        value = json.loads(text)
        sound = isinstance(value, dict) and (
            to_text(sealed(value)) == text if value.get("format") == FORMAT or "seal" in value
            else value.get("format") == 1) and value.get("format") in (1, FORMAT)
    except (ValueError, RecursionError, MemoryError):
        sound = False
    if not sound:
        raise UserError(f"{path}: damaged, or not of this version of bonsaiGPT (format {FORMAT})")
    return value


def size_of(path: Path) -> int:
    """Bytes of a plain file; UserError for a link, a folder or a device, which may have no end."""
    info = path.lstat()
    if not stat.S_ISREG(info.st_mode):
        raise UserError(f"{path}: a plain file belongs here, not a link, a folder or a device")
    return info.st_size


def digest(path: Path) -> str:
    """Hex SHA-256 of a plain file."""
    size_of(path)
    return sha256_of(path)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, or of what a link leads to."""
    sha, buffer = hashlib.sha256(), bytearray(1 << 20)
    with path.open("rb", buffering=0) as f:
        while n := f.readinto(buffer):
            sha.update(memoryview(buffer)[:n])
    return sha.hexdigest()


def remove(path: Path) -> None:
    """A file, a link, or a folder with all that is in it; nothing if it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(final: Path, look: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """An empty folder to write to, which becomes `final` when the block ends well and else goes.

    What is there stays until then, and comes back where the new one cannot take its place. look:
    called just before that, it may raise because of what another process has put there meanwhile.
    """
    clear(final)
    aside = final.with_name(f".tmp-{os.getpid()}-{final.name}")
    remove(aside)
    aside.mkdir()
    try:
        yield aside
        sync(aside)
        look()
        before = hide(final)
        try:
            aside.rename(final)
        except BaseException as e:
            if before.is_dir() and not final.exists():
                before.rename(final)
            if isinstance(e, OSError) and e.errno in (errno.ENOTEMPTY, errno.EEXIST):
                remove(before)
                raise UserError(f"{final}: another process has just written it") from None
            raise
        sync(final.parent)
    except BaseException as e:  # a full disk: give back what was taken
        shutil.rmtree(aside, ignore_errors=True)
        name_file(e, aside, final)
        raise
    remove(before)


def clear(final: Path) -> None:
    """Remove what killed processes were writing in order to replace this."""
    if os.name == "nt":  # where os.kill(pid, 0) kills
        return
    for path in final.parent.glob(f".tmp-*-{glob.escape(final.name)}"):
        if left := re.match(r"\.tmp-(\d{1,9})-", path.name):
            try:
                os.kill(int(left[1]), 0)
            except ProcessLookupError:
                remove(path)
            except OSError:  # it lives, and is somebody else's
                pass


def hide(folder: Path) -> Path:
    """Rename a folder, if there is one, so that no half of it is ever taken for a checkpoint."""
    hidden = folder.with_name(f".tmp-old-{folder.name}")
    if folder.exists():
        remove(hidden)
        folder.rename(hidden)
    return hidden
