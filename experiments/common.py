"""What all experiments share: the command, trials, spreads, tables, saved results.

An experiment is a module with three functions, and `common.command` makes a command of them:

    measure(lab) -> result    numbers that JSON can hold; lab.quick asks for the smallest size
    table(result) -> rows     of text, the heads first
    draw(result, fig)         on an empty figure of matplotlib, 10 x 4.5 inches
"""

import importlib
import json
import math
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from data.prepare import Parser
from kit import errors
from kit.files import replacing, write_text
from kit.run.locate import out_root
from kit.settings import CLONE

FORMAT = 1  # of a saved result
RESULTS, FIGURES = CLONE / "experiments" / "results", CLONE / "docs" / "figures"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a5195", "#56b4e9", "#8c6d1f", "#333333")
# Student's t for 95 %, two-sided, of 1 to 30 degrees of freedom; of more it is 1.96 + 2.4 / them
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
       2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
       2.052, 2.048, 2.045, 2.042)
Result, Rows = dict[str, Any], Sequence[Sequence[str]]


class Lab:
    """Where an experiment runs its trials: at which size, in how many processes."""

    def __init__(self, quick: bool = False, workers: int = 1):
        self.quick, self.workers = quick, workers

    def trials(self, trial: Callable[..., Any], jobs: Sequence[dict[str, Any]]) -> list[Any]:
        """[trial(**job) for job in jobs], side by side in processes of one thread each.

        So results are the same for any number of workers. trial: a function at the top of a module.
        """
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.workers, context, begin_process) as pool:
            try:
                futures = [pool.submit(trial, **job) for job in jobs]
                for future in tqdm(as_completed(futures), total=len(jobs), unit="trial"):
                    future.result()  # raises what the trial raised
            except BaseException as e:  # ends all other trials, too
                for process in multiprocessing.active_children():
                    process.kill()
                if isinstance(e, BrokenProcessPool):
                    raise errors.UserError("a process of trials was killed, perhaps because memory "
                                           "ran out; --workers=1 takes less") from None
                raise
        return [future.result() for future in futures]


def begin_process() -> None:
    """What each process of trials does first."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its trials

    def follow() -> None:  # a parent that is killed cannot end them
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def select(runs: Sequence[Result], **settings: Any) -> list[Result]:
    """The runs with these settings: one a seed."""
    return [run for run in runs if all(run[key] == value for key, value in settings.items())]


def format_mean(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation of the seeds: '1.234 ± 0.005'."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean of a - b, pair by pair (seed by seed), and half the width of its 95 % interval.

    The interval is Student's for paired values: beyond noise is a mean larger than that half width.
    """
    pairs = [x - y for x, y in zip(a, b, strict=True)]
    if len(pairs) < 2:
        return pairs[0], math.inf
    error = statistics.stdev(pairs) / math.sqrt(len(pairs))
    freedom = len(pairs) - 1
    t = T95[freedom - 1] if freedom <= len(T95) else 1.96 + 2.4 / freedom
    return statistics.fmean(pairs), t * error


def format_difference(a: Sequence[float], b: Sequence[float], digits: int = 3) -> str:
    """'+0.123 (± 0.045)': mean of a - b and half of its 95 % interval."""
    mean, half = difference(a, b)
    return f"{mean:+.{digits}f} (± {half:.{digits}f})"


def command(name: str) -> None:
    """Run the experiment experiments/<name>.py as a command; exits."""
    errors.run(lambda argv: main(name, argv))


