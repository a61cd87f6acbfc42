"""The loss of a model on a whole split, also as perplexity and as bits per byte."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from model import GPT


@torch.no_grad()
def evaluate(model: GPT, batches: Iterable[tuple[np.ndarray, np.ndarray]], byte_lengths: np.ndarray,
             separator: int | None, autocast: Callable[[], AbstractContextManager],
             stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
    """{"loss": nats per token, "perplexity", "bpb": bits per byte}, or None when stop() said so.

    batches: (x, y) of int64 (B, T), y = -1 where there is no target.
    byte_lengths: (V,) bytes of text behind each token. A separator is no text: its loss counts in
    loss and perplexity, but not in bits per byte, so that tokenizers can be compared.
    """
    device, was_training = model.wte.weight.device, model.training
    lengths = torch.from_numpy(byte_lengths).to(device)
    text_loss = separator_loss = 0.0  # nats, in double precision
    tokens = n_bytes = 0
    model.eval()
    try:
        for x, y in batches:
            if stop():
                return None
            x, y = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
            with autocast():
                h = model.hidden(x)
                loss, n = model.loss(h, y)
                mark = y == (-2 if separator is None else separator)
                marks = model.loss(h[mark], y[mark])[0].item() if mark.any() else 0.0
            text_loss, separator_loss = text_loss + loss.item() - marks, separator_loss + marks
            tokens += int(n)
            n_bytes += int(lengths[y[(y >= 0) & ~mark]].sum())
    finally:
        model.train(was_training)
    mean = (text_loss + separator_loss) / tokens
    return {"loss": mean, "perplexity": math.exp(min(mean, 700)),
            "bpb": text_loss / math.log(2) / max(n_bytes, 1)}


def eval_batches(split: Any, block_size: int, batch_size: int,
                 eval_iters: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Fixed windows of a split, (x, y) of (batch_size, block_size): each token a target once.

    eval_iters > 0 takes so many batches, spread evenly over the split, instead of all.
    """
    windows = split.fixed_windows(block_size)
    if not eval_iters:  # the result is the same for any batch size; small ones would be slow
        batch_size = max(batch_size, 4096 // block_size)
    starts = range(0, windows, batch_size)
    n = min(eval_iters or len(starts), len(starts))
    for i in (starts[k * len(starts) // n] for k in range(n)):
        yield split.window(i, min(batch_size, windows - i), block_size)


def spell_loss(result: dict[str, float]) -> str:
    """What `evaluate` gave, for a person."""
    return (f"validation loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}, "
            f"{result['bpb']:.4f} bits per byte")
