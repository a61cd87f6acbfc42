"""Claim: causal attention matrices are of full rank; bidirectional ones need not be.

Source: https://kexue.fm/archives/9529. A causal attention matrix is lower triangular with a
positive diagonal, so its determinant is positive. A bidirectional one is a softmax of scores whose
rank is at most the head dimension d; if d is much below the length n, little rank may be left.

Done here: one small GPT, trained three times from the same weights with as many updates: causal on
the next byte, with a bidirectional prefix (first half) on the next byte of the rest, and with full
attention on hidden bytes. Half of the updates have rows of 64 bytes, half of 256. Then the singular
values and determinants of their attention matrices, in float64, on the same validation text.

    python -m experiments.full_rank [--quick]
"""

import math
import statistics
from decimal import Decimal, localcontext
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments import common, training
from experiments.common import Lab, select
from experiments.training import MaskedGPT, Recipe, prefix_mask
from kit.evaluate import eval_batches
from model import GPTConfig

WIDTH, LAYERS, LENGTHS = 64, 2, (64, 256)
KINDS = ("causal", "prefix", "full")
# share of the largest singular value below which rounding hides one, with some margin
TOLERANCES = {"float64": 1e-13, "float32": 1e-6, "bf16": 1e-2}
ROUNDING = -15  # log10 of the share below which a computed singular value is rounding alone


