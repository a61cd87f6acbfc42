"""Claim: skip connections keep attention from making all positions alike.

Source: arXiv 2103.03404. ||X - 1 x^T|| / ||X|| says how far the rows of X are from equal; attention
alone should shrink it doubly exponentially with depth. Done here: this residual layer by layer, of
parts of the blocks and of whole ones, before and after training; full attention (the paper's)
learns hidden bytes, causal attention the next one. And in float64: the sum over paths, the cube.

    python -m experiments.rank_collapse [--quick]
"""

import copy
import math
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments import common, training
from experiments.common import Lab, select
from experiments.training import MaskedGPT, Recipe, prefix_mask
from kit.errors import UserError
from kit.evaluate import eval_batches
from model import GPTConfig

VOCAB = 258  # bytes, the separator, and the id that hides a byte
SIZES = {  # layers, width, heads, positions; std of the first weights
    "768 wide": ((12, 768, 12, 128), 0.02), "64 wide": ((12, 64, 4, 64), 0.05),
    "quick": ((12, 32, 4, 32), 0.07), "paths": ((3, 16, 2, 12), 0.5)}
KINDS, WHOLE = ("full", "causal"), "whole block"
PARTS = {"attention alone": {"skip": False, "dense": False}, "attention + MLP": {"skip": False},
         "attention + skip": {"dense": False}, WHOLE: {}}


