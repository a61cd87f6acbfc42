"""A trained GPT made quick on the CPU: weights in fewer bits, a step in one call of native code.

The model stays a GPT: its linear layers, `hidden`, `loss` and `new_cache` are replaced in place,
`generate` is that of model.py. Without a compiler PyTorch's own kernels do the products.
"""

import ctypes
import os
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from kit import native
from kit.device import fast_dtype
from kit.quantize import GROUP, TILE, integers, pack, round_to
from model import GPT, GPTConfig, KVCache

DTYPES = [torch.float32, torch.bfloat16, torch.int8]  # of a cache, in the order of KINDS
FEW = 32  # tokens up to which a step in native code is quicker than PyTorch's products


def fast(model: GPT, weights: str = "float32", compiled: bool = True) -> str:
    """Change a model on the CPU, in place, for quick decoding -> a line that says what was done.

    weights: one of native.KINDS. Activations stay in fp32, but for what enters a product of 16
    bits or of integers; the cache is in fp32, bf16 or 8-bit integers as the weights are, of 4 bits
    in 8; without native code in fp32. Prompts are read in bf16 where this CPU multiplies it fast.
    compiled: False does without native code, as where there is no compiler.
    """
    if not isinstance(model.lm_head, nn.Linear) or model.wte.weight.device.type != "cpu":
        raise ValueError("expected a GPT on the CPU that is not fast yet")
    code, why = native.library() if compiled else (None, "")
    model.eval().float()

    def matrix(linear: nn.Linear, few: int = FEW) -> nn.Module:
        return NativeMatrix(linear, weights, code, few) if code else LibraryMatrix(linear, weights)

    for block in model.h:
        block.attn.c_attn, block.attn.c_proj = map(matrix, (block.attn.c_attn, block.attn.c_proj))
        block.mlp.c_fc, block.mlp.c_proj = map(matrix, (block.mlp.c_fc, block.mlp.c_proj))
    head = matrix(model.lm_head, 2**62)  # never in bf16, which would round logits
    if weights != "float32":  # only rows are looked up: half the memory
        tied = code and weights == "bfloat16" and model.config.tie_embeddings
        table = head.w if tied else model.wte.weight.detach().bfloat16()
        model.wte = nn.Embedding.from_pretrained(table)
    model.lm_head = head
    kept = DTYPES[min(native.KINDS.index(weights), 2)] if code else torch.float32
    cache = IntCache if kept == torch.int8 else KVCache
    model.new_cache = lambda batch_size=1, length=None: cache(model.config, batch_size, length,
                                                              "cpu", kept)
    model.loss = lambda x, targets: loss(model, x, targets)
    model.requires_grad_(False)
    if code:
        model.hidden = Step(model, code)
        model._apply = model.state_dict = model.load_state_dict = refuse  # it knows addresses
    weights = "float16" if weights == "bfloat16" and not code else weights
    how = "native code" if code else "PyTorch's kernels" + (f", as {why}" if why else "")
    return f"weights in {weights}, {how}"


def refuse(*args: Any, **options: Any) -> None:
    raise RuntimeError("a fast model cannot be moved, converted, saved or loaded any more")


