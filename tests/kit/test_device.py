"""kit/device.py: what is there is taken, what is not is said in a line, compiling may fail."""

import os
import platform
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from kit import device as kit_device
from kit.device import (
    Dtypes,
    autocast,
    bf16_gain,
    choose_device,
    choose_dtype,
    compile_model,
    describe,
    fast_dtype,
    matmul_seconds,
    may_multiply_bf16,
    muon_dtype,
    name_of,
    peak_flops,
    prepare_device,
    to_device,
)
from kit.errors import UserError
from kit.kernels.leaves import bf16_pays
from kit.settings import CLONE

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))
PLAIN = Dtypes(torch.float32)
AS_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2",
           "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
X86 = platform.machine().lower() in ("x86_64", "amd64")


@pytest.fixture
def machine(monkeypatch):
    """machine(cuda=, mps=, capability=): a machine with so many cards, as torch would tell."""
    def build(cuda: int = 0, mps: bool = False, capability: tuple[int, int] = (8, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda d=None: "Card 9")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    build()
    return build


@pytest.fixture
def no_cuda(monkeypatch):
    """A build of torch in which every question about CUDA fails."""
    def never(*args, **kwargs):
        raise AssertionError("torch.cuda was touched")

    for name in ("is_available", "device_count", "get_device_capability", "get_device_name",
                 "is_bf16_supported", "current_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, never)


def refused(call, *args) -> str:
    with pytest.raises(UserError) as error:
        call(*args)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


# ---------------------------------------------------------------------------------------- device


def test_auto_takes_the_best_that_is_there(machine):
    for there, best in ((dict(cuda=2, mps=True), "cuda"), (dict(cuda=1), "cuda"),
                        (dict(mps=True), "mps"), (dict(), "cpu")):
        machine(**there)
        assert choose_device("auto") == torch.device(best)


def test_what_is_named_is_taken_if_it_is_there(machine):
    machine(cuda=2, mps=True)
    for name in ("cpu", "cuda", "cuda:0", "cuda:1", "mps"):
        assert choose_device(name) == torch.device(name)


@pytest.mark.parametrize("there, wanted", [
    (dict(), "cuda"), (dict(), "cuda:0"), (dict(), "mps"), (dict(mps=True), "cuda"),
    (dict(cuda=1), "mps"), (dict(cuda=2), "cuda:2"), (dict(cuda=1), "cuda:99")])
def test_an_absent_device_is_one_line_with_the_way_out(machine, there, wanted):
    machine(**there)
    message = refused(choose_device, wanted)
    assert f"device={wanted}:" in message and "--device=auto" in message


@pytest.mark.parametrize("wanted", ["", "tpu9", "gpu", "CUDA", "cuda:", "cuda:x", "cuda:-1", "meta",
                                    "cuda:99999999999999999999", "xla", "cpu,cuda", "cu\nda"])
def test_an_unknown_device_is_one_line_with_those_there_are(machine, wanted):
    machine(cuda=1)
    assert "expected auto, cpu, cuda, cuda:N or mps" in refused(choose_device, wanted)


def test_cuda_is_never_touched_for_another_device(no_cuda, monkeypatch):
    monkeypatch.setattr(kit_device, "bf16_gain", lambda: 0.4)
    cpu = choose_device("cpu")
    assert choose_dtype("auto", cpu) == torch.float32 and "cpu" in describe(cpu, PLAIN)
    assert choose_dtype("auto", MPS) == muon_dtype(MPS) == torch.float32


# ----------------------------------------------------------------------------------------- dtype


@pytest.mark.parametrize("capability, dtype", [
    ((6, 1), torch.float16), ((7, 0), torch.float16), ((7, 5), torch.float16),
    ((8, 0), torch.bfloat16), ((8, 9), torch.bfloat16), ((9, 0), torch.bfloat16),
    ((12, 0), torch.bfloat16)])
def test_auto_on_a_card_is_bf16_where_it_is_fast(machine, capability, dtype):
    machine(cuda=1, capability=capability)
    assert choose_dtype("auto", CUDA) == fast_dtype(CUDA) == dtype
    half = dtype == torch.float16  # in which Muon's iterations would overflow
    assert muon_dtype(CUDA) == (torch.float32 if half else torch.bfloat16)


@pytest.mark.parametrize("gain, dtype", [(2.3, torch.bfloat16), (1.5, torch.bfloat16),
                                         (1.3, torch.float32), (0.2, torch.float32),
                                         (0.0, torch.float32)])
def test_auto_on_a_cpu_is_bf16_where_it_is_fast(monkeypatch, gain, dtype):
    monkeypatch.setattr(kit_device, "bf16_gain", lambda: gain)
    assert choose_dtype("auto", CPU) == dtype and choose_dtype("auto", MPS) == torch.float32
    assert fast_dtype(CPU) == muon_dtype(CPU) == dtype and bf16_pays() == (gain > 1.4)


@pytest.mark.parametrize("bf16, fp32, gain", [(0.5, 1.0, 2.0), (1.0, 1.0, 1.0), (2, 1, 0.5)])
def test_the_trial_alternates_on_one_thread_and_takes_the_best(monkeypatch, bf16, fp32, gain):
    """Other programs slow down all products but one of each dtype."""
    seen = []

    def seconds(dtype: torch.dtype, n: int) -> float:
        seen.append((dtype, torch.get_num_threads()))
        busy = 1 if len(seen) in (21, 34) else 1.5 + len(seen) % 7
        return busy * (bf16 if dtype == torch.bfloat16 else fp32)

    monkeypatch.setattr(kit_device, "may_multiply_bf16", lambda: True)
    monkeypatch.setattr(kit_device, "matmul_seconds", seconds)
    torch.set_num_threads(2)
    try:
        assert bf16_gain.__wrapped__() == gain and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert seen == [(torch.float32, 1), (torch.bfloat16, 1)] * 25


def test_no_trial_where_the_processor_has_no_such_products(monkeypatch):
    monkeypatch.setattr(kit_device, "may_multiply_bf16", lambda: False)
    monkeypatch.setattr(kit_device, "matmul_seconds", lambda *a, **b: pytest.fail("a trial"))
    assert bf16_gain.__wrapped__() == 0


@pytest.mark.parametrize("name, has, capability, variables, may", [
    ("x86_64", True, "AVX512", {}, True), ("AMD64", True, "AVX512", {}, True),
    ("x86_64", False, "AVX512", {}, False), ("x86_64", False, "AVX2", {}, False),
    ("AMD64", True, "AVX2", {}, False), ("x86_64", True, "DEFAULT", {}, False),
    ("x86_64", True, "AVX512", {"ONEDNN_MAX_CPU_ISA": "avx2"}, False),
    ("x86_64", True, "AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, False),
    ("x86_64", True, "AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True),
    ("x86_64", True, "AVX512", {"ONEDNN_MAX_CPU_ISA": "what oneDNN ignores"}, True),
    ("x86_64", True, "AVX512", {"DNNL_MAX_CPU_ISA": "Avx512_Core_VNNI"}, False),
    ("x86_64", True, "AVX512", {"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "AVX2"}, True),
    ("aarch64", False, "DEFAULT", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, True),
    ("arm64", None, "DEFAULT", {}, True), ("x86_64", None, "AVX512", {}, True)])
def test_what_the_processor_tells(monkeypatch, name, has, capability, variables, may):
    """has: AVX512_BF16, None where this torch has no word on it."""
    monkeypatch.setattr(platform, "machine", lambda: name)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    if has is None:
        monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has, raising=False)
    for variable in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.setenv(variable, variables.get(variable, ""))
    assert may_multiply_bf16() == may


def test_a_run_keeps_its_dtypes_on_the_same_kind_of_device(monkeypatch):
    monkeypatch.setattr(kit_device, "bf16_gain", lambda: 5.0)
    run = {"device": "cpu", "dtype": "float32", "muon_dtype": "float32"}
    assert choose_dtype("auto", CPU, run) == muon_dtype(CPU, run) == torch.float32
    assert choose_dtype("bfloat16", CPU, run) == torch.bfloat16  # asked for
    monkeypatch.setattr(kit_device, "bf16_gain", lambda: 0.0)
    before = {"device": "cpu", "dtype": "float32"}  # when there was no choice
    assert muon_dtype(CPU, before) == torch.bfloat16
    other = {"device": "cuda", "dtype": "bfloat16", "muon_dtype": "bfloat16"}
    strange = {"device": "cpu", "dtype": [], "muon_dtype": "bfloat16"}
    half = {"device": "cpu", "dtype": "bfloat16", "muon_dtype": "float16"}
    for run in (other, strange, half, None, 3, {}):
        assert choose_dtype("auto", CPU, run) == muon_dtype(CPU, run) == torch.float32


def test_a_dtype_that_is_named_is_taken(machine):
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        for device in (CPU, CUDA, MPS):
            assert choose_dtype(name, device) == dtype
        assert name_of(dtype) == name
    assert choose_dtype("float16", CUDA) == torch.float16


def test_float16_on_a_cpu_is_refused():
    message = refused(choose_dtype, "float16", CPU)
    assert "dtype=float16" in message and "float32, bfloat16 or auto" in message


def test_autocast():
    a = torch.ones(2, 2)
    for dtype in (torch.float32, torch.bfloat16):
        with autocast(CPU, dtype):
            assert (a @ a).dtype == dtype
    assert isinstance(autocast(MPS, torch.float32), nullcontext)  # no context that MPS may lack


def test_describe(machine, monkeypatch):
    machine(cuda=1)
    monkeypatch.setattr(kit_device, "bf16_gain", lambda: 2.345)
    short = Dtypes(torch.bfloat16, torch.bfloat16)
    rest = f"torch {torch.__version__}"
    assert describe(CPU, short) == ("cpu (1 threads, bfloat16 products 2.3 times as fast as "
                                    f"float32), bfloat16, Muon in bfloat16, {rest}")
    assert describe(CPU, PLAIN) == ("cpu (1 threads, bfloat16 products 2.3 times as fast as "
                                    f"float32), float32, {rest}")
    half = Dtypes(torch.float16, torch.float32)
    assert describe(CUDA, half) == f"cuda (Card 9), float16, Muon in float32, {rest}"
    assert describe(MPS, PLAIN).startswith("mps (Apple GPU), float32, torch ")
    for gain, words in ((0.0, "no bfloat16 products"),
                        (0.03, "bfloat16 products far slower than float32")):
        monkeypatch.setattr(kit_device, "bf16_gain", lambda gain=gain: gain)
        assert f"(1 threads, {words})" in describe(CPU, PLAIN)


@pytest.mark.parametrize("version, said", [
    ("2.9.0", False), ("2.13.1+cpu", False), ("2.8.0", True), ("2.14.0.dev20270101", True),
    ("3.0.0+cu140", True)])
def test_an_untested_torch_is_said(monkeypatch, version, said):
    monkeypatch.setattr(torch, "__version__", version)
    assert ("tested with 2.9 to 2.13" in describe(CPU, PLAIN)) == said


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_freed_memory_is_kept_on_a_cpu():
    """Large tensors, made again and again, hardly touch a page that is new to the process."""
    code = ("import sys, resource, torch; from kit.device import prepare_device\n"
            "if sys.argv[1] == 'kept': prepare_device(torch.device('cpu'))\n"
            "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
            "for _ in range(9): torch.ones(2**24)\n"  # until the heap is large enough
            "before = faults()\n"
            "for _ in range(20): torch.ones(2**24)\n"
            "print(faults() - before)")
    kept, given_back = (int(subprocess.run([sys.executable, "-c", code, how], capture_output=True,
                                           text=True, check=True, cwd=CLONE,
                                           env=os.environ | {"THP_MEM_ALLOC_ENABLE": "0"}).stdout)
                        for how in ("kept", "given back"))
    assert 5 * kept < given_back  # pages of 4 KiB; a tensor has 16,384


def test_products_in_tf32_on_a_gpu_only(machine):
    before = torch.get_float32_matmul_precision()
    prepare_device(CPU)
    prepare_device(MPS)
    assert torch.get_float32_matmul_precision() == before
    prepare_device(CUDA)
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision(before)


def test_without_glibc_nothing_happens(monkeypatch):
    monkeypatch.setattr(kit_device.ctypes, "CDLL", lambda name: object())  # it has no mallopt
    prepare_device(CPU)


def test_arrays_arrive_on_the_device(monkeypatch):
    a = np.arange(6).reshape(2, 3)
    assert torch.equal(to_device(a, CPU), torch.arange(6).view(2, 3))
    calls = []
    pinned = SimpleNamespace(to=lambda device, non_blocking: calls.append((device, non_blocking)))
    # only what lies in one piece is copied without waiting, and x and y are slices of rows
    monkeypatch.setattr(torch.Tensor, "pin_memory",
                        lambda t: pinned if t.is_contiguous() else pytest.fail("in pieces"))
    to_device(a[:, :-1], CUDA)
    assert calls == [(CUDA, True)]


def test_the_peak_is_that_of_the_fastest_product(monkeypatch):
    assert 0 < matmul_seconds(torch.float32, n=16) < 5
    seconds = iter([0.4, 0.2, 0.5, 0.3, 0.9])
    sizes = []
    monkeypatch.setattr(kit_device, "matmul_seconds",
                        lambda dtype, device, n: sizes.append(n) or next(seconds))
    assert peak_flops(torch.float32, CPU) == pytest.approx(2 * sizes[0] ** 3 / 0.2)


# --------------------------------------------------------------------------------------- compile


def fake_compile(monkeypatch, compiled, at_once: bool = False) -> None:
    """torch.compile that gives `compiled`, or raises it: when called, or at once."""
    def compile(function, *args, **kwargs):
        def call(*a, **k):
            if isinstance(compiled, Exception):
                raise compiled
            return compiled(function, *a, **k)

        return call() if at_once else call

    monkeypatch.setattr(torch, "compile", compile)


def compiling(model, wanted) -> str:
    return compile_model(model, wanted, nullcontext)


@pytest.mark.parametrize("error, reason", [
    (RuntimeError("\n\n  no compiler found\nmany\nmore lines"), "RuntimeError: no compiler found"),
    (KeyError("torch.complex32"), "KeyError"), (RuntimeError("x" * 500), "RuntimeError: xxx"),
    (NotImplementedError(), "NotImplementedError"), (AssertionError("\n"), "AssertionError")])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_compiler_that_fails_is_a_reason_in_one_line(tiny, monkeypatch, error, reason, at_once):
    """Either when it is asked (Windows, a new Python) or when it is first used."""
    model = tiny()
    idx = torch.zeros(1, 8, dtype=torch.int64)
    before = model(idx)
    fake_compile(monkeypatch, error, at_once)
    said = compiling(model, True)
    assert said.startswith(f"off ({reason}") and said.endswith(")")
    assert len(said.splitlines()) == 1 and len(said) < 200 and ": )" not in said
    assert torch.equal(model(idx), before)  # it works without


def test_a_compiler_that_works_is_used(tiny, monkeypatch):
    calls = []
    fake_compile(monkeypatch, lambda f, *a, **k: calls.append(a) or f(*a, **k))
    model = tiny()
    names = [n for n, _ in model.named_parameters()]
    assert compiling(model, True) == "on" and len(calls) == 1
    model(torch.zeros(1, 8, dtype=torch.int64))
    assert len(calls) == 2
    assert [n for n, _ in model.named_parameters()] == names == list(tiny().state_dict())[:-1]
    assert all(p.grad is None for p in model.parameters())  # the trial leaves nothing behind


def test_compile_off_never_asks_the_compiler(tiny, monkeypatch):
    fake_compile(monkeypatch, AssertionError("asked"), at_once=True)
    for wanted in (False, "auto"):  # auto: not on a CPU
        assert compiling(tiny(), wanted) == "off"


def test_auto_compiles_on_a_card_only(monkeypatch):
    """No card is needed: the model only says that it is on one."""
    loss = SimpleNamespace(backward=lambda: None)
    for device, said in ((CUDA, "on"), (MPS, "off"), (CPU, "off")):
        model = MagicMock(return_value=(loss, 1))
        model.parameters.return_value = iter([SimpleNamespace(device=device)])
        model.config.block_size = 8
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros", lambda *a, **k: None)
            assert compiling(model, "auto") == said
        assert model.compile.called == (said == "on")


def test_a_fault_of_the_model_is_not_blamed_on_the_compiler(tiny, monkeypatch):
    model = tiny()
    monkeypatch.setattr(type(model), "hidden", lambda *a: (_ for _ in ()).throw(ValueError("ours")))
    fake_compile(monkeypatch, lambda f, *a, **k: f(*a, **k))
    with pytest.raises(ValueError, match="ours"):
        compiling(model, True)


def test_the_trial_runs_in_the_callers_precision(tiny, monkeypatch):
    seen = []

    def compiled(function, *args):
        on = torch.is_autocast_enabled("cpu")
        seen.append(torch.get_autocast_dtype("cpu") if on else None)
        return function(*args)

    fake_compile(monkeypatch, compiled)
    compile_model(tiny(), True, partial(autocast, CPU, torch.bfloat16))
    compile_model(tiny(), True, partial(autocast, CPU, torch.float32))
    assert seen == [torch.bfloat16, None]


@pytest.mark.slow
def test_the_real_compiler_computes_the_same(tiny):
    model = tiny()
    idx = torch.arange(8)[None] % 11
    before = model(idx, idx)[0].item()
    assert compiling(model, True) == "on"
    assert model(idx, idx)[0].item() == pytest.approx(before, rel=1e-5)


def test_a_model_without_memory_is_made_without_the_compiler():
    """Drawing on the meta device would import it: a second before each text."""
    code = ("import sys\nfrom kit.device import without_memory\nfrom model import GPTConfig\n"
            "model = without_memory(GPTConfig(n_layer=3))\n"
            "assert all(p.is_meta for p in model.parameters())\n"
            "assert 'torch._dynamo' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent.parent,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
