"""What a run knows and tells: progress, log.jsonl, loss.png, wandb, times, peak memory."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FORMAT = 1


@dataclass
class Progress:
    """All that moves while training, beside the weights and the optimizer; saved in state.json."""

    step: int = 0  # updates done
    rows: int = 0  # rows of the data consumed: the whole state of the loader
    tokens: int = 0
    val_loss: float | None = None  # of the last evaluation
    val_bpb: float | None = None
    last_eval: int = 0  # the step it was made at
    best_step: int = 0
    best_loss: float | None = None
    best_bpb: float | None = None
    worse: int = 0  # evaluations since the best
    elapsed_s: float = 0.0  # over all resumes
    train_s: float = 0.0  # without evaluating and saving
    finished: bool = False
    seconds: dict[str, float] = field(default_factory=dict)  # by what took them

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the time of a block under `what`; a GPU's work counts where it is waited for."""
        start = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start

    def shares(self) -> str:
        """'forward and backward 80%, optimizer 10%, ...', of all the time so far."""
        known = sum(self.seconds.values())
        total = max(self.elapsed_s, known, 1e-9)
        parts = (self.seconds | {"other": total - known}).items()
        return ", ".join(f"{what} {s / total:.1%}" for what, s in parts)


class Log:
    """log.jsonl, one JSON object a line, the first with the format version.

    A run that goes on is cut back to its checkpoint: `step`, and the last evaluation made by then.
    """

    def __init__(self, path: Path, step: int = 0, last_eval: int = 0):
        self.path, self.rows = path, [{"format": FORMAT, "step": 0}]
        if step and path.exists():
            self.rows += [row for row in read_log(path) if "format" not in row
                          and row["step"] <= (last_eval if "val_loss" in row else step)]
        aside = path.with_name(".tmp-" + path.name)
        aside.write_text("".join(map(to_line, self.rows)), encoding="utf-8")
        os.replace(aside, path)

    def write(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as f:
            f.write(to_line(row))


def to_line(row: dict[str, Any]) -> str:
    """A row as JSON, which has no NaN and no infinity: they become null."""
    odd = {k: None for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    return json.dumps(row | odd) + "\n"


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; what a crash tore is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]


class Wandb:
    """Weights & Biases, if asked for; whatever fails there is one warning and the run goes on."""

    def __init__(self, on: bool, project: str, name: str, config: dict[str, Any],
                 warn: Callable[[str], None]):
        self.run, self.warn = None, warn
        with self.guard():
            if on:
                import wandb  # here, because it is slow to import and off by default

                self.run = wandb.init(project=project, name=name, config=config)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as e:  # a logger must not end a run, whatever it raises
            self.run = None
            reason = " ".join(f"{type(e).__name__}: {e}".split())
            self.warn(f"wandb is off from here on, log.jsonl goes on: {reason}")

    def log(self, row: dict[str, Any]) -> None:
        with self.guard():
            if self.run:
                self.run.log(row, step=row["step"])

    def finish(self) -> None:
        with self.guard():
            if self.run:
                self.run.finish()


def draw_loss(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """loss.png: the training loss (faint), its running mean, the validation loss."""
    from matplotlib.figure import Figure  # here, because it is slow to import; needs no display

    fig = Figure(figsize=(8, 4.5), layout="constrained")
    ax = fig.subplots()
    train = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    if train:
        steps, losses = zip(*train, strict=True)
        ax.plot(steps, losses, color="#9ecae1", linewidth=0.8, label="training, each update")
        ax.plot(steps, running_mean(losses), color="#2171b5", label="training, running mean")
    val = [row for row in rows if row.get("val_loss") is not None]
    if val:
        best = min(val, key=lambda row: row["val_loss"])
        label = f"validation, best {best['val_loss']:.3f}"
        if best.get("val_bpb"):
            label += f" = {best['val_bpb']:.3f} bits/byte"
        ax.plot([row["step"] for row in val], [row["val_loss"] for row in val], "o-",
                color="#d94801", markersize=4, label=label)
    ax.set(xlabel="update", ylabel="loss (nats per token)")
    ax.set_title(title, parse_math=False)  # a folder may be called $x_{
    ax.grid(alpha=0.3)
    if train or val:
        ax.legend()
    aside = path.with_name(".tmp-" + path.name)
    fig.savefig(aside, dpi=120, format="png")
    os.replace(aside, path)


def running_mean(values: Sequence[float], share: float = 0.02) -> list[float]:
    """The mean of all values so far, and later an exponential one over `share` of them."""
    mean, means = 0.0, []
    for n, value in enumerate(values, 1):
        mean += (value - mean) / min(n, max(1.0, share * len(values)))
        means.append(mean)
    return means


def spell_time(seconds: float) -> str:
    """75 -> '1 min 15 s'"""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m} min" if hours else f"{m} min {s} s" if m else f"{s} s"


def peak_memory(device_type: str) -> int:
    """Bytes: the most that this process held, on the GPU if that is where it ran."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
