"""Writing with a model whose cache, or whose way out, is not that of its forward pass.

People edit model.py, and not every edit can go on from keys and values: one that mixes neighbouring
tokens, or forgets the cache, writes other text with it than without. So a model is tried before it
writes; what fails reads each text again for every token, by its forward alone.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kit.device import device_of
from kit.writing.window import Window
from model import GPT, KVCache

CLOSE = 1e-3  # of the deviation of the logits
WORK = 2e9  # multiplications, about, that a trial of the whole context may take


@torch.inference_mode()
def astray(model: GPT) -> str:
    """What makes texts that go on with a cache others than forward's, in words; "" if nothing.

    A large model is judged by a narrow one of its class and context: that takes no longer.
    """
    model.eval()
    if model.config.block_size * model.num_params() < WORK:
        return difference(model, model.config.block_size)
    try:
        return difference(narrow(model), model.config.block_size)
    except Exception:  # whatever an edited model may want of its shape
        return difference(model, min(model.config.block_size, 48))


def forward_of(model: GPT) -> Callable[..., Tensor]:
    """The forward pass, but not compiled: each token would be another length to compile for."""
    return model.forward if model._compiled_call_impl else model


def narrow(model: GPT) -> GPT:
    """A model of the same class and context, of two layers, 8 wide a head, with loud weights."""
    c = model.config
    config = replace(c, n_layer=min(2, c.n_layer), n_embd=8 * c.n_head,
                     vocab_size=min(64, c.vocab_size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = type(model)(config).eval()
    for p in small.parameters():
        p.mul_(4 if p.ndim > 1 else 1)
    return small.to(device_of(model))


def difference(model: GPT, size: int) -> str:
    """Where forward, the exit to logits and the cache disagree, in words; "" if nowhere.

    Rows of different lengths, the longest nearly `size`, go on by two tokens with a cache; their
    logits are compared with those of forward.
    """
    device, limit = device_of(model), model.config.block_size
    close = CLOSE if device.type == "cpu" else 10 * CLOSE  # a GPU may multiply fp32 in TF32
    idx = torch.arange(min(3, limit), device=device)[None] % model.config.vocab_size
    a, b = forward_of(model)(idx), model.logits(model.hidden(idx))
    if a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
        return "GPT.forward gives other logits than GPT.logits"
    random = torch.Generator().manual_seed(0)
    lengths = torch.tensor([min(n, max(1, size - 2)) for n in (1, 4, size)], device=device)
    longest = int(lengths.max())
    idx = torch.randint(model.config.vocab_size, (3, longest + 2), generator=random).to(device)
    try:
        window = Window(model, idx[:, :longest], lengths)
        for new in range(min(2, limit - longest)):
            got = model.logits(window.append(idx[:, longest + new, None])[:, -1])
            for row, n in zip(range(3), lengths.tolist(), strict=True):
                seen = torch.cat([idx[row, :n], idx[row, longest : longest + new + 1]])
                wanted = forward_of(model)(seen[None])[0, -1]
                if (got[row] - wanted).abs().max() > close * wanted.std().clamp(min=1e-5):
                    return "with its cache it gives other logits than without"
    except Exception as e:  # whatever an edited model may raise
        return "with its cache " + " ".join(f"{type(e).__name__}: {e}".split())[:100]
    return ""


def recompute(model: GPT) -> None:
    """Let a model write by its forward alone; the cache that it is given holds the tokens."""
    plain = copy.copy(model)  # the same modules, without what is set below or was set before
    for name in ("hidden", "logits", "layers", "new_cache"):
        vars(plain).pop(name, None)
    forward = forward_of(plain)

    def hidden(idx: Tensor, cache: KVCache | None = None) -> Tensor:
        if cache is None:
            return forward(idx)
        T, starts = idx.size(1), [cache.pos] * len(idx)
        if isinstance(cache.pos, Tensor):
            starts = cache.pos.tolist()
        tokens = idx[:, None, :, None]
        held = cache.append(0, tokens, tokens)[0][:, 0, :, 0]  # (B, S)
        cache.advance(T)
        return torch.cat([forward(row[None, : n + T])[:, -T:]
                          for row, n in zip(held, starts, strict=True)])

    model.hidden, model.logits = hidden, lambda x: x
    model.layers = lambda idx, cache=None: iter([hidden(idx, cache)])
    model.new_cache = lambda batch_size=1, length=None: KVCache(
        1, batch_size, length or model.config.block_size, device_of(model))


def settle(model: GPT, why: str | None = None) -> str:
    """Make a model write what its forward says, whatever that takes; what it takes, in words.

    why: what `astray` said of it, if that is known.
    """
    if why := astray(model) if why is None else why:
        recompute(model)
        return f", each token from the whole text, which is slower: {why}"
    return ""
