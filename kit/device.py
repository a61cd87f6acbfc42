"""Where a model runs and in which precision: device, dtype, autocast, compile, the machine's peak.

torch.cuda is never touched unless the device is cuda, so that CPU-only builds of torch work.
"""

import ctypes
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache

import numpy as np
import torch
from torch import nn

from kit.errors import UserError
from model import GPT

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def name_of(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> 'bfloat16'"""
    return str(dtype).removeprefix("torch.")


def choose_device(wanted: str, local_rank: int | None = None) -> torch.device:
    """auto: cuda, then mps, then cpu; UserError for a device that is not there.

    local_rank: the number of this process on its machine, where several share the GPUs.
    """
    mps = torch.backends.mps.is_available()
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if wanted == "cuda" and local_rank is not None:
        wanted = f"cuda:{local_rank}"
    if not re.fullmatch(r"cpu|mps|cuda(:\d\d?)?", wanted):
        raise UserError(f"device={wanted}: expected auto, cpu, cuda, cuda:N or mps")
    device = torch.device(wanted)
    no_card = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    if no_card or (wanted == "mps" and not mps):
        raise UserError(f"device={wanted}: not in this machine or build of torch; "
                        "--device=auto takes what is there")
    return device


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """auto: bf16 where the hardware multiplies it fast, fp16 on older cards, fp32 otherwise."""
    if wanted == "float16" and device.type == "cpu":
        raise UserError("dtype=float16 does not train on a CPU; use float32, bfloat16 or auto")
    if wanted != "auto":
        return DTYPES[wanted]
    if device.type == "cuda":
        modern = torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere and later
        return torch.bfloat16 if modern else torch.float16
    fast = device.type == "cpu" and bf16_gain() > 1.4
    return torch.bfloat16 if fast else torch.float32


@cache
def bf16_gain() -> float:
    """How many times as fast this CPU multiplies bf16 matrices as fp32 ones: a short trial."""
    bf16, fp32 = (min(matmul_seconds(dtype) for _ in range(3))
                  for dtype in (torch.bfloat16, torch.float32))
    return fp32 / bf16


def matmul_seconds(dtype: torch.dtype, device: torch.device | str = "cpu", n: int = 512) -> float:
    """Seconds of one (n, n) @ (n, n) product."""
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    (a @ b).sum().item()  # wakes the device and its threads, and waits for them
    start = time.perf_counter()
    (a @ b).sum().item()
    return time.perf_counter() - start


def device_of(model: nn.Module) -> torch.device:
    """Where the parameters of a model are."""
    return next(model.parameters()).device


def flops_per_token(model: GPT) -> int:
    """FLOPs of one token, forward and backward, at full context (arXiv 2204.02311, appendix B).

    6 per parameter of a matrix product and 12 L C T for attention, the mask not discounted.
    """
    c, counted = model.config, set()  # a table that is a head too counts once, as a matrix
    for m in model.modules():
        counted |= set() if isinstance(m, nn.Embedding) else {*m.parameters(recurse=False)}
    attention = 12 * c.n_layer * c.n_embd * c.block_size
    return 6 * sum(p.numel() for p in counted) + attention


def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """The best FLOP/s of a square matrix product here: what MFU is measured against."""
    n = 1024 if device.type == "cpu" else 8192
    return 2 * n**3 / min(matmul_seconds(dtype, device, n) for _ in range(5))


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Matrix products in dtype; no context at all for fp32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """For the first line of a run."""
    name = {"cuda": lambda: torch.cuda.get_device_name(device), "mps": lambda: "Apple GPU",
            "cpu": lambda: f"{torch.get_num_threads()} threads, bfloat16 products "
                           f"{bf16_gain():.1f} times as fast as float32"}[device.type]()
    return f"{device} ({name}), {name_of(dtype)}, torch {torch.__version__}{untested()}"


def untested() -> str:
    """A word on a torch that this code was not tested with."""
    minor = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    return "" if (2, 9) <= minor <= (2, 13) else " (tested with 2.9 to 2.13)"


def prepare_device(device: torch.device) -> None:
    """What makes the same computation faster there, before the first large tensor is made.

    On a CPU: glibc gives freed memory back to the system and takes it anew, page by page, for each
    large tensor; told to keep it, an update of GPT-2 124M takes 0.7 of the time. On a GPU: fp32
    products in TF32, as nanoGPT has them.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    elif sys.platform == "linux":
        with suppress(AttributeError, OSError):  # not glibc
            libc = ctypes.CDLL(None)
            # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD of malloc.h: no maps of their own for large
            # blocks, never shrink the heap, let it grow in steps of 64 MiB
            for parameter, value in ((-4, 0), (-1, -1), (-2, 2**26)):
                libc.mallopt(parameter, value)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array there; on its way to a GPU while that is still at earlier work."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def compile_model(model: GPT, wanted: bool | str,
                  autocast: Callable[[], AbstractContextManager]) -> str:
    """Compile in place, so that parameters keep their names, and try it; says what was done.

    auto compiles on CUDA only: on a CPU it takes 17-35 s that a small run does not get back.
    """
    device = device_of(model)
    if wanted is False or (wanted == "auto" and device.type != "cuda"):
        return "off"

    def trial() -> None:
        idx = torch.zeros(1, model.config.block_size, dtype=torch.int64, device=device)
        with autocast():
            model(idx, idx)[0].backward()
        model.zero_grad(set_to_none=True)

    try:
        model.compile()
        trial()
        return "on"
    except Exception as e:  # whatever a compiler may raise; a fault of the model shows again below
        model._compiled_call_impl = None
        trial()
        return "off (" + " ".join(f"{type(e).__name__}: {e}".split())[:150] + ")"
