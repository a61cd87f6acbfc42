"""Files made to harm whoever opens them: each is refused in one line, in bounded time and memory.

An attacker can make any hash and seal fit, so these fit wherever they can. Each attack runs in a
process of its own, which has little memory and half a minute.
"""

import hashlib
import json
import os
import pickle
import shutil
import signal
import stat
import struct
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sample
import train
from data import canonical_hash, read_json
from data.dataset import Dataset
from data.making.build import prepare
from data.making.tokenizers import make_tokenizer
from data.tokenizer import from_json
from extras.weights import nanogpt_bin
from kit import checkpoint
from kit import files as kit_files
from kit.errors import UserError
from kit.errors import run as run_cli
from kit.run import locate, store
from kit.settings import CLONE

if os.name == "nt":
    pytest.skip("forks, FIFOs and limits on memory are Unix's", allow_module_level=True)
import resource


class Gone:
    """As a value: the key is left out."""

    def __repr__(self) -> str:
        return "GONE"


GONE, slow = Gone(), pytest.mark.slow
DOORS = ["sample", "weights", pytest.param("resume", marks=slow)]  # slow where there are many
SECONDS = 30  # what an attack may take
MEMORY = 5 << 28  # and this beside what is there already: more than a file of 1 GB that is mapped
SHAPE = """
n_layer = 2
n_head = 2
n_embd = 16
block_size = 8
"""
CONFIG = """
batch_size = 4
gradient_accumulation_steps = 1
max_iters = 4
warmup_iters = 1
eval_interval = 4
eval_iters = 1
dtype = "float32"
"""


# ------------------------------------------------------------------- a victim, and its own process


class End(NamedTuple):
    code: int
    out: str
    err: str
    grown: int  # bytes of memory beyond those at the beginning

    def refused(self, *words: str, memory: int = 300 << 20) -> None:
        """Exit code 2 and one readable line, of a cause and not of spent memory."""
        lines = [line for line in self.err.splitlines()
                 if not line.startswith("no config file") and ": step 4, " not in line]
        assert self.code == 2 and len(lines) == 1, self
        assert lines[0].isprintable() and len(lines[0]) < 2000, self.err[:5000]
        assert "out of memory" not in self.err and self.grown < memory, self
        assert all(word in self.err + self.out for word in words), self

    def fine(self) -> None:
        """It went on: exit code 0, and nothing on stderr but what sample.py says of its model."""
        assert self.code == 0 and len(self.err.splitlines()) <= 1 and self.err[:6] != "train.", self
        assert self.err.replace("\n", "").isprintable(), self


def attacked(main, *argv: object, memory: int = MEMORY) -> End:
    """Run main(argv) as a script does, in a child; a traceback ends it with 1, the time with -14.
    """
    with open("/proc/self/statm") as f:
        pages = [int(n) * resource.getpagesize() for n in f.read().split()[:2]]
    folder = Path(os.environ["BONSAI_OUT"]).parent
    streams = [folder / "stdout.txt", folder / "stderr.txt"]
    pid = os.fork()
    if not pid:
        code = 1
        try:
            for number, path in enumerate(streams, 1):
                fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
                os.dup2(fd, number)
            sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))
            resource.setrlimit(resource.RLIMIT_AS, (pages[0] + memory,) * 2)
            signal.alarm(SECONDS)
            os.chdir(folder)
            sys.argv = [f"{main.__module__}.py", *map(str, argv)]
            run_cli(main, (UserError, FloatingPointError))
        except SystemExit as e:
            code = e.code
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)
    _, status, usage = os.wait4(pid, 0)
    unit = 1 if sys.platform == "darwin" else 1024
    return End(os.waitstatus_to_exitcode(status), *(p.read_text() for p in streams),
               usage.ru_maxrss * unit - pages[1])


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
pytestmark = [needs_proc, slow]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with `set`, a prepared data set, `run`, a finished run on it, and `test.py`."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as m:
        m.setenv("BONSAI_DATA", str(folder))
        m.setenv("BONSAI_OUT", str(folder / "out"))
        (folder / "test.py").write_text(SHAPE + CONFIG)
        (folder / "weights.py").write_text(CONFIG)  # the weights say which architecture
        (folder / "my.txt").write_text("It was the best of times, it was the worst. " * 200)
        chats = [{"messages": [{"role": "user", "content": f"{i}?"},
                               {"role": "assistant", "content": str(i)}]} for i in range(60)]
        (folder / "chats.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats))
        prepare([str(folder / "my.txt")], "set", "byte", say=lambda text: None)
        prepare([str(folder / "chats.jsonl")], "chats", "byte", say=lambda text: None)
        train.main([str(folder / "test.py"), f"--dataset={folder / 'set'}",
                    f"--out_dir={folder / 'run'}"])
    assert [p.name for p in store.newest_first(folder / "run")] == ["step_000004"]
    return folder


@pytest.fixture
def marker(tmp_path) -> Path:
    """What no attack may ever create."""
    path = tmp_path / "executed"
    yield path
    assert not path.exists()


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.fixture
def run(made, tmp_path) -> Path:
    """A copy of the run, to be tampered with."""
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


@pytest.fixture
def folder(run) -> Path:
    return run / "ckpt" / "step_000004"


@pytest.fixture
def dataset(made, tmp_path) -> Path:
    return Path(shutil.copytree(made / "set", tmp_path / "set"))


@pytest.fixture
def enter(made, tmp_path, run, folder):
    """enter(door): somebody opens the run by one of the doors, sample, resume, eval or weights."""
    def go(door: str, *flags: object, data: Path | None = None, memory: int = MEMORY) -> End:
        config = made / ("weights.py" if door == "weights" else "test.py")
        data = f"--dataset={data or made / 'set'}"
        if door == "sample":
            return attacked(sample.main, f"--out_dir={run}", "--max_new_tokens=5", *flags,
                            memory=memory)
        where = {"resume": (f"--out_dir={run}", "--init_from=resume", "--max_iters=6"),
                 "bare": (f"--out_dir={run}", "--init_from=resume"),
                 "eval": (f"--out_dir={run}", "--eval_only=True"),
                 "weights": (f"--out_dir={tmp_path / 'new'}", f"--init_from={folder}"),
                 "data": (f"--out_dir={tmp_path / 'new'}",)}[door]
        files = () if door == "bare" else (config, data)
        return attacked(train.main, *files, *where, *flags, memory=memory)

    return go


def forge(folder: Path, **changes: object) -> None:
    """Write state.json with changes, sealed, and with the hashes of what lies beside it."""
    state = json.loads((folder / "state.json").read_text())
    hashes = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()
              if p.name in store.FILES and p.is_file()}
    state = {k: v for k, v in (state | {"files": hashes} | changes).items() if v is not GONE}
    kit_files.write_json(folder / "state.json", state)


