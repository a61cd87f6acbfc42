"""Run folders: where a run lives, who owns it, whether it starts, goes on or is refused."""

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import BaseFileLock, FileLock, Timeout

from kit.checkpoint import refuse_lie
from kit.device import DTYPES, Dtypes, choose_dtype, muon_dtype, name_of, wanted_kernels
from kit.errors import UserError
from kit.files import hide, read_json, remove
from kit.job import Job, say
from kit.run import store
from kit.run.locate import WORDS, out_root, same_place, same_tokenizer, settings_in
from kit.settings import Loaded, Say

ABOUT_THE_START = {  # settings
    "init_from", "init_std", "extend_positions", "overwrite", "out_dir", "debug"}
OURS = ("config.json", "log.jsonl", "loss.png", ".lock", "ckpt")  # what a run folder holds


class Run(NamedTuple):
    """A run folder that this process owns: the system frees the lock however the process ends."""

    path: Path
    lock: BaseFileLock | None  # rank 0 holds it
    resume: tuple[Path | None, dict[str, Any]] | None  # checkpoint to go on from, and its state
    replaces: bool  # overwrite: the run that is there goes once all else is known to work
    over: bool = False  # it had ended, and is to go on all the same


def begin(loaded: Loaded, fixed: set[str], data: Any, job: Job
          ) -> tuple[Run, Dtypes, list[str]]:
    """Claim the folder of a run and look at what goes on -> it, its dtypes and its kernels.

    Rank 0 does so, for it alone reads and writes the folder, and tells the others.
    """
    s, device, mine = loaded.settings, job.device, []

    def work() -> dict[str, Any]:
        name = loaded.files[-1].stem if loaded.files else "run"
        run = claim(s.out_dir, name, s.init_from, s.overwrite, say, job.launch)
        mine.append(run)
        saved = None
        if run.resume:
            check_resume(run, s, fixed, data, say)
            refuse_lie(s.model_config(data.vocab_size), run.resume[0] / "model.safetensors")
            saved = config_of(run)
        kernels = wanted_kernels(s.kernels, device)
        if saved and saved["device"] == device.type and saved["settings"].get(
                "kernels", "auto") == s.kernels:
            kernels = [n for n in kernels if n in saved.get("kernels", kernels)]
        muon = name_of(muon_dtype(device, saved)) if s.optimizer == "muon" else None
        return {"path": str(run.path), "dtype": name_of(choose_dtype(s.dtype, device, saved)),
                "muon_dtype": muon, "kernels": kernels, "state": run.resume and run.resume[1],
                "over": run.over}

    told = job.on_main(work)
    resume = (None, told["state"]) if told["state"] else None
    run = mine[0] if mine else Run(Path(told["path"]), None, resume, False, told["over"])
    return run, Dtypes(DTYPES[told["dtype"]], DTYPES.get(told["muon_dtype"])), told["kernels"]


def has_run(path: Path) -> bool:
    return (path / "config.json").exists() or bool(store.newest_first(path))


def claim(out_dir: str | None, name: str, init_from: str, overwrite: bool, warn: Say,
          launch: Sequence[str] = ()) -> Run:
    """Find the folder of this run, lock it and say whether it goes on.

    out_dir None: out/<name>, then out/<name>-2 and so on once those are finished.
    launch: words of which a start by the same torchrun has one; it goes on with what that began.
    """
    path = free = base = Path(out_dir) if out_dir else out_root() / name
    number = 1
    while not out_dir and has_run(free):
        number += 1
        path, free = free, base.with_name(f"{base.name}-{number}")
    if "TORCHELASTIC_RUN_ID" in os.environ and began_by(path, launch):
        init_from, overwrite = "resume", False
    if not overwrite and init_from not in WORDS and has_run(path) and not is_over(path) \
            and same_place((settings_in(path) or {}).get("init_from"), init_from):
        init_from = "auto"  # the same command again
    if overwrite:
        inside = Path(init_from).resolve().is_relative_to(path.resolve())
        if init_from == "resume" or (init_from not in WORDS and inside):
            raise UserError(f"overwrite=True removes the run that init_from={init_from} needs")
        return Run(path, own(path), None, True)
    there = f"{path} holds a run: --overwrite=True replaces it, --init_from=resume goes on with " \
            "it, another --out_dir leaves it alone"
    if init_from not in ("auto", "resume") and has_run(path):
        if out_dir:
            raise UserError(there)
        path = free
    if init_from == "resume" and not has_run(path):
        raise UserError(f"init_from=resume: {path} holds no run; --init_from=auto starts one")
    over = is_over(path)
    if over and init_from == "auto":
        if out_dir:
            raise UserError(there)
        return Run(free, own(free), None, False)
    lock = own(path)
    found = store.examine(path, warn)
    if found:
        store.settle(path, found[0][1], keep_of(found[0][1]))
    if not found and (store.newest_first(path) or any((path / "ckpt").glob("damaged_*"))):
        raise UserError(f"{path}: no complete checkpoint is left; --overwrite=True starts again")
    refuse_foreign(path, found, warn)
    return Run(path, lock, found[0] if found else None, False, over)


def keep_of(state: dict[str, Any]) -> int:
    """How many checkpoints a run keeps, as its newest one says."""
    with contextlib.suppress(LookupError, TypeError, ValueError):
        return max(1, int(state["run"]["settings"]["keep"]))
    return 2


