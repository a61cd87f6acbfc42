"""Claim: large tied embeddings are a bad start, and the loss before training shows it.

Source: kexue.fm 9698. At the start a GPT is little more than its embedding followed by its head. If
the two are one matrix, the present token's own row is in the hidden state, its own logit is large,
and the model bets on the token that it has just read. The loss at step 0 is then far above ln V,
what a model that knows nothing pays. Two layers of width 128, 1,024 tokens, are trained with
embeddings (and head) of several standard deviations: tied; untied, both of that deviation; and tied
with the halves of the final state exchanged, the article's remedy, which adds no parameter and
takes the token's own row out of its logit. Losses at step 0 are set against a prediction.

    python -m experiments.tied [--quick]
"""

import math
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments import common, training
from experiments.common import COLORS, Lab, Result, format_difference, format_mean, select
from experiments.training import Recipe
from kit.evaluate import eval_batches
from model import GPT, GPTConfig, KVCache

LAYERS, WIDTH, CONTEXT = 2, 128, 64
STD, POSITION_STD = 0.02, 0.01  # of the blocks' matrices and of wpe, as GPT draws them
KINDS = ("tied", "untied", "exchanged")
RATES = (0.25, 1.0, 4.0)  # of AdamW for embeddings and head, in units of Recipe's


