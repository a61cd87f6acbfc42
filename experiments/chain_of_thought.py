"""Claim: chain of thought buys computation. What cannot be answered at once can be worked out.

Source: Su Jianlin (kexue.fm); theory in arXiv 2305.15408, chains of thought in arXiv 2201.11903,
filler tokens in arXiv 2404.15758. Two problems, asked of the same model in several ways:

    spread   are all |x_i - x_j| < a?   4 1 8 <5?   440y 143y 187n:n
    sum      two numbers of n digits    345+678=    13 12 10:1023

at once (the answer alone), after this reasoning, or after as many dots, which mean nothing. Each
model learns one problem in one way, from the same examples in as many updates, and then answers
fresh ones greedily. One more answers at once, after twice the updates on twice the examples.

    python -m experiments.chain_of_thought [--quick]
"""

import json
import os
import random
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from data.dataset import Dataset
from data.making.build import prepare
from experiments import common
from experiments.common import Lab, select
from experiments.training import Recipe, train, windows
from kit.writing.window import steps
from model import GPT, GPTConfig

ARMS = {"reasoning": "after reasoning", "dots": "after dots", "direct": "at once",
        "twice": "at once, twice the updates"}
ROWS, BLOCK = 32, 96  # of a batch; tokens of the longest example, and some
FULL = {"spread": {"updates": 450, "trained": [3, 4, 5, 6, 7, 8], "tested": [4, 6, 8, 10]},
        "sum": {"updates": 700, "trained": [2, 3, 4, 5, 6], "tested": [2, 3, 4, 5, 6]}}
QUICK = {"spread": {"updates": 180, "trained": [3], "tested": [3]},
         "sum": {"updates": 40, "trained": [2], "tested": [2]}}


class Example(NamedTuple):
    """A question, the way to its answer, and the answer."""

    prompt: str
    reasoning: str
    answer: str

    def completion(self, arm: str) -> str:
        """What a model of this arm learns to write; the answer stands after the last colon."""
        if arm in ("direct", "twice"):
            return self.answer
        way = self.reasoning if arm == "reasoning" else "." * len(self.reasoning)
        return f"{way}:{self.answer}"


def spread(rng: random.Random, n: int) -> Example:
    """n digits: are they all less than a apart? Yes in half of the cases, whatever a is.

    The smallest and the largest are there once each, in any places, and a or a - 1 apart. The
    reasoning has after each digit these two so far, their difference, and whether it is below a.
    """
    a, yes = rng.randrange(3, 9), rng.random() < 0.5
    width = a - 1 if yes else a
    least = rng.randrange(10 - width)
    digits = [least, least + width, *(least + rng.randrange(1, width) for _ in range(n - 2))]
    rng.shuffle(digits)
    steps = []
    for i in range(1, n + 1):
        low, high = min(digits[:i]), max(digits[:i])
        steps.append(f"{low}{high}{high - low}{'y' if high - low < a else 'n'}")
    return Example(f"{' '.join(map(str, digits)):<20}<{a}?", " ".join(steps), "y" if yes else "n")


def addition(rng: random.Random, n: int) -> Example:
    """Two numbers of n digits; the reasoning sums digits and carry, from the right."""
    a, b = (rng.randrange(10 ** (n - 1), 10**n) for _ in range(2))
    steps, carry = [], 0
    for i in range(n):
        total = a // 10**i % 10 + b // 10**i % 10 + carry
        steps.append(f"{total:02}")
        carry = total // 10
    return Example(f"{a:>6}+{b:>6}=", " ".join(steps), str(a + b))


PROBLEMS = {"spread": spread, "sum": addition}


def examples(problem: str, trained: list[int], n_train: int, tested: list[int], n_test: int,
             seed: int) -> tuple[list[Example], dict[int, list[Example]]]:
    """Examples to learn from, and fresh ones for each size: what these ask is never learned."""
    make, rng = PROBLEMS[problem], random.Random(seed)
    tests = {n: [make(rng, n) for _ in range(n_test)] for n in tested}
    asked, lessons = {e.prompt for of_size in tests.values() for e in of_size}, []
    while len(lessons) < n_train:
        example = make(rng, rng.choice(trained))
        if example.prompt not in asked:
            lessons.append(example)
    return lessons, tests


def prepared(lessons: list[Example], arm: str, folder: Path) -> Dataset:
    """A data set in this folder, made of lines of JSON like anybody's prompts and completions."""
    lines = (json.dumps({"prompt": e.prompt, "completion": e.completion(arm)}) for e in lessons)
    file = folder / "lessons.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    os.environ["BONSAI_DATA"] = str(folder)
    return Dataset(prepare([str(file)], "lessons", "byte", val_fraction=0, workers=0,
                           say=lambda line: None))


