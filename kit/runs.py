"""Run folders: where a run lives, who owns it, whether it starts, goes on or is refused."""

import dataclasses
import os
import re
import shlex
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kit import checkpoint
from kit.settings import CLONE, Loaded, UserError
from model import GPTConfig

WAYS_OUT = "--overwrite=True starts again, another --out_dir leaves the run alone"
OURS = ("config.json", "log.jsonl", "loss.png")  # what --overwrite removes, beside ckpt/


def out_root() -> Path:
    """The folder of all runs: out/ in the clone, or $BONSAI_OUT."""
    return Path(os.environ.get("BONSAI_OUT", CLONE / "out"))


@dataclass
class Run:
    """A run folder that this process owns for as long as `lock` is open."""

    path: Path
    lock: Any
    resume: tuple[Path, dict[str, Any]] | None  # the checkpoint to go on from, and its state


def claim(out_dir: str | None, name: str, init_from: str, overwrite: bool, warn) -> Run:
    """Find the folder of this run, lock it and say whether it goes on.

    out_dir None: out/<name>, then out/<name>-2 and so on once those are finished.
    """
    new = init_from not in ("auto", "resume")  # scratch, or from the weights of a checkpoint
    base = Path(out_dir) if out_dir else out_root() / name
    number = 1 if out_dir else max(variants(base), default=1)
    path = base if number == 1 else base.with_name(f"{base.name}-{number}")
    held = has_run(path)
    if held and not overwrite:
        found = checkpoint.newest_complete(path, warn)
        finished = bool(found and found[1].get("finished"))
        if not out_dir and (new or (finished and init_from == "auto")):
            path, held = base.with_name(f"{base.name}-{number + 1}"), False
        elif new or (finished and init_from == "auto"):
            state = f"a {'finished' if finished else 'started'} run"
            raise UserError(f"{path} holds {state}: --overwrite=True replaces it, "
                            "--init_from=resume goes on with it, another --out_dir leaves it alone")
    if init_from == "resume" and not held:
        raise UserError(f"init_from=resume: {path} holds no run; --init_from=auto starts one")
    if path.exists() and not path.is_dir():
        raise UserError(f"out_dir {path} is a file; a folder is needed")
    path.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(path)
    if held and overwrite:
        clear(path)
        held = False
    for stale in (path / "ckpt").glob(".tmp-*"):  # of a process that was killed
        checkpoint.remove(stale) if stale.is_dir() else stale.unlink()
    resume = checkpoint.newest_complete(path, warn) if held else None
    if held and resume is None and checkpoint.newest_first(path):
        raise UserError(f"{path}: no complete checkpoint is left; --overwrite=True starts again")
    return Run(path, lock, resume)


def has_run(path: Path) -> bool:
    return (path / "config.json").exists() or bool(checkpoint.newest_first(path))


def variants(path: Path) -> dict[int, Path]:
    """The existing runs among path, path-2, path-3, ... by number."""
    pattern = re.compile(re.escape(path.name) + r"-(\d+)")
    found = {1: path} if has_run(path) else {}
    for p in path.parent.glob(f"{path.name}-*"):
        if (match := pattern.fullmatch(p.name)) and has_run(p):
            found[int(match[1])] = p
    return found


def clear(path: Path) -> None:
    """Remove a run's files and nothing else from its folder."""
    for folder in checkpoint.newest_first(path):
        checkpoint.remove(folder)
    for file in [path / name for name in OURS] + [*(path / "ckpt").glob("*.json")]:
        file.unlink(missing_ok=True)


