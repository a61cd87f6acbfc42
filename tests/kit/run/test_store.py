"""kit/run/store.py: exact, complete or invisible, every damage noticed, nothing ever executed."""

import ast
import contextlib
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
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit import checkpoint
from kit.errors import UserError
from kit.files import read_json, write_json
from kit.job import Job
from kit.run import store
from kit.run.store import FILES
from kit.settings import CLONE
from model import GPT, GPTConfig
from train import TrainSettings

ALL = (*FILES, "state.json")


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


@pytest.fixture
def run(tmp_path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def names(run: Path) -> list[str]:
    """The checkpoints of a run that can be seen, newest first."""
    return [p.name for p in store.newest_first(run)]


def hidden(run: Path) -> list[str]:
    return sorted(p.name for p in run.rglob(".tmp-*"))


def pointers(run: Path) -> tuple[str | None, str | None]:
    return store.pointed(run, "best"), store.pointed(run, "latest")


def newest(run: Path) -> str | None:
    found = store.examine(run, lambda text: None)
    return found[0][0].name if found else None


def weights_of(model: GPT) -> dict[str, torch.Tensor]:
    return Job(TrainSettings()).snapshot(dict(model.named_parameters()))


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
        assert json.loads(path.read_text())["format"] == (1 if "tokenizer" in path.name else 2)


def test_the_optimizer_comes_back_bit_for_bit(run, tiny):
    tensors = {"a.step": torch.tensor(3.0), "a.exp_avg": torch.randn(3, 4),
               "b.half": torch.randn(5).bfloat16(), "b.strided": torch.randn(4, 6).T[::2]}
    copies = Job(TrainSettings()).snapshot(tensors)
    folder = store.save(run, tiny().config, {}, copies, {}, {"step": 1}, 1)
    back = checkpoint.load_tensors(folder / "optimizer.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[k], v) and back[k].dtype == v.dtype for k, v in tensors.items())


def test_a_run_without_updates_can_be_saved(run, tiny):
    folder = store.save(run, tiny().config, {}, {}, {}, {"step": 0}, 1)
    assert store.check(folder)["step"] == 0
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
    folder = store.save(run, model.config, weights_of(model), {}, {"format": 1},
                             {"step": 2}, 9)
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
    assert store.check(folder) == state


def named(folder: Path, file: str) -> str:
    """The message with which a checkpoint is refused; it names the damaged file."""
    with pytest.raises(UserError) as error:
        store.check(folder)
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
    assert store.check(folder)


def test_no_flipped_bit_of_state_json_goes_unnoticed(run, save):
    """Also where the JSON still means the same: 1e-07 and 1E-07, and the last newline."""
    folder = save(run)
    path, data = folder / "state.json", (folder / "state.json").read_bytes()
    rng = random.Random(1)
    for i in (data.index(b"1e-07") + 1, len(data) - 1, *rng.sample(range(len(data)), 250)):
        bit = 5 if chr(data[i]).isalpha() else rng.randrange(8)  # 5: the other case of a letter
        path.write_bytes(data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :])
        with pytest.raises(UserError, match="state.json"):
            store.check(folder, ())


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
            store.check(folder)


def test_a_checkpoint_that_is_a_link_is_refused(run, save, tmp_path):
    folder = save(run)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="a link"):
        store.check(folder)
    with pytest.raises(UserError, match="a link"):
        checkpoint.load_model(folder)


@pytest.mark.parametrize("file", ALL)
def test_a_link_or_a_folder_in_place_of_a_file_is_refused(run, save, file, tmp_path):
    folder = save(run)
    (folder / file).rename(tmp_path / file)
    (folder / file).symlink_to(tmp_path / file)
    assert "plain file" in named(folder, file)
    (folder / file).unlink()
    (folder / file).mkdir()
    assert "plain file" in named(folder, file)


@pytest.mark.parametrize("changes", [{"files": None}, {"files": ["x"]}, {"files": {}}, {"step": -1},
                                     {"step": "1"}, {"step": True}, {"step": None}, {"step": 1.0}])
def test_a_sealed_state_of_something_else_is_refused(run, save, changes):
    folder = save(run)
    write_json(folder / "state.json", read_json(folder / "state.json") | changes)
    with pytest.raises(UserError, match="no state of a checkpoint|hash does not fit"):
        store.check(folder)


