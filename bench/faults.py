"""How often is a run lost? A campaign of kills, signals, damaged files and full disks.

    python -m bench.faults [--kills=200] [--damages=100] [--signals=20] [--full=20]

Each try takes a tiny run, does one thing to it and starts the same command again, until it ends by
itself. It has survived if its weights, its optimizer and its losses are those of a run that
nothing disturbed. Each damaged file has to be named; one that was used all the same, or not named,
counts as silent. A lost run stays in a folder that is printed, with all its output.

Torch is imported once, by the process that forks the runs, so that a start takes a second and not
several. What is forked is a process like any other, with train.py in it, and a kill -9 is a real
one. A full disk is a tmpfs, which needs root; without it that part is left out.
"""

import argparse
import itertools
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from tqdm import tqdm

from bench import common
from bench.common import CLONE, Row, log
from kit import device
from kit.errors import UserError, run
from kit.files import digest
from kit.run.store import FILES, check, newest_first, pointed

CONFIG = """
n_layer = 2
n_head = 2
n_embd = 32
block_size = 16
dropout = 0.1
tokenizer = "byte"
batch_size = 4
gradient_accumulation_steps = 2
optimizer = "muon"
learning_rate = 3e-2  # too much, so that patience has something to do
muon_lr = 0.05
decay_lr = False
max_iters = 75
patience = 4
eval_interval = 3
eval_iters = 2
keep = 3
device = "cpu"
dtype = "float32"
"""
WORDS = "the of and to in that it was his her with as had for not but at be on they by all".split()
HANGS = 180.0  # seconds after which a process counts as stuck
ROOMY = 64 << 20  # bytes of a disk that is not full
TIMES = {"tok_s", "mfu", "elapsed_s", "train_s"}  # of log.jsonl; the rest is the same each time
RESULT = ("last checkpoint", *FILES, "losses")  # of an ending; which older ones stay may differ
EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree"}


class Lost(Exception):
    """Why a run has not survived, in a line."""


class Silent(Lost):
    """It went on, and what was damaged was not named."""


# ----------------------------------------------------------------------------------------- the run


