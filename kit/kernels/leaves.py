"""Leaves of any model, replaced by type: an nn.Linear that holds its weights in fewer bits.

The module around it stays as it is and calls it as before. NativeLinear multiplies in native code,
LibraryLinear by PyTorch's kernels, where there is no compiler.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.device import FEW, fast_dtype
from kit.kernels import native
from kit.kernels.quantize import pack, rounded, unpack


def linears_of(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """What holds an nn.Linear, under which name, and the Linear.

    Only of exactly that type and without hooks: a subclass or a hook may do more.
    """
    return [(parent, name, child) for parent in model.modules()
            for name, child in parent.named_children()
            if type(child) is nn.Linear and not hooks_of(child)]


def hooks_of(module: nn.Module) -> bool:
    """Whether calling a module does more than its forward shows."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


class NativeLinear(nn.Module):
    """nn.Linear with its weights in one of native.KINDS: x (..., in) -> (..., out).

    few: native code multiplies at most this many tokens, PyTorch multiplies more.
    exact: activations enter a product of 16, 8 or 4 bits as two terms, the rounded number and its
    rounding error, so that only the weights are rounded, and the result is in fp32. If not exact,
    they are rounded too, and many tokens are read in bf16 where this CPU multiplies it fast.
    """

    own_threads = True  # those of native code, which wait for none of PyTorch's

    def __init__(self, linear: nn.Linear, weights: str, code: CDLL, few: int = FEW):
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


workers = threading.local()  # threads: those of native code while PyTorch has one


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let PyTorch use one thread until the end of `with`, native code as many as PyTorch had."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    workers.threads = threads
    try:
        yield
    finally:
        del workers.threads
        torch.set_num_threads(threads)


def team(code: CDLL) -> int:
    threads = getattr(workers, "threads", None) or torch.get_num_threads()
    return native.team_of(code, threads, os.getpid())


class LibraryLinear(nn.Module):
    """The same by PyTorch's kernels: the rounded weights in fp16, as few tokens meet them.

    With one token fp16 is twice as fast as bf16, and finer, so it also stands for bf16.
    """

    def __init__(self, linear: nn.Linear, weights: str):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.w = linear.weight.detach()
        if weights != "float32":
            self.w = (self.w if weights == "bfloat16" else rounded(self.w, weights)).half()

    @property
    def weight(self) -> Tensor:
        """The weights (out, in) that it stands for, in fp32; for code that reads them itself."""
        return self.w.float()

    def forward(self, x: Tensor) -> Tensor:
        if self.w.dtype == torch.float32:
            return F.linear(x, self.w, self.bias)
        if x.numel() <= 4 * self.in_features:
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
    for linear in {linear for _, _, linear in linears_of(model)}:
        linear.weight = nn.Parameter(rounded(linear.weight.detach(), weights))