def forge_model(folder: Path, **changes: object) -> None:
    """The same with changes in model.json."""
    value = json.loads((folder / "model.json").read_text()) | changes
    kit_files.write_json(folder / "model.json", {k: v for k, v in value.items() if v is not GONE})
    forge(folder)


def test_the_victim_works_without_an_attack(enter, folder):
    """Else all below might be refused for another reason."""
    forge(folder)
    forge_model(folder)
    for door in ("sample", "resume", "eval", "weights"):
        enter(door).fine()


# ------------------------------------------------------------------------------------------ pickles


@pytest.mark.parametrize("door", [*DOORS, pytest.param("eval", marks=slow)])
@pytest.mark.parametrize("name", [*store.FILES, "state.json"])
def test_a_pickle_in_a_checkpoint(enter, folder, marker, name, door):
    (folder / name).write_bytes(pickle.dumps(Payload(marker)))
    if name != "state.json":
        forge(folder)
    end = enter(door)
    if name == "optimizer.safetensors" and door != "resume":
        end.fine()  # nobody reads it there
    else:
        end.refused(str(folder))


def test_a_pickle_of_torch_in_a_checkpoint(enter, folder, marker):
    torch.save({"weights": Payload(marker)}, folder / "model.safetensors")
    forge(folder)
    for door in ("sample", "resume", "weights"):
        enter(door).refused("model.safetensors")


@pytest.mark.parametrize("name", ["config.json", "log.jsonl", "loss.png", "ckpt/best.json",
                                  "ckpt/latest.json"])
def test_a_pickle_in_a_run_folder_is_replaced(enter, run, marker, name):
    """The checkpoint holds all of them anew, but for the log, of which no line is left."""
    (run / name).write_bytes(pickle.dumps(Payload(marker)))
    end = enter("resume")
    assert end.code == 0, end
    assert b"mkdir" not in (run / name).read_bytes()


@pytest.mark.parametrize("name", ["dataset.json", "tokenizer.json", "train_000000.bin",
                                  "val_000000.bin"])
def test_a_pickle_in_a_data_set(enter, dataset, marker, name):
    (dataset / name).write_bytes(pickle.dumps(Payload(marker)))
    enter("data", data=dataset).refused(str(dataset))


def test_a_pickle_beside_shards(enter, dataset, made, marker, tmp_path, monkeypatch):
    """meta.pkl is where nanoGPT has its vocabulary; numpy's object arrays are pickles as well."""
    (dataset / "meta.pkl").write_bytes(pickle.dumps(Payload(marker)))
    enter("data", data=dataset).fine()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "meta.pkl").write_bytes(pickle.dumps(Payload(marker)))
    for split in ("train", "val"):
        np.save(theirs / "x.npy", np.array([Payload(marker)], dtype=object))
        content = (theirs / "x.npy").read_bytes()
        (theirs / f"{split}.bin").write_bytes(content + b"." * (len(content) % 2))
    with pytest.raises(UserError, match="meta.pkl"):
        nanogpt_bin.convert(theirs, "converted")
    enter("data", data=theirs).refused("train.bin")


@pytest.mark.parametrize("content", [
    b"import os\nos.mkdir({marker!r})\n", b"n_layer = __import__('os').mkdir({marker!r})\n",
    b"n_layer = [].__class__\n", b"x = lambda: 0\n", b"n_layer = 9**9**9\n", b"n_layer = 2**64\n",
    b"dataset = f'{1}'\n", b"(" * 99999, b"n_layer = " + b"-" * 99999 + b"1\n",
    b"n_layer = " + b"1+" * 99999 + b"1\n", b"n_layer = " + b"9" * 99999 + b"\n",
    b"dataset = 'a' * 10**9\n", b"\0" * 99, b"\xff\xfe\n", b"n_layer = '\x1b]0;owned\x07'\n",
    "pickle"], ids=lambda c: str(c[:30]))
def test_a_config_is_not_executed(enter, tmp_path, marker, content):
    config = tmp_path / "evil.py"
    content = pickle.dumps(Payload(marker)) if content == "pickle" else \
        content.replace(b"{marker!r}", repr(str(marker)).encode())
    config.write_bytes(content)
    attacked(train.main, config).refused("evil.py")


# ---------------------------------------------------------------------- lies of safetensors' header


