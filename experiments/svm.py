"""Claim: attention that is trained by gradient descent becomes a support vector machine.

Source: arXiv 2308.16898, and its code umich-sota/TF-as-SVM. A sample is T tokens x_t, a query z and
a label y; attention answers v . sum_t p_t x_t, where p is softmax(x_t^T W z), and only W learns. It
grows for ever, but its direction comes to rest: at the smallest W with (x_s - x_t)^T W z >= 1 for
all samples and t, x_s being the token that softmax has selected; smallest in Frobenius' norm where
W is trained, in the nuclear norm (sum of singular values) where K and Q of W = K Q^T are.

    python -m experiments.svm [--quick]
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from experiments import common
from experiments.common import Lab
from experiments.training import needs
from kit.errors import UserError
from model import GPT, GPTConfig

N, T, D, RATE = 6, 8, 10, 0.1  # samples, tokens of each, width, length of a step: the paper's
STEPS = (0, 10, 20, 30, 50, 70, 100, 140, 200, 300, 500, 700, 1000, 1400, 2000)
WAYS = {"w": ("W", "frobenius", "nuclear"),  # name, norm that theory expects, the other norm
        "kq": ("K Qᵀ", "nuclear", "frobenius"), "paper": ("K Qᵀ + penalty", "nuclear", "frobenius"),
        "model": ("K Qᵀ of CausalSelfAttention", "nuclear", "frobenius")}
PAPER = {200: "0.88", 500: "0.97", 1000: "0.99"}  # means of W in the authors' local_converge.ipynb


class Problem(NamedTuple):
    X: Tensor  # (N, T, D), tokens of length 1
    Z: Tensor  # (N, D), queries of length 1
    v: Tensor  # (D,), the linear head, of length 1
    y: Tensor  # (N,), labels, 1 or -1

    def scores(self, W: Tensor) -> Tensor:
        """x_t^T W z, (N, T)."""
        return torch.einsum("ntd,de,ne->nt", self.X, W, self.Z)

    def worth(self) -> Tensor:
        """(N, T): what a sample answers that sees this token alone, times its label."""
        return self.y[:, None] * (self.X @ self.v)

    def answers(self, W: Tensor) -> Tensor:
        return (self.scores(W).softmax(-1) * (self.X @ self.v)).sum(-1)  # (N,)


def draw_problem(seed: int) -> tuple[Problem, Tensor]:
    """In float64; and W, K, Q (3, D, D) to start from, drawn as nn.Linear does."""
    rng = torch.Generator().manual_seed(seed)
    X, Z, v = (F.normalize(torch.randn(shape, generator=rng, dtype=torch.float64), dim=-1)
               for shape in ((N, T, D), (N, D), (D,)))
    y = torch.randint(0, 2, (N,), generator=rng).double() * 2 - 1
    starts = torch.empty(3, D, D, dtype=torch.float64).uniform_(-1, 1, generator=rng)
    return Problem(X, Z, v, y), starts / math.sqrt(D)


def product(W: Tensor, Q: Tensor | None = None) -> Tensor:
    return W if Q is None else W @ Q.T  # from W itself, or from K and Q


def direction(p: Problem, *params: Tensor) -> tuple[Tensor, ...]:
    """The gradient of sum log(1 + exp(-y answer)) by W, or by K and Q, times a positive number.

    With p_t = 1 in all digits, softmax's own p_t (worth_t - sum_j p_j worth_j) is but rounding. As
    sum_j p_t p_j (worth_t - worth_j) it is exact; divided by the largest it cannot underflow.
    """
    W, worth = product(*params), p.worth()
    logp = p.scores(W).log_softmax(-1)
    slope = F.logsigmoid(-p.y * p.answers(W))  # log of -dloss/danswer
    pairs = slope[:, None, None] + logp[:, :, None] + logp[:, None, :]  # (N, T, T)
    pairs = pairs.masked_fill(torch.eye(T, dtype=torch.bool), -torch.inf)
    pairs = (pairs - pairs.max()).exp()
    by_score = -(pairs * (worth[:, :, None] - worth[:, None, :])).sum(-1)  # (N, T)
    by_w = torch.einsum("nt,ntd,ne->de", by_score, p.X, p.Z)
    return (by_w @ params[1], by_w.T @ params[0]) if len(params) > 1 else (by_w,)


def penalised(answer: Callable[..., Tensor], y: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
    """Gradients as the authors take them: autograd's, and a penalty where these are rounding."""
    params = tuple(a.detach().requires_grad_() for a in params)
    penalty = torch.finfo(y.dtype).eps * sum(a.square().sum() for a in params)
    return torch.autograd.grad(F.softplus(-y * answer(*params)).mean() + penalty, params)


