"""Run folders: where a run lives, who owns it, whether it starts, goes on or is refused."""

import os
import shlex
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import BaseFileLock, FileLock, Timeout

from kit import checkpoint
from kit.settings import CLONE, Loaded, UserError
from model import GPTConfig

OURS = ("config.json", "log.jsonl", "loss.png", "ckpt/best.json", "ckpt/latest.json")


def out_root() -> Path:
    """The folder of all runs: out/ in the clone, or $BONSAI_OUT."""
    return Path(os.environ.get("BONSAI_OUT", CLONE / "out"))


@dataclass
class Run:
    """A run folder that this process owns: the system frees the lock however the process ends."""

    path: Path
    lock: BaseFileLock
    resume: tuple[Path, dict[str, Any]] | None  # the checkpoint to go on from, and its state


def claim(out_dir: str | None, name: str, init_from: str, overwrite: bool, warn) -> Run:
    """Find the folder of this run, lock it and say whether it goes on.

    out_dir None: out/<name>, then out/<name>-2 and so on once those are finished.
    """
    new = init_from not in ("auto", "resume")  # scratch, or from the weights of a checkpoint
    base = Path(out_dir) if out_dir else out_root() / name
    number = 1
    while not out_dir and has_run(sibling(base, number + 1)):
        number += 1
    path = sibling(base, number)
    inside = new and Path(init_from).resolve().is_relative_to(path.resolve())
    if overwrite and (inside or init_from == "resume"):
        raise UserError(f"overwrite=True removes {path}, init_from={init_from} needs it: drop one")
    if has_run(path) and not overwrite:
        found = checkpoint.newest_complete(path, lambda text: None)  # damage is told of below
        finished = bool(found and found[1].get("finished"))
        if new or (finished and init_from == "auto"):
            if out_dir:
                raise UserError(f"{path} holds a {'finished' if finished else 'started'} run: "
                                "--overwrite=True replaces it, --init_from=resume goes on with it, "
                                "another --out_dir leaves it alone")
            path = sibling(base, number + 1)
    if init_from == "resume" and not has_run(path):
        raise UserError(f"init_from=resume: {path} holds no run; --init_from=auto starts one")
    if path.exists() and not path.is_dir():
        raise UserError(f"out_dir {path} is a file; a folder is needed")
    if (path / "config.json").exists():
        checkpoint.read_json(path / "config.json")  # refuses one that is not ours to replace
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{path} is in use by another process; give another --out_dir") from None
    checkpoint.tidy(path)
    if overwrite:
        clear(path)
    resume = checkpoint.newest_complete(path, warn)
    if resume is None and checkpoint.newest_first(path):
        raise UserError(f"{path}: no complete checkpoint is left; --overwrite=True starts again")
    return Run(path, lock, resume)


def has_run(path: Path) -> bool:
    return (path / "config.json").exists() or bool(checkpoint.newest_first(path))


def sibling(base: Path, number: int) -> Path:
    """out/small, out/small-2, out/small-3, ..."""
    return base if number == 1 else base.with_name(f"{base.name}-{number}")


def clear(path: Path) -> None:
    """Remove a run's files and nothing else from its folder."""
    for folder in checkpoint.newest_first(path):
        checkpoint.remove(folder)
    for name in OURS:
        (path / name).unlink(missing_ok=True)


def check_resume(run: Run, settings: dict[str, Any], fixed: set[str], data: Any, say) -> None:
    """Before going on: refuse a change of `fixed` settings or of the tokenizer, say all others."""
    folder, state = run.resume
    saved = checkpoint.read_json(run.path / "config.json")
    before = saved["settings"]
    for name in sorted(before.keys() & settings.keys() - {"init_from", "overwrite", "out_dir",
                                                          "debug"}):
        old, new = before[name], settings[name]
        if old != new and name in fixed:
            raise UserError(f"{run.path} was trained with {name}={old}, now {name}={new}; a run "
                            "cannot change this; give another --out_dir, or --overwrite=True")
        if old != new:
            say(f"changed since the run began: {name} from {old} to {new}")
    same_tokenizer(folder, data.tokenizer)
    if saved["dataset_hash"] != data.hash and before["dataset"] == settings["dataset"]:
        say(f"changed since the run began: the contents of dataset {settings['dataset']}")
    if state["threads"] != torch.get_num_threads():
        say(f"note: {state['threads']} threads before, {torch.get_num_threads()} now; "
            "the numbers will differ in their last bits")


