"""Claim: the right attention scale, 0.84 sqrt(log n), is where softmax has its largest gradient.

Source: kexue.fm 9812. For p = softmax(alpha s) over n keys, half the 1-norm of the Jacobian dp / ds
is alpha (1 - sum p_i^2). For scores of variance 1 the article puts sum p_i^2 = exp(alpha^2) / n and
finds a maximum near alpha = 0.84 sqrt(log n). Here: the mean gradient of many draws; then models
with queries and keys of variance 1 at the start, whose scores are times c or c sqrt(log n).

    python -m experiments.scale [--quick]
"""

import math
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments import common, training
from experiments.common import COLORS, Lab, Result, format_difference, format_mean, select
from experiments.training import Recipe
from model import GPT, GPTConfig

WIDTH, CONTEXT = 128, 128
ALPHAS = [0.25 * 2 ** (i / 8) for i in range(49)]  # 0.25 ... 16


def gradient(scores: Tensor, alpha: float) -> Tensor:
    """Half the 1-norm of the Jacobian of softmax(alpha s) by s: scores (..., n) -> (...).

    dp_i / ds_j = alpha (p_i [i = j] - p_i p_j), so row i has absolute values that sum to
    2 alpha p_i (1 - p_i), and all of them to 2 alpha (1 - sum p_i^2).
    """
    return alpha * (1 - (alpha * scores).softmax(-1).square().sum(-1))


def limit(n: int, d: int = 0) -> float:
    """The mean gradient where alpha goes to infinity; n and d as in `curve`.

    Then only the two largest scores matter. With g between them it is 2 alpha p (1 - p), p =
    sigmoid(alpha g), which has an integral of 1 over g > 0, whatever alpha is: the mean is the
    density of g at 0, n (n - 1) times the integral of phi(x)^2 Phi(x)^(n - 2). Scores of a query q
    have a deviation of |q| / sqrt(d), which divides it; the mean of sqrt(d) / |q| is known.
    """
    x = torch.linspace(-10, 10, 20001, dtype=torch.float64)
    squared = torch.exp(-x.square()) / (2 * math.pi)  # phi^2
    density = n * (n - 1) * torch.trapezoid(squared * torch.special.ndtr(x) ** (n - 2), x).item()
    if d:
        density *= math.sqrt(d / 2) * math.exp(math.lgamma((d - 1) / 2) - math.lgamma(d / 2))
    return density


def curve(n: int, d: int, seeds: list[int], numbers: int) -> dict[str, Any]:
    """Of each seed the mean gradient of numbers / n queries at ALPHAS and, `there`, at 0.84
    sqrt(log n); `half`: the alpha where half of the queries have passed their own largest one.

    d: dimension of normal queries and keys; 0: the scores themselves are normal.
    """
    result: dict[str, Any] = {"mean": [], "there": [], "half": []}
    for seed in seeds:
        random, queries = torch.Generator().manual_seed(seed), numbers // n
        normal = partial(torch.randn, generator=random, dtype=torch.float64)
        scores = (torch.stack([normal(n, d) @ normal(d) for _ in range(queries)]) / math.sqrt(d)
                  if d else normal(queries, n))
        gradients = torch.stack([gradient(scores, alpha) for alpha in ALPHAS])  # (alphas, queries)
        result["mean"].append(gradients.mean(1).tolist())
        result["there"].append(gradient(scores, 0.84 * math.sqrt(math.log(n))).mean().item())
        result["half"].append(torch.tensor(ALPHAS)[gradients.argmax(0)].median().item())
    return {"n": n, "d": d, "limit": limit(n, d), **result}


def scaled(attn: nn.Module, c: float, power: float) -> nn.Module:
    """The model's attention with scores q.k / sqrt(D) times c log(n)^power; power is 0 or 0.5."""

    def query_scale(pos: Tensor) -> Tensor:
        return c * (pos + 1).float().log().view(1, 1, -1, 1) ** power

    attn.query_scale = query_scale
    attn.logn = "scaled"  # any name but "off" makes attention ask for query_scale
    return attn


def spreads(model: GPT, idx: Tensor) -> list[float]:
    """Of each layer the standard deviation of the scores of a query, over sqrt(log n): the mean
    over rows, heads and queries with at least 16 keys."""
    found = []
    for q, k, _ in training.queries_and_keys(model, idx):
        scores = (q @ k.mT).double() / math.sqrt(q.size(-1))
        found.append(fmean(scores[:, :, n - 1, :n].std(-1, correction=0).mean().item()
                           / math.sqrt(math.log(n)) for n in range(16, q.size(2) + 1)))
    return found


def build(c: float, power: float, vocab_size: int, seed: int) -> GPT:
    """A model whose queries and keys have variance 1 at the start, as the article assumes."""
    torch.manual_seed(seed)
    config = GPTConfig(vocab_size, CONTEXT, n_layer=2, n_head=4, n_embd=WIDTH)
    model = GPT(config)
    for block in model.h:
        block.attn = scaled(type(block.attn)(config), c, power)
    model.init_weights(WIDTH**-0.5)
    return model


