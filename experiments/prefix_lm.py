"""Claim: letting the input be seen in both directions brings nothing: GPT against UniLM.

Source: kexue.fm 9529 and 9547, for equal parameters and data. A window is an input and what follows
it, the target. Both models have the same parameters, initial weights, batches and updates and learn
the target alone; the input is seen causally (GPT) or as a whole (UniLM, arXiv 1905.03197). `text`:
the second half of windows of Python's standard library, given the first; here a third arm does what
one would really do and learns every token. `sort` and `hops` are questions whose answer depends on
the whole input, where UniLM could gain most: numbers in order; pointers p, the answers p[p[p[i]]].

    python -m experiments.prefix_lm [--quick]
"""

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import Generator, default_rng
from torch import Tensor
from torch.nn import functional as F

from experiments import common, training
from experiments.common import Lab
from experiments.training import Batches, MaskedGPT, Recipe
from kit.evaluate import eval_batches
from model import GPTConfig

ARMS = {"gpt": "GPT", "unilm": "UniLM", "all": "GPT, every token"}
LETTERS = 16  # of the questions: numbers or pointers in the input, and as many in the answer
NUMBERS = 32  # that `sort` draws from
UPDATES = {"text": 300, "sort": 200, "hops": 300}  # the quick form breaks off before


@dataclass
class Task:
    vocab_size: int
    prefix: int  # tokens of the input; the rest of a window of T is the target
    T: int
    n_layer: int  # of the model that learns it
    n_embd: int
    batches: Batches  # of all tokens
    fixed: list[tuple[np.ndarray, np.ndarray]]  # what the models are measured on, of all tokens


