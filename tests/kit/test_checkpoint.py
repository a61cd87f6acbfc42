"""kit/checkpoint.py: exact, complete or invisible, every damage noticed, nothing ever executed."""

import hashlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit import checkpoint
from kit.checkpoint import FILES
from kit.settings import CLONE, UserError
from model import GPT, GPTConfig

ALL = (*FILES, "state.json")


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


@pytest.fixture
def run(tmp_path) -> Path:
    return tmp_path / "run"


def names(run: Path) -> list[str]:
    """The checkpoints of a run that can be seen, newest first."""
    return [p.name for p in checkpoint.newest_first(run)]


def hidden(run: Path) -> list[str]:
    return sorted(p.name for p in run.rglob(".tmp-*"))


def pointers(run: Path) -> tuple[str | None, str | None]:
    return checkpoint.pointed(run, "best"), checkpoint.pointed(run, "latest")


def newest(run: Path) -> str | None:
    found = checkpoint.newest_complete(run, lambda text: None)
    return found and found[0].name


# ------------------------------------------------------------------------------------ round trip


@pytest.mark.parametrize("changes", [dict(), dict(tie_embeddings=False, bias=True),
                                     dict(attn_logn="learned", n_head=4, dropout=0.1)], ids=str)
def test_a_model_comes_back_bit_for_bit(run, save, tiny, changes):
    model = tiny(**changes)
    folder = save(run, 10, model=model, val_loss=2.25)
    again, tokenizer, state = checkpoint.load_model(folder)
    assert again.config == model.config
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype, name
    assert tokenizer == {"format": 1, "kind": "byte", "hash": "abc", "spec": "byte"}
    assert (state["step"], state["val_loss"], state["name"]) == (10, 2.25, "é")
    assert (again.lm_head.weight is again.wte.weight) == model.config.tie_embeddings


def test_folder_and_files_are_named_as_documented(run, save):
    folder = save(run, 500, is_best=True)
    assert folder == run / "ckpt" / "step_000500"
    assert {p.name for p in folder.iterdir()} == set(ALL)
    assert {p.name for p in (run / "ckpt").iterdir()} == {folder.name, "best.json", "latest.json"}
    for path in [folder / n for n in ALL if n.endswith(".json")] + [*run.glob("ckpt/*.json")]:
        assert json.loads(path.read_text())["format"] == 1


def test_the_optimizer_comes_back_bit_for_bit(run, tiny):
    tensors = {"a.step": torch.tensor(3.0), "a.exp_avg": torch.randn(3, 4),
               "b.half": torch.randn(5).bfloat16(), "b.strided": torch.randn(4, 6).T[::2]}
    folder = checkpoint.save(run, tiny(), tensors, {}, {"step": 1}, 1, False)
    back = checkpoint.load_tensors(folder / "optimizer.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[k], v) and back[k].dtype == v.dtype for k, v in tensors.items())


def test_a_run_without_updates_can_be_saved(run, tiny):
    folder = checkpoint.save(run, tiny(), {}, {}, {"step": 0}, 1, False)
    assert checkpoint.check(folder)["step"] == 0
    assert checkpoint.load_tensors(folder / "optimizer.safetensors") == {}


def test_a_tied_head_is_stored_once(run, save, tiny):
    tied = load_file(save(run, 1) / "model.safetensors")
    untied = load_file(save(run, 2, model=tiny(tie_embeddings=False)) / "model.safetensors")
    assert "wte.weight" in tied and "lm_head.weight" not in tied
    assert untied.keys() - tied.keys() == {"lm_head.weight"}


def test_names_do_not_depend_on_compile(run, save, tiny):
    model = tiny()
    plain = load_file(save(run, 1) / "model.safetensors").keys()
    model.compile(backend="eager")
    folder = checkpoint.save(run, model, {}, {}, {"step": 2}, 9, False)
    assert load_file(folder / "model.safetensors").keys() == plain
    assert checkpoint.load_model(folder)[0].config == model.config


def test_equal_weights_are_equal_files_wherever_and_whenever(tmp_path, save):
    one = save(tmp_path / "one", 10, is_best=True)
    other = save(tmp_path / "somewhere" / "else", 10, elapsed_s=99.0)
    for name in FILES:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    for name in ("model.safetensors", "optimizer.safetensors"):
        data = (one / name).read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert header.get("__metadata__", {"format": "pt"}) == {"format": "pt"}
        assert all(entry.keys() == {"dtype", "shape", "data_offsets"}
                   for key, entry in header.items() if key != "__metadata__")


# --------------------------------------------------------------------------------------- damage


def test_state_holds_the_hashes_of_all(run, save):
    folder = save(run)
    state = json.loads((folder / "state.json").read_text())
    assert state["files"] == {n: hashlib.sha256((folder / n).read_bytes()).hexdigest()
                              for n in FILES}
    assert checkpoint.check(folder) == state


def named(folder: Path, file: str) -> str:
    """The message with which a checkpoint is refused; it names the damaged file."""
    with pytest.raises(UserError) as error:
        checkpoint.check(folder)
    assert str(folder / file) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("file", ALL)
def test_any_flipped_bit_is_noticed_and_named(run, save, file):
    folder = save(run)
    path, data = folder / file, (folder / file).read_bytes()
    rng = random.Random(0)
    bits = {0, len(data) * 8 - 1, *(rng.randrange(len(data) * 8) for _ in range(40))}
    for bit in bits:
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        named(folder, file)
    path.write_bytes(data)
    assert checkpoint.check(folder)


def test_no_flipped_bit_of_state_json_goes_unnoticed(run, save):
    """Also where the JSON still means the same: 1e-07 and 1E-07, and the last newline."""
    folder = save(run)
    path, data = folder / "state.json", (folder / "state.json").read_bytes()
    rng = random.Random(1)
    for i in (data.index(b"1e-07") + 1, len(data) - 1, *rng.sample(range(len(data)), 250)):
        bit = 5 if chr(data[i]).isalpha() else rng.randrange(8)  # 5: the other case of a letter
        path.write_bytes(data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :])
        with pytest.raises(UserError, match="state.json"):
            checkpoint.check(folder, ())