def is_over(path: Path) -> bool:
    """Whether a run is finished and has said so; one that was killed between is not."""
    for newest in store.newest_first(path)[:1]:
        with contextlib.suppress(UserError, OSError):
            if not read_json(newest / "state.json").get("finished"):
                return False
            return bool(read_json(path / "config.json").get("over", True))
        return False
    return False


def began_by(path: Path, launch: Sequence[str]) -> bool:
    """Whether it was this torchrun that began the run."""
    with contextlib.suppress(UserError, OSError, TypeError):
        return bool(set(read_json(path / "config.json")["launch"]) & set(launch))
    return False


def own(path: Path) -> BaseFileLock:
    """Make a folder if need be, lock it and tidy it; UserError if it is not ours to take."""
    if path.exists() and not path.is_dir():
        raise UserError(f"out_dir {path} is a file; a folder is needed")
    if (path / "model.json").exists():
        raise UserError(f"{path} holds weights alone, as an import makes them, and no run; give "
                        "another --out_dir")
    if os.path.lexists(path / "ckpt") and not (path / "ckpt").is_dir():
        raise UserError(f"{path / 'ckpt'} is a file; the folder of checkpoints belongs there")
    for part in (*(path / name for name in OURS), *(path / "ckpt").glob("*")):
        if part.is_symlink():  # we would write to, or take, what lies elsewhere
            raise UserError(f"{part} is a link; a run folder holds plain files and folders")
    refuse_foreign(path, store.newest_first(path))
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{path} is in use by another process; give another --out_dir") from None
    store.tidy(path)
    return lock


def refuse_foreign(path: Path, found: list, warn: Say = lambda text: None) -> None:
    """UserError for the config.json of another program; that of a run is in its checkpoints too."""
    try:
        if (path / "config.json").exists():
            read_json(path / "config.json")
    except UserError as e:
        if not found:
            raise
        warn(f"{e}; written anew from the checkpoint")


def clear(path: Path) -> None:
    """Remove a run's files and nothing else from its folder."""
    for folder in (*store.newest_first(path), *(path / "ckpt").glob("damaged_*")):
        remove(hide(folder))
    for name in ("config.json", "log.jsonl", "loss.png", "ckpt/best.json", "ckpt/latest.json"):
        (path / name).unlink(missing_ok=True)


def config_of(run: Run) -> dict[str, Any]:
    """What config.json says of the run that goes on; the checkpoint has a copy."""
    state = run.resume[1]
    saved = state["run"] if "run" in state else read_json(run.path / "config.json")
    settings = saved.get("settings") if isinstance(saved, dict) else None
    sound = isinstance(settings, dict) and "dataset" in settings
    sound = sound and str(saved.get("dtype")) in DTYPES
    sound = sound and saved.get("muon_dtype") in (None, "float32", "bfloat16")
    if not sound or not all(isinstance(saved.get(n), str) for n in ("device", "dataset_hash")):
        raise UserError(f"{run.path}: what its checkpoint says of the run's settings is not ours")
    return saved


def check_resume(run: Run, settings: Any, fixed: set[str], data: Any, say: Say) -> None:
    """Before going on: refuse a change of `fixed` settings or of the tokenizer, say all others."""
    folder, state = run.resume
    saved = config_of(run)
    before, now = saved["settings"], asdict(settings)
    defaults = {f.name: f.default for f in fields(settings)}
    for name in sorted((before.keys() | now.keys()) - ABOUT_THE_START):
        old, new = before.get(name, defaults.get(name)), now.get(name, "no longer a setting")
        if old != new and name in fixed:
            raise UserError(f"{run.path} cannot change from {name}={old} to {name}={new}; "
                            "take another --out_dir, or --overwrite=True")
        if old != new:
            say(f"changed since the run began: {name} from {old} to {new}")
    same_tokenizer(folder, data.tokenizer)
    if saved["dataset_hash"] != data.hash and before["dataset"] == now["dataset"]:
        say(f"changed since the run began: the contents of dataset {now['dataset']}")
    if state.get("threads") != (threads := torch.get_num_threads()):
        say(f"note: {state.get('threads')} threads before, {threads} now: the last bits will "
            "differ")


def settings_of(s: Any) -> dict[str, Any] | None:
    """The settings of the run that out_dir names, if it is to go on; for want of a config file."""
    if not s.out_dir or s.overwrite or s.init_from not in ("auto", "resume"):
        return None
    saved, drop = settings_in(Path(s.out_dir)), ABOUT_THE_START
    begun = store.newest_first(Path(s.out_dir))
    if saved and not begun and saved.get("init_from") not in WORDS:
        drop = drop - {"init_from", "extend_positions"}  # it starts again, from the same weights
    return saved and {n: v for n, v in saved.items() if n not in drop}


def command_to_go_on(loaded: Loaded, path: Path, job: Job) -> str:
    """The command that goes on with a run: the same again, or its folder alone."""
    s = loaded.settings
    words = [*map(str, loaded.files), *loaded.flags]
    if s.init_from != "auto" or s.overwrite:  # they would not mean this run
        words = [f"--out_dir={path}"]
    return shlex.join([*job.command, sys.argv[0], *words])
