"""A process that holds one side at one precision and times it when asked: both ends of its pipe.

The model is loaded once; between questions the process waits for its pipe and takes no core. So
each side has its own libraries and threads, and none of them disturbs another's. Questions and
answers are lines of JSON.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.trial import CLONE, Row, TrialFailed

TRIES = 2  # of each way of doing a kind of task; the best counts
HOPELESS = 5  # a way that takes so many times the quickest's seconds is not tried further


class Worker:
    """The parent's end: it has no torch and only asks."""

    def __init__(self, side: str, bits: str, folder: Path, threads: int, *more: str | Path):
        self.name, self.ways = f"{side}, {bits} bits", {}  # kind of task -> ways that were tried
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        command = [sys.executable, "-m", "bench.decode.worker", side, bits, folder, threads, *more]
        self.process = subprocess.Popen(
            list(map(str, command)), cwd=CLONE, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.errors,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)})
        try:
            self.note = self.hear()["note"]
        except BaseException:
            self.close()
            raise

    def ask(self, **task: Any) -> Row:
        """Its answer to a task; TrialFailed if it dies of it."""
        try:
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # its last words say more
        return self.hear()

    def hear(self) -> Row:
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.errors.seek(0)
            last = "\n".join(self.errors.read().splitlines()[-8:])
            raise TrialFailed(f"{self.name} ended with {code}:\n{last}")
        return json.loads(line)

    def close(self) -> None:
        """Its pipe's end is its end; one that is stuck is killed."""
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def run_once(side: Any, variant: str, task: Row) -> Row:
    """Seconds of one call: whole, to the first token, from the first to the last; its ids."""
    import numpy as np

    shape = task["rows"], task["prompt"]
    prompts = np.random.default_rng(task.get("seed", 0)).integers(side.vocab, size=shape)
    times, ids = [], []

    def tick(new: list[int]) -> None:
        times.append(time.perf_counter())
        ids.append(new)

    start = time.perf_counter()
    side.generate(prompts, task["new"], variant, tick)
    seconds = time.perf_counter() - start
    if len(ids) != task["new"]:
        raise TrialFailed(f"{task['new']} tokens were asked for and {len(ids)} came")
    first, later = (times[0] - start, times[-1] - times[0]) if side.streams else (None, None)
    return {"seconds": seconds, "first_s": first, "later_s": later, "ids": ids}


def measure(side: Any, variant: str, task: Row) -> Row:
    """Medians of `repeat` calls; the ids of the last are given where they are asked for."""
    found = [run_once(side, variant, task) for _ in range(task.get("repeat", 1))]
    row = {"variant": variant, "ids": found[-1]["ids"] if task.get("ids") else None}
    for key in ("seconds", "first_s", "later_s"):
        values = [one[key] for one in found]
        row[key] = None if None in values else statistics.median(values)
    return row


def choose(side: Any, task: Row) -> Row:
    """The best way of doing a kind of task, by its own measure; `tried` are the seconds of each.

    A small version of the task warms all up and leaves those out that are far behind in it (None).
    """
    key, variants = "later_s" if task["kind"] == "batch" else "seconds", side.variants(task["kind"])
    small = task | {"prompt": min(task["prompt"], 16), "new": min(task["new"], 8)}
    small_key = "later_s" if side.streams and small["new"] > 1 else "seconds"
    small_s = {v: [run_once(side, v, small)[small_key] for _ in range(2)][1] for v in variants}
    tried = dict.fromkeys(variants)
    for variant in variants if len(variants) > 1 else []:
        if small_s[variant] < HOPELESS * min(small_s.values()):
            tried[variant] = min(run_once(side, variant, task)[key] for _ in range(TRIES))
    return {"variant": min(variants, key=lambda v: tried[v] or math.inf), "tried": tried}


def make_side(name: str, bits: str, folder: str, threads: str, *more: str) -> Any:
    from bench.decode import llama
    from bench.decode import sides as decode_sides

    sides: dict[str, Callable[..., Any]] = {
        "ours": decode_sides.Ours, "older": decode_sides.Older, "edited": decode_sides.Edited,
        "Hugging Face": decode_sides.HuggingFace, "llama.cpp": llama.LlamaCpp,
        "nanoGPT": decode_sides.NanoGPT, "bandwidth": decode_sides.Bandwidth}
    return sides[name](Path(folder), bits, int(threads), *map(Path, more))


def serve(argv: list[str]) -> None:
    """The child's end: load, then answer until the pipe ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer

    def answer(row: Row) -> None:
        answers.write(json.dumps(row) + "\n")
        answers.flush()

    side, best = make_side(*argv), {}
    answer({"note": side.note})
    for line in sys.stdin:
        task = json.loads(line)
        kind = task["kind"]
        if task.get("choose"):
            found = choose(side, task)
            best[kind] = found["variant"]
            answer(found)
        else:
            answer(measure(side, best.get(kind) or side.variants(kind)[0], task))


if __name__ == "__main__":
    serve(sys.argv[1:])
