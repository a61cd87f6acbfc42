"""The one model of `bench.decode`, in the form that each side reads: ours, transformers', GGUF.

Its weights are random, from a fixed seed. They are larger than GPT-2's at its start, and no bias
is 0 and no gain 1, so that its greedy text wanders instead of repeating one token, and a side that
left out any of them would be found out.
"""

import json
from pathlib import Path
from typing import Any

SHAPE = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "block_size": 1024}
WEIGHTS, SHAPE_FILE = "model.safetensors", "shape.json"
GGUF_TYPES = {"32": "F32", "16": "F16", "8": "Q8_0", "4": "Q4_0"}  # bits -> type of the matrices


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
    from kit.checkpoint import load_weights
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


def write_gguf(folder: Path, bits: str) -> Path:
    """The model as `<bits>.gguf`, as extras.to_gguf writes one: call it apart, it imports torch.

    The vocabulary is a dummy of GPT-2's kind (only ids are fed), with the 256 bytes as far as
    there is room.
    """
    from safetensors.numpy import load_file

    from extras.weights.gguf import write
    from extras.weights.gguf_vocabulary import Vocabulary
    from model import GPTConfig

    config, path = GPTConfig(**read_shape(folder), bias=True), folder / f"{bits}.gguf"
    V = config.vocab_size
    tokens = [*map(chr, range(256, 512)), *(f"token{i}" for i in range(256, V))][:V]
    made = Vocabulary(tokens, ["NORMAL"] * V, [f"{tokens[0]} {tokens[1]}"], "gpt-2", V - 1)
    write(path, config, load_file(folder / WEIGHTS), made, GGUF_TYPES[bits].lower(), "bench.decode")
    return path
