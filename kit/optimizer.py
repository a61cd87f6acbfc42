"""Optimizers and learning rate: AdamW alone, or Muon for hidden matrices and AdamW for the rest."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from model import GPT


def split_parameters(model: GPT) -> dict[str, list[nn.Parameter]]:
    """Each parameter in exactly one group: the blocks' matrices, other matrices, and vectors."""
    groups: dict[str, list[nn.Parameter]] = {"hidden": [], "embeddings": [], "vectors": []}
    for name, p in model.named_parameters():  # a tied head appears once
        kind = "vectors" if p.ndim < 2 else "hidden" if name.startswith("h.") else "embeddings"
        groups[kind].append(p)
    return groups


def build_optimizers(model: GPT, s: Any) -> list[Optimizer]:
    """By the settings optimizer, learning_rate, muon_lr, weight_decay, beta1 and beta2.

    AdamW decays matrices only, as GPT-2's training did. Muon makes the update of a matrix
    orthogonal (https://kellerjordan.github.io/posts/muon); it is for the matrices between the
    embeddings, everything else stays with AdamW. Every group remembers its `peak_lr`.
    """
    groups = split_parameters(model)
    muon = s.optimizer == "muon"
    decayed = groups["embeddings"] + ([] if muon else groups["hidden"])
    optimizers: list[Optimizer] = [torch.optim.AdamW(
        [{"params": decayed, "weight_decay": s.weight_decay},
         {"params": groups["vectors"], "weight_decay": 0.0}],
        lr=s.learning_rate, betas=(s.beta1, s.beta2), fused=decayed[0].device.type != "mps")]
    if muon:
        optimizers.append(
            torch.optim.Muon(groups["hidden"], lr=s.muon_lr, weight_decay=s.weight_decay))
    for group in (g for o in optimizers for g in o.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


def lr_factor(step: int, s: Any) -> float:
    """The learning rate of update `step` (0 is the first) as a share of its peak, in [0, 1].

    With decay_lr it rises for warmup_iters updates, none of which is wasted on a rate of 0; then
    schedule=cosine: half a cosine down to min_lr at lr_decay_iters (nanoGPT's);
    schedule=linear: stays at the peak, then a line down over the last `cooldown` share, or over
    all that the warm-up leaves.
    """
    if not s.decay_lr:
        return 1.0
    if step < s.warmup_iters:
        return (step + 1) / (s.warmup_iters + 1)
    end, floor = s.lr_decay_iters or s.max_iters, s.min_lr / s.learning_rate
    if step >= end:
        return floor
    if s.schedule == "cosine":
        progress = (step - s.warmup_iters) / (end - s.warmup_iters)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        share = min(1.0, (end - step) / min(s.cooldown * end, end - s.warmup_iters))
    return floor + (1 - floor) * share


def set_lr(optimizers: list[Optimizer], step: int, s: Any) -> float:
    """Set the rates of update `step`; returns the factor."""
    factor = lr_factor(step, s)
    for group in (g for o in optimizers for g in o.param_groups):
        group["lr"] = group["peak_lr"] * factor
    return factor


def optimizer_tensors(optimizers: list[Optimizer], model: nn.Module) -> dict:
    """The optimizers' state as {parameter name.state name: tensor}, whatever groups there are."""
    names = {p: name for name, p in model.named_parameters()}
    return {f"{names[p]}.{key}": value for o in optimizers for p, state in o.state.items()
            for key, value in state.items()}


def load_optimizer_tensors(optimizers: list[Optimizer], model: nn.Module,
                           tensors: dict[str, torch.Tensor]) -> None:
    """Put back what `optimizer_tensors` gave."""
    parameters = dict(model.named_parameters())
    owner = {p: o for o in optimizers for g in o.param_groups for p in g["params"]}
    for key, value in tensors.items():
        name, _, state = key.rpartition(".")
        p = parameters[name]
        device = "cpu" if state == "step" and p.device.type == "mps" else p.device
        owner[p].state[p][state] = value.to(device)