@pytest.mark.parametrize("file", ALL)
def test_any_truncation_or_addition_is_noticed_and_named(run, save, file):
    folder = save(run)
    path, data = folder / file, (folder / file).read_bytes()
    for part in (data[:-1], data[: len(data) // 2], data[:8], b"", data + b"\n", data + b"\0"):
        path.write_bytes(part)
        message = named(folder, file)
        assert "damaged" in message or "format" in message
    path.unlink()
    assert "missing" in named(folder, file)


def test_damaged_weights_are_refused(run, save):
    path = save(run) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    for load in (checkpoint.load_model, lambda p: checkpoint.load_tensors(p / path.name)):
        with pytest.raises(UserError, match=r"model\.safetensors: damaged"):
            load(path.parent)


def test_sampling_does_without_the_optimizer_but_not_without_the_rest(run, save):
    folder = save(run)
    (folder / "optimizer.safetensors").unlink()
    assert checkpoint.load_model(folder)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    with pytest.raises(UserError, match="tokenizer.json"):
        checkpoint.load_model(folder)


def test_a_folder_that_is_none_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(UserError, match="missing, this is not a complete checkpoint"):
            checkpoint.check(folder)


def test_the_newest_complete_is_taken_and_each_damaged_one_named(run, save):
    for step in (1, 2, 3, 4):
        save(run, step)
    (run / "ckpt" / "step_000004" / "model.safetensors").write_bytes(b"")
    (run / "ckpt" / "step_000003" / "state.json").unlink()
    said = []
    folder, state = checkpoint.newest_complete(run, said.append)
    assert folder.name == "step_000002" and state["step"] == 2
    assert ["step_000004" in said[0], "step_000003" in said[1], len(said)] == [True, True, 2]
    assert checkpoint.newest_complete(run / "nothing", said.append) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", '{"format": 2}', "[" * 100000,
                                  '{"format": "1"}', "\ufeff{}"])
def test_json_of_others_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="x.json: damaged, or not of this version"):
        checkpoint.read_json(path)
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match="x.json: damaged"):
        checkpoint.read_json(path)


# ----------------------------------------------------------------------- interrupted half way


def killing(monkeypatch, target, name: str, at: int) -> list:
    """The `at`-th call of target.name (0 is the first) ends the process, as it were."""
    real, calls = getattr(target, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) > at:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(target, name, call)
    return calls


