"""The turns of `bench.decode`: what is timed, who takes part, round after round."""

import argparse
import importlib.util
import subprocess
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from bench.decode.model import GGUF_TYPES, make_model, write_gguf
from bench.decode.start import measure_start
from bench.decode.worker import Worker
from bench.trial import CLONE, Row, TrialFailed, apart, tell

SIDES = [(side, bits) for bits, sides in {  # rivals follow one another
    "16": ("ours", "older", "edited", "Hugging Face", "llama.cpp"),
    "32": ("ours", "older", "edited", "Hugging Face", "llama.cpp"),
    "8": ("ours", "older", "edited", "llama.cpp"),
    "4": ("ours", "older", "edited", "llama.cpp")}.items() for side in sides]
NEEDS = {"Hugging Face": {"transformers": "transformers"},  # side -> import: what to install
         "llama.cpp": {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}}
GUARD = 64  # tokens that must be the same
BANDWIDTH_TRIES = 10


class Task(NamedTuple):
    """What is timed: `rows` prompts of so many tokens, then `new` ones each."""

    part: str
    kind: str
    rows: int
    prompt: int
    new: int
    repeat: int = 1


TASKS = {"128": Task("batch1", "decode", 1, 16, 128), "512": Task("batch1", "decode", 1, 16, 512),
         "first": Task("prefill", "first", 1, 16, 1, 5),
         "prefill": Task("prefill", "prefill", 1, 1000, 1, 3),
         "batch 1": Task("batch", "decode", 1, 448, 65),
         "batch 8": Task("batch", "batch", 8, 448, 65),
         "batch 32": Task("batch", "batch", 32, 448, 65)}
TRY = {"decode": Task("", "decode", 1, 16, 160), "first": TASKS["first"]._replace(repeat=1),
       "prefill": TASKS["prefill"]._replace(repeat=1), "batch": Task("", "batch", 8, 448, 17)}


