"""Claim: a cache makes the next token cheap, teacher forcing trains all positions at once.

Vaswani et al., arXiv 1706.03762, table 1: n positions take O(1) operations in a row, recurrent ones
O(n). Shazeer, arXiv 1911.02150, 2.4.1: token by token is the same arithmetic, but the weights are
read n times. Pope et al., arXiv 2211.05102: 2N FLOPs a token, a cache that outgrows the weights.
With a small GPT of random weights: ms to write a token over a KVCache or from the whole window,
bytes of the cache, gradients and times at once or in steps, over a cache that keeps the graph.

    python -m experiments.decoding_costs [--quick]
"""

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments import common
from experiments.common import Lab
from kit.device import prepare_device
from model import GPT, GPTConfig, KVCache

FULL = {"shape": {"vocab_size": 256, "block_size": 4096, "n_layer": 4, "n_head": 4, "n_embd": 256},
        "contexts": [2**i for i in range(4, 13)], "rounds": 10,
        "lengths": {"1": [16, 32, 64, 128, 256], "8": [16, 32, 64, 128]}}  # rows -> of training
QUICK = {"shape": {"vocab_size": 256, "block_size": 512, "n_layer": 2, "n_head": 2, "n_embd": 128},
         "contexts": [16, 64, 256, 512], "rounds": 3, "lengths": {"1": [16, 64], "4": [16, 64]}}


@torch.inference_mode()
def held(model: GPT, T: int) -> int:
    """Bytes of a cache with room for T tokens."""
    cache = model.new_cache(length=T)
    model.hidden(torch.zeros(1, 1, dtype=torch.int64), cache)  # the first key makes its tensors
    return sum(x.nbytes for x in (*cache.k, *cache.v))


