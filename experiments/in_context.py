"""Claim: learning from the context appears at one time in training, and takes two layers.

Source: Elhage et al. 2021 (transformer-circuits.pub/2021/framework), Olsson et al. 2022 (arXiv
2209.11895). An induction head finds what followed the present token before and predicts it again.
It needs a head of an earlier layer that tells each position which token was before it.

Models of 1, 2 and 4 layers learn windows of Python's standard library ("text"), or batches of which
three quarters are random letters repeated with a period of their own, others in each window
("mixed"). During training: the loss on the first and the second occurrence of random sequences. In
the end: how much a head looks where an induction head would, and few-shot accuracy on pairs of a
key (a-z) and its value (A-Z), another mapping in each sequence. No model has seen such pairs.

    python -m experiments.in_context [--quick]
"""

import string
from typing import Any

import numpy as np
import torch
from numpy.random import Generator, default_rng
from torch import Tensor
from torch.nn import functional as F

from experiments import common, training
from experiments.common import Lab
from experiments.training import Batches, Recipe
from model import GPT, GPTConfig

T = 64  # context
ROWS = 32  # of a batch
LETTERS = np.frombuffer(string.ascii_letters.encode(), np.uint8).astype(np.int64)  # as bytes
PERIODS = 8, 32  # shortest and longest of the repeated sequences that are learned
REPEATED = 24  # distinct letters of the sequences that models are measured on
KEYS = 8  # of a mapping
SHOTS = T // 2 - 1
UPDATES = {"mixed": 500, "text": 1000}  # the quick form breaks off before
FALLEN = 2.0  # nats: any of the 24 letters of the first occurrence would be ln 24 = 3.2


def repeats(rng: Generator, rows: int, length: int) -> np.ndarray:
    """Random letters, repeated with a random period in each row: (rows, length)."""
    low, high = PERIODS
    return np.stack([np.resize(rng.choice(LETTERS, rng.integers(low, high + 1)), length)
                     for _ in range(rows)])


def twice(rng: Generator, rows: int) -> np.ndarray:
    """REPEATED different letters, and the same again: (rows, 2 * REPEATED)."""
    once = np.stack([rng.permutation(LETTERS)[:REPEATED] for _ in range(rows)])
    return np.hstack([once, once])