class Ended(NamedTuple):
    """A process that is over."""

    code: int  # as of subprocess: -9 after kill -9
    out: str
    err: str
    seconds: float

    def last_line(self) -> str:
        return (self.err.strip() or self.out.strip() or "no output").splitlines()[-1][:300]

    def refusal(self) -> str:
        """The one line of a refusal with exit code 2; Lost if there is no such line."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        if self.code != 2 or len(lines) != 1:
            raise Lost(f"no refusal in a line with exit code 2, but {len(lines)} lines and exit "
                       f"code {self.code}: {self.last_line()}")
        return lines[0]


class Victim:
    """A run with a folder of its own for its data, its output and what it printed."""

    def __init__(self, folder: Path, text: Path):
        self.folder, self.out, self.path = folder, folder / "out", folder / "out" / "run"
        folder.mkdir(parents=True)
        (folder / "tiny.py").write_text(CONFIG, encoding="utf-8")
        self.settings = [str(folder / "tiny.py"), f"--dataset={text}"]
        self.starts = 0

    def notes(self, kind: str) -> Path:
        """Where the last start wrote what it printed, or its file events."""
        return self.folder / f"{kind}{self.starts}.txt"

    def start(self, number: int = 0, moment: float = 0.0, first: Callable[[], None] = lambda: None,
              bare: bool = False) -> Ended:
        """Start the command and wait for its end; after `moment` seconds it gets a signal, if any.

        first: called in the new process before all else. bare: with out_dir as its only setting.
        """
        self.starts += 1
        for stream in (sys.stdout, sys.stderr):  # or the child prints it once more
            stream.flush()
        began = time.perf_counter()
        if not (pid := os.fork()):
            self.become([] if bare else self.settings, first)
        try:
            if number:
                time.sleep(moment)
                os.kill(pid, number)
            while not (status := os.waitpid(pid, os.WNOHANG))[0]:
                if time.perf_counter() - began > HANGS:
                    raise Lost(f"start {self.starts} has not ended within {HANGS:.0f} s")
                time.sleep(0.002)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        out, err = (file.read_text("utf-8", "replace") if file.exists() else ""
                    for file in map(self.notes, ("out", "err")))
        return Ended(os.waitstatus_to_exitcode(status[1]), out, err, time.perf_counter() - began)

    def become(self, argv: list[str], first: Callable[[], None]) -> NoReturn:
        """Be `python train.py argv`: its signals, its output, its exit code."""
        code: Any = 1
        try:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for fd, kind in ((1, "out"), (2, "err")):
                os.dup2(os.open(self.notes(kind), os.O_WRONLY | os.O_CREAT), fd)
            os.environ |= {"BONSAI_OUT": str(self.out), "BONSAI_DATA": str(self.folder / "data"),
                           "WANDB_MODE": "disabled"}
            sys.argv = ["train.py", *argv, f"--out_dir={self.path}"]
            first()
            runpy.run_path(str(CLONE / "train.py"), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        except KeyboardInterrupt:  # before train.py could take it
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def watch(self, at: int = 0, number: int = signal.SIGKILL) -> None:
        """For `first`: note this process's file events, and send it a signal before one of them."""
        notes = os.open(self.notes("events"), os.O_WRONLY | os.O_CREAT)
        count = itertools.count(1)

        def hook(event: str, args: tuple) -> None:
            if event in EVENTS and isinstance(args[0], (str, os.PathLike)):
                path = os.fspath(args[0])
                # rmtree names what it removes from inside the folder
                if not os.path.isabs(path) or Path(path).is_relative_to(self.folder):
                    os.write(notes, f"{event} {path}\n".encode())
                    if next(count) == at:
                        os.kill(os.getpid(), number)

        sys.addaudithook(hook)

    def must_end_like(self, reference: Row, done: Ended | None = None,
                      parts: tuple[str, ...] = ()) -> None:
        """The same command again; Lost unless it ends by itself, and in these parts of the same."""
        done = done or self.start()
        complete = done.code == 2 and "holds a run" in done.err  # it had finished before the signal
        if done.code and not complete:
            raise Lost(f"ended with {done.code}: {done.last_line()}")
        now = ending(self.path)
        if other := [part for part in parts or reference if now[part] != reference[part]]:
            raise Lost(f"ended otherwise than the undisturbed run: {', '.join(other)}")
        if left := sorted(self.path.rglob(".tmp-*")):
            raise Lost(f"left behind: {left[0].relative_to(self.path)}")


def ending(path: Path) -> Row:
    """What a run came to: all that has to be the same however often it was disturbed."""
    try:
        found = newest_first(path)
        rows = [json.loads(line) for line in (path / "log.jsonl").read_text("utf-8").splitlines()]
        return {"last checkpoint": found[0].name, **{n: digest(found[0] / n) for n in FILES},
                "losses": [{k: v for k, v in row.items() if k not in TIMES} for row in rows],
                "best.json": pointed(path, "best"), "latest.json": pointed(path, "latest"),
                "checkpoints": [folder.name for folder in found]}
    except (LookupError, ValueError, OSError, UserError) as e:
        raise Lost(f"no complete run: {type(e).__name__}: {e}") from None


# -------------------------------------------------------------------------------------- the faults


