"""Optimizers and learning rate: AdamW alone, or Muon for hidden matrices and AdamW for the rest."""

import math
from collections.abc import Callable
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


class Muon(torch.optim.Muon):
    """torch.optim.Muon within its rounding, but all matrices of one shape take the step together.

    Muon makes the update of a matrix nearly orthogonal by a few Newton-Schulz iterations
    (https://kellerjordan.github.io/posts/muon). A small GPT has many small matrices: one batched
    product for all of them costs about half of one product for each.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            alike: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault(tuple(sorted(p.shape)), []).append(p)
            for params in alike.values():
                self.step_together(params, group)
        return loss

    def step_together(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        """One update of matrices that share their shape, transposed or not."""
        grads = [p.grad for p in params]
        momenta = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, momenta, group["momentum"])  # Nesterov's
        tall = [u.size(0) > u.size(1) for u in updates]
        x = torch.stack([u.mT if t else u for u, t in zip(updates, tall, strict=True)])
        a, b, c = group["ns_coefficients"]
        x = x.bfloat16()  # (matrices, rows, columns), rows <= columns
        x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
        for _ in range(group["ns_steps"]):
            gram = x @ x.mT
            gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, gram, x, beta=a)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        for p, t, u in zip(params, tall, x.to(params[0].dtype), strict=True):
            scale = math.sqrt(max(1, p.size(0) / p.size(1)))
            p.sub_(u.mT if t else u, alpha=group["lr"] * scale)


def build_optimizers(model: GPT, s: Any) -> list[Optimizer]:
    """By the settings optimizer, learning_rate, muon_lr, weight_decay, beta1 and beta2.

    AdamW decays matrices only, as GPT-2's training did. Muon is for the matrices between the
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
        optimizers.append(Muon(groups["hidden"], lr=s.muon_lr, weight_decay=s.weight_decay))
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
