"""Where a model runs and in which precision: device, dtype, autocast, compile, the machine's peak.

torch.cuda is never touched unless the device is cuda, so that CPU-only builds of torch work.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from kit.settings import UserError
from model import GPT

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def name_of(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> 'bfloat16'"""
    return str(dtype).removeprefix("torch.")


def choose_device(wanted: str) -> torch.device:
    """auto: cuda, then mps, then cpu. Anything else must be there. UserError if it is not."""
    here = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if wanted == "auto":
        return torch.device(next((name for name, there in here.items() if there()), "cpu"))
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UserError(f"device={wanted}: expected auto, cpu, cuda, cuda:N or mps") from None
    if device.type not in ("cpu", *here):
        raise UserError(f"device={wanted}: expected auto, cpu, cuda, cuda:N or mps")
    absent = device.type in here and not here[device.type]()
    if absent or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"device={wanted}: this machine or this build of torch has none; "
                        "--device=auto takes what is there")
    return device


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """auto: bf16 where the hardware multiplies it fast, fp16 on older cards, fp32 otherwise."""
    if wanted != "auto":
        if wanted == "float16" and device.type == "cpu":
            raise UserError("dtype=float16 does not train on a CPU; use float32, bfloat16 or auto")
        return DTYPES[wanted]
    if device.type == "cuda":
        modern = torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere and later
        return torch.bfloat16 if modern else torch.float16
    if device.type == "cpu" and cpu_has_fast_bf16():
        return torch.bfloat16
    return torch.float32


def cpu_has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices well faster than fp32 ones: a trial of 0.1 s."""
    return min(matmul_seconds(torch.bfloat16) for _ in range(3)) < 0.7 * min(
        matmul_seconds(torch.float32) for _ in range(3))


def matmul_seconds(dtype: torch.dtype, device: torch.device | str = "cpu", n: int = 512) -> float:
    """Seconds of one (n, n) @ (n, n) product."""
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    (a @ b).sum().item()  # wakes the device and its threads, and waits for them
    start = time.perf_counter()
    (a @ b).sum().item()
    return time.perf_counter() - start


def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """The best FLOP/s of a square matrix product here: what MFU is measured against."""
    n = 1024 if device.type == "cpu" else 8192
    return 2 * n**3 / min(matmul_seconds(dtype, device, n) for _ in range(5))


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Matrix products in dtype; no context at all for fp32."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype)


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """For the first line of a run."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else (
        f"{torch.get_num_threads()} threads" if device.type == "cpu" else "Apple GPU")
    return f"{device} ({name}), {name_of(dtype)}, torch {torch.__version__}"


def compile_model(model: GPT, wanted: bool | str,
                  autocast: Callable[[], AbstractContextManager]) -> str:
    """Compile in place, so that parameters keep their names, and try it; says what was done.

    auto compiles on CUDA only: on the CPUs measured it takes 17-35 s and gains nothing a small run
    would get back. Where the compiler fails, the run goes on without it, with one line of reason.
    """
    device = model.wte.weight.device

    def trial() -> None:
        idx = torch.zeros(1, model.config.block_size, dtype=torch.int64, device=device)
        with autocast():
            model(idx, idx)[0].backward()
        model.zero_grad(set_to_none=True)

    if wanted is False or (wanted == "auto" and device.type != "cuda"):
        return "off"
    try:
        model.compile()
        trial()
        return "on"
    except Exception as e:  # whatever a compiler may raise; a fault of the model shows again below
        model._compiled_call_impl = None
        trial()
        reason = next((line.strip() for line in str(e).splitlines() if line.strip()), "it failed")
        return f"off ({type(e).__name__}: {reason[:120]})"
