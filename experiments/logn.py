"""Claim: queries that grow sharper with the keys they see carry a model past its trained length.

Claims: kexue.fm 8823 and 9444; learned per head: arXiv 2501.19399; clipped at the trained length:
Qwen, arXiv 2309.16609. None has learned positions, which must be made longer first. Here models are
trained on windows of 64 tokens and read up to 512, with each `attn_logn` of model.py and each way
of kit.positions, before and after a short training there. What counts is the last quarter of a
window: its queries see more keys than any in training. Entropy shows how attention spreads.

    python -m experiments.logn [--quick]
"""

from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.dataset import Dataset
from experiments import common, training
from experiments.common import COLORS, Lab, format_difference, format_mean, select
from experiments.training import Recipe
from model import GPT, GPTConfig

TOKENIZER = "bpe:512"
T = 64  # tokens, the trained length
BATCH = 2048  # tokens of an update, at every length
TRAINED = {"off": "off", "clipped": "off", "fixed": "fixed", "learned": "learned"}  # how, by mode
WAYS = ("interpolate", "hierarchical", "copy")
FULL = {"seeds": [1, 2, 3, 4, 5], "updates": 850, "adaptation": 40, "lengths": [128, 256, 512],
        "tokens": 32768}
QUICK = {"seeds": [1], "updates": 20, "adaptation": 2, "lengths": [256], "tokens": 4096}
RATE = 0.3  # of the peak rates, in the short training


def config(mode: str, size: int, vocab_size: int) -> GPTConfig:
    return GPTConfig(vocab_size, size, n_layer=2, n_head=4, n_embd=64, attn_logn=mode,
                     logn_base=T if mode in ("fixed", "clipped") else None)


