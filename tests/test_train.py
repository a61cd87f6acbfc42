"""train.py as its user meets it: a run from text to checkpoint, stopping, going on, refusing."""

import gc
import json
import math
import os
import random
import signal
import sys
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from data.shards import Split
from kit import measure
from kit.errors import UserError
from kit.errors import run as cli
from kit.run import store
from kit.run.report import Report
from kit.writing.text import write_sample

GOLDEN = Path(__file__).parent / "golden" / "loss_curve.json"
CONFIG = """
n_layer = 2
n_head = 2
n_embd = 32
block_size = 16
batch_size = 4
gradient_accumulation_steps = 1
max_iters = 20
warmup_iters = 4
learning_rate = 1e-2
min_lr = 1e-3
eval_interval = 10
eval_iters = 4
dtype = "float32"
tokenizer = "byte"
"""
EVERYTHING = ["--optimizer=muon", "--dropout=0.2", "--gradient_accumulation_steps=3",
              "--patience=9", "--schedule=linear", "--tokenizer=bpe:300", "--attn_logn=learned",
              "--eval_interval=5"]


@pytest.fixture
def run(tmp_path, text_file, monkeypatch):
    """run(*flags) trains on the text with the small config; returns (exit code, run folder)."""
    short = partial(write_sample, max_new_tokens=9)  # of the sample at the end
    monkeypatch.setattr("kit.run.report.write_sample", short)
    monkeypatch.setattr("kit.device.peak_flops", lambda *args: 1e11)  # a quarter of a second
    config = tmp_path / "test.py"
    config.write_text(CONFIG)

    def go(*flags: str, out: str | None = "run") -> tuple[int, Path]:
        out_dir = [f"--out_dir={tmp_path / out}"] if out else []
        argv = [str(config), f"--dataset={text_file}", *out_dir, *flags]
        return train.main(argv), tmp_path / (out or "out/test")

    return go


def log(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]


def losses(path: Path) -> list[float]:
    return [r["loss"] for r in log(path) if "loss" in r]


def timeless(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in r.items() if k not in ("tok_s", "mfu", "elapsed_s", "train_s")}
            for r in rows]


def weights(path: Path, step: int = 20) -> dict[str, bytes]:
    folder = path / "ckpt" / f"step_{step:06d}"
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name != "state.json"}


def stop_at(monkeypatch, step: int, number: int = signal.SIGTERM):
    """A signal that arrives while update `step` runs."""
    real = train.Trainer.update

    def update(self):
        row = real(self)
        if row["step"] == step:
            signal.raise_signal(number)
        return row

    monkeypatch.setattr(train.Trainer, "update", update)
    return lambda: monkeypatch.setattr(train.Trainer, "update", real)


# ------------------------------------------------------------------------------- a run, whole


def test_a_run_leaves_what_it_promises(run, capsys):
    code, path = run("--max_iters=25")
    assert code == 0
    rows = log(path)
    assert rows[0]["format"] == 1
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, 26))  # exactly max_iters
    assert [r["step"] for r in rows if "val_loss" in r] == [10, 20, 25]
    needed = {"step", "tokens", "loss", "lr", "grad_norm", "tok_s", "mfu", "elapsed_s", "train_s"}
    assert needed <= rows[1].keys() and {"val_loss", "val_bpb"} <= rows[-1].keys()
    assert rows[-1]["tokens"] == 25 * 4 * 16
    assert (path / "loss.png").read_bytes().startswith(b"\x89PNG")
    there = {p.name for p in (path / "ckpt").iterdir()}
    assert there == {"step_000020", "step_000025", "best.json", "latest.json"}
    config = json.loads((path / "config.json").read_text())
    assert config["format"] == 2 and config["settings"]["n_embd"] == 32
    state = json.loads((path / "ckpt" / "step_000025" / "state.json").read_text())
    assert config["over"] is True and state["run"]["over"] is False  # nobody knew it then
    both = ({k: v for k, v in about.items() if k not in ("format", "seal", "over")}
            for about in (config, state["run"]))
    assert next(both) == next(both)
    out = capsys.readouterr().out
    for words in ("device: cpu", "parameters", "4 rows x 16 tokens x 1 micro-steps", "epochs",
                  "training left", "bits per byte", "tokens/s", "peak memory", "loss.png",
                  "python sample.py"):
        assert words in out, words


def test_the_loss_falls_and_bits_per_byte_fit(run):
    _, path = run("--max_iters=60")
    first, last = losses(path)[0], np.mean(losses(path)[-5:])
    assert first == pytest.approx(math.log(257), rel=0.05) and last < first - 1.5
    val = log(path)[-1]  # one byte a token, one separator left out: bits per byte is loss / ln 2
    assert val["val_bpb"] == pytest.approx(val["val_loss"] / math.log(2), rel=1e-3)


@pytest.mark.parametrize("kernels, near", [("torch", 1e-4), ("auto", 1e-3)])
def test_golden_loss_curve(run, kernels, near):
    """20 steps of AdamW in fp32: other numbers mean that the mathematics has changed."""
    _, path = run(f"--kernels={kernels}")
    assert losses(path) == pytest.approx(json.loads(GOLDEN.read_text())["losses"], rel=near)
    names = [] if kernels == "torch" else ["attention", "dropout", "loss"]
    assert json.loads((path / "config.json").read_text())["kernels"] == names


def test_own_kernels_are_gone_when_a_run_has_ended(run):
    torch.manual_seed(0)
    x = torch.randn(40, 40).bfloat16()
    before = F.dropout(x, 0.5, True)
    run("--max_iters=1", "--warmup_iters=0")
    torch.manual_seed(0)
    assert x.equal(torch.randn(40, 40).bfloat16()) and before.equal(F.dropout(x, 0.5, True))


def test_the_same_seed_gives_the_same_series_and_another_does_not(run):
    a, b, c = (losses(run(f"--seed={seed}", "--dropout=0.1", out=out)[1])
               for seed, out in ((1, "a"), (1, "b"), (2, "c")))
    assert a == b and a != c