def lie(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of any header, and of any length that it says the header has."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list, begin: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


LIES = {
    "nothing": b"",
    "a header of 2**60 bytes": lie({}, length=2**60),
    "a header of 2**64 - 1 bytes": lie({}, length=2**64 - 1),
    "a header beyond the file": lie({"a": entry([1], 0, 4)}, bytes(4), length=2000),
    "offsets beyond the file": lie({"wte.weight": entry([2**20], 0, 2**22)}, bytes(4)),
    "offsets of 2**64": lie({"wte.weight": entry([1], 2**64 - 4, 2**64 - 1)}, bytes(4)),
    "offsets below 0": lie({"wte.weight": entry([1], -4, 0)}, bytes(4)),
    "offsets backwards": lie({"wte.weight": entry([1], 4, 0)}, bytes(4)),
    "offsets that overlap": lie({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
    "the same bytes twice": lie({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, bytes(8)),
    "a hole": lie({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
    "more data": lie({"a": entry([1], 0, 4)}, bytes(400)),
    "a product that overflows": lie({"wte.weight": entry([2**32, 2**32], 0, 4)}, bytes(4)),
    "a product that overflows to the truth": lie({"a": entry([2**62, 4, 1], 0, 0)}),
    "a size below 0": lie({"wte.weight": entry([-1, -1], 0, 4)}, bytes(4)),
    "a size that is text": lie({"wte.weight": entry(["1"], 0, 4)}, bytes(4)),
    "an unknown dtype": lie({"wte.weight": entry([1], 0, 4, "OBJECT")}, bytes(4)),
    "a name of a terminal's": lie({"\x1b]0;owned\x07\n": entry([1], 0, 4)}, bytes(4)),
    "no object": lie([1, 2, 3]),
    "no JSON": lie(b"\x80" * 99),
    "depth of 100,000": lie(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a list of depth 100,000": lie(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "metadata of depth 100,000": lie(b'{"__metadata__":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "no tensors": lie({}),
    "zeros": bytes(4096),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies(enter, folder, name, door):
    (folder / "model.safetensors").write_bytes(LIES[name])
    forge(folder)
    enter(door).refused("model.safetensors")


@pytest.mark.parametrize("name", [n for n in LIES if n != "no tensors"])
def test_an_optimizer_that_lies(enter, folder, name):
    (folder / "optimizer.safetensors").write_bytes(LIES[name])
    forge(folder)
    enter("resume").refused("optimizer")


@slow
@pytest.mark.parametrize("door", DOORS)
def test_a_header_of_100_megabytes(enter, folder, door):
    (folder / "model.safetensors").write_bytes(lie(b"{}".ljust(100_000_001)))
    forge(folder)
    enter(door).refused("model.safetensors")


@slow
@pytest.mark.parametrize("door", DOORS[:2])
def test_a_header_of_very_many_tensors(enter, folder, door):
    """As many as layers are claimed, so that a count alone cannot tell; each is without a byte."""
    n = 150_000
    (folder / "model.safetensors").write_bytes(lie({f"h.{i}.x": entry([0], 0, 0)
                                                    for i in range(n)}))
    forge_model(folder, n_layer=n, n_embd=2, n_head=1)
    enter(door).refused()


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
          torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("door", DOORS)
def test_weights_of_another_dtype(enter, folder, dtype, door):
    """Other floats may do, as somebody may have rounded them; whatever is no number may not."""
    path = folder / "model.safetensors"
    save_file({k: v.to(dtype) for k, v in load_file(path).items()}, path)
    forge(folder)
    end = enter(door)
    if dtype in DTYPES[:3] and end.code == 0:
        end.fine()
    else:
        end.refused("model.safetensors")


@slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_optimizer_of_another_dtype(enter, folder, dtype):
    path = folder / "optimizer.safetensors"
    save_file({k: v.to(dtype) for k, v in load_file(path).items()}, path)
    forge(folder)
    enter("resume").refused("optimizer")


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "U64", "C64", "BOOL"])
def test_dtypes_that_torch_may_not_have(enter, folder, dtype):
    bits = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U64": 64, "C64": 64}.get(dtype, 8)
    header, at = {}, 0
    for name, tensor in load_file(folder / "model.safetensors").items():
        size = tensor.numel() * bits // 8
        header[name] = entry(list(tensor.shape), at, at + size, dtype)
        at += size
    (folder / "model.safetensors").write_bytes(lie(header, bytes(at)))
    forge(folder)
    for door in ("sample", "weights"):
        enter(door).refused("model.safetensors")


@pytest.mark.parametrize("change", ["names", "shapes", "missing", "more", "scalar"])
def test_an_optimizer_of_another_model(enter, folder, change):
    path = folder / "optimizer.safetensors"
    old = load_file(path)
    name = "wte.weight.exp_avg"
    new = {"names": {f"\x1b{k}": v for k, v in old.items()},
           "shapes": old | {name: torch.zeros(2, 3)},
           "missing": {k: v for k, v in old.items() if k != name},
           "more": old | {"h.9.x.exp_avg": torch.zeros(1)},
           "scalar": old | {"wte.weight.step": torch.zeros(5)}}[change]
    save_file(new, path)
    forge(folder)
    enter("resume").refused("optimizer")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_weights_that_are_no_numbers(enter, folder, value):
    path = folder / "model.safetensors"
    save_file({k: torch.full_like(v, value) for k, v in load_file(path).items()}, path)
    forge(folder)
    enter("sample").refused("not finite")
    end = enter("resume")
    assert end.code == 2 and "Traceback" not in end.err, end


# ------------------------------------------------------------------------ lies about the model


MODELS = [
    {"n_layer": 10**9}, {"n_layer": 10**30}, {"n_embd": 10**6}, {"n_embd": 10**12},
    {"n_embd": 2 * 10**30}, {"vocab_size": 10**12}, {"vocab_size": 10**18}, {"vocab_size": 10**400},
    {"block_size": 10**12}, {"block_size": 2**62}, {"n_head": 10**9},
    {"n_layer": 10**9, "n_embd": 10**6, "vocab_size": 10**12},
    {"n_layer": -1}, {"n_layer": 0}, {"n_embd": -16}, {"vocab_size": -5}, {"n_head": 0},
    {"n_layer": 2.0}, {"n_embd": 16.0}, {"n_head": 2.0}, {"vocab_size": 257.0},
    {"n_layer": float("nan")}, {"n_embd": float("inf")}, {"block_size": 8.5},
    {"n_layer": "2"}, {"vocab_size": [257]}, {"n_embd": {"a": 1}}, {"n_head": None},
    {"bias": "no"}, {"bias": 0.0}, {"tie_embeddings": []}, {"dropout": "0.1"}, {"dropout": -1},
    {"dropout": float("nan")}, {"dropout": None}, {"attn_logn": ["off"]}, {"attn_logn": "evil"},
    {"attn_logn": {}}, {"logn_base": "2"}, {"attn_logn": "fixed", "logn_base": 1e300},
    {"attn_logn": "fixed", "logn_base": float("nan")}, {"n_layer": 1}, {"n_layer": 3},
    {"extra": 1}, {"__class__": "x"}, {"__post_init__": None}, {"a\n\x1b[31mb": 1},
]


@pytest.mark.parametrize("door", DOORS[:2])
@pytest.mark.parametrize("changes", MODELS, ids=lambda c: ascii(c)[:60])
def test_a_model_that_is_not_the_one_of_its_weights(enter, folder, changes, door):
    forge_model(folder, **changes)
    enter(door).refused()


@pytest.mark.parametrize("changes", [{"n_layer": 10**9}, {"n_embd": 10**6}, {"n_layer": 1}],
                         ids=str)
def test_settings_of_a_run_that_are_not_those_of_its_weights(enter, run, folder, changes):
    """Without a config file a run goes on with its own settings."""
    state = json.loads((folder / "state.json").read_text())
    state["run"]["settings"] |= changes
    forge(folder, run=state["run"], finished=False)
    kit_files.write_json(run / "config.json", state["run"])
    enter("bare").refused()


# -------------------------------------------------------------------------- JSON without an end

DEEP = b'{"format": 1, "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
PLACES = ["config.json", "ckpt/step_000004/state.json", "ckpt/step_000004/model.json",
          "ckpt/step_000004/tokenizer.json", "ckpt/best.json", "ckpt/latest.json"]


def bomb(path: Path, kind: str) -> None:
    """1 GB that costs no disk, or a depth that no stack has; links and the like."""
    path.unlink(missing_ok=True)
    if kind == "large":
        with path.open("wb") as f:
            f.truncate(1 << 30)
    elif kind == "deep":
        path.write_bytes(DEEP)
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"device": "/dev/zero", "dangling": "nowhere"}[kind])


BOMBS = [pytest.param("large", marks=slow), "deep", "folder", "fifo", "device", "dangling"]


@slow
@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.parametrize("name", PLACES)
def test_a_bomb_in_a_run_folder(enter, run, folder, name, kind):
    """At every door, one line, and where there is a way round it the run goes on."""
    bomb(run / name, kind)
    if kind in ("large", "deep") and "step" in name and "state" not in name:
        forge(folder)
    for door in ("sample", "weights", "eval"):
        end = enter(door)
        harmless = "step" not in name and (door == "weights" or "best" not in name)
        if kind == "dangling" and "best" in name:
            continue  # as if it were not there
        end.refused() if not harmless else end
        assert end.code == 0 or not harmless, end
    end = enter("resume")
    assert end.code in (0, 2) and "Traceback" not in end.err, end
    assert len(end.err.splitlines()) <= 1 and end.grown < 300 << 20, end


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_in_place_of_weights(enter, folder, kind):
    bomb(folder / "model.safetensors", kind)
    if kind in ("large", "deep"):
        forge(folder)
    for door in ("sample", "weights", "resume"):
        enter(door).refused(memory=1 << 30)


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_as_the_pointer_to_the_newest_run(enter, tmp_path, kind):
    out = Path(os.environ["BONSAI_OUT"])
    out.mkdir(exist_ok=True)
    bomb(out / "latest.json", kind)
    attacked(sample.main).refused()


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.parametrize("name", ["dataset.json", "tokenizer.json"])
def test_a_bomb_in_a_data_set(enter, dataset, name, kind):
    bomb(dataset / name, kind)
    enter("data", data=dataset).refused()


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_for_a_tokenizer(enter, made, tmp_path, kind):
    bomb(tmp_path / "evil.json", kind)
    enter("data", f"--tokenizer={tmp_path / 'evil.json'}", data=made / "my.txt").refused("evil")


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_for_a_config(tmp_path, kind):
    bomb(tmp_path / "evil.py", kind)
    attacked(train.main, tmp_path / "evil.py").refused("evil.py")


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "dangling"])
@pytest.mark.parametrize("name", ["train_000000.bin", "val_000000.bin"])
def test_what_is_no_file_in_place_of_a_shard(enter, dataset, name, kind):
    bomb(dataset / name, kind)
    enter("data", data=dataset).refused(name)


def test_read_json_of_the_data_room(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
    link = tmp_path / "link.json"
    link.symlink_to(path)
    with pytest.raises(UserError, match="no plain file"):
        read_json(link)
    with path.open("r+b") as f:
        f.truncate((64 << 20) + 1)
    with pytest.raises(UserError, match="64 MiB"):
        read_json(path)


@slow
def test_depths_around_what_the_stack_has(dataset):
    """What can just be read must not fail where it is hashed."""
    meta = json.loads((dataset / "dataset.json").read_text())
    text = json.dumps(meta)[:-1]
    for depth in range(300, 1000, 3):
        (dataset / "dataset.json").write_text(f'{text}, "x": {"[" * depth}{"]" * depth}}}')
        try:
            Dataset(dataset)
        except UserError:
            pass


# ------------------------------------------------------------------------------------------- logs


ROW = {"step": 1, "loss": 5.0, "tokens": 32, "lr": 1e-3, "grad_norm": 1.0}
LOGS = {
    "text for a loss": [ROW | {"loss": "x"}], "a list for a loss": [ROW | {"loss": [1]}],
    "text for a validation loss": [{"step": 4, "val_loss": "x"}, {"step": 4, "val_loss": "y"}],
    "a list for bits": [{"step": 4, "val_loss": 1.0, "val_bpb": [1]}],
    "numbers of 400 digits": [ROW | {"loss": 10**400}, {"step": 4, "val_loss": 10**400}],
    "a step that is true": [ROW | {"step": True}], "a step below 0": [ROW | {"step": -(10**400)}],
    "infinity": [ROW | {"loss": float("inf")}, {"step": 4, "val_loss": float("nan")}],
    "no objects": [1, "x", None, []], "no step": [{"loss": 1.0}],
    "a format": [{"format": 99, "step": 0}, ROW | {"format": 3}],
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_is_none_of_ours(enter, run, name):
    """A log is no reason to stop: what does not fit is left out."""
    (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LOGS[name]))
    end = enter("resume")
    assert end.code == 0 and "Traceback" not in end.err, end
    assert (run / "loss.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("content", [b"[" * 100_000 + b"]" * 100_000 + b"\n", b"\xff" * 9999,
                                     b"\0" * 9999, b'{"step": 1, "loss": ' + b"9" * 60_000 + b"}"],
                         ids=["deep", "no UTF-8", "zeros", "digits"])
def test_a_log_of_no_lines(enter, run, content):
    (run / "log.jsonl").write_bytes(content)
    end = enter("resume")
    end.fine()


@slow
def test_a_log_of_one_line_of_1_GB(enter, run):
    with (run / "log.jsonl").open("wb") as f:
        f.truncate(1 << 30)
    end = enter("resume")
    assert end.code in (0, 2) and "Traceback" not in end.err and end.grown < 300 << 20, end


@slow
def test_a_log_that_grows_in_memory(enter, run):
    """Each line within its limit, but of lists that take thirty times their text."""
    line = b'{"step": 1, "loss": 1.0, "x": [' + b"[],[],[],[]," * 5000 + b"0]}\n"
    (run / "log.jsonl").write_bytes(line * 200)  # 12 MB of text, 360 of lists
    end = enter("resume", memory=3 << 30)
    assert end.code == 0 and end.grown < 100 << 20, end


# ----------------------------------------------------------------------- a state that fits its seal


STATES = [  # what is wrong in state.json, by a key
    {"step": GONE}, {"step": -1}, {"step": "4"}, {"step": 4.0}, {"step": True}, {"step": 10**400},
    {"rows": GONE}, {"rows": -1}, {"rows": "16"}, {"rows": 16.5}, {"rows": None},
    {"rows": 10**400}, {"tokens": []}, {"tokens": 10**400}, {"run": "x"},
    {"run": 5}, {"run": []}, {"run": {"settings": 1}}, {"run": {"settings": {}}}, {"run": {"a": 1}},
    {"files": GONE}, {"files": []}, {"files": {}}, {"files": "x"}, {"files": {"../../x": "0" * 64}},
    {"files": {"/etc/passwd": "0" * 64}}, {"seconds": []}, {"seconds": {"data": "x"}},
    {"seconds": {"data": 10**400}}, {"seconds": {"data": float("nan")}}, {"elapsed_s": "x"},
    {"elapsed_s": float("nan")}, {"elapsed_s": float("inf")}, {"elapsed_s": 10**400},
    {"elapsed_s": -1e300}, {"train_s": None}, {"train_s": float("nan")}, {"best_loss": "x"},
    {"best_loss": {}}, {"best_step": "../../elsewhere"}, {"best_step": 1.5}, {"worse": "x"},
    {"mean_norm": "x"}, {"mean_norm": 10**400}, {"skipped": -5}, {"finished": "no"},
    {"val_loss": "x", "last_eval": 4}, {"val_bpb": [1]}, {"last_eval": "x"},
]


@pytest.mark.parametrize("changes", STATES, ids=lambda c: ascii(c)[:60])
def test_a_state_that_is_none(enter, folder, changes):
    forge(folder, **changes)
    enter("resume").refused()


@pytest.mark.parametrize("changes", [
    {"scaler": GONE}, {"threads": GONE}, {"threads": "\x1b]0;owned\x07"}, {"threads": None},
    {"seconds": GONE},
    {"torch": GONE}, {"mean_norm": GONE}, {"extra": {"a": [1]}}, {"scaler": {"scale": "x"}}],
    ids=lambda c: ascii(c)[:60])
def test_a_state_that_will_do(enter, folder, changes):
    """What an older version lacked, what nobody needs, and what is only said."""
    forge(folder, **changes)
    end = enter("resume")
    assert end.code == 0 and not end.err and "\x1b" not in end.out, end


@pytest.mark.parametrize("changes", [{"val_loss": GONE}, {"val_loss": "x"}, {"val_bpb": GONE},
                                     {"val_loss": [1], "val_bpb": None}, {"val_loss": None},
                                     {"step": "x"}, {"val_bpb": "\x1b[31m"}],
                         ids=lambda c: ascii(c)[:60])
def test_sampling_from_a_state_that_is_none(enter, folder, changes):
    """The weights are sound: either it says what is wrong or it writes."""
    forge(folder, **changes)
    end = enter("sample")
    if end.code:
        end.refused()
    assert "Traceback" not in end.err and "\x1b" not in end.err, end


@pytest.mark.parametrize("value", [[], {"settings": 1}, {"run": 5}, {"run": {"settings": []}},
                                   {"settings": {"n_layer": "x", "batch_size": 10**400}}],
                         ids=ascii)
def test_a_config_json_that_is_none(enter, run, value):
    """The checkpoint has a copy of what it should say."""
    text = kit_files.to_text(kit_files.sealed({"format": kit_files.FORMAT, **value})) \
        if isinstance(value, dict) else json.dumps(value)
    (run / "config.json").write_text(text)
    for door in ("bare", "resume"):
        end = enter(door)
        assert end.code in (0, 2) and "Traceback" not in end.err, end


def test_a_seal_is_no_signature_but_shows_damage(enter, folder):
    path = folder / "state.json"
    path.write_text(path.read_text().replace('"rows": 16', '"rows": 17'))
    enter("resume").refused("no complete checkpoint")


# ------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["../../elsewhere", "/", "..", ".", "", "step_000004/../../x", 5,
                                  None, ["step_000004"], {"a": 1}, "step_000004\0", "x" * 99999,
                                  "\x1b]0;owned\x07"], ids=lambda n: ascii(n)[:30])
