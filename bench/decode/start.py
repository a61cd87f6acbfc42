"""How long does `python sample.py` take to its first token? Against `import torch` alone."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.trial import CLONE, Row, TrialFailed, apart, tell

PROMPT = "First"
SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}


def make_run(folder: Path) -> None:
    """An untrained model of characters as a run folder; it imports torch: call it apart."""
    import torch

    from data.tokenizer import make_tokenizer
    from kit.run.store import save
    from model import GPT, GPTConfig

    tokenizer = make_tokenizer("char", ["".join(map(chr, range(32, 127))) + "\n"])
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **SHAPE))
    folder.mkdir(parents=True)
    state = {"step": 1, "rows": 0, "tokens": 0, "val_loss": 1.0, "val_bpb": 1.0,
             "finished": True, "best_step": 1}
    weights = {name: p.detach() for name, p in model.named_parameters()}
    save(folder, model.config, weights, {}, tokenizer.to_json(), state, 1)


def spans(command: list[str], after: int, env: dict[str, str]) -> tuple[float, float]:
    """Seconds from the start of a process to byte number `after` + 1 on stdout, and to its end."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=CLONE, env=os.environ | env, stderr=errors,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        seen, first = 0, None
        while data := os.read(process.stdout.fileno(), 4096):
            seen += len(data)
            if first is None and seen > after:
                first = time.perf_counter() - start
        code = process.wait()
        end = time.perf_counter() - start
        process.stdout.close()
        if code or first is None:
            errors.seek(0)
            last = "\n".join(errors.read().splitlines()[-8:])
            raise TrialFailed(f"{command[1]} ended with {code} after {seen} bytes:\n{last}")
    return first, end


def measure_start(work: Path, repeats: int) -> Row:
    """Medians of both, in turns, after one turn that warms the file cache.

    first_token_s: to the first byte after the prompt. import_torch_s: `python -c "import torch"`
    from its start to its end; import_torch_done_s: to the moment when torch is imported.
    """
    apart(make_run, work / "run")
    write = [sys.executable, "sample.py", f"--out_dir={work / 'run'}", f"--prompt={PROMPT}",
             "--max_new_tokens=16"]
    torch = [sys.executable, "-c", "import torch; print(flush=True)"]
    env, found = {"BONSAI_OUT": str(work)}, []
    for number in range(repeats + 1):
        first, done = spans(write, len(PROMPT), env)[0], spans(torch, 0, env)
        found.append((first, done[1], done[0]))
        tell(f"start {number} of {repeats}: first token {first:.2f} s, import torch {done[1]:.2f}")
    names = "first_token_s", "import_torch_s", "import_torch_done_s"
    return dict(zip(names, map(statistics.median, zip(*found[1:], strict=True)), strict=True))