def trial(c: float, power: float, seed: int, rate: float, rows: int, updates: int) -> dict:
    """rate: of Muon, in units of Recipe's. -> loss, nats a byte, and spreads by layer."""
    data = training.stdlib()
    model = build(c, power, data.vocab_size, seed)
    idx = torch.from_numpy(data.val.window(0, 16, CONTEXT)[0])
    start = spreads(model, idx)
    recipe = Recipe(max_iters=updates, muon_lr=rate * Recipe.muon_lr)
    training.train(model, training.windows(data, rows, CONTEXT, seed), recipe)
    loss = training.validate(model, data, tokens=65536)["loss"]
    return {"c": c, "power": power, "seed": seed, "rate": rate, "loss": loss, "start": start,
            "end": spreads(model, idx)}


def measure(lab: Lab) -> Result:
    training.needs("h.0.attn.query_scale", "h.0.attn.logn")
    training.needs_scores()
    seeds, numbers, size = [1, 2, 3], 2**21, {"rows": 4, "updates": 300}
    cases = [(16, 0), (256, 0), (1024, 0), (4096, 0), (256, 4), (256, 32)]
    factors = [(c, 0.0) for c in (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)]
    factors += [(c, 0.5) for c in (0.25, 0.5, 0.84, 2.0)]  # times log(n) to this power
    search = [(c, 0.0, 9, rate) for c in (0.25, 1.0, 4.0) for rate in (0.5, 1.0, 2.0)]
    if lab.quick:
        seeds, numbers, size, cases = [1], 2**17, {"rows": 2, "updates": 30}, cases[:2]
        factors, search = [(0.125, 0.0), (1.0, 0.0), (16.0, 0.0)], []
    draws = [{"n": n, "d": d, "seeds": seeds, "numbers": numbers} for n, d in cases]
    runs = [(*factor, seed, 1.0) for factor in factors for seed in seeds]
    jobs = [{"c": c, "power": p, "seed": s, "rate": r} | size for c, p, s, r in runs + search]
    training.stdlib()  # prepared once, not by every process
    cases, done = lab.trials(curve, draws), lab.trials(trial, jobs)
    return {"cases": cases, "runs": done[: len(runs)], "search": done[len(runs):],
            "alphas": ALPHAS, "updates": size["updates"],
            "mean_root": torch.arange(1.0, CONTEXT + 1).log().sqrt().mean().item()}


def by_factor(result: Result, power: float) -> dict[float, list[Result]]:
    """c -> its runs with this power of log(n), one a seed."""
    runs = select(result["runs"], power=power)
    return {c: select(runs, c=c) for c in dict.fromkeys(run["c"] for run in runs)}


def table(result: Result) -> list[list[str]]:
    rows = [["", "result", "to compare", "spread of scores / √(log n), layers 1, 2: start → end"]]
    for case in result["cases"]:
        share = format_mean([100 * there / case["limit"] for there in case["there"]], 1)
        half = format_mean(case["half"], 1)
        drawn = f", q and k of {case['d']}" if case["d"] else ""
        rows.append([f"gradient at 0.84 √(log n), n = {case['n']}{drawn}",
                     f"{share} % of its limit",
                     f"half of the queries past theirs: {half} (9 % grid)", ""])
    one = [run["loss"] for run in select(result["runs"], c=1.0, power=0.0)]
    for power, root in ((0.0, ""), (0.5, " √(log n)")):
        for c, runs in by_factor(result, power).items():
            losses = [run["loss"] for run in runs]
            gain = "" if losses == one else f"{format_difference(losses, one)} to times 1"
            start, end = (", ".join(f"{mean:.2f}" for mean in np.mean([r[when] for r in runs], 0))
                          for when in ("start", "end"))
            rows.append([f"loss, scores times {c:g}{root}", format_mean(losses), gain,
                         f"{start} → {end}"])
    return rows


def draw(result: Result, fig: Any) -> None:
    left, right = fig.subplots(1, 2)
    for case, color in zip(select(result["cases"], d=0), COLORS, strict=False):
        n, root = case["n"], math.sqrt(math.log(case["n"]))
        left.plot(result["alphas"], np.mean(case["mean"], 0), color=color, label=f"n = {n}")
        left.plot(0.84 * root, fmean(case["there"]), "o", color=color)
        alphas = np.linspace(0.25, root, 200)
        left.plot(alphas, alphas * (1 - np.exp(alphas**2) / n), "--", color=color, lw=1)
    left.set(xlabel="α, factor of scores of variance 1", ylabel="mean gradient α (1 - Σ p²)",
             title="Dots: 0.84 √(log n); dashed: formula")
    for power, color, label in ((0.0, COLORS[0], "times c"), (0.5, COLORS[1], "times c √(log n)")):
        groups = by_factor(result, power)
        factors = [c * (result["mean_root"] if power else 1.0) for c in groups]
        losses = [[run["loss"] for run in runs] for runs in groups.values()]
        common.draw_seeds(right, factors, losses, color, label)
    there = 0.84 * result["mean_root"]
    right.axvline(there, color=COLORS[-1], lw=1, ls=":")
    right.text(there * 1.07, 0.9, "0.84 √(log n)", transform=right.get_xaxis_transform())
    right.set(xlabel="factor of q·k / √d, mean over positions", ylabel="loss (nats a byte)",
              title=f"After {result['updates']} updates; dots: seeds")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.legend(loc="upper left")


if __name__ == "__main__":
    common.command("scale")