def test_a_pointer_to_elsewhere(enter, run, tmp_path, made, name):
    shutil.copytree(made / "run" / "ckpt" / "step_000004", tmp_path / "elsewhere")
    for which in ("best", "latest"):
        kit_files.write_json(run / "ckpt" / f"{which}.json", {"name": name})
        assert store.pointed(run, which) is None
    enter("sample").refused("best.json")
    end = enter("resume")
    assert end.code == 0 and str(tmp_path / "elsewhere") not in end.out, end


@pytest.mark.parametrize("path", [5, None, [], {}, "\0", "x" * 300, "\x1b]0;owned\x07"],
                         ids=lambda n: ascii(n)[:30])
def test_a_newest_run_that_is_none(tmp_path, path):
    out = Path(os.environ["BONSAI_OUT"])
    out.mkdir()
    kit_files.write_json(out / "latest.json", {"path": path})
    attacked(sample.main).refused()


def forge_set(folder: Path, change) -> None:
    meta = json.loads((folder / "dataset.json").read_text())
    change(meta)
    (folder / "dataset.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("name", ["../set/train_000000.bin", "/etc/passwd", "..", "", ".",
                                  "a/b.bin", "..\\x.bin", "x\0.bin", "\x1b]0;owned\x07.bin",
                                  "x" * 300], ids=lambda n: ascii(n)[:30])