def sort(rng: Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (rows, LETTERS), with repeats, and the same in order."""
    x = rng.integers(NUMBERS, size=(rows, LETTERS))
    return x, np.sort(x)


def hops(rng: Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Pointers p (rows, LETTERS) into their own row, and p[p[p[i]]]."""
    p = rng.integers(LETTERS, size=(rows, LETTERS))
    return p, np.take_along_axis(p, np.take_along_axis(p, p, 1), 1)


def make_task(name: str, seed: int) -> Task:
    """Windows of text; or an input, a mark and the answer."""
    if name == "text":
        data, T = training.stdlib(), 128
        return Task(data.vocab_size, T // 2, T, 2, 128, training.windows(data, 8, T, seed),
                    list(eval_batches(data.val, T, 32, 8)))

    def batch(rng: Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
        question, answer = {"sort": sort, "hops": hops}[name](rng, rows)
        row = np.hstack([question, np.full((rows, 1), NUMBERS), answer])
        return row[:, :-1], row[:, 1:]

    return Task(NUMBERS + 1, LETTERS + 1, 2 * LETTERS, 3, 64,
                lambda step: batch(default_rng([seed, step]), 64), [batch(default_rng(2**32), 256)])


@torch.inference_mode()
def loss_by_position(model: MaskedGPT, task: Task) -> Tensor:
    """Loss in nats of each token of the target, mean over the fixed windows: (T - prefix + 1,)."""
    target = slice(task.prefix - 1, None)  # the last token of the input predicts the first
    losses = []
    for x, y in task.fixed:
        logits = model(torch.from_numpy(x))[:, target]
        losses.append(F.cross_entropy(logits.mT, torch.from_numpy(y)[:, target], reduction="none"))
    return torch.cat(losses).mean(0)


def build(task: Task, arm: str, seed: int) -> MaskedGPT:
    torch.manual_seed(seed)
    model = MaskedGPT(GPTConfig(task.vocab_size, task.T, task.n_layer, 4, task.n_embd),
                      init_std=0.05)
    model.mask = training.prefix_mask(task.T, task.prefix if arm == "unilm" else 0)
    return model


def learn(task: str, arm: str, seed: int, updates: int, every: int) -> dict[str, list[float]]:
    """Train one arm -> its loss on the target every so many updates, and at the end by position.

    Learning rates are those of a training of UPDATES; it may break off before.
    """
    t = make_task(task, seed)
    model, losses = build(t, arm, seed), []
    batches = t.batches if arm == "all" else training.after_prefix(t.batches, t.prefix)

    def each(step: int) -> None:
        if step % every == 0:
            losses.append(loss_by_position(model, t))

    training.train(model, batches, Recipe(updates, lr_decay_iters=UPDATES[task]), each)
    return {"curve": [loss.mean().item() for loss in losses], "positions": losses[-1].tolist()}


def measure(lab: Lab) -> dict[str, Any]:
    """Curves and losses by position of each task, arm and seed."""
    training.needs_masks()
    training.stdlib()  # prepared once, not by every process
    seeds = range(1, 2 if lab.quick else 6)
    updates = {"text": 2, "hops": 120} if lab.quick else UPDATES
    points = {"text": 1, "hops": 2} if lab.quick else {"text": 5, "sort": 10, "hops": 10}
    jobs = [{"task": task, "arm": arm, "seed": seed, "updates": n, "every": n // points[task]}
            for task, n in updates.items() for arm in ARMS for seed in seeds
            if arm != "all" or task == "text"]
    result: dict[str, Any] = {"seeds": list(seeds), "updates": updates}
    for job, made in zip(jobs, lab.trials(learn, jobs), strict=True):
        result.setdefault(job["task"], {}).setdefault(job["arm"], []).append(made)
    return result


def last(runs: list[dict[str, list[float]]], tokens: int | None = None) -> list[float]:
    """Of each seed, the final loss on the target, or on its first tokens."""
    return [statistics.fmean(run["positions"][:tokens]) for run in runs]


def table(result: dict[str, Any]) -> common.Rows:
    rows = [["loss on the target, nats a token", "GPT", "UniLM", "UniLM - GPT (95 %)",
             "GPT, every token", "it - GPT (95 %)"]]
    for task, tokens in (("text", None), ("text", 8), ("sort", None), ("hops", None)):
        if task in result:
            arms = {arm: last(runs, tokens) for arm, runs in result[task].items()}
            name = f"{task}, first {tokens} tokens" if tokens else task
            row = [name, common.format_mean(arms["gpt"])]
            for arm in ("unilm", "all"):
                row += [common.format_mean(arms[arm]),
                        common.format_difference(arms[arm], arms["gpt"])
                        ] if arm in arms else ["", ""]
            rows.append(row)
    return rows


def draw(result: dict[str, Any], fig: Any) -> None:
    left, right = fig.subplots(1, 2)
    size = 8  # bytes of text that are one point
    points = {arm: np.mean([np.reshape(run["positions"][:64], (-1, size)) for run in runs], 2).T
              for arm, runs in result["text"].items()}  # (points, seeds)
    for i, arm in enumerate(("unilm", "all")):
        middles = size * (np.arange(len(points[arm])) + 0.5)
        common.draw_differences(left, middles + i, points[arm], points["gpt"],
                                common.COLORS[i + 1], f"{ARMS[arm]} - GPT")
    left.axhline(0, color=common.COLORS[0], lw=1.2)
    left.set(title="text", xlabel="bytes after the input", ylabel="difference of loss, nats a byte")
    left.margins(y=0.35)  # room for the legend
    left.legend(loc="upper right")
    for task, style in (("hops", "-"), ("sort", ":")):
        for arm, color in zip(("gpt", "unilm"), common.COLORS, strict=False):
            for i, run in enumerate(result.get(task, {}).get(arm, [])):
                steps = np.linspace(0, result["updates"][task], len(run["curve"]))
                right.plot(steps, run["curve"], style, color=color, lw=1.4, alpha=0.8,
                           label=None if i else f"{task}, {ARMS[arm]}")
    right.set(title="questions", xlabel="updates", ylabel="loss on the answer, nats a token",
              ylim=(0, None))
    right.legend()


if __name__ == "__main__":
    common.command("prefix_lm")