def test_accumulation_is_one_big_batch(run):
    a = losses(run("--batch_size=12", out="a")[1])
    b = losses(run("--batch_size=4", "--gradient_accumulation_steps=3", out="b")[1])
    assert a == pytest.approx(b, abs=1e-5)


def test_accumulation_weighs_targets_and_not_micro_steps(run, monkeypatch):
    """Micro-steps with unequal numbers of real targets: still one mean over all targets."""
    real = Split.batch

    def ragged(self, first, n, *args):
        x, y = real(self, first, n, *args)
        y = y.copy()
        y[np.arange(first, first + n) % 4 == 0, 3:] = -1
        return x, y

    monkeypatch.setattr(Split, "batch", ragged)
    a = losses(run("--batch_size=8", out="a")[1])
    b = losses(run("--batch_size=2", "--gradient_accumulation_steps=4", out="b")[1])
    assert a == pytest.approx(b, abs=1e-5)


def test_evaluation_does_not_disturb_training(run):
    a = losses(run("--dropout=0.2", "--eval_interval=3", out="a")[1])
    b = losses(run("--dropout=0.2", "--eval_interval=100", "--eval_iters=0", out="b")[1])
    assert a == b


def test_evaluation_is_the_same_whatever_the_batch(run):
    vals = [log(run("--eval_iters=0", "--max_iters=1", "--warmup_iters=0", f"--batch_size={n}",
                    "--learning_rate=1e-9", "--min_lr=0", out=f"v{n}")[1])[-1]["val_loss"]
            for n in (1, 4, 300)]
    assert vals == pytest.approx([vals[0]] * 3, rel=1e-6)


def test_early_stop_and_best_only(run, monkeypatch):
    """Losses 3, 2, 4, 5: with patience=2 the fourth evaluation ends the run; the best is kept."""
    values = iter([3.0, 2.0, 4.0, 5.0])

    def fake(*args, **kwargs):
        loss = next(values)
        return {"loss": loss, "perplexity": 1.0, "bpb": loss}

    monkeypatch.setattr(train, "evaluate", fake)
    _, path = run("--patience=2", "--eval_interval=2", "--keep=1",
                  "--always_save_checkpoint=False")
    assert log(path)[-1]["step"] == 8
    assert store.pointed(path, "best") == "step_000004"
    assert store.pointed(path, "latest") == "step_000008"
    assert len(store.newest_first(path)) == 2
    assert store.check(path / "ckpt" / "step_000008")["finished"]


def test_a_short_run_still_saves(run):
    _, path = run("--max_iters=3", "--eval_interval=500", "--warmup_iters=1")
    assert store.pointed(path, "latest") == "step_000003"


@pytest.mark.parametrize("flags", [["--optimizer=muon"], ["--tie_embeddings=False"],
                                   ["--bias=True"], ["--attn_logn=clipped", "--logn_base=4"],
                                   ["--decay_lr=False"], ["--grad_clip=0.01"], ["--dropout=0.3"],
                                   ["--beta1=0.5"], ["--beta2=0.5"], ["--weight_decay=5"],
                                   ["--min_lr=9e-3"], ["--lr_decay_iters=9"], ["--schedule=linear"],
                                   ["--schedule=linear", "--cooldown=0.2"], ["--warmup_iters=1"],
                                   ["--dtype=bfloat16"], ["--seed=2"], ["--init_std=0.05"],
                                   ["--optimizer=muon", "--muon_lr=0.5"],
                                   ["--optimizer=muon", "--muon_momentum=0.5"]], ids=" ".join)
def test_each_setting_of_the_model_and_the_optimizer_does_something(run, flags):
    assert losses(run(*flags)[1]) != losses(run(out="plain")[1])


def test_log_interval_and_eval_iters(run):
    _, path = run("--log_interval=5")
    assert [r["step"] for r in log(path) if "loss" in r] == [5, 10, 15, 20]


def test_eval_only_writes_nothing(run, tmp_path, capsys):
    _, path = run()
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*")}
    code, _ = run("--eval_only=True")
    assert code == 0 and f"{log(path)[-1]['val_loss']:.4f}" in capsys.readouterr().out
    assert before == {p: p.stat().st_mtime_ns for p in path.rglob("*")}


@pytest.mark.parametrize("gain, dtype", [(0.0, "float32"), (2.0, "bfloat16")])
def test_dtypes_are_chosen_once_said_recorded_and_kept(run, monkeypatch, capsys, gain, dtype):
    """By what the processor does when the run begins, also where it seems to do another later."""
    flags = ("--optimizer=muon", "--dtype=auto")
    monkeypatch.setattr("kit.device.bf16_gain", lambda: gain)
    _, whole = run(*flags, out="whole")
    go_on = stop_at(monkeypatch, 7)
    _, path = run(*flags)
    config = json.loads((path / "config.json").read_text())
    assert (config["dtype"], config["muon_dtype"]) == (dtype, dtype)
    words = "no bfloat16 products" if dtype == "float32" else "2.0 times as fast as float32"
    first = next(line for line in capsys.readouterr().out.splitlines() if "device:" in line)
    assert words in first and f"), {dtype}, Muon in {dtype}, torch" in first
    go_on()
    monkeypatch.setattr("kit.device.bf16_gain", lambda: 2.0 - gain)
    assert run(*flags)[0] == 0
    assert f"), {dtype}, Muon in {dtype}, torch" in capsys.readouterr().out
    assert weights(whole) == weights(path)
    seen, real = [], measure.autocast
    monkeypatch.setattr(measure, "autocast", lambda *a: (seen.append(a[1]), real(*a))[1])
    assert run(*flags, "--eval_only=True")[0] == 0
    args = [str(path), "--dtype=auto", "--device=cpu"]
    assert measure.main(args) == 0 and f"; {dtype} on cpu" in capsys.readouterr().out
    assert set(seen) == {getattr(torch, dtype)}


