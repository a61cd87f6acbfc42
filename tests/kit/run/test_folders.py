"""folders.py: which folder, whose it is, start or go on or refuse, and finding runs again."""

import gc
import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kit import checkpoint
from kit.device import choose_dtype
from kit.errors import UserError
from kit.files import digest, read_json, sealed, write_json
from kit.job import Job
from kit.run import folders, store
from kit.settings import load
from train import ARCHITECTURE, TrainSettings

CPU = torch.device("cpu")


@pytest.fixture
def out(tmp_path) -> Path:
    """The folder of all runs."""
    return tmp_path / "out"


@pytest.fixture
def make(save):
    """make(path, state, ...) puts a run there: started, unfinished (10 updates) or finished."""
    def put(path: Path, state: str, step: int = 10, **settings) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / "config.json", {
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
             overwrite: bool = False) -> folders.Run:
        run = folders.claim(out_dir and str(out_dir), name, str(init_from), overwrite, said.append)
        held.append(run)
        if run.replaces:  # as train.py does when all else is known to work
            folders.clear(run.path)
        return run

    take.said, take.held = said, held
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
            assert run.resume == (path / "ckpt" / "step_000010", store.check(run.resume[0]))
    after = {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != ".lock"}
    assert after == ({} if outcome == "anew" else before)
    assert claim.said == []


def test_defaulted_folders_are_counted_on(out, make, claim):
    make(out / "small", "finished")
    make(out / "small-2", "finished")
    assert claim().path == out / "small-3"
    make(out / "small-3", "unfinished")
    assert "in use by another process" in refused(claim)  # the first claim holds it


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
    assert len(claim.said) == 2 and str(newest / "model.safetensors") in claim.said[0]
    assert "latest.json" in claim.said[1]  # which named it
    claim.held[-1].lock.release()
    assert claim().resume[0].name == "step_000010" and len(claim.said) == 2


def test_a_run_without_a_whole_checkpoint_is_refused_not_restarted(out, make, claim):
    path = make(out / "small", "unfinished")
    (path / "ckpt" / "step_000010" / "state.json").unlink()
    assert "--overwrite=True" in refused(claim)
    assert len(claim.said) == 1 and "step_000010" in claim.said[0]
    folder = path / "ckpt" / "step_000010"
    assert (folder / "model.safetensors").exists()  # it is all there is, so it stays where it is
    gc.collect()  # lets go of the lock
    assert "--overwrite=True" in refused(claim) and len(claim.said) == 2
    gc.collect()
    assert claim(overwrite=True).resume is None and not folder.exists()


def test_what_a_save_had_still_to_do_is_done_at_the_next_start(out, make, claim, save):
    """Killed between the new checkpoint and the pointers and the end of the old ones."""
    path = make(out / "small", "unfinished", step=5)
    for step in (10, 20, 30):
        save(path, step, best_step=20, run={"settings": {"keep": 1}})
    for which in ("best", "latest"):
        write_json(path / "ckpt" / f"{which}.json", {"name": "step_000005"})
    assert claim().resume[0].name == "step_000030" and claim.said == []
    assert [f.name for f in store.newest_first(path)] == ["step_000030", "step_000020"]
    assert store.pointed(path, "best") == "step_000020"
    assert store.pointed(path, "latest") == "step_000030"


@pytest.mark.parametrize("over, goes_on", [(False, True), (True, False), (None, False)])
def test_a_run_that_was_killed_before_its_last_words_goes_on(out, make, claim, over, goes_on):
    path = make(out / "small", "finished")
    if over is not None:
        rewrite(path / "config.json", lambda c: c.update(over=over))
    run = claim()
    assert (run.resume is not None) == goes_on
    assert run.path == (path if goes_on else out / "small-2")


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
    run = folders.claim(None, "small", "auto", True, print)
    assert run.replaces and run.resume is None
    assert before.items() <= {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}.items()
    run.lock.release()
    assert not folders.claim(None, "small", "resume", False, print).replaces


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
        assert store.check(path / "ckpt" / "step_000010")
    assert claim(explicit, init_from=defaulted, overwrite=True).resume is None


# ------------------------------------------------------------------------------------------ lock


def test_a_folder_has_one_owner(out, claim):
    first = claim()
    write_json(first.path / "config.json", {"settings": {}})
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
    return SimpleNamespace(hash=hash, tokenizer=SimpleNamespace(
        hash=tokenizer, spec="byte", vocab_size=11))


@pytest.fixture
def check():
    """check(run, settings, data) -> what is said before a run goes on."""
    def say(run: folders.Run, settings: TrainSettings, data: SimpleNamespace = data()):  # noqa: B008
        said = []
        folders.check_resume(run, settings, ARCHITECTURE, data, said.append)
        return said

    return say


