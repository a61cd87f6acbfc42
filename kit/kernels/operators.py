"""Kernels under PyTorch's own operators, for training on a CPU in 16 bits, and a loss.

They serve any model and are written in PyTorch's operators, so autograd knows them. What a kernel
does not expect (another device or dtype, a compiler at work) goes to PyTorch's own.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kit.device
from kit.device import device_of
from model import GPT


def pytorchs(operator: Any, *args: Any, **options: Any) -> Any:
    """What PyTorch itself computes, by operators of which ours may be some."""
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **options)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """F.dropout in 16 bits from random bytes: nine times faster, p in steps of 1/256."""
    if not (0 < p < 1 and training and x.itemsize == 2) or torch.compiler.is_compiling():
        return pytorchs(torch.ops.aten.dropout.default, x, p, training)
    drop = min(max(round(256 * p), 1), 255)
    noise = torch.empty(x.numel() // 8 + 1, dtype=torch.int64).random_(-(2**63), None)
    keep = noise.view(torch.uint8)[: x.numel()].view(x.shape).ge_(drop)  # 0 or 1, still uint8
    return x * keep.to(x.dtype).mul_(256 / (256 - drop))


def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
              dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
              enable_gqa: bool = False) -> Tensor:
    """F.scaled_dot_product_attention in 16 bits, (B, H, T, D) over (B, H, S, D).

    Causal attention in bf16 is products over blocks of rows, whose scores stay in the processor's
    cache; any other in 16 bits is made in fp32, ten times faster for one query over a cache.
    """
    plain = partial(pytorchs, torch.ops.aten.scaled_dot_product_attention.default,
                    scale=scale, enable_gqa=enable_gqa)
    alike = q.dtype == k.dtype == v.dtype and q.itemsize == 2 and q.ndim == 4
    if not alike or torch.compiler.is_compiling():
        return plain(q, k, v, attn_mask, dropout_p, is_causal)
    with torch.autocast("cpu", enabled=False):
        square = q.shape == k.shape == v.shape and attn_mask is None and scale is None
        if q.dtype == torch.bfloat16 and is_causal and square:
            return in_blocks(q, k, v, dropout_p)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.float()
        y = plain(q.float(), k.float(), v.float(), attn_mask, dropout_p, is_causal)
        return y.to(q.dtype)


def in_blocks(q: Tensor, k: Tensor, v: Tensor, p: float, step: int = 256) -> Tensor:
    """Causal attention of (B, H, T, D), `step` queries at a time, with dropout of p."""
    T, D = q.shape[-2:]
    future = k.new_full((T, T), -torch.inf).triu(1)
    rows, keys, values = (a.flatten(0, 1) for a in (q, k, v))  # (B * H, T, D)
    y = []
    for i in range(0, T, step):
        hide, past = future[i : i + step, : i + step], slice(i + step)
        scores = torch.baddbmm(hide, rows[:, i : i + step], keys[:, past].mT,
                               alpha=1 / math.sqrt(D))
        y.append(F.dropout(scores.softmax(-1), p, p > 0) @ values[:, past])
    return torch.cat(y, dim=1).view_as(v)


OPERATORS: dict[str, tuple[str, Callable]] = {  # our name -> PyTorch's, and what takes its place
    "attention": ("scaled_dot_product_attention", attention), "dropout": ("dropout", dropout)}


LOSS = "loss"  # taken by a model, not put under an operator: see Kernels.take_loss


def wanted(device: torch.device) -> list[str]:
    """The names of all kernels for a device; operators are replaced on a CPU alone."""
    return [*(OPERATORS if device.type == "cpu" else ()), LOSS]


class Kernels(kit.device.Kernels):
    """What `install` put in the place of PyTorch's; `restore`, or the end of `with`, undoes it."""

    def __init__(self, names: Iterable[str]) -> None:
        self.wanted, self.names = [*names], []  # asked for; in place
        self.libraries: dict[str, torch.library.Library] = {}

    def add(self, name: str) -> str:
        """Put one of OPERATORS in place -> "", or why PyTorch refuses it."""
        operator, function = OPERATORS[name]
        library = torch.library.Library("aten", "IMPL")
        try:
            for key in ("CPU", "AutogradCPU"):  # without and with a gradient
                library.impl(operator, function, key)
        except RuntimeError as e:
            library._destroy()
            return " ".join(str(e).split())[:150]
        self.libraries[name] = library
        self.names.append(name)
        return ""

    def take_loss(self, model: GPT) -> None:
        """Let a model compute its loss by `chunked_loss`, if that is asked for and is its loss."""
        if LOSS in self.wanted and take_loss(model):
            self.names.append(LOSS)

    def drop(self, name: str, model: GPT | None = None) -> None:
        """Bring back PyTorch's in the place of one, if it is there."""
        if library := self.libraries.pop(name, None):
            library._destroy()
        if name == LOSS and model is not None:
            vars(model).pop("loss", None)
        self.names = [n for n in self.names if n != name]

    def restore(self) -> None:
        for name in [*self.libraries]:
            self.drop(name)

    def __exit__(self, *error: Any) -> None:
        self.restore()