class Exchanged(GPT):
    """A tied GPT whose final state has its halves exchanged before the head reads it."""

    def hidden(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        x = super().hidden(idx, cache)
        return x.roll(x.size(-1) // 2, -1)


def build(kind: str, std: float, vocab_size: int, seed: int) -> GPT:
    """A new model. Of one seed all are the same, but for the length of the embeddings' rows."""
    torch.manual_seed(seed)
    config = GPTConfig(vocab_size=vocab_size, block_size=CONTEXT, n_layer=LAYERS, n_head=4,
                       n_embd=WIDTH, tie_embeddings=kind != "untied")
    model = (Exchanged if kind == "exchanged" else GPT)(config, STD)
    random, weights = torch.Generator().manual_seed(seed), dict(model.named_parameters())
    with torch.no_grad():
        for name in ("wte.weight", "lm_head.weight"):
            if name in weights:  # a tied head is no parameter of its own
                weights[name].normal_(std=std, generator=random)
    return model


def trial(kind: str, std: float, seed: int, rate: float, rows: int, updates: int,
          tokenizer: str, tokens: int) -> dict[str, float]:
    """Validation losses, nats a token, before the first update and after the last."""
    data = training.stdlib(tokenizer)
    model = build(kind, std, data.vocab_size, seed)
    start = training.validate(model, data, tokens)["loss"]
    recipe = Recipe(max_iters=updates, learning_rate=rate * Recipe.learning_rate)
    training.train(model, training.windows(data, rows, CONTEXT, seed), recipe)
    return {"start": start, "end": training.validate(model, data, tokens)["loss"],
            "parameters": model.num_params()}


def branch_variance() -> float:
    """Variance of what all but wte add to an element of the stream before the final norm.

    Every branch reads a normalised stream, so this depends neither on std nor on kind. With s = STD
    and p = s / sqrt(2 LAYERS), the std of the projections: attention averages n independent values
    of variance C s^2 at position n, its projection makes C p^2 of it; the MLP's 4C hidden values
    are gelu(u), u normal of variance C s^2, and its projection makes 4C p^2 of their mean square.
    """
    inner, projection = WIDTH * STD**2, STD**2 / (2 * LAYERS)
    attention = inner * fmean(1 / n for n in range(1, CONTEXT + 1)) * WIDTH * projection
    u = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    weight = (-u.square() / 2).softmax(0)
    square = (F.gelu(u * math.sqrt(inner), approximate="tanh").square() * weight).sum().item()
    return POSITION_STD**2 + LAYERS * (attention + 4 * WIDTH * projection * square)


def own_logit(std: float) -> float:
    """The logit that a tied model gives to the token that it has just read, at the start.

    The final norm makes the state sqrt(C) long, the token's row is std sqrt(C) long, and the cosine
    between them is the row's share of the stream: std / sqrt(std^2 + variance of all else).
    """
    return WIDTH * std * std / math.hypot(std, math.sqrt(branch_variance()))


def predict(kind: str, std: float, vocab_size: int, repeats: float) -> float:
    """The loss at step 0, nats. repeats: share of targets that are the token just read.

    A row that is not in the state gives a logit of N(0, C std^2). Where C std^2 is small, the mean
    of ln(sum of exp) over V such logits is ln V + C std^2 / 2; here it is taken from 1,000 draws,
    for it grows no faster than std where few logits make the sum.
    """
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, vocab_size, generator=random, dtype=torch.float64)
    logits *= std * math.sqrt(WIDTH)
    own = own_logit(std) if kind == "tied" else 0.0
    if kind == "tied":
        logits[:, 0] = own
    return logits.logsumexp(-1).mean().item() - repeats * own


def measure(lab: Lab) -> Result:
    training.needs("wte.weight", "lm_head.weight", "config.tie_embeddings")
    tokenizer = "byte" if lab.quick else "bpe:1024"
    stds = [0.02, 1.0] if lab.quick else [0.005, 0.02, 0.05, WIDTH**-0.5, 0.2, 1.0]
    size = {"rows": 4 if lab.quick else 8, "updates": 30 if lab.quick else 200,
            "tokenizer": tokenizer, "tokens": 8192 if lab.quick else 32768}
    jobs = [{"kind": kind, "std": std, "seed": seed, "rate": 1.0} for kind in KINDS
            for std in stds if kind != "exchanged" or std > 0.05  # below there is little to mend
            for seed in ([1] if lab.quick else [1, 2, 3])]
    search = [] if lab.quick else [
        {"kind": kind, "std": std, "seed": 9, "rate": rate}
        for kind in KINDS[:2] for std in (0.02, 0.2, 1.0) for rate in RATES]
    data = training.stdlib(tokenizer)  # prepared once, not by every process
    done = lab.trials(trial, [job | size for job in jobs + search])
    runs = [job | result for job, result in zip(jobs + search, done, strict=True)]
    pairs = list(eval_batches(data.val, CONTEXT, 64, size["tokens"] // (64 * CONTEXT)))
    repeats = float(sum((x == y).sum() for x, y in pairs) / sum((y >= 0).sum() for _, y in pairs))
    grid = sorted({*stds, *(0.004 * 1.35**i for i in range(20))})
    predicted = {kind: [predict(kind, std, data.vocab_size, repeats) for std in grid]
                 for kind in KINDS[:2]}
    return {"vocab_size": data.vocab_size, "repeats": repeats, "updates": size["updates"],
            "stds": stds, "runs": runs[: len(jobs)], "search": runs[len(jobs):],
            "grid": grid, "predicted": predicted}


def losses(result: Result, kind: str, std: float, when: str = "end") -> list[float]:
    """By seed."""
    return [run[when] for run in select(result["runs"], kind=kind, std=std)]


def table(result: Result) -> list[list[str]]:
    after = f"after {result['updates']} updates"
    rows = [["std of embeddings", "tied, step 0 (predicted)", "untied, step 0 (predicted)",
             f"tied, {after}", f"untied, {after}", f"exchanged, {after}",
             "tied - untied", "tied - exchanged"]]
    for std in result["stds"]:
        at = result["grid"].index(std)
        starts = [f"{format_mean(losses(result, kind, std, 'start'), 2)} "
                  f"({result['predicted'][kind][at]:.2f})" for kind in KINDS[:2]]
        tied, untied, exchanged = ends = [losses(result, kind, std) for kind in KINDS]
        rows.append([f"{std:.3g}", *starts, *(format_mean(end) if end else "" for end in ends),
                     format_difference(tied, untied),
                     format_difference(tied, exchanged) if exchanged else ""])
    sizes = [f"{select(result['runs'], kind=kind)[0]['parameters']:,}" for kind in KINDS]
    return [*rows, ["parameters", "", "", *sizes, "", ""]]


def draw(result: Result, fig: Any) -> None:
    before, after = fig.subplots(1, 2)
    for kind, color in zip(KINDS, COLORS, strict=False):
        stds = [std for std in result["stds"] if losses(result, kind, std)]
        starts = [fmean(losses(result, kind, std, "start")) for std in stds]
        before.plot(stds, starts, "x" if kind == "exchanged" else "o", color=color, label=kind)
        if kind in result["predicted"]:
            before.plot(result["grid"], result["predicted"][kind], color=color, lw=1)
        common.draw_seeds(after, stds, [losses(result, kind, std) for std in stds], color)
    entropy = math.log(result["vocab_size"])
    before.axhline(entropy, color=COLORS[-1], lw=1, ls=":")
    before.text(1.2, entropy * 1.02, "ln V", ha="right", va="bottom")
    before.set(xscale="log", yscale="log", ylabel="loss before training (nats a token)",
               title="Step 0; lines: predicted", yticks=[7, 10, 20, 50, 100],
               yticklabels=["7", "10", "20", "50", "100"])
    after.set(xscale="log", ylabel="validation loss (nats a token)",
              title=f"After {result['updates']} updates; dots: seeds")
    for ax in (before, after):
        ax.set_xlabel("standard deviation of the embeddings")
        ax.minorticks_off()
    before.legend(loc="upper left")


if __name__ == "__main__":
    common.command("tied")
