"""A step of the GPT in one native call, for a model that was found to compute what native.cpp does.

native.cpp is a second description of the architecture, so it is not believed. `difference`
compares the modules with what it can be handed; `disagreement` runs some tokens both ways, through
the native step and through the model's own forward, over the same packed weights and kind of cache.
"""

import ctypes
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kit.kernels import native
from kit.kernels.leaves import FEW, NativeLinear, hooks_of, team
from kit.kernels.quantize import round_to
from model import GPT, KVCache

DTYPES = [torch.float32, torch.bfloat16, torch.int8]  # of a cache, in the order of native.KINDS
CLOSE = 1e-3  # of the deviation of the logits: how far both ways may differ
GAIN = 4.0  # of the norms; with more, attention would amplify the rounding of fp32 itself


def difference(model: GPT) -> str:
    """What of the modules native.cpp cannot be handed, in words; "" if they are as it has them."""
    try:
        expected = expected_leaves(model)
        handed = model.config.gelu, model.config.attn_logn, model.h[0].attn.log_base
        cache = model.new_cache(1, 1)
    except Exception as e:  # an edited model may lack any of these
        return " ".join(f"{type(e).__name__}: {e}".split())[:150]
    leaves = {name: m for name, m in model.named_modules() if next(m.children(), None) is None}
    for name in sorted(leaves.keys() | expected.keys()):
        m = leaves.get(name)
        if m is None or name not in expected:
            return f"{name} is {'absent' if m is None else 'new'}"
        kind, bias, *shape = expected[name]
        if type(m) is not kind or (getattr(m, "bias", None) is not None) != bias \
                or getattr(m, "eps", 1e-5) != 1e-5 or list(m.weight.shape) != shape:
            return f"{name} is {m}"
    there = {*dict(model.named_parameters(remove_duplicate=False)), *dict(model.named_buffers())}
    there -= {f"{name}.{p}" for name, m in leaves.items() for p in m._parameters}
    if "learned" in handed:
        there -= {f"h.{i}.attn.logn_scale" for i, block in enumerate(model.h)
                  if block.attn.logn_scale.shape == (model.config.n_head,)}
    if there:
        return f"{min(there)} is new"
    if hooked := [name for name, m in model.named_modules() if hooks_of(m)]:
        return f"{hooked[0] or 'the model'} has hooks"
    if type(cache) is not KVCache:
        return f"its cache is a {type(cache).__name__}"
    return ""


def expected_leaves(model: GPT) -> dict[str, tuple]:
    """Name -> (type, whether it has a bias, *shape of its weight) of each module without children.
    """
    c = model.config
    C, inner, bias = c.n_embd, model.h[0].mlp.c_fc.weight.size(0), c.bias
    norm = (nn.LayerNorm, bias, C)
    block = {"ln_1": norm, "attn.c_attn": (nn.Linear, bias, 3 * C, C),
             "attn.c_proj": (nn.Linear, bias, C, C), "ln_2": norm,
             "mlp.c_fc": (nn.Linear, bias, inner, C), "mlp.c_proj": (nn.Linear, bias, C, inner)}
    leaves = {"wte": (nn.Embedding, False, c.vocab_size, C),
              "wpe": (nn.Embedding, False, c.block_size, C), "ln_f": norm,
              "lm_head": (nn.Linear, False, c.vocab_size, C)}
    return leaves | {f"h.{i}.{n}": kind for i in range(c.n_layer) for n, kind in block.items()}


def install(model: GPT, weights: str, code: ctypes.CDLL) -> Callable[[], None]:
    """Let a model whose Linears are NativeLinear take its steps in native code.

    Returns a function that undoes it. weights: the type of the embeddings and of the cache, which
    holds fp32, bf16 or 8-bit integers. Nothing else is rounded until `round_activations`.
    """
    wte, few = model.wte, model.lm_head.few
    model.lm_head.few = 2**62  # never in bf16, which would round logits
    if weights != "float32":  # only rows are looked up: half the memory
        table = wte.weight.detach().bfloat16()
        if weights == "bfloat16" and table.equal(model.lm_head.w):  # tied: there once
            table = model.lm_head.w
        model.wte = nn.Embedding.from_pretrained(table)
    dtype = DTYPES[min(native.KINDS.index(weights), 2)]
    cache, c = IntCache if dtype == torch.int8 else KVCache, model.config
    model.new_cache = lambda batch_size=1, length=None: cache(
        c.n_layer, batch_size, length or c.block_size, dtype=dtype)
    model.hidden = Step(model, code)

    def undo() -> None:
        del model.hidden, model.new_cache
        model.wte, model.lm_head.few = wte, few

    return undo