def install(names: Iterable[str] = (*OPERATORS, LOSS), warn: Callable[[str], None] = print
            ) -> Kernels:
    """Put kernels under PyTorch's operators on the CPU, until `restore` of the handle.

    If PyTorch refuses one, a line says so and its own kernel stays.
    """
    kernels = Kernels(names)
    for name in kernels.wanted:
        if name in OPERATORS and (why := kernels.add(name)):
            warn(f"note: {name} stays PyTorch's own: {why}")
    return kernels


# -------------------------------------------------------------------------------------------- loss


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of x @ weight.T against targets, in chunks of rows.

    The logits (rows, V) are the largest tensor of a small GPT by far. Here one chunk exists at a
    time, and its gradient is taken on the spot, so that nothing is computed twice. A target of -1
    adds nothing. (The idea: Liger Kernel's fused linear cross entropy.)
    """

    @staticmethod
    def rows(device: str, dtype: torch.dtype, V: int) -> int:
        """Rows of a chunk: what fills a GPU, or keeps the logits in the cache of a CPU."""
        return 2048 if device != "cpu" else 256 if dtype == torch.float32 else max(256, 2**20 // V)

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, need_grad: bool) -> Tensor:
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        w, total = weight.to(dtype), torch.zeros((), device=x.device)
        step = ChunkedCrossEntropy.rows(device, dtype, len(weight))
        dx, dw = (torch.empty_like(x), torch.zeros_like(weight)) if need_grad else (None, None)
        with torch.autocast(device, enabled=False):
            for rows in (slice(i, i + step) for i in range(0, len(x), step)):
                chunk, target = x[rows].to(dtype), targets[rows, None]
                real, target = target >= 0, target.clamp(min=0)
                logp = F.log_softmax(chunk @ w.T, dim=-1, dtype=torch.float32)  # (rows, V)
                total -= logp.gather(1, target).masked_fill(~real, 0).sum()
                if need_grad:  # d loss / d logits = p - onehot(target)
                    p = logp.exp_()
                    p.scatter_add_(1, target, -torch.ones_like(target, dtype=p.dtype))
                    p = p.mul_(real).to(dtype)
                    dx[rows] = p @ w
                    dw += p.T @ chunk
        ctx.save_for_backward(dx, dw)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        dx, dw = ctx.saved_tensors
        return dx * grad, dw * grad, None, None


def chunked_loss(model: GPT, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """GPT.loss for a model whose logits are x @ lm_head.weight.T and nothing else."""
    x, targets = x.reshape(-1, x.size(-1)), targets.reshape(-1)
    args = x, model.lm_head.weight, targets, torch.is_grad_enabled()
    return ChunkedCrossEntropy.apply(*args), (targets >= 0).sum()


def take_loss(model: GPT) -> bool:
    """Let a model compute its loss by `chunked_loss`, if value and gradients agree to 1e-5.

    They are compared on states of the usual size and on large ones, where a limit of the logits
    would be felt.
    """
    head = getattr(model, "lm_head", None)
    if not isinstance(head, nn.Linear):
        return False
    device, random = device_of(model), torch.Generator().manual_seed(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    for size in (1.0, 30.0):
        x = (size * torch.randn(16, head.in_features, generator=random)).to(device)
        targets = torch.randint(-1, head.out_features, (16,), generator=random).to(device)
        try:
            own, ours = (value_and_gradients(loss, x, targets, trained)
                         for loss in (model.loss, partial(chunked_loss, model)))
        except Exception:  # an edited exit may want other states than the head does
            return False
        if not all(close(a, b) for a, b in zip(own, ours, strict=True)):
            return False
    model.loss = partial(chunked_loss, model)
    return True


def value_and_gradients(loss: Callable, x: Tensor, targets: Tensor, trained: list[nn.Parameter]
                        ) -> list[Tensor | None]:
    """The loss and its gradients by x and all parameters; None where it does not depend on one."""
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        value, _ = loss(x, targets)
        return [value, *torch.autograd.grad(value, [x, *trained], allow_unused=True)]


def close(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors are the same to 1e-5 of their norm."""
    if a is None or b is None:
        return a is b
    return bool((a - b).norm() <= 1e-5 * a.norm())
