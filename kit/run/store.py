"""Checkpoints: complete or invisible, checked on reading, and nothing in them is ever executed.

ckpt/step_000500/ holds model.safetensors, optimizer.safetensors, model.json (the architecture),
tokenizer.json and state.json (where training stood, its settings, and the SHA-256 of the others).
ckpt/best.json and ckpt/latest.json name one of the folders. What is unfinished begins with `.tmp-`.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kit.errors import UserError
from kit.files import (
    digest,
    hide,
    read_json,
    remove,
    replacing_folder,
    size_of,
    sync,
    to_text,
    write_json,
    write_text,
)
from kit.settings import Say
from model import GPTConfig

FILES = ("model.safetensors", "optimizer.safetensors", "model.json", "tokenizer.json")
WEIGHTS = ("model.safetensors", "model.json", "tokenizer.json")  # all that sampling needs


def save(run: Path, config: GPTConfig, weights: dict[str, torch.Tensor],
         optimizer: dict[str, torch.Tensor], tokenizer: dict, state: dict[str, Any],
         keep: int) -> Path:
    """Write ckpt/step_N of a run, N = state["step"]; all but the newest `keep` and the best go."""
    folder = run / "ckpt"
    folder.mkdir(exist_ok=True)
    sync(run)
    final = folder / f"step_{state['step']:06d}"
    write(final, config, weights, optimizer, tokenizer, state)
    settle(run, state, keep)
    return final


def save_weights(folder: Path, config: GPTConfig, weights: dict[str, torch.Tensor],
                 tokenizer: dict, about: dict[str, Any], overwrite: bool = True) -> None:
    """Write a folder of weights from elsewhere: a checkpoint before any update, without a run.

    about: where they come from. UserError if the folder holds anything else than such weights, or
    those without `overwrite`, also if another process puts them there meanwhile.
    """
    folder = Path(os.path.abspath(folder))
    look = partial(refuse_filled, folder, overwrite)
    look()
    folder.parent.mkdir(parents=True, exist_ok=True)
    write(folder, config, weights, None, tokenizer,
          {"step": 0, "rows": 0, "tokens": 0, "imported": about}, look)


def refuse_filled(folder: Path, overwrite: bool) -> None:
    """UserError unless weights may be written here: where nothing is, or over such weights."""
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not has_weights_alone(folder):
        raise UserError(f"{folder} holds something else than imported weights; give another "
                        "--out_dir")
    if not overwrite:
        raise UserError(f"{folder} has imported weights already; --overwrite replaces them, or "
                        "give another --out_dir")


def has_weights_alone(folder: Path) -> bool:
    """Whether a folder is what `save_weights` makes, with nothing else in it, such as a run."""
    try:
        alone = {p.name for p in folder.iterdir()} <= {*WEIGHTS, "state.json"}
        return alone and imported(read_json(folder / "state.json")) is not None
    except (UserError, OSError):
        return False


def imported(state: dict[str, Any]) -> dict[str, Any] | None:
    """Where weights come from, as `save_weights` was told; None for those of a run."""
    about = state.get("imported")
    return about if isinstance(about, dict) else None


def trained_with(state: dict[str, Any]) -> tuple[dict[str, Any], str | None, str | None]:
    """Settings of the run of a checkpoint, its data set as they name it, and that one's hash."""
    run = state.get("run")
    run = run if isinstance(run, dict) else {}
    settings = run.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    name, hash = settings.get("dataset"), run.get("dataset_hash")
    return (settings, name if isinstance(name, str) else None,
            hash if isinstance(hash, str) else None)