def test_shards_that_lie_elsewhere(enter, dataset, name):
    """An absolute name of a sound shard too: a set is what lies in its folder."""
    for named in {name, str(dataset / "train_000000.bin")}:
        forge_set(dataset, lambda meta, n=named:
                  meta["splits"]["train"]["shards"][0].update(file=n))
        enter("data", data=dataset).refused()


@pytest.mark.parametrize("change", [
    lambda m: m.update(kind="../x"), lambda m: m.update(kind=[]), lambda m: m.update(align={}),
    lambda m: m.update(tokenizer="\x1b]0;owned\x07", tokenizer_hash="0"), lambda m: m.clear(),
    lambda m: m["splits"].update(train=[]), lambda m: m["splits"]["train"].update(shards=[]),
    lambda m: m["splits"]["train"]["shards"][0].update(tokens=10**400),
    lambda m: m["splits"]["train"]["shards"][0].update(tokens=-5),
    lambda m: m["splits"]["val"]["shards"].extend(m["splits"]["val"]["shards"] * 3),
    lambda m: m.update(format="1"), lambda m: m.update(val_below="z"),
    lambda m: m.update(sources="x")], ids=range(13))
def test_a_data_set_that_is_none(enter, dataset, change):
    forge_set(dataset, change)
    end = enter("data", data=dataset)
    end.refused() if end.code else end.fine()


