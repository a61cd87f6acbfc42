"""What the benchmarks of training share: processes that run alone, our trials, the machine."""

import json
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

CLONE = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


class TrialFailed(Exception):
    """A process of a benchmark that ended badly; the text is the end of its stderr."""


class Finished(NamedTuple):
    """What a process leaves."""

    stdout: str
    seconds: float  # from its start to its end
    peak_mib: float  # the most memory that it held


class Trial(NamedTuple):
    """One training run, ours or nanoGPT's."""

    update_s: list[float]  # seconds of each update
    update_tokens: float  # tokens of one
    curve: list[tuple[int, float, float]]  # (updates, seconds of training, validation loss)
    seconds: float  # of the whole process
    peak_mib: float  # on the GPU if that is where it ran
    shape: dict[str, Any]  # of our GPTConfig; {} for nanoGPT, whose shape is the same
    dtypes: str = ""  # of our products and, if it is the optimizer, of Muon's


def tell(line: str) -> None:
    """Progress goes to stderr: stdout has the tables."""
    print(line, file=sys.stderr, flush=True)


def alone(command: list[str | Path], cwd: Path = CLONE, env: dict[str, str] | None = None
          ) -> Finished:
    """Run a process to its end; TrialFailed if it fails.

    Its peak is what the system tells of it. The process that calls should be small: on Linux a
    child's peak cannot be below what its parent held when it was started, so no torch up here.
    """
    files = [tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") for _ in range(2)]
    with files[0] as out, files[1] as err:
        start = time.perf_counter()
        process = subprocess.Popen(list(map(str, command)), cwd=cwd, stdin=subprocess.DEVNULL,
                                   stdout=out, stderr=err, env=os.environ | (env or {}))
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds, process.returncode = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            last = "\n".join(err.read().splitlines()[-8:])
            raise TrialFailed(f"{Path(command[1]).name} ended with {process.returncode}:\n{last}")
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return Finished(out.read(), seconds, usage.ru_maxrss / unit)


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, called in a fresh process: it may need torch or much memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def ours(config: str, flags: list[str], out: Path) -> Trial:
    """Run our train.py; its folder is read and removed."""
    done = alone([sys.executable, CLONE / "train.py", config, *flags, f"--out_dir={out}",
                  "--init_from=scratch", "--overwrite=True"], env={"BONSAI_OUT": str(out.parent)})
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]
    run = json.loads((out / "config.json").read_text("utf-8"))
    model = json.loads(next(out.glob("ckpt/*/model.json")).read_text("utf-8"))
    shutil.rmtree(out)
    updates = [{"step": 0, "train_s": 0.0}] + [row for row in rows if "loss" in row]
    peak = re.search(r"peak memory ([\d,]+) MiB", done.stdout)
    on_gpu = run["device"] == "cuda" and peak
    return Trial(
        [(b["train_s"] - a["train_s"]) / (b["step"] - a["step"])
         for a, b in zip(updates, updates[1:], strict=False)],
        updates[-1]["tokens"] / updates[-1]["step"],
        [(row["step"], row["train_s"], row["val_loss"]) for row in rows if "val_loss" in row],
        done.seconds, float(peak[1].replace(",", "")) if on_gpu else done.peak_mib,
        {name: value for name, value in model.items() if name not in ("format", "seal")},
        " ".join(run[name] for name in ("dtype", "muon_dtype") if run[name]))


def sizes(shapes: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(parameters, FLOPs of a token) of shapes; call it apart, it imports torch."""
    import torch

    from kit.device import flops_per_token
    from model import GPT, GPTConfig

    with torch.device("meta"):
        models = [GPT(GPTConfig(**shape)) for shape in shapes]
    return [(m.num_params(), flops_per_token(m)) for m in models]


def cpu_peaks() -> dict[str, float]:
    """FLOP/s of 2048 x 2048 products, the best of several; call it apart, it imports torch.

    Not of bf16 where the processor is far slower at it: one product may take ten seconds.
    """
    import torch

    from kit.device import bf16_gain, matmul_seconds

    dtypes = {"bf16": torch.bfloat16} if bf16_gain() > 0.3 else {}
    return {name: 2 * 2048**3 / min(matmul_seconds(dtype, n=2048) for _ in range(5))
            for name, dtype in (dtypes | {"fp32": torch.float32}).items()}


def commit(folder: Path) -> str | None:
    """The short name of a git folder's commit, if there is one."""
    try:
        done = subprocess.run(["git", "-C", str(folder), "describe", "--always", "--dirty"],
                              capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def introduce(peer: Path | None = None) -> tuple[Row, float]:
    """Print what this machine is and what it can -> (the row to begin with, its best FLOP/s)."""
    peaks, row = apart(cpu_peaks), machine() | ({"nanogpt": commit(peer)} if peer else {})
    print(f"{row['cpu']}, {row['cores']} cores, torch {row['torch']}; products of 2048 x 2048: "
          f"{', '.join(f'{name} {peak / 1e9:,.0f}' for name, peak in peaks.items())} GFLOP/s; "
          "MFU is the share of the faster", flush=True)
    row["peak_gflops"] = {name: round(peak / 1e9, 1) for name, peak in peaks.items()}
    return row, max(peaks.values())


def machine() -> Row:
    """Date, our commit, torch and the processor, for the row of results."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return {"date": date.today().isoformat(), "commit": commit(CLONE), "torch": version("torch"),
            "cpu": found[1].strip() if found else platform.processor() or platform.machine(),
            "cores": os.cpu_count(), "threads": os.environ.get("OMP_NUM_THREADS", "default")}


def medians(rows: list[Row], by: str) -> list[Row]:
    """For each value of the column `by` one row: of numbers the median, None where one is missing.
    """
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[by], []).append(row)

    def middle(values: list[Any]) -> Any:
        if all(isinstance(value, (int, float)) for value in values):
            return statistics.median(values)
        return values[0] if len(set(map(str, values))) == 1 else None

    return [{key: middle([row[key] for row in group]) for key in group[0]}
            for group in groups.values()]


def print_table(rows: list[Row], columns: list[tuple[str, str, str]]) -> None:
    """Columns are (key, title, format of a number); what is missing or None shows as '-'."""
    def cell(value: Any, form: str) -> str:
        return "-" if value is None else format(value, "" if isinstance(value, str) else form)

    lines = [[title for _, title, _ in columns]] + [
        [cell(row.get(key), form) for key, _, form in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)).rstrip())


def keep(row: Row, out: Path, name: str, show: bool = True) -> None:
    """Print the row of all figures, to six digits, and append it to OUT/name.

    show: False appends without printing.
    """
    rounded = json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.6g}"))
    line = json.dumps(rounded)
    out.mkdir(parents=True, exist_ok=True)
    with (out / name).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    if show:
        print(line)
