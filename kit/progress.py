"""What a run knows and tells: progress, log.jsonl, loss.png, wandb, times, peak memory."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

import torch

from kit.errors import UserError
from kit.files import replacing, size_of
from kit.settings import fits

FORMAT = 1
LONGEST_LINE = 1 << 16  # of a log, in characters
MOST_ROWS = 20_000  # kept in memory, for the curve
CURVE = ("format", "step", "loss", "val_loss", "val_bpb")


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
    seconds: dict = field(default_factory=dict)  # by what took them
    mean_norm: float = 0.0  # running mean of the gradient's norm, without what was skipped
    skipped: int = 0  # updates that were left out as spikes
    skipped_in_a_row: int = 0

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Progress":
        """What `asdict` gave, from a checkpoint; an older one may lack some. UserError if odd."""
        hints = get_type_hints(cls)
        known = {name: state[name] for name in hints if name in state}
        seconds = known.get("seconds")
        odd = [name for name, value in known.items()
               if not fits(value, hints[name]) or (type(value) in (int, float) and
                                                   not 0 <= value < 2**63)]
        if isinstance(seconds, dict) and not all(map(is_number, seconds.values())):
            odd.append("seconds")
        if odd := odd or [name for name in ("step", "rows", "tokens") if name not in known]:
            raise UserError(f"state.json: {odd[0]} is {known.get(odd[0])!r:.50}; this is no state "
                            "of ours")
        return cls(**known)

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

    def odd_norm(self, norm: float, limit: float) -> bool:
        """Whether a gradient's norm is `limit` times the usual one or worse; keeps the count."""
        seen = self.step - self.skipped
        finite = math.isfinite(norm)
        if limit and (not finite or (seen >= 20 and norm > limit * self.mean_norm)):
            self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
            return True
        if finite:
            self.mean_norm += (norm - self.mean_norm) / min(seen + 1, 100)
        self.skipped_in_a_row = 0
        return False

    def closing(self, peak_tok_s: float, device_type: str) -> Iterator[str]:
        """The lines that sum up a run; peak_tok_s: tokens/s if all were one large product."""
        if self.best_loss is not None:
            yield (f"best: step {self.best_step:,}, validation loss {self.best_loss:.4f}, "
                   f"{self.best_bpb:.4f} bits per byte; last {self.val_loss:.4f}, "
                   f"{self.val_bpb:.4f}")
        tok_s = self.tokens / max(self.train_s, 1e-9)
        yield (f"{self.tokens:,} tokens in {spell_time(self.train_s)} of training, "
               f"{tok_s:,.0f} tokens/s, {tok_s / peak_tok_s:.0%} of what one large product would "
               "allow (MFU)")
        if self.skipped:
            yield f"{self.skipped:,} of {self.step:,} updates were skipped as spikes"
        yield f"{spell_time(self.elapsed_s)} in all: {self.shares()}"
        yield f"peak memory {peak_memory(device_type) / 2**20:,.0f} MiB"


def describe(state: dict[str, Any]) -> str:
    """'step 100, validation loss 2.1000, 3.0000 bits per byte, ' of a checkpoint's state."""
    p = Progress.from_state(state)
    loss = f"validation loss {p.val_loss:.4f}, {p.val_bpb or 0:.4f} bits per byte, " \
        if p.val_loss else ""
    return f"step {p.step}, {loss}"


class Log:
    """log.jsonl, one JSON object a line, the first with the format version.

    A run that goes on is cut back to its checkpoint: `step`, and the last evaluation made by then.
    """

    def __init__(self, path: Path, step: int = 0, last_eval: int = 0):
        self.path, self.rows, self.stride, self.seen = path, [], 1, 0
        old = read_log(path) if step and path.exists() else ()
        kept = (row for row in old if "format" not in row
                and row["step"] <= (last_eval if "val_loss" in row else step))
        with replacing(path) as aside, aside.open("w", encoding="utf-8") as f:
            for row in chain([{"format": FORMAT, "step": 0}], kept):
                f.write(to_line(row))
                self.keep(row)

    def write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as f:
            f.write(to_line(row))
        self.keep(row)

    def keep(self, row: dict[str, Any]) -> None:
        """Remember what the curve needs of a row; of very many every second one is enough."""
        self.seen += 1
        if "val_loss" in row or self.seen % self.stride == 0:
            self.rows.append({k: v for k, v in row.items() if k in CURVE})
        if len(self.rows) > MOST_ROWS:
            self.stride *= 2  # alike over the whole run
            train = [r for r in self.rows if "val_loss" not in r][::2]
            val = [r for r in self.rows if "val_loss" in r]
            val = val[::2] if len(val) > MOST_ROWS // 2 else val
            self.rows = sorted(train + val, key=lambda r: r["step"])


def to_line(row: dict[str, Any]) -> str:
    """A row as JSON, which has no NaN and no infinity: they become null."""
    odd = {k: None for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    return json.dumps(row | odd) + "\n"


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a log; what a crash tore is left out."""
    size_of(path)  # a plain file?
    with path.open(encoding="utf-8", errors="replace") as f:
        while line := f.readline(LONGEST_LINE):
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and is_number(row.get("step")) and row["step"] >= 0:
                    yield {k: v for k, v in row.items() if v is None or is_number(v)}


def is_number(value: Any) -> bool:
    """Whether it is a number that a log or state of ours may hold."""
    return type(value) in (int, float, bool) and abs(value) < 2**63


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
    with replacing(path) as aside:
        fig.savefig(aside, dpi=120, format="png")


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
