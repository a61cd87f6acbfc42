"""llama.cpp as a side of `bench.decode`, by the low-level functions of llama-cpp-python.

The batch is filled and llama_decode called from Python, once a token, and numpy takes the argmax
of the logits where llama.cpp left them: 4 us of 50,257, where llama_sampler_sample with its greedy
sampler takes 45 and Llama.generate is that with more Python around it.
"""

import ctypes
import logging
from pathlib import Path
from typing import Any

import numpy as np

from bench.decode.model import read_shape
from bench.decode.sides import Side, Tick
from bench.trial import TrialFailed


class LlamaCpp(Side):
    """One model, and a context for each way of doing things that is asked for."""

    cache_type: int | None = None  # of ggml's; None: llama.cpp's default, fp16

    def __init__(self, folder: Path, bits: str, threads: int):
        super().__init__(folder, bits, threads)
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        self.api, self.contexts = llama_cpp, {}
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        path = str(folder / f"{bits}.gguf").encode()
        self.model = llama_cpp.llama_model_load_from_file(path, params)
        if not self.model:
            raise TrialFailed(f"llama.cpp cannot load {bits}.gguf")
        self.block = read_shape(folder)["block_size"]
        self.note = f"llama-cpp-python {llama_cpp.__version__}"

    def variants(self, kind: str) -> list[str]:
        """Flash attention is off in llama-cpp-python unless asked for and on in llama.cpp."""
        more = {"prefill": ["512", "1024"], "batch": ["512 split", "512 unified"]}
        return [f"{size} {flash}" for size in more.get(kind, ["512"])
                for flash in ("flash", "plain")]

    def context(self, rows: int, variant: str, length: int) -> Any:
        """A context for `rows` sequences of `length` tokens; those of one row are kept."""
        if rows == 1:
            length = self.block
        key = rows, variant, length
        if key not in self.contexts:
            for other in [k for k in self.contexts if rows > 1 and k[0] > 1]:  # one large cache
                self.api.llama_free(self.contexts.pop(other))
            p = self.api.llama_context_default_params()
            p.n_ctx, p.n_seq_max = rows * length, rows
            p.n_batch = p.n_ubatch = int(variant.split()[0])
            p.n_threads = p.n_threads_batch = self.threads
            if self.cache_type is not None:
                p.type_k = p.type_v = self.cache_type
            p.kv_unified = "split" not in variant
            p.flash_attn_type = (self.api.LLAMA_FLASH_ATTN_TYPE_ENABLED if "flash" in variant
                                 else self.api.LLAMA_FLASH_ATTN_TYPE_DISABLED)
            self.contexts[key] = self.api.llama_init_from_model(self.model, p)
            if not self.contexts[key]:
                raise TrialFailed(f"llama.cpp makes no context of {rows} x {length} tokens")
        return self.contexts[key]

    def generate(self, prompts: np.ndarray, new: int, variant: str, tick: Tick) -> None:
        rows, T = prompts.shape
        held = T + new - 1  # the last token is not read
        context = self.context(rows, variant, -(-held // 256) * 256)  # it rounds up so itself
        self.api.llama_memory_clear(self.api.llama_get_memory(context), False)
        size = int(variant.split()[0])
        batch = self.api.llama_batch_init(max(size, rows), 0, 1)
        try:
            ids = np.array([self.read(context, batch, row, prompt, size)
                            for row, prompt in enumerate(prompts)])
            tick(ids.tolist())
            for position in range(T, T + new - 1):
                ids = self.step(context, batch, ids, position)
                tick(ids.tolist())
        finally:
            self.api.llama_batch_free(batch)

    def read(self, context: Any, batch: Any, row: int, prompt: np.ndarray, size: int) -> int:
        """A whole prompt of one sequence -> the likeliest next id."""
        for first in range(0, len(prompt), size):
            part = prompt[first:first + size].tolist()
            for i, token in enumerate(part):
                self.put(batch, i, token, first + i, row, first + i == len(prompt) - 1)
            self.decode(context, batch, len(part))
        return int(self.logits(context, 1)[0].argmax())

    def step(self, context: Any, batch: Any, ids: np.ndarray, position: int) -> np.ndarray:
        """One token of each sequence -> the likeliest next ones."""
        for row, token in enumerate(ids.tolist()):
            self.put(batch, row, token, position, row, True)
        self.decode(context, batch, len(ids))
        return self.logits(context, len(ids)).argmax(-1)

    @staticmethod
    def put(batch: Any, i: int, token: int, position: int, row: int, wanted: bool) -> None:
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, row, wanted

    def decode(self, context: Any, batch: Any, n: int) -> None:
        batch.n_tokens = n
        if code := self.api.llama_decode(context, batch):
            raise TrialFailed(f"llama_decode returned {code}")

    def logits(self, context: Any, rows: int) -> np.ndarray:
        """Those of the last step, (rows, V), where llama.cpp holds them."""
        pointer = ctypes.cast(self.api.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (rows, self.vocab))