class Campaign:
    """The undisturbed run, an interrupted one to be damaged, and what is done to others."""

    def __init__(self, work: Path, text: Path):
        self.work, self.text = work, text
        first, stopped = Victim(work / "first", text), Victim(work / "stopped", text)
        done = first.start(first=first.watch)
        if done.code:
            raise UserError(f"the undisturbed run ended with {done.code}: {done.last_line()}")
        self.reference, self.seconds = ending(first.path), done.seconds
        self.events = first.notes("events").read_text("utf-8").count("\n")
        self.bytes = sum(f.stat().st_size for f in first.out.rglob("*") if f.is_file())
        done = stopped.start(
            first=lambda: stopped.watch(self.events * 9 // 10, signal.SIGTERM))
        if done.code != 128 + signal.SIGTERM:
            raise UserError(f"SIGTERM in a save ended a run with {done.code}: {done.last_line()}")
        self.interrupted = stopped.path

    def try_often(self, fault: str, tries: int, seed: int,
                  harm: Callable[[Victim, random.Random, int], None]) -> Row:
        """The row of a fault; the same seed does the same again.

        The folder of a try is removed if its run survives.
        """
        row = {"fault": fault, "tried": tries, "survived": 0, "lost": 0, "silent": 0}
        for number in range(tries):
            name = f"{fault.replace(' ', '_')}-{number}"
            victim = Victim(self.work / name, self.text)
            try:
                harm(victim, random.Random(f"{seed} {name}"), number)
            except Lost as why:
                row["lost"] += 1
                row["silent"] += isinstance(why, Silent)
                log(f"{fault}: {why}\n    {victim.folder}")
            else:
                row["survived"] += 1
                shutil.rmtree(victim.folder)
        log(f"{fault}: {row['survived']} of {tries} survived")
        return row

    def kill(self, victim: Victim, rng: random.Random, number: int) -> None:
        """At some moment."""
        victim.start(signal.SIGKILL, rng.uniform(0, self.seconds))
        victim.must_end_like(self.reference)

    def kill_at_event(self, victim: Victim, rng: random.Random, number: int) -> None:
        """Before it opens, renames or removes some file."""
        victim.start(first=partial(victim.watch, rng.randint(1, self.events)))
        victim.must_end_like(self.reference)

    def signal(self, which: int, victim: Victim, rng: random.Random, number: int) -> None:
        """Before its handler is set the signal kills it; while it finishes its code may be 0."""
        done = victim.start(which, rng.uniform(0.05, self.seconds))
        if done.code not in (128 + which, -which, 0):
            raise Lost(f"ended with {done.code} at signal {which}: {done.last_line()}")
        victim.must_end_like(self.reference, parts=(*RESULT, "best.json", "latest.json"))

    def damage(self, harm: Callable[[Path, random.Random], None], victim: Victim,
               rng: random.Random, number: int) -> None:
        """One file after the other; at times all files of its name, so that nothing is left.

        Every second run goes on without its config file: it has the settings of the run.
        """
        shutil.copytree(self.interrupted, victim.path)
        files = sorted([victim.path / "config.json", *victim.path.glob("ckpt/*.json"),
                        *victim.path.glob("ckpt/*/*")])
        harmed = [files[number % len(files)]]
        nothing_left = harmed[0].parent.name.startswith("step_") and rng.random() < 0.2
        if nothing_left:
            harmed = sorted(victim.path.glob(f"ckpt/*/{harmed[0].name}"))
        for file in harmed:
            harm(file, rng)
        before = contents(victim.path)
        done = victim.start(bare=number % 2 == 1 and not nothing_left)
        unnamed = [file for file in harmed if not is_named(file, done.out + done.err)]
        if unnamed and done.code == 0:
            raise Silent(f"not named: {unnamed[0].relative_to(victim.path)}")
        if not nothing_left:
            victim.must_end_like(self.reference, done, RESULT)
        elif done.refusal() and contents(victim.path) != before:
            raise Lost("refused, but the folder of the run is not as it was")
        if unnamed:
            raise Lost(f"refused, but not named: {unnamed[0].relative_to(victim.path)}")

    def fill(self, victim: Victim, rng: random.Random, number: int) -> None:
        """Too little room, which it must say and leave nothing torn, and then enough of it."""
        size = int(4096 * (self.bytes / 4096) ** rng.random())  # a little as often as almost enough
        with small_disk(victim.out, size) as resize:
            line, rows = victim.start().refusal(), victim.path / "log.jsonl"
            if "No space left" not in line:
                raise Lost(f"the line does not name the cause: {line}")
            try:
                for folder in newest_first(victim.path):
                    check(folder)
                for text in rows.read_text("utf-8").splitlines()[:-1] if rows.exists() else ():
                    json.loads(text)
            except (UserError, ValueError) as e:
                raise Lost(f"left torn: {e}") from None
            resize(ROOMY)
            victim.must_end_like(self.reference)


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[[int], None]]:
    """A disk of `size` bytes in memory, on a new folder; gives what changes its size."""
    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True,
                       capture_output=True)

    folder.mkdir()
    mount(f"size={size}")
    try:
        yield lambda size: mount(f"remount,size={size}")
    except Lost:
        shutil.copytree(folder, folder.with_name("left_on_disk"))
        raise
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def can_mount(work: Path) -> bool:
    try:
        with small_disk(work / "disk", ROOMY):
            return True
    except (OSError, subprocess.CalledProcessError):  # not this system, or not this user
        return False