POINTS = [(checkpoint, "save_file", 0), (checkpoint, "save_file", 1), (checkpoint, "sync", 0),
          (checkpoint, "digest", 0), *((os, "replace", n) for n in range(6)),
          *((os, "fsync", n) for n in range(14)), (Path, "rename", 0), (shutil, "rmtree", 0),
          (shutil, "rmtree", 1)]


@pytest.mark.parametrize("target, name, at", POINTS, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("step", [2, 1])
def test_a_killed_save_leaves_a_complete_checkpoint(run, save, target, name, at, step):
    """Whether it is a new step or the same one again, which is the only checkpoint there."""
    save(run, 1, keep=1)
    with pytest.MonkeyPatch.context() as patch:
        calls = killing(patch, target, name, at)
        try:
            save(run, step, keep=1, is_best=True, seed=5)
        except Killed:
            pass
        else:
            assert len(calls) <= at
    for name in names(run):
        checkpoint.check(run / "ckpt" / name)  # visible is complete
    checkpoint.tidy(run)
    assert not hidden(run)
    assert newest(run) in ("step_000001", "step_000002")
    save(run, step, keep=1, is_best=True, seed=5)
    assert names(run) == [f"step_{step:06d}"] and pointers(run) == (names(run)[0], names(run)[0])
    assert not hidden(run)


def test_what_becomes_visible_is_on_the_disk_before(run, save, monkeypatch):
    """Every rename finds the contents and the names of what it renames synced."""
    synced, renamed, replace = set(), [], os.replace

    def check(aside, final) -> None:
        parts = [Path(aside), *Path(aside).rglob("*")]
        assert {p.stat().st_ino for p in parts} <= synced, final
        renamed.append(Path(final).name)
        replace(aside, final)

    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.fstat(fd).st_ino))
    monkeypatch.setattr(os, "replace", check)
    save(run, 1, is_best=True)
    assert renamed == ["model.json", "tokenizer.json", "state.json", "step_000001", "best.json",
                       "latest.json"]
    assert (run / "ckpt").stat().st_ino in synced  # and the new name itself


