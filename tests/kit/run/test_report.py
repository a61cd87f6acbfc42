"""kit/run/report.py: what a run tells, and that rank 0 alone tells it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.making.tokenizers import make_tokenizer
from kit.device import Dtypes
from kit.files import read_json
from kit.job import Job
from kit.kernels.operators import Kernels
from kit.progress import Progress
from kit.run import report as module
from kit.run.folders import Run
from kit.run.report import Report
from kit.run.wandb_log import Wandb
from kit.settings import CLONE
from train import TrainSettings


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def build(path, monkeypatch):
    """build(progress, ...) -> a Report that was introduced; said: its lines."""
    said: list[str] = []
    monkeypatch.setattr(module, "say", said.append)
    monkeypatch.setattr(module.machine, "peak_flops", lambda *a: 1e9)

    def make(model, progress: Progress | None = None, resume: dict | None = None, main: bool = True,
             own: Kernels | None = None, begin: bool = True, **settings) -> Report:
        tokenizer = make_tokenizer("byte", [])
        train = SimpleNamespace(n_tokens=1000, epoch_rows=lambda block_size: 100)
        data = SimpleNamespace(tokenizer=tokenizer, vocab_size=257, hash="d", kind="text",
                               folder=Path("data/x"), train=train, separator=256)
        s = TrainSettings(**(dict(block_size=8, batch_size=4, gradient_accumulation_steps=2,
                                  max_iters=50) | settings))
        job = Job(s)
        job.main = main
        run = Run(path, None, resume and (path / "ckpt" / "step_000003", resume), False)
        r = Report(s, run, data, job, progress or Progress())
        r.introduce(model, Dtypes(torch.float32), own or Kernels([]), "off")
        if begin:
            r.begin()
        return r

    make.said = said
    return make


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]


def test_the_first_lines_and_what_is_kept_of_them(build, tiny, path):
    report = build(tiny(vocab_size=257))
    text = "\n".join(build.said)
    for words in ("device: cpu", "parameters, 257 tokens (byte); kernels of PyTorch; compile off",
                  "4 rows x 8 tokens x 2 micro-steps x 1 process = 64 tokens",
                  "50 updates, 4.00 epochs of 1,000 tokens of x"):
        assert words in text
    config = read_json(path / "config.json")
    assert config["settings"]["block_size"] == 8 and config["launch"] == Job(TrainSettings()).launch
    assert (config["device"], config["dtype"], config["dataset_hash"]) == ("cpu", "float32", "d")
    assert report.about == {k: v for k, v in config.items() if k not in ("format", "seal")}
    assert config["over"] is False
    assert rows(path) == [{"format": 1, "step": 0}]


def test_time_goes_on_where_the_checkpoint_left_it(build, tiny, monkeypatch, path):
    now = [1000.0]
    monkeypatch.setattr("kit.run.report.time.perf_counter", lambda: now[0])
    progress = Progress(step=3, elapsed_s=500.0, train_s=400.0)
    report = build(tiny(vocab_size=257), progress, resume={})
    now[0] += 7
    report.record({"step": 4, "loss": 2.0})
    assert rows(path)[-1] == {"step": 4, "loss": 2.0, "elapsed_s": 507.0, "train_s": 400.0}
    assert progress.elapsed_s == 507.0


def test_the_clock_of_the_wall_is_never_asked(build, tiny, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: pytest.fail("it may jump"))
    report = build(tiny(vocab_size=257))
    report.record({"step": 1, "loss": 2.0})
    report.draw(30)


def test_other_ranks_write_and_say_nothing_but_count_time(build, tiny, path):
    report = build(tiny(vocab_size=257), main=False)
    row = {"step": 1, "loss": 2.0}
    report.record(row)
    report.draw(0)
    report.job.parallel = "fsdp"  # no process has all of the model, so nothing is written by it
    report.conclude(tiny(vocab_size=257))
    assert [*path.iterdir()] == [] and build.said == []
    assert report.progress.elapsed_s > 0


def test_nothing_is_written_before_it_begins(build, tiny, path):
    report = build(tiny(vocab_size=257), begin=False)
    assert [*path.iterdir()] == [] and build.said
    report.begin()
    assert {p.name for p in path.iterdir()} == {"config.json", "log.jsonl"}


def test_kernels_that_are_not_to_be_had_any_more_are_said_and_recorded(build, tiny):
    own = Kernels(["dropout", "loss"])
    own.names = ["loss"]
    before = {"run": {"kernels": ["dropout", "loss"]}}
    report = build(tiny(vocab_size=257), Progress(step=3), resume=before, own=own)
    assert report.about["kernels"] == ["loss"]
    assert report.about["kernels_lost"] == [{"step": 3, "kernels": ["dropout"]}]
    assert [line for line in build.said if "dropout" in line and "last bits will differ" in line]
    again = build(tiny(vocab_size=257), Progress(step=5), kernels="torch",
                  resume={"run": report.about})
    assert again.about["kernels_lost"] == report.about["kernels_lost"]  # nothing more


def test_the_curve_is_drawn_when_the_last_is_old_enough(build, tiny, monkeypatch, path):
    now, drawn = [0.0], []
    monkeypatch.setattr("kit.run.report.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("kit.plot.draw", lambda curves, file, *a, **k: drawn.append(file))
    report = build(tiny(vocab_size=257))
    for seconds, n in ((29, 0), (2, 1), (29, 1), (2, 2)):
        now[0] += seconds
        report.draw(30)
        assert len(drawn) == n
    report.draw(0)
    assert drawn == [path / "loss.png"] * 3


@pytest.mark.parametrize("kept", ["abc", None])
def test_the_id_at_wandb_is_kept_with_the_run(build, tiny, monkeypatch, path, kept):
    asked = []

    def wandb(settings, name, run_id, warn):
        asked.append((name, run_id, settings["n_layer"]))
        return SimpleNamespace(id=run_id or "new", log=lambda row: None, finish=lambda: None)

    monkeypatch.setattr("kit.run.wandb_log.Wandb", wandb)
    report = build(tiny(vocab_size=257), resume={"run": {"wandb_id": kept}} if kept else None,
                   wandb_log=True, n_layer=5)
    assert asked == [("run", kept, 5)]
    saved = read_json(path / "config.json")["wandb_id"]
    assert report.about["wandb_id"] == saved == (kept or "new")


def test_the_last_lines(build, tiny, save, path):
    save(path, 40, is_best=True)
    report = build(tiny(vocab_size=257), Progress(step=50, skipped=3, best_loss=2.0, best_bpb=2.9,
                                                  val_loss=2.1, val_bpb=3.0, best_step=40))
    build.said.clear()
    report.job.parallel = "fsdp"  # no process has all of the model, so nothing is written by it
    report.conclude(tiny(vocab_size=257))
    text = "\n".join(build.said)
    for words in ("best: step 40, validation loss 2.0000", "3 of 50 updates were skipped",
                  "peak memory", "checkpoint: ", "curve: ", "python sample.py"):
        assert words in text
    assert "a sample" not in text  # no process has the whole model
    assert read_json(path / "config.json")["over"] is True and report.about["over"] is False
    report.job.parallel = "none"
    report.conclude(tiny(vocab_size=257))
    assert any("a sample:" in line for line in build.said)


# ----------------------------------------------------------------------------------------- wandb


def update(step: int) -> dict:
    return {"step": step, "loss": 5.0 - step / 10}


class Fake:
    """A wandb whose `fails` call raises."""

    def __init__(self, fails: str = "", error: BaseException | None = None, key: bool = True):
        self.fails, self.error = fails, error or RuntimeError("no network\nat all")
        self.calls = []
        self.run = SimpleNamespace(log=self.call("log"), finish=self.call("finish"), id="new-id")
        self.init = self.call("init", self.run)
        self.api = SimpleNamespace(api_key="x" * 40 if key else None)
        self.login = lambda **kwargs: key

    def call(self, name: str, result=None):
        def do(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            if name == self.fails:
                raise self.error
            return result

        return do


NOTHING = {"wandb_project": None, "wandb_run_name": None, "n_layer": 3}


@pytest.fixture
def no_wandb_environment(monkeypatch):
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "x")  # so that it is put back whatever a test makes of it
    monkeypatch.delenv("WANDB_MODE")


def use(monkeypatch, fake, run_id: str | None = None, **settings
        ) -> tuple[list[str], list[str]]:
    """A whole run with wandb: the names of the calls, the warnings."""
    monkeypatch.setitem(sys.modules, "wandb", fake)
    said = []
    wandb = Wandb(NOTHING | settings, "name", run_id, said.append)
    for step in (1, 2, 3):
        wandb.log(update(step))
    wandb.finish()
    if fake:
        fake.id = wandb.id
    return [c[0] for c in getattr(fake, "calls", [])], said


def test_wandb_sees_every_row_once_in_order(monkeypatch):
    fake = Fake()
    assert use(monkeypatch, fake) == (["init", "log", "log", "log", "finish"], [])
    assert {k: v for k, v in fake.calls[0][2].items() if v is not None} == {
        "project": "bonsaigpt", "name": "name", "config": NOTHING, "resume": "allow"}
    assert [c[1:] for c in fake.calls[1:4]] == [((update(s),), {"step": s}) for s in (1, 2, 3)]
    assert fake.id == "new-id"  # what the checkpoints keep


def test_rows_of_one_step_are_one_step(monkeypatch):
    """An update and the evaluation after it: the same `step`, which wandb joins."""
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    wandb = Wandb(NOTHING, "name", None, pytest.fail)
    wandb.log(update(7))
    wandb.log({"step": 7, "val_loss": 4.0})
    assert [c[2] for c in fake.calls[1:]] == [{"step": 7}, {"step": 7}]


def test_a_run_that_goes_on_goes_on_at_wandb_too(monkeypatch):
    fake = Fake()
    fake.run.id = "kept"
    use(monkeypatch, fake, run_id="kept")
    assert (fake.calls[0][2]["id"], fake.calls[0][2]["resume"]) == ("kept", "allow")
    assert fake.id == "kept"
    failing = Fake("init")
    use(monkeypatch, failing, run_id="kept")
    assert failing.id == "kept"  # also where it failed this time


@pytest.mark.parametrize("project, name, environment, expected", [
    (None, None, {}, ("bonsaigpt", "name")),
    (None, None, {"WANDB_PROJECT": "theirs", "WANDB_NAME": "called"}, ("theirs", "called")),
    ("mine", "so", {"WANDB_PROJECT": "theirs", "WANDB_NAME": "called"}, ("mine", "so")),
    (None, None, {"WANDB_PROJECT": "", "WANDB_NAME": ""}, ("bonsaigpt", "name"))])
def test_its_own_variables_count_where_the_settings_say_nothing(monkeypatch, project, name,
                                                               environment, expected,
                                                               no_wandb_environment):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    fake = Fake()
    use(monkeypatch, fake, wandb_project=project, wandb_run_name=name)
    assert (fake.calls[0][2]["project"], fake.calls[0][2]["name"]) == expected


@pytest.mark.parametrize("key, mode, offline", [
    (True, None, False), (False, None, True), (False, "online", False), (False, "disabled", False),
    (False, "offline", False), (True, "offline", False)])
def test_without_a_key_it_logs_offline_and_asks_nothing(monkeypatch, no_wandb_environment, key,
                                                        mode, offline):
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    fake = Fake(key=key)
    calls, said = use(monkeypatch, fake)
    assert calls == ["init", "log", "log", "log", "finish"]
    # not by WANDB_MODE: wandb has read its environment when it is asked for a key
    assert fake.calls[0][2].get("mode") == ("offline" if offline else None)
    assert os.environ.get("WANDB_MODE") == mode
    assert len(said) == offline
    if offline:
        assert "no key" in said[0] and "offline" in said[0] and "wandb sync" in said[0]
        assert len(said[0].splitlines()) == 1


def test_wandb_is_off_by_default_and_not_even_imported(build, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # fails to import
    assert build(tiny(vocab_size=257)).wandb is None


@pytest.mark.parametrize("fails, calls", [("init", ["init"]), ("log", ["init", "log"]),
                                          ("finish", ["init", "log", "log", "log", "finish"])])
@pytest.mark.parametrize("error", [RuntimeError("no network\nat all"), ConnectionError(),
                                   OSError(28, "disk full"), TypeError("x"), SystemExit(1),
                                   BrokenPipeError(32, "its process has gone"), MemoryError()])
def test_a_wandb_that_fails_is_one_warning_and_the_run_goes_on(monkeypatch, fails, calls, error):
    seen, said = use(monkeypatch, Fake(fails, error))
    assert seen == calls and len(said) == 1
    assert "wandb is off" in said[0] and type(error).__name__ in said[0]
    assert len(said[0].splitlines()) == 1


def test_a_wandb_that_is_missing_is_one_warning(monkeypatch):
    calls, said = use(monkeypatch, None)
    assert calls == [] and len(said) == 1 and "wandb is off" in said[0]


def test_ctrl_c_is_not_taken_for_a_failing_logger(monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        use(monkeypatch, Fake("log", KeyboardInterrupt()))


REAL = """
import os, sys
sys.path.insert(0, sys.argv[1])
from kit.run.wandb_log import Wandb
said = []
settings = {"wandb_project": None, "wandb_run_name": None, "n_layer": 3}
wandb = Wandb(settings, "my run", sys.argv[2] or None, said.append)
for row in ({"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.0}, {"step": 2, "val_loss": 2.5}):
    wandb.log(row)
run = wandb.run or print(said) or sys.exit("\\n".join(said))
result = [wandb.id, run.name, run.project, run.step, run.config["n_layer"], run.offline]
wandb.finish()
print("RESULT", *result, len(said))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["offline", None])
@pytest.mark.parametrize("run_id", ["", "abc123"])
def test_the_installed_wandb_takes_what_we_give_it(tmp_path, mode, run_id):
    """Offline; without WANDB_MODE and without a key in this empty home: no question, a warning."""
    pytest.importorskip("wandb")
    environment = {k: v for k, v in os.environ.items()
                   if not k.startswith("WANDB_") and k not in ("NETRC", "HOME", "USERPROFILE")}
    environment |= {"HOME": str(tmp_path), "USERPROFILE": str(tmp_path),
                    "WANDB_DIR": str(tmp_path)} | ({"WANDB_MODE": mode} if mode else {})
    done = subprocess.run([sys.executable, "-c", REAL, str(CLONE), run_id], env=environment,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = next(x for x in done.stdout.splitlines() if x.startswith("RESULT")).split(maxsplit=2)
    assert result[1] == run_id or not run_id and len(result[1]) > 3
    assert result[2] == f"my run bonsaigpt 2 3 True {0 if mode else 1}"
    summary = " ".join(done.stderr.partition("Run summary:")[2].split()).replace("wandb: ", "")
    assert summary.startswith("loss 3 step 2 val_loss 2.5")  # it has them all
    assert [*tmp_path.glob(f"wandb/offline-run-*-{result[1]}/*.wandb")]
    assert "deprecated" not in done.stderr, done.stderr