def written(model: GPT, data: Dataset, prompts: list[str], room: int) -> list[str]:
    """What the model writes, greedily, after prompts of one length, before the separator."""
    idx = torch.tensor([[data.separator, *data.tokenizer.encode(p)] for p in prompts])
    ids = torch.stack(list(steps(model, idx, room, lambda logits: logits.argmax(-1))), dim=1)
    rows = ([*row, data.separator] for row in ids.tolist())  # (B, room), and an end
    return [data.tokenizer.decode(row[:row.index(data.separator)]) for row in rows]


def trial(problem: str, arm: str, seed: int, updates: int, trained: list[int], tested: list[int],
          n_test: int, width: int) -> dict:
    """Train one model -> by size: share of right answers, mean tokens of what it writes."""
    updates *= 2 if arm == "twice" else 1
    lessons, tests = examples(problem, trained, updates * ROWS, tested, n_test, seed)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        data = prepared(lessons, arm, Path(folder))
        model = GPT(GPTConfig(data.vocab_size, BLOCK, n_layer=2, n_head=width // 32, n_embd=width))
        recipe = Recipe(max_iters=updates, warmup_iters=updates // 20)
        losses = train(model, windows(data, ROWS, BLOCK, seed), recipe)
    right, tokens = {}, {}
    for n, of_size in tests.items():
        room = 16 + max(len(e.completion(arm)) for e in of_size)  # bytes, with room for more
        texts = written(model, data, [e.prompt for e in of_size], room)
        right[str(n)] = fmean(text.rpartition(":")[2] == e.answer
                              for text, e in zip(texts, of_size, strict=True))
        tokens[str(n)] = fmean(map(len, texts))
    return {"problem": problem, "arm": arm, "seed": seed, "loss": fmean(losses[-updates // 20:]),
            "right": right, "tokens": tokens}


def measure(lab: Lab) -> common.Result:
    plan, arms, seeds = (QUICK, ("reasoning", "direct"), 1) if lab.quick else (FULL, ARMS, 3)
    size = {"n_test": 100, "width": 64} if lab.quick else {"n_test": 200, "width": 128}
    jobs = [{"problem": problem, "arm": arm, "seed": seed, **sizes, **size}
            for problem, sizes in plan.items() for arm in arms for seed in range(seeds)]
    return {"plan": plan, "trials": lab.trials(trial, jobs)}


def right_answers(result: common.Result, problem: str, arm: str, n: int) -> list[float]:
    """Per cent, one number a seed."""
    return [100 * t["right"][str(n)] for t in select(result["trials"], problem=problem, arm=arm)]


def table(result: common.Result) -> common.Rows:
    columns = sorted({n for sizes in result["plan"].values() for n in sizes["tested"]
                      if n % 2 == 0 or len(sizes["tested"]) == 1})
    rows = [["right answers, %", *(f"n = {n}" for n in columns), "longest n, against at once",
             "its tokens"]]
    for problem, sizes in result["plan"].items():
        longest = max(sizes["trained"])
        direct = right_answers(result, problem, "direct", longest)
        for arm in {t["arm"]: None for t in result["trials"]}:
            right = {n: right_answers(result, problem, arm, n) for n in sizes["tested"]}
            cells = [common.format_mean(right[n], 1) if n in right else "" for n in columns]
            gain = "" if arm == "direct" else common.format_difference(right[longest], direct, 1)
            tokens = fmean(t["tokens"][str(longest)]
                           for t in select(result["trials"], problem=problem, arm=arm))
            rows.append([f"{problem}, {ARMS[arm]}", *cells, gain, f"{tokens:.1f}"])
    return rows


def draw(result: common.Result, fig: Any) -> None:
    left, right = fig.subplots(1, 2, sharey=True)
    left.set(title="Are all of n digits less than a apart?", xlabel="digits n",
             ylabel="right answers, %", ylim=(-4, 104))
    right.set(title="The sum of two numbers", xlabel="digits of each number")
    for ax, (problem, sizes) in zip((left, right), result["plan"].items(), strict=True):
        ax.set_xticks(sizes["tested"])
        for arm, color in zip({t["arm"]: None for t in result["trials"]}, common.COLORS,
                              strict=False):
            answers = [right_answers(result, problem, arm, n) for n in sizes["tested"]]
            common.draw_seeds(ax, sizes["tested"], answers, color, ARMS[arm])
    left.axhline(50, color="#888888", linestyle=":", linewidth=1.2)
    longest, end = max(result["plan"]["spread"]["trained"]), left.get_xlim()[1]
    left.axvspan(longest + 0.4, end, color="#888888", alpha=0.12, linewidth=0)
    left.text((longest + 0.4 + end) / 2, 8, "longer than\nin training", ha="center", fontsize=11)
    left.text(4.2, 40, "chance is 50 %", fontsize=11, color="#666666")
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=11)


if __name__ == "__main__":
    common.command("chain_of_thought")