def losses(model: GPT, data: Dataset, size: int, tokens: int) -> dict[str, float]:
    """Nats per token, of all positions and of the last quarter."""
    loss = training.by_position(model, training.sample(data, size, tokens))
    return {"all": loss.mean().item(), "late": loss[-(size // 4):].mean().item()}


@torch.inference_mode()
def entropies(model: GPT, idx: Tensor) -> Tensor:
    """Entropy of attention by query, nats (T,): the mean over rows, heads and layers of idx (B, T).

    A query that attends evenly to the n keys it sees has log n.
    """
    return torch.stack([torch.special.entr(scores.softmax(-1)).sum(-1).mean((0, 1))
                        for scores in training.attention_scores(model, idx)]).mean(0)


def by_octave(values: Tensor) -> dict[str, float]:
    """Means of those at n/2 + 1 .. n, the first of `values` being that at 1."""
    return {str(n): values[n // 2 : n].mean().item() for n in (8, 16, 32, 64, 128, 256, 512)
            if n <= len(values)}


def trial(seed: int, mode: str, updates: int, adaptation: int, lengths: list[int],
          tokens: int) -> dict[str, Any]:
    """Train at T, then widen the model in each way and for each mode that is trained so."""
    data = training.stdlib(TOKENIZER)
    torch.manual_seed(seed)
    model = GPT(config(mode, T, data.vocab_size))
    training.train(model, training.windows(data, BATCH // T, T, seed), Recipe(max_iters=updates))
    runs = [widen(model, data, seed, wide, way, adaptation, lengths, tokens)
            for wide, way in product(TRAINED, WAYS) if TRAINED[wide] == mode]
    return {"trained": {"mode": mode, "seed": seed, **losses(model, data, T, tokens)}, "runs": runs}


def widen(model: GPT, data: Dataset, seed: int, mode: str, way: str, adaptation: int,
          lengths: list[int], tokens: int) -> dict[str, Any]:
    """Losses at each length, before and after so many updates there, the same for all."""
    run: dict[str, Any] = {"mode": mode, "way": way, "seed": seed}
    recipe = Recipe(max_iters=adaptation, warmup_iters=adaptation // 8,
                    learning_rate=RATE * Recipe.learning_rate, muon_lr=RATE * Recipe.muon_lr)
    for size in lengths:
        wide = training.widened(model, config(mode, size, data.vocab_size), way)
        before = losses(wide, data, size, tokens)
        if size == max(lengths) and way == "interpolate":
            texts = [x for x, _ in training.sample(data, size, tokens // 2)]
            run["entropy"] = by_octave(entropies(wide, torch.from_numpy(np.concatenate(texts))))
        training.train(wide, training.windows(data, BATCH // size, size, seed + 1000), recipe)
        run[str(size)] = {"before": before, "after": losses(wide, data, size, tokens)}
    return run


def measure(lab: Lab) -> common.Result:
    training.needs("wte.weight", "wpe.weight", "config.attn_logn", "config.logn_base",
                   "h.0.attn.query_scale")
    training.needs_scores()
    size = QUICK if lab.quick else FULL
    training.stdlib(TOKENIZER)  # prepared once, not by every process
    sizes = {key: value for key, value in size.items() if key != "seeds"}
    found = lab.trials(trial, [{"mode": mode, "seed": seed, **sizes} for mode, seed in product(
        dict.fromkeys(TRAINED.values()), size["seeds"])])
    runs = [run for one in found for run in one["runs"]]
    return {"size": size, "trained": [one["trained"] for one in found],
            "runs": [run for mode, way in product(TRAINED, WAYS)
                     for run in select(runs, mode=mode, way=way)]}


def late(result: common.Result, mode: str, way: str, size: int, when: str) -> list[float]:
    """Loss of the last quarter of positions, by seed."""
    if size == T:
        return [run["late"] for run in select(result["trained"], mode=TRAINED[mode])]
    return [run[str(size)][when]["late"] for run in select(result["runs"], mode=mode, way=way)]


def table(result: common.Result) -> common.Rows:
    columns = [(T, "")] + list(product(result["size"]["lengths"], ("before", "after")))
    rows = [["positions, log n", *(f"{size} {when}".strip() for size, when in columns)]]
    for way, mode in product(WAYS, TRAINED):
        row = [f"{way}, {mode}"]
        for size, when in columns:
            here, off = late(result, mode, way, size, when), late(result, "off", way, size, when)
            row.append(format_mean(here) if mode == "off" else format_difference(here, off))
        rows.append(row)
    return rows


def draw(result: common.Result, fig: Any) -> None:
    left, right = fig.subplots(1, 2)
    sizes = [T, *result["size"]["lengths"]]
    for i, (mode, color) in enumerate(zip(TRAINED, COLORS, strict=False)):
        if mode == "off":
            left.axhline(0, color=color, label=mode)
        else:
            before, off, after, off_after = (
                [late(result, which, "interpolate", size, when) for size in sizes]
                for when in ("before", "after") for which in (mode, "off"))
            apart = [size * 1.03 ** (i - 2) for size in sizes]  # so that no bar hides another
            common.draw_differences(left, apart, before, off, color, mode)
            left.plot(sizes, np.mean(after, 1) - np.mean(off_after, 1), ":", color=color)
        curves = [run["entropy"] for run in select(result["runs"], mode=mode, way="interpolate")]
        n = 0.75 * np.array([int(key) for key in curves[0]])  # middle of n/2 .. n
        right.plot(n, np.mean([list(c.values()) for c in curves], axis=0), color=color)
    left.set(title="Positions interpolated; dotted: adapted", ylabel="loss against off, last "
             "quarter (nats)", xlabel=f"tokens of a window, trained at {T}")
    right.plot(n, np.log(n), "--", color="#333333", linewidth=1)
    right.annotate("all even: log n", (n[3], np.log(n[3])), ha="right", xytext=(-6, 4),
                   textcoords="offset points", fontsize=11)
    right.axvline(T, color="#999999", linewidth=1)
    right.set(title="Before adaptation", xlabel="n, the keys that a query sees",
              ylabel="entropy of attention (nats)")
    for ax, ticks in ((left, sizes), (right, [8, 16, 32, *sizes])):
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, ticks)
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=11)


if __name__ == "__main__":
    common.command("logn")