def lock_folder(path: Path) -> Any:
    """An exclusive lock that the system frees however the process ends; UserError if taken."""
    f = (path / ".lock").open("a+")
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(f.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        f.close()
        raise UserError(f"{path} is in use by another process; wait for it or give another "
                        "--out_dir") from None
    return f


def list_changes(path: Path, before: dict, now: dict, fixed: set[str], say) -> None:
    """Say which settings a run goes on with differently; UserError for one that is `fixed`."""
    for name in sorted(now.keys() & before.keys() - {"init_from", "overwrite", "out_dir", "debug"}):
        old, new = before[name], now[name]
        if old != new and name in fixed:
            raise UserError(f"{path} was trained with {name}={old}, now {name}={new}; a run cannot "
                            f"change this: {WAYS_OUT}")
        if old != new:
            say(f"changed since the run began: {name} from {old} to {new}")


def find_source(init_from: str) -> Path | None:
    """The checkpoint whose weights a new run starts from; None for auto, scratch and resume."""
    if init_from in ("auto", "scratch", "resume"):
        return None
    if not Path(init_from).is_dir():
        raise UserError(f"init_from={init_from}: expected auto, scratch, resume, or the folder of "
                        "a run or of a checkpoint")
    return find_checkpoint(Path(init_from))


def adopt_architecture(settings: Any, config: GPTConfig, given: set[str], source: Path) -> None:
    """A run from weights has their architecture; UserError where a `given` setting is another."""
    for field in dataclasses.fields(config):
        name, theirs = field.name, getattr(config, field.name)
        if name in ("vocab_size", "dropout"):
            continue
        if name in given and getattr(settings, name) != theirs:
            raise UserError(f"{name}={getattr(settings, name)}, but the weights of {source} have "
                            f"{name}={theirs}; drop {name} to take theirs")
        setattr(settings, name, theirs)


def check_resume(claimed: Run, settings: dict, fixed: set[str], data: Any, say) -> None:
    """Before going on: refuse what cannot change, say what did. `data` is the data set now."""
    folder, state = claimed.resume
    saved = checkpoint.read_json(claimed.path / "config.json")
    list_changes(claimed.path, saved["settings"], settings, fixed, say)
    same_tokenizer(folder, data.tokenizer)
    if saved["dataset_hash"] != data.hash and saved["settings"]["dataset"] == settings["dataset"]:
        say(f"changed since the run began: the contents of dataset {settings['dataset']}")
    if state["threads"] != torch.get_num_threads():
        say(f"note: {state['threads']} threads before, {torch.get_num_threads()} now; "
            "the numbers will differ in their last bits")


def same_dtype(claimed: Run, wanted: str, device_type: str) -> str:
    """dtype=auto stays what it was, though a trial might choose otherwise today."""
    saved = checkpoint.read_json(claimed.path / "config.json")
    return saved["dtype"] if wanted == "auto" and saved["device"] == device_type else wanted


def same_tokenizer(folder: Path, tokenizer: Any) -> None:
    """UserError unless the checkpoint was trained with this tokenizer."""
    theirs = checkpoint.read_json(folder / "tokenizer.json")
    if theirs.get("hash") != tokenizer.hash:
        raise UserError(f"{folder} was trained with tokenizer {theirs.get('spec')}, the data set "
                        f"has another, {tokenizer.spec}; prepare the text with "
                        f"--tokenizer={folder / 'tokenizer.json'}, or start another run")


def command_to_go_on(loaded: Loaded, path: Path) -> str:
    """The command that started a run, such that it now goes on with it."""
    s = loaded.settings
    named = ("--out_dir=", "--init_from=", "--overwrite=")
    flags = [f for f in loaded.flags if not f.startswith(named)]
    if s.init_from != "auto" or s.overwrite or s.out_dir:
        flags += [f"--out_dir={path}", "--init_from=resume"]
    return "python train.py " + shlex.join([*map(str, loaded.files), *flags])


class Interrupt:
    """Ctrl-C and SIGTERM ask the loop to stop after its update; a second one leaves at once."""

    def __init__(self):
        self.signal: int | None = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.handle)

    def handle(self, number: int, frame: Any) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number


# ---------------------------------------------------------------------------------- finding a run


def remember(path: Path) -> None:
    """Make this the newest run, the one that sample.py takes."""
    out_root().mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(out_root() / "latest.json", {"path": str(path.resolve())})


def find_run(out_dir: str | None) -> Path:
    """The run folder given, or the newest."""
    if out_dir:
        if not Path(out_dir).is_dir():
            raise UserError(f"out_dir {out_dir}: no such folder")
        return Path(out_dir)
    pointer = out_root() / "latest.json"
    if not pointer.exists():
        raise UserError("no run yet: `python train.py config/small.py` makes one, "
                        "or name its folder with --out_dir=")
    path = Path(str(checkpoint.read_json(pointer).get("path")))
    if not path.is_dir():
        raise UserError(f"the newest run, {path}, is gone; name another with --out_dir=")
    return path


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """Of a run: the step asked for, else the best, else the newest. A checkpoint is itself."""
    if (path / "model.safetensors").exists():
        return path
    there = checkpoint.newest_first(path)
    if not there:
        raise UserError(f"{path}: holds no checkpoint yet")
    if step is None:
        best = checkpoint.pointed(path, "best")
        return path / "ckpt" / best if best else there[0]
    for folder in there:
        if int(folder.name[5:]) == step:
            return folder
    steps = ", ".join(str(int(p.name[5:])) for p in reversed(there))
    raise UserError(f"--step={step}: {path} holds the steps {steps}")