def test_a_run_from_before_there_was_a_choice_keeps_muon_in_bf16(run, monkeypatch, capsys):
    monkeypatch.setattr("kit.device.bf16_gain", lambda: 2.0)
    _, whole = run("--optimizer=muon", out="whole")
    real = Report.introduce

    def introduce(self, *args):
        real(self, *args)
        del self.about["muon_dtype"]

    monkeypatch.setattr(Report, "introduce", introduce)
    go_on = stop_at(monkeypatch, 7)
    _, path = run("--optimizer=muon")
    state = json.loads((path / "ckpt" / "step_000007" / "state.json").read_text())
    assert "muon_dtype" not in state["run"] and state["run"]["dtype"] == "float32"
    go_on()
    monkeypatch.setattr(Report, "introduce", real)
    monkeypatch.setattr("kit.device.bf16_gain", lambda: 0.0)
    capsys.readouterr()
    assert run("--optimizer=muon")[0] == 0
    assert "), float32, Muon in bfloat16, torch" in capsys.readouterr().out
    assert weights(whole) == weights(path)
    assert json.loads((path / "config.json").read_text())["muon_dtype"] == "bfloat16"


# --------------------------------------------------------------------------- stop and go on


BF16 = [*EVERYTHING, "--dtype=bfloat16"]


@pytest.mark.parametrize("flags", [["--kernels=torch"], [*EVERYTHING, "--kernels=torch"], BF16],
                         ids=["plain", "everything", "everything in bf16 with own kernels"])
@pytest.mark.parametrize("stop", [7, 10])
def test_ten_and_ten_are_twenty_bit_for_bit(run, monkeypatch, flags, stop, capsys):
    _, whole = run(*flags, out="whole")
    go_on = stop_at(monkeypatch, stop)
    code, path = run(*flags, out="parts")
    assert code == 128 + signal.SIGTERM
    assert "Go on with:" in capsys.readouterr().out
    go_on()
    code, _ = run(*flags, out="parts")
    assert code == 0 and "going on" in capsys.readouterr().out
    assert weights(whole) == weights(path)
    assert timeless(log(whole)) == timeless(log(path))


def test_kernels_that_are_not_to_be_had_any_more(run, monkeypatch, capsys):
    """It goes on with PyTorch's, says that bits will differ, and records from which step on."""
    go_on = stop_at(monkeypatch, 7)
    run(*BF16)
    go_on()
    real = torch.library.Library.impl

    def refuse(self, operator, *args):
        if operator == "dropout":
            raise RuntimeError("not this time")
        return real(self, operator, *args)

    monkeypatch.setattr(torch.library.Library, "impl", refuse)
    capsys.readouterr()
    code, path = run(*BF16)
    said = capsys.readouterr().out
    assert code == 0 and "dropout stays PyTorch's own: not this time" in said
    assert "last bits will differ" in said
    config = json.loads((path / "config.json").read_text())
    assert config["kernels"] == ["attention", "loss"]
    assert config["kernels_lost"] == [{"step": 7, "kernels": ["dropout"]}]


def test_many_interruptions(run, monkeypatch):
    _, whole = run(out="whole")
    for step in (1, 2, 5, 10, 11, 19, 20):  # the last one before the final evaluation
        go_on = stop_at(monkeypatch, step, signal.SIGINT)
        assert run(out="parts")[0] == 130
        go_on()
    code, path = run(out="parts")
    assert code == 0
    assert weights(whole) == weights(path)
    assert timeless(log(whole)) == timeless(log(path))


def test_interrupted_while_evaluating(run, monkeypatch):
    _, whole = run(out="whole")
    real, calls = train.evaluate, []

    def evaluate(*args):
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(train, "evaluate", evaluate)
    assert run(out="parts")[0] == 130
    code, path = run(out="parts")
    assert code == 0 and timeless(log(whole)) == timeless(log(path))


def test_a_crash_between_saves_repeats_the_updates_and_mends_the_log(run, monkeypatch):
    _, whole = run(out="whole")
    real = train.Trainer.update

    def crash(self):
        if self.progress.step == 15:
            with (self.path / "log.jsonl").open("a") as f:
                f.write('{"step": 16, "lo')  # torn
            raise RuntimeError("a fault of ours")
        return real(self)

    monkeypatch.setattr(train.Trainer, "update", crash)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run(out="parts")
    monkeypatch.setattr(train.Trainer, "update", real)
    _, path = run(out="parts")
    assert timeless(log(whole)) == timeless(log(path)) and weights(whole) == weights(path)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(run, monkeypatch, capsys):
    _, whole = run(out="whole")
    go_on = stop_at(monkeypatch, 15)
    _, path = run(out="parts")
    go_on()
    damaged = path / "ckpt" / "step_000015" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    _, path = run(out="parts")
    said = capsys.readouterr().out
    assert str(damaged) in said and "going on with" in said and "from step 10" in said
    assert weights(whole) == weights(path) and timeless(log(whole)) == timeless(log(path))


def test_another_batch_size_skips_and_repeats_nothing(run, monkeypatch):
    served = []
    rows = Split.rows
    monkeypatch.setattr(Split, "rows", lambda self, first, n, *a, **k:
                        (served.extend(range(first, first + n)), rows(self, first, n, *a, **k))[1])
    go_on = stop_at(monkeypatch, 7)
    run()
    go_on()
    run("--batch_size=6")
    # rows are fetched one update ahead: those of the eighth are fetched again, by the other size
    assert served == [*range((7 + 1) * 4), *range(7 * 4, 7 * 4 + 13 * 6)]


def test_what_changed_is_listed(run, monkeypatch, capsys):
    go_on = stop_at(monkeypatch, 7)
    run()
    go_on()
    capsys.readouterr()
    run("--learning_rate=2e-2", "--max_iters=22")
    said = capsys.readouterr().out
    assert "learning_rate from 0.01 to 0.02" in said and "max_iters from 20 to 22" in said
    assert "out_dir" not in said.split("update:")[0].replace("--out_dir", "")