def header(n: int, magic: tuple[int, int]) -> bytes:
    return struct.pack("<iii", *magic, n).ljust(1024, b"\0")


def test_samples_that_begin_elsewhere(enter, made, tmp_path):
    """Each begin is after the one before it, in arithmetic of 64 bits that overflows."""
    folder = Path(shutil.copytree(made / "chats", tmp_path / "chats"))
    path = folder / "train_000000.starts.bin"
    starts = [0, 2**62 - 1, -(2**63), -1]
    path.write_bytes(header(len(starts), (20261130, 1)) + struct.pack("<4q", *starts))
    with pytest.raises(UserError, match="do not fit together"):
        Dataset(folder)


def test_more_samples_than_tokens(enter, made, tmp_path):
    """2 billion of them in a file that takes no disk; they would fill 16 GB."""
    folder = Path(shutil.copytree(made / "chats", tmp_path / "chats"))
    with (folder / "train_000000.starts.bin").open("wb") as f:
        f.write(header(2**31 - 1, (20261130, 1)))
        f.truncate(1024 + 8 * (2**31 - 1))
    enter("data", data=folder).refused("more samples than tokens")


@pytest.mark.parametrize("count", [-1, -(2**31), 2**31 - 1])
def test_shards_whose_count_lies(enter, dataset, count):
    path = dataset / "train_000000.bin"
    path.write_bytes(path.read_bytes()[:8] + struct.pack("<i", count) + path.read_bytes()[12:])
    enter("data", data=dataset).refused("torn")


# -------------------------------------------------------------------------------------- tokenizers


