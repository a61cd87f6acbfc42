"""GPT-2 as other programs know it, however model.py was edited.

Weights from elsewhere were trained in a GPT-2, and a file for transformers or llama.cpp says that
it holds one. Both are wrong once model.py is edited, and no file shows it. So GPT-2 is written here
a second time, as a list of shapes and a forward pass of 20 lines, and `refuse_edited` compares
model.py with it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kit.errors import UserError
from model import GPT, GPTConfig

Shapes = dict[str, tuple[int, ...]]
SMALL, LARGE = 0.02, 0.3  # standard deviations of weights: at a start, and larger than any trained


def shapes_with_biases(config: GPTConfig) -> Shapes:
    """What a GPT-2 of this size holds, by our names in the order of its layers."""
    C, rows = config.n_embd, config.vocab_size
    block = {"ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "ln_2": (C,),
             "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    parts = {f"h.{i}.{part}": shape for i in range(config.n_layer) for part, shape in block.items()}
    shapes = {"wte.weight": (rows, C), "wpe.weight": (config.block_size, C)}
    for part, shape in (parts | {"ln_f": (C,)}).items():
        shapes |= {f"{part}.weight": shape, f"{part}.bias": shape[:1]}
    return shapes if config.tie_embeddings else shapes | {"lm_head.weight": (rows, C)}


def stored_shapes(config: GPTConfig) -> Shapes:
    """The same as GPT2LMHeadModel stores it: matrices of blocks as (in, out)."""
    return {name: shape[::-1] if name.startswith("h.") else shape
            for name, shape in shapes_with_biases(config).items()}


def transposed(name: str, w: Tensor) -> Tensor:
    """A tensor of model.py as GPT2LMHeadModel stores it, or the other way round."""
    return w.T if name.startswith("h.") and w.ndim == 2 else w


def layers_in(names: Iterable[str]) -> int:
    """The number of blocks that there are weights of, by our names, as h.0.ln_1.weight."""
    return len({name.split(".")[1] for name in names if name.startswith("h.")})


def gpt2(w: dict[str, Tensor], config: GPTConfig, ids: Tensor) -> Tensor:
    """GPT-2 (Radford et al. 2019) from tensors by our names: ids (B, T) -> logits (B, T, V)."""
    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)

    T, D = ids.size(1), config.n_embd // config.n_head
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    x = w["wte.weight"][ids] + w["wpe.weight"][:T]  # (B, T, C)
    for block in (f"h.{i}" for i in range(config.n_layer)):
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").chunk(3, dim=2)
        q, k, v = (a.unflatten(2, (-1, D)).transpose(1, 2) for a in qkv)  # (B, H, T, D)
        scores = (q @ k.mT / math.sqrt(D)).masked_fill(future, -torch.inf)
        y = (scores.softmax(3) @ v).transpose(1, 2).flatten(2)
        x = x + linear(y, f"{block}.attn.c_proj")
        inner = linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
        inner = F.gelu(inner, approximate="none" if config.gelu == "erf" else "tanh")
        x = x + linear(inner, f"{block}.mlp.c_proj")
    return F.linear(norm(x, "ln_f"), w.get("lm_head.weight", w["wte.weight"]))


def compare(got: Tensor, expected: Tensor) -> tuple[float, bool]:
    """The largest difference of logits, and whether it is no more than rounding; NaN is more."""
    if got.shape != expected.shape:
        return math.inf, False
    worst = (got - expected).abs().max().item()
    return worst, worst < 1e-3 * max(1.0, expected.abs().max().item())


# ----------------------------------------------------------------- whether model.py is still one


def refuse_unlike(model: GPT, source: Path, consequence: str) -> None:
    """UserError unless a model has the parameters of a GPT-2 and model.py computes what one does.

    source: the checkpoint that the model was read from. consequence: the end of the sentence, which
    says what cannot follow the edit and what to do.
    """
    refuse_other_shapes(model, source, consequence)
    refuse_edited(model.config, source, consequence)


@torch.no_grad()
def refuse_edited(config: GPTConfig, source: Path, consequence: str) -> None:
    """UserError unless model.py, built small but otherwise by this config, is a GPT-2.

    The config may come from a file that nobody has checked: no size of it is taken as it is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for small, std, n_tokens in trials(config):
            model = GPT(small).eval()
            refuse_other_shapes(model, source, consequence)
            randomize(model, std)
            ids = torch.randint(small.vocab_size, (1, n_tokens))
            expected = gpt2(dict(model.named_parameters()), small, ids)
            worst, same = compare(model(ids), expected)
            if not same:
                share = worst / expected.abs().max().item()
                raise UserError(f"{source}: the logits of model.py and of GPT-2 with the same "
                                f"weights differ by {share:.1%} of the largest, so model.py is "
                                f"not GPT-2 any more; {consequence}")


def trials(config: GPTConfig) -> Iterator[tuple[GPTConfig, float, int]]:
    """Narrow models of an architecture, the scale of their weights, and how many tokens they read.

    The first has all layers and the scale of a model at its start, where the epsilon of a norm
    shows. The second has weights so large that a softcap or a clamp shows, and so many positions
    that a window of attention does; it has two layers, for in more of them rounding shows as well.
    """
    n_head = min(config.n_head, 64)
    small = replace(config, n_head=n_head, n_embd=n_head * min(config.n_embd // config.n_head, 8),
                    n_layer=min(config.n_layer, 64), block_size=min(config.block_size, 1024),
                    vocab_size=min(config.vocab_size, 257))
    yield small, SMALL, small.block_size
    yield replace(small, n_layer=min(small.n_layer, 2)), LARGE, small.block_size


def randomize(model: GPT, std: float) -> None:
    """Leave no weight at 0 and no gain at 1: an edit may hide there until it is trained."""
    for p in model.parameters():
        p.copy_((p.ndim == 1) * p + std * torch.randn_like(p))
    model.ln_f.weight.mul_(std / SMALL)  # with large weights, logits of some tens


def refuse_other_shapes(model: GPT, source: Path, consequence: str) -> None:
    """UserError unless these are the parameters of a GPT-2, which may lack any bias."""
    expected = shapes_with_biases(model.config)
    ours = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name in expected | ours:
        here, there = ours.get(name, "absent"), expected.get(name, "absent")
        if here != there and not (here == "absent" and name.endswith(".bias")):
            raise UserError(f"{source}: {name} is {here} in model.py and {there} in a GPT-2 of "
                            f"the same size, so model.py is not GPT-2 any more; {consequence}")