class Bench:
    """The workers and what they have found."""

    def __init__(self, args: argparse.Namespace, work: Path):
        self.args, self.work, self.workers = args, work, {}
        self.samples: list[Row] = []
        self.missing = missing()
        for side, how in self.missing.items():
            tell(f"{side}: left out; {how} brings it")
        absent = {*self.missing, *(() if args.against else ("older",))}
        self.sides = [(side, bits) for side, bits in SIDES if side not in absent]
        self.older = check_out(args.against, work) if args.against else None
        self.threads = apart(torch_threads)
        self.read_weights = apart(make_model, work, args.shape)
        if any(side == "llama.cpp" for side, _ in self.sides):
            for bits in GGUF_TYPES:
                apart(write_gguf, work, bits)

    def worker(self, side: str, bits: str) -> Worker:
        if (side, bits) not in self.workers:
            clone = {"nanoGPT": self.args.nanogpt, "older": self.older}.get(side)
            made = self.workers[side, bits] = Worker(side, bits, self.work, self.threads,
                                                     *([clone] if clone else []))
            tell(f"{made.name}: ready{made.note and f' ({made.note})'}")
        return self.workers[side, bits]

    def ask(self, side: str, bits: str, task: Task, **more: Any) -> Row:
        """A task for one side, which has tried its ways of doing such tasks before the first."""
        worker = self.worker(side, bits)
        if task.kind not in worker.ways:
            found = worker.ask(**TRY[task.kind]._asdict(), choose=True)
            worker.ways[task.kind] = found["tried"]
            if len(found["tried"]) > 1:
                tell(f"{worker.name}, {task.kind}: {found['variant']} of " + ", ".join(
                    f"{name} {f'{s:.3g} s' if s else 'far behind'}"
                    for name, s in found["tried"].items()))
        return worker.ask(**task._asdict(), **more)

    def time(self, side: str, bits: str, name: str, number: int) -> None:
        task = TASKS[name]
        got = self.ask(side, bits, task)
        row = {"round": number, "side": side, "bits": bits, "task": name,
               "way": got["variant"]} | rates(task, got)
        self.samples.append(row)
        tell(f"round {number}, {name}, {side}, {bits} bits: {row['tok_s']:,.1f} tokens/s")

    def rounds(self, part: str) -> None:
        """Every side takes its turn at every task of a part, round after round."""
        for number in range(1, self.args.rounds + 1):
            for name in (name for name, task in TASKS.items() if task.part == part):
                turn = [s for s in self.sides if takes(*s, name)]
                for side, bits in turn if number % 2 else turn[::-1]:  # a drift meets all
                    self.time(side, bits, name, number)

    def guard(self) -> Row:
        """How many greedy ids of each side are ours at 32 bits, up to the first that is not.

        TrialFailed where Hugging Face at 32 bits has others. An edited model is another model.
        """
        task = Task("", "decode", 1, 16, GUARD)
        ids = {s: self.ask(*s, task, ids=True)["ids"] for s in self.sides if s[0] != "edited"}
        alike = {f"{side} {bits}": common(ids["ours", "32"], found)
                 for (side, bits), found in ids.items()}
        tell(f"of {GUARD} greedy ids, those of ours at 32 bits up to the first other: "
             + ", ".join(f"{name} {n}" for name, n in alike.items()))
        if (n := alike.get("Hugging Face 32", GUARD)) < GUARD:
            raise TrialFailed(f"at 32 bits ours and Hugging Face write the same {n} ids and then "
                              "different ones: there is nothing to compare")
        return {"alike": alike, "alike_of": GUARD}

    def batch1(self) -> Row:
        self.rounds("batch1")
        worker = self.worker("bandwidth", "32")
        best = min(worker.ask(kind="read", rows=1, prompt=1, new=1)["seconds"]
                   for _ in range(BANDWIDTH_TRIES))
        return {"bandwidth_gb_s": 2**30 / best / 1e9,
                        "gb_per_token_16bit": 2 * self.read_weights / 1e9}

    def prefill(self) -> Row:
        self.rounds("prefill")
        return {}

    def batch(self) -> Row:
        self.rounds("batch")
        return {}

    def start(self) -> Row:
        return measure_start(self.work, max(5, self.args.rounds))

    def nanogpt(self) -> Row:
        for name in ("128", "512"):
            self.time("nanoGPT", "32", name, 1)
        return {}

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def missing() -> dict[str, str]:
    """What a side that cannot run lacks, as the command that brings it."""
    lacks = {side: [package for module, package in packages.items()
                    if importlib.util.find_spec(module) is None]
             for side, packages in NEEDS.items()}
    return {side: f"pip install {' '.join(packages)}" for side, packages in lacks.items()
            if packages}


def takes(side: str, bits: str, name: str) -> bool:
    """Whether a side takes part in a task.

    Batches are for 16 bits; of ours also for 8 and 4, as the ratio is of the best. The edited model
    writes one text.
    """
    part = TASKS[name].part
    if side == "edited" or part != "batch":
        return side != "edited" or part == "batch1"
    return bits == "16" or (side in ("ours", "older") and bits in ("8", "4") and name != "batch 8")


def check_out(commit: str, work: Path) -> Path:
    """The files of a commit of this clone, in a new folder with its name."""
    folder, archive = work / commit, work / f"{commit}.zip"
    subprocess.run(["git", "-C", str(CLONE), "archive", f"--output={archive}", commit], check=True)
    zipfile.ZipFile(archive).extractall(folder)
    return folder


def common(a: list, b: list) -> int:
    """The length of what two lists have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def rates(task: Task, got: Row) -> Row:
    """Tokens a second: of a whole call; of the prompt; or of all rows once they are read."""
    first, later, rest = got["first_s"], got["later_s"], task.rows * (task.new - 1)
    steady = rest / later if rest and later else None
    if task.part == "prefill":
        tok_s = task.prompt / first
    else:
        tok_s = steady if task.part == "batch" else task.new / got["seconds"]
    return {"tok_s": tok_s, "steady_tok_s": steady, "first_s": first}


def torch_threads() -> int:
    import torch

    return torch.get_num_threads()