def one_head() -> nn.Module:
    """The attention of model.py, with one head of width D."""
    return GPT(GPTConfig(vocab_size=1, block_size=T, n_layer=1, n_head=1, n_embd=D)).h[0].attn


def needs_plain_attention() -> None:
    """UserError if attention of model.py is not that of `Problem.answers`."""
    needs("h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight")
    p, (_, K, Q) = draw_problem(0)
    p, K, Q = Problem(*(a.float() for a in p._replace(Z=p.X[:, -1]))), K.float(), Q.float()
    try:
        same = torch.allclose(project(p, one_head(), K, Q), p.answers(K @ Q.T / math.sqrt(D)),
                              atol=1e-5)
    except (RuntimeError, TypeError):  # of other shapes or another call
        same = False
    if not same:
        raise UserError("this experiment needs attention with one head to be softmax(q k / √d) v, "
                        "and that of model.py computes something else")


def project(p: Problem, attention: nn.Module, K: Tensor, Q: Tensor) -> Tensor:
    """The project's answers (N,): the last token asks, values are tokens, W is K Q^T / sqrt(D)."""
    same = torch.eye(D)
    weights = {"c_attn.weight": torch.cat([Q.T, K.T, same]), "c_proj.weight": same}
    return functional_call(attention, weights, (p.X, torch.arange(T), None, None))[:, -1] @ p.v


def descend(params: Sequence[Tensor], gradient: Callable, steps: Sequence[int]) -> list[Tensor]:
    """Each step has length RATE in each matrix -> W after each of `steps`, in float64."""
    path = []
    for step in range(max(steps) + 1):
        if step in steps:
            path.append(product(*params).double())
        params = [a - RATE * g / g.norm() for a, g in zip(params, gradient(*params), strict=True)]
    return path


def constraints(p: Problem, chosen: Tensor) -> np.ndarray:
    """(N * (T - 1), D * D): times a flat W it is (x_s - x_t)^T W z for each t but the chosen s."""
    ahead = p.X[torch.arange(N), chosen][:, None] - p.X  # (N, T, D)
    others = torch.arange(T) != chosen[:, None]
    return torch.einsum("ntd,ne->ntde", ahead, p.Z)[others].flatten(1).numpy()


def solve(A: np.ndarray, norm: str) -> np.ndarray:
    """The W (D, D) of least norm, "frobenius" or "nuclear", with A @ flat W >= 1."""
    import cvxpy as cp  # slow to import
    W = cp.Variable((D, D))
    size = cp.normNuc(W) if norm == "nuclear" else cp.sum_squares(W)
    cp.Problem(cp.Minimize(size), [A @ cp.vec(W, order="C") >= 1]).solve(solver=cp.CLARABEL)
    return W.value


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return round(float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)), 5)


def compare(p: Problem, path: list[Tensor], norm: str) -> dict[str, Any]:
    """A path beside the solutions for the tokens selected at its end; norm: what theory expects."""
    chosen, best = p.scores(path[-1]).argmax(-1), p.worth().argmax(-1)
    solutions = {name: solve(constraints(p, chosen), name) for name in ("frobenius", "nuclear")}
    shares = [p.scores(W).softmax(-1).gather(1, chosen[:, None]).mean().item() for W in path]
    return {**{name: [correlation(W.numpy(), S) for W in path] for name, S in solutions.items()},
            "probability": [round(share, 5) for share in shares],
            "between": correlation(*solutions.values()),
            "samples_with_best": int((chosen == best).sum()),
            "for_best": correlation(path[-1].numpy(), solve(constraints(p, best), norm))}