def test_a_failing_disk_leaves_the_former_and_says_so(run, save, monkeypatch):
    before = save(run, 1, is_best=True)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    for target, name in ((checkpoint, "save_file"), (os, "replace"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, full)
            with pytest.raises(OSError, match="No space"):
                save(run, 2)
        assert names(run) == ["step_000001"] and checkpoint.check(before)
    save(run, 2)
    assert newest(run) == "step_000002" and not hidden(run)


def test_tidy_removes_what_is_unfinished_and_nothing_else(run, save):
    save(run, 1, is_best=True)
    ckpt = run / "ckpt"
    for name in (".tmp-step_000002", ".tmp-old-step_000003"):  # not whole, both
        (ckpt / name).mkdir()
        (ckpt / name / "state.json").write_text("{")
    (ckpt / ".tmp-best.json").write_text("{")
    shutil.copytree(ckpt / "step_000001", ckpt / ".tmp-old-step_000001")  # already replaced
    (ckpt / "notes.txt").write_text("mine")
    checkpoint.tidy(run)
    assert sorted(p.name for p in ckpt.iterdir()) == ["best.json", "latest.json", "notes.txt",
                                                      "step_000001"]
    checkpoint.tidy(run / "nothing")


def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    checkpoint.write_json(path, {"a": 1, "é": [None, 1.5, "\ud800"]})
    assert checkpoint.read_json(path) == {"format": 1, "a": 1, "é": [None, 1.5, "\ud800"]}
    for target, name in ((os, "replace"), (os, "fsync")):
        with monkeypatch.context() as patch:
            killing(patch, target, name, 0)
            with pytest.raises(Killed):
                checkpoint.write_json(path, {"a": 2})
        assert checkpoint.read_json(path)["a"] == 1
    with pytest.raises(TypeError):
        checkpoint.write_json(path, {"a": object()})
    assert checkpoint.read_json(path)["a"] == 1


def test_two_processes_may_write_the_same_file(tmp_path, monkeypatch):
    """As out/latest.json, when two runs start at once."""
    path, pids, real = tmp_path / "x.json", iter([1, 2]), checkpoint.sync
    monkeypatch.setattr(os, "getpid", lambda: next(pids))

    def meanwhile(aside: Path) -> None:
        monkeypatch.setattr(checkpoint, "sync", real)
        checkpoint.write_json(path, {"by": 2, "longer": "x" * 99})

    monkeypatch.setattr(checkpoint, "sync", meanwhile)
    checkpoint.write_json(path, {"by": 1})
    assert checkpoint.read_json(path)["by"] == 1 and list(tmp_path.iterdir()) == [path]


# ----------------------------------------------------------------------------- keeping, pointing


def test_the_newest_and_the_best_stay(run, save):
    best = {2, 5}
    for step in range(1, 9):
        save(run, step, keep=2, is_best=step in best)
        assert names(run)[0] == f"step_{step:06d}"
        assert checkpoint.pointed(run, "latest") == names(run)[0]
    assert names(run) == ["step_000008", "step_000007", "step_000005"]
    assert pointers(run) == ("step_000005", "step_000008")
    assert not hidden(run)


def test_without_a_best_only_the_newest_stay(run, save):
    for step in (1, 2, 3):
        save(run, step, keep=1)
    assert names(run) == ["step_000003"] and pointers(run) == (None, "step_000003")


def test_steps_are_ordered_as_numbers(run, save):
    for step in (20, 999_999, 1_000_000):
        save(run, step)
    for other in ("step_12", "step_abcdef", "step_000001.bak", "xstep_000001"):
        (run / "ckpt" / other).mkdir()
    assert names(run) == ["step_1000000", "step_999999", "step_000020"]


def test_what_was_just_saved_is_never_pruned(run, save):
    """A run that went back behind a damaged checkpoint saves smaller steps than are there."""
    save(run, 10, keep=1)
    save(run, 20, keep=2)
    (run / "ckpt" / "step_000020" / "model.safetensors").write_bytes(b"")
    folder = save(run, 15, keep=1)
    assert checkpoint.check(folder) and newest(run) == "step_000015"
    assert names(run) == ["step_000015"]


def test_the_best_is_remembered_though_the_process_ended_before_saying_so(run, save):
    save(run, 1, keep=1, is_best=True, best_step=1)
    with pytest.MonkeyPatch.context() as patch:
        calls = killing(patch, os, "replace", 4)  # model, tokenizer, state, folder, then best.json
        with pytest.raises(Killed):
            save(run, 2, keep=1, is_best=True, best_step=2)
        assert Path(calls[-1][1]).name == "best.json"
    assert names(run) == ["step_000002", "step_000001"]
    save(run, 3, keep=1, best_step=2)
    assert names(run) == ["step_000003", "step_000002"]
    assert pointers(run) == ("step_000002", "step_000003")


def test_pointers_that_do_not_fit_point_nowhere(run, save):
    save(run, 1, is_best=True)
    path = run / "ckpt" / "best.json"
    assert checkpoint.pointed(run, "best") == "step_000001"
    for text in ("", "{", '{"format": 1}', '{"format": 1, "name": 3}', '{"format": 1, "name": ""}',
                 '{"format": 1, "name": "../ckpt/step_000001"}', '{"format": 1, "name": "step_9"}',
                 '{"format": 1, "name": "step_000002"}', '{"format": 1, "name": "/etc"}'):
        path.write_text(text)
        assert checkpoint.pointed(run, "best") is None, text
    path.unlink()
    assert checkpoint.pointed(run, "best") is None


def test_pointers_name_a_folder_so_that_a_run_can_be_moved(tmp_path, run, save):
    save(run, 1, is_best=True)
    run.rename(tmp_path / "moved")
    assert pointers(tmp_path / "moved") == ("step_000001", "step_000001")
    assert checkpoint.load_model(tmp_path / "moved" / "ckpt" / "step_000001")


# ------------------------------------------------------------------------ other models and files


def test_an_older_architecture_file_takes_defaults(tmp_path):
    old = {"vocab_size": 11, "block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 16}
    checkpoint.write_json(tmp_path / "model.json", old)
    assert checkpoint.load_config(tmp_path) == GPTConfig(**old)


@pytest.mark.parametrize("changes, words", [
    (dict(rotary=True, moe=1), "model.json.*(rotary|moe)"), (dict(n_head=3), "n_head=3"),
    (dict(n_layer="2"), "model.json"), (dict(n_layer=None), "model.json"),
    (dict(attn_logn="new"), "attn_logn=new"),
])
def test_an_architecture_that_is_unknown_is_refused(tmp_path, changes, words):
    checkpoint.write_json(tmp_path / "model.json", {"n_embd": 16, "n_head": 2} | changes)
    with pytest.raises(UserError, match=words):
        checkpoint.load_config(tmp_path)


def test_weights_of_another_model_are_refused(tmp_path, tiny):
    model = tiny()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    state = {n: p.detach().clone() for n, p in model.named_parameters()}

    def refused(tensors: dict, words: str) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=words) as error:
            checkpoint.load_weights(model, tmp_path / "model.safetensors")
        assert "\n" not in str(error.value)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())  # untouched

    foreign = "does not fit the model"
    refused({f"transformer.{n}": t for n, t in state.items()}, foreign)  # Hugging Face, minGPT
    refused({f"_orig_mod.{n}": t for n, t in state.items()}, foreign)
    refused({f"module.{n}": t for n, t in state.items()}, foreign)
    refused({}, foreign)
    refused(state | {"h.0.attn.bias": torch.zeros(1, 1, 8, 8)}, r"h\.0\.attn\.bias")
    refused({n: t for n, t in state.items() if n != "wpe.weight"}, r"wpe\.weight")
    conv1d = {n: t.T.contiguous() if "c_" in n else t + 1 for n, t in state.items()}
    refused(conv1d, r"c_attn\.weight is \(16, 48\), the model's is \(48, 16\)")
    refused(dict(tiny(tie_embeddings=False).named_parameters()), r"lm_head\.weight")


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_pickles_are_refused_and_not_executed(run, save, tmp_path):
    folder, mark = save(run), tmp_path / "mark"
    torch.save({"a": Bomb(mark)}, tmp_path / "bomb.pt")
    for data in (pickle.dumps(Bomb(mark)), (tmp_path / "bomb.pt").read_bytes()):
        for name in ALL:
            whole = (folder / name).read_bytes()
            (folder / name).write_bytes(data)
            with pytest.raises(UserError):
                checkpoint.load_model(folder)
                checkpoint.check(folder)
            if name.endswith("safetensors"):
                with pytest.raises(UserError, match="damaged"):
                    checkpoint.load_tensors(folder / name)
            (folder / name).write_bytes(whole)
    assert not mark.exists()


