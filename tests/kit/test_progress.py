"""kit/progress.py: a log that is cut back and mended, a curve, a logger that may fail."""

import json
import math
import tracemalloc
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.errors import UserError
from kit.progress import (
    LONGEST_LINE,
    Log,
    Progress,
    draw_loss,
    is_number,
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
    assert [*read_log(path)] == [HEADER, train(1), train(2)]
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
    assert [r.get("loss") for r in Log(path, step=2).rows] == [None, 2.5, None]
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
    lines = [{k: v for k, v in json.loads(x).items() if v is None or is_number(v)}
             for x in whole.splitlines()[1:]]  # a log of ours holds numbers alone
    assert kept == lines[: len(kept)]
    assert len(kept) >= whole[:at].count(b"\n") - 1


def test_a_line_without_end_is_left_out(path):
    write(path, train(1))
    with path.open("a") as f:
        f.write(json.dumps({"step": 2, "note": "x" * LONGEST_LINE}) + "\n")
        f.write(json.dumps(train(3)) + "\n")
    assert [*read_log(path)] == [HEADER, train(1), train(3)]
    assert Log(path, step=3).rows == rows(path) == [HEADER, train(1), train(3)]
    longest = {"step": 4, "x" * (LONGEST_LINE - len('{"step": 4, "": 1}\n')): 1}
    log = Log(path, step=3)
    log.write(longest)
    assert [*read_log(path)][-1] == longest


def test_a_log_without_end_is_read_in_bounded_memory(path):
    """100 MB without a line end, and a hole of 4 GiB are not a row."""
    write(path, train(1))
    with path.open("ab") as f:
        f.write(b'{"step": 2' * 1_000_000)
    tracemalloc.start()
    assert [*read_log(path)] == [HEADER, train(1)]
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("step", [5, 0])
def test_a_log_that_is_a_folder_is_refused(path, step):
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises((UserError, OSError)):
        Log(path, step=step)
    assert [p.name for p in path.parent.iterdir()] == ["log.jsonl"]
    assert (path / "notes.txt").read_text() == "mine"


def test_a_log_that_is_a_link_is_not_followed(path):
    theirs = path.parent / "theirs.jsonl"
    write(theirs, train(1))
    before = theirs.read_text()
    path.symlink_to(theirs)
    with pytest.raises(UserError, match="plain file"):
        Log(path, step=5)
    Log(path).write(train(1))  # a new log takes the place of the link
    assert not path.is_symlink() and theirs.read_text() == before


def test_memory_is_bounded_while_the_file_keeps_all(path, monkeypatch):
    monkeypatch.setattr("kit.progress.MOST_ROWS", 100)
    log = Log(path)
    for step in range(1, 1001):
        log.write(train(step))
        assert len(log.rows) <= 100 + step // 50
        if step % 50 == 0:
            log.write(val(step))
    assert [r["step"] for r in rows(path) if "loss" in r] == [*range(1, 1001)]
    kept = [r["step"] for r in log.rows if "loss" in r]
    assert kept == sorted(set(kept)) and kept[0] < 40 and kept[-1] > 960
    assert max(b - a for a, b in zip(kept, kept[1:], strict=False)) <= 64
    assert [r["step"] for r in log.rows if "val_loss" in r] == [*range(50, 1001, 50)]  # all of them
    again = Log(path, step=1000, last_eval=1000)  # and no more when it goes on
    assert len(again.rows) <= 120
    assert [r["step"] for r in again.rows if "val_loss" in r] == [*range(50, 1001, 50)]
    assert len(rows(path)) == 1021


# ------------------------------------------------------------------------------------- progress


def test_progress_comes_back_from_a_checkpoint():
    p = Progress(step=7, rows=28, val_loss=2.5, finished=True, seconds={"data": 1.5}, mean_norm=0.3,
                 skipped=2, skipped_in_a_row=1)
    state = json.loads(json.dumps(asdict(p)))
    assert Progress.from_state(state) == p
    assert Progress.from_state(state | {"run": {}, "scaler": {}, "of a later one": 1}) == p
    few = {"step": 3, "rows": 12, "tokens": 96}
    assert Progress.from_state(few | {"val_loss": 2}) == Progress(**few, val_loss=2)
    for name in few:  # without these nobody could go on
        with pytest.raises(UserError, match=f"state.json: {name} is None"):
            Progress.from_state({k: v for k, v in few.items() if k != name})


@pytest.mark.parametrize("changes", [
    {"step": -1}, {"step": "3"}, {"step": 3.0}, {"step": None}, {"step": True}, {"rows": -5},
    {"rows": [1]}, {"tokens": -1}, {"val_loss": "low"}, {"best_loss": [2.0]}, {"worse": -1},
    {"finished": 1}, {"finished": "yes"}, {"finished": None}, {"seconds": None}, {"seconds": 3},
    {"elapsed_s": None}, {"elapsed_s": "1"}, {"mean_norm": None}, {"mean_norm": {}},
    {"skipped": -1}, {"skipped": 0.5}, {"skipped_in_a_row": -1}, {"last_eval": -10}, {"step": {}},
    {"best_step": "step_000010" * 1000}, {"seconds": {"data": "x"}}, {"seconds": {"data": None}},
    {"elapsed_s": -1.0}, {"elapsed_s": math.nan}, {"mean_norm": math.inf}, {"rows": 2**63},
    {"tokens": 10**400}, {"val_loss": -0.5}])
def test_a_state_of_other_types_is_refused_in_a_line(changes):
    state = asdict(Progress(step=3)) | changes
    with pytest.raises(UserError, match=f"state.json: {next(iter(changes))} is ") as error:
        Progress.from_state(state)
    assert len(str(error.value)) < 200 and "\n" not in str(error.value)


# --------------------------------------------------------------------------------------- spikes


def spikes(norms: list[float], limit: float, p: Progress | None = None) -> list[int]:
    """The numbers, from 1, of the updates that are skipped."""
    p, found = p or Progress(), []
    for norm in norms:
        if p.odd_norm(norm, limit):
            found.append(p.step + 1)
        p.step += 1
    assert p.skipped >= len(found)
    return found


def test_a_norm_is_odd_only_after_twenty_updates_and_only_when_asked():
    norms = [1.0] * 19 + [99.0] + [1.0] * 5 + [99.0, 1.0, 99.0]
    assert spikes(norms, 10) == [26, 28]  # the twentieth is before there is a usual one
    assert spikes(norms, 0) == []
    assert spikes(norms, math.inf) == []
    assert spikes([1.0] * 30 + [9.9], 10) == [] and spikes([1.0] * 30 + [10.1], 10) == [31]


@pytest.mark.parametrize("limit", [10.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_always_odd_when_asked(limit, bad):
    assert spikes([bad, 1.0, bad, bad, 1.0], limit) == [1, 3, 4]
    assert spikes([bad, 1.0, bad], 0) == []


def test_what_was_skipped_does_not_become_the_usual():
    p = Progress()
    assert spikes([1.0] * 25 + [1000.0] * 10, 10, p) == [*range(26, 36)]
    assert p.mean_norm == pytest.approx(1) and (p.skipped, p.skipped_in_a_row) == (10, 10)
    assert spikes([1.0], 10, p) == [] and (p.skipped, p.skipped_in_a_row) == (10, 0)


def test_the_usual_norm_follows_the_run_and_goes_on_with_it():
    p = Progress()
    spikes([8.0] * 50 + [1.0] * 400, 10, p)
    assert p.mean_norm == pytest.approx(1, abs=0.3)
    norms = [1.0 + (i * 7 % 5) / 10 for i in range(40)] + [30.0, 1.0, 40.0, math.nan, 1.0]
    whole, first = Progress(), Progress()
    found = spikes(norms, 10, whole)
    parts = spikes(norms[:33], 10, first)
    second = Progress.from_state(json.loads(json.dumps(asdict(first))))
    assert parts + spikes(norms[33:], 10, second) == found == [41, 43, 44]
    assert second == whole


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
    monkeypatch.setattr("kit.progress.time.perf_counter", lambda: next(now))
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
