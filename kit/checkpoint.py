"""Checkpoints: complete or invisible, checked on reading, and nothing in them is ever executed.

ckpt/step_000500/ holds model.safetensors, optimizer.safetensors, model.json (the architecture),
tokenizer.json and state.json (where training stood, and the SHA-256 of the others and of itself).
ckpt/best.json and ckpt/latest.json name one of the folders. What is unfinished begins with `.tmp-`.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kit.settings import Say, UserError
from model import GPT, GPTConfig

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors", "model.json", "tokenizer.json")
WEIGHTS = ("model.safetensors", "model.json", "tokenizer.json")  # all that sampling needs


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name == "nt":  # Windows opens no folders
        return
    fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def to_text(value: dict[str, Any]) -> str:
    return json.dumps({"format": FORMAT, **value}, indent=1) + "\n"


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON aside, sync it and rename it: a reader sees the old file or the new one."""
    aside = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    aside.write_text(to_text(value), encoding="utf-8")
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that we wrote; UserError where it is damaged or of a later format."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UserError(f"{path}: damaged, or not of this version of bonsaiGPT (format {FORMAT})")
    return value


def digest(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """A state with its own hash at its end."""
    rest = {k: v for k, v in state.items() if k not in ("seal", "format")}
    return rest | {"seal": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def save(run: Path, model: GPT, optimizer_tensors: dict[str, torch.Tensor], tokenizer: dict,
         state: dict[str, Any], keep: int, is_best: bool) -> Path:
    """Write ckpt/step_N of a run, N = state["step"]; all but the newest `keep` and the best go."""
    folder = run / "ckpt"
    final = folder / f"step_{state['step']:06d}"
    aside = folder / f".tmp-{final.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    tensors = {"model.safetensors": dict(model.named_parameters()),
               "optimizer.safetensors": optimizer_tensors}
    for name, named in tensors.items():
        save_file({n: t.detach().cpu().contiguous() for n, t in named.items()}, aside / name,
                  metadata={"format": "pt"})
        sync(aside / name)
    write_json(aside / "model.json", asdict(model.config))
    write_json(aside / "tokenizer.json", tokenizer)
    files = {name: digest(aside / name) for name in FILES}
    write_json(aside / "state.json", sealed({**state, "files": files}))
    before = hide(final)  # a damaged one, or the run goes over the same step again
    os.replace(aside, final)
    sync(folder)
    shutil.rmtree(before, ignore_errors=True)
    best = f"step_{state['step'] if is_best else state.get('best_step', 0):06d}"
    if (folder / best).exists():  # always, in case that the last process ended before this line
        write_json(folder / "best.json", {"name": best})
    write_json(folder / "latest.json", {"name": final.name})
    so_far = [p for p in newest_first(run) if step_of(p) <= state["step"]]  # later ones are damaged
    for old in newest_first(run):
        if old not in so_far[:keep] and old.name != pointed(run, "best"):
            shutil.rmtree(hide(old))
    return final


def hide(folder: Path) -> Path:
    """Rename a folder, if there is one, so that no half of it is ever taken for a checkpoint."""
    hidden = folder.with_name(f".tmp-old-{folder.name}")
    if folder.exists():
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
    return hidden


def tidy(run: Path) -> None:
    """Clear away what a killed process left; what it was about to replace comes back."""
    for stale in (run / "ckpt").glob(".tmp-*"):
        back = stale.with_name(stale.name.removeprefix(".tmp-old-"))
        with contextlib.suppress(UserError):  # not whole: it was being deleted
            if not back.exists() and check(stale):
                stale.rename(back)
        if stale.is_dir():
            shutil.rmtree(stale)
        else:
            stale.unlink(missing_ok=True)


def newest_first(run: Path) -> list[Path]:
    """The checkpoint folders of a run."""
    found = [p for p in (run / "ckpt").glob("step_*") if re.fullmatch(r"step_\d{6,}", p.name)]
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
    file = folder / "state.json"
    try:
        state = read_json(file)
        if to_text(sealed(state)) != file.read_text(encoding="utf-8"):
            raise UserError(f"{file}: damaged, its hash does not fit")
        for name in names:
            if digest(folder / name) != state["files"][name]:
                size = (folder / name).stat().st_size
                raise UserError(f"{folder / name}: damaged ({size:,} bytes), the hash does not fit")
    except (FileNotFoundError, NotADirectoryError) as e:
        raise UserError(f"{e.filename}: missing, this is not a complete checkpoint") from None
    return state


def newest_complete(run: Path, warn: Say) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that passes `check`, and its state; `warn` names each damaged one."""
    for folder in newest_first(run):
        try:
            return folder, check(folder)
        except UserError as e:
            warn(f"{e}; taking the checkpoint before it")
    return None


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """On the CPU. UserError for a file that is not whole safetensors."""
    try:
        return load_file(path)
    except SafetensorError as e:
        raise UserError(f"{path}: damaged: {e}") from None


def load_config(folder: Path) -> GPTConfig:
    """The architecture of a checkpoint; fields that an older one lacks take their defaults."""
    values = read_json(folder / "model.json")
    del values["format"]
    try:
        return GPTConfig(**values)
    except (ValueError, TypeError) as e:  # TypeError: a field that only another version knows
        raise UserError(f"{folder / 'model.json'}: {e}") from None


def load_weights(model: GPT, path: Path) -> None:
    """Copy a model.safetensors into a model of exactly its names and shapes."""
    tensors, parameters = load_tensors(path), dict(model.named_parameters())
    theirs, ours = ({n: tuple(t.shape) for n, t in x.items()} for x in (tensors, parameters))
    if different := theirs.items() ^ ours.items():
        name = min(different)[0]
        raise UserError(f"{path}: does not fit the model: {name} is {theirs.get(name, 'absent')}, "
                        f"the model's is {ours.get(name, 'absent')}")
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(tensors[name])


def load_model(folder: Path) -> tuple[GPT, dict[str, Any], dict[str, Any]]:
    """A checkpoint folder -> the model on the CPU, its tokenizer as JSON, its state."""
    state = check(folder, WEIGHTS)
    model = GPT(load_config(folder))
    load_weights(model, folder / "model.safetensors")
    return model, read_json(folder / "tokenizer.json"), state