def flip(path: Path, rng: random.Random) -> None:
    """One bit of a file."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    """To some shorter length; every fourth time to nothing."""
    os.truncate(path, 0 if rng.random() < 0.25 else rng.randrange(path.stat().st_size))


def is_named(path: Path, output: str) -> bool:
    """Whether some line says that a file, or the checkpoint that it is part of, is damaged."""
    folder = path.parent.name
    names = [path.name, *([folder] if folder.startswith("step_") else [])]
    return any("damaged" in line and name in line for line in output.splitlines() for name in names)


def contents(path: Path) -> dict[str, bytes]:
    """All files of a run but the lock, whose file may come and go."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*")
            if p.is_file() and p.name != ".lock"}


# ------------------------------------------------------------------------------------- the command


def parse(argv: list[str]) -> argparse.Namespace:
    parser = common.command_line("bench.faults", __doc__)
    for name, default, what in (
            ("kills", 200, "kill -9 at any moment, and as many at a file event"),
            ("damages", 100, "bits flipped and files truncated"),
            ("signals", 20, "SIGTERM, SIGINT, SIGHUP and SIGUSR1"), ("full", 20, "full disks"),
            ("seed", 0, "of all that is drawn")):
        parser.add_argument(f"--{name}", type=int, default=default,
                            help=f"{what} (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("kills", "damages", "signals", "full"):
        if getattr(args, name) < 0:
            parser.error(f"--{name}={getattr(args, name)}: expected 0 or more")
    return args


def import_all() -> None:
    """What a start needs, without starting a thread: a fork would copy half of it."""
    for name in ("torch._dynamo", "matplotlib.backends.backend_agg", "tyro", "tiktoken"):
        import_module(name)
    runpy.run_path(str(CLONE / "train.py"), run_name="train")  # what train.py imports
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0
    tqdm.set_lock(threading.RLock())  # its own is shared with children, and one dies holding it
    device.bf16_gain = lambda: 1.0  # how fast this machine is takes long to measure
    device.peak_flops = lambda *_: 1e9


def main(argv: list[str]) -> int:
    args = parse(argv)
    if not hasattr(os, "fork"):
        raise UserError("bench.faults forks its runs, which Windows cannot")
    began, work = time.perf_counter(), Path(tempfile.mkdtemp(prefix="faults-"))
    text = work / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(WORDS, k=4000)))
    import_all()
    campaign = Campaign(work, text)
    faults = [("kill -9 at any moment", args.kills, campaign.kill),
              ("kill -9 at a file event", args.kills, campaign.kill_at_event),
              *((name, (args.signals + i) // 4, partial(campaign.signal, getattr(signal, name)))
                for i, name in enumerate(("SIGUSR1", "SIGHUP", "SIGINT", "SIGTERM"))),
              ("bit flipped", args.damages - args.damages // 2, partial(campaign.damage, flip)),
              ("file truncated", args.damages // 2, partial(campaign.damage, truncate))]
    if can_mount(work):
        faults.append(("disk full", args.full, campaign.fill))
    else:
        log("disk full is left out: only root may mount a small disk")
    rows = [campaign.try_often(fault, tries, args.seed, harm)
            for fault, tries, harm in faults if tries]
    common.print_table(rows, [("fault", "fault", ""), ("tried", "tried", "d"),
                       ("survived", "survived", "d"), ("lost", "lost", "d"),
                       ("silent", "of them silent", "d")])
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps(common.machine() | {"seed": args.seed, "seconds": seconds, "faults": rows}))
    if any(row["lost"] for row in rows):
        log(f"what was lost is in {work}")
        return 1
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    run(main)
