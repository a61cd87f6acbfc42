"""kit/native.cpp, compiled for this machine when first needed, and its structures for ctypes."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from ctypes import POINTER, Structure, c_float, c_int, c_void_p
from functools import cache
from pathlib import Path

from torch import Tensor

NAMES = ("native.cpp", "attention.h", "products.h", "team.h")
SOURCES = [Path(__file__).with_name(name) for name in NAMES]
KINDS = ("float32", "bfloat16", "int8", "int4")  # of weights, in the order of its enum
LOGN = ("off", "fixed", "clipped", "learned")
FLAGS = ["-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fopenmp-simd", "-fno-math-errno",
         "-fno-trapping-math"]
MACHINE = (["-march=native"], ["-mcpu=native"], [])  # the first that the compiler knows


class Linear(Structure):
    """A matrix (out, in) in one of KINDS."""

    _fields_ = [("w", c_void_p), ("scale", c_void_p), ("bias", c_void_p),
                ("n_in", c_int), ("n_out", c_int), ("kind", c_int)]


class Layer(Structure):
    """A block."""

    _fields_ = [(name, c_void_p) for name in ("ln_1", "ln_1b", "ln_2", "ln_2b", "logn")] + [
        (name, Linear) for name in ("attn", "proj", "fc", "out")]


class Model(Structure):
    """A GPT without its head."""

    _fields_ = [(name, c_int) for name in ("n_layer", "n_embd", "n_head", "vocab_size", "logn",
                                           "wte_kind")] + [("log_base", c_float)] + [
        (name, c_void_p) for name in ("wte", "wpe", "ln_f", "ln_fb")] + [
        ("layers", POINTER(Layer))]


class Cache(Structure):
    """A KVCache."""

    _fields_ = [("k", c_void_p), ("v", c_void_p), ("rows", c_int), ("length", c_int),
                ("kind", c_int)]


def pointer(tensor: Tensor | None) -> int | None:
    """Its address, for a field of a structure; the tensor must be contiguous and stay alive."""
    return None if tensor is None else tensor.data_ptr()


def processor() -> str:
    """What this processor can do: code compiled for another may end with an illegal instruction."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(line for line in lines if line.startswith(("flags", "Features")))[:4096]
    except OSError:
        return platform.processor()


def compile_to(target: Path, compiler: str, machines: tuple[list[str], ...] = MACHINE) -> None:
    """Compile with the first flags for the machine that the compiler knows; OSError with none."""
    for machine in machines:
        command = [compiler, *FLAGS, *machine, str(SOURCES[0]), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace",
                              stdin=subprocess.DEVNULL, timeout=120)
        if done.returncode == 0:
            return
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    raise OSError((errors or [f"exit code {done.returncode}"])[0])


def load(path: Path) -> ctypes.CDLL:
    """Compiled code with the types of its arguments."""
    code = ctypes.CDLL(str(path))
    code.make_team.restype = c_void_p
    code.step.argtypes = [c_void_p, POINTER(Model), c_int, *[c_void_p] * 3, POINTER(Cache),
                          c_void_p]
    code.linear.argtypes = [c_void_p, POINTER(Linear), c_int, c_void_p, c_void_p]
    code.linear.restype = None
    return code


@cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """(the code for this machine, ""), or (None, why there is none). It takes 3 s to compile."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if sys.platform == "win32" or not compiler:
        return None, "there is no C++ compiler (c++ or g++)"
    made_of = [*(p.read_bytes() for p in SOURCES), repr((FLAGS, compiler, processor())).encode()]
    key = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    path = SOURCES[0].parent / "__pycache__" / f"native-{key}.so"
    try:
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tmp-") as aside:
                compile_to(Path(aside) / path.name, compiler)
                os.replace(Path(aside) / path.name, path)  # whole or absent
        return load(path), ""
    except (OSError, AttributeError, subprocess.SubprocessError) as e:
        return None, f"{compiler} cannot compile kit/native.cpp here: {e}"


@cache
def team_of(code: ctypes.CDLL, threads: int, process: int) -> int:
    """The threads that the code works with; a process that forked has lost those of its parent."""
    return code.make_team(threads)