def test_a_file_that_cannot_be_read_is_a_line(run, save, monkeypatch):
    folder = save(run)

    def fail(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(store, "digest", fail)
    with pytest.raises(PermissionError):  # kit.errors.run makes a line of it
        store.examine(run, print)
    assert folder.is_dir()  # not damaged for all we know: it stays where it is


# ---------------------------------------------------------------------- what is there, what is soun


def test_all_sound_ones_are_found_and_each_damaged_one_named_and_set_aside(run, save):
    for step in (1, 2, 3, 4):
        save(run, step, is_best=step == 1)
    (run / "ckpt" / "step_000004" / "model.safetensors").write_bytes(b"")
    (run / "ckpt" / "step_000003" / "state.json").unlink()
    said = []
    found = store.examine(run, said.append)
    assert [f.name for f, _ in found] == ["step_000002", "step_000001"]
    assert found[0][1]["step"] == 2 and not found[1][1]  # the newest one's state is enough
    assert ["step_000004" in said[0], "step_000003" in said[1]] == [True, True]
    assert "set aside as damaged_step_000004" in said[0]
    assert "latest.json" in said[2] and len(said) == 3  # it named step_000004
    assert {p.name for p in (run / "ckpt").iterdir()} == {
        "step_000001", "step_000002", "damaged_step_000003", "damaged_step_000004", "best.json"}
    assert (run / "ckpt" / "damaged_step_000004" / "state.json").exists()  # nothing is thrown away
    assert [f.name for f, _ in store.examine(run, said.append)] == ["step_000002",
                                                                       "step_000001"]
    assert len(said) == 3  # once
    assert store.examine(run / "nothing", said.append) == [] and len(said) == 3


def test_what_is_damaged_does_not_count_among_those_kept(run, save):
    for step in (1, 2, 3):
        save(run, step, keep=3)
    (run / "ckpt" / "step_000003" / "optimizer.safetensors").write_bytes(b"")
    store.examine(run, lambda text: None)
    save(run, 3, keep=3)
    assert names(run) == ["step_000003", "step_000002", "step_000001"]
    save(run, 4, keep=3)
    assert names(run) == ["step_000004", "step_000003", "step_000002"]
    assert (run / "ckpt" / "damaged_step_000003").is_dir()


def test_the_same_step_may_be_damaged_again(run, save):
    save(run, 1)
    for n in range(4):
        (save(run, 2) / "model.json").write_text(f"{n}")
        said = []
        assert [f.name for f, _ in store.examine(run, said.append)] == ["step_000001"]
        name = "damaged_step_000002" + f"-{n}" * (n > 0)
        assert f"set aside as {name}," in said[0]
        assert (run / "ckpt" / name / "model.json").read_text() == f"{n}"


@pytest.mark.parametrize("which", ["best", "latest"])
@pytest.mark.parametrize("how", ["", "{", "flip", "gone"])
def test_a_damaged_pointer_is_named_and_written_anew_by_the_next_save(run, save, which, how):
    save(run, 1, is_best=True, best_step=1)
    save(run, 2, best_step=1)
    path = run / "ckpt" / f"{which}.json"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"step", b"stEp", 1) if how == "flip" else how.encode())
    if how == "gone":
        write_json(path, {"name": "step_000007"})
    said = []
    assert len(store.examine(run, said.append)) == 2
    assert len(said) == 1 and str(path) in said[0]
    assert store.examine(run, said.append) and len(said) == 1  # once
    save(run, 3, best_step=1)
    assert pointers(run) == ("step_000001", "step_000003")


def test_sound_pointers_are_left_alone(run, save):
    save(run, 1, is_best=True)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert store.examine(run, pytest.fail)
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}


def test_a_best_that_is_damaged_is_forgotten_not_guessed(run, save):
    save(run, 1, is_best=True, best_step=1)
    save(run, 2, best_step=1)
    (run / "ckpt" / "step_000001" / "model.safetensors").write_bytes(b"")
    said = []
    store.examine(run, said.append)
    assert "step_000001" in said[0] and "best.json" in said[1]
    save(run, 3, best_step=1)
    assert pointers(run) == (None, "step_000003")


# ----------------------------------------------------------------------- interrupted half way


def killing(monkeypatch, target, name: str, at: int) -> list:
    """The `at`-th call of target.name (0 is the first) ends the process, as it were."""
    real, calls = getattr(target, name), []

    def dead(*args, **kwargs):
        raise Killed

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) > at:  # the dead clear nothing away
            for where, what in ((shutil, "rmtree"), (Path, "unlink"), (Path, "rename")):
                monkeypatch.setattr(where, what, dead)
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(target, name, call)
    return calls


