"""The run that bench.faults torments: a tiny one, started in forked processes, judged by its end.

Torch is imported once, by the process that forks, so a start takes a second and not several. What
is forked is a process like any other, with train.py in it, and a kill -9 is a real one.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from tqdm import tqdm

from data import DataError
from kit import device
from kit.errors import UserError, run
from kit.files import digest
from kit.run.store import FILES, check, newest_first, pointed

train = import_module("train")  # a command, here the one that is tested
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
HANGS = 180.0  # seconds after which a process will not end any more
TIMES = {"tok_s", "mfu", "elapsed_s", "train_s"}  # of log.jsonl; the rest is the same each time
RESULT = ("last checkpoint", *FILES, "losses")  # of an ending; which older ones stay may differ
EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree"}


class Lost(Exception):
    """Why a run has not survived, in a line."""


class Ended(NamedTuple):
    """A process that is over."""

    code: int  # as of subprocess: -9 after kill -9
    out: str
    err: str
    seconds: float

    def last_line(self) -> str:
        return (self.err.strip() or self.out.strip() or "it said nothing").splitlines()[-1][:300]

    def refusal(self) -> str:
        """The one line of a refusal with exit code 2; Lost where it is none."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        if self.code != 2 or len(lines) != 1:
            raise Lost(f"no refusal in a line with exit code 2, but {len(lines)} lines and exit "
                       f"code {self.code}: {self.last_line()}")
        return lines[0]


def get_ready() -> None:
    """Import what a start needs, and start no thread: a fork would copy half of it."""
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0
    tqdm.set_lock(threading.RLock())  # its own is shared with children, and one dies holding it
    for name in ("torch._dynamo", "matplotlib.backends.backend_agg", "tyro", "tiktoken"):
        import_module(name)
    device.bf16_gain = lambda: 1.0  # how fast this machine is takes long to measure
    device.peak_flops = lambda *_: 1e9


class Victim:
    """A run with a folder of its own for its data, its output and what it said."""

    def __init__(self, folder: Path, text: Path):
        self.folder, self.out, self.path = folder, folder / "out", folder / "out" / "run"
        folder.mkdir(parents=True)
        config = folder / "tiny.py"
        config.write_text(CONFIG, encoding="utf-8")
        self.given, self.out_dir = [str(config), f"--dataset={text}"], f"--out_dir={self.path}"
        self.starts = 0

    def notes(self, kind: str) -> Path:
        """Where the last start wrote what it said, or its file events."""
        return self.folder / f"{kind}{self.starts}.txt"

    def go(self, number: int = 0, moment: float = 0.0, first: Callable[[], None] = lambda: None,
           bare: bool = False) -> Ended:
        """Start the command and wait for its end; after `moment` seconds it gets a signal, if any.

        first: called in the new process before all else. bare: with out_dir as its only setting.
        """
        self.starts += 1
        for stream in (sys.stdout, sys.stderr):  # or the child prints it once more
            stream.flush()
        began = time.perf_counter()
        if not (pid := os.fork()):
            self.become([self.out_dir] if bare else [*self.given, self.out_dir], first)
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
        seconds = time.perf_counter() - began
        out, err = (file.read_text("utf-8", "replace") if file.exists() else ""
                    for file in map(self.notes, ("out", "err")))
        return Ended(os.waitstatus_to_exitcode(status[1]), out, err, seconds)

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
            sys.argv = ["train.py", *argv]
            first()
            run(train.main, mistakes=(DataError,))
        except SystemExit as stop:
            code = stop.code
        except KeyboardInterrupt:  # before run() could take it
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

    def must_end_like(self, reference: dict[str, Any], done: Ended | None = None,
                      parts: tuple[str, ...] = ()) -> None:
        """The same command again; Lost unless it ends by itself, and in these parts of the same."""
        done = done or self.go()
        complete = done.code == 2 and "holds a run" in done.err  # it had ended but for last words
        if done.code and not complete:
            raise Lost(f"ended with {done.code}: {done.last_line()}")
        now = ending(self.path)
        if other := [part for part in parts or reference if now[part] != reference[part]]:
            raise Lost(f"ended otherwise than the undisturbed run: {', '.join(other)}")
        if left := sorted(self.path.rglob(".tmp-*")):
            raise Lost(f"left behind: {left[0].relative_to(self.path)}")

    def must_stop_for_room(self, first: Callable[[], None] = lambda: None) -> None:
        """Start with too little room; Lost unless it says so and what it leaves is whole."""
        line, log = self.go(first=first).refusal(), self.path / "log.jsonl"
        if not any(cause in line for cause in ("No space left", "File too large")):
            raise Lost(f"the line does not name the cause: {line}")
        try:
            for folder in newest_first(self.path):
                check(folder)
            for text in log.read_text("utf-8").splitlines()[:-1] if log.exists() else ():
                json.loads(text)
        except (UserError, ValueError) as e:
            raise Lost(f"left torn: {e}") from None


def ending(run: Path) -> dict[str, Any]:
    """What a run came to: all that has to be the same however often it was disturbed."""
    try:
        found = newest_first(run)
        log = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
        return {"last checkpoint": found[0].name, **{n: digest(found[0] / n) for n in FILES},
                "losses": [{k: v for k, v in row.items() if k not in TIMES} for row in log],
                "best.json": pointed(run, "best"), "latest.json": pointed(run, "latest"),
                "checkpoints": [folder.name for folder in found]}
    except (LookupError, ValueError, OSError, UserError) as e:
        raise Lost(f"no complete run: {type(e).__name__}: {e}") from None


def limit(size: int) -> None:
    """No file of this process may be larger; a write beyond fails as on a full disk."""
    import resource  # not on Windows

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


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
