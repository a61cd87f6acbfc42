"""The loss of a model on a whole split, also as perplexity and as bits per byte.

As a command, `python -m kit.evaluate [RUN] [--dataset=NAME_OR_PATH]` says it of a checkpoint.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kit.device import device_of
from model import GPT

Batch = tuple[np.ndarray, np.ndarray]  # x, y: int64 (B, T), y = -1 where there is no target


class Windows(Protocol):
    """A split of a data set, as `data` has it."""

    def fixed_windows(self, block_size: int) -> int: ...

    def window(self, i: int, n: int, block_size: int) -> Batch: ...


@torch.no_grad()
def evaluate(model: GPT, batches: Iterable[Batch], byte_lengths: np.ndarray, separator: int | None,
             precision: Callable[[], AbstractContextManager],
             stop: Callable[[], bool] = lambda: False,
             add: Callable[..., Iterable[float]] = lambda *sums: sums,
             loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
             ) -> dict[str, float] | None:
    """{"loss": nats per token, "perplexity", "bpb": bits per byte, "tokens", "bytes"}, or None when
    stop() said so. Tokens and bytes are what was measured.

    byte_lengths: (V,) bytes of text behind each token. A separator is no text: its loss counts in
    loss and perplexity, but not in bits per byte, so that tokenizers can be compared. `add` sums
    over the ranks that share the batches. loss: in the place of GPT.loss.
    """
    device, was_training = device_of(model), model.training
    hidden = getattr(model, "hidden_apart", model.hidden)  # FSDP's, see Ranks.wrap
    loss_of = loss or getattr(model, "loss_apart", model.loss)
    lengths = torch.from_numpy(byte_lengths).to(device)
    total = separators = 0.0  # nats, in double precision
    tokens = n_bytes = 0
    model.eval()
    try:
        for x, y in batches:
            if stop():
                return None
            x, y = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
            is_separator = y == (-2 if separator is None else separator)
            with precision():
                h = hidden(x)
                summed, n = loss_of(h, y)
                if is_separator.any():
                    separators += loss_of(h[is_separator], y[is_separator])[0].item()
            total += summed.item()
            tokens += int(n)
            n_bytes += int(lengths[y[(y >= 0) & ~is_separator]].sum())
    finally:
        model.train(was_training)
        if hasattr(model, "reshard"):  # FSDP: backward would do it
            model.reshard()
    total, separators, tokens, n_bytes = add(total, separators, tokens, n_bytes)
    return {"loss": total / tokens, "perplexity": math.exp(min(total / tokens, 700)),
            "bpb": (total - separators) / math.log(2) / max(n_bytes, 1),
            "tokens": tokens, "bytes": n_bytes}


def eval_batches(split: Windows, block_size: int, batch_size: int,
                 eval_iters: int = 0, rank: int = 0, world: int = 1) -> Iterator[Batch]:
    """Fixed windows of a split, (batch_size, block_size), each token a target once.

    eval_iters > 0 takes so many batches, spread evenly over the split, instead of all. Ranks share
    them; each has as many as the others, so the last of some are without a target.
    """
    windows = split.fixed_windows(block_size)
    if not eval_iters:  # the result is the same for any batch size; small ones would be slow
        batch_size = max(batch_size, 4096 // block_size)
    starts = range(0, windows, batch_size)
    n = min(eval_iters or len(starts), len(starts))
    chosen = [starts[k * len(starts) // n] for k in range(n)] + [windows] * (-n % world)
    for i in chosen[rank::world]:
        yield split.window(i, min(batch_size, max(1, windows - i)), block_size)


def spell_loss(result: dict[str, float]) -> str:
    """What `evaluate` gave, for a person."""
    return (f"validation loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}, "
            f"{result['bpb']:.4f} bits per byte")


if __name__ == "__main__":
    from kit.errors import run
    from kit.measure import main

    run(main)