def test_before_going_on(out, make, claim, check):
    make(out / "small", "unfinished", dataset="x", block_size=64)
    run, now = claim(), TrainSettings(dataset="x", block_size=64)
    assert check(run, now) == []
    said = check(run, replace(now, learning_rate=1e-3, dropout=0.1, init_from="resume", debug=True,
                              out_dir="x", overwrite=True))
    assert len(said) == 2 and "dropout from 0.0 to 0.1" in said[0]
    assert "learning_rate from 0.0006 to 0.001" in said[1]
    for name in ARCHITECTURE:
        message = refused(check, run, replace(now, **{name: "other"}))
        assert f"{name}={getattr(now, name)}" in message and f"{name}=other" in message
    assert "contents of dataset x" in check(run, now, data(hash="e"))[0]
    assert len(check(run, replace(now, dataset="y"), data(hash="e"))) == 1  # said once
    message = refused(check, run, now, data(tokenizer="other"))
    assert "byte" in message and "tokenizer.json" in message
    torch.set_num_threads(2)
    assert "1 threads before, 2 now" in check(run, now)[0]


def about_of(path: Path) -> dict:
    """What a run says of itself, in config.json and in each checkpoint."""
    value = read_json(path / "config.json")
    return {k: v for k, v in value.items() if k not in ("format", "seal")}


def rewrite(file: Path, change) -> None:
    """A sound file in which change(value) was done."""
    value = read_json(file)
    change(value)
    write_json(file, value)


def test_settings_that_only_one_of_two_versions_knows_are_listed(out, make, claim, check):
    path = make(out / "small", "unfinished", dataset="x")

    def older(config: dict) -> None:
        del config["settings"]["skip_spikes"], config["settings"]["attn_logn"]
        config["settings"]["gone"] = 3

    rewrite(path / "config.json", older)
    run, now = claim(), TrainSettings(dataset="x")
    assert check(run, now) == ["changed since the run began: gone from 3 to no longer a setting"]
    said = check(run, replace(now, skip_spikes=10.0))
    assert len(said) == 2 and "skip_spikes from 0.0 to 10.0" in said[1]  # from its default
    assert "attn_logn=off to attn_logn=fixed" in refused(check, run, replace(now,
                                                                            attn_logn="fixed"))


def test_the_settings_in_the_checkpoint_count_before_those_in_config_json(out, make, claim, check,
                                                                         save):
    """A run that went on with others wrote config.json and was killed before it saved."""
    path = make(out / "small", "unfinished", dataset="x")
    about = about_of(path)
    save(path, 20, run=about)
    rewrite(path / "config.json", lambda c: c["settings"].update(learning_rate=0.5))
    run = claim()
    assert check(run, TrainSettings(dataset="x")) == []
    assert len(check(run, TrainSettings(dataset="x", learning_rate=0.5))) == 1


@pytest.mark.parametrize("text", ["", "{", '{"model_type": "gpt2"}', "flip"])
def test_a_damaged_config_json_is_written_anew_from_the_checkpoint(out, make, claim, check, save,
                                                                  text):
    path = make(out / "small", "unfinished", dataset="x")
    config = path / "config.json"
    about = about_of(path)
    save(path, 20, run=about)
    whole = config.read_text()
    config.write_text(whole.replace('"batch_size": 12', '"batch_size": 13') if text == "flip"
                      else text)
    run = claim()
    assert run.resume[0].name == "step_000020"
    assert len(claim.said) == 1 and f"{config}: damaged" in claim.said[0]
    assert "written anew from the checkpoint" in claim.said[0]
    assert check(run, TrainSettings(dataset="x")) == []
    assert len(check(run, TrainSettings(dataset="x", batch_size=13))) == 1
    assert choose_dtype("auto", CPU, folders.config_of(run)) == torch.float32


def test_a_damaged_config_json_without_a_checkpoint_is_refused(out, make, claim):
    path = make(out / "small", "started")
    (path / "config.json").write_text("{")
    assert "config.json: damaged" in refused(claim)
    assert (path / "config.json").read_text() == "{"
    assert "config.json: damaged" in refused(claim, overwrite=True)  # it may be that of others


def test_a_damaged_config_json_beside_damaged_checkpoints_only_is_refused(out, make, claim):
    path = make(out / "small", "unfinished")
    (path / "config.json").write_text("{")
    (path / "ckpt" / "step_000010" / "state.json").write_text("{")
    before = (path / "ckpt" / "step_000010" / "model.safetensors").read_bytes()
    refused(claim)
    assert (path / "config.json").read_text() == "{"
    assert next(path.glob("ckpt/*step_000010/model.safetensors")).read_bytes() == before