def bpe(**changes: object) -> dict:
    """The JSON of a sound tokenizer with changes, and a hash that fits if one can."""
    value = make_tokenizer("bpe:300", ["some text to learn from, and some more of it "] * 50)
    value = {k: v for k, v in (value.to_json() | changes).items() if v is not GONE}
    rest = {k: v for k, v in value.items() if k != "hash"}
    return rest | {"hash": canonical_hash(rest)}


TOKENIZERS = [
    {"kind": "os"}, {"kind": "../x"}, {"kind": "/tmp/x"}, {"kind": "nanogpt_bin"}, {"kind": GONE},
    {"kind": "extras.bytepiece"}, {"kind": "__init__"}, {"kind": []}, {"kind": None},
    {"kind": "\x1b]0;owned\x07\n"}, {"kind": "bytepiece"}, {"kind": "bytepiece", "model": {}},
    {"kind": "bytepiece", "model": "/etc/passwd"}, {"kind": "char"}, {"kind": "char",
                                                                      "alphabet": 5},
    {"kind": "char", "alphabet": "\ud800"}, {"format": 99}, {"format": "x"}, {"tokens": []},
    {"tokens": ["!"]}, {"tokens": [5]}, {"tokens": {}}, {"tokens": GONE}, {"tokens": [None] * 9},
    {"tokens": ["YQ=="]}, {"pattern": "("}, {"pattern": 5}, {"pattern": r"((\w{999}){999}){999}"},
    {"special": []}, {"special": {"x": -1}}, {"special": {"x": 10**400}}, {"special": {"x": "y"}},
    {"special": {"x": 5}}, {"spec": 5}, {"vocab_size": 10**9}, {"eot": "x"},
]


@pytest.mark.parametrize("changes", TOKENIZERS, ids=lambda c: ascii(c)[:60])
def test_a_tokenizer_that_is_none(enter, made, tmp_path, marker, changes, capfd):
    path = tmp_path / "evil.json"
    path.write_text(json.dumps(bpe(**changes)))
    end = enter("data", f"--tokenizer={path}", data=made / "my.txt")
    end.refused()


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(?=(a+))\1+b|(x+x+)+y(?!z)", r"(?<=a)b*+"])
def test_a_pattern_made_to_take_for_ever(enter, made, tmp_path, pattern):
    """tiktoken's engine counts its steps, and gives up."""
    path, text = tmp_path / "evil.json", tmp_path / "a.txt"
    path.write_text(json.dumps(bpe(pattern=pattern)))
    text.write_text("a" * 5000 + "x" * 5000 + "!")
    end = enter("data", f"--tokenizer={path}", data=text)
    assert end.code in (0, 2) and "Traceback" not in end.err, end


@pytest.mark.parametrize("prompt", ["--prompt=hello", "--prompt=", "--ask=hello"])
def test_a_tokenizer_of_more_ids_than_the_model_has(enter, folder, prompt):
    """And with a hash that fits all of it."""
    forge_model(folder, vocab_size=11)
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"wte.weight": weights["wte.weight"][:11].clone()}, path)
    forge(folder)
    enter("sample", prompt).refused()
    enter("eval").refused()


def test_the_name_of_a_tokenizer_opens_no_file(folder, marker):
    value = bpe(spec="gpt2:/etc")
    assert from_json(value).spec == "gpt2:/etc"  # a label, nothing more


# ---------------------------------------------------------------------------- links out of a folder


@pytest.fixture
def victim(tmp_path) -> Path:
    """A file of the user's that no run may write to, whatever links to it."""
    path = tmp_path / "precious.txt"
    path.write_text("precious")
    path.chmod(0o600)
    yield path
    assert path.read_text() == "precious" and stat.S_IMODE(path.stat().st_mode) == 0o600


LINKS = ["config.json", "log.jsonl", "loss.png", ".lock", "ckpt/best.json", "ckpt/latest.json",
         "ckpt/.tmp-step_000006", "ckpt/.tmp-old-step_000006", "ckpt/step_000006",
         "ckpt/.tmp-x-best.json", ".tmp-1-log.jsonl", "ckpt/damaged_step_000004"]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_in_a_run_folder_is_never_written_through(enter, run, victim, name):
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim)
    end = enter("resume")
    if end.code:
        end.refused()
    assert end.code == 2 or not (run / name).is_symlink(), end


@pytest.mark.parametrize("name", LINKS)
def test_a_link_where_a_run_is_to_begin(made, tmp_path, victim, name):
    new = tmp_path / "new"
    (new / "ckpt").mkdir(parents=True)
    (new / name).symlink_to(victim)
    end = attacked(train.main, made / "test.py", f"--dataset={made / 'set'}", f"--out_dir={new}")
    if end.code:
        end.refused()


def test_links_with_the_name_of_what_is_written_next(made, tmp_path, victim, monkeypatch):
    """A temporary file has the number of the process in its name, which can be guessed."""
    path = tmp_path / "log.jsonl"
    (tmp_path / f".tmp-{os.getpid()}-log.jsonl").symlink_to(victim)
    kit_files.write_text(path, "text")
    assert path.read_text() == "text" and not path.is_symlink()


@pytest.mark.parametrize("part", ["ckpt", "ckpt/step_000004"])
def test_a_folder_that_is_a_link(enter, run, tmp_path, part):
    """The checkpoint there is sound, but whoever packed the run could not know of it."""
    (run / part).rename(tmp_path / "elsewhere")
    (run / part).symlink_to(tmp_path / "elsewhere")
    before = sorted(p.name for p in (tmp_path / "elsewhere").iterdir())
    enter("resume").refused("link")
    assert sorted(p.name for p in (tmp_path / "elsewhere").iterdir()) == before


