"""What a run tells: log.jsonl, loss.png, wandb, times in words, peak memory."""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORMAT = 1


class Log:
    """log.jsonl: one JSON object a line, the first of which carries the format version.

    A run that goes on is cut back to its checkpoint: `step`, and the last evaluation made by then.
    A last line that was torn by a crash goes with what is cut.
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
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


class Wandb:
    """Weights & Biases, if asked for; whatever fails there is one warning and the run goes on."""

    def __init__(self, on: bool, project: str, name: str, config: dict[str, Any],
                 warn: Callable[[str], None]):
        self.warn, self.run = warn, None
        if on:
            self.guard(lambda wandb: setattr(
                self, "run", wandb.init(project=project, name=name, config=config)))

    def guard(self, action: Callable[[Any], Any]) -> None:
        try:
            import wandb  # here, because it is slow to import and off by default

            action(wandb)
        except Exception as e:  # a logger must not end a run, whatever it raises
            self.run = None
            reason = " ".join(f"{type(e).__name__}: {e}".split())
            self.warn(f"wandb is off from here on, log.jsonl goes on: {reason}")

    def log(self, row: dict[str, Any]) -> None:
        if self.run:
            self.guard(lambda _: self.run.log(row, step=row["step"]))

    def finish(self) -> None:
        if self.run:
            self.guard(lambda _: self.run.finish())


def draw_loss(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """loss.png: the training loss (faint), its running mean, the validation loss."""
    from matplotlib.figure import Figure  # here, because it is slow to import; needs no display

    train = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None]
    val = [(r["step"], r["val_loss"], r.get("val_bpb")) for r in rows
           if r.get("val_loss") is not None]
    fig = Figure(figsize=(8, 4.5), layout="constrained")
    ax = fig.subplots()
    if train:
        steps, losses = zip(*train, strict=True)
        ax.plot(steps, losses, color="#9ecae1", linewidth=0.8, label="training, each update")
        ax.plot(steps, running_mean(losses), color="#2171b5", label="training, running mean")
    if val:
        steps, losses, bpb = zip(*val, strict=True)
        ax.plot(steps, losses, "o-", color="#d94801", markersize=4, label="validation")
        best = min(range(len(val)), key=losses.__getitem__)
        text = f"best {losses[best]:.3f}" + (f" = {bpb[best]:.3f} bits/byte" if bpb[best] else "")
        ax.annotate(text, (steps[best], losses[best]), xytext=(-4, 22), ha="right",
                    textcoords="offset points", arrowprops={"arrowstyle": "-", "color": "#777777"})
    ax.set(xlabel="update", ylabel="loss (nats per token)")
    ax.set_title(title, parse_math=False)  # a folder may be called $x_{
    ax.grid(alpha=0.3)
    ax.margins(x=0.02)
    if train or val:
        ax.legend(loc="upper right")
    aside = path.with_name(".tmp-" + path.name)
    fig.savefig(aside, dpi=120, format="png")
    os.replace(aside, path)


def running_mean(values: tuple[float, ...] | list[float], share: float = 0.05) -> list[float]:
    """Exponential mean over about `share` of the values, corrected for its start."""
    decay = 1 - 1 / max(1.0, share * len(values))
    mean, weight, out = 0.0, 0.0, []
    for v in values:
        mean, weight = decay * mean + (1 - decay) * v, decay * weight + (1 - decay)
        out.append(mean / weight)
    return out


def spell_time(seconds: float) -> str:
    """75 -> '1 min 15 s'"""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    return f"{s // 3600} h {s % 3600 // 60} min"


def peak_memory(device_type: str) -> int:
    """Bytes: the most that this process held, on the GPU if that is where it ran."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
