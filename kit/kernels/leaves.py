"""Leaves of any model, replaced by type: an nn.Linear that holds its weights in fewer bits.

The module around it stays as it is and calls it as before. NativeLinear multiplies in native code,
LibraryLinear by PyTorch's kernels, where there is no compiler.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.device import FEW, fast_dtype
from kit.kernels import native
from kit.kernels.quantize import GROUP, TILE, integers, pack, unpack

Replaced = list[tuple[nn.Module, str, nn.Linear]]  # what held a Linear, under which name


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> Replaced:
    """Put make(linear) in the place of every nn.Linear of a model; returns what was there.

    Of exactly that type and without hooks: what else a Linear may do is not ours to guess.
    """
    found = [(parent, name, child) for parent in model.modules()
             for name, child in parent.named_children()
             if type(child) is nn.Linear and not hooks_of(child)]
    made: dict[nn.Linear, nn.Module] = {}  # one that is used in two places stays one
    for parent, name, linear in found:
        if linear not in made:
            made[linear] = make(linear)
        setattr(parent, name, made[linear])
    return found


def hooks_of(module: nn.Module) -> bool:
    """Whether something happens at a call of it that its forward does not show."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


class NativeLinear(nn.Module):
    """nn.Linear with its weights in one of native.KINDS: x (..., in) -> (..., out).

    few: up to so many tokens are multiplied by native code, more of them by PyTorch.
    exact: activations enter a product of 16, 8 or 4 bits as two terms, the rounded number and what
    is left of it, so that only the weights are rounded, and the result is in fp32. Without it they
    are rounded too, and many tokens are read in bf16 where this CPU multiplies it fast.
    """

    own_threads = True  # those of native code, which wait for none of PyTorch's

    def __init__(self, linear: nn.Linear, weights: str, code: Any, few: int = FEW):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.code, self.kind, self.few, self.exact, self.scale = code, weights, few, True, None
        self.bias = None if linear.bias is None else linear.bias.detach().contiguous()
        if weights.startswith("int"):
            self.w, self.scale = pack(linear.weight, int(weights[3:]))
        else:
            self.w = linear.weight.detach().to(getattr(torch, weights)).contiguous()
        self.struct = native.Linear(*map(native.pointer, (self.w, self.scale, self.bias)),
                                    self.in_features, self.out_features,
                                    native.KINDS.index(weights))

    @property
    def weight(self) -> Tensor:
        """The weights (out, in) that it stands for, in fp32; for code that reads them itself."""
        if self.scale is None:
            return self.w.float()
        return unpack(self.w, self.scale, int(self.kind[3:]), (self.out_features, self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        if x.size(-1) != self.in_features:
            raise ValueError(f"{x.size(-1)} numbers a token for a Linear of {self.in_features}")
        tokens = x.numel() // self.in_features
        many = tokens > self.few
        in_bf16 = many and not self.exact and self.kind != "float32" and bf16_pays()
        if many and self.scale is None:
            if in_bf16:
                y = F.linear(x.bfloat16(), self.w)
                return y if self.bias is None else y.add_(self.bias)
            return F.linear(x.float(), self.w.float(), self.bias)
        x = x.float().contiguous()
        y = torch.empty(*x.shape[:-1], self.out_features)
        if self.code.linear(team(self.code), self.struct, tokens, x.data_ptr(), y.data_ptr(),
                            int(self.exact)):
            raise MemoryError
        return y.bfloat16() if in_bf16 else y


inside = threading.local()  # threads: of native code, where PyTorch's are set to one


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Inside, PyTorch works with one thread; native code with as many as PyTorch had before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    inside.threads = threads
    try:
        yield
    finally:
        del inside.threads
        torch.set_num_threads(threads)


def team(code: Any) -> int:
    threads = getattr(inside, "threads", None) or torch.get_num_threads()
    return native.team_of(code, threads, os.getpid())


class LibraryLinear(nn.Module):
    """The same by PyTorch's kernels: fp16 for few tokens, and integers with activations in bf16.

    With fp32 activations their kernels for integers take 6 to 70 times as long, AVX-512 or not.
    """

    def __init__(self, linear: nn.Linear, weights: str):
        super().__init__()
        w = linear.weight.detach()
        self.kind, (self.out_features, self.in_features) = weights, w.shape
        self.bias = None if linear.bias is None else linear.bias.detach()
        if weights == "float32":
            self.w = w
            return
        if weights == "bfloat16":  # fp16 is twice as fast as bf16 with one token, and finer
            self.w = w.half()
            return
        # odd shapes read wild memory
        w = F.pad(w, (0, -self.in_features % GROUP, 0, -self.out_features % TILE))
        if weights == "int8":
            q, scale = integers(w, 8)  # a scale a row
            self.w, self.scale = q.to(torch.int8), scale[:, 0].contiguous()
        else:
            q, scale = integers(w.view(len(w), -1, GROUP), 4)
            q = (q.view_as(w) + 8).to(torch.int32)
            self.w = torch._convert_weight_to_int4pack_for_cpu(q, 1)
            self.scale = torch.cat([scale, torch.zeros_like(scale)], -1).transpose(0, 1)
            self.scale = self.scale.contiguous()  # (groups, out, scale and the zero at 8)

    @property
    def weight(self) -> Tensor:
        """The weights (out, in) that it stands for, in fp32; for code that reads them itself."""
        return (self(torch.eye(self.in_features)) - (0 if self.bias is None else self.bias)).T

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "float32":
            return F.linear(x, self.w, self.bias)
        if self.kind.startswith("int"):
            rows = F.pad(x.reshape(-1, self.in_features), (0, -self.in_features % GROUP)).bfloat16()
            if self.kind == "int8":
                y = torch._weight_int8pack_mm(rows, self.w, self.scale)
            else:
                y = torch._weight_int4pack_mm_for_cpu(rows, self.w, GROUP, self.scale)
            y = y[:, : self.out_features].float().view(*x.shape[:-1], self.out_features)
        elif x.numel() <= 4 * self.in_features:
            y = F.linear(x.half(), self.w).float()
        else:
            w = self.w.float()  # on the way to bf16, too: that is twice as fast as from fp16
            y = F.linear(x.bfloat16(), w.bfloat16()).float() if bf16_pays() else F.linear(x, w)
        return y if self.bias is None else y.add_(self.bias)


def bf16_pays() -> bool:
    return fast_dtype(torch.device("cpu")) == torch.bfloat16


def round_linears(model: nn.Module, weights: str) -> None:
    """Give every nn.Linear the weights that it would have in one of native.KINDS, held in fp32.

    What PyTorch then computes is what fewer bits mean, without their speed.
    """
    def rounded(linear: nn.Linear) -> nn.Linear:
        copy = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, "meta")
        w = linear.weight.detach()
        if weights.startswith("int"):
            bits = int(weights[3:])
            w = unpack(*pack(w, bits), bits, tuple(w.shape))
        else:
            w = w.to(getattr(torch, weights)).float()
        copy.weight, copy.bias = nn.Parameter(w), linear.bias
        return copy

    replace_linears(model, rounded)
