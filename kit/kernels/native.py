"""native.cpp, compiled for this machine when first needed, and its structures for ctypes."""

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from ctypes import POINTER, Structure, c_float, c_int, c_void_p
from functools import cache
from pathlib import Path

NAMES = ("native.cpp", "attention.h", "products.h", "vectors.h", "team.h")
SOURCES = [Path(__file__).with_name(name) for name in NAMES]
FOLDER = Path(__file__).with_name("__pycache__")
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

    _fields_ = [
        *((name, c_int) for name in ("n_layer", "n_embd", "n_head", "n_inner", "vocab_size",
                                     "block_size", "logn", "wte_kind", "erf", "exact")),
        ("log_base", c_float), *((name, c_void_p) for name in ("wte", "wpe", "ln_f", "ln_fb")),
        ("layers", POINTER(Layer))]


class Cache(Structure):
    """A KVCache."""

    _fields_ = [("k", POINTER(c_void_p)), ("v", POINTER(c_void_p)), ("rows", c_int),
                ("length", c_int), ("kind", c_int)]


def pointer(tensor: "torch.Tensor | None") -> int | None:  # noqa: F821
    """Its address, for a field of a structure; the tensor must stay alive, where it is."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def processor() -> str:
    """What this processor can do: code compiled for another may end with an illegal instruction."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(line for line in lines if line.startswith(("flags", "Features")))[:4096]
    except OSError:
        return platform.processor()


def compile_to(target: Path, compiler: list[str], machines: tuple[list[str], ...] = MACHINE
               ) -> None:
    """Compile with the first flags for the machine that the compiler knows; OSError with none."""
    for machine in machines:
        command = [*compiler, *FLAGS, *machine, str(SOURCES[0]), "-o", str(target)]
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
    code.linear.argtypes = [c_void_p, POINTER(Linear), c_int, c_void_p, c_void_p, c_int]
    return code


def compiler() -> list[str]:
    """The command of a C++ compiler, $CXX or the system's; [] without."""
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or ""
    return [] if sys.platform == "win32" else shlex.split(found)


def compiled() -> Path | None:
    """The code compiled for this machine, if it is there and as it was written."""
    found = sorted(FOLDER.glob(f"native-{key()}-*.so"))
    for path in found:  # the rest of its name is its own hash: half a file would crash us
        if hash_of(path) == path.stem.split("-")[2]:
            return path
    return None


def key() -> str:
    """A hash of all that the compiled code depends on."""
    made_of = [*(p.read_bytes() for p in SOURCES), repr((FLAGS, compiler(), processor())).encode()]
    return hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def build() -> Path:
    """Compile, if need be, and keep the result beside Python's own; 3 s. OSError if it fails."""
    if path := compiled():
        return path
    FOLDER.mkdir(exist_ok=True)
    for stale in (*FOLDER.glob("native-*"), *FOLDER.glob(".tmp-native-*")):
        with contextlib.suppress(OSError):  # another process may do the same
            if time.time() - stale.stat().st_mtime > 86400:
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".tmp-native-") as aside:
        made = Path(aside) / "native.so"
        compile_to(made, compiler())
        path = FOLDER / f"native-{key()}-{hash_of(made)}.so"
        os.replace(made, path)
    return path


@cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """(the code for this machine, ""), or (None, why there is none). It takes 3 s to compile."""
    if not compiler():
        return None, "there is no C++ compiler (c++ or g++)"
    try:
        return load(build()), ""
    except subprocess.TimeoutExpired:
        why = "it took more than two minutes"
    except (OSError, AttributeError) as e:
        why = str(e)
    return None, f"{' '.join(compiler())} cannot make kit/kernels/native.cpp run here: {why}"


def build_aside() -> bool:
    """Whether the code is not there yet; then another process compiles it, for the next time.

    False also if that failed before; `library` says why.
    """
    failed = FOLDER / f"native-{key()}.failed"  # goes after a day, as all that is stale
    if not compiler() or compiled() or failed.exists():
        return False
    try:
        FOLDER.mkdir(exist_ok=True)
        failed.touch()
        subprocess.Popen([sys.executable, str(SOURCES[0].with_suffix(".py"))],
                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL, start_new_session=True)
    except OSError:
        return False
    return True


@cache
def team_of(code: ctypes.CDLL, threads: int, process: int) -> int:
    """The threads that the code works with; a process that forked has lost those of its parent."""
    return code.make_team(threads)


if __name__ == "__main__":
    build()