def mappings(rng: Generator, rows: int) -> np.ndarray:
    """key, value, key, value, ...: KEYS keys with a value each, drawn at random (rows, T)."""
    lower, upper = LETTERS[:26], LETTERS[26:]
    made = []
    for _ in range(rows):
        keys, values = rng.permutation(lower)[:KEYS], rng.permutation(upper)[:KEYS]
        drawn = rng.integers(KEYS, size=T // 2)
        made.append(np.stack([keys[drawn], values[drawn]], 1).ravel())
    return np.stack(made)


def mixed(text_windows: Batches, rows: int, seed: int) -> Batches:
    """Text windows, and below them `rows` rows of repeated letters."""
    def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = text_windows(step)
        letters = repeats(default_rng([seed, step]), rows, T + 1)
        return np.vstack([x, letters[:, :-1]]), np.vstack([y, letters[:, 1:]])

    return batch


@torch.inference_mode()
def occurrences(model: GPT, sequences: Tensor) -> tuple[float, float]:
    """Loss in nats on the first and the second occurrence, of all letters but the first."""
    x, y = sequences[:, :-1], sequences[:, 1:]
    losses = F.cross_entropy(model(x).mT, y, reduction="none")  # (rows, 2 * REPEATED - 1)
    return losses[:, : REPEATED - 1].mean().item(), losses[:, REPEATED:].mean().item()


@torch.inference_mode()
def accuracy(model: GPT, pairs: Tensor) -> list[float]:
    """Share of values that the most probable token is, after 0, 1, ... SHOTS other pairs."""
    right = model(pairs[:, :-1]).argmax(-1) == pairs[:, 1:]
    return right[:, ::2].float().mean(0).tolist()


@torch.inference_mode()
def induction(model: GPT, sequences: Tensor) -> float:
    """The most that a head looks, from a repeated letter, at what followed it before; mean of all.

    1 for a perfect induction head (the prefix matching score of Olsson et al.).
    """
    most = 0.0
    for scores in training.attention_scores(model, sequences):
        after = scores.softmax(-1).diagonal(1 - REPEATED, -2, -1)  # query i, key i - REPEATED + 1
        most = max(most, after[..., 1:].mean((0, 2)).max().item())  # from the second occurrence on
    return most


def learn(kind: str, layers: int, seed: int, updates: int, points: int) -> dict[str, Any]:
    """Train one model, measured `points` times; rates are those of a training of UPDATES."""
    data, texts = training.stdlib(), ROWS if kind == "text" else ROWS // 4
    batches = training.windows(data, texts, T, seed)
    if kind == "mixed":
        batches = mixed(batches, ROWS - texts, seed)
    sequences = torch.from_numpy(twice(default_rng(2**32), 128))  # the same for all
    pairs = torch.from_numpy(mappings(default_rng(2**32 + 1), 256))
    torch.manual_seed(seed)
    model = GPT(GPTConfig(data.vocab_size, T, n_layer=layers, n_head=2, n_embd=64), init_std=0.05)
    recipe = Recipe(updates, lr_decay_iters=UPDATES[kind])
    losses, every = [], updates // points

    def each(step: int) -> None:
        if step % every == 0:
            losses.append(occurrences(model, sequences))

    training.train(model, batches, recipe, each)
    first, second = map(list, zip(*losses, strict=True))
    return {"first": first, "second": second, "every": every, "accuracy": accuracy(model, pairs),
            "induction": induction(model, sequences)}


def measure(lab: Lab) -> dict[str, Any]:
    training.needs_scores()
    training.stdlib()  # prepared once, not by every process
    plan = ([("mixed", (1, 2), 1, 210, 6)] if lab.quick else  # data, layers, seeds, updates, points
            [(kind, (1, 2, 4), n, UPDATES[kind], 25) for kind, n in (("mixed", 5), ("text", 3))])
    jobs = [{"kind": kind, "layers": n, "seed": seed, "updates": updates, "points": points}
            for kind, depths, seeds, updates, points in plan
            for n in depths for seed in range(1, seeds + 1)]
    result: dict[str, Any] = {}
    for job, made in zip(jobs, lab.trials(learn, jobs), strict=True):
        result.setdefault(job["kind"], {}).setdefault(str(job["layers"]), []).append(made)
    return result


def remembering(shots: int) -> float:
    """Accuracy of one that remembers all pairs and guesses among all 26 where the key is new."""
    return 1 - (1 - 1 / KEYS) ** shots * 25 / 26


def fell(run: dict[str, Any]) -> int | None:
    """The update by which the loss on the second occurrence is below FALLEN, if it ever is."""
    return next((i * run["every"] for i, loss in enumerate(run["second"]) if loss < FALLEN), None)


def table(result: dict[str, Any]) -> common.Rows:
    rows = [["trained on, layers", "first occurrence", "second occurrence",
             f"below {FALLEN:g} nats at update", "best head's look", "8 shots right",
             f"{SHOTS} shots right"]]
    for kind, depths in result.items():
        for layers, runs in depths.items():
            steps = [step for run in runs if (step := fell(run)) is not None]
            when = f"{min(steps)} to {max(steps)}" if steps else "never"
            if 0 < len(steps) < len(runs):
                when += f", {len(steps)} of {len(runs)}"
            losses = [[run[key][-1] for run in runs] for key in ("first", "second")]
            looks = [run["induction"] for run in runs]
            right = [[run["accuracy"][k] for run in runs] for k in (8, SHOTS)]
            first, second, look, few, many = (
                common.format_mean(values, 2) for values in (*losses, looks, *right))
            rows.append([f"{kind}, {layers}", first, second, when, look, few, many])
    return rows


def draw(result: dict[str, Any], fig: Any) -> None:
    left, right = fig.subplots(1, 2)
    for kind, depths in result.items():
        for (layers, runs), color in zip(depths.items(), common.COLORS, strict=False):
            style, name = "-" if kind == "mixed" else ":", f"{kind}, layers: {layers}"
            for i, run in enumerate(runs):
                steps = np.arange(len(run["second"])) * run["every"]
                left.plot(steps, run["second"], style, color=color, lw=1.4, alpha=0.8,
                          label=None if i else name)
            right.plot(np.mean([run["accuracy"] for run in runs], axis=0), style, color=color)
    left.set(xlabel="updates", ylabel="loss on the second occurrence, nats", ylim=(0, None))
    left.legend(loc="center right")
    known = [remembering(k) for k in range(SHOTS + 1)]
    right.plot(known, color="0.6", lw=5, alpha=0.5, zorder=0, label="remembers all pairs")
    right.axhline(1 / KEYS, color="0.4", ls="--", lw=1, label="a value shown, at random")
    right.set(xlabel="pairs before the question (shots)", ylabel="accuracy", ylim=(0, 1))
    right.legend()


if __name__ == "__main__":
    common.command("in_context")
