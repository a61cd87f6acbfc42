"""Checkpoints: complete or invisible, checked on reading, and nothing in them is ever executed.

ckpt/step_000500/ holds model.safetensors, optimizer.safetensors, model.json (the architecture),
tokenizer.json and state.json (where training stood, and the SHA-256 of the others and of itself).
ckpt/best.json and ckpt/latest.json name one of the folders. What is unfinished begins with `.tmp-`.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kit.settings import UserError
from model import GPT, GPTConfig

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors", "model.json", "tokenizer.json")
WEIGHTS = ("model.safetensors", "model.json", "tokenizer.json")  # all that sampling needs


# ------------------------------------------------------------------------- files that stay whole


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk (a folder only where the system can)."""
    if path.is_dir() and os.name == "nt":
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
        raise UserError(f"{path}: damaged, not JSON") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UserError(f"{path}: not a file of this version of bonsaiGPT (format {FORMAT})")
    return value


def digest(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def seal(state: dict[str, Any]) -> str:
    """The hash of a state without its own seal."""
    rest = {k: v for k, v in state.items() if k not in ("seal", "format")}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# --------------------------------------------------------------------------------------- writing


def save(run: Path, model: GPT, optimizer_tensors: dict[str, torch.Tensor], tokenizer: dict,
         state: dict[str, Any], keep: int, is_best: bool) -> Path:
    """Write ckpt/step_N of a run, N = state["step"]; all but the newest `keep` and the best go."""
    folder = run / "ckpt"
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step_{state['step']:06d}"
    aside = folder / f".tmp-{final.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    tensors = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
    tensors = {name: t.detach().cpu().contiguous() for name, t in optimizer_tensors.items()}
    save_file(tensors, aside / "optimizer.safetensors")
    write_json(aside / "model.json", dataclasses.asdict(model.config))
    write_json(aside / "tokenizer.json", tokenizer)
    state = {**state, "files": {name: digest(aside / name) for name in FILES}}
    write_json(aside / "state.json", {**state, "seal": seal(state)})
    for name in FILES:
        sync(aside / name)
    sync(aside)
    before = hide(final)  # a damaged one, or the run goes over the same step again
    os.replace(aside, final)
    sync(folder)
    shutil.rmtree(before, ignore_errors=True)
    best = f"step_{state['step'] if is_best else state.get('best_step', 0):06d}"
    if (folder / best).exists():  # always, in case that the last process ended before this line
        write_json(folder / "best.json", {"name": best})
    write_json(folder / "latest.json", {"name": final.name})
    so_far = [p for p in newest_first(run) if step_of(p) <= state["step"]]  # later ones are damaged
    spare = {p.name for p in so_far[:keep]} | {pointed(run, "best")}
    for old in newest_first(run):
        if old.name not in spare:
            remove(old)
    return final


def hide(folder: Path) -> Path:
    """Rename a folder, if there is one, so that no half of it is ever taken for a checkpoint."""
    hidden = folder.with_name(f".tmp-old-{folder.name}")
    if folder.exists():
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
    return hidden


def remove(folder: Path) -> None:
    """Delete a checkpoint."""
    shutil.rmtree(hide(folder))


def tidy(run: Path) -> None:
    """Clear away what a killed process left; what it was about to replace comes back."""
    for stale in (run / "ckpt").glob(".tmp-*"):
        back = stale.with_name(stale.name.removeprefix(".tmp-old-"))
        try:
            if back != stale and not back.exists() and check(stale):
                stale.rename(back)
        except UserError:  # it was being deleted
            pass
        if stale.is_dir():
            shutil.rmtree(stale)
        else:
            stale.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------- reading


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
    return name if isinstance(name, str) and (run / "ckpt" / name) in newest_first(run) else None


def check(folder: Path, names: tuple[str, ...] = FILES) -> dict[str, Any]:
    """Verify a checkpoint against its state.json; returns the state. UserError if damaged."""
    try:
        state = read_json(folder / "state.json")
        text = (folder / "state.json").read_text(encoding="utf-8")
        if seal(state) != state.get("seal") or to_text(state) != text:
            raise UserError(f"{folder / 'state.json'}: damaged, its hash does not fit")
        for name in names:
            if digest(folder / name) != state["files"][name]:
                size = (folder / name).stat().st_size
                raise UserError(f"{folder / name}: damaged ({size:,} bytes), its hash does not fit")
    except (FileNotFoundError, NotADirectoryError, KeyError) as e:
        missing = getattr(e, "filename", None) or f"{folder}, entry {e}"
        raise UserError(f"{missing}: missing, this is not a complete checkpoint") from None
    return state


def newest_complete(run: Path, warn) -> tuple[Path, dict[str, Any]] | None:
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
        raise UserError(f"{path}: damaged ({path.stat().st_size:,} bytes): {e}") from None


def load_config(folder: Path) -> GPTConfig:
    """The architecture of a checkpoint; fields that an older one lacks take their defaults."""
    values = {k: v for k, v in read_json(folder / "model.json").items() if k != "format"}
    known = {f.name for f in dataclasses.fields(GPTConfig)}
    try:
        if unknown := values.keys() - known:
            raise ValueError(f"unknown fields {', '.join(sorted(unknown))}")
        return GPTConfig(**values)
    except (ValueError, TypeError) as e:
        raise UserError(f"{folder / 'model.json'}: {e}") from None


def load_weights(model: GPT, path: Path) -> None:
    """Copy a model.safetensors into a model of exactly its shape."""
    tensors, parameters = load_tensors(path), dict(model.named_parameters())
    if difference := tensors.keys() ^ parameters.keys():
        raise UserError(f"{path}: does not fit the model, see {', '.join(sorted(difference)[:3])}")
    for name, p in parameters.items():
        if tensors[name].shape != p.shape:
            raise UserError(f"{path}: {name} is {tuple(tensors[name].shape)}, "
                            f"the model's is {tuple(p.shape)}")
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(tensors[name])


def load_model(folder: Path) -> tuple[GPT, dict[str, Any], dict[str, Any]]:
    """A checkpoint folder -> the model on the CPU, its tokenizer as JSON, its state."""
    state = check(folder, WEIGHTS)
    model = GPT(load_config(folder))
    load_weights(model, folder / "model.safetensors")
    tokenizer = read_json(folder / "tokenizer.json")
    return model, tokenizer, state