def test_a_run_of_the_first_format_goes_on(out, make, claim, check):
    """No seals, except that of state.json, and no copy of the settings in it."""
    path = make(out / "small", "unfinished", dataset="x")
    folder = path / "ckpt" / "step_000010"

    def as_before(file: Path, seal: bool = False) -> None:
        value = {k: v for k, v in json.loads(file.read_text()).items()
                 if k not in ("format", "seal")}
        if seal:
            value["files"] = {name: digest(folder / name) for name in store.FILES}
            value["seal"] = sealed(value)["seal"]
        file.write_text(json.dumps({"format": 1, **value}, indent=1) + "\n")

    for file in (folder / "model.json", path / "config.json", path / "ckpt" / "best.json",
                 path / "ckpt" / "latest.json"):
        as_before(file)
    as_before(folder / "state.json", seal=True)
    assert '"format": 1' in (folder / "state.json").read_text()
    run = claim()
    assert claim.said == [] and run.resume[0] == folder and "run" not in run.resume[1]
    assert checkpoint.load_config(folder).n_embd == 16
    assert store.pointed(path, "best") == store.pointed(path, "latest") == folder.name
    assert check(run, TrainSettings(dataset="x")) == []
    assert "batch_size from 12 to 3" in check(run, TrainSettings(dataset="x", batch_size=3))[0]
    assert choose_dtype("auto", CPU, folders.config_of(run)) == torch.float32
    text = (folder / "state.json").read_text()
    (folder / "state.json").write_text(text.replace('"step": 10', '"step": 11'))
    run.lock.release()
    refused(claim)


# --------------------------------------------------------------- folders and files in wrong places


@pytest.mark.parametrize("name", ["config.json", "ckpt/latest.json", "ckpt/best.json",
                                  "ckpt/step_000010/model.safetensors",
                                  "ckpt/step_000010/state.json", "ckpt/step_000020"])
def test_a_folder_where_a_file_belongs_or_a_file_for_a_folder(tmp_path, make, claim, save, name):
    """One line, whether it goes on or not, and what lies there stays."""
    path = make(tmp_path / "mine", "unfinished")
    save(path, 5)
    wrong = path / name
    store.remove(wrong)
    if wrong.suffix:
        wrong.mkdir()
        (wrong / "notes.txt").write_text("mine")
    else:
        wrong.write_text("mine")
    before = sorted(p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != ".lock")
    try:
        assert claim(path).resume[0].name in ("step_000010", "step_000005")
        assert claim.said and all(len(line.splitlines()) == 1 for line in claim.said)
        assert any(str(path / Path(name).parts[0]) in line for line in claim.said)
    except OSError as e:  # kit.settings.run makes a line of it
        assert str(wrong) in f"{e.strerror}: {e.filename}"
    after = sorted(p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != ".lock")
    pointer = b'"name": "step_0000'
    assert all(pointer in b for b in before if b not in after)


def test_a_file_where_the_folder_of_checkpoints_belongs(tmp_path, claim, make):
    path = make(tmp_path / "mine", "started")
    (path / "ckpt").write_text("mine")
    assert str(path / "ckpt") in refused(claim, path)
    assert (path / "ckpt").read_text() == "mine"


@pytest.mark.parametrize("name", [*folders.OURS, "ckpt/step_000010", "ckpt/latest.json",
                                  "ckpt/.tmp-step_000020"])
def test_a_link_in_a_run_folder_is_refused(tmp_path, make, claim, name):
    path, elsewhere = make(tmp_path / "mine", "unfinished"), tmp_path / "elsewhere"
    make(elsewhere, "unfinished")
    store.remove(path / name)
    (path / name).symlink_to(elsewhere / name)
    before = {p: p.read_bytes() for p in elsewhere.rglob("*") if p.is_file()}
    for overwrite in (False, True):
        assert f"{path / name} is a link" in refused(claim, path, overwrite=overwrite)
    assert before == {p: p.read_bytes() for p in elsewhere.rglob("*") if p.is_file()}


def test_a_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path, make, claim,
                                                                  monkeypatch):
    path = make(tmp_path / "mine", "unfinished")

    def read_only(*args, **kwargs):
        raise OSError(30, "Read-only file system", str(path / ".lock"))

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OSError, match="Read-only"):
        claim(path)
    monkeypatch.undo()
    assert store.check(path / "ckpt" / "step_000010")


# ----------------------------------------------------------------------- a start by torchrun again


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("init_from, overwrite", [("scratch", False), ("auto", True),
                                                  ("scratch", True)])
