"""kit/runs.py: which folder, whose it is, start or go on or refuse, and finding runs again."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kit import checkpoint, runs
from kit.settings import UserError, load
from train import ARCHITECTURE, TrainSettings


@pytest.fixture
def out(tmp_path) -> Path:
    """The folder of all runs."""
    return tmp_path / "out"


@pytest.fixture
def make(save):
    """make(path, state, ...) puts a run there: started, unfinished (10 updates) or finished."""
    def put(path: Path, state: str, step: int = 10, **settings) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        checkpoint.write_json(path / "config.json", {
            "settings": asdict(TrainSettings(**settings)), "device": "cpu", "dtype": "float32",
            "dataset_hash": "d"})
        (path / "log.jsonl").write_text('{"format": 1, "step": 0}\n')
        if state != "started":
            save(path, step, is_best=True, finished=state == "finished")
        return path

    return put


@pytest.fixture
def claim():
    """claim(...) -> the Run, which is let go after the test; claim.said: the warnings."""
    held, said = [], []

    def take(out_dir: Path | None = None, name: str = "small", init_from: str = "auto",
             overwrite: bool = False) -> runs.Run:
        run = runs.claim(out_dir and str(out_dir), name, str(init_from), overwrite, said.append)
        held.append(run)
        if run.replaces:  # as train.py does when all else is known to work
            runs.clear(run.path)
        return run

    take.said = said
    yield take
    for run in held:
        run.lock.release()


def refused(call, *args, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        call(*args, **kwargs)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


# ---------------------------------------------------------------------------- starting, going on


STATES = ("none", "started", "unfinished", "finished")
TABLE = [  # outcome for each of STATES in a defaulted folder, then in an explicit one
    ("auto", False, ("start", "start", "go on", "start -2"), ("start", "start", "go on", "no")),
    ("scratch", False, ("start", "start -2", "start -2", "start -2"), ("start", "no", "no", "no")),
    ("source", False, ("start", "start -2", "start -2", "start -2"), ("start", "no", "no", "no")),
    ("resume", False, ("no", "start", "go on", "go on"), ("no", "start", "go on", "go on")),
    ("auto", True, ("start", "anew", "anew", "anew"), ("start", "anew", "anew", "anew")),
    ("scratch", True, ("start", "anew", "anew", "anew"), ("start", "anew", "anew", "anew")),
    ("source", True, ("start", "anew", "anew", "anew"), ("start", "anew", "anew", "anew")),
    ("resume", True, ("no", "no", "no", "no"), ("no", "no", "no", "no")),
]
ROWS = [(init_from, overwrite, state, explicit, outcomes[i])
        for init_from, overwrite, *both in TABLE for explicit, outcomes in enumerate(both)
        for i, state in enumerate(STATES)]


@pytest.mark.parametrize("init_from, overwrite, state, explicit, outcome", ROWS)
def test_the_table_of_starting_and_going_on(init_from, overwrite, state, explicit, outcome, out,
                                            make, claim, save, tmp_path):
    path = tmp_path / "mine" if explicit else out / "small"
    if state != "none":
        make(path, state)
    if init_from == "source":
        init_from = save(tmp_path / "another", 3)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    args = (path if explicit else None, "small", init_from, overwrite)
    if outcome == "no":
        message = refused(claim, *args)
        assert "resume" in message if state == "none" or overwrite else "--overwrite" in message
    else:
        run = claim(*args)
        assert run.path == (out / "small-2" if outcome == "start -2" else path)
        assert (run.resume is not None) == (outcome == "go on")
        if outcome == "go on":
            assert run.resume == (path / "ckpt" / "step_000010", checkpoint.check(run.resume[0]))
    after = {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != ".lock"}
    assert after == ({} if outcome == "anew" else before)
    assert claim.said == []


def test_defaulted_folders_are_counted_on(out, make, claim):
    make(out / "small", "finished")
    make(out / "small-2", "finished")
    assert claim().path == out / "small-3"
    make(out / "small-3", "unfinished")
    run = claim(init_from="auto") if claim.said else None
    assert run is None  # small-3 is held by the first claim, see below


def test_the_newest_of_the_defaulted_folders_goes_on(out, make, claim):
    make(out / "small", "unfinished")
    make(out / "small-2", "finished")
    make(out / "small-3", "unfinished", step=30)
    run = claim()
    assert run.path == out / "small-3" and run.resume[1]["step"] == 30
    assert claim(init_from="scratch").path == out / "small-4"


@pytest.mark.parametrize("other", ["exp-2024", "exp-2", "exp-02", "exp-1", "exp-x", "exp-2-2"])
def test_a_config_whose_name_ends_in_a_number_is_another_one(other, out, make, claim):
    make(out / other, "unfinished")
    assert claim(name="exp").path == out / "exp"


def test_names_that_end_in_digits_or_hold_odd_characters(out, make, claim):
    for name in ("gpt-2", "run-2024", "v1.5", "[a]", "a*", "small-"):
        make(out / name, "finished")
        assert claim(name=name).path == out / f"{name}-2"
    make(out / "exp", "finished")
    make(out / "exp-2024", "unfinished")
    assert claim(name="exp").path == out / "exp-2"  # the first that is free


def test_out_dir_is_relative_to_where_the_user_stands(make, claim, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert claim(Path("here")).path == Path("here") and (tmp_path / "here").is_dir()


def test_an_out_dir_that_is_no_folder_is_refused(tmp_path, claim):
    (tmp_path / "file").write_text("mine")
    for init_from in ("auto", "scratch"):
        assert "is a file" in refused(claim, tmp_path / "file", init_from=init_from)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_damaged_checkpoint_is_named_once_and_the_one_before_taken(out, make, claim, save):
    path = make(out / "small", "unfinished")
    newest = save(path, 20)
    (newest / "model.safetensors").write_bytes(b"torn")
    assert claim().resume[0].name == "step_000010"
    assert len(claim.said) == 1 and str(newest / "model.safetensors") in claim.said[0]


def test_a_run_without_a_whole_checkpoint_is_refused_not_restarted(out, make, claim):
    path = make(out / "small", "unfinished")
    (path / "ckpt" / "step_000010" / "state.json").unlink()
    assert "--overwrite=True" in refused(claim)
    assert (path / "ckpt" / "step_000010" / "model.safetensors").exists()


def test_a_run_that_lost_its_config_is_not_started_anew(out, make, claim):
    path = make(out / "small", "unfinished")
    (path / "config.json").unlink()
    assert claim().resume[0] == path / "ckpt" / "step_000010"


def test_what_a_killed_process_left_is_cleared_away(out, make, claim):
    path = make(out / "small", "unfinished")
    (path / "ckpt" / ".tmp-step_000020").mkdir()
    (path / "ckpt" / ".tmp-best.json").write_text("{")
    (path / "ckpt" / "step_000010").rename(path / "ckpt" / ".tmp-old-step_000010")
    assert claim().resume[0] == path / "ckpt" / "step_000010"  # it was about to be replaced
    assert not [p for p in (path / "ckpt").iterdir() if p.name.startswith(".tmp-")]


def test_overwriting_waits_until_all_else_is_known_to_work(out, make):
    path = make(out / "small", "finished")
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    run = runs.claim(None, "small", "auto", True, print)
    assert run.replaces and run.resume is None
    assert before.items() <= {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}.items()
    run.lock.release()
    assert not runs.claim(None, "small", "resume", False, print).replaces


def test_overwriting_does_not_bring_back_what_was_there(out, make, claim):
    path = make(out / "small", "unfinished")
    (path / "ckpt" / "step_000010").rename(path / "ckpt" / ".tmp-old-step_000010")
    assert claim(overwrite=True).resume is None
    assert list((path / "ckpt").iterdir()) == []


# --------------------------------------------------------------------- files that are not ours


def test_foreign_files_survive_overwriting(tmp_path, make, claim):
    path = make(tmp_path / "mine", "finished")
    (path / "sub").mkdir()
    foreign = [path / n for n in ("notes.txt", "sub/config.json", "ckpt/notes.json", "data.jsonl",
                                  "ckpt/step_1", ".hidden", "model.safetensors.bak")]
    for file in foreign:
        file.write_text("mine")
    claim(path, overwrite=True)
    assert all(file.read_text() == "mine" for file in foreign)
    assert {p for p in path.rglob("*") if p.is_file()} == {*foreign, path / ".lock"}


@pytest.mark.parametrize("text", ['{"model_type": "gpt2"}', "not json", "[]"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_config_json_of_others_is_never_replaced(tmp_path, claim, text, overwrite):
    """As in a folder of Hugging Face's."""
    (tmp_path / "config.json").write_text(text)
    assert "config.json" in refused(claim, tmp_path, overwrite=overwrite)
    assert (tmp_path / "config.json").read_text() == text


