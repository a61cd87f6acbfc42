"""Claim: interpolated positions make a wider window cheaper than training with it throughout.

The claim is the practice of context extension (arXiv 2306.15595, of rotary positions), here with
learned ones: a model is trained on windows of 64 tokens, its positions are stretched to 256, and
the last 5, 10, 25 or 50 % of its tokens come in windows of 256. Against it stand training at 256
all the way, and none at 256. Every arm reads the same windows of 256 tokens in the same order, cut
in four while it is short.

    python -m experiments.wider_window [--quick]
"""

import time
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch

from data.dataset import Dataset
from experiments import common, training
from experiments.common import COLORS, Lab, format_difference, format_mean, select
from experiments.training import Batches, Recipe
from model import GPT, GPTConfig

TOKENIZER = "bpe:512"
T, WIDE, BATCH = 64, 256, 2048  # tokens: short and wide windows, an update
BIN = 16  # positions
FLOOR = 0.3  # of the peak rates, at least, where wide windows begin
SHARES = [0.0, 0.05, 0.1, 0.25, 0.5]  # of the updates in wide windows; 1: from the beginning
FULL = {"seeds": [1, 2, 3], "updates": 900, "shares": SHARES, "tokens": 131072}
QUICK = {"seeds": [1], "updates": 40, "shares": [0.0, 0.25], "tokens": 8192}


def cut(batches: Batches, size: int, skip: int = 0) -> Batches:
    """The same tokens in shorter windows, (B, T) -> (B T / size, size), from update `skip` on."""
    return lambda step: tuple(a.reshape(-1, size) for a in batches(skip + step))


def rest_of(recipe: Recipe, done: int) -> Recipe:
    """The rates after so many updates: linear to zero, as they would have gone on, or from FLOOR.

    The whole schedule is flat for 40 % of the updates and then linear.
    """
    left = recipe.max_iters - done
    factor = max(FLOOR, min(1.0, left / (recipe.cooldown * recipe.max_iters)))
    return replace(recipe, max_iters=left, warmup_iters=0, cooldown=1.0,
                   learning_rate=recipe.learning_rate * factor, muon_lr=recipe.muon_lr * factor)


def bins(model: GPT, data: Dataset, size: int, tokens: int) -> list[float]:
    """Loss on the sample of the validation split, nats a token, by 16 positions."""
    losses = training.by_position(model, training.sample(data, size, tokens))
    return losses.view(-1, BIN).mean(1).tolist()


def config(size: int, vocab_size: int) -> GPTConfig:
    return GPTConfig(vocab_size, size, n_layer=2, n_head=4, n_embd=64)


def trial(seed: int, updates: int, shares: list[float], tokens: int) -> dict[str, Any]:
    """All arms of a seed: a training in short windows, from which those that widen branch off."""
    data, recipe = training.stdlib(TOKENIZER), Recipe(max_iters=updates)
    batches = training.windows(data, BATCH // WIDE, WIDE, seed)
    torch.manual_seed(seed)
    arms = {1.0: (0, 0.0, GPT(config(WIDE, data.vocab_size)))}  # updates, CPU seconds so far, model
    torch.manual_seed(seed)
    model, begun = GPT(config(T, data.vocab_size)), time.process_time()
    stops = {round(updates * (1 - share)): share for share in shares}

    def branch_off(step: int) -> None:
        if step in stops:
            seconds = time.process_time() - begun
            wide = training.widened(model, config(WIDE, data.vocab_size))
            arms[stops[step]] = step, seconds, wide

    training.train(model, cut(batches, T), recipe, branch_off)
    short = {"seed": seed, "seconds": arms[0.0][1], "loss": bins(model, data, T, tokens)}
    runs = []
    for share, (done, seconds, wide) in sorted(arms.items()):
        begun = time.process_time()
        training.train(wide, cut(batches, WIDE, done), rest_of(recipe, done) if done else recipe)
        runs.append({"seed": seed, "share": share, "seconds": seconds + time.process_time() - begun,
                     "loss": bins(wide, data, WIDE, tokens)})
    return {"short": short, "runs": runs}


def measure(lab: Lab) -> common.Result:
    training.needs("wpe.weight")
    size = QUICK if lab.quick else FULL
    training.stdlib(TOKENIZER)  # prepared once, not by every process
    sizes = {key: value for key, value in size.items() if key != "seeds"}
    found = lab.trials(trial, [{"seed": seed, **sizes} for seed in size["seeds"]])
    return {"size": size, "short": [one["short"] for one in found],
            "runs": [run for one in found for run in one["runs"]]}


def of_share(result: common.Result, share: float | None) -> dict[str, list[float]]:
    """Loss of all and of late positions, CPU seconds, by seed; None: short windows to the end."""
    runs = result["short"] if share is None else select(result["runs"], share=share)
    return {"all": [fmean(r["loss"]) for r in runs],
            "late": [fmean(r["loss"][-(len(r["loss"]) // 4):]) for r in runs],
            "seconds": [r["seconds"] for r in runs]}


def table(result: common.Result) -> common.Rows:
    rows = [[f"updates at {WIDE}", "loss", "against all wide", "last quarter", "against all wide",
             "CPU seconds"]]
    wide = of_share(result, 1.0)
    for share in [None, *result["size"]["shares"], 1.0]:
        arm = of_share(result, share)
        row = [f"none, read at {T}" if share is None else f"{share:.0%}"]
        for what in ("all", "late"):
            gain = "" if share == 1 else format_difference(arm[what], wide[what])
            row += [format_mean(arm[what]), gain]
        rows.append([*row, format_mean(arm["seconds"], 1)])
    return rows


def draw(result: common.Result, fig: Any) -> None:
    left, right = fig.subplots(1, 2)
    shares = [*result["size"]["shares"], 1.0]
    names = [f"{share:.0%}" for share in shares]
    for color, what, label in ((COLORS[0], "late", "last quarter"),
                               (COLORS[1], "all", "all positions")):
        losses = [of_share(result, share)[what] for share in shares]
        common.draw_seeds(left, names, losses, color, label)
    left.axhline(fmean(of_share(result, None)["all"]), color="#333333", linestyle="--",
                 linewidth=1, label=f"not widened, read at {T}")
    left.set_xlabel(f"share of the tokens in windows of {WIDE} (not to scale)")
    left.set_ylabel("validation loss (nats a token)")
    left.legend(fontsize=10)
    for color, share in zip(COLORS[2:], shares[::-1], strict=False):
        curve = np.mean([run["loss"] for run in select(result["runs"], share=share)], axis=0)
        middles = BIN * (np.arange(len(curve)) + 0.5)
        right.plot(middles, curve, color=color, label=f"{share:.0%}")
    right.axvline(T, color="#999999", linewidth=1)
    right.set_xlabel(f"position (trained at {T}, then {WIDE})")
    right.set_ylabel("validation loss (nats a token)")
    right.legend(fontsize=10, title=f"tokens at {WIDE}", ncols=2)


if __name__ == "__main__":
    common.command("wider_window")
