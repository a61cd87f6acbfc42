"""kit/metrics.py: a log that is cut back and mended, a curve, a logger that may fail."""

import json
import math
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.metrics import (
    Log,
    Progress,
    Wandb,
    draw_loss,
    peak_memory,
    read_log,
    running_mean,
    spell_time,
)

HEADER = {"format": 1, "step": 0}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "log.jsonl"


def rows(path: Path) -> list[dict]:
    """All lines, each of which must be JSON as everyone reads it: no NaN, no Infinity."""
    def no(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=no) for line in text.splitlines()]


def train(step: int) -> dict:
    return {"step": step, "loss": 5.0 - step / 10}


def val(step: int) -> dict:
    return {"step": step, "val_loss": 4.0, "val_bpb": 2.0}


def write(path: Path, *lines: dict) -> Log:
    log = Log(path)
    for line in lines:
        log.write(line)
    return log


# -------------------------------------------------------------------------------------- the log


def test_a_new_log_has_a_header_and_then_one_object_a_line(path):
    log = write(path, train(1), val(1))
    assert rows(path) == log.rows == [HEADER, train(1), val(1)]
    assert [p.name for p in path.parent.glob("*log*")] == ["log.jsonl"]


def test_each_line_is_there_at_once(path):
    log = Log(path)
    for step in (1, 2, 3):
        log.write(train(step))
        assert rows(path)[-1] == train(step)


def test_a_run_that_starts_anew_forgets_the_old_log(path):
    write(path, train(1), train(2))
    assert Log(path).rows == rows(path) == [HEADER]


def test_a_run_that_goes_on_is_cut_back_to_its_checkpoint(path):
    write(path, *(line for s in range(1, 31) for line in ([train(s)] + [val(s)] * (s % 10 == 0))))
    log = Log(path, step=25, last_eval=20)
    assert rows(path) == log.rows
    assert [r["step"] for r in log.rows if "loss" in r] == list(range(1, 26))
    assert [r["step"] for r in log.rows if "val_loss" in r] == [10, 20]
    log.write(train(26))
    assert rows(path)[0] == HEADER and rows(path)[-1] == train(26)
    assert [r for r in rows(path) if "format" in r] == [HEADER]


def test_an_evaluation_that_the_checkpoint_does_not_know_is_made_again(path):
    """Killed between evaluating and saving, or interrupted at the step of an evaluation."""
    write(path, train(9), train(10), val(10))
    assert Log(path, step=10, last_eval=0).rows == [HEADER, train(9), train(10)]
    write(path, train(10), val(10))
    assert Log(path, step=10, last_eval=10).rows == [HEADER, train(10), val(10)]


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b'{"step": 3', b"{", b"\xff\xfe", b"\0" * 50,
                                  b'{"step": "3"}', b"[3]", b"3", b"null", b'{"loss": 1}', b"\n\n",
                                  '{"step": 3, "name": "é'.encode()[:-1], b"[" * 100_000])
def test_a_torn_line_is_left_out(path, torn):
    write(path, train(1), train(2))
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert read_log(path) == [HEADER, train(1), train(2)]
    log = Log(path, step=5)
    assert path.read_bytes() == whole
    log.write(train(3))
    assert rows(path) == [HEADER, train(1), train(2), train(3)]


def test_a_log_that_is_gone_begins_again(path):
    assert Log(path, step=7).rows == rows(path) == [HEADER]


def test_cutting_back_is_done_aside(path, monkeypatch):
    write(path, train(1), train(2))
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError):
        Log(path, step=1)
    assert path.read_bytes() == before


def test_numbers_that_json_lacks_become_null(path):
    """As the gradient norm of an update that the fp16 scaler skips."""
    write(path, {"step": 1, "loss": 2.5, "grad_norm": math.inf}, {"step": 2, "loss": math.nan})
    assert rows(path)[1:] == [{"step": 1, "loss": 2.5, "grad_norm": None},
                              {"step": 2, "loss": None}]
    assert Log(path, step=2).rows == rows(path)
    draw_loss(Log(path, step=2).rows, path.parent / "loss.png", "x")


@settings(max_examples=40, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.sampled_from(["loss", "val_loss", "note"]), st.none() | st.text()
                                | st.floats(allow_nan=False, allow_infinity=False))), st.data())
def test_a_log_cut_anywhere_keeps_its_whole_lines(path, extra, data):
    write(path, *({"step": i + 1} | row for i, row in enumerate(extra)))
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:at])
    kept = [r for r in read_log(path) if "format" not in r]
    lines = [json.loads(x) for x in whole.splitlines()[1:]]
    assert kept == lines[: len(kept)]
    assert len(kept) >= whole[:at].count(b"\n") - 1


# ----------------------------------------------------------------------------------------- wandb


