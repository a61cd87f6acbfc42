"""The sides of `bench.decode`: one class each, all with the same few methods.

    Side(folder, bits, threads)             loads the model once
    .note                                   what it is, for the table
    .variants(kind) -> names                ways to do a kind of task that are tried, best taken
    .streams                                it tells of tokens when they come, not at the end
    .generate(prompts, new, variant, tick)  greedy ids; calls tick(ids of all rows) at each token

prompts are ids (rows, tokens) in numpy. Every side takes the argmax over the whole vocabulary and
stops at nothing. A module that a side needs is imported where it is built.
"""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.decode.model import WEIGHTS, hugging_face, ours, read_shape

Tick = Callable[[Any], None]
FAST = {"32": "float32", "16": "bfloat16", "8": "int8", "4": "int4"}


class Side:
    """What all have; a side has one way to do everything unless it says otherwise."""

    note, streams = "", True

    def __init__(self, folder: Path, bits: str, threads: int):
        self.folder, self.bits, self.threads = folder, bits, threads
        self.vocab = read_shape(folder)["vocab_size"]

    def variants(self, kind: str) -> list[str]:
        return [self.note]

    def generate(self, prompts: np.ndarray, new: int, variant: str, tick: Tick) -> None:
        raise NotImplementedError


class Ours(Side):
    """The window's steps with the sampler of sample.py at temperature 0, its ids read each step."""

    def __init__(self, folder: Path, bits: str, threads: int):
        super().__init__(folder, bits, threads)
        import torch

        fast, self.steps = self.functions()
        torch.set_num_threads(threads)
        self.model = self.load()
        self.note = fast(self.model, FAST[bits])

    def functions(self) -> tuple[Callable, Callable]:
        """What makes a model fast, and what writes with it."""
        from kit.kernels import fast
        from kit.writing.window import steps

        return fast, steps

    def load(self) -> Any:
        return ours(self.folder)

    def generate(self, prompts: np.ndarray, new: int, variant: str, tick: Tick) -> None:
        import torch

        from kit.sampling import Sampler

        choose = Sampler(list(range(len(prompts))), temperature=0)
        for ids in self.steps(self.model, torch.from_numpy(prompts), new, choose):
            tick(ids.tolist())


class Edited(Ours):
    """Ours after an edit that native code does not know: its MLPs have a squared ReLU.

    So the model's own forward writes, and only its matrices are in fewer bits. The edit is that of
    Primer (arXiv 2109.08668).
    """

    def __init__(self, folder: Path, bits: str, threads: int):
        super().__init__(folder, bits, threads)
        self.note = f"squared ReLU, {self.note.partition(':')[0]}"

    def load(self) -> Any:
        model = super().load()
        for block in model.h:
            block.mlp.forward = partial(squared_relu, block.mlp)
        return model


def squared_relu(mlp: Any, x: Any) -> Any:
    return mlp.c_proj(mlp.c_fc(x).relu().square())


class Older(Ours):
    """An older commit of this repository: `clone` is a folder with its files.

    Its model and kit are imported in the place of ours, so nothing may have imported them before.
    """

    def __init__(self, folder: Path, bits: str, threads: int, clone: Path):
        assert not {"kit", "model"} & set(sys.modules)
        sys.path.insert(0, str(clone))
        super().__init__(folder, bits, threads)
        self.note = f"{clone.name}, {self.note}"

    def functions(self) -> tuple[Callable, Callable]:
        """The same two, where they were at first if they are not where they are now."""
        from model import GPT

        try:
            from kit.kernels import fast
        except ImportError:
            from kit.fast import fast
        try:
            from kit.writing.window import steps
        except ImportError:
            steps = GPT.generate  # it took the same arguments
        return fast, steps


class HuggingFace(Side):
    """transformers' generate with its default, dynamic cache, in inference mode.

    A streamer takes the times; it is told the ids where generate has them. At 16 bits bfloat16
    and float16 are tried, at all precisions the attention of torch (sdpa) and the plain one.
    """

    def __init__(self, folder: Path, bits: str, threads: int):
        super().__init__(folder, bits, threads)
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        names = {"32": ["float32"], "16": ["bfloat16", "float16"]}[bits]
        self.models = {name: hugging_face(folder, getattr(torch, name)) for name in names}
        self.note = f"transformers {transformers.__version__}"

    def variants(self, kind: str) -> list[str]:
        return [f"{name} {attention}" for name in self.models for attention in ("sdpa", "eager")]

    def generate(self, prompts: np.ndarray, new: int, variant: str, tick: Tick) -> None:
        import torch

        name, attention = variant.split()
        model, idx = self.models[name], torch.from_numpy(prompts)
        model.set_attn_implementation(attention)
        with torch.inference_mode():
            model.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=new,
                           do_sample=False, streamer=Streamer(tick))


class Streamer:
    """What transformers calls with the prompt, then with each token."""

    def __init__(self, tick: Tick):
        self.tick, self.prompted = tick, False

    def put(self, ids: Any) -> None:
        if self.prompted:
            self.tick(ids.tolist())
        self.prompted = True

    def end(self) -> None:
        pass


class NanoGPT(Side):
    """generate of the clone's model.py as its sample.py calls it on a CPU: fp32, no cache."""

    note, streams = "as its sample.py", False

    def __init__(self, folder: Path, bits: str, threads: int, clone: Path):
        super().__init__(folder, bits, threads)
        import torch
        from safetensors.torch import load_file

        torch.set_num_threads(threads)
        sys.dont_write_bytecode = True  # no caches in the clone
        spec = importlib.util.spec_from_file_location("nanogpt_model", clone / "model.py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.GPTConfig(**read_shape(folder), bias=True, dropout=0.0)
        self.model = module.GPT(config).eval()
        weights = {f"transformer.{name}": w for name, w in load_file(folder / WEIGHTS).items()}
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
        self.model.load_state_dict(weights)

    def generate(self, prompts: np.ndarray, new: int, variant: str, tick: Tick) -> None:
        import torch

        idx = self.model.generate(torch.from_numpy(prompts), new, top_k=1)
        for ids in idx[:, prompts.shape[1]:].T:
            tick(ids.tolist())


class Bandwidth(Side):
    """Reads memory: the sum of 1 GiB of float32."""

    note, GIB = "a sum", 2**30

    def __init__(self, folder: Path, bits: str, threads: int):
        super().__init__(folder, bits, threads)
        import torch

        torch.set_num_threads(threads)
        self.bytes = torch.ones(self.GIB // 4)

    def generate(self, prompts: np.ndarray, new: int, variant: str, tick: Tick) -> None:
        self.bytes.sum()
        tick([0])