@pytest.mark.parametrize("name", [*store.FILES, "state.json"])
def test_a_link_in_a_checkpoint(enter, folder, tmp_path, name):
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    for door in ("sample", "weights", "resume"):
        end = enter(door)
        if name != "optimizer.safetensors" or door == "resume":
            end.refused()


def test_whole_folders_may_be_links(enter, made, run, tmp_path, monkeypatch):
    """People keep runs and data on other disks."""
    run.rename(tmp_path / "disk")
    run.symlink_to(tmp_path / "disk")
    (tmp_path / "linked").symlink_to(made / "set")
    assert enter("resume", data=tmp_path / "linked").code == 0
    assert enter("sample").code == 0


@slow
@pytest.mark.parametrize("kind", ["folder", "fifo"])
@pytest.mark.parametrize("name", LINKS)
def test_what_is_no_file_in_a_run_folder(enter, run, name, kind):
    bomb(run / name, kind)
    end = enter("resume")
    assert end.code in (0, 2) and "Traceback" not in end.err, end
    assert len(end.err.splitlines()) <= 1, end


@pytest.mark.parametrize("name", [".tmp-old-", ".tmp-old-.", ".tmp-old-..", ".tmp-", "step_",
                                  "step_000005\n", "step_٠٠٠٠٠٧", "step_999999999999999",
                                  "damaged_step_000004", ".tmp-\x1b]0;owned\x07"], ids=ascii)
def test_folders_of_odd_names(enter, run, name):
    (run / "ckpt" / name).mkdir()
    end = enter("resume")
    assert end.code == 0 and "Traceback" not in end.err and "\x1b" not in end.out, end


def test_what_lies_around_in_a_run_folder_stays(enter, run):
    """overwrite removes a run's own files, and through no link."""
    (run / "notes.txt").write_text("mine")
    (run / "ckpt" / "notes").mkdir()
    end = enter("resume", "--init_from=scratch", "--overwrite=True")
    assert end.code == 0, end
    assert (run / "notes.txt").read_text() == "mine" and (run / "ckpt" / "notes").is_dir()


# ------------------------------------------------------------------------- text for a terminal


EVIL = "\x1b]0;owned\x07\x9b31m\r\x08"  # a title, a colour, a line that is written over


def test_messages_hold_nothing_that_a_terminal_obeys():
    message = str(UserError(f"a{EVIL}b\nc é 🌳"))
    assert message.isprintable() and "c é 🌳" in message


@pytest.mark.parametrize("screen", [True, False], ids=["a screen", "a pipe"])
def test_what_a_model_writes_does_not_command_the_screen(folder, run, capfd, monkeypatch, screen):
    """To a pipe or a file go the bytes as they are."""
    ids = [27, 93, 48, 7]  # ESC ] 0 BEL
    model, _, state = checkpoint.load_model(folder)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_() if p.ndim == 2 else p.fill_(1)
    monkeypatch.setattr("kit.writing.window.steps", lambda *a, **k:
                        (row for row in torch.tensor([[i] for i in ids])))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: screen, raising=False)
    sample.main([f"--out_dir={run}", "--max_new_tokens=4", "--prompt=a"])
    out = capfd.readouterr().out
    assert out == ("a\\x1b]0\\x07\n" if screen else "a\x1b]0\x07\n")


def test_the_sample_after_training_does_not_command_the_screen(enter, monkeypatch):
    """What it learned from may be somebody else's."""
    monkeypatch.setattr("kit.run.report.write_sample", lambda *a, **k: f"it writes {EVIL}")
    end = enter("data")
    assert end.code == 0 and "it writes" in end.out, end
    assert "\x1b" not in end.out and "\x9b" not in end.out, end


# --------------------------------------------------------------------------------- modes of files


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o002])
def test_files_have_the_modes_that_the_user_wants(made, tmp_path, mask):
    before = os.umask(mask)
    try:
        end = attacked(train.main, made / "test.py", f"--dataset={made / 'my.txt'}",
                       "--tokenizer=byte", f"--out_dir={tmp_path / 'new'}")
    finally:
        os.umask(before)
    assert end.code == 0, end
    written = [p for top in ("new", "data", "out") for p in (tmp_path / top).rglob("*")]
    assert len(written) > 15
    for path in written:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert not mode & mask and not mode & 0o002, f"{path}: {mode:o}"
        assert not path.name.startswith(".tmp-"), path


@slow
def test_nothing_is_left_in_the_common_folder_for_temporary_files(made, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    done = subprocess.run(
        [sys.executable, str(CLONE / "train.py"), str(made / "test.py"),
         f"--dataset={made / 'set'}", f"--out_dir={tmp_path / 'new'}"],
        capture_output=True, text=True, env=os.environ | {"MPLCONFIGDIR": str(tmp_path / "mpl")})
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "tmp").iterdir())


# -------------------------------------------------------------------------------- real processes


@slow
@pytest.mark.parametrize("line", [
    "sample.py --out_dir={run}", "train.py {made}/test.py --dataset={made}/set --out_dir={run} "
    "--init_from=resume --max_iters=6",
    "train.py {made}/weights.py --dataset={made}/set --out_dir={new} --init_from={run}"])
def test_real_processes(made, run, folder, tmp_path, marker, line):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Payload(marker)))
    forge(folder)
    line = line.format(made=made, run=run, new=tmp_path / "new")
    script, *words = line.split()
    done = subprocess.run([sys.executable, str(CLONE / script), *words], capture_output=True,
                          text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done
    assert "model.safetensors" in done.stderr


def test_the_newest_run_is_found_by_its_path(tmp_path, run):
    locate.remember(run)
    assert locate.find_run(None) == run
