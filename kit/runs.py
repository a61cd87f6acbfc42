"""Run folders: where a run lives, who owns it, whether it starts, goes on or is refused."""

import os
import shlex
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import BaseFileLock, FileLock, Timeout

from kit import checkpoint
from kit.settings import CLONE, Loaded, Say, UserError
from model import GPTConfig

WORDS = ("auto", "scratch", "resume")  # any other init_from is a folder with weights


class Run(NamedTuple):
    """A run folder that this process owns: the system frees the lock however the process ends."""

    path: Path
    lock: BaseFileLock
    resume: tuple[Path, dict[str, Any]] | None  # the checkpoint to go on from, and its state
    replaces: bool  # overwrite: the run that is there goes once all else is known to work


def out_root() -> Path:
    """The folder of all runs: out/ in the clone, or $BONSAI_OUT."""
    return Path(os.environ.get("BONSAI_OUT", CLONE / "out"))


def has_run(path: Path) -> bool:
    return (path / "config.json").exists() or bool(checkpoint.newest_first(path))


def claim(out_dir: str | None, name: str, init_from: str, overwrite: bool, warn: Say) -> Run:
    """Find the folder of this run, lock it and say whether it goes on.

    out_dir None: out/<name>, then out/<name>-2 and so on once those are finished.
    """
    path = free = base = Path(out_dir) if out_dir else out_root() / name
    number = 1
    while not out_dir and has_run(free):
        number += 1
        path, free = free, base.with_name(f"{base.name}-{number}")
    if overwrite:
        inside = Path(init_from).resolve().is_relative_to(path.resolve())
        if init_from == "resume" or (init_from not in WORDS and inside):
            raise UserError(f"overwrite=True removes the run that init_from={init_from} needs")
    elif has_run(path):
        found = checkpoint.newest_complete(path, lambda text: None)  # damage is told of below
        finished = bool(found and found[1].get("finished"))
        if init_from not in ("auto", "resume") or (init_from == "auto" and finished):
            if out_dir:
                raise UserError(f"{path} holds a run: --overwrite=True replaces it, --init_from="
                                "resume goes on with it, another --out_dir leaves it alone")
            path = free
    elif init_from == "resume":
        raise UserError(f"init_from=resume: {path} holds no run; --init_from=auto starts one")
    lock = own(path)
    checkpoint.tidy(path)
    resume = None if overwrite else checkpoint.newest_complete(path, warn)
    if not overwrite and resume is None and checkpoint.newest_first(path):
        raise UserError(f"{path}: no complete checkpoint is left; --overwrite=True starts again")
    return Run(path, lock, resume, overwrite)


def own(path: Path) -> BaseFileLock:
    """Make a folder if need be and lock it; UserError if it is not ours to take."""
    if path.is_file():
        raise UserError(f"out_dir {path} is a file; a folder is needed")
    if (path / "config.json").exists():
        checkpoint.read_json(path / "config.json")  # refuses that of another program
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{path} is in use by another process; give another --out_dir") from None
    return lock


def clear(path: Path) -> None:
    """Remove a run's files and nothing else from its folder."""
    for folder in checkpoint.newest_first(path):
        shutil.rmtree(checkpoint.hide(folder))
    for name in ("config.json", "log.jsonl", "loss.png", "ckpt/best.json", "ckpt/latest.json"):
        (path / name).unlink(missing_ok=True)


def check_resume(run: Run, settings: dict[str, Any], fixed: set[str], data: Any, say: Say) -> None:
    """Before going on: refuse a change of `fixed` settings or of the tokenizer, say all others."""
    folder, state = run.resume
    saved = checkpoint.read_json(run.path / "config.json")
    before = saved["settings"]
    about_the_start = {"init_from", "overwrite", "out_dir", "debug"}
    for name in sorted((before.keys() & settings.keys()) - about_the_start):
        old, new = before[name], settings[name]
        if old != new and name in fixed:
            raise UserError(f"{run.path} cannot change from {name}={old} to {name}={new}; "
                            "take another --out_dir, or --overwrite=True")
        if old != new:
            say(f"changed since the run began: {name} from {old} to {new}")
    same_tokenizer(folder, data.tokenizer)
    if saved["dataset_hash"] != data.hash and before["dataset"] == settings["dataset"]:
        say(f"changed since the run began: the contents of dataset {settings['dataset']}")
    if state["threads"] != (now := torch.get_num_threads()):
        say(f"note: {state['threads']} threads before, {now} now: the last bits will differ")


