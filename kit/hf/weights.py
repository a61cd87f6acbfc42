"""GPT-2's configuration and weights as Hugging Face stores them, both ways."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kit.checkpoint import shapes_of
from kit.errors import UserError
from kit.hf.gpt2 import layers_in, shapes_with_biases
from kit.hf.importing import MASK, finite
from model import GPT, GPTConfig

# What config.json must say (or leave out): all else would need another model
FIXED = {"model_type": "gpt2", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
         "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf", "gelu_python": "erf"}
SIZES = {"vocab_size": 50257, "n_positions": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768}
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


# ------------------------------------------------------------------------------------------ import


def architecture(path: Path, values: dict[str, Any], say: Callable[[str], None]) -> GPTConfig:
    """What config.json tells, with GPT2Config's defaults; UserError for what ours cannot be."""
    def refuse(key: str, value: Any, expected: str) -> UserError:
        return UserError(f"{path}: {key} is {value!r:.60}; this model has {expected}")

    for key, allowed in FIXED.items():
        value = values.get(key, None if key == "model_type" else allowed)
        if value != allowed or type(value) is not type(allowed):
            raise refuse(key, value, f"{allowed!r} only")
    sizes = {key: values.get(key, default) for key, default in SIZES.items()}
    for key, n in sizes.items():
        if type(n) is not int or not 0 < n < 2**31:
            raise refuse(key, n, "a whole number above 0 there")
    drops = [values.get(key, 0.1) for key in DROPOUTS]
    for key, share in zip(DROPOUTS, drops, strict=True):
        if type(share) not in (int, float):
            raise refuse(key, share, "a number there")
    inner, tied = values.get("n_inner"), values.get("tie_word_embeddings", True)
    if inner is not None and inner != 4 * sizes["n_embd"]:
        raise refuse("n_inner", inner, "4 * n_embd")
    if type(tied) is not bool:
        raise refuse("tie_word_embeddings", tied, "true or false there")
    gelu = values.get("activation_function", "gelu_new")
    if not isinstance(gelu, str) or gelu not in GELUS:
        raise refuse("activation_function", gelu, "gelu_new and gelu")
    if len({*drops}) > 1:
        say(f"dropout: {drops[0]}, that of resid_pdrop; embd_pdrop and attn_pdrop are {drops[1:]}")
    try:
        return GPTConfig(sizes["vocab_size"], sizes["n_positions"], sizes["n_layer"],
                         sizes["n_head"], sizes["n_embd"], float(drops[0]), bias=True,
                         tie_embeddings=tied, gelu=GELUS[gelu])
    except ValueError as e:
        raise UserError(f"{path}: {e}") from None


def theirs(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Name (without `transformer.`) -> shape of each tensor that GPT2LMHeadModel stores."""
    return {name: shape[::-1] if name.startswith("h.") else shape  # blocks: matrices as (in, out)
            for name, shape in shapes_with_biases(config).items()}


def turned(name: str, w: Tensor) -> Tensor:
    """A tensor of ours as they store it, or of theirs as ours."""
    return w.T if name.startswith("h.") and w.ndim == 2 else w


def headers(files: Iterable[Path], path: Path, config: GPTConfig) -> dict[str, tuple[Path, str]]:
    """Our name of each tensor -> its file and its name there, once all are known to fit."""
    found: dict[str, tuple[Path, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if not file.exists():
            raise UserError(f"{file}: missing, so the weights are not complete")
        for name, shape in shapes_of(file, leave_out=MASK).items():
            ours = name.removeprefix("transformer.")
            if ours in found:
                raise UserError(f"{file}: {name} is there twice; expected one tensor of each name")
            found[ours], shapes[ours] = (file, name), shape
    if (layers := layers_in(found)) != config.n_layer:  # before a model of so many is described
        raise UserError(f"{path}: n_layer is {config.n_layer}, but there are weights of {layers}")
    expected = theirs(config)
    if config.tie_embeddings and "lm_head.weight" in shapes:
        expected["lm_head.weight"] = expected["wte.weight"]
    for name in sorted(expected.keys() | shapes.keys()):
        if shapes.get(name) != expected.get(name):
            where = found[name][0] if name in found else path.parent
            raise UserError(f"{where}: {name:.80} is {shapes.get(name, 'absent')}, in the model of "
                            f"config.json {expected.get(name, 'absent')}")
    return found


def read(tensors: dict[str, tuple[Path, str]], config: GPTConfig) -> dict[str, Tensor]:
    """The tensors of `headers` as our model has them, in fp32."""
    weights = {}
    for ours, (file, name) in tensors.items():
        with safe_open(file, "pt") as f:
            w = turned(ours, finite(file, name, f.get_tensor(name)))
        weights[ours] = w.clone(memory_format=torch.contiguous_format)
    if config.tie_embeddings and "lm_head.weight" in weights:
        if not torch.equal(weights.pop("lm_head.weight"), weights["wte.weight"]):
            raise UserError(f"{tensors['lm_head.weight'][0]}: lm_head.weight is not wte.weight, "
                            "though config.json says tie_word_embeddings")
    return weights


# ------------------------------------------------------------------------------------------ export


def config_json(config: GPTConfig, eot: int | None) -> dict[str, Any]:
    """The config.json of a model; UserError for one that GPT2LMHeadModel has no word for."""
    if config.attn_logn != "off":
        raise UserError(f"this model multiplies its queries by log n (attn_logn={config.attn_logn})"
                        ", which GPT2LMHeadModel does not; one with attn_logn=off can be exported")
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
            "vocab_size": config.vocab_size, "n_positions": config.block_size,
            "n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd,
            "n_inner": None, "activation_function": "gelu" if config.gelu == "erf" else "gelu_new",
            "resid_pdrop": config.dropout, "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout, "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": config.tie_embeddings, "bos_token_id": eot, "eos_token_id": eot,
            "pad_token_id": eot, "dtype": "float32"}


def stored(model: GPT, source: Path) -> dict[str, Tensor]:
    """The tensors of a GPT-2 under GPT2LMHeadModel's names, in fp32, with zeros for biases.

    source: its checkpoint, named by the UserError for weights that are no numbers.
    """
    ours, out = dict(model.named_parameters()), {}
    for name, shape in theirs(model.config).items():
        w = finite(source, name, ours[name].detach()) if name in ours else torch.zeros(shape)
        stored_as = name if name == "lm_head.weight" else f"transformer.{name}"
        out[stored_as] = turned(name, w).contiguous()
    return out