def write(final: Path, config: GPTConfig, weights: dict[str, torch.Tensor],
          optimizer: dict[str, torch.Tensor] | None, tokenizer: dict,
          state: dict[str, Any], look: Callable[[], None] = lambda: None) -> None:
    """Write a checkpoint folder beside its place and put it there whole.

    One is there if a run goes over the same step again, or if weights are imported anew.
    """
    with replacing_folder(final, look) as aside:
        write_json(aside / "model.json", asdict(config))
        write_text(aside / "tokenizer.json", to_text(tokenizer))
        write_tensors(aside / "model.safetensors", weights, like="model.json")
        if optimizer is not None:
            write_tensors(aside / "optimizer.safetensors", optimizer, like="model.json")
        files = {name: digest(aside / name) for name in FILES if (aside / name).exists()}
        write_json(aside / "state.json", {**state, "files": files})


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], like: str) -> None:
    """Write safetensors, readable by whom the file `like` beside it is; OSError of the disk."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as e:  # it wraps what the system said
        number = int((re.findall(r"os error (\d+)", str(e)) or [errno.EIO])[-1])
        raise OSError(number, os.strerror(number), str(path)) from None
    shutil.copymode(path.with_name(like), path)  # as the umask wants it
    sync(path)


def settle(run: Path, state: dict[str, Any], keep: int) -> None:
    """What follows from a new checkpoint: two pointers, and old ones go. Done again if need be."""
    folder = run / "ckpt"
    for which, step in (("best", state.get("best_step") or None), ("latest", state["step"])):
        name = f"step_{step:06d}" if isinstance(step, int) else ""
        if name and pointed(run, which) != name and (folder / name).exists():
            write_json(folder / f"{which}.json", {"name": name})
    for old in newest_first(run)[keep:]:
        if old.name != pointed(run, "best"):
            remove(hide(old))


class Writer:
    """Writes in the background, one checkpoint at a time; `with` waits for the last of them."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future | None = None

    def start(self, work: Callable[[], Any]) -> None:
        """Do this as soon as what was started before is done; raises what that raised."""
        self.wait()
        self.pending = self.pool.submit(work)

    def wait(self, block: bool = True) -> None:
        """Until all is on the disk, or without `block` only to hear of an error by now."""
        if self.pending and (block or self.pending.done()):
            pending, self.pending = self.pending, None
            pending.result()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        with contextlib.suppress(*(() if kind is None else (Exception,))):
            self.wait()


def tidy(run: Path) -> None:
    """Clear away what a killed process left; what it was about to replace comes back."""
    for stale in [*(run / "ckpt").glob(".tmp-*"), *run.glob(".tmp-*-*")]:
        back = stale.parent / stale.name.removeprefix(".tmp-old-")
        with contextlib.suppress(UserError):  # not whole: it was being deleted
            if stale.is_dir() and not back.exists() and check(stale):
                stale.rename(back)
        remove(stale)


def newest_first(run: Path) -> list[Path]:
    """The checkpoint folders of a run."""
    found = [p for p in (run / "ckpt").glob("step_*") if re.fullmatch(r"step_\d{6,15}", p.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """step_000500 -> 500"""
    return int(folder.name[5:])


def pointed(run: Path, which: str) -> str | None:
    """The folder name in best.json or latest.json; None where there is none or it does not fit."""
    try:
        name = read_json(run / "ckpt" / f"{which}.json").get("name")
    except (UserError, OSError):
        return None
    return name if name in [p.name for p in newest_first(run)] else None


def check(folder: Path, names: tuple[str, ...] = FILES) -> dict[str, Any]:
    """Verify a checkpoint against its state.json; returns the state. UserError if damaged."""
    if folder.is_symlink():
        raise UserError(f"{folder}: a link; a checkpoint is a folder of plain files")
    try:
        state = read_json(folder / "state.json")
        hashes = state.get("files")
        if not isinstance(hashes, dict) or type(state.get("step")) is not int or state["step"] < 0:
            raise UserError(f"{folder / 'state.json'}: no state of a checkpoint of ours")
        for path in (folder / name for name in names):
            if digest(path) != hashes.get(path.name):
                raise UserError(f"{path}: damaged ({size_of(path):,} bytes), its hash does not fit")
    except (FileNotFoundError, NotADirectoryError) as e:
        raise UserError(f"{e.filename}: missing, this is not a complete checkpoint") from None
    return state


def examine(run: Path, warn: Say) -> list[tuple[Path, dict[str, Any]]]:
    """All sound checkpoints of a run, the newest first, the state of that one with it.

    Each damaged one is named. If a sound one is left, it is set aside as damaged_step_N, so that it
    never counts as one again, and what points to it is written anew.
    """
    sound, damaged = [], []
    for folder in newest_first(run):
        try:
            state = check(folder)  # may be large
            sound.append((folder, {} if sound else state))
        except UserError as e:
            damaged.append((folder, e))
    for folder, e in damaged:
        aside, n = folder.with_name(f"damaged_{folder.name}"), 1
        while aside.exists() or aside.is_symlink():
            aside, n = folder.with_name(f"damaged_{folder.name}-{n}"), n + 1
        if sound:
            folder.rename(aside)
        warn(f"{e}; " + (f"set aside as {aside.name}, going on without it" if sound else "kept"))
    for path in (run / "ckpt" / f"{which}.json" for which in ("best", "latest")):
        if sound and os.path.lexists(path) and pointed(run, path.stem) is None:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            warn(f"{path}: damaged, or its checkpoint is gone; written anew")
    return sound
