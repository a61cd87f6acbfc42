"""Where a model runs and in which precision: device, dtype, autocast, compile, the machine's peak.

torch.cuda is never touched unless the device is cuda, so that CPU-only builds of torch work.
"""

import ctypes
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kit.errors import UserError
from model import GPT, GPTConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FEW = 32  # tokens up to which kit/kernels is quicker than PyTorch's products
PAYS = 1.4  # bf16 is chosen where its products are so many times as fast as those in fp32
WITHOUT_BF16 = {  # values of ONEDNN_MAX_CPU_ISA that leave out the instructions for bf16 products
    "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}


class Dtypes(NamedTuple):
    """What a run computes in."""

    products: torch.dtype  # of the model, under autocast
    muon: torch.dtype | None = None  # of Muon's iterations; None: another optimizer


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


def choose_dtype(wanted: str, device: torch.device, run: Any = None) -> torch.dtype:
    """The dtype of training and evaluation; auto is the one that `fast_dtype` says.

    run: what a checkpoint says of its run; on the same type of device auto keeps its dtype, though
    a trial might find otherwise today.
    """
    if wanted == "float16" and device.type == "cpu":
        raise UserError("dtype=float16 does not train on a CPU; use float32, bfloat16 or auto")
    if wanted == "auto":
        wanted = recorded(run, device).get("dtype", wanted)
    return fast_dtype(device) if wanted == "auto" else DTYPES[wanted]


def fast_dtype(device: torch.device) -> torch.dtype:
    """The dtype of matrix products wherever speed alone decides: training, prompts, Muon.

    bf16 where the hardware multiplies it fast, fp16 on older cards, fp32 otherwise.
    """
    if device.type == "cuda":
        modern = torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere and later
        return torch.bfloat16 if modern else torch.float16
    fast = device.type == "cpu" and bf16_gain() > PAYS
    return torch.bfloat16 if fast else torch.float32


def muon_dtype(device: torch.device, run: Any = None) -> torch.dtype:
    """The dtype of Muon's iterations: never fp16, whose range is too small for them.

    run: as of `choose_dtype`; one that does not say had bf16, like all before there was a choice.
    """
    if saved := recorded(run, device):
        return DTYPES[saved.get("muon_dtype") or "bfloat16"]
    fast = fast_dtype(device) == torch.bfloat16
    return torch.bfloat16 if fast else torch.float32


def recorded(run: Any, device: torch.device) -> dict[str, Any]:
    """What a checkpoint says of its run, if that was on such a device and its dtypes are known."""
    sound = (isinstance(run, dict) and run.get("device") == device.type
             and run.get("dtype") in (*DTYPES,)
             and run.get("muon_dtype") in (None, "float32", "bfloat16"))
    return run if sound else {}


@cache
def bf16_gain() -> float:
    """How many times as fast this CPU multiplies bf16 matrices as fp32 ones; 0: it cannot.

    Where it may be able to, a trial of 0.05 s: the best of 25 small products of each dtype, in
    turn and on one thread. What else runs on the machine then slows down some of both; several
    threads would wait for whichever of them has lost its core.
    """
    if not may_multiply_bf16():
        return 0.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trials = [[matmul_seconds(dtype, n=256) for dtype in (torch.float32, torch.bfloat16)]
                  for _ in range(25)]
    finally:
        torch.set_num_threads(threads)
    fp32, bf16 = map(min, zip(*trials, strict=True))
    return fp32 / bf16


def may_multiply_bf16() -> bool:
    """Whether this CPU can have instructions for bf16 products; only of x86 a no is known.

    There it takes AVX512_BF16 (AMX comes with it), which two variables of the environment may
    hide: ATEN_CPU_CAPABILITY from PyTorch and ONEDNN_MAX_CPU_ISA from the library it multiplies by.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    told = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    most = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
    return (told() and torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")
            and most.upper() not in WITHOUT_BF16)


def matmul_seconds(dtype: torch.dtype, device: torch.device | str = "cpu", n: int = 512) -> float:
    """Seconds of one (n, n) @ (n, n) product."""
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    (a @ b).sum().item()  # wakes the device and its threads, and waits for them
    start = time.perf_counter()
    (a @ b).sum().item()
    return time.perf_counter() - start


class Kernels(AbstractContextManager):
    """PyTorch's kernels alone: the handle of kit.kernels where none of its own are in place."""

    wanted: tuple[str, ...] = ()  # names of our own that were asked for
    names: tuple[str, ...] = ()  # of these the ones in place

    def take_loss(self, model: GPT) -> None:
        """Give a model a faster loss, if that computes its own."""

    def drop(self, name: str, model: GPT | None = None) -> None:
        """Bring PyTorch's kernel back in the place of one of ours."""

    def __exit__(self, *error: object) -> None:
        """Bring all of PyTorch's back."""


def wanted_kernels(setting: str, device: torch.device) -> list[str]:
    """The names of our own kernels that `kernels` asks for; none without the folder kit/kernels."""
    if setting == "torch":
        return []
    try:
        from kit.kernels.operators import wanted
    except ModuleNotFoundError:
        return []
    return wanted(device)


def install_kernels(names: list[str], note: Callable[[str], None]) -> Kernels:
    """Put our own kernels in the place of PyTorch's until the end of `with`."""
    if not names:
        return Kernels()
    from kit.kernels.operators import install

    return install(names, note)


def device_of(model: nn.Module) -> torch.device:
    """Where the parameters of a model are."""
    return next(model.parameters()).device


class Undrawn(TorchFunctionMode):
    """Inside, tensors are not filled with random numbers, which takes time for nothing.

    Weights that are read next are overwritten; and on the meta device, where there is nothing to
    fill, PyTorch takes a second to say so: it imports its compiler.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.ndim < 2:  # what looks at it sees numbers
                tensor.detach().zero_()
            return tensor
        return func(*args, **kwargs)


def without_memory(config: GPTConfig) -> GPT:
    """The GPT of a configuration on the meta device, for its names, modules and shapes."""
    with Undrawn(), torch.device("meta"):
        return GPT(config)


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


def describe(device: torch.device, dtypes: Dtypes) -> str:
    """For the first line of a run."""
    name = {"cuda": lambda: torch.cuda.get_device_name(device), "mps": lambda: "Apple GPU",
            "cpu": lambda: f"{torch.get_num_threads()} threads, {spell_gain()}"}[device.type]()
    muon = f", Muon in {name_of(dtypes.muon)}" if dtypes.muon else ""
    return (f"{device} ({name}), {name_of(dtypes.products)}{muon}, "
            f"torch {torch.__version__}{untested()}")


def spell_gain() -> str:
    """What `bf16_gain` found, for a person."""
    gain = bf16_gain()
    times = f"{gain:.1f} times as fast as" if gain >= 0.1 else "far slower than"
    return f"bfloat16 products {times} float32" if gain else "no bfloat16 products"


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