def flops(shape: dict[str, int], T: int, way: str) -> int:
    """Of the token at context T: 2 for a weight and token, 4 for a channel and key that is seen."""
    L, C = shape["n_layer"], shape["n_embd"]
    tokens, seen = (1, T) if way == "with cache" else (T, T * (T + 1) // 2)
    return 2 * 12 * L * C**2 * tokens + 4 * L * C * seen + 2 * C * shape["vocab_size"]


def cache_bytes(layers: int, width: int, tokens: int, size: int = 4) -> int:
    """Keys and values of all layers, numbers of `size` bytes; tokens: of all rows."""
    return 2 * layers * width * tokens * size


class GraphCache(KVCache):
    """A cache that gradients flow through: the new is joined to the old, not written in place."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.k[layer] is not None:
            k, v = torch.cat((self.k[layer], k), dim=2), torch.cat((self.v[layer], v), dim=2)
        self.k[layer], self.v[layer] = k, v
        return k, v


def gradients(model: GPT, ids: Tensor, chunk: int | None = None) -> list[Tensor]:
    """Of the summed loss of ids (B, T + 1), read `chunk` tokens at a time; None: all at once."""
    model.zero_grad()
    cache, loss = GraphCache(len(model.h)) if chunk else None, torch.zeros(())
    size = chunk or ids.size(1)
    for x, y in zip(ids[:, :-1].split(size, 1), ids[:, 1:].split(size, 1), strict=True):
        logits = model(x, cache=cache).flatten(0, 1)
        loss = loss + F.cross_entropy(logits, y.flatten(), reduction="sum")
    loss.backward()
    return [p.grad for p in model.parameters()]


def compare(shape: dict[str, int], rows: int, seed: int) -> dict[str, float]:
    """Gradients step by step and at once: the largest difference, of a tensor's largest entry."""
    torch.manual_seed(seed)
    model, apart = GPT(GPTConfig(**shape)), {}
    ids = torch.randint(shape["vocab_size"], (rows, 65))
    for dtype in ("float64", "float32"):
        both = (gradients(model.to(getattr(torch, dtype)), ids, chunk) for chunk in (None, 1))
        apart[dtype] = max(((a - b).abs().max() / a.abs().max()).item()
                           for a, b in zip(*both, strict=True))
    return apart


def in_turn(ways: dict[str, Callable[[int], object]], sizes: list[int],
            rounds: int) -> dict[str, list[list[float]]]:
    """ms of way(size), [size][round]: in a round all take their turn, each once or for 20 ms."""
    ms: dict[str, list[list[float]]] = {name: [[] for _ in sizes] for name in ways}
    for r, (i, size), name in product(range(rounds + 1), enumerate(sizes), ways):
        n, start, seconds = 0, time.perf_counter(), 0.0
        while seconds < 0.02:
            ways[name](size)
            n, seconds = n + 1, time.perf_counter() - start
        if r:  # the first round only warms up
            ms[name][i].append(1000 * seconds / n)
    return ms


def write(model: GPT, ids: Tensor, cache: KVCache | None) -> Tensor:
    """Logits after ids (1, T), over a cache that has seen them and has room for T, or without."""
    if cache is None:
        return model.logits(model.hidden(ids)[:, -1])
    cache.pos = cache.longest = ids.size(1) - 1  # it stores again what it held of the newest
    return model(ids[:, -1:], cache=cache)[:, 0]


def timed(shape: dict[str, int], contexts: list[int], lengths: dict[str, list[int]],
          rounds: int) -> dict[str, Any]:
    """All times, in one process, so that no other trial runs beside it."""
    prepare_device(torch.device("cpu"))
    torch.manual_seed(0)
    model, training = GPT(GPTConfig(**shape)), {}
    for rows, sizes in lengths.items():
        ids = torch.randint(shape["vocab_size"], (int(rows), sizes[-1] + 1))
        ways = {name: lambda T, ids=ids, chunk=chunk: gradients(model, ids[:, : T + 1], chunk)
                for name, chunk in (("stepwise", 1), ("at once", None))}
        training[rows] = in_turn(ways, sizes, rounds)
    ids, full = torch.randint(shape["vocab_size"], (1, contexts[-1])), model.new_cache()
    with torch.inference_mode():
        model.hidden(ids, full)
        ways = {"with cache": lambda T: write(model, ids[:, :T], full),
                "without": lambda T: write(model, ids[:, :T], None)}
        return {"training": training, "decoding": in_turn(ways, contexts, rounds)}


def measure(lab: Lab) -> dict[str, Any]:
    size, seeds = (QUICK, 1) if lab.quick else (FULL, 3)
    [times] = lab.trials(timed, [size])
    apart = lab.trials(compare, [{"shape": size["shape"], "rows": int(rows), "seed": seed}
                                 for rows in size["lengths"] for seed in range(seeds)])
    model = GPT(GPTConfig(**size["shape"]))
    return {**size, **times, "gradients": apart, "held": [held(model, T) for T in size["contexts"]],
            "weights": sum(p.nbytes for p in model.parameters())}


def growth(sizes: list[int], values: Any) -> Any:
    """Exponents of the growth of values (sizes, ...) over the upper half: slopes in log-log."""
    return np.polyfit(*(np.log(a[len(sizes) // 2 :]) for a in (sizes, values)), 1)[0]


def spread(values: Any) -> str:
    """Median and quartiles to three digits: '1.23 (1.20 to 1.31)'."""
    low, mid, high = np.quantile(values, [0.25, 0.5, 0.75])
    digits = max(0, 3 - len(str(int(abs(mid))))) + (abs(mid) < 1)
    return f"{mid:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(result: dict[str, Any]) -> common.Rows:
    shape, contexts, ways = (result[key] for key in ("shape", "contexts", "decoding"))
    ratios = {n: np.divide(ms["stepwise"], ms["at once"]) for n, ms in result["training"].items()}
    lines = [["tokens T", *(f"{way}, ms" for way in ways), "times as fast", "cache, MB: held, 2LTC",
              *(f"steps / at once, rows: {rows}" for rows in ratios)]]
    for i, (T, cached, window) in enumerate(zip(contexts, *ways.values(), strict=True)):
        predicted = cache_bytes(shape["n_layer"], shape["n_embd"], T)
        lines.append([f"{T:,}", spread(cached), spread(window), spread(np.divide(window, cached)),
                      f"{result['held'][i] / 1e6:.2f}, {predicted / 1e6:.2f}",
                      *(spread(ratios[rows][sizes.index(T)]) if T in sizes else ""
                        for rows, sizes in result["lengths"].items())])
    counts = [[flops(shape, T, way) for T in contexts] for way in ways]
    apart = [f"{max(g[t] for g in result['gradients']):.0e} ({t})" for t in ("float64", "float32")]
    return [*lines, ["exponent", *(spread(growth(contexts, ms)) for ms in ways.values()), "",
                     f"weights {result['weights'] / 1e6:.2f}", "gradients apart:", ""],
            ["of FLOPs", *(f"{growth(contexts, count):.2f}" for count in counts), "", "", *apart]]


def draw(result: dict[str, Any], fig: Any) -> None:
    left, right = fig.subplots(1, 2)
    contexts = result["contexts"]
    for (way, ms), color in zip(result["decoding"].items(), common.COLORS, strict=False):
        count = np.array([flops(result["shape"], T, way) for T in contexts])
        left.loglog(contexts, np.median(ms, 1), "o-", color=color,
                    label=f"{way}: $T^{{{np.median(growth(contexts, ms)):.2f}}}$")
        left.loglog(contexts, count / count[-1] * np.median(ms[-1]), ":", color=color,
                    label=f"as its FLOPs: $T^{{{growth(contexts, count):.2f}}}$")
    left.set(xlabel="context T, tokens", ylabel="ms to write a token")
    for (rows, ms), color in zip(result["training"].items(), common.COLORS[2:], strict=False):
        ratio, sizes = np.divide(ms["stepwise"], ms["at once"]), result["lengths"][rows]
        right.loglog(sizes, np.median(ratio, 1), "o-", color=color, label=f"rows: {rows}")
    steps = result["lengths"]["1"]
    right.loglog(steps, steps, ":", color=common.COLORS[-1], label="number of steps")
    right.set(xlabel="length T, tokens", ylabel="time step by step / time at once")
    for ax, ticks in ((left, contexts[::2]), (right, steps)):
        ax.set_xticks(ticks, ticks)
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.legend(loc="upper left")


if __name__ == "__main__":
    common.command("decoding_costs")