def test_a_source_is_not_overwritten_by_the_run_that_wants_it(tmp_path, out, make, claim):
    explicit, defaulted = make(tmp_path / "mine", "finished"), make(out / "small", "finished")
    for path, out_dir in ((explicit, explicit), (defaulted, None)):
        for source in (path, path / "ckpt" / "step_000010", Path(os.path.relpath(path))):
            assert "init_from" in refused(claim, out_dir, init_from=source, overwrite=True)
        assert checkpoint.check(path / "ckpt" / "step_000010")
    assert claim(explicit, init_from=defaulted, overwrite=True).resume is None


# ------------------------------------------------------------------------------------------ lock


def test_a_folder_has_one_owner(out, claim):
    first = claim()
    checkpoint.write_json(first.path / "config.json", {"settings": {}})
    for overwrite in (False, True):
        message = refused(claim, overwrite=overwrite)
        assert str(first.path) in message and "in use" in message
    assert (first.path / "config.json").exists()  # nothing was overwritten under its owner
    first.lock.release()
    assert claim().path == first.path


HOLDER = """
import fcntl, sys
f = open(sys.argv[1], "a+")
fcntl.flock(f, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="flock")
def test_another_process_is_respected_until_it_ends_however_it_ends(out, make, claim):
    path = make(out / "small", "unfinished")
    for end in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path / ".lock")], text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout.readline() == "held\n"
        assert "in use by another process" in refused(claim)
        process.send_signal(end)
        process.wait()
        process.stdin.close()
        process.stdout.close()
        claim().lock.release()  # at once, though the lock file is still there


# ------------------------------------------------------------------------------- what may change


def data(hash: str = "d", tokenizer: str = "abc") -> SimpleNamespace:
    return SimpleNamespace(hash=hash, tokenizer=SimpleNamespace(hash=tokenizer, spec="byte"))


def test_before_going_on(out, make, claim):
    make(out / "small", "unfinished", dataset="x", block_size=64)
    run, now = claim(), asdict(TrainSettings(dataset="x", block_size=64))

    def check(settings: dict = now, data: SimpleNamespace = data()) -> list[str]:  # noqa: B008
        said = []
        runs.check_resume(run, settings, ARCHITECTURE, data, said.append)
        return said

    assert check() == []
    said = check(now | {"learning_rate": 1e-3, "dropout": 0.1, "init_from": "resume", "debug": True,
                        "out_dir": "x", "overwrite": True, "new": 1})  # new: in this version
    assert len(said) == 2 and "dropout from 0.0 to 0.1" in said[0]
    assert "learning_rate from 0.0006 to 0.001" in said[1]
    for name in ARCHITECTURE:
        message = refused(check, now | {name: "other"})
        assert f"{name}={now[name]}" in message and f"{name}=other" in message
    assert "contents of dataset x" in check(data=data(hash="e"))[0]
    assert len(check(now | {"dataset": "y"}, data(hash="e"))) == 1  # said once, as a setting
    message = refused(check, data=data(tokenizer="other"))
    assert "byte" in message and "tokenizer.json" in message
    torch.set_num_threads(2)
    assert "1 threads before, 2 now" in check()[0]


def test_an_automatic_dtype_stays_what_it_was(out, make, claim):
    make(out / "small", "unfinished")
    run = claim()
    assert runs.same_dtype(run, "auto", "cpu") == "float32"
    assert runs.same_dtype(run, "bfloat16", "cpu") == "bfloat16"  # asked for
    assert runs.same_dtype(run, "auto", "cuda") == "auto"  # another machine


def test_a_run_from_weights_takes_their_architecture(tiny):
    config = tiny(bias=True, n_head=4, dropout=0.3).config
    s = TrainSettings(dropout=0.1)
    runs.adopt_architecture(s, config, {"dropout", "bias"} if s.bias else {"dropout"}, Path("x"))
    assert (s.n_layer, s.n_head, s.n_embd, s.block_size, s.bias) == (2, 4, 16, 8, True)
    assert s.dropout == 0.1 and not hasattr(s, "vocab_size")
    message = refused(runs.adopt_architecture, TrainSettings(n_layer=3), config, {"n_layer"},
                      Path("x"))
    assert "n_layer=3" in message and "n_layer=2" in message
    runs.adopt_architecture(TrainSettings(n_layer=2), config, {"n_layer"}, Path("x"))


# ---------------------------------------------------------------------------- the command, signals


@pytest.mark.parametrize("flags", [
    [], ["--seed=5", "--dataset=my text.txt"], ["--init_from=scratch"], ["--overwrite=True"],
    ["--out_dir=my runs/a"], ["--init_from=auto", "--wandb_run_name=it's $HOME"],
    ["--init_from=resume"], ["--init_from=some/run", "--overwrite=True", "--out_dir=b"]])
@pytest.mark.parametrize("lines", ["", "overwrite = True", "init_from = 'scratch'\nout_dir='c'"])
def test_the_printed_command_goes_on(flags, lines, tmp_path, make, claim, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a config.py").write_text(lines + "\nn_layer = 3\n")
    loaded = load(TrainSettings, ["a config.py", *flags])
    s = loaded.settings
    path = make(Path(s.out_dir) if s.out_dir else tmp_path / "out" / "a config", "unfinished")
    command = shlex.split(runs.command_to_go_on(loaded, path))
    assert command[:2] == ["python", sys.argv[0]]
    if (s.init_from, s.overwrite, s.out_dir) == ("auto", False, None):
        assert command[2:] == ["a config.py", *flags]  # the very same
    again = load(TrainSettings, command[2:]).settings
    run = claim(again.out_dir, "a config", again.init_from, again.overwrite)
    assert run.path.resolve() == path.resolve() and run.resume[1]["step"] == 10
    where = {"out_dir", "init_from", "overwrite"}
    assert {k: v for k, v in asdict(again).items() if k not in where} == {
        k: v for k, v in asdict(s).items() if k not in where}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_the_second_leaves(number, monkeypatch):
    before = signal.getsignal(number)
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    with runs.Interrupt() as interrupt:
        assert interrupt.signal is None
        signal.raise_signal(number)
        assert interrupt.signal == number and not left
        signal.raise_signal(signal.SIGINT)
        assert left == [130]
    assert signal.getsignal(number) is before


def test_signals_are_left_alone_off_the_main_thread():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with runs.Interrupt() as interrupt:
            seen.append((interrupt.signal, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


# -------------------------------------------------------------------------------- finding a run


def test_the_newest_run_is_remembered(out, tmp_path, monkeypatch):
    assert "no run yet" in refused(runs.find_run, None)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path)
        runs.remember(Path(name))
    monkeypatch.chdir("/")
    assert runs.find_run(None) == tmp_path / "two"  # wherever one stands
    assert json.loads((out / "latest.json").read_text())["format"] == 1
    assert runs.find_run(str(tmp_path / "one")) == tmp_path / "one"
    (tmp_path / "two").rmdir()
    assert str(tmp_path / "two") in refused(runs.find_run, None)
    assert "no such folder" in refused(runs.find_run, str(tmp_path / "two"))
    (out / "latest.json").write_text("{")
    assert "latest.json" in refused(runs.find_run, None)


def test_runs_live_in_out_or_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("BONSAI_OUT", str(tmp_path / "x"))
    assert runs.out_root() == tmp_path / "x"
    monkeypatch.delenv("BONSAI_OUT")
    assert runs.out_root() == Path(runs.__file__).parent.parent / "out"


def test_of_a_run_the_step_asked_for_else_the_best_else_the_newest(tmp_path, save):
    run = tmp_path / "run"
    for step in (10, 20, 30):
        save(run, step)
    assert runs.find_checkpoint(run).name == "step_000030"
    save(run, 40, is_best=True)
    save(run, 50)
    assert runs.find_checkpoint(run).name == "step_000040"
    assert runs.find_checkpoint(run, 20).name == "step_000020"
    message = refused(runs.find_checkpoint, run, 25)
    assert "--step=25" in message and "10, 20, 30, 40, 50" in message
    assert "no checkpoint" in refused(runs.find_checkpoint, tmp_path)


def test_a_checkpoint_is_itself_and_has_no_other_steps(tmp_path, save):
    folder = save(tmp_path / "run", 10)
    assert runs.find_checkpoint(folder) == folder
    assert "--step=7" in refused(runs.find_checkpoint, folder, 7)


def test_a_best_that_is_gone_is_said_not_guessed(tmp_path, save):
    run = tmp_path / "run"
    save(run, 10, is_best=True)
    save(run, 20)
    best = (run / "ckpt" / "best.json").read_text()
    for text in (best.replace("step_000010", "step_000011"), "{"):
        (run / "ckpt" / "best.json").write_text(text)
        assert "best.json" in refused(runs.find_checkpoint, run)
        assert runs.find_checkpoint(run, 20).name == "step_000020"


def test_a_source_is_a_whole_run_or_checkpoint(tmp_path, save):
    run = tmp_path / "run"
    folder = save(run, 10, is_best=True)
    for word in ("auto", "scratch", "resume"):
        assert runs.find_source(word) is None
    assert runs.find_source(str(run)) == runs.find_source(str(folder)) == folder
    for wrong in ("gpt2", str(tmp_path / "nowhere"), str(folder / "model.safetensors")):
        assert f"init_from={wrong}: expected auto, scratch, resume" in refused(
            runs.find_source, wrong)
    assert "no checkpoint" in refused(runs.find_source, str(tmp_path))
    for name in ("model.json", "model.safetensors"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
        assert str(folder / name) in refused(runs.find_source, str(run))
        (folder / name).write_bytes(data)