def mask_of(kind: str, T: int) -> Tensor:
    return prefix_mask(T, {"causal": 0, "prefix": T // 2, "full": T}[kind])


def exact_log10_det(s: Tensor, digits: int = 120) -> tuple[int, float]:
    """Sign and log10|det| of softmax(s), (n, n), computed with so many digits.

    In float64 the determinant of a matrix of low numerical rank is that of its rounding errors.
    """
    with localcontext() as context:
        context.prec = digits
        a = np.array([[Decimal(v).exp() for v in row] for row in s.tolist()], dtype=object)
        a /= a.sum(1, keepdims=True)
        sign, total = 1, Decimal(0)
        for i in range(len(a)):  # elimination, the largest of the column first
            pivot = i + int(np.argmax(np.abs(a[i:, i])))
            if not a[pivot, i]:
                return 0, -math.inf
            if pivot != i:
                a[[i, pivot]], sign = a[[pivot, i]], -sign
            sign = -sign if a[i, i] < 0 else sign
            total += abs(a[i, i]).log10()
            a[i + 1:] -= np.outer(a[i + 1:, i] / a[i, i], a[i])
        return sign, float(total)


def examine(model: MaskedGPT, kind: str, x: Tensor, exact: bool) -> dict[str, Any]:
    """Means over the attention matrices of all layers, heads and rows of x (B, n)."""
    n = x.size(1)
    model.mask = mask_of(kind, n)
    layers = training.attention_scores(model, x, torch.float64)
    s = torch.cat([layer.flatten(0, 1) for layer in layers])  # (matrices, n, n)
    sigma = torch.linalg.svdvals(s.softmax(-1))
    relative = sigma / sigma[:, :1]
    found: dict[str, Any] = {
        "rank": {name: (relative > t).double().sum(1).mean().item() / n
                 for name, t in TOLERANCES.items()},
        "log10_sigma": relative.clamp(min=1e-17).log10().mean(0)[n // 64 - 1 :: n // 64].tolist()}
    if kind == "causal":  # the product of the diagonal, which no float could hold
        diagonal = s.log_softmax(-1).diagonal(dim1=1, dim2=2).sum(1) / math.log(10)
        found["log10_det"] = diagonal.mean().item()
    if exact:  # two heads of each layer, on the first row
        chosen = s.unflatten(0, (LAYERS, -1))[:, :2].flatten(0, 1)
        signs, logs = zip(*(exact_log10_det(one) for one in chosen), strict=True)
        found |= {"exact_signs": signs, "exact_log10_det": statistics.fmean(logs)}
    return found


def grow(kind: str, d: int, seed: int, updates: int) -> dict[str, Any]:
    """Train a GPT with heads of dimension d; its attention matrices before and after."""
    data = training.stdlib()
    torch.manual_seed(seed)  # the same weights for each kind
    model = MaskedGPT(GPTConfig(data.vocab_size + 1, max(LENGTHS), LAYERS, WIDTH // d, WIDTH), 0.05)
    texts = {n: torch.from_numpy(next(eval_batches(data.val, n, 4, 1))[0]) for n in LENGTHS}
    rows = {n: training.windows(data, 1024 // n, n, seed) for n in LENGTHS}
    if kind == "prefix":
        rows = {n: training.after_prefix(of, n // 2) for n, of in rows.items()}
    if kind == "full":
        rows = {n: training.denoising(of, data.vocab_size, seed) for n, of in rows.items()}

    def batches(step: int) -> tuple[np.ndarray, np.ndarray]:
        n = LENGTHS[step % 2]
        model.mask = mask_of(kind, n)
        return rows[n](step // 2)

    start = {str(n): examine(model, kind, x, exact=False) for n, x in texts.items()}
    losses = training.train(model, batches, Recipe(max_iters=updates))
    end = {str(n): examine(model, kind, x, exact=n == LENGTHS[0]) for n, x in texts.items()}
    return {"kind": kind, "d": d, "seed": seed, "start": start, "end": end,
            "loss": statistics.fmean(losses[-updates // 8 :])}


def measure(lab: Lab) -> common.Result:
    training.needs_masks()
    training.needs_scores()
    dims, seeds, updates = ((4,), (1,), 20) if lab.quick else ((4, 16, 32), (1, 2, 3), 400)
    training.stdlib()  # prepared once, not by every process
    jobs = [{"kind": kind, "d": d, "seed": seed, "updates": updates}
            for seed in seeds for d in dims for kind in KINDS]
    return {"dims": dims, "runs": lab.trials(grow, jobs)}


def ends(result: common.Result, kind: str, d: int, n: int) -> list[common.Result]:
    """What was found after training, one a seed."""
    return [run["end"][str(n)] for run in select(result["runs"], kind=kind, d=d)]


def table(result: common.Result) -> common.Rows:
    rows = [["attention", "d", "n", *(f"rank / n, {name}" for name in TOLERANCES),
             "log10 smallest / largest", "log10 of the determinant", "positive"]]
    for n, d, kind in product(LENGTHS, result["dims"], KINDS):
        found = ends(result, kind, d, n)
        ranks = [common.format_mean([one["rank"][name] for one in found], 2) for name in TOLERANCES]
        dets = [one.get("exact_log10_det", one.get("log10_det")) for one in found]
        signs = [sign for one in found for sign in one.get("exact_signs", [])]
        least = [one["log10_sigma"][-1] for one in found]
        lost = statistics.fmean(least) < ROUNDING
        rows.append([kind, str(d), str(n), *ranks,
                     f"< {ROUNDING}" if lost else common.format_mean(least, 1),
                     "" if None in dets else common.format_mean(dets, 0),
                     f"{signs.count(1)} of {len(signs)}" if signs else ""])
    return rows


def draw(result: common.Result, fig: Any) -> None:
    left, right = fig.subplots(1, 2)
    dims, n = result["dims"], max(LENGTHS)
    for kind, color in zip(KINDS, common.COLORS, strict=False):
        for d, line in zip(dict.fromkeys((dims[0], dims[-1])), ("-", "--"), strict=False):
            for k, one in enumerate(ends(result, kind, d, n)):
                left.plot(np.linspace(1 / 64, 1, 64), one["log10_sigma"], line, color=color, lw=1.2,
                          label=f"{kind}, d = {d}" if not k else None)
        for length, mark in zip(LENGTHS, ("o--", "s-"), strict=True):
            ranks = [[one["rank"]["float32"] for one in ends(result, kind, d, length)]
                     for d in dims]
            right.plot(dims, np.mean(ranks, 1), mark, color=color, label=f"{kind}, n = {length}")
    for name, tolerance in TOLERANCES.items():
        left.axhline(math.log10(tolerance), color="#888888", lw=0.8, ls=":")
        left.text(1.18, math.log10(tolerance) + 0.2, name, color="#666666", fontsize=10, ha="right")
    left.set(xlabel="i / n", ylabel="log10 of singular value i / the largest", title=f"n = {n}",
             xlim=(-0.03, 1.19), ylim=(ROUNDING, 0.5), xticks=(0, 0.25, 0.5, 0.75, 1))
    left.legend(fontsize=10)
    right.set(xlabel="head dimension d", ylabel="rank at tolerance 1e-6 (float32) / n",
              ylim=(0, 1.05), xticks=dims)
    right.legend(fontsize=10)


if __name__ == "__main__":
    common.command("full_rank")
