"""The sides of `bench.decode`, one class each, and the one model in the files that they read.

    Side(folder, bits)                       loads the model once
    .note                                    what it is, for the table
    .ways(kind)                              names of ways to do a kind of task; the best is taken
    .generate(prompts, new, way, on_token)   greedy ids; on_token(ids of all rows) at each token

prompts are ids (rows, tokens) in numpy. Every side takes the argmax over the whole vocabulary and
stops at nothing. A module that only one side needs is imported where that side is built.
"""

import ctypes
import json
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.common import ProcessFailed

if TYPE_CHECKING:
    import torch

    from model import GPT, MLP

OnToken = Callable[[list[int]], None]
SHAPE = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "block_size": 1024}
WEIGHTS, SHAPE_FILE = "model.safetensors", "shape.json"
DTYPES = {"32": "float32", "16": "bfloat16", "8": "int8", "4": "int4"}  # bits -> our weights
GGUF_TYPES = {"32": "F32", "16": "F16", "8": "Q8_0", "4": "Q4_0"}  # bits -> type of the matrices


def make_files(folder: Path, shape: dict[str, int], gguf: bool) -> tuple[int, int]:
    """Write the model, as GGUF too if asked -> (torch's threads, weights that one token reads).

    The weights are random, from a fixed seed. They are larger than GPT-2's at its start, and no
    bias is 0 and no gain 1, so that its greedy text wanders instead of repeating one token, and a
    side that left out any of them would show it. A token reads all but wpe, each once.
    """
    import torch
    from safetensors.torch import save_file

    from model import GPT, GPTConfig

    torch.manual_seed(1)
    model = GPT(GPTConfig(**shape, bias=True), init_std=2.8 / shape["n_embd"] ** 0.5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.copy_(torch.randn(len(p)) * 0.1 + (0 if name.endswith("bias") else 1))
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / WEIGHTS)
    (folder / SHAPE_FILE).write_text(json.dumps(shape))
    for bits in GGUF_TYPES if gguf else ():
        write_gguf(folder, bits)
    return torch.get_num_threads(), model.num_params() - model.wpe.weight.numel()