def main(name: str, argv: list[str]) -> int:
    module = importlib.import_module(f"experiments.{name}")  # by its name, as processes know it
    parser = Parser(prog=f"python -m experiments.{name}", allow_abbrev=False,
                    description=(module.__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the smallest size, below a minute; "
                        "docs/ and experiments/results stay as they are")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1),
                        help="trials side by side, of one thread each (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error(f"--workers={args.workers}: must be at least 1")
    results, figures = (out_root() / "experiments",) * 2 if args.quick else (RESULTS, FIGURES)
    results.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # in processes of trials, for other libraries than torch
    made, begun = commit(), time.perf_counter()
    result = module.measure(Lab(args.quick, args.workers))
    seconds = round(time.perf_counter() - begun, 1)
    text = to_json({"format": FORMAT, "name": name, "quick": args.quick, "date": str(date.today()),
                    "commit": made, "torch": torch.__version__, "python": sys.version.split()[0],
                    "workers": args.workers, "seconds": seconds, "result": rounded(result)})
    write_text(results / f"{name}.json", text)
    result = json.loads(text)["result"]
    figure(module, result, figures / f"{name}.png")
    print(to_text(module.table(result)))
    print(f"{seconds:.0f} s; {results / name}.json and {figures / name}.png"
          + ("" if args.quick else "; python -m experiments.all puts them into docs"),
          file=sys.stderr)
    return 0


def rounded(value: Any) -> Any:
    """The same with numbers of seven digits: more are noise, and hard to read."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def to_json(record: dict[str, Any]) -> str:
    """JSON with a list of numbers on a line."""
    text = json.dumps(record, indent=1)
    return re.sub(r"\[[^][{}\"]*\]", lambda m: re.sub(r"\s+", " ", m[0]), text) + "\n"


def commit() -> str:
    """The clone's commit, with a + if what experiments are made of differs from it."""
    parts = ["model.py", "kit", "data/*.py", "experiments/*.py"]
    git = partial(subprocess.check_output, cwd=CLONE, text=True, stderr=subprocess.DEVNULL)
    try:
        changed = git(["git", "status", "--porcelain", *parts])
        return git(["git", "log", "-1", "--format=%h"]).strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # a clone without git
        return ""


def load(name: str) -> dict[str, Any]:
    """The record of the full form, as experiments/results holds it; UserError if it does not."""
    path = RESULTS / f"{name}.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']}, expected {FORMAT}")
    except (FileNotFoundError, ValueError, LookupError, TypeError) as e:
        raise errors.UserError(f"{path} is missing or broken ({e}); `python -m experiments.{name}` "
                               "makes it again") from None
    return record


def draw_seeds(ax: Any, x: Sequence[Any], seeds: Sequence[Sequence[float]], color: str,
               label: str | None = None) -> None:
    """A line through the means of seeds (points, seeds), and a dot for each seed."""
    ax.plot(x, [np.mean(point) for point in seeds], color=color, label=label)
    for at, point in zip(x, seeds, strict=True):
        ax.plot([at] * len(point), point, ".", color=color)


def draw_differences(ax: Any, x: Sequence[float], a: Sequence[Sequence[float]],
                     b: Sequence[Sequence[float]], color: str, label: str) -> None:
    """The mean of a - b at each x with its 95 % interval; a, b (points, seeds)."""
    mean, half = np.transpose([difference(*pair) for pair in zip(a, b, strict=True)])
    ax.errorbar(x, mean, np.where(np.isfinite(half), half, 0), color=color, label=label, fmt="o-",
                markersize=4, capsize=3, elinewidth=1)


def figure(module: Any, result: Result, path: Path) -> None:
    """Draw the result into a PNG that can be read at the width of a README."""
    from matplotlib import rc_context  # slow to import
    from matplotlib.figure import Figure  # needs no display

    with rc_context({"font.size": 12, "lines.linewidth": 1.8, "legend.frameon": False}):
        fig = Figure(figsize=(10, 4.5), layout="constrained")
        module.draw(result, fig)
        for ax in fig.axes:
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(alpha=0.25)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as aside:
            fig.savefig(aside, dpi=130, format="png")


def to_text(rows: Rows) -> str:
    """A table for the terminal: the first column on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([first.ljust(widths[0]), *(
        cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]).rstrip()
        for first, *rest in rows)


def to_markdown(rows: Rows) -> str:
    heads, *body = rows
    lines = [heads, ["-"] + ["-:"] * (len(heads) - 1), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
