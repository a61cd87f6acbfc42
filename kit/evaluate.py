"""The loss of a model on a whole split, also as perplexity and as bits per byte."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kit.device import DTYPES, autocast, choose_dtype, name_of
from kit.distributed import Ranks, say
from kit.finding import find_checkpoint, find_run, same_tokenizer
from kit.loading import load_model
from model import GPT

Batch = tuple[np.ndarray, np.ndarray]  # x, y: int64 (B, T), y = -1 where there is no target


@torch.no_grad()
def evaluate(model: GPT, batches: Iterable[Batch], byte_lengths: np.ndarray, separator: int | None,
             precision: Callable[[], AbstractContextManager],
             stop: Callable[[], bool] = lambda: False,
             add: Callable[..., Iterable[float]] = lambda *sums: sums) -> dict[str, float] | None:
    """{"loss": nats per token, "perplexity", "bpb": bits per byte}, or None when stop() said so.

    byte_lengths: (V,) bytes of text behind each token. A separator is no text: its loss counts in
    loss and perplexity, but not in bits per byte, so that tokenizers can be compared. `add` sums
    over the ranks that share the batches.
    """
    device, was_training = model.wte.weight.device, model.training
    hidden, loss_of = (getattr(model, f"{name}_apart", getattr(model, name))
                       for name in ("hidden", "loss"))  # see Ranks.place
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
                loss, n = loss_of(h, y)
                if is_separator.any():
                    separators += loss_of(h[is_separator], y[is_separator])[0].item()
            total += loss.item()
            tokens += int(n)
            n_bytes += int(lengths[y[(y >= 0) & ~is_separator]].sum())
    finally:
        model.train(was_training)
        if hasattr(model, "reshard"):  # FSDP: backward would do it
            model.reshard()
    total, separators, tokens, n_bytes = add(total, separators, tokens, n_bytes)
    return {"loss": total / tokens, "perplexity": math.exp(min(total / tokens, 700)),
            "bpb": (total - separators) / math.log(2) / max(n_bytes, 1)}


def eval_batches(split: Any, block_size: int, batch_size: int,
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


def evaluate_only(s: Any, source: Path | None, data: Any, device: torch.device,
                  ranks: Ranks) -> int:
    """Say the loss of a run's best checkpoint, or of `source`; nothing is written."""
    folder = source or Path(ranks.once(lambda: str(find_checkpoint(find_run(s.out_dir)))))
    same_tokenizer(folder, data.tokenizer)
    model, _, state = load_model(folder)
    batches = eval_batches(data.val, model.config.block_size, s.batch_size, s.eval_iters,
                           ranks.rank, ranks.world)
    dtype = DTYPES[ranks.once(lambda: name_of(choose_dtype(s.dtype, device)))]
    result = evaluate(model.to(device), batches, data.token_byte_lengths(), data.separator,
                      partial(autocast, device, dtype), add=ranks.add)
    say(f"{folder}, step {state['step']}: {spell_loss(result)}")
    return 0