def test_nothing_is_ever_pickled(run, save, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("pickle")

    for target, name in ((torch, "load"), (torch, "save"), (pickle, "dumps"), (pickle, "loads"),
                         (pickle, "Pickler"), (pickle, "Unpickler")):
        monkeypatch.setattr(target, name, never)
    assert checkpoint.load_model(save(run))
    for file in sorted((CLONE / "kit").glob("*.py")):
        source = file.read_text()
        assert not re.search(r"pickle|torch\.(load|save)\b|(?<!\.)\b(eval|exec)\(|shelve|marshal",
                             source), file


# ---------------------------------------------------------------------------------- real kills


SAVER = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from pathlib import Path
from kit import checkpoint
from model import GPT, GPTConfig
model = GPT(GPTConfig(vocab_size=500, block_size=8, n_layer=2, n_head=2, n_embd=64))
run = Path(sys.argv[2])
checkpoint.tidy(run)
found = checkpoint.newest_complete(run, print)
step = found[1]["step"] if found else 0
tensors = {n + ".m": p.detach().clone() for n, p in model.named_parameters()}
print("ready", flush=True)
while True:
    step += int(sys.argv[3])
    state = {"step": max(step, 1), "best_step": max(step, 1)}
    checkpoint.save(run, model, tensors, {}, state, 1, True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 0])
def test_kill_9_at_any_moment_leaves_a_complete_checkpoint(tmp_path, stride):
    """stride 0 writes the same step again and again, so that it is the only one."""
    (tmp_path / "saver.py").write_text(SAVER)
    command = [sys.executable, str(tmp_path / "saver.py"), str(CLONE), str(tmp_path / "run")]
    rng, before = random.Random(stride), 0
    for kill in range(12):
        process = subprocess.Popen([*command, str(stride)], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"  # and no checkpoint was found damaged
        time.sleep((0.2 if kill == 0 else 0) + rng.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        checkpoint.tidy(tmp_path / "run")
        said = []
        found = checkpoint.newest_complete(tmp_path / "run", said.append)
        assert found and not said and not hidden(tmp_path / "run")
        assert found[1]["step"] >= before
        before = found[1]["step"]
        assert isinstance(checkpoint.load_model(found[0])[0], GPT)
