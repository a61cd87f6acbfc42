"""The tokens that rows of text see of a model, and writing on from there, token by token."""

from collections.abc import Callable, Generator

import torch
from torch import Tensor

from model import GPT, KVCache

CHUNK = 2048  # tokens that enter a cache at once: long prompts take no more memory than that


def read(model: GPT, idx: Tensor, cache: KVCache) -> Tensor:
    """GPT.hidden of tokens (B, T) that continue a cache, a bounded number of them at a time."""
    parts = idx.split(max(1, CHUNK // len(idx)), dim=1)
    return torch.cat([model.hidden(part, cache) for part in parts], dim=1)


class Window:
    """The tokens that each row sees, at most block_size of them, with their cache.

    idx: prompts (B, T), padded on the right where `lengths` (B,) are shorter; of a long one the
    newest block_size. Learned positions cannot slide: a full window is cut to its newest
    context_keep tokens (default: half) and read again; block_size - 1 is the classic slide.
    use_cache: False computes every step from scratch, to the same result. After an exception inside
    it is of no use.
    """

    def __init__(self, model: GPT, idx: Tensor, lengths: Tensor | None = None,
                 context_keep: int | None = None, use_cache: bool = True):
        (B, T), size = idx.shape, model.config.block_size
        self.model, self.keep = model, max(1, size // 2) if context_keep is None else context_keep
        if not 1 <= self.keep <= max(1, size - 1):
            raise ValueError(f"context_keep={self.keep}: must be from 1 to block_size-1={size - 1}")
        n = torch.full((B,), T, device=idx.device) if lengths is None else lengths
        if not ((n >= 1) & (n <= T)).all():
            raise ValueError(f"prompts of {n.tolist()} tokens in {T} columns: give at least one")
        newest = (n - size).clamp(min=0)[:, None] + torch.arange(size, device=idx.device)
        self.tokens = idx.gather(1, newest.clamp(max=T - 1))  # (B, size), n of a row are real
        self.n = n.clamp(max=size)
        self.use_cache = use_cache
        self.x = self.read_all()  # (B, C): final state of the newest token, what GPT.logits takes

    def read_all(self) -> Tensor:
        if len(self.n) > 1:  # else `read` makes it
            self.cache = self.model.new_cache(len(self.n))
        return self.read(torch.arange(len(self.n), device=self.n.device))

    def read(self, rows: Tensor) -> Tensor:
        """Read these rows from their first token on -> the state of the last of each (rows, C).

        On a CPU one by one: prompts are not faster together, and so each gets what it gets alone.
        """
        x = []
        for some in rows.split(1 if rows.device.type == "cpu" else len(rows)):
            n, whole = self.n[some], len(some) == len(self.n)
            cache = self.model.new_cache(len(some), None if whole else max(1, int(n.max())))
            if n.max() > 0:
                states = read(self.model, self.tokens[some, : n.max()], cache)
                cache.trim(n)
                x.append(states[torch.arange(len(some), device=n.device), n - 1])
            if whole:
                self.cache = cache
            else:
                self.cache.put(some, cache)
        return torch.cat(x) if x else self.x

    def append(self, ids: Tensor) -> Tensor:
        """Each row goes on with ids (B, T) -> their final states (B, T or 1, C)."""
        size = self.tokens.size(1)
        ids, T = ids[:, -size:], min(ids.size(1), size)
        if self.cache.longest + T > size:
            full = (self.n + T > size).nonzero()[:, 0]
            keep = max(0, self.keep - T)  # the new ones make it context_keep
            kept = (self.n[full] - keep)[:, None] + torch.arange(keep, device=ids.device)
            self.tokens[full, :keep] = self.tokens[full].gather(1, kept)
            self.n[full] = keep
            if self.use_cache:
                self.read(full)
        self.tokens.scatter_(1, self.n[:, None] + torch.arange(T, device=ids.device), ids)
        self.n = self.n + T
        x = read(self.model, ids, self.cache) if self.use_cache else self.read_all()[:, None]
        self.x = x[:, -1]
        return x

    def forget(self, n: int) -> None:
        """Keep the first n tokens of all rows; x is not set before the next `append`."""
        self.n = torch.full_like(self.n, n)
        self.cache.trim(n)

    def select(self, rows: Tensor) -> None:
        """Go on with these rows (indices), in this order; one may come several times."""
        self.tokens, self.n, self.x = self.tokens[rows], self.n[rows], self.x[rows]
        self.cache.select(rows)


@torch.inference_mode()
def steps(model: GPT, idx: Tensor, max_new_tokens: int, choose: Callable[[Tensor], Tensor], *,
          num_samples: int = 1, **window) -> Generator[Tensor, Tensor | None, None]:
    """Continue the prompts idx (B, T) token by token: yields ids (B * num_samples,).

    choose: next-token logits (B, V) in fp32 -> ids (B,); called once a step.
    num_samples: continuations of each prompt, side by side, for one prefill.
    window: lengths, context_keep and use_cache, see Window.
    Send indices of rows back to go on with these alone.
    """
    window = Window(model, idx, **window)
    if num_samples > 1:
        window.select(torch.arange(len(idx), device=idx.device).repeat_interleave(num_samples))
    for left in reversed(range(max_new_tokens)):
        ids = choose(model.logits(window.x).float())
        rows = yield ids
        if not left or (rows is not None and not len(rows)):
            return
        if rows is not None:
            window.select(rows)
            ids = ids[rows]
        window.append(ids[:, None])