@pytest.mark.parametrize("flag", ["--n_layer=3", "--n_embd=16", "--block_size=8", "--bias=True",
                                  "--tie_embeddings=False", "--attn_logn=fixed",
                                  "--optimizer=muon", "--gelu=erf", "--freeze=wpe"])
def test_architecture_cannot_change(run, monkeypatch, flag):
    go_on = stop_at(monkeypatch, 3)
    _, path = run()
    go_on()
    before = weights(path, 3)
    with pytest.raises(UserError, match="cannot change"):
        run(flag)
    assert weights(path, 3) == before


def test_another_tokenizer_cannot_take_over_a_run(run, monkeypatch):
    go_on = stop_at(monkeypatch, 3)
    run()
    go_on()
    with pytest.raises(UserError, match="bpe:300"):
        run("--tokenizer=bpe:300")


def test_a_finished_run_in_a_defaulted_folder_gets_a_sibling(run, tmp_path, capsys):
    run(out=None)
    run(out=None)
    assert {p.name for p in (tmp_path / "out").iterdir()} - {".lock"} == {
        "test", "test-2", "latest.json"}
    latest = json.loads((tmp_path / "out" / "latest.json").read_text())["path"]
    assert Path(latest).name == "test-2"


def test_a_finished_run_in_an_explicit_folder_is_refused(run):
    _, path = run()
    before = weights(path)
    with pytest.raises(UserError, match="--overwrite=True.*--init_from=resume.*--out_dir"):
        run()
    assert weights(path) == before
    code, _ = run("--overwrite=True", "--seed=5")
    assert code == 0 and weights(path) != before


def test_overwriting_waits_until_all_else_is_known_to_work(run, monkeypatch):
    _, path = run()
    before = weights(path)
    for flags in (["--dtype=float16"], ["--n_head=5"], ["--dataset=nowhere"]):
        with pytest.raises((UserError, train.UserError)):
            run("--overwrite=True", *flags)
    for place in ("train.GPT", "train.Report.introduce", "train.optimizer.build_optimizers"):
        with monkeypatch.context() as patch:
            patch.setattr(place, lambda *_: (_ for _ in ()).throw(MemoryError()))
            with pytest.raises(MemoryError):
                run("--overwrite=True")
    assert weights(path) == before and log(path)


def test_a_run_without_checkpoint_is_not_the_newest(run, tmp_path, monkeypatch):
    _, good = run(out="good")
    with pytest.raises(UserError, match="step 1"):
        monkeypatch.setattr(train.Trainer, "update",
                            lambda self: self.give_up(1, "the loss is nan"))
        run(out="bad")
    latest = json.loads((tmp_path / "out" / "latest.json").read_text())["path"]
    assert Path(latest) == good.resolve()


def test_weights_that_are_not_finite_are_not_saved(run, monkeypatch):
    real = train.Trainer.update

    def update(self):
        row = real(self)
        if row["step"] == 12:
            with torch.no_grad():
                self.model.wte.weight[0] = math.nan
            signal.raise_signal(signal.SIGINT)
        return row

    monkeypatch.setattr(train.Trainer, "update", update)
    with pytest.raises(UserError, match="not finite.*step_000010"):
        run()


def test_interrupted_before_the_first_update(run, monkeypatch):
    _, whole = run(out="whole")
    init = train.Interrupt.__init__

    def interrupted(self):
        init(self)
        self.signal = signal.SIGINT

    monkeypatch.setattr(train.Interrupt, "__init__", interrupted)
    code, path = run(out="parts")
    assert code == 130 and store.pointed(path, "latest") == "step_000000"
    monkeypatch.setattr(train.Interrupt, "__init__", init)
    run(out="parts")
    assert weights(whole) == weights(path)


def test_own_text_with_the_tokenizer_of_given_weights(run, tmp_path):
    _, first = run()
    code, second = run(f"--init_from={first}", "--tokenizer=None", out="second")
    assert code == 0 and losses(second)[0] < losses(first)[0] - 1


def test_a_finished_run_is_made_longer_on_request(run):
    run()
    _, path = run("--init_from=resume", "--max_iters=24")
    assert [r["step"] for r in log(path) if "loss" in r] == list(range(1, 25))


def test_a_new_run_from_weights(run, capsys):
    _, first = run("--n_layer=3", "--decay_lr=False")
    run_config = json.loads((first / "config.json").read_text())["settings"]
    assert run_config["n_layer"] == 3
    with pytest.raises(UserError, match="n_layer=2.*n_layer=3"):
        run(f"--init_from={first}", out="second")
    code, second = run(f"--init_from={first}", "--n_layer=3", "--learning_rate=1e-6",
                       "--min_lr=0", out="third")
    assert code == 0
    assert losses(second)[0] < losses(first)[0] - 1


def test_resume_without_a_run_is_refused(run):
    with pytest.raises(UserError, match="holds no run"):
        run("--init_from=resume")


# ----------------------------------------------------------------------------------- mishaps


def at_update(monkeypatch, step: int, what):
    """what(trainer) is done before update `step` (1 is the first); the call undoes it."""
    real = train.Trainer.update

    def update(self):
        if self.progress.step + 1 == step:
            self.writer.wait()
            what(self)
        return real(self)

    monkeypatch.setattr(train.Trainer, "update", update)
    return lambda: monkeypatch.setattr(train.Trainer, "update", real)