def same_tokenizer(folder: Path, tokenizer: Any) -> None:
    """UserError unless the checkpoint was trained with this tokenizer."""
    theirs = checkpoint.read_json(folder / "tokenizer.json")
    if theirs.get("hash") != tokenizer.hash:
        raise UserError(f"{folder} was trained with tokenizer {theirs.get('spec')}, the data set "
                        f"has another, {tokenizer.spec}; prepare it with that one: python -m "
                        f"data.prepare SOURCE --name=NAME --tokenizer={folder / 'tokenizer.json'}")


def same_dtype(run: Run, wanted: str, device_type: str) -> str:
    """dtype=auto stays what it was, though a trial might choose otherwise today."""
    saved = checkpoint.read_json(run.path / "config.json")
    return saved["dtype"] if wanted == "auto" and saved["device"] == device_type else wanted


def command_to_go_on(loaded: Loaded, path: Path) -> str:
    """The command that started a run, such that it now goes on with it."""
    s = loaded.settings
    flags = loaded.flags
    if s.init_from != "auto" or s.overwrite:  # else the same command goes on
        others = ("--out_dir=", "--init_from=", "--overwrite=")
        flags = [f"--out_dir={path}", "--init_from=resume", "--overwrite=False",
                 *(f for f in flags if not f.startswith(others))]
    return shlex.join(["python", sys.argv[0], *map(str, loaded.files), *flags])


class Interrupt:
    """Inside `with`, Ctrl-C and SIGTERM only set `signal`; a second one leaves at once."""

    signal: int | None = None

    def __enter__(self) -> "Interrupt":
        on_main = threading.current_thread() is threading.main_thread()  # else Python forbids it
        numbers = (signal.SIGINT, signal.SIGTERM) if on_main else ()
        self.before = {n: signal.signal(n, self.handle) for n in numbers}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame: Any) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number


def find_source(init_from: str) -> Path | None:
    """The checkpoint whose weights a new run starts from; None for auto, scratch and resume."""
    if init_from in WORDS:
        return None
    if not Path(init_from).is_dir():
        raise UserError(f"init_from={init_from}: expected auto, scratch, resume, or a folder of "
                        "weights: a run or a checkpoint")
    folder = find_checkpoint(Path(init_from))
    checkpoint.check(folder, checkpoint.WEIGHTS)
    return folder


def adopt_architecture(settings: Any, config: GPTConfig, given: set[str], source: Path) -> None:
    """A run from weights has their architecture; UserError where a `given` setting is another."""
    for name in sorted(vars(config).keys() - {"vocab_size", "dropout"}):
        ours, theirs = getattr(settings, name), getattr(config, name)
        if name in given and ours != theirs:
            raise UserError(f"{name}={ours}, but the weights of {source} have {name}={theirs}; "
                            f"drop {name} to take theirs")
        setattr(settings, name, theirs)


def remember(path: Path) -> None:
    """Make this the newest run, the one that sample.py takes."""
    out_root().mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(out_root() / "latest.json", {"path": str(path.resolve())})


def find_run(out_dir: str | None) -> Path:
    """The run folder given, or the newest."""
    pointer = out_root() / "latest.json"
    if not out_dir and not pointer.exists():
        raise UserError("no run yet: `python train.py config/small.py` makes one, "
                        "or name its folder with --out_dir=")
    path = Path(out_dir or str(checkpoint.read_json(pointer).get("path")))
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; name that of a run with --out_dir=")
    return path


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """Of a run: the step asked for, else the best, else the newest. A checkpoint is itself."""
    found, best = checkpoint.newest_first(path), path / "ckpt" / "best.json"
    if step is not None:
        found = [p for p in found if checkpoint.step_of(p) == step]
    elif (path / "model.safetensors").exists():
        return path
    elif best.exists():
        name = checkpoint.pointed(path, "best")
        if not name:
            raise UserError(f"{best}: damaged, or its checkpoint is gone; take one with --step=")
        return path / "ckpt" / name
    if not found:
        steps = [str(checkpoint.step_of(p)) for p in checkpoint.newest_first(path)[::-1]]
        asked = "" if step is None else f" for --step={step}"
        raise UserError(f"{path}: no checkpoint{asked}; steps there: {', '.join(steps) or 'none'}")
    return found[0]
