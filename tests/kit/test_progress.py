"""kit/progress.py: a state that comes back from a checkpoint, spikes, times."""

import json
import math
from dataclasses import asdict

import pytest

from kit.errors import UserError
from kit.progress import Progress, peak_memory, spell_time

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
        if p.is_spike(norm, limit):
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