def write_gguf(folder: Path, bits: str) -> Path:
    """The model as `<bits>.gguf`, as extras.weights.gguf writes one.

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


def read_shape(folder: Path) -> dict[str, int]:
    return json.loads((folder / SHAPE_FILE).read_text())


def read_bandwidth() -> float:
    """GB/s at which memory is read: the best of ten sums of 1 GiB of float32."""
    import torch

    values, seconds = torch.ones(2**28), []
    for _ in range(10):
        start = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - start)
    return 2**30 / min(seconds) / 1e9


class Side:
    """A side has one way to do everything unless it says otherwise."""

    def __init__(self, folder: Path, note: str):
        self.folder, self.note = folder, note
        self.vocab = read_shape(folder)["vocab_size"]

    def ways(self, kind: str) -> list[str]:
        return [self.note]


class Ours(Side):
    """The loop of sample.py with its sampler at temperature 0; ids are read at each step."""

    def __init__(self, folder: Path, bits: str):
        from kit.kernels import fast

        self.model = self.load(folder)
        super().__init__(folder, fast(self.model, DTYPES[bits]))

    def load(self, folder: Path) -> "GPT":
        """In fp32, without dropout."""
        from kit.checkpoint import load_weights
        from model import GPT, GPTConfig

        model = GPT(GPTConfig(**read_shape(folder), bias=True)).eval()
        load_weights(model, folder / WEIGHTS)
        return model

    def generate(self, prompts: np.ndarray, new: int, way: str, on_token: OnToken) -> None:
        import torch

        from kit.sampling import Sampler
        from kit.writing.window import steps

        choose = Sampler(list(range(len(prompts))), temperature=0)
        for ids in steps(self.model, torch.from_numpy(prompts), new, choose):
            on_token(ids.tolist())


class Edited(Ours):
    """Ours after an edit that native code does not know: its MLPs have a squared ReLU.

    So the model's own forward runs, and only its matrices are in fewer bits. The edit is that of
    Primer (arXiv 2109.08668).
    """

    def __init__(self, folder: Path, bits: str):
        super().__init__(folder, bits)
        self.note = f"squared ReLU, {self.note.partition(':')[0]}"

    def load(self, folder: Path) -> "GPT":
        model = super().load(folder)
        for block in model.h:
            block.mlp.forward = partial(squared_relu, block.mlp)
        return model


def squared_relu(mlp: "MLP", x: "torch.Tensor") -> "torch.Tensor":
    return mlp.c_proj(mlp.c_fc(x).relu().square())


class HuggingFace(Side):
    """transformers' generate with its default, dynamic cache, in inference mode."""

    def __init__(self, folder: Path, bits: str):
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        super().__init__(folder, f"transformers {transformers.__version__}")
        names = {"32": ["float32"], "16": ["bfloat16", "float16"]}[bits]
        self.models = {name: self.load(getattr(torch, name)) for name in names}

    def load(self, dtype: "torch.dtype") -> Any:
        """Its GPT-2 with the same weights; it can never stop, as it has no end token."""
        from safetensors.torch import load_file
        from transformers import GPT2Config, GPT2LMHeadModel

        s = read_shape(self.folder)
        model = GPT2LMHeadModel(GPT2Config(
            vocab_size=s["vocab_size"], n_positions=s["block_size"], n_embd=s["n_embd"],
            n_layer=s["n_layer"], n_head=s["n_head"], bos_token_id=None, eos_token_id=None,
            pad_token_id=0))
        matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # it keeps them (in, out)
        weights = {f"transformer.{name}": w.T if name.endswith(matrices) else w
                   for name, w in load_file(self.folder / WEIGHTS).items()}
        missing, unknown = model.load_state_dict(weights, strict=False)
        assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)
        model.tie_weights()
        return model.to(dtype).eval()

    def ways(self, kind: str) -> list[str]:
        return [f"{name} {attention}" for name in self.models for attention in ("sdpa", "eager")]

    def generate(self, prompts: np.ndarray, new: int, way: str, on_token: OnToken) -> None:
        import torch

        name, attention = way.split()
        model, idx = self.models[name], torch.from_numpy(prompts)
        model.set_attn_implementation(attention)
        streamer = SimpleNamespace(  # it is given the prompts (rows, tokens), then ids (rows,)
            put=lambda ids: on_token(ids.tolist()) if ids.ndim == 1 else None, end=lambda: None)
        with torch.inference_mode():
            model.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=new,
                           do_sample=False, streamer=streamer)


class NanoGPT(Side):
    """generate of the clone's model.py as its sample.py calls it on a CPU: fp32, no cache.

    It is called for one token at a time, which without a cache is what it does anyway.
    """

    def __init__(self, folder: Path, bits: str, clone: Path):
        from safetensors.torch import load_file

        super().__init__(folder, "as its sample.py")
        sys.dont_write_bytecode = True  # no caches in the clone
        sys.path.insert(0, str(clone))
        from model import GPT, GPTConfig  # nanoGPT's

        self.model = GPT(GPTConfig(**read_shape(folder), bias=True, dropout=0.0)).eval()
        weights = {f"transformer.{name}": w for name, w in load_file(folder / WEIGHTS).items()}
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
        self.model.load_state_dict(weights)

    def generate(self, prompts: np.ndarray, new: int, way: str, on_token: OnToken) -> None:
        import torch

        idx = torch.from_numpy(prompts)
        for _ in range(new):
            idx = self.model.generate(idx, 1, top_k=1)
            on_token(idx[:, -1].tolist())