def ends_in_a_line(run, monkeypatch, capfd, *flags: str) -> str:
    """The run through kit.settings.run: exit code 2, and the one line of it."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    with pytest.raises(SystemExit) as stop:
        cli(lambda argv: run(*flags)[0], (train.UserError,))
    stop.value.__context__ = None
    gc.collect()  # the lock goes with the last that knows the run
    error = capfd.readouterr().err
    assert stop.value.code == 2 and "Traceback" not in error
    lines = [line for line in error.splitlines() if line.startswith("train.py: ")]
    assert len(lines) == 1 and error.rstrip().endswith(lines[0])
    return lines[0]


def mended_and_whole(run, path: Path) -> None:
    """The same command goes on, and all is as if nothing had happened."""
    _, whole = run(out="whole")
    assert run()[0] == 0
    assert weights(whole) == weights(path) and timeless(log(whole)) == timeless(log(path))
    assert not [*path.rglob(".tmp-*")]


def full(*args, **kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["log", "weights", "fsync", "curve"])
def test_a_full_disk_is_a_line_and_loses_nothing(run, tmp_path, monkeypatch, capfd, where):
    """In the 13th update, after a checkpoint at 10, or where the 20th is saved."""
    path = tmp_path / "run"

    def half(log, row):  # of the line still found room
        with log.path.open("a") as f:
            f.write(json.dumps(row)[:9])
        full()

    target, what = {"log": ("kit.run.log.Log.write", half), "fsync": ("os.fsync", full),
                    "weights": ("kit.run.store.save_file", full),
                    "curve": ("matplotlib.figure.Figure.savefig", full)}[where]
    with monkeypatch.context() as patch:
        at_update(patch, 13, lambda trainer: patch.setattr(target, what))
        line = ends_in_a_line(run, patch, capfd)
    good = 20 if where == "curve" else 10
    assert "No space left on device" in line
    assert f"the last good checkpoint is {path / 'ckpt' / f'step_0000{good}'}" in line
    assert store.check(path / "ckpt" / f"step_0000{good}")
    assert not [*path.rglob(".tmp-*")]
    if where != "curve":
        mended_and_whole(run, path)


@pytest.mark.skipif(os.name == "nt", reason="RLIMIT_FSIZE")
def test_a_disk_that_is_really_full_is_a_line_and_loses_nothing(run, tmp_path, monkeypatch, capfd):
    """No file may become longer than the log is: what the system and safetensors really say."""
    import resource

    path = tmp_path / "run"
    monkeypatch.setattr("kit.plot.draw", lambda *a, **k: None)  # it would fail first
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    go_on = at_update(monkeypatch, 13, lambda trainer: resource.setrlimit(
        resource.RLIMIT_FSIZE, (20_000, hard)))
    try:
        line = ends_in_a_line(run, monkeypatch, capfd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "too large" in line and f"{path / 'ckpt' / 'step_000010'}" in line
    go_on()
    mended_and_whole(run, path)


def test_a_folder_that_vanishes_is_a_line(run, tmp_path, monkeypatch, capfd):
    path = tmp_path / "run"
    go_on = at_update(monkeypatch, 13, lambda trainer: path.rename(tmp_path / "elsewhere"))
    line = ends_in_a_line(run, monkeypatch, capfd)
    assert str(path / "log.jsonl") in line and "No such file" in line
    assert not path.exists()  # and no half of a run is begun there
    go_on()
    (tmp_path / "elsewhere").rename(path)
    mended_and_whole(run, path)


@pytest.mark.parametrize("error", [(13, "Permission denied"), (30, "Read-only file system")])
def test_a_folder_that_becomes_read_only_is_a_line(run, tmp_path, monkeypatch, capfd, error):
    path, real = tmp_path / "run", Path.open

    def deny(self, mode="r", *args, **kwargs):
        if mode in ("w", "a") and path in self.parents:
            raise OSError(*error, str(self))
        return real(self, mode, *args, **kwargs)

    with monkeypatch.context() as patch:
        at_update(patch, 13, lambda trainer: patch.setattr(Path, "open", deny))
        line = ends_in_a_line(run, patch, capfd)
        assert error[1] in line and str(path / "log.jsonl") in line
        assert str(path / "ckpt" / "step_000010") in line
    mended_and_whole(run, path)


def test_an_empty_folder_in_place_of_a_pointer_is_named_and_replaced(run, monkeypatch, capsys):
    go_on = stop_at(monkeypatch, 13)
    _, path = run()
    go_on()
    (path / "ckpt" / "latest.json").unlink()
    (path / "ckpt" / "latest.json").mkdir()
    mended_and_whole(run, path)
    assert f"{path / 'ckpt' / 'latest.json'}: damaged" in capsys.readouterr().out
    assert store.pointed(path, "latest") == "step_000020"


@pytest.mark.parametrize("name", ["log.jsonl", "loss.png", "config.json", "ckpt"])
def test_a_folder_where_a_file_belongs_is_a_line(run, tmp_path, monkeypatch, capfd, name):
    path = tmp_path / "run"
    go_on = stop_at(monkeypatch, 13)
    run()
    go_on()
    wrong = path / name
    aside = tmp_path / "aside"
    wrong.rename(aside) if wrong.exists() else None
    wrong.write_text("mine") if name == "ckpt" else wrong.mkdir()
    line = ends_in_a_line(run, monkeypatch, capfd)
    assert name in line
    assert wrong.read_text() == "mine" if name == "ckpt" else wrong.is_dir()
    wrong.unlink() if name == "ckpt" else wrong.rmdir()
    if aside.exists():
        aside.rename(wrong)
    if name == "loss.png":  # all else was done
        assert store.check(path / "ckpt" / "step_000020")["finished"]
    else:
        mended_and_whole(run, path)


@pytest.mark.parametrize("error, words", [
    (MemoryError, ""), (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2 GiB"),
    (RuntimeError, "DefaultCPUAllocator: can't allocate memory")])
@pytest.mark.parametrize("step", [1, 13])
def test_too_little_memory_is_a_line_that_says_what_to_set(run, tmp_path, monkeypatch, capfd, error,
                                                          words, step):
    def fail(trainer):
        raise error(words)

    go_on = at_update(monkeypatch, step, fail)
    line = ends_in_a_line(run, monkeypatch, capfd, "--gradient_accumulation_steps=3")
    assert "out of memory with batch_size=4 and gradient_accumulation_steps=3" in line
    assert "--batch_size=2 --gradient_accumulation_steps=6" in line
    assert ("step_000010" if step == 13 else "no checkpoint yet") in line
    go_on()
    code, path = run("--batch_size=2", "--gradient_accumulation_steps=6")  # as it says
    _, whole = run("--gradient_accumulation_steps=3", out="whole")
    assert code == 0 and losses(path) == pytest.approx(losses(whole), abs=1e-4)


def test_saving_is_a_snapshot_that_training_does_not_wait_for(run, tmp_path, monkeypatch):
    """A writer that begins to write only when more updates were made still writes the old state."""
    _, whole = run("--keep=9", "--optimizer=muon", "--max_iters=25", out="whole")
    real_save, real_update = store.save, train.Trainer.update
    step, late = [0], []

    def slow(path, config, weights, optimizer, tokenizer, state, *rest):
        end = time.monotonic() + 20
        while step[0] < min(25, state["step"] + 3) and time.monotonic() < end:
            time.sleep(0.001)
        late.append(step[0] - state["step"])
        return real_save(path, config, weights, optimizer, tokenizer, state, *rest)

    def update(self):
        row = real_update(self)
        step[0] = row["step"]
        return row

    monkeypatch.setattr(store, "save", slow)
    monkeypatch.setattr(train.Trainer, "update", update)
    code, path = run("--keep=9", "--optimizer=muon", "--max_iters=25", out="slow")
    assert code == 0 and min(late[:2]) >= 3 and len(late) == 3
    for folder in store.newest_first(whole):
        n = store.step_of(folder)
        assert weights(whole, n) == weights(path, n)
        a, b = (store.check(p / "ckpt" / folder.name) for p in (whole, path))
        moving = ("elapsed_s", "train_s", "seconds", "run", "seal")
        assert {k: v for k, v in a.items() if k not in moving} == {
            k: v for k, v in b.items() if k not in moving}
    assert timeless(log(whole)) == timeless(log(path))


def test_a_save_that_fails_is_heard_of_before_the_next_one(run, monkeypatch):
    monkeypatch.setattr("kit.run.store.save_file", full)
    with pytest.raises(UserError, match="No space.*there is no checkpoint yet"):
        run("--eval_interval=2", "--max_iters=500")
    monkeypatch.undo()


def test_a_clock_that_jumps_changes_nothing(run, monkeypatch):
    """By hours, back and forth, as when a laptop wakes up."""
    _, whole = run("--dropout=0.1", out="whole")
    now, hours = [1e9], random.Random(0)

    def jump() -> float:
        now[0] += 3600 * hours.uniform(-50, 50)
        return now[0]

    monkeypatch.setattr(time, "time", jump)
    monkeypatch.setattr(time, "time_ns", lambda: int(jump() * 1e9))
    go_on = stop_at(monkeypatch, 12)
    run("--dropout=0.1")
    go_on()
    code, path = run("--dropout=0.1")
    assert code == 0
    assert weights(whole) == weights(path) and timeless(log(whole)) == timeless(log(path))
    elapsed = [r["elapsed_s"] for r in log(path)[1:]]
    assert elapsed == sorted(elapsed) and 0 < elapsed[0] and elapsed[-1] < 300
    assert all(0 <= r["train_s"] <= r["elapsed_s"] for r in log(path)[1:])


def test_a_damaged_config_json_is_written_anew_and_the_run_goes_on(run, monkeypatch, capsys):
    _, whole = run(out="whole")
    go_on = stop_at(monkeypatch, 12)
    _, path = run()
    go_on()
    config = path / "config.json"
    data = config.read_text()
    config.write_text(data.replace('"batch_size": 4', '"batch_size": 5'))
    capsys.readouterr()
    assert run()[0] == 0
    said = capsys.readouterr().out
    assert f"{config}: damaged" in said and "changed since" not in said
    assert weights(whole) == weights(path) and timeless(log(whole)) == timeless(log(path))
    assert config.read_text().splitlines()[:-4] == data.splitlines()[:-4]  # "over" and the seal


def test_wandb_that_fails_in_the_middle_changes_nothing(run, monkeypatch, capsys):
    rows = []

    def log_row(row, step):
        rows.append(row)
        if len(rows) == 7:
            raise ConnectionError("no network")

    fake = SimpleNamespace(log=log_row, finish=lambda: None, id="kept")
    asked = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(
        init=lambda **kwargs: asked.append(kwargs) or fake, login=lambda **kwargs: True,
        api=SimpleNamespace(api_key="x")))
    _, whole = run(out="whole")
    go_on = stop_at(monkeypatch, 10)
    _, path = run("--wandb_log=True", "--wandb_project=p")
    go_on()
    assert capsys.readouterr().out.count("wandb is off") == 1 and len(rows) == 7
    assert run("--wandb_log=True", "--wandb_project=p")[0] == 0
    assert [k["id"] for k in asked] == [None, "kept"] and asked[0]["project"] == "p"
    assert len(rows) == 7 + 12
    assert weights(whole) == weights(path) and timeless(log(whole)) == timeless(log(path))


# ------------------------------------------------------------------------------------- spikes


def poison(monkeypatch, steps, scale: float = math.nan):
    """The loss of these updates is multiplied."""
    real = train.GPT.forward

    def forward(self, idx, targets=None, *args, **kwargs):
        out = real(self, idx, targets, *args, **kwargs)
        if targets is not None and self.training and trainer[-1]().progress.step + 1 in steps:
            return out[0] * scale, out[1]
        return out

    trainer, init = [], train.Trainer.__init__

    def remember(self, *args):
        trainer.append(weakref.ref(self))  # or we would hold the lock of its run
        init(self, *args)

    monkeypatch.setattr(train.Trainer, "__init__", remember)
    monkeypatch.setattr(train.GPT, "forward", forward)


def watch(monkeypatch) -> list[tuple[dict, bool]]:
    """(row, whether the weights moved) of each update."""
    real, seen = train.Trainer.update, []

    def update(self):
        before = [w.detach().clone() for w in self.model.parameters()]
        row = real(self)
        moved = any(not torch.equal(a, b) for a, b in zip(before, self.model.parameters(),
                                                          strict=True))
        seen.append((row, moved))
        return row

    monkeypatch.setattr(train.Trainer, "update", update)
    return seen


def test_without_being_asked_a_loss_that_is_nan_stops(run, monkeypatch):
    poison(monkeypatch, {13})
    with pytest.raises(UserError, match=r"step 13: the loss is nan.*step_000010.*skip_spikes=10"):
        run()


@pytest.mark.parametrize("flag", ["--skip_spikes=10", "--skip_spikes=inf"])
@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_when_asked_it_skips_what_is_not_finite(run, monkeypatch, capsys, flag, scale):
    poison(monkeypatch, {1, 13, 14}, scale)
    seen = watch(monkeypatch)
    code, path = run(flag)
    assert code == 0
    assert [row["step"] for row, moved in seen if not moved] == [1, 13, 14]
    assert [r["step"] for r in log(path) if r.get("skipped")] == [1, 13, 14]
    assert all(r["skipped"] is True and r["loss"] is None for r in log(path) if "skipped" in r)
    assert all(math.isfinite(r["loss"]) for r in log(path) if "loss" in r and "skipped" not in r)
    said = capsys.readouterr().out
    assert said.count(": skipped, the loss is") == 3
    assert "3 of 20 updates were skipped" in said
    assert store.check(path / "ckpt" / "step_000020")["skipped"] == 3


@pytest.mark.parametrize("flag, skipped", [("--skip_spikes=10", [25]), ("--skip_spikes=0", []),
                                           ("--skip_spikes=inf", [])])
def test_a_gradient_far_above_the_usual_is_skipped_only_late_and_when_asked(run, monkeypatch, flag,
                                                                           skipped):
    poison(monkeypatch, {12, 25}, 1000.0)
    seen = watch(monkeypatch)
    _, path = run("--max_iters=30", flag)
    assert [row["step"] for row, moved in seen if not moved] == skipped
    assert [r["step"] for r in log(path) if r.get("skipped")] == skipped


def test_twenty_in_a_row_stop(run, monkeypatch):
    poison(monkeypatch, {*range(3, 20), *range(21, 99)})
    with pytest.raises(UserError, match=r"step 40: 20 updates in a row were skipped.*step_000030"):
        run("--max_iters=60", "--skip_spikes=inf")


@pytest.mark.parametrize("flags", [[], ["--optimizer=muon", "--gradient_accumulation_steps=2"]])
def test_a_run_that_goes_on_skips_the_same_updates(run, monkeypatch, flags):
    flags = [*flags, "--max_iters=30", "--skip_spikes=10"]
    poison(monkeypatch, {12, 24, 26}, 1000.0)
    _, whole = run(*flags, out="whole")
    assert [r["step"] for r in log(whole) if r.get("skipped")] == [24, 26]
    for step in (8, 22, 24, 25):
        go_on = stop_at(monkeypatch, step)
        run(*flags)
        go_on()
    code, path = run(*flags)
    assert code == 0 and timeless(log(whole)) == timeless(log(path))
    assert weights(whole, 30) == weights(path, 30)
    a, b = (store.check(p / "ckpt" / "step_000030") for p in (whole, path))
    assert (a["mean_norm"], a["skipped"]) == (b["mean_norm"], b["skipped"]) and a["skipped"] == 2


# ----------------------------------------------------------------------------------- mistakes


def test_a_loss_that_is_not_finite_stops_the_run(run, monkeypatch):
    real = train.Trainer.update

    def update(self):
        if self.progress.step == 12:
            with torch.no_grad():
                self.model.wte.weight.fill_(math.nan)
        return real(self)

    monkeypatch.setattr(train.Trainer, "update", update)
    with pytest.raises(UserError, match="step 13: the loss is nan.*step_000010"):
        run()
    monkeypatch.setattr(train.Trainer, "update", real)
    code, path = run()
    assert code == 0 and math.isfinite(losses(path)[-1])


@pytest.mark.parametrize("flags, words", [
    (["--n_head=3"], "n_embd=32.*n_head=3"),
    (["--warmup_iters=30"], "warmup_iters=30.*20"),
    (["--min_lr=1"], "min_lr=1.*learning_rate=0.01"),
    (["--max_iters=0"], "max_iters=0"),
    (["--batch_size=-2"], "batch_size=-2"),
    (["--dropout=1.5"], "dropout=1.5"),
    (["--learning_rate=nan"], "learning_rate=nan"),
    (["--beta1=1"], "beta1=1"),
    (["--cooldown=0"], "cooldown=0"),
    (["--logn_base=9"], "logn_base=9"),
    (["--attn_logn=fixed", "--logn_base=0"], "logn_base=0"),
    (["--lr_decay_iters=0"], "lr_decay_iters=0"),
    (["--tokenizer="], "tokenizer: an empty text"),
    (["--device=tpu9"], "device=tpu9"),
    (["--device=cuda:99"], "cuda:99"),
    (["--dtype=float16", "--device=cpu"], "float16"),
    (["--init_from=nowhere"], "init_from=nowhere"),
    (["--init_from=gpt3"], "init_from=gpt3"), (["--init_from=gpt2"], "gpt2: neither a folder nor"),
])
def test_values_that_cannot_work(run, tmp_path, flags, words):
    with pytest.raises(UserError, match=words) as error:
        run(*flags)
    assert "\n" not in str(error.value)


def test_text_that_is_too_short_for_the_context(run, text_file):
    text_file.write_text("short. " * 20)
    with pytest.raises(train.UserError, match=r"(?s)val.*16"):
        run()


def test_ids_beyond_the_vocabulary_are_found_before_the_first_step(run, tmp_path):
    run("--max_iters=1", "--warmup_iters=0")
    shard = next((tmp_path / "data").glob("*/train_000000.bin"))
    raw = bytearray(shard.read_bytes())
    raw[-2:] = b"\xff\xff"
    shard.write_bytes(raw)
    with pytest.raises(train.UserError, match="65535.*257"):
        run(out="second")


# ----------------------------------------------------------------------------- kinds of data


@pytest.fixture
def chat(tmp_path) -> str:
    """Sums to learn, of many lengths; some have no place in a context of 16."""
    def sample(i: int) -> dict:
        return {"messages": [{"role": "q", "content": f"{'+' * (i % 7)}{i % 10}"},
                             {"role": "assistant", "content": "=" * (i % 5 + 1)},
                             {"role": "q", "content": "?" * (i % 3)}]}

    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(sample(i)) + "\n" for i in range(300)))
    return str(path)


def test_only_what_the_assistant_says_is_learned(run, chat, capsys):
    """The loss of the first update by hand: targets of whole samples, divided once by them all."""
    code, path = run(f"--dataset={chat}", "--max_iters=1", "--warmup_iters=0", "--block_size=32",
                     "--gradient_accumulation_steps=3")
    folder = next((path.parent / "data").glob("chat-*"))
    data = train.Dataset(folder)
    torch.manual_seed(1337)
    settings = json.loads((path / "config.json").read_text())["settings"]
    config = train.GPTConfig(vocab_size=257, n_layer=2, n_head=2, n_embd=32, block_size=32)
    assert settings["n_embd"] == 32 and settings["bias"] is False
    model = train.GPT(config)
    total = targets = 0
    for row in range(12):
        x, y = data.train.batch(row, 1, 32, 1337)
        logits = model(torch.from_numpy(x))[0]
        for logit, target in zip(logits, y[0].tolist(), strict=True):
            if target >= 0:
                total, targets = total - logit.log_softmax(0)[target].item(), targets + 1
    assert losses(path) == pytest.approx([total / targets], abs=1e-5)
    assert "of them targets" in capsys.readouterr().out


def test_a_mask_and_padding_do_not_change_what_an_update_is(run, chat):
    flags = [f"--dataset={chat}", "--block_size=24"]
    a = losses(run(*flags, "--batch_size=12", out="a")[1])
    b = losses(run(*flags, "--batch_size=3", "--gradient_accumulation_steps=4", out="b")[1])
    assert a == pytest.approx(b, abs=1e-5) and a[-1] < a[0] - 0.5


@pytest.mark.parametrize("flag", ["--align=document", "--dropout=0.2"])
def test_ten_and_ten_are_twenty_for_every_kind_of_data(run, chat, monkeypatch, flag):
    flags = [flag] + [f"--dataset={chat}", "--block_size=24"] * ("dropout" in flag)
    _, whole = run(*flags, out="whole")
    go_on = stop_at(monkeypatch, 10)
    run(*flags)
    go_on()
    _, path = run(*flags)
    assert weights(whole) == weights(path) and timeless(log(whole)) == timeless(log(path))


def test_long_samples_are_dropped_or_truncated_as_told(run, chat, capsys):
    def said(*flags) -> str:
        run(f"--dataset={chat}", "--max_iters=1", "--warmup_iters=0", "--overwrite=True",
            "--block_size=22", *flags)
        return next(line for line in capsys.readouterr().out.splitlines() if "train: " in line
                    and "longer than the context of 22" in line)

    assert "0 truncated" in said() and "0 dropped" not in said()
    assert "0 truncated" not in said("--long_samples=truncate")


def test_aligned_rows_begin_with_a_document(run, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(50):
        (texts / f"{i}.txt").write_text(f"{i} " * 30)
    free = losses(run(f"--dataset={texts}", out="free")[1])
    assert free != losses(run(f"--dataset={texts}", "--align=document", out="aligned")[1])
    with pytest.raises(train.UserError, match="--align=document"):
        run("--tokenizer=char", "--align=document", out="char")


def test_verify_finds_what_a_sample_of_the_ids_cannot(run, tmp_path):
    run("--max_iters=1", "--warmup_iters=0")
    shard = next((tmp_path / "data").glob("*/train_000000.bin"))
    raw = bytearray(shard.read_bytes())
    raw[2000] ^= 1
    shard.write_bytes(raw)
    run("--max_iters=1", "--warmup_iters=0", out="second")
    with pytest.raises(train.UserError, match="SHA-256"):
        run("--verify=True", out="third")


def test_the_sample_at_the_end_answers_what_was_held_out(run, chat, monkeypatch):
    ends = []
    monkeypatch.setattr("kit.run.report.write_sample", lambda model, tokenizer, start, end, seed:
                        ends.append((tokenizer.decode(start), end)) or "")
    run(f"--dataset={chat}", "--max_iters=1", "--warmup_iters=0", "--block_size=24", out="chat")
    run("--max_iters=1", "--warmup_iters=0")
    (asked, end), alone = ends
    assert asked.startswith("<|endoftext|>q\n") and asked.endswith("<|endoftext|>assistant\n")
    assert end == 256 and alone == ("<|endoftext|>", None)


def test_an_evaluation_that_fails_costs_no_update(run, monkeypatch):
    """What was trained is saved before the error is told, and the next start evaluates again."""
    def fail(*args):
        raise MemoryError

    run(out="whole")
    monkeypatch.setattr(train, "evaluate", fail)
    with pytest.raises(UserError, match="out of memory"):
        run()
    monkeypatch.undo()
    path = run()[1]
    assert weights(path.parent / "whole") == weights(path)
    assert timeless(log(path.parent / "whole")) == timeless(log(path))
    assert (path / "ckpt" / "step_000010").is_dir()


def test_a_default_config_is_nobodys_wish(run, tmp_path, text_file, capsys):
    """Weights of another shape than config/small.py start a run without a config file."""
    source = run()[1]
    code = train.main([f"--dataset={text_file}", f"--init_from={source}", "--max_iters=2",
                       "--warmup_iters=1", "--eval_interval=2", f"--out_dir={tmp_path / 'new'}"])
    assert code == 0 and "starting from the weights" in capsys.readouterr().out
