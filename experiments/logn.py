"""Claim: queries that grow sharper with the keys they see carry a model past its trained length.

Claims: kexue.fm 8823 and 9444; learned per head: arXiv 2501.19399; clipped at the trained length:
Qwen, arXiv 2309.16609. None has learned positions, which must be made longer first. Here models are
trained on windows of 64 tokens and read up to 512, with each `attn_logn` of model.py and each way
of kit.positions, before and after a short training there. What counts is the last quarter of a
window: its queries see more keys than any in training. Entropy shows how attention spreads.

    python -m experiments.logn [--quick]
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.dataset import Dataset
from experiments import common
from experiments.common import COLORS, difference, spell, spell_difference
from experiments.lab import Lab, tick
from experiments.training import (
    Recipe,
    Weights,
    attention_scores,
    by_position,
    needs,
    needs_scores,
    sample,
    text,
    train,
    weights_of,
    windows,
)
from kit.positions import resize
from model import GPT, GPTConfig

TOKENIZER = "bpe:512"
T = 64  # tokens, the trained length
BATCH = 2048  # tokens of an update, at every length
TRAINED = {"off": "off", "clipped": "off", "fixed": "fixed", "learned": "learned"}  # how, by mode
WAYS = ("interpolate", "hierarchical", "copy")
FULL = {"seeds": [1, 2, 3, 4, 5], "updates": 850, "adaptation": 40, "lengths": [128, 256, 512],
        "tokens": 32768}
QUICK = {"seeds": [1, 2], "updates": 20, "adaptation": 2, "lengths": [256], "tokens": 4096}
RATE = 0.3  # of the peak rates, in the short training


def config(mode: str, size: int, vocab_size: int) -> GPTConfig:
    return GPTConfig(vocab_size, size, n_layer=2, n_head=4, n_embd=64, attn_logn=mode,
                     logn_base=T if mode in ("fixed", "clipped") else None)


def widened(weights: Weights, mode: str, size: int, way: str) -> GPT:
    """The trained model with positions for windows of `size`; at its own length it is as it was."""
    tensors = {name: torch.from_numpy(a) for name, a in weights.items()}
    tensors["wpe.weight"] = resize(tensors["wpe.weight"], size, way)
    model = GPT(config(mode, size, len(tensors["wte.weight"])))
    model.load_state_dict(tensors)
    return model.eval()


def losses(model: GPT, data: Dataset, size: int, tokens: int) -> dict[str, float]:
    """Nats per token, of all positions and of the last quarter."""
    loss = by_position(model, sample(data, size, tokens))
    return {"all": loss.mean().item(), "late": loss[-(size // 4):].mean().item()}


@torch.inference_mode()
def entropies(model: GPT, idx: Tensor) -> Tensor:
    """Entropy of attention by query, nats (T,): the mean over rows, heads and layers of idx (B, T).

    A query that attends evenly to the n keys it sees has log n.
    """
    return torch.stack([torch.special.entr(scores.softmax(-1)).sum(-1).mean((0, 1))
                        for scores in attention_scores(model, idx)]).mean(0)


def by_octave(values: Tensor) -> dict[str, float]:
    """Means of those at n/2 + 1 .. n, the first of `values` being that at 1."""
    return {str(n): values[n // 2 : n].mean().item() for n in (8, 16, 32, 64, 128, 256, 512)
            if n <= len(values)}


def learn(seed: int, mode: str, updates: int, tokens: int) -> dict[str, Any]:
    """Train at T; modes that are the same there share it."""
    data = Dataset(text(TOKENIZER))
    torch.manual_seed(seed)
    model = GPT(config(mode, T, data.vocab_size))
    train(model, windows(data, BATCH // T, T, seed), Recipe(max_iters=updates))
    return {"weights": weights_of(model), **losses(model, data, T, tokens)}


def widen(seed: int, mode: str, way: str, weights: Weights, lengths: Sequence[int],
          adaptation: int, tokens: int) -> dict[str, Any]:
    """Losses at each length, before and after so many updates there, the same for all."""
    data, cells = Dataset(text(TOKENIZER)), {}
    for size in lengths:
        model = widened(weights, mode, size, way)
        before = losses(model, data, size, tokens)
        if size == max(lengths) and way == "interpolate":
            x = torch.from_numpy(np.concatenate([x for x, _ in sample(data, size, tokens // 2)]))
            cells["entropy"] = by_octave(entropies(model, x))
        recipe = Recipe(max_iters=adaptation, warmup_iters=adaptation // 8,
                        learning_rate=RATE * Recipe.learning_rate, muon_lr=RATE * Recipe.muon_lr)
        train(model, windows(data, BATCH // size, size, seed + 1000), recipe, share=0)
        cells[str(size)] = {"before": before, "after": losses(model, data, size, tokens)}
        tick(1 / len(lengths))
    return cells


def measure(lab: Lab) -> common.Result:
    needs("wte.weight", "wpe.weight", "config.attn_logn", "config.logn_base",
          "h.0.attn.query_scale")
    needs_scores()
    size = QUICK if lab.quick else FULL
    text(TOKENIZER)  # before trials would prepare it side by side
    jobs = [{"seed": seed, "mode": mode, "updates": size["updates"], "tokens": size["tokens"]}
            for mode, seed in product(dict.fromkeys(TRAINED.values()), size["seeds"])]
    learnt = {(job["mode"], job["seed"]): end
              for job, end in zip(jobs, lab.trials(learn, jobs), strict=True)}
    jobs = [{"seed": seed, "mode": mode, "way": way, "lengths": size["lengths"],
             "adaptation": size["adaptation"], "tokens": size["tokens"],
             "weights": learnt[TRAINED[mode], seed]["weights"]}
            for mode, way, seed in product(TRAINED, WAYS, size["seeds"])]
    runs = [{"mode": job["mode"], "way": job["way"], "seed": job["seed"], **cells}
            for job, cells in zip(jobs, lab.trials(widen, jobs), strict=True)]
    trained = [{"mode": mode, "seed": seed, "all": end["all"], "late": end["late"]}
               for (mode, seed), end in learnt.items()]
    return {"size": size, "trained": trained, "runs": runs}


def late(result: common.Result, mode: str, way: str, size: int, when: str) -> list[float]:
    """Loss of the last quarter of positions, by seed."""
    if size == T:
        return [r["late"] for r in result["trained"] if r["mode"] == TRAINED[mode]]
    return [r[str(size)][when]["late"] for r in result["runs"]
            if (r["mode"], r["way"]) == (mode, way)]


def table(result: common.Result) -> common.Rows:
    columns = [(T, "")] + list(product(result["size"]["lengths"], ("before", "after")))
    rows = [["positions, log n", *(f"{size} {when}".strip() for size, when in columns)]]
    for way, mode in product(WAYS, TRAINED):
        pairs = [(late(result, mode, way, *column), late(result, "off", way, *column))
                 for column in columns]
        rows.append([f"{way}, {mode}", *(spell(a) if mode == "off" else spell_difference(a, off)
                                         for a, off in pairs)])
    return rows


def draw(result: common.Result, fig: Any) -> None:
    left, right = fig.subplots(1, 2)
    colors, sizes = dict(zip(TRAINED, COLORS, strict=False)), [T, *result["size"]["lengths"]]
    left.axhline(0, color=colors["off"], label="off")
    for i, mode in enumerate(list(TRAINED)[1:]):
        before, after = ([difference(late(result, mode, "interpolate", size, when),
                                     late(result, "off", "interpolate", size, when))
                          for size in sizes] for when in ("before", "after"))
        left.errorbar([size * 1.03 ** (i - 1) for size in sizes], *np.transpose(before), marker="o",
                      markersize=4, color=colors[mode], capsize=2, elinewidth=1, label=mode)
        left.plot(sizes, [mean for mean, _ in after], ":", color=colors[mode])
    left.set(title="Positions interpolated; dotted: adapted", ylabel="loss against off, last "
             "quarter (nats)", xlabel=f"tokens of a window, trained at {T}")
    for mode in TRAINED:
        curves = [r["entropy"] for r in result["runs"] if r["mode"] == mode and "entropy" in r]
        n = 0.75 * np.array([int(key) for key in curves[0]])  # middle of n/2 .. n
        right.plot(n, np.mean([list(c.values()) for c in curves], axis=0), color=colors[mode])
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
