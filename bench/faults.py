"""How often is a run lost? A campaign of kills, signals, damaged files and full disks.

    python -m bench.faults [--kills=200] [--damages=100] [--signals=20] [--full=20]

Each try takes a tiny run, does one thing to it and starts the same command again, until it ends by
itself. It has survived if then its weights, its optimizer and its losses are those of a run that
nothing disturbed. Of damaged files each has to be named; one that was used all the same, or not
named, counts as silent. What is lost stays in a folder that is printed, with all that it said.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from bench.trial import machine, print_table
from bench.victim import RESULT, Lost, Victim, ending, get_ready, limit, small_disk
from data import DataError
from data.prepare import Parser
from kit.errors import run

COLUMNS = [("fault", "fault", ""), ("tried", "tried", "d"), ("survived", "survived", "d"),
           ("lost", "lost", "d"), ("silent", "of them silent", "d")]
WORDS = "the of and to in that it was his her with as had for not but at be on they by all".split()
ENOUGH = 64 << 20  # bytes of a disk that is not small


class Silent(Lost):
    """It went on, and what was damaged was not named."""


@dataclass
class Fault:
    """A kind of fault and how its tries went; one(victim, rng, number) raises Lost."""

    fault: str
    tries: int
    one: Callable[[Victim, random.Random, int], None]
    tried: int = 0
    survived: int = 0
    lost: int = 0
    silent: int = 0


class Campaign:
    """The undisturbed run, an interrupted one to be damaged, and what is done to others."""

    def __init__(self, work: Path, text: Path):
        self.work, self.text = work, text
        first, again, stopped = (Victim(work / name, text) for name in ("whole", "again", "part"))
        done = first.go()
        if done.code:
            raise DataError(f"the undisturbed run ended with {done.code}: {done.last_line()}")
        self.reference = ending(first.path)
        self.data = first.folder / "data"
        self.sizes = [f.stat().st_size for f in first.out.rglob("*") if f.is_file()]
        done = again.go(first=again.watch)
        self.life = done.seconds
        self.events = again.notes("events").read_text("utf-8").count("\n")
        if ending(again.path) != self.reference:
            raise DataError("two undisturbed runs end differently on this machine")
        done = stopped.go(first=lambda: stopped.watch(self.events * 9 // 10, signal.SIGTERM))
        if done.code != 128 + signal.SIGTERM:
            raise DataError(f"SIGTERM in a save ended a run with {done.code}: {done.last_line()}")
        self.interrupted = stopped.path
        try:
            with small_disk(work / "disk", ENOUGH):
                self.mounts = True
        except (OSError, subprocess.CalledProcessError):  # not this system, or not this user
            self.mounts = False

    def faults(self, kills: int, damages: int, signals: int, full: int) -> list[Fault]:
        return [fault for fault in (
            Fault("kill -9 at any moment", kills, partial(self.kill, False)),
            Fault("kill -9 at a file event", kills, partial(self.kill, True)),
            *(Fault(name, (signals + i) // 4, partial(self.signal, getattr(signal, name)))
              for i, name in enumerate(("SIGUSR1", "SIGHUP", "SIGINT", "SIGTERM"))),
            Fault("bit flipped", damages - damages // 2, partial(self.damage, flip)),
            Fault("file truncated", damages // 2, partial(self.damage, truncate)),
            Fault("disk full" if self.mounts else "disk full (limit of a file)", full, self.fill),
        ) if fault.tries]

    def try_one(self, fault: Fault, seed: int, tell: Callable[[str], None]) -> None:
        """One more try; its folder goes if it survives. The same seed does the same again."""
        name = f"{fault.fault.split(' (')[0].replace(' ', '_')}-{fault.tried}"
        victim = Victim(self.work / name, self.text)
        rng = random.Random(f"{seed} {name}")
        fault.tried += 1
        try:
            fault.one(victim, rng, fault.tried - 1)
        except Lost as why:
            fault.lost, fault.silent = fault.lost + 1, fault.silent + isinstance(why, Silent)
            tell(f"{fault.fault}: {why}\n    {victim.folder}")
        else:
            fault.survived += 1
            shutil.rmtree(victim.folder)

    def kill(self, at_event: bool, victim: Victim, rng: random.Random, number: int) -> None:
        """At some moment, or before it opens or renames some file; every tenth run twice."""
        for _ in range(2 if number % 10 == 9 else 1):
            if at_event:
                victim.go(first=partial(victim.watch, rng.randint(1, self.events)))
            else:
                victim.go(signal.SIGKILL, rng.uniform(0, self.life))
        victim.must_end_like(self.reference)

    def signal(self, which: int, victim: Victim, rng: random.Random, number: int) -> None:
        """Before it listens the signal is its death; while it says its last words it may be 0."""
        done = victim.go(which, rng.uniform(0.05, self.life))
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
        done = victim.go(bare=number % 2 == 1 and not nothing_left)
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
        """No room from some file on, and then enough of it."""
        needed = sum(self.sizes) if self.mounts else max(self.sizes)
        size = int(4096 * (needed / 4096) ** rng.random())  # a little as often as almost enough
        if self.mounts:
            with small_disk(victim.out, size) as resize:
                victim.must_stop_for_room()
                resize(ENOUGH)
                victim.must_end_like(self.reference)
            return
        shutil.copytree(self.data, victim.folder / "data")  # or the limit would be its limit first
        victim.must_stop_for_room(partial(limit, size))
        victim.must_end_like(self.reference)


def flip(path: Path, rng: random.Random) -> None:
    """One bit of a file."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    """To some shorter length; every fourth time to nothing."""
    os.truncate(path, 0 if rng.random() < 0.25 else rng.randrange(path.stat().st_size))


def is_named(path: Path, said: str) -> bool:
    """Whether some line says that a file, or the checkpoint that it is part of, is damaged."""
    folder = path.parent.name
    names = [path.name, *([folder] if folder.startswith("step_") else [])]
    return any("damaged" in line and name in line for line in said.splitlines() for name in names)


def contents(run: Path) -> dict[str, bytes]:
    """All files of a run but the lock, whose file may come and go."""
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*")
            if p.is_file() and p.name != ".lock"}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="bench.faults", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for name, default, what in (
            ("kills", 200, "kill -9 at any moment, and as many at a file event"),
            ("damages", 100, "bits flipped and files truncated"),
            ("signals", 20, "SIGTERM, SIGINT, SIGHUP and SIGUSR1"), ("full", 20, "full disks"),
            ("seed", 0, "of all that is drawn")):
        add(f"--{name}", type=int, default=default, help=f"{what} (default: %(default)s)")
    add("--text", type=Path, metavar="PATH", help="what to train on; without, some is made")
    args = parser.parse_args(argv)
    if low := [name for name, value in vars(args).items() if isinstance(value, int) and value < 0]:
        parser.error(f"--{low[0]}={getattr(args, low[0])}: expected 0 or more")
    if args.text and not args.text.is_file():
        parser.error(f"--text={args.text}: there is no such file")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    if not hasattr(os, "fork"):
        raise DataError("bench.faults forks its runs, which Windows cannot")
    began, work = time.perf_counter(), Path(tempfile.mkdtemp(prefix="faults-"))
    if not args.text:
        args.text = work / "text.txt"
        args.text.write_text(" ".join(random.Random(0).choices(WORDS, k=4000)))
    get_ready()
    campaign = Campaign(work, args.text)
    faults = campaign.faults(args.kills, args.damages, args.signals, args.full)
    screen = open(os.dup(2), "w", 1, "utf-8")  # no child may take the bar for its own
    bar = tqdm(total=sum(fault.tries for fault in faults), unit="try", file=screen,
               disable=None)
    for fault in faults:
        bar.set_description(fault.fault)
        for _ in range(fault.tries):
            campaign.try_one(fault, args.seed, partial(tqdm.write, file=screen))
            bar.update()
    bar.close()
    rows = [{name: getattr(fault, name) for name, _, _ in COLUMNS} for fault in faults]
    print_table(rows, COLUMNS)
    found = machine() | {"seed": args.seed, "seconds": round(time.perf_counter() - began, 1),
                         "life_s": round(campaign.life, 2), "file_events": campaign.events,
                         "faults": rows}
    print(json.dumps(found))
    if any(fault.lost for fault in faults):
        print(f"what was lost is in {work}", file=sys.stderr)
        return 1
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    run(main, mistakes=(DataError,))