POINTS = [(store, "save_file", 0), (store, "save_file", 1), (store, "sync", 0),
          (store, "sync", 1), (store, "digest", 0),
          *((os, "replace", n) for n in range(6)), *((os, "fsync", n) for n in range(15)),
          *((Path, "rename", n) for n in range(4)), *((shutil, "rmtree", n) for n in range(4))]


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
        store.check(run / "ckpt" / name)  # visible is complete
    store.tidy(run)
    assert not hidden(run)
    assert newest(run) in ("step_000001", "step_000002")
    save(run, step, keep=1, is_best=True, seed=5)
    assert names(run) == [f"step_{step:06d}"] and pointers(run) == (names(run)[0], names(run)[0])
    assert not hidden(run)


def test_what_becomes_visible_is_on_the_disk_before(run, save, monkeypatch):
    """Every rename finds the contents and the names of what it renames synced."""
    synced, renamed, replace, rename = set(), [], os.replace, Path.rename

    def check(aside, final, move=replace) -> None:
        parts = [Path(aside), *Path(aside).rglob("*")]
        assert {p.stat().st_ino for p in parts} <= synced, final
        renamed.append(Path(final).name)
        move(aside, final)

    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.fstat(fd).st_ino))
    monkeypatch.setattr(Path, "rename", lambda aside, final: check(aside, final, rename))
    monkeypatch.setattr(os, "replace", check)
    save(run, 1, is_best=True)
    assert renamed == ["model.json", "tokenizer.json", "state.json", "step_000001", "best.json",
                       "latest.json"]
    assert (run / "ckpt").stat().st_ino in synced  # and the new name itself


@pytest.mark.parametrize("target, name", [
    (store, "save_file"), (os, "replace"), (os, "fsync"), (os, "open"), (Path, "rename"),
    (Path, "mkdir"), (Path, "write_text"), (store, "digest")], ids=lambda x: str(x))
@pytest.mark.parametrize("again", [1, 2])
def test_a_failing_disk_leaves_the_former_and_says_so(run, save, monkeypatch, target, name, again):
    """Wherever it fails: also in a save of the same step again, and at any later file."""
    before = save(run, 1, is_best=True)
    real = getattr(target, name)
    for good in range(3):
        calls = []

        def full(*args, calls=calls, good=good, **kwargs):
            calls.append(args)
            if len(calls) > good:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(target, name, full)
            try:
                save(run, again)
            except OSError as e:
                assert e.errno == 28
            else:
                assert len(calls) <= good
        if name not in ("open", "rename"):  # these are needed to clear away
            assert not [n for n in hidden(run) if "-old-" not in n]
        store.tidy(run)
        assert "step_000001" in names(run) and store.check(before) and not hidden(run)
    save(run, 2)
    assert newest(run) == "step_000002" and not hidden(run)


