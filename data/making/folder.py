"""The folder of a dataset, written aside and put in its place whole, by one process at a time."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from data import data_root, read_json
from kit.errors import UserError
from kit.files import write_text


class Building:
    """A dataset folder that is about to be written; there: whether a dataset lies there now."""

    def __init__(self, root: Path, name: str):
        self.folder = root / name
        self._aside, self._old = root / f".tmp-{name}", root / f".old-{name}"
        if (self._old / "dataset.json").exists() and not self.folder.exists():
            os.rename(self._old, self.folder)  # it was killed between two renames
        self.discard()  # what a killed process left
        self.there = (self.folder / "dataset.json").exists()
        if self.folder.exists() and not self.there:
            raise UserError(f"{self.folder} exists and is no dataset; choose another --name")

    def refuse_other(self, meta: dict) -> None:
        """UserError if the dataset that is there was made otherwise than this one will be."""
        there = read_json(self.folder / "dataset.json") if self.there else meta
        ways = {"sources": "from other text", "align": "with another --align",
                "tokenizer_hash": f"with another tokenizer ({there.get('tokenizer')}, now "
                                  f"{meta['tokenizer']})",
                "val_fraction": "with another --val_fraction"}
        if there.get("tokenizer") == meta["tokenizer"] and there.get("sources") != meta["sources"]:
            del ways["tokenizer_hash"]  # it was learned from that other text
        if others := [way for key, way in ways.items() if there.get(key) != meta[key]]:
            raise UserError(f"{self.folder} was made {' and '.join(others)}; choose another "
                            "--name, or replace it with --overwrite")

    def begin(self) -> Path:
        """An empty folder to write to."""
        self._aside.mkdir()
        return self._aside

    def publish(self) -> None:
        """Put what was written in its place, if anything was."""
        if self._aside.exists():
            if self.folder.exists():  # folders cannot be exchanged, so the old one steps aside
                os.rename(self.folder, self._old)
            os.rename(self._aside, self.folder)

    def discard(self) -> None:
        """Remove what is not in its place."""
        for leftover in (self._aside, self._old):
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def replacing(name: str, say: Callable[[str], None] = print) -> Iterator[Building]:
    """Build the dataset `name`: its folder appears, or is replaced, when the block ends well."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,98}[A-Za-z0-9_-])?", name):
        raise UserError(f"--name={name}: expected up to 100 letters, digits, '-', '_' and '.', "
                        "with a letter or digit first and no '.' last")
    root = data_root()
    (root / ".cache").mkdir(parents=True, exist_ok=True)
    try:
        lock = _lock(root, name).acquire(timeout=0)
    except Timeout:
        say(f"waiting for another process that is preparing {name}")
        lock = _lock(root, name).acquire()
    with lock:
        _sweep(root, name)
        building = Building(root, name)
        try:
            yield building
            building.publish()
        finally:
            building.discard()


def _sweep(root: Path, name: str) -> None:
    """Tidy up after killed processes that built other datasets than `name`."""
    leftover = {p.name[5:] for p in root.iterdir() if p.name.startswith((".tmp-", ".old-"))}
    # A folder without a lock is somebody else's.
    ours = {other for other in leftover if (root / ".cache" / f"{other}.lock").exists()}
    for other in ours - {name}:
        with suppress(Timeout, UserError, OSError):  # it is at work, or another user's
            with _lock(root, other).acquire(timeout=0):
                Building(root, other)


def _lock(root: Path, name: str) -> FileLock:
    return FileLock(root / ".cache" / f"{name}.lock")


def write_json(path: Path, value: dict) -> None:
    """Write a JSON object and see it onto the disk."""
    write_text(path, json.dumps(value, indent=1))
