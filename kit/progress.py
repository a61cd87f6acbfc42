"""Progress: what moves while training beside the weights and the optimizer, and its summary."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import torch

from kit.errors import UserError
from kit.settings import fits


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

    def is_spike(self, norm: float, limit: float) -> bool:
        """Whether a gradient's norm is `limit` times the usual one or worse; keeps the count.

        NaN always is; limit 0 counts nothing as a spike.
        """
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


def is_number(value: Any) -> bool:
    """Whether it is a number that a log or state of ours may hold."""
    return type(value) in (int, float, bool) and abs(value) < 2**63


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