def same_dtype(run: Run, wanted: str, device_type: str) -> str:
    """dtype=auto stays what it was, though a trial might choose otherwise today."""
    saved = checkpoint.read_json(run.path / "config.json")
    return saved["dtype"] if wanted == "auto" and saved["device"] == device_type else wanted


def same_tokenizer(folder: Path, tokenizer: Any) -> None:
    """UserError unless the checkpoint was trained with this tokenizer."""
    theirs = checkpoint.read_json(folder / "tokenizer.json")
    if theirs.get("hash") != tokenizer.hash:
        raise UserError(f"{folder} was trained with tokenizer {theirs.get('spec')}, the data set "
                        f"has {tokenizer.spec}; give it --tokenizer={folder / 'tokenizer.json'}")


def find_source(init_from: str) -> Path | None:
    """The checkpoint whose weights a new run starts from; None for auto, scratch and resume."""
    if init_from in ("auto", "scratch", "resume"):
        return None
    if not Path(init_from).is_dir():
        raise UserError(f"init_from={init_from}: expected auto, scratch, resume, or the folder of "
                        "a run or of a checkpoint")
    folder = find_checkpoint(Path(init_from))
    checkpoint.check(folder, checkpoint.WEIGHTS)
    return folder


def adopt_architecture(settings: Any, config: GPTConfig, given: set[str], source: Path) -> None:
    """A run from weights has their architecture; UserError where a `given` setting is another."""
    for name in sorted(vars(config).keys() - {"vocab_size", "dropout"}):
        theirs = getattr(config, name)
        if name in given and getattr(settings, name) != theirs:
            raise UserError(f"{name}={getattr(settings, name)}, but the weights of {source} have "
                            f"{name}={theirs}; drop {name} to take theirs")
        setattr(settings, name, theirs)


def command_to_go_on(loaded: Loaded, path: Path) -> str:
    """The command that started a run, such that it now goes on with it."""
    s = loaded.settings
    named = ("--out_dir=", "--init_from=", "--overwrite=")
    flags = [f for f in loaded.flags if not f.startswith(named)]
    if s.init_from != "auto" or s.overwrite or s.out_dir:
        flags += [f"--out_dir={path}", "--init_from=resume", *["--overwrite=False"] * s.overwrite]
    return "python train.py " + shlex.join([*map(str, loaded.files), *flags])


class Interrupt:
    """Inside `with`, Ctrl-C and SIGTERM only set `signal`; a second one leaves at once."""

    def __init__(self):
        self.signal: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids it
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.handle)

    def __exit__(self, *error: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame: Any) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number


def remember(path: Path) -> None:
    """Make this the newest run, the one that sample.py takes."""
    out_root().mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(out_root() / "latest.json", {"path": str(path.resolve())})


def find_run(out_dir: str | None) -> Path:
    """The run folder given, or the newest."""
    if not out_dir:
        pointer = out_root() / "latest.json"
        if not pointer.exists():
            raise UserError("no run yet: `python train.py config/small.py` makes one, "
                            "or name its folder with --out_dir=")
        out_dir = str(checkpoint.read_json(pointer).get("path"))
    if not Path(out_dir).is_dir():
        raise UserError(f"{out_dir}: no such folder; name that of a run with --out_dir=")
    return Path(out_dir)


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """Of a run: the step asked for, else the best, else the newest. A checkpoint is itself."""
    if step is None and (path / "model.safetensors").exists():
        return path
    steps = {checkpoint.step_of(p): p for p in reversed(checkpoint.newest_first(path))}
    if not steps:
        raise UserError(f"{path}: holds no checkpoints")
    if step is None:
        best = checkpoint.pointed(path, "best")
        if not best and (path / "ckpt" / "best.json").exists():
            raise UserError(f"{path / 'ckpt' / 'best.json'}: damaged, or its checkpoint is gone; "
                            f"name another with --step={max(steps)}")
        return path / "ckpt" / best if best else steps[max(steps)]
    if step not in steps:
        raise UserError(f"--step={step}: {path} holds the steps {', '.join(map(str, steps))}")
    return steps[step]