@pytest.mark.skipif(os.name == "nt", reason="RLIMIT_FSIZE")
@pytest.mark.parametrize("limit", [100, 20_000])
def test_a_file_that_may_not_grow_is_an_error_of_the_system(run, save, limit):
    """No monkeypatch: what the system and safetensors really say when a file cannot be written."""
    import resource

    before = save(run, 1, is_best=True)
    assert (before / "model.safetensors").stat().st_size > 20_000
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises(OSError) as error:
            save(run, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "too large" in str(error.value)
    assert not hidden(run) and names(run) == ["step_000001"] and store.check(before)


def test_tidy_removes_what_is_unfinished_and_nothing_else(run, save):
    save(run, 1, is_best=True)
    ckpt = run / "ckpt"
    for name in (".tmp-step_000002", ".tmp-old-step_000003"):  # not whole, both
        (ckpt / name).mkdir()
        (ckpt / name / "state.json").write_text("{")
    (ckpt / ".tmp-best.json").write_text("{")
    shutil.copytree(ckpt / "step_000001", ckpt / ".tmp-old-step_000001")  # already replaced
    (ckpt / "notes.txt").write_text("mine")
    store.tidy(run)
    assert sorted(p.name for p in ckpt.iterdir()) == ["best.json", "latest.json", "notes.txt",
                                                      "step_000001"]
    store.tidy(run / "nothing")


def test_what_a_killed_process_left_of_the_runs_own_files_goes_too(run, save):
    save(run, 1)
    for name in (".tmp-123-config.json", ".tmp-123-log.jsonl", ".tmp-123-loss.png"):
        (run / name).write_text("half")
    for name in (".tmpfile", "notes.txt", ".lock"):
        (run / name).write_text("mine")
    store.tidy(run)
    assert {p.name for p in run.iterdir()} == {"ckpt", ".tmpfile", "notes.txt", ".lock"}


def test_clearing_away_follows_no_link(run, save, tmp_path):
    save(run, 1)
    elsewhere = save(tmp_path / "elsewhere", 5)
    (run / "ckpt" / ".tmp-old-step_000007").symlink_to(elsewhere)
    (run / "ckpt" / ".tmp-step_000008").symlink_to(elsewhere)
    (run / "ckpt" / ".tmp-1-best.json").symlink_to(elsewhere / "state.json")
    store.tidy(run)
    assert store.check(elsewhere) and not hidden(run) and names(run) == ["step_000001"]


# -------------------------------------------------------------------------------- in the background


def test_work_is_done_in_the_background_one_after_the_other():
    gate, done, running = threading.Event(), [], []

    def work(n: int):
        def do() -> None:
            running.append(n)
            assert gate.wait(10) and running == [*range(n + 1)]
            done.append(n)

        return do

    with store.Writer() as writer:
        writer.start(work(0))
        writer.wait(block=False)  # it does not wait
        assert done == []
        gate.set()
        for n in (1, 2):
            writer.start(work(n))
            assert done[:n] == [*range(n)]  # what was started before is done by now
    assert done == [0, 1, 2]  # `with` waits


@pytest.mark.parametrize("how", ["start", "wait", "look", "leave"])
def test_an_error_in_the_background_is_raised_once(how):
    def full() -> None:
        raise OSError(28, "No space left on device")

    writer = store.Writer()
    with pytest.raises(OSError, match="No space") if how == "leave" else contextlib.nullcontext():
        with writer:
            writer.start(full)
            if how == "leave":
                pass
            else:
                with pytest.raises(OSError, match="No space"):
                    if how == "start":
                        writer.start(lambda: pytest.fail("must not begin"))
                    end = time.monotonic() + 10
                    while time.monotonic() < end:
                        writer.wait(block=how == "wait")
                writer.wait()  # heard once is enough
    done = []
    with writer:
        writer.start(lambda: done.append(1))
    assert done == [1]  # and it can be tried again


def test_leaving_because_of_an_error_waits_and_does_not_hide_it():
    done = []

    def slow() -> None:
        time.sleep(0.1)
        done.append(1)
        raise OSError(28, "No space left on device")

    with pytest.raises(ZeroDivisionError), store.Writer() as writer:
        writer.start(slow)
        raise ZeroDivisionError
    assert done == [1]


# ----------------------------------------------------------------------------- keeping, pointing


def test_the_newest_and_the_best_stay(run, save):
    best = {2, 5}
    for step in range(1, 9):
        save(run, step, keep=2, is_best=step in best)
        assert names(run)[0] == f"step_{step:06d}"
        assert store.pointed(run, "latest") == names(run)[0]
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
    store.examine(run, lambda text: None)  # as at the start of every run
    folder = save(run, 15, keep=1)
    assert store.check(folder) and newest(run) == "step_000015"
    assert names(run) == ["step_000015"]


def test_the_best_is_remembered_though_the_process_ended_before_saying_so(run, save):
    save(run, 1, keep=1, is_best=True, best_step=1)
    with pytest.MonkeyPatch.context() as patch:
        calls = killing(patch, os, "replace", 3)  # model, tokenizer, state, then best.json
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
    assert store.pointed(run, "best") == "step_000001"
    for text in ("", "{", '{"format": 1}', '{"format": 1, "name": 3}', '{"format": 1, "name": ""}',
                 '{"format": 1, "name": "../ckpt/step_000001"}', '{"format": 1, "name": "step_9"}',
                 '{"format": 1, "name": "step_000002"}', '{"format": 1, "name": "/etc"}'):
        path.write_text(text)
        assert store.pointed(run, "best") is None, text
    path.unlink()
    assert store.pointed(run, "best") is None


def test_pointers_name_a_folder_so_that_a_run_can_be_moved(tmp_path, run, save):
    save(run, 1, is_best=True)
    run.rename(tmp_path / "moved")
    assert pointers(tmp_path / "moved") == ("step_000001", "step_000001")
    assert checkpoint.load_model(tmp_path / "moved" / "ckpt" / "step_000001")


# ------------------------------------------------------------------------ other models and files


def test_an_older_architecture_file_takes_defaults(tmp_path):
    old = {"vocab_size": 11, "block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 16}
    write_json(tmp_path / "model.json", old)
    assert checkpoint.load_config(tmp_path) == GPTConfig(**old)


@pytest.mark.parametrize("changes, words", [
    (dict(rotary=True, moe=1), "model.json.*(rotary|moe)"), (dict(n_head=3), "n_head=3"),
    (dict(n_layer="2"), "model.json"), (dict(n_layer=None), "model.json"),
    (dict(attn_logn="new"), "attn_logn is 'new'"),
])
def test_an_architecture_that_is_unknown_is_refused(tmp_path, changes, words):
    write_json(tmp_path / "model.json", {"n_embd": 16, "n_head": 2} | changes)
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
                store.check(folder)
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


def test_no_module_can_unpickle_or_execute():
    """No import that can, no such call; `..._object` of torch.distributed pickles too."""
    names = {"eval", "exec", "compile", "__import__"}
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for file in [*sorted((CLONE / "kit").glob("*.py")), CLONE / "train.py", CLONE / "sample.py"]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            where = f"{file}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imported = {a.name for a in node.names} | {getattr(node, "module", None) or ""}
                assert not {n.split(".")[0] for n in imported} & modules, where
            elif isinstance(node, ast.Call):
                assert getattr(node.func, "id", "") not in names, where
            elif isinstance(node, ast.Attribute):
                assert not re.search(r"_object(_list|s)?$|^allow_pickle$", node.attr), where
                of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
                assert not (of_torch and node.attr in ("load", "save")), where


# ---------------------------------------------------------------------------------- real kills


SAVER = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from pathlib import Path
from kit.run import store
from model import GPT, GPTConfig
model = GPT(GPTConfig(vocab_size=500, block_size=8, n_layer=2, n_head=2, n_embd=64))
run = Path(sys.argv[2])
run.mkdir(exist_ok=True)
store.tidy(run)
found = store.examine(run, print)
step = found[0][1]["step"] if found else 0
weights = {n: p.detach().clone() for n, p in model.named_parameters()}
tensors = {n + ".m": p for n, p in weights.items()}
print("ready", flush=True)
while True:
    step += int(sys.argv[3])
    state = {"step": max(step, 1), "best_step": max(step, 1)}
    store.save(run, model.config, weights, tensors, {"format": 1}, state, 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 0])
def test_kill_9_at_any_moment_leaves_a_complete_checkpoint(tmp_path, stride):
    """stride 0 writes the same step again and again, so that it is the only one."""
    (tmp_path / "saver.py").write_text(SAVER)
    command = [sys.executable, str(tmp_path / "saver.py"), str(CLONE), str(tmp_path / "run")]
    rng, before = random.Random(stride), 0
    for kill in range(6):
        process = subprocess.Popen([*command, str(stride)], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"  # and no checkpoint was found damaged
        time.sleep((0.2 if kill == 0 else 0) + rng.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store.tidy(tmp_path / "run")
        said = []
        found = store.examine(tmp_path / "run", said.append)
        assert found and not said and not hidden(tmp_path / "run")
        folder, state = found[0]
        assert state["step"] >= before
        before = state["step"]
        assert isinstance(checkpoint.load_model(folder)[0], GPT)


class Stochastic(GPT):
    """Rates by depth, as numbers of Python: such a model cannot be made without memory."""

    def __init__(self, config, init_std=0.02):
        self.rates = [x.item() for x in torch.linspace(0, 0.1, config.n_layer)]
        super().__init__(config, init_std)


def test_a_model_that_needs_memory_to_be_made_is_read_all_the_same(tmp_path, save, tiny,
                                                                   monkeypatch):
    folder = save(tmp_path, model=tiny(seed=3))
    monkeypatch.setattr(checkpoint, "GPT", Stochastic)
    monkeypatch.setattr("kit.device.GPT", Stochastic)
    model, _, _ = checkpoint.load_model(folder)
    assert model.wte.weight.equal(tiny(seed=3).wte.weight) and len(model.rates) == 2
