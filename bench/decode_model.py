"""The one model of `bench.decode`, in the form that each side reads: ours, transformers', GGUF.

Its weights are random, from a fixed seed. They are larger than GPT-2's at its start, and no bias
is 0 and no gain 1, so that its greedy text wanders instead of repeating one token, and a side that
left out any of them would be found out.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "block_size": 1024}
WEIGHTS, SHAPE_FILE = "model.safetensors", "shape.json"
GGUF_TYPES = {"32": "F32", "16": "F16", "8": "Q8_0", "4": "Q4_0"}  # bits -> type of the matrices
GGUF_NAMES = {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
              "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
              "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}


def make_model(folder: Path, shape: dict[str, int], seed: int = 1) -> int:
    """Write the model to a folder -> how many weights one token reads: all but wpe, each once.

    Imports torch: call it apart.
    """
    import torch
    from safetensors.torch import save_file

    from model import GPT, GPTConfig

    torch.manual_seed(seed)
    model = GPT(GPTConfig(**shape, bias=True), init_std=2.8 / shape["n_embd"] ** 0.5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.copy_(torch.randn(len(p)) * 0.1 + (0 if name.endswith("bias") else 1))
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / WEIGHTS)
    (folder / SHAPE_FILE).write_text(json.dumps(shape))
    return model.num_params() - model.wpe.weight.numel()


def read_shape(folder: Path) -> dict[str, int]:
    return json.loads((folder / SHAPE_FILE).read_text())


def ours(folder: Path) -> Any:
    """Our GPT in fp32, without dropout."""
    from kit.loading import load_weights
    from model import GPT, GPTConfig

    model = GPT(GPTConfig(**read_shape(folder), bias=True)).eval()
    load_weights(model, folder / WEIGHTS)
    return model


def hugging_face(folder: Path, dtype: Any) -> Any:
    """transformers' GPT2LMHeadModel of the same weights; it can never stop: it has no end token."""
    import torch
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    s = read_shape(folder)
    config = GPT2Config(
        vocab_size=s["vocab_size"], n_positions=s["block_size"], n_embd=s["n_embd"],
        n_layer=s["n_layer"], n_head=s["n_head"], bos_token_id=None, eos_token_id=None,
        pad_token_id=0)
    model = GPT2LMHeadModel(config)
    oblong = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # it keeps them (in, out)
    weights = {f"transformer.{name}": w.T if name.endswith(oblong) else w
               for name, w in load_file(folder / WEIGHTS).items()}
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)
    model.tie_weights()
    assert isinstance(dtype, torch.dtype)
    return model.to(dtype).eval()


def gguf_name(name: str) -> str:
    """'h.3.attn.c_attn.bias' -> 'blk.3.attn_qkv.bias'."""
    stem, _, kind = name.rpartition(".")
    block = ""
    if stem.startswith("h."):
        _, layer, stem = stem.split(".", 2)
        block = f"blk.{layer}."
    return f"{block}{GGUF_NAMES[stem]}.{kind}"


def write_gguf(folder: Path, bits: str) -> Path:
    """The model as `<bits>.gguf`: matrices and token embedding in one type, the rest in fp32.

    The head is the token embedding, as in GPT-2: the file has no output.weight. The vocabulary
    is a dummy of GPT-2's kind (only ids are fed), with the 256 bytes as far as there is room.
    """
    import gguf
    from safetensors.numpy import load_file

    s, path = read_shape(folder), folder / f"{bits}.gguf"
    kind = gguf.GGMLQuantizationType[GGUF_TYPES[bits]]
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_name("bench.decode")
    writer.add_context_length(s["block_size"])
    writer.add_embedding_length(s["n_embd"])
    writer.add_feed_forward_length(4 * s["n_embd"])
    writer.add_block_count(s["n_layer"])
    writer.add_head_count(s["n_head"])
    writer.add_layer_norm_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    V = s["vocab_size"]
    tokens = [*map(chr, range(256, 512)), *(f"token{i}" for i in range(256, V))][:V]
    writer.add_token_list(tokens)
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * V)
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    for name in ("bos", "eos"):
        getattr(writer, f"add_{name}_token_id")(V - 1)
    for name, w in load_file(folder / WEIGHTS).items():
        whole = w.ndim == 1 or name == "wpe.weight"
        type_ = gguf.GGMLQuantizationType.F32 if whole else kind
        data = gguf.quants.quantize(np.ascontiguousarray(w), type_)
        writer.add_tensor(gguf_name(name), data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
