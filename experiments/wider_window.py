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
from experiments import common
from experiments.common import COLORS, spell, spell_difference
from experiments.lab import Lab
from experiments.training import (
    Batches,
    Recipe,
    Weights,
    by_position,
    needs,
    sample,
    text,
    train,
    weights_of,
    windows,
)
from kit.positions import resize
from model import GPT, GPTConfig

TOKENIZER = "bpe:512"
T, WIDE, BATCH = 64, 256, 2048  # tokens: short and wide windows, an update
BIN = 16  # positions
FLOOR = 0.3  # of the peak rates, at least, where wide windows begin
SHARES = [0.0, 0.05, 0.1, 0.25, 0.5]  # of the updates in wide windows; 1: from the beginning
FULL = {"seeds": [1, 2, 3], "updates": 900, "shares": SHARES, "tokens": 131072}
QUICK = {"seeds": [1, 2], "updates": 40, "shares": [0.0, 0.25], "tokens": 8192}


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
    return by_position(model, sample(data, size, tokens)).view(-1, BIN).mean(1).tolist()


def start(seed: int, updates: int, stops: list[int], tokens: int) -> dict[str, Any]:
    """Train in short windows to the last stop: the weights and CPU seconds at each."""
    data, kept = Dataset(text(TOKENIZER)), {}
    torch.manual_seed(seed)
    model = GPT(GPTConfig(data.vocab_size, T, n_layer=2, n_head=4, n_embd=64))
    begun = time.process_time()

    def keep(step: int) -> None:
        if step in stops:
            kept[step] = {"seconds": time.process_time() - begun, "weights": weights_of(model)}

    train(model, cut(windows(data, BATCH // WIDE, WIDE, seed), T), Recipe(max_iters=updates),
          each=keep)
    return {"kept": kept, "short": bins(model, data, T, tokens)}


def finish(seed: int, updates: int, done: int, weights: Weights | None,
           tokens: int) -> dict[str, Any]:
    """The updates left after `done`, in wide windows: from interpolated positions, or all of them.
    """
    data, recipe = Dataset(text(TOKENIZER)), Recipe(max_iters=updates)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(data.vocab_size, WIDE, n_layer=2, n_head=4, n_embd=64))
    if weights is not None:
        tensors = {name: torch.from_numpy(a) for name, a in weights.items()}
        tensors["wpe.weight"] = resize(tensors["wpe.weight"], WIDE, "interpolate")
        model.load_state_dict(tensors)
        recipe = rest_of(recipe, done)
    begun = time.process_time()
    train(model, cut(windows(data, BATCH // WIDE, WIDE, seed), WIDE, done), recipe)
    return {"seconds": time.process_time() - begun, "loss": bins(model, data, WIDE, tokens)}


def measure(lab: Lab) -> common.Result:
    needs("wpe.weight")
    size = QUICK if lab.quick else FULL
    updates, tokens = size["updates"], size["tokens"]
    stops = {share: round(updates * (1 - share)) for share in size["shares"]}
    text(TOKENIZER)  # before trials would prepare it side by side
    starts = lab.trials(start, [{"seed": seed, "updates": updates, "stops": list(stops.values()),
                                 "tokens": tokens} for seed in size["seeds"]])
    jobs, spent = [], []
    for seed, begun in zip(size["seeds"], starts, strict=True):
        for share in [*stops, 1.0]:
            done = stops.get(share, 0)
            kept = begun["kept"].get(done, {"seconds": 0.0, "weights": None})
            jobs.append({"seed": seed, "updates": updates, "done": done, "tokens": tokens,
                         "weights": kept["weights"]})
            spent.append({"seed": seed, "share": share, "seconds": kept["seconds"]})
    runs = [{**run, "seconds": run["seconds"] + end["seconds"], "loss": end["loss"]}
            for run, end in zip(spent, lab.trials(finish, jobs), strict=True)]
    short = [{"seed": seed, "seconds": begun["kept"][updates]["seconds"], "loss": begun["short"]}
             for seed, begun in zip(size["seeds"], starts, strict=True)]
    return {"size": size, "short": short, "runs": runs}


def of_share(result: common.Result, share: float | None) -> dict[str, list[float]]:
    """Loss of all and of late positions, CPU seconds, by seed; None: short windows to the end."""
    runs = [r for r in result["runs"] if r["share"] == share] if share is not None \
        else result["short"]
    return {"all": [fmean(r["loss"]) for r in runs],
            "late": [fmean(r["loss"][-(len(r["loss"]) // 4):]) for r in runs],
            "seconds": [r["seconds"] for r in runs]}


def table(result: common.Result) -> common.Rows:
    rows = [[f"updates at {WIDE}", "loss", "against all wide", "last quarter", "against all wide",
             "CPU seconds"]]
    wide = of_share(result, 1.0)
    for share in [None, *result["size"]["shares"], 1.0]:
        arm, row = of_share(result, share), [f"none, read at {T}" if share is None
                                             else f"{share:.0%}"]
        for what in ("all", "late"):
            row += [spell(arm[what]),
                    "" if share == 1 else spell_difference(arm[what], wide[what])]
        rows.append([*row, spell(arm["seconds"], 1)])
    return rows


def draw(result: common.Result, fig: Any) -> None:
    left, right = fig.subplots(1, 2)
    shares = [*result["size"]["shares"], 1.0]
    names = [f"{share:.0%}" for share in shares]
    for color, what, label in ((COLORS[0], "late", "last quarter"),
                               (COLORS[1], "all", "all positions")):
        arms = [of_share(result, share)[what] for share in shares]
        left.plot(names, [fmean(arm) for arm in arms], color=color, label=label)
        for name, arm in zip(names, arms, strict=True):
            left.plot([name] * len(arm), arm, "o", color=color, markersize=3)
    left.axhline(fmean(of_share(result, None)["all"]), color="#333333", linestyle="--",
                 linewidth=1, label=f"not widened, read at {T}")
    left.set_xlabel(f"share of the tokens in windows of {WIDE} (not to scale)")
    left.set_ylabel("validation loss (nats a token)")
    left.legend(fontsize=10)
    for color, share in zip(COLORS[2:], shares[::-1], strict=False):
        curve = np.mean([r["loss"] for r in result["runs"] if r["share"] == share], axis=0)
        middles = BIN * (np.arange(len(curve)) + 0.5)
        right.plot(middles, curve, color=color, label=f"{share:.0%}")
    right.axvline(T, color="#999999", linewidth=1)
    right.set_xlabel(f"position (trained at {T}, then {WIDE})")
    right.set_ylabel("validation loss (nats a token)")
    right.legend(fontsize=10, title=f"tokens at {WIDE}", ncols=2)


if __name__ == "__main__":
    common.command("wider_window")
