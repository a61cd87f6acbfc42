"""A process that holds one side at one precision and times what it is asked: both of its ends.

One process is one turn of a side: it loads the model, answers its questions in order and ends, so
that each side has its own libraries and threads and none disturbs another's. Questions and answers
are lines of JSON. --against asks the worker of another commit, so they have to stay as they are:

    it starts with                                     {"note": what it is}
    {kind, rows, prompt, new, ids} is answered by      {variant, ids, seconds, first_s, later_s}
    the same with choose=true picks the best way       {variant}
    for all further questions of this kind
"""

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.common import CLONE, ProcessFailed, Row
from kit.errors import UserError

if TYPE_CHECKING:
    from bench.decode.sides import Side

MODULES = {"bench/decode/worker.py": "bench.decode.worker",
           "bench/decode_worker.py": "bench.decode_worker"}  # the second before 0.2.0


def check_out(commit: str, work: Path) -> Path:
    """The files of a commit of this clone that has a bench.decode, in a folder with its name."""
    def git(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", "-C", str(CLONE), *words], capture_output=True, text=True)

    found = git("rev-parse", "--verify", "--short", "--end-of-options", f"{commit}^{{commit}}")
    if found.returncode:
        raise UserError(f"--against={commit}: not a commit of this clone")
    folder = work / found.stdout.strip()
    git("archive", f"--output={work / 'files.zip'}", folder.name)
    zipfile.ZipFile(work / "files.zip").extractall(folder)
    if not any((folder / file).is_file() for file in MODULES):
        raise UserError(f"--against={commit}: it has no bench.decode yet")
    return folder


def ask(side: str, bits: str, folder: Path, threads: int, questions: list[Row],
        clone: Path | None = None) -> list[Row]:
    """The answers of a side to its questions, after one that says what it is.

    clone: of older the folder whose code runs, of nanoGPT the folder of its model.
    """
    cwd, words = CLONE, [side, bits, folder, threads, *([clone] if clone else [])]
    if side == "older":
        cwd, words = clone, ["ours", bits, folder, threads]
    module = next(name for file, name in MODULES.items() if (cwd / file).is_file())
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)], cwd=cwd, capture_output=True,
        input="".join(json.dumps(question) + "\n" for question in questions), text=True,
        errors="replace", env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    if done.returncode:
        end = "\n".join(done.stderr.splitlines()[-8:])
        raise ProcessFailed(f"{side}, {bits} bits, ended with {done.returncode}:\n{end}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def measure(side: "Side", way: str, task: Row) -> Row:
    """Seconds of a call: in all, to the first token, from the first to the last; ids if asked."""
    shape = task["rows"], task["prompt"]
    prompts = np.random.default_rng(0).integers(side.vocab, size=shape)
    times, ids = [], []

    def on_token(new: list[int]) -> None:
        times.append(time.perf_counter())
        ids.append(new)

    start = time.perf_counter()
    side.generate(prompts, task["new"], way, on_token)
    seconds = time.perf_counter() - start
    if len(ids) != task["new"]:
        raise ProcessFailed(f"{task['new']} tokens were asked for and {len(ids)} came")
    return {"variant": way, "ids": ids if task.get("ids") else None, "seconds": seconds,
            "first_s": times[0] - start, "later_s": times[-1] - times[0]}


def choose(side: "Side", task: Row) -> str:
    """The fastest way of doing a kind of task; each is called once before, to warm up."""
    ways, key = side.ways(task["kind"]), "later_s" if task["kind"] == "batch" else "seconds"
    for way in ways:
        measure(side, way, task | {"new": min(task["new"], 8)})
    if len(ways) == 1:
        return ways[0]
    return min(ways, key=lambda way: min(measure(side, way, task)[key] for _ in range(2)))


def serve(name: str, bits: str, folder: str, threads: str, *clone: str) -> None:
    """The child's end: load, then answer until the questions end."""
    answers = os.fdopen(os.dup(1), "w", 1, encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    import torch

    from bench.decode.sides import SIDES

    torch.set_num_threads(int(threads))
    side, chosen = SIDES[name](Path(folder), bits, *map(Path, clone)), {}
    print(json.dumps({"note": side.note}), file=answers)
    for line in sys.stdin:
        task = json.loads(line)
        kind = task["kind"]
        if task.get("choose"):
            chosen[kind] = choose(side, task)
            answer = {"variant": chosen[kind]}
        else:
            answer = measure(side, chosen.get(kind) or side.ways(kind)[0], task)
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    serve(*sys.argv[1:])