def loss(model: GPT, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """GPT.loss with the head as it is: (sum of cross entropies, their number)."""
    x, targets, total = x.reshape(-1, x.size(-1)), targets.reshape(-1), torch.zeros(())
    for some, wanted in zip(x.split(256), targets.split(256), strict=True):
        total += F.cross_entropy(model.lm_head(some), wanted, ignore_index=-1, reduction="sum")
    return total, (targets >= 0).sum()


class NativeMatrix(nn.Module):
    """nn.Linear with its weights in one of native.KINDS: x (..., in) -> (..., out).

    Few tokens come out in fp32, many in bf16 where this CPU multiplies it fast.
    """

    def __init__(self, linear: nn.Linear, weights: str, code: Any, few: int = FEW):
        super().__init__()
        self.n_out, self.n_in = linear.weight.shape
        self.code, self.few, self.scale = code, few, None
        self.bias = None if linear.bias is None else linear.bias.detach().contiguous()
        if weights.startswith("int"):
            self.w, self.scale = pack(linear.weight, int(weights[3:]))
        else:
            self.w = linear.weight.detach().to(getattr(torch, weights)).contiguous()
        self.struct = native.Linear(*map(native.pointer, (self.w, self.scale, self.bias)),
                                    self.n_in, self.n_out, native.KINDS.index(weights))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.numel() // self.n_in
        many = tokens > self.few
        short = many and self.w.dtype != torch.float32 and bf16_pays()
        if many and self.scale is None:
            if not short:
                return F.linear(x.float(), self.w.float(), self.bias)
            y = F.linear(x.bfloat16(), self.w)
            return y if self.bias is None else y.add_(self.bias)
        x = x.float().contiguous()
        y = torch.empty(*x.shape[:-1], self.n_out)
        if self.code.linear(team(self.code), self.struct, tokens, x.data_ptr(), y.data_ptr()):
            raise MemoryError
        return y.bfloat16() if short else y


class LibraryMatrix(nn.Module):
    """The same by PyTorch's kernels: fp16 for few tokens, and integers with activations in bf16.

    With fp32 activations their kernels for integers take 6 to 70 times as long, AVX-512 or not.
    """

    def __init__(self, linear: nn.Linear, weights: str):
        super().__init__()
        w = linear.weight.detach()
        self.kind, (self.n_out, self.n_in) = weights, w.shape
        self.bias = None if linear.bias is None else linear.bias.detach()
        if weights == "float32":
            self.w = w
            return
        if weights == "bfloat16":  # fp16 is twice as fast as bf16 with one token, and finer
            self.w = w.half()
            return
        w = F.pad(w, (0, -self.n_in % GROUP, 0, -self.n_out % TILE))  # odd shapes read wild memory
        if weights == "int8":
            q, scale = integers(w, 8)  # a scale a row
            self.w, self.scale = q.to(torch.int8), scale[:, 0].contiguous()
        else:
            q, scale = integers(w.view(len(w), -1, GROUP), 4)
            q = (q.view_as(w) + 8).to(torch.int32)
            self.w = torch._convert_weight_to_int4pack_for_cpu(q, 1)
            self.scale = torch.cat([scale, torch.zeros_like(scale)], -1).transpose(0, 1)
            self.scale = self.scale.contiguous()  # (groups, out, scale and the zero at 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "float32":
            return F.linear(x, self.w, self.bias)
        if self.kind.startswith("int"):
            rows = F.pad(x.reshape(-1, self.n_in), (0, -self.n_in % GROUP)).bfloat16()
            if self.kind == "int8":
                y = torch._weight_int8pack_mm(rows, self.w, self.scale)
            else:
                y = torch._weight_int4pack_mm_for_cpu(rows, self.w, GROUP, self.scale)
            y = y[:, : self.n_out].float().view(*x.shape[:-1], self.n_out)
        elif x.numel() <= 4 * self.n_in:
            y = F.linear(x.half(), self.w).float()
        else:
            w = self.w.float()  # on the way to bf16, too: that is twice as fast as from fp16
            y = F.linear(x.bfloat16(), w.bfloat16()).float() if bf16_pays() else F.linear(x, w)
        return y if self.bias is None else y.add_(self.bias)


class IntCache(KVCache):
    """Keys and values as 8-bit integers, each vector (D) followed by the 4 bytes of its scale."""

    def __init__(self, config: GPTConfig, batch_size: int = 1, length: int | None = None,
                 device: torch.device | str | None = None, dtype: torch.dtype = torch.int8):
        wider = replace(config, n_embd=config.n_embd + 4 * config.n_head)
        super().__init__(wider, batch_size, length, device, dtype)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(map(grow, super().append(layer, shrink(k), shrink(v))))


def shrink(x: Tensor) -> Tensor:
    """(..., D) -> int8 (..., D + 4)"""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.cat([round_to(x, scale, -127, 127).to(torch.int8), scale.view(torch.int8)], -1)


def grow(held: Tensor) -> Tensor:
    """What `shrink` made -> (..., D) in what attention over a prompt is quickest with."""
    x = held[..., :-4] * held[..., -4:].contiguous().view(torch.float32)
    return x.bfloat16() if bf16_pays() else x


def bf16_pays() -> bool:
    return fast_dtype(torch.device("cpu")) == torch.bfloat16


def team(code: Any) -> int:
    return native.team_of(code, torch.get_num_threads(), os.getpid())


def rows_of(k: Tensor) -> int:
    """Rows of the cache that k (L, B, H, S, D) is, or the first B rows of; 0 for another layout."""
    (layers, B, *_), of_row = k.shape, k[0, 0].numel()
    rows = B if layers == 1 else k.stride(0) // of_row
    whole = layers == 1 or (k.stride(0) == rows * of_row and rows >= B)
    return rows if whole and k[0].is_contiguous() else 0


class Step:
    """GPT.hidden: in one native call where few tokens continue a cache, else as in model.py."""

    def __init__(self, model: GPT, code: Any):
        self.model, self.code, self.plain = model, code, model.hidden
        c, p = model.config, native.pointer
        self.layers = (native.Layer * c.n_layer)(*[native.Layer(
            p(b.ln_1.weight), p(b.ln_1.bias), p(b.ln_2.weight), p(b.ln_2.bias),
            p(getattr(b.attn, "logn_scale", None)), b.attn.c_attn.struct, b.attn.c_proj.struct,
            b.mlp.c_fc.struct, b.mlp.c_proj.struct) for b in model.h])
        D, wte = c.n_embd // c.n_head, model.wte.weight
        self.widths = {torch.float32: D, torch.bfloat16: D, torch.int8: D + 4}  # of a vector held
        self.struct = native.Model(
            c.n_layer, c.n_embd, c.n_head, c.vocab_size, native.LOGN.index(c.attn_logn),
            int(wte.dtype == torch.bfloat16), int(c.gelu == "erf"), model.h[0].attn.log_base,
            p(wte), p(model.wpe.weight), p(model.ln_f.weight), p(model.ln_f.bias), self.layers)

    def __call__(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        B, T = idx.shape
        if cache is None or not 0 < B * T or (B * T > FEW and T > 1):
            return self.plain(idx, cache)
        size, end = min(cache.k.size(3), self.model.config.block_size), cache.longest + T
        if end > size or cache.k.size(1) != B or cache.k.size(4) != self.widths[cache.k.dtype]:
            raise ValueError(f"{B} rows of {end} positions do not fit a cache of {cache.k.size(1)} "
                             f"rows and {size} positions")
        rows = rows_of(cache.k)
        if not rows:
            cache.k, cache.v, rows = cache.k.contiguous(), cache.v.contiguous(), B
        array = ctypes.c_int64 * (B * T)
        pos = [cache.pos] * B if isinstance(cache.pos, int) else cache.pos.tolist()
        pos = array(*(p + t for p in pos for t in range(T)))
        row_of = array(*(row for row in range(B) for _ in range(T)))
        held = native.Cache(cache.k.data_ptr(), cache.v.data_ptr(), rows, cache.k.size(3),
                            DTYPES.index(cache.k.dtype))
        x, ids = torch.empty(B, T, self.model.config.n_embd), idx.long().contiguous()
        failed = self.code.step(team(self.code), self.struct, B * T, ids.data_ptr(), pos, row_of,
                                held, x.data_ptr())
        if failed == 2:
            raise MemoryError
        if failed:
            raise IndexError(f"ids {ids.tolist()} at positions {[*pos]}: not all can be")
        cache.advance(T)
        return x
