"""Run folders: where a run lives, who owns it, whether it starts, goes on or is refused."""

import itertools
import os
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

OURS = ("config.json", "log.jsonl", "loss.png", "ckpt/best.json", "ckpt/latest.json")


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
    number = 1 if out_dir else max(1, count_runs(base))
    path = sibling(base, number)
    held = has_run(path)
    inside = new and Path(init_from).resolve().is_relative_to(path.resolve())
    if overwrite and (inside or init_from == "resume"):
        raise UserError(f"overwrite=True removes {path}, init_from={init_from} needs it: drop one")
    if held and not overwrite:
        found = checkpoint.newest_complete(path, lambda text: None)  # damage is told of below
        finished = bool(found and found[1].get("finished"))
        if new or (finished and init_from == "auto"):
            if out_dir:
                raise UserError(f"{path} holds a {'finished' if finished else 'started'} run: "
                                "--overwrite=True replaces it, --init_from=resume goes on with it, "
                                "another --out_dir leaves it alone")
            path, held = sibling(base, number + 1), False
    if init_from == "resume" and not held:
        raise UserError(f"init_from=resume: {path} holds no run; --init_from=auto starts one")
    if path.exists() and not path.is_dir():
        raise UserError(f"out_dir {path} is a file; a folder is needed")
    if (path / "config.json").exists():
        checkpoint.read_json(path / "config.json")  # refuses one that is not ours to replace
    path.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(path)
    checkpoint.tidy(path)
    if held and overwrite:
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


def count_runs(base: Path) -> int:
    """How many siblings hold a run, up to the first that does not: exp-2024 is none of exp."""
    return next(n for n in itertools.count() if not has_run(sibling(base, n + 1)))


def clear(path: Path) -> None:
    """Remove a run's files and nothing else from its folder."""
    for folder in checkpoint.newest_first(path):
        checkpoint.remove(folder)
    for name in OURS:
        (path / name).unlink(missing_ok=True)


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
        raise UserError(f"{path} is in use by another process; give another --out_dir") from None
    return f


def list_changes(path: Path, before: dict, now: dict, fixed: set[str], say) -> None:
    """Say which settings a run goes on with differently; UserError for one that is `fixed`."""
    for name in sorted(now.keys() & before.keys() - {"init_from", "overwrite", "out_dir", "debug"}):
        old, new = before[name], now[name]
        if old != new and name in fixed:
            raise UserError(f"{path} was trained with {name}={old}, now {name}={new}; a run cannot "
                            "change this; give another --out_dir, or --overwrite=True")
        if old != new:
            say(f"changed since the run began: {name} from {old} to {new}")


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
                        f"has {tokenizer.spec}; give it --tokenizer={folder / 'tokenizer.json'}")


def command_to_go_on(loaded: Loaded, path: Path) -> str:
    """The command that started a run, such that it now goes on with it."""
    s = loaded.settings
    named = ("--out_dir=", "--init_from=", "--overwrite=")
    flags = [f for f in loaded.flags if not f.startswith(named)]
    if s.init_from != "auto" or s.overwrite or s.out_dir:
        flags += [f"--out_dir={path}", "--init_from=resume", *["--overwrite=False"] * s.overwrite]
    return "python train.py " + shlex.join([*map(str, loaded.files), *flags])


class Interrupt:
    """Ctrl-C and SIGTERM ask a loop to stop after its update; a second one leaves at once.

    In force inside `with`, and only in the main thread, where Python lets signals be handled.
    """

    def __init__(self):
        self.signal: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

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
    if (path / "model.safetensors").exists():
        if step is not None:
            raise UserError(f"--step={step}: {path} is a checkpoint already; name its run instead")
        return path
    there = checkpoint.newest_first(path)
    if not there:
        raise UserError(f"{path}: holds no checkpoint yet")
    if step is None:
        best = checkpoint.pointed(path, "best")
        if not best and (path / "ckpt" / "best.json").exists():
            raise UserError(f"{path / 'ckpt' / 'best.json'}: damaged, or its checkpoint is gone; "
                            f"name another, as {there[0]}")
        return path / "ckpt" / best if best else there[0]
    steps = {checkpoint.step_of(p): p for p in reversed(there)}
    if step not in steps:
        raise UserError(f"--step={step}: {path} holds the steps {', '.join(map(str, steps))}")
    return steps[step]