class LlamaCpp(Side):
    """llama.cpp by the low-level functions of llama-cpp-python, with a context for each way.

    numpy takes the argmax of the logits where llama.cpp left them: 4 us of 50,257, where
    llama_sampler_sample with its greedy sampler takes 45 and Llama.generate is that with more
    Python around it.
    """

    cache_type: int | None = None  # of ggml's; None: llama.cpp's default, fp16

    def __init__(self, folder: Path, bits: str):
        import llama_cpp

        super().__init__(folder, f"llama-cpp-python {llama_cpp.__version__}")
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        self.api, self.contexts = llama_cpp, {}
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        path = str(folder / f"{bits}.gguf").encode()
        self.model = llama_cpp.llama_model_load_from_file(path, params)
        if not self.model:
            raise ProcessFailed(f"llama.cpp cannot load {bits}.gguf")

    def ways(self, kind: str) -> list[str]:
        """Flash attention is off in llama-cpp-python unless asked for and on in llama.cpp."""
        sizes = {"prefill": ["512", "1024"], "batch": ["512 split", "512 unified"]}
        return [f"{size} {attention}" for size in sizes.get(kind, ["512"])
                for attention in ("flash", "plain")]

    def context(self, way: str, rows: int, length: int) -> Any:
        """A context for `rows` sequences of `length` tokens, which it rounds up to 256s."""
        import torch

        key = way, rows, -(-length // 256) * 256
        if key not in self.contexts:
            for other in [k for k in self.contexts if k[1] > 1]:  # one large cache at a time
                self.api.llama_free(self.contexts.pop(other))
            p = self.api.llama_context_default_params()
            p.n_ctx, p.n_seq_max = rows * key[2], rows
            p.n_batch = p.n_ubatch = int(way.split()[0])
            p.n_threads = p.n_threads_batch = torch.get_num_threads()
            if self.cache_type is not None:
                p.type_k = p.type_v = self.cache_type
            p.kv_unified = "split" not in way
            p.flash_attn_type = (self.api.LLAMA_FLASH_ATTN_TYPE_ENABLED if "flash" in way
                                 else self.api.LLAMA_FLASH_ATTN_TYPE_DISABLED)
            self.contexts[key] = self.api.llama_init_from_model(self.model, p)
            if not self.contexts[key]:
                raise ProcessFailed(f"llama.cpp makes no context of {rows} x {length} tokens")
        return self.contexts[key]

    def generate(self, prompts: np.ndarray, new: int, way: str, on_token: OnToken) -> None:
        rows, T = prompts.shape
        context = self.context(way, rows, T + new - 1)  # the last token is not read
        self.api.llama_memory_clear(self.api.llama_get_memory(context), False)
        size, ids = int(way.split()[0]), []
        for row, prompt in enumerate(prompts.tolist()):
            tokens = [(id, position, row, position == T - 1) for position, id in enumerate(prompt)]
            for first in range(0, T, size):
                self.decode(context, tokens[first:first + size])
            ids.append(int(self.logits(context, 1)[0].argmax()))
        on_token(ids)
        for position in range(T, T + new - 1):
            self.decode(context, [(id, position, row, True) for row, id in enumerate(ids)])
            ids = self.logits(context, rows).argmax(-1).tolist()
            on_token(ids)

    def decode(self, context: Any, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Read some (id, position, row, whether its logits are wanted)."""
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        for i, (id, position, row, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i] = id, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, row, wanted
        batch.n_tokens = len(tokens)
        code = self.api.llama_decode(context, batch)
        self.api.llama_batch_free(batch)
        if code:
            raise ProcessFailed(f"llama_decode returned {code}")

    def logits(self, context: Any, rows: int) -> np.ndarray:
        """Those of the last step, (rows, V), where llama.cpp holds them."""
        pointer = ctypes.cast(self.api.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (rows, self.vocab))


SIDES: dict[str, Callable[..., Side]] = {
    "ours": Ours, "edited": Edited, "Hugging Face": HuggingFace, "llama.cpp": LlamaCpp,
    "nanoGPT": NanoGPT}