def round_activations(model: GPT) -> None:
    """Round activations and queries too from now on, to the types of the weights and keys."""
    model.hidden.struct.exact = 0
    for leaf in model.modules():
        if isinstance(leaf, NativeLinear):
            leaf.exact = False


@torch.inference_mode()
def disagreement(model: GPT) -> str:
    """Where the native step and the model's own forward give other logits, in words; "" if nowhere.

    First three tokens from the start, with the outputs of the norms amplified; then, with the model
    as it is, one token for each of several rows, whose caches hold random keys and values up to
    positions 1, half and block_size - 1. This also finds a window of attention, a bias by distance,
    a clamp and a single scaled layer.
    """
    size, random = model.config.block_size, torch.Generator().manual_seed(0)
    ragged = sorted({min(n, size - 1) for n in (1, size // 2, size - 1)})
    for T, starts, gain in ((min(3, size), [0], GAIN), (1, ragged, 1)):
        idx = torch.randint(model.config.vocab_size, (len(starts), T), generator=random)
        try:
            with amplified(model, gain):
                native_logits, own = both_ways(model, idx, torch.tensor(starts), random)
        except Exception as e:  # an edited forward or cache may raise anything
            return " ".join(f"{type(e).__name__}: {e}".split())[:150]
        apart = (native_logits - own).pow(2).mean(-1).sqrt()  # (rows, T)
        apart /= own.std(-1).clamp(min=1e-5)
        apart[~(native_logits.isfinite() | own.isfinite()).any(-1)] = 0  # damaged, the same way
        for start, row in zip(starts, apart, strict=True):
            if not row.max() <= CLOSE:  # NaN is no agreement
                return f"its logits at position {start} are {row.max():.2g} deviations apart"
    return ""


@contextmanager
def amplified(model: GPT, gain: float) -> Iterator[None]:
    """Multiply the weights of the blocks' norms, which both ways read, until the end of `with`."""
    weights = [norm.weight for block in model.h for norm in (block.ln_1, block.ln_2)]
    before = [w.clone() for w in weights]
    torch._foreach_mul_(weights, gain)
    try:
        yield
    finally:
        torch._foreach_copy_(weights, before)


def both_ways(model: GPT, idx: Tensor, starts: Tensor, random: torch.Generator
              ) -> tuple[Tensor, Tensor]:
    """Logits of idx (B, T) by the native step and by the model's own forward.

    Each row continues a cache of so many random keys, of deviation 1, and values, of deviation 1, 4
    and 16.
    """
    c, step, held = model.config, model.hidden, int(starts.max())
    cache = model.new_cache(len(starts))
    row = torch.arange(len(starts)).view(-1, 1, 1, 1)
    past = [spread**row * torch.randn(len(starts), c.n_head, held, c.n_embd // c.n_head,
                                      generator=random) for spread in (1.0, 4.0)]
    for layer in range(c.n_layer if held else 0):
        cache.append(layer, *past)
    cache.advance(held)
    cache.trim(starts)
    native_logits = model.logits(step(idx, cache))
    cache.trim(starts)
    cache.append = partial(look_up, cache)
    return native_logits, model.logits(step.plain(idx, cache))


def look_up(cache: KVCache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """KVCache.append for keys and values that are stored already; ValueError if they differ.

    It returns the stored ones. Rounding the new ones would round one in a thousand the other way,
    which later layers amplify.
    """
    at = torch.arange(len(k))[:, None], slice(None), cache.positions(k.size(2))  # (B, T, H, D)
    held = cache.k[layer], cache.v[layer]
    there = [x[at] for x in held]
    both = type(cache).append(cache, layer, k, v)
    for x, all_of_them, stored, new in zip(held, both, there, (k, v), strict=True):
        theirs, mine = as_floats(stored), as_floats(x[at])
        if (mine - theirs).norm() > 0.01 * new.norm():
            raise ValueError(f"other keys or values are stored in layer {layer}")
        x[at] = stored
        all_of_them[at] = theirs.to(all_of_them.dtype)
    return both


class IntCache(KVCache):
    """Keys and values as 8-bit integers, each vector (D) followed by the 4 bytes of its scale."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        held = super().append(layer, shrink(k), shrink(v))
        return tuple(as_floats(x).to(k.dtype) for x in held)


def shrink(x: Tensor) -> Tensor:
    """(..., D) -> int8 (..., D + 4)"""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.cat([round_to(x, scale, -127, 127).to(torch.int8), scale.view(torch.int8)], -1)


def as_floats(held: Tensor) -> Tensor:
    """Keys or values of a cache (..., D), or what `shrink` made of them, in fp32."""
    if held.dtype != torch.int8:
        return held.float()
    scale = held[..., -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return held[..., :-4] * scale


class Step:
    """GPT.hidden: in one native call where few tokens continue a cache, else as in model.py."""

    def __init__(self, model: GPT, code: ctypes.CDLL):
        self.model, self.code, self.plain = model, code, model.hidden
        c, p = model.config, native.pointer
        self.layers = (native.Layer * c.n_layer)(*[native.Layer(
            p(b.ln_1.weight), p(b.ln_1.bias), p(b.ln_2.weight), p(b.ln_2.bias),
            p(getattr(b.attn, "logn_scale", None)), b.attn.c_attn.struct, b.attn.c_proj.struct,
            b.mlp.c_fc.struct, b.mlp.c_proj.struct) for b in model.h])
        wte = model.wte.weight
        self.struct = native.Model(
            c.n_layer, c.n_embd, c.n_head, model.h[0].mlp.c_fc.out_features, c.vocab_size,
            c.block_size, native.LOGN.index(c.attn_logn), int(wte.dtype == torch.bfloat16),
            int(c.gelu == "erf"), 1, model.h[0].attn.log_base, p(wte), p(model.wpe.weight),
            p(model.ln_f.weight), p(model.ln_f.bias), self.layers)

    def __call__(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        B, T = idx.shape
        if cache is None or not 0 < B * T or (B * T > FEW and T > 1):
            return self.plain(idx, cache)
        if cache.batch_size != B:
            raise ValueError(f"{B} rows of tokens for a cache of {cache.batch_size} rows")
        if cache.longest + T > min(cache.length, self.model.config.block_size):
            raise ValueError(f"{cache.longest + T} positions, but the cache has room for "
                             f"{cache.length}, the model for {self.model.config.block_size}")
        cache.dtype = cache.dtype or torch.float32
        k, v = self.addresses(cache)
        array = ctypes.c_int64 * (B * T)
        pos = [cache.pos] * B if isinstance(cache.pos, int) else cache.pos.tolist()
        pos = array(*(p + t for p in pos for t in range(T)))
        row_of = array(*(row for row in range(B) for _ in range(T)))
        held = native.Cache(k, v, B, cache.length, DTYPES.index(cache.dtype))
        x, ids = torch.empty(B, T, self.model.config.n_embd), idx.long().contiguous()
        failed = self.code.step(team(self.code), self.struct, B * T, ids.data_ptr(), pos, row_of,
                                held, x.data_ptr())
        if failed == 2:
            raise MemoryError
        if failed == 3:
            raise ValueError("native.cpp was handed a matrix of another size than the model's")
        if failed:
            raise IndexError(f"ids {ids.tolist()} at positions {[*pos]}: not all can be")
        cache.advance(T)
        return x

    def addresses(self, cache: KVCache) -> tuple[Any, Any]:
        """The addresses of the keys and of the values of each layer, remembered with the cache."""
        if not len(cache.k) == len(cache.v) == len(self.layers):
            raise ValueError(f"a cache of {len(cache.k)} layers for {len(self.layers)}")
        tensors, arrays = getattr(cache, "addresses", ((), ()))
        if not tensors or not all(map(operator.is_, tensors, cache.k + cache.v)):
            arrays = self.array(cache.k, cache), self.array(cache.v, cache)
            cache.addresses = cache.k + cache.v, arrays
        return arrays

    def array(self, layers: list[Tensor | None], cache: KVCache) -> Any:
        """The addresses of tensors, made if need be; ValueError for one of another shape."""
        c = self.model.config
        width = c.n_embd // c.n_head + 4 * (cache.dtype == torch.int8)
        shape = cache.batch_size, c.n_head, cache.length, width
        for layer, x in enumerate(layers):
            if x is None:
                layers[layer] = torch.zeros(shape, dtype=cache.dtype)
            elif x.shape != shape or x.dtype != cache.dtype:
                raise ValueError(f"a cache of {tuple(x.shape)} in {x.dtype}, not {shape}")
            elif not x.is_contiguous():
                layers[layer] = x.contiguous()
        return (ctypes.c_void_p * len(layers))(*[x.data_ptr() for x in layers])
