"""GPT-2's configuration and weights as Hugging Face stores them, both ways."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kit.errors import UserError
from model import GPT, GPTConfig

# What config.json must say (or leave out): all else would need another model
FIXED = {"model_type": ("gpt2",), "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,),
         "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)}
GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf", "gelu_python": "erf"}
MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # of older versions; not weights
CONV1D = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}


# ------------------------------------------------------------------------------------------ import


def architecture(path: Path, values: dict[str, Any], say: Callable[[str], None]) -> GPTConfig:
    """What config.json tells, with GPT2Config's defaults; UserError for what ours cannot be."""
    for key, allowed in FIXED.items():
        if (value := values.get(key, allowed[0] if key != "model_type" else None)) not in allowed:
            raise UserError(f"{path}: {key} is {value!r:.60}; this model has {allowed[0]!r} only")
    sizes = {"vocab_size": 50257, "n_positions": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768}
    sizes = {key: values.get(key, default) for key, default in sizes.items()}
    drops = [values.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    if any(type(n) is not int or not 0 < n < 2**31 for n in sizes.values()) or any(
            type(p) not in (int, float) for p in drops):
        raise UserError(f"{path}: {sizes}, dropouts {drops}: not the numbers of a model"[:300])
    if values.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        raise UserError(f"{path}: n_inner is {values['n_inner']!r:.60}; this model has 4 * n_embd")
    tied = values.get("tie_word_embeddings", True)
    if type(tied) is not bool:
        raise UserError(f"{path}: tie_word_embeddings is {tied!r:.60}; expected true or false")
    if (gelu := values.get("activation_function", "gelu_new")) not in [*GELUS]:
        raise UserError(f"{path}: activation_function is {gelu!r:.60}; this model has gelu_new and "
                        "gelu")
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
    C, V = config.n_embd, config.vocab_size
    shapes = {"wte.weight": (V, C), "wpe.weight": (config.block_size, C), "ln_f.weight": (C,),
              "ln_f.bias": (C,)}
    for layer in (f"h.{i}" for i in range(config.n_layer)):
        for part in ("ln_1", "ln_2"):
            shapes |= {f"{layer}.{part}.weight": (C,), f"{layer}.{part}.bias": (C,)}
        for part, (n_in, n_out) in CONV1D.items():
            shapes |= {f"{layer}.{part}.weight": (n_in * C, n_out * C),
                       f"{layer}.{part}.bias": (n_out * C,)}
    return shapes if config.tie_embeddings else shapes | {"lm_head.weight": (V, C)}


def is_conv1d(name: str) -> bool:
    """Whether it is a matrix that GPT2LMHeadModel stores transposed, as (in, out)."""
    return name.endswith(".weight") and name.split(".", 2)[-1].removesuffix(".weight") in CONV1D


def headers(files: Iterable[Path], path: Path, config: GPTConfig) -> dict[str, tuple[Path, str]]:
    """Our name of each tensor -> its file and its name there, once all are known to fit."""
    found: dict[str, tuple[Path, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with opened(file) as f:
            for name in f.keys():
                ours, part = name.removeprefix("transformer."), f.get_slice(name)
                if MASK.fullmatch(ours):
                    continue
                if ours in found or part.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                    why = "there twice" if ours in found else f"of type {part.get_dtype()}"
                    raise UserError(f"{file}: {name} is {why}; expected one tensor of real numbers")
                found[ours], shapes[ours] = (file, name), tuple(part.get_shape())
    layers = len({name.split(".")[1] for name in found if name.startswith("h.")})
    if layers != config.n_layer:  # before a model of so many is described
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


def opened(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, ValueError) as e:
        raise UserError(f"{path}: damaged: {e}") from None
    except FileNotFoundError:
        raise UserError(f"{path}: missing, so the weights are not complete") from None


def read(tensors: dict[str, tuple[Path, str]], config: GPTConfig,
         rows: int) -> dict[str, Tensor]:
    """The tensors of `headers` as our model has them, in fp32; of a vocabulary the first rows."""
    weights = {}
    for ours, (file, name) in tensors.items():
        with opened(file) as f:
            w = f.get_tensor(name).float()
        w = w.T if is_conv1d(ours) else w[:rows] if ours[:3] in ("wte", "lm_") else w
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


def stored(model: GPT) -> dict[str, Tensor]:
    """The tensors of a model under GPT2LMHeadModel's names, in fp32, with zeros for biases."""
    ours, out = dict(model.named_parameters()), {}
    for name, shape in theirs(model.config).items():
        w = ours[name].detach().float() if name in ours else torch.zeros(shape)
        w = w.T if is_conv1d(name) else w
        out[name if name == "lm_head.weight" else f"transformer.{name}"] = w.contiguous()
    return out
