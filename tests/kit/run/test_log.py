"""kit/run/log.py: a log that is cut back and mended."""

import json
import math
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.errors import UserError
from kit.progress import is_number
from kit.run.log import LONGEST_LINE, Log, read_log

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
    write(path, train(1), val(1))
    assert rows(path) == [HEADER, train(1), val(1)]
    assert [p.name for p in path.parent.glob("*log*")] == ["log.jsonl"]


def test_each_line_is_there_at_once(path):
    log = Log(path)
    for step in (1, 2, 3):
        log.write(train(step))
        assert rows(path)[-1] == train(step)


def test_a_run_that_starts_anew_forgets_the_old_log(path):
    write(path, train(1), train(2))
    Log(path)
    assert rows(path) == [HEADER]


def test_a_run_that_goes_on_is_cut_back_to_its_checkpoint(path):
    write(path, *(line for s in range(1, 31) for line in ([train(s)] + [val(s)] * (s % 10 == 0))))
    log = Log(path, step=25, last_eval=20)
    assert [r["step"] for r in rows(path) if "loss" in r] == list(range(1, 26))
    assert [r["step"] for r in rows(path) if "val_loss" in r] == [10, 20]
    log.write(train(26))
    assert rows(path)[0] == HEADER and rows(path)[-1] == train(26)
    assert [r for r in rows(path) if "format" in r] == [HEADER]


def test_an_evaluation_that_the_checkpoint_does_not_know_is_made_again(path):
    """Killed between evaluating and saving, or interrupted at the step of an evaluation."""
    write(path, train(9), train(10), val(10))
    Log(path, step=10, last_eval=0)
    assert rows(path) == [HEADER, train(9), train(10)]
    write(path, train(10), val(10))
    Log(path, step=10, last_eval=10)
    assert rows(path) == [HEADER, train(10), val(10)]


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
    Log(path, step=7)
    assert rows(path) == [HEADER]


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
    Log(path, step=2)
    assert [r.get("loss") for r in rows(path)] == [None, 2.5, None]


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
    Log(path, step=3)
    assert rows(path) == [HEADER, train(1), train(3)]
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