class Fake:
    """A wandb whose `fails` call raises."""

    def __init__(self, fails: str = "", error: Exception | None = None):
        self.fails, self.error = fails, error or RuntimeError("no network\nat all")
        self.calls = []
        self.run = SimpleNamespace(log=self.call("log"), finish=self.call("finish"))
        self.init = self.call("init", self.run)

    def call(self, name: str, result=None):
        def do(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            if name == self.fails:
                raise self.error
            return result

        return do


def use(monkeypatch, fake, on: bool = True) -> tuple[list[str], list[str]]:
    """A whole run with wandb: the names of the calls, the warnings."""
    monkeypatch.setitem(sys.modules, "wandb", fake)
    said = []
    wandb = Wandb(on, "project", "name", {"a": 1}, said.append)
    for step in (1, 2, 3):
        wandb.log(train(step))
    wandb.finish()
    return [c[0] for c in getattr(fake, "calls", [])], said


def test_wandb_sees_every_row_once_in_order(monkeypatch):
    fake = Fake()
    assert use(monkeypatch, fake) == (["init", "log", "log", "log", "finish"], [])
    assert fake.calls[0][2] == {"project": "project", "name": "name", "config": {"a": 1}}
    assert [c[1:] for c in fake.calls[1:4]] == [((train(s),), {"step": s}) for s in (1, 2, 3)]


def test_wandb_is_off_by_default_and_not_even_imported(monkeypatch):
    assert use(monkeypatch, None, on=False) == ([], [])  # None in sys.modules fails to import


@pytest.mark.parametrize("fails, calls", [("init", ["init"]), ("log", ["init", "log"]),
                                          ("finish", ["init", "log", "log", "log", "finish"])])
@pytest.mark.parametrize("error", [RuntimeError("no network\nat all"), ConnectionError(),
                                   OSError(28, "disk full"), TypeError("x")])
def test_a_wandb_that_fails_is_one_warning_and_the_run_goes_on(monkeypatch, fails, calls, error):
    seen, said = use(monkeypatch, Fake(fails, error))
    assert seen == calls and len(said) == 1
    assert "wandb is off" in said[0] and type(error).__name__ in said[0]
    assert len(said[0].splitlines()) == 1


def test_a_wandb_that_is_missing_is_one_warning(monkeypatch):
    calls, said = use(monkeypatch, None)
    assert calls == [] and len(said) == 1 and "wandb is off" in said[0]


# ----------------------------------------------------------------------------------------- curve


@pytest.mark.parametrize("lines", [
    [], [HEADER], [HEADER, train(1)], [HEADER, val(1)], [HEADER, train(1), val(1)],
    [HEADER, *(train(s) for s in range(1, 3001)), *(val(s) for s in range(100, 3001, 100))],
    [{"step": 1, "val_loss": 3.0, "val_bpb": None}], [{"step": 1, "val_loss": 3.0}],
    [{"step": 1, "val_loss": 3.0, "val_bpb": 0.0}, {"step": 1, "val_loss": 3.0, "val_bpb": 1.0}],
    [{"step": 5, "note": "neither"}],
], ids=lambda rows: str(len(rows)))
def test_a_curve_is_drawn_whatever_there_is(tmp_path, lines):
    path = tmp_path / "loss.png"
    path.write_bytes(b"the old one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of a legend without entries
        draw_loss(lines, path, "run")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n") and data.endswith(b"IEND\xaeB`\x82")
    assert [p.name for p in tmp_path.glob("*loss*")] == ["loss.png"]


def test_a_title_is_text_not_mathematics(tmp_path):
    draw_loss([train(1)], tmp_path / "loss.png", "costs $5_{ and $6 \\frac")
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_drawing_leaves_the_callers_matplotlib_alone(tmp_path):
    import matplotlib.pyplot as plt

    before = plt.get_backend(), plt.get_fignums()
    draw_loss([train(1)], tmp_path / "loss.png", "run")
    assert (plt.get_backend(), plt.get_fignums()) == before


def test_time_is_counted_by_what_took_it(monkeypatch):
    now = iter([0.0, 1.0, 5.0, 5.5, 7.0, 9.0])
    monkeypatch.setattr("kit.metrics.time.perf_counter", lambda: next(now))
    progress = Progress()
    for what in ("data", "optimizer", "data"):
        with progress.timed(what):
            pass
    assert progress.seconds == {"data": 3.0, "optimizer": 0.5}
    progress.elapsed_s = 10.0
    assert progress.shares() == "data 30.0%, optimizer 5.0%, other 65.0%"
    progress.elapsed_s = 0.0  # a clock that jumped back
    assert progress.shares() == "data 85.7%, optimizer 14.3%, other 0.0%"


def test_running_mean():
    assert running_mean([]) == [] and running_mean([3.0]) == [3.0]
    assert running_mean([9.0, 1.0] + [3.0] * 198)[1] == 5.0  # the first value does not linger
    assert running_mean((5.0,) * 100) == pytest.approx([5.0] * 100)  # also at its start
    mean = running_mean([0.0] * 100 + [1.0] * 100, share=0.05)  # over about 10
    assert mean[99] == 0 and 0.05 < mean[100] < 0.2 and mean[-1] > 0.99
    assert all(a <= b for a, b in zip(mean, mean[1:], strict=False))


# ----------------------------------------------------------------------------------- small things


@pytest.mark.parametrize("seconds, words", [
    (0, "0 s"), (0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (75, "1 min 15 s"),
    (3599.4, "59 min 59 s"), (3599.6, "1 h 0 min"), (3661, "1 h 1 min"), (90000, "25 h 0 min")])
def test_spell_time(seconds, words):
    assert spell_time(seconds) == words


def test_peak_memory_is_in_bytes_and_only_grows():
    before = peak_memory("cpu")
    assert 2**26 < before < 2**40  # torch alone takes more than 64 MiB
    assert peak_memory("cpu") >= before
