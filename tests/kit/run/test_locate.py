"""kit/run/locate.py: the run and the checkpoint that somebody means."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.errors import UserError
from kit.run import locate, store
from train import TrainSettings


@pytest.fixture
def out(tmp_path) -> Path:
    """The folder of all runs."""
    return tmp_path / "out"


def refused(call, *args, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        call(*args, **kwargs)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def test_the_newest_run_is_remembered(out, tmp_path, monkeypatch):
    assert "no run yet" in refused(locate.find_run, None)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path)
        locate.remember(Path(name))
    monkeypatch.chdir("/")
    assert locate.find_run(None) == tmp_path / "two"  # wherever one stands
    assert json.loads((out / "latest.json").read_text())["format"] == 2
    assert locate.find_run(str(tmp_path / "one")) == tmp_path / "one"
    (tmp_path / "two").rmdir()
    assert str(tmp_path / "two") in refused(locate.find_run, None)
    assert "no such folder" in refused(locate.find_run, str(tmp_path / "two"))
    (out / "latest.json").write_text("{")
    assert "latest.json" in refused(locate.find_run, None)


def test_runs_live_in_out_or_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("BONSAI_OUT", str(tmp_path / "x"))
    assert locate.out_root() == tmp_path / "x"
    monkeypatch.delenv("BONSAI_OUT")
    assert locate.out_root() == Path(locate.__file__).parents[2] / "out"


def test_of_a_run_the_step_asked_for_else_the_best_else_the_newest(tmp_path, save):
    run = tmp_path / "run"
    for step in (10, 20, 30):
        save(run, step)
    assert locate.find_checkpoint(run).name == "step_000030"
    save(run, 40, is_best=True)
    save(run, 50)
    assert locate.find_checkpoint(run).name == "step_000040"
    assert locate.find_checkpoint(run, 20).name == "step_000020"
    message = refused(locate.find_checkpoint, run, 25)
    assert "--step=25" in message and "10, 20, 30, 40, 50" in message
    assert "no checkpoint" in refused(locate.find_checkpoint, tmp_path)


def test_a_checkpoint_is_itself_and_has_no_other_steps(tmp_path, save):
    folder = save(tmp_path / "run", 10)
    assert locate.find_checkpoint(folder) == folder
    assert "--step=7" in refused(locate.find_checkpoint, folder, 7)


def test_a_best_that_is_gone_is_said_not_guessed(tmp_path, save):
    run = tmp_path / "run"
    save(run, 10, is_best=True)
    save(run, 20)
    best = (run / "ckpt" / "best.json").read_text()
    for text in (best.replace("step_000010", "step_000011"), "{"):
        (run / "ckpt" / "best.json").write_text(text)
        assert "best.json" in refused(locate.find_checkpoint, run)
        assert locate.find_checkpoint(run, 20).name == "step_000020"


def test_a_source_is_a_whole_run_or_checkpoint(tmp_path, save):
    run = tmp_path / "run"
    folder = save(run, 10, is_best=True)
    for word in ("auto", "scratch", "resume"):
        assert locate.find_source(word) is None
    assert locate.find_source(str(run)) == locate.find_source(str(folder)) == folder
    for wrong in ("gpt3", str(tmp_path / "nowhere"), str(folder / "model.safetensors")):
        assert f"init_from={wrong}: expected auto, scratch, resume" in refused(
            locate.find_source, wrong)
    assert "no checkpoint" in refused(locate.find_source, str(tmp_path))
    for name in ("model.json", "model.safetensors"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
        assert str(folder / name) in refused(locate.find_source, str(run))
        (folder / name).write_bytes(data)


def test_a_run_from_weights_takes_their_architecture(tmp_path, tiny, save):
    source = save(tmp_path / "run", model=tiny(bias=True, n_head=4, dropout=0.3))
    s = TrainSettings(dropout=0.1)
    locate.adopt_architecture(s, {"dropout"}, source)
    assert (s.n_layer, s.n_head, s.n_embd, s.block_size, s.bias) == (2, 4, 16, 8, True)
    assert s.dropout == 0.1 and not hasattr(s, "vocab_size")
    message = refused(locate.adopt_architecture, TrainSettings(n_layer=3), {"n_layer"}, source)
    assert "n_layer=3" in message and "n_layer=2" in message
    locate.adopt_architecture(TrainSettings(n_layer=2), {"n_layer"}, source)


def test_a_newest_run_that_is_damaged_or_no_file_is_said(out, tmp_path):
    (tmp_path / "run").mkdir()
    locate.remember(tmp_path / "run")
    pointer = out / "latest.json"
    text = pointer.read_text()
    pointer.write_text(text.replace("run", "ruin"))
    assert "latest.json: damaged" in refused(locate.find_run, None)
    pointer.unlink()
    pointer.mkdir()
    assert "plain file" in refused(locate.find_run, None)
    pointer.rmdir()
    pointer.write_text('{"format": 1, "path": 3}')
    assert "3: no such folder" in refused(locate.find_run, None)
    locate.remember(tmp_path / "run")  # and the next run mends it
    assert locate.find_run(None) == tmp_path / "run"


def test_what_was_set_aside_as_damaged_is_no_step(tmp_path, save):
    run = tmp_path / "run"
    save(run, 10)
    (save(run, 20) / "state.json").unlink()
    store.examine(run, lambda text: None)
    assert locate.find_checkpoint(run).name == "step_000010"
    assert "steps there: 10" in refused(locate.find_checkpoint, run, 20)


def test_a_source_that_is_a_link_is_refused(tmp_path, save):
    """What stands at the other end may change while it is read."""
    folder = save(tmp_path / "run", 10)
    (tmp_path / "linked").symlink_to(folder)
    assert "a link" in refused(locate.find_source, str(tmp_path / "linked"))
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert locate.find_source(str(copy)) == copy
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert "plain file" in refused(locate.find_source, str(copy))


def test_the_tokenizer_of_a_checkpoint_must_be_that_of_the_data(tmp_path, save):
    folder = save(tmp_path / "run", 10)

    def ours(hash: str, spec: str, vocab_size: int = 11) -> SimpleNamespace:
        return SimpleNamespace(hash=hash, spec=spec, vocab_size=vocab_size)

    locate.same_tokenizer(folder, ours("abc", "byte"))
    message = refused(locate.same_tokenizer, folder, ours("x", "bpe:300"))
    assert "tokenizer byte" in message and "bpe:300" in message
    assert f"--tokenizer={folder / 'tokenizer.json'}" in message
    refused(locate.same_tokenizer, folder, ours("abc", "byte", vocab_size=12))