def test_torchrun_goes_on_with_the_run_that_it_began(out, tmp_path, make, save, explicit, init_from,
                                                     overwrite, monkeypatch):
    """Else --max_restarts would throw away what was trained, or be refused."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    ours = [*Job(TrainSettings()).launch, "token"]
    path = make(tmp_path / "mine" if explicit else out / "small", "unfinished")
    out_dir = str(path) if explicit else None

    def claim() -> folders.Run:
        run = folders.claim(out_dir, "small", init_from, overwrite, print, ours)
        run.lock.release()
        return run

    def belongs_to(launch: list[str]) -> None:
        rewrite(path / "config.json", lambda c: c.update(launch=launch))

    for launch in (ours, ours[:1], ["another", "token"]):
        belongs_to(launch)
        run = claim()
        assert run.path == path and run.resume[1]["step"] == 10 and not run.replaces

    def starts_anew() -> None:
        if not overwrite and explicit:
            assert "--overwrite" in refused(claim)
        else:
            run = claim()
            assert run.resume is None and run.replaces == overwrite
            assert run.path == (path if overwrite else out / "small-2")

    for launch in (["other-1"], [f"None-{os.getppid()}"], [], "token", 5):
        belongs_to(launch)
        starts_anew()
    belongs_to(ours)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # by hand, in the same shell
    starts_anew()
    (path / "config.json").unlink()  # it was not begun yet
    if overwrite:
        assert claim().replaces


def test_one_launch_is_told_from_another(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    one = Job(TrainSettings()).launch
    assert Job(TrainSettings()).launch == one
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    assert Job(TrainSettings()).launch != one
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert Job(TrainSettings()).launch != one


# ------------------------------------------------------------------ settings of a run that is there


def test_a_run_gives_its_own_settings_for_want_of_a_config_file(tmp_path, make, save, capfd):
    path = make(tmp_path / "mine", "unfinished", n_layer=3, batch_size=7, init_from="scratch",
                overwrite=True, out_dir="elsewhere", debug=True, learning_rate=0.25)
    flags = [f"--out_dir={path}", "--batch_size=5"]
    loaded = load(TrainSettings, flags, "config/small.py", folders.settings_of)
    assert loaded.settings == TrainSettings(n_layer=3, batch_size=5, out_dir=str(path),
                                            learning_rate=0.25)
    assert loaded.files == [] and loaded.given >= {"out_dir", "batch_size", "n_layer"}
    assert "the settings that the run had" in capfd.readouterr().err
    for other in (["--overwrite=True"], ["--init_from=scratch"], [f"--init_from={path}"]):
        assert load(TrainSettings, flags + other, "config/tiny.py", folders.settings_of).files
    nowhere = [f"--out_dir={tmp_path / 'nowhere'}"]
    assert load(TrainSettings, nowhere, "config/tiny.py", folders.settings_of).files
    again = folders.command_to_go_on(loaded, path, Job(TrainSettings()))
    assert shlex.split(again) == ["python", sys.argv[0], *flags]
    about = about_of(path)
    save(path, 20, run=about)
    for text in ("{", None):  # then those of the newest checkpoint that has some
        (path / "config.json").unlink()
        if text:
            (path / "config.json").write_text(text)
        s = load(TrainSettings, flags, "config/small.py", folders.settings_of).settings
        assert (s.n_layer, s.learning_rate, s.init_from, s.overwrite) == (3, 0.25, "auto", False)


@pytest.mark.parametrize("saved", [{}, {"settings": None}, {"settings": 3}, {"settings": {}},
                                   {"run": 3, "settings": {"n_layer": 3}}, {"settings": ["a"]},
                                   {"run": {"settings": "x"}}])
def test_settings_that_are_none_of_ours_are_not_taken(tmp_path, saved):
    write_json(tmp_path / "config.json", saved)
    loaded = load(TrainSettings, [f"--out_dir={tmp_path}"], "config/tiny.py", folders.settings_of)
    assert [f.name for f in loaded.files] == ["tiny.py"]


def test_an_automatic_dtype_stays_what_it_was(out, make, claim):
    make(out / "small", "unfinished")
    run = claim()
    assert choose_dtype("auto", CPU, folders.config_of(run)) == torch.float32


# ----------------------------------------------------------------------------------- the command


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
    path = make(Path(s.out_dir) if s.out_dir else tmp_path / "out" / "a config", "unfinished",
                **asdict(s))
    command = shlex.split(folders.command_to_go_on(loaded, path, Job(TrainSettings())))
    assert command[:2] == ["python", sys.argv[0]]
    if (s.init_from, s.overwrite, s.out_dir) == ("auto", False, None):
        assert command[2:] == ["a config.py", *flags]  # the very same
    again = load(TrainSettings, command[2:], "config/tiny.py", folders.settings_of).settings
    run = claim(again.out_dir, "a config", again.init_from, again.overwrite)
    assert run.path.resolve() == path.resolve() and run.resume[1]["step"] == 10
    where = {"out_dir", "init_from", "overwrite"}
    assert {k: v for k, v in asdict(again).items() if k not in where} == {
        k: v for k, v in asdict(s).items() if k not in where}
