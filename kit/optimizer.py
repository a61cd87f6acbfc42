"""Optimizers and learning rate: AdamW alone, or Muon for hidden matrices and AdamW for the rest."""

import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kit.device import device_of
from kit.errors import UserError
from kit.finetune import depth_factors
from model import GPT


class Settings(Protocol):
    """What is read of train.py's settings, which explain them."""

    optimizer: Literal["adamw", "muon"]
    learning_rate: float
    muon_lr: float
    muon_momentum: float
    weight_decay: float
    beta1: float
    beta2: float
    layer_lr_decay: float
    min_lr: float
    decay_lr: bool
    schedule: Literal["cosine", "linear"]
    cooldown: float
    warmup_iters: int
    lr_decay_iters: int | None
    max_iters: int


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: what its lists of modules hold, in order, wherever it keeps them."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    inside = {m for some in lists for block in some for m in block.modules()}
    return [block for some in lists if some not in inside for block in some]


def split_parameters(model: GPT) -> tuple[list[nn.Parameter], ...]:
    """Each trained parameter in one of three: matrices of the blocks, other matrices, vectors.

    A table to look rows up in is no matrix of a block, wherever it is, nor is a stack of matrices.
    """
    trained = [p for p in model.parameters() if p.requires_grad]  # a tied head is there once
    inside = {p for block in blocks_of(model) for m in block.modules()
              if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    hidden = [p for p in trained if p.ndim == 2 and p in inside]
    vectors = [p for p in trained if p.ndim < 2]
    return hidden, [p for p in trained if p.ndim >= 2 and p not in {*hidden}], vectors


class Muon(torch.optim.Muon):
    """torch.optim.Muon within its rounding, but matrices of equal shape take a step together.

    The update of a matrix is made nearly orthogonal by a few Newton-Schulz iterations
    (https://kellerjordan.github.io/posts/muon); one batched product beats many small ones.
    dtype: of the iterations, fp32 or bf16, whichever is faster here (kit.device.muon_dtype).
    """

    def __init__(self, params: list[dict[str, Any]], dtype: torch.dtype = torch.float32,
                 **options: float):
        super().__init__(params, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for shape in {tuple(sorted(p.shape)) for p in params}:
                self.step_together([p for p in params if tuple(sorted(p.shape)) == shape], group)
        return loss

    def step_together(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        """One update of matrices that share their shape, transposed or not."""
        for state, p in ((self.state[p], p) for p in params):
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
        weights, grads = [self.local(p) for p in params], [self.local(p.grad) for p in params]
        momenta = [self.local(self.state[p]["momentum_buffer"]) for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, momenta, group["momentum"])  # Nesterov's
        updates = self.orthogonal([self.gathered(u, p) for u, p in zip(updates, params,
                                                                       strict=True)], group)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        for p, w, u in zip(params, weights, updates, strict=True):
            scale = math.sqrt(max(1, p.size(0) / p.size(1)))
            w.sub_(self.share(u, p), alpha=group["lr"] * scale)

    def orthogonal(self, updates: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """The nearest matrices with orthogonal rows, about, by Newton-Schulz iterations."""
        tall = [u.size(0) > u.size(1) for u in updates]
        a, b, c = group["ns_coefficients"]
        # (matrices, rows, columns), rows <= columns
        x = torch.stack([(u.mT if t else u).to(self.dtype)
                         for u, t in zip(updates, tall, strict=True)])
        x.div_(x.norm(dim=(1, 2), keepdim=True).clamp_(min=group["eps"]))
        for _ in range(group["ns_steps"]):
            gram = x @ x.mT
            gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, gram, x, beta=a)
        return [u.mT if t else u for u, t in zip(x, tall, strict=True)]

    # where matrices are sharded over ranks (kit.parallel.sharding) these three do something

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor."""
        return tensor

    def gathered(self, share: Tensor, p: Tensor) -> Tensor:
        """All of a tensor that is sharded as p is, from this rank's part."""
        return share

    def share(self, value: Tensor, p: Tensor) -> Tensor:
        """This rank's part of a whole tensor, were it sharded as p is."""
        return value


def build_optimizers(model: GPT, s: Settings, muon_dtype: torch.dtype | None = None,
                     muon: type[Muon] = Muon) -> list[Optimizer]:
    """AdamW, which decays matrices only, or Muon for the blocks' matrices and AdamW for the rest.

    Every group remembers its `peak_lr`. muon_dtype: of Muon's iterations; None: fp32.
    muon: its class, where matrices are sharded.
    """
    hidden, embeddings, vectors = split_parameters(model)
    if s.optimizer == "muon" and not blocks_of(model):
        raise UserError("optimizer=muon: trains the matrices of layers, and this model.py has no "
                        "nn.ModuleList of layers; take adamw")
    factors = depth_factors(model, blocks_of(model), s.layer_lr_decay)

    def groups(params: list[nn.Parameter], lr: float, **options: Any) -> list[dict[str, Any]]:
        return [{"params": [p for p in params if factors[p] == f], "lr": lr * f, **options}
                for f in sorted({factors[p] for p in params}, reverse=True)]

    decayed = embeddings if s.optimizer == "muon" else embeddings + hidden
    optimizers: list[Optimizer] = []
    if decayed + vectors:
        optimizers.append(torch.optim.AdamW(
            groups(decayed, s.learning_rate, weight_decay=s.weight_decay)
            + groups(vectors, s.learning_rate, weight_decay=0.0),
            lr=s.learning_rate, betas=(s.beta1, s.beta2),
            fused=device_of(model).type != "mps"))
    if s.optimizer == "muon" and hidden:
        optimizers.append(muon(groups(hidden, s.muon_lr), muon_dtype or torch.float32,
                               lr=s.muon_lr, weight_decay=s.weight_decay,
                               momentum=s.muon_momentum))
    for group in (g for o in optimizers for g in o.param_groups):
        group["peak_lr"] = group["lr"]
    covered = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    trained = {p for p in model.parameters() if p.requires_grad}
    assert len(covered) == len(trained) and {*covered} == trained  # each in exactly one group
    return optimizers


def lr_factor(step: int, s: Settings) -> float:
    """The learning rate of update `step` (0 is the first) as a share of its peak, in [0, 1].

    After the warm-up, cosine is nanoGPT's half a cosine down to min_lr; linear stays at the peak
    and goes down over the last `cooldown` share, or over all that the warm-up leaves.
    """
    if not s.decay_lr:
        return 1.0
    if step < s.warmup_iters:
        return (step + 1) / (s.warmup_iters + 1)
    end, floor = s.lr_decay_iters or s.max_iters, s.min_lr / s.learning_rate
    if step >= end:
        return floor
    after_warmup = end - s.warmup_iters
    if s.schedule == "cosine":
        progress = (step - s.warmup_iters) / after_warmup
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        share = min(1.0, (end - step) / min(s.cooldown * end, after_warmup))
    return floor + (1 - floor) * share


def set_lr(optimizers: list[Optimizer], step: int, s: Settings) -> float:
    """Set the rates of update `step`; returns the factor."""
    factor = lr_factor(step, s)
    for group in (g for o in optimizers for g in o.param_groups):
        group["lr"] = group["peak_lr"] * factor
    return factor