def trial(seed: int, steps: Sequence[int]) -> dict[str, Any]:
    """One problem in four ways."""
    p, (W, K, Q) = draw_problem(seed)
    own = p._replace(Z=p.X[:, -1])
    single = Problem(*(a.float() for a in own))  # as the model's weights
    head = partial(project, single, one_head())
    w = descend([W], partial(direction, p), steps)
    kq = descend([K, Q], partial(direction, p), steps)
    paper = descend([K, Q], partial(penalised, lambda K, Q: p.answers(K @ Q.T), p.y), steps)
    model = descend([K.float(), Q.float()], partial(penalised, head, single.y), steps)
    return {"w": compare(p, w, "frobenius"), "kq": compare(p, kq, "nuclear"),
            "paper": compare(p, paper, "nuclear"), "model": compare(own, model, "nuclear")}


def measure(lab: Lab) -> common.Result:
    if importlib.util.find_spec("cvxpy") is None:
        raise UserError("cvxpy is missing: pip install -r experiments/requirements.txt")
    needs_plain_attention()
    steps = [step for step in STEPS if step <= (500 if lab.quick else 2000)]
    seeds = range(100, 104 if lab.quick else 150)  # others than were tried out
    problems = lab.trials(trial, [{"seed": seed, "steps": steps} for seed in seeds])
    return {"steps": steps, "seeds": list(seeds), "problems": problems}


def table(result: common.Result) -> common.Rows:
    at = {step: i for i, step in enumerate(result["steps"]) if step in (200, 500, 1000, 2000)}
    rows = [["correlation with a solution: median (quartiles)", *(f"{step} steps" for step in at)]]
    for way, (name, *norms) in WAYS.items():
        own, other = ([[problem[way][norm][i] for problem in result["problems"]]
                       for i in at.values()] for norm in norms)  # by step and problem
        rows.append([f"{name}: {norms[0].title()}", *("{:.3f} ({:.3f} to {:.3f})".format(*points)
                     for points in np.percentile(own, (50, 25, 75), axis=1).T)])
        if way == "w":
            rows.append(["mean / the authors' mean", *(f"{mean:.3f} / {PAPER.get(step, '-')}"
                         for step, mean in zip(at, np.mean(own, axis=1), strict=True))])
        rows.append([f"more than with {norms[1].title()}: problems, mean difference", *(
            f"{np.greater(a, b).sum()} of {len(a)}, {common.format_difference(a, b)}"
            for a, b in zip(own, other, strict=True))])
    return rows


def draw(result: common.Result, fig: Any) -> None:
    (left, right), steps = fig.subplots(1, 2), result["steps"]
    for way, color in zip(("w", "kq", "model"), common.COLORS, strict=False):
        name, own, other = WAYS[way]
        for ax, what, line in ((left, own, "-"), (left, other, "--"), (right, "probability", "-")):
            shown = [problem[way][what] for problem in result["problems"]]
            low, mid, high = np.percentile(shown, (25, 50, 75), axis=0)
            label = f"{name}: {what.title()}" if ax is left else name
            ax.plot(steps, mid, line, color=color, label=label)
            if line == "-":
                ax.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)
    left.set(ylabel="correlation with the solution", ylim=(0.1, 1.02))
    right.set(ylabel="probability of the selected token", ylim=(0, 1.02))
    for ax in (left, right):
        ax.set(xscale="log", xlim=(steps[1], None), xlabel="steps of gradient descent")
        ax.legend(loc="lower right", fontsize=10)


if __name__ == "__main__":
    common.command("svm")
