"""How long does `python sample.py` take to its first token? Beside `import torch` alone."""

import os
import statistics
import string
import subprocess
import sys
import time
from pathlib import Path

from bench.common import CLONE, ProcessFailed, Row, log

PROMPT = "First"
TINY = ("--tokenizer=char --n_layer=4 --n_head=4 --n_embd=128 --block_size=64 --device=cpu "
        "--max_iters=1 --warmup_iters=0 --eval_iters=1").split()


def seconds_to_byte(number: int, command: list[str], env: dict[str, str]) -> float:
    """Seconds from the start of a process to a byte of its stdout, -1: to its end.

    ProcessFailed if it fails.
    """
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], cwd=CLONE, env=os.environ | env,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    seen = len(process.stdout.read(number))
    seconds = time.perf_counter() - start
    errors = process.communicate()[1].decode(errors="replace")
    if process.returncode or seen < number:
        end = "\n".join(errors.splitlines()[-8:])
        raise ProcessFailed(f"{command[0]} ended with {process.returncode} after {seen} bytes:\n"
                            f"{end}")
    return seconds


def measure_start(work: Path, rounds: int) -> Row:
    """Medians of both, in turns, after one turn that warms the file cache."""
    env = {"BONSAI_OUT": str(work), "BONSAI_DATA": str(work / "data")}
    text = work / "text.txt"
    text.write_text(string.printable * 20, newline="")
    run = f"--out_dir={work / 'run'}"
    seconds_to_byte(1, ["train.py", f"--dataset={text}", run, *TINY], env)
    write = ["sample.py", run, f"--prompt={PROMPT}", "--max_new_tokens=16"]
    found = []
    for number in range(rounds + 1):
        found.append((seconds_to_byte(len(PROMPT) + 1, write, env),
                      seconds_to_byte(-1, ["-c", "import torch"], env)))
        log(f"start {number} of {rounds}: first token {found[-1][0]:.2f} s, "
            f"import torch {found[-1][1]:.2f}")
    first, imported = map(statistics.median, zip(*found[1:], strict=True))
    return {"first_token_s": first, "import_torch_s": imported}