class PartOfBlock(nn.Module):
    """The model's block written out, in which skips, the MLP or the first norm can be missing.

    P (B, H, T, T) are the attention matrices of its last call.
    """

    skip = dense = norm = True

    def __init__(self, block: nn.Module):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = block.ln_1, block.attn, block.ln_2, block.mlp

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        qkv = self.attn.c_attn(x).unflatten(2, (3, self.attn.n_head, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        P = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~mask, -math.inf).softmax(-1)
        self.P = P.detach()
        return self.attn.c_proj((P @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, pos: Tensor | None, mask: Tensor, store: None) -> Tensor:
        x = (x if self.skip else 0) + self.attend(self.ln_1(x) if self.norm else x, mask)
        if self.dense:
            x = (x if self.skip else 0) + self.mlp(self.ln_2(x))
        return x


def build(size: str, kind: str, seed: int) -> MaskedGPT:
    (L, C, H, T), std = SIZES[size]
    torch.manual_seed(seed)
    model = MaskedGPT(GPTConfig(VOCAB, T, L, H, C), std)
    model.mask = prefix_mask(T, T if kind == "full" else 0)
    for i, block in enumerate(model.h):  # same weights, other forward
        model.h[i] = PartOfBlock(block)
    return model


@torch.no_grad()
def needs_plain_blocks() -> None:
    """UserError if whole blocks, as they are written here, are not those of model.py."""
    training.needs_masks()
    training.needs("h.0.ln_1", "h.0.attn.n_head", "h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.ln_2",
                   "h.0.mlp")
    for kind in KINDS:
        model, idx = build("paths", kind, 1), torch.arange(24).view(2, 12)
        plain = MaskedGPT(model.config)
        plain.mask = model.mask
        try:
            plain.load_state_dict(model.state_dict())
            same = torch.allclose(model(idx), plain(idx), atol=1e-4)
        except RuntimeError:  # of a part that has other weights
            same = False
        if not same:
            raise UserError("this experiment takes GPT-2's blocks apart, and those of model.py "
                            "compute something else")


def take(model: MaskedGPT, skip: bool = True, dense: bool = True, norm: bool = True) -> MaskedGPT:
    """The model with only these parts in its blocks."""
    for block in model.h:
        block.skip, block.dense, block.norm = skip, dense, norm
    return model


@torch.no_grad()
def layers(model: MaskedGPT, idx: Tensor) -> list[Tensor]:
    """The embeddings of ids (B, T) and what each block makes of them, (B, T, C) each."""
    embedded: list[Tensor] = []
    with model.h[0].register_forward_pre_hook(lambda block, args: embedded.append(args[0])):
        *made, _ = model.layers(idx)
    return embedded + made


def composite_norm(x: Tensor) -> Tensor:
    """sqrt(||X||_1 ||X||_inf) of (..., T, C): the largest column sum times the largest row sum."""
    a = x.abs()
    return (a.sum(-2).amax(-1) * a.sum(-1).amax(-1)).sqrt()


def residual(x: Tensor) -> Tensor:
    """Norm of X - 1 x^T, x the mean of the rows: at most twice that of the best x."""
    return composite_norm(x - x.mean(-2, keepdim=True))


def profile(model: MaskedGPT, name: str, idx: Tensor) -> list[float]:
    """Residual over norm of the embeddings of idx and after each layer, in float64."""
    model = take(copy.deepcopy(model).double(), **PARTS[name])
    return [(residual(x) / composite_norm(x)).mean().item() for x in layers(model, idx)]


@torch.no_grad()
def power(model: MaskedGPT, skip: bool, seed: int) -> float:
    """p, where the first layer's attention makes eps^p of a residual of size eps."""
    model = take(copy.deepcopy(model).double(), skip, dense=False, norm=False)
    torch.manual_seed(seed)
    x, R = (torch.randn(n, model.config.n_embd).double() for n in (1, model.config.block_size))
    eps = np.geomspace(1e-4, 1e-2, 5)
    after = [residual(model.h[0](x + e * R[None], None, model.mask, None)).item() for e in eps]
    return float(np.polyfit(np.log(eps), np.log(after), 1)[0])


@torch.no_grad()
def paths(skip: bool, kind: str, seed: int) -> float:
    """Relative error of the sum over paths against the output of a network without norms.

    A path is a head or the skip (P = W = 1) of each layer: P^L ... P^1 X W^1 ... W^L, P as it was.
    """
    model = take(build("paths", kind, seed).double(), skip, dense=False, norm=False)
    H, T, C = model.config.n_head, model.config.block_size, model.config.n_embd
    output = X = torch.randn(1, T, C).double()
    for block in model.h:
        output = block(output, None, model.mask, None)
    total = torch.zeros_like(output)
    for path in product(range(H + skip), repeat=len(model.h)):
        y = X
        for block, h in zip(model.h, path, strict=True):
            if h < H:  # else the skip
                V = block.attn.c_attn.weight[2 * C :].view(H, -1, C)[h].T
                y = block.P[:, h] @ y @ V @ block.attn.c_proj.weight.view(C, H, -1)[:, h].T
        total += y
    return (composite_norm(total - output) / composite_norm(output)).item()


def grow(size: str, kind: str, part: str, seed: int, updates: int) -> dict[str, Any]:
    """Build and measure a GPT of such blocks; if updates, train it and measure it again."""
    data, model, T = training.stdlib(), build(size, kind, seed), SIZES[size][0][3]
    idx = torch.from_numpy(next(eval_batches(data.val, T, 2, 1))[0])
    found: dict[str, Any] = {"size": size, "kind": kind, "part": part, "seed": seed,
                             "start": {name: profile(model, name, idx) for name in PARTS}}
    if updates:
        batches = training.windows(data, 16, T, seed)
        batches = training.denoising(batches, VOCAB - 1, seed) if kind == "full" else batches
        training.train(take(model, **PARTS[part]), batches, Recipe(max_iters=updates))
        found["bpb"] = training.validate(model, data, 25 * 4096)["bpb"]  # means little if full
        found["end"] = {name: profile(model, name, idx) for name in PARTS}
    found["powers"] = [power(model, skip, seed) for skip in (False, True)]
    found["paths"] = [paths(skip, kind, seed) for skip in (False, True)]
    return found


def measure(lab: Lab) -> common.Result:
    needs_plain_blocks()
    training.stdlib()  # prepared once, not by every process
    wide, narrow = ("64 wide", "quick") if lab.quick else ("768 wide", "64 wide")
    seeds, updates = ((1,), 40) if lab.quick else ((1, 2, 3), 300)
    parts = ["attention alone", WHOLE] if lab.quick else PARTS
    jobs = [{"size": narrow, "kind": kind, "part": part, "seed": seed, "updates": updates}
            for seed in seeds for kind, part in [("full", WHOLE), *product(["causal"], parts)]]
    jobs += [{**job, "size": wide, "updates": 0} for job in jobs if job["part"] == WHOLE]
    return {"states": [(wide, "start"), (narrow, "start"), (narrow, "end")],
            "runs": lab.trials(grow, jobs)}


def format_residual(values: list[float]) -> str:
    """Mean and deviation, but small values from least to largest: their powers of ten differ."""
    ends = dict.fromkeys(f"{v:.0e}" for v in (min(values), max(values)))
    return common.format_mean(values) if max(values) > 0.01 else " to ".join(ends)


def table(result: common.Result) -> common.Rows:
    rows = [["residual after layer 1 → 12", *KINDS, "bits per byte if trained so (causal)"]]
    runs = result["runs"]
    for (size, when), part in product(result["states"], PARTS):
        row = [f"{size}, {when}: {part}"]
        for kind in KINDS:
            curves = [run[when][part] for run in select(runs, size=size, kind=kind, part=WHOLE)]
            row.append(" → ".join(format_residual([curve[i] for curve in curves]) for i in (1, -1)))
        trained = select(runs, size=size, kind="causal", part=part) if when == "end" else []
        rows.append([*row, common.format_mean([run["bpb"] for run in trained]) if trained else ""])
    narrow, _ = result["states"][-1]
    titles = {"powers": "one layer takes eps to eps^p: p", "paths": "error of the sum over paths"}
    for what, (i, name) in product(titles, enumerate((", no skip", ", skip"))):
        found = [[run[what][i] for run in select(runs, size=narrow, kind=kind, part=WHOLE)]
                 for kind in KINDS]
        rows.append([titles[what] + name, *map(format_residual, found), ""])
    return rows


def draw(result: common.Result, fig: Any) -> None:
    for ax, kind in zip(fig.subplots(1, 2, sharey=True), KINDS, strict=True):
        for (size, when), line in zip(result["states"][1:], ("-", "--"), strict=True):
            for part, color in zip(PARTS, common.COLORS, strict=False):
                for run in select(result["runs"], size=size, kind=kind, part=WHOLE):
                    ax.plot(run[when][part], line, color=color, lw=1.2,
                            label=part if run["seed"] == 1 and line == "-" else None)
            ax.plot([], line, color="#333333", lw=1.2, label=f"{size}, {when}")
        ax.set(title=f"{kind} attention", xlabel="layer", yscale="log")
    left, right = fig.axes
    left.text(12, 4e-15, "rounding of float64", ha="right", color="#666666", fontsize=10)
    left.set_ylabel("residual / norm of the hidden states")
    right.legend(loc="lower left", fontsize=10)


if __name__ == "__main__":
    common.command("rank_collapse")
