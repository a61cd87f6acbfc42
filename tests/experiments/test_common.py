"""The command of experiments, their trials, spreads and saved results."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from experiments import all as pages
from experiments import common
from experiments.common import Lab
from kit.errors import UserError

CLONE = Path(__file__).parents[2]
numbers = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60)


def trial(seed: int, fail: int = -1) -> dict:
    import torch

    assert torch.get_num_threads() == 1
    if seed == fail:
        raise UserError(f"seed {seed} failed")
    if fail >= 0:
        time.sleep(600)
    return {"seed": seed, "noise": torch.rand(1, generator=torch.manual_seed(seed)).item()}


@pytest.mark.slow
def test_trials_come_in_order_and_are_the_same_in_other_processes(capfd):
    jobs = [{"seed": seed} for seed in range(5)]
    found = Lab(workers=2).trials(trial, jobs)
    assert found == [trial(**job) for job in jobs]
    assert [one["seed"] for one in found] == [0, 1, 2, 3, 4]
    assert "5/5" in capfd.readouterr().err


@pytest.mark.slow
def test_a_trial_that_fails_ends_all_with_its_error_at_once():
    begun = time.monotonic()
    with pytest.raises(UserError, match="seed 1 failed"):
        Lab(workers=2).trials(trial, [{"seed": seed, "fail": 1} for seed in range(3)])
    assert time.monotonic() - begun < 300  # the first of them sleeps for ten minutes
    assert not multiprocessing.active_children()


SLEEPER = '''"""Sleeps."""
import os, pathlib, sys, time
from experiments.common import Lab
def trial(file):
    pathlib.Path(file).write_text(str(os.getpid()))
    time.sleep(600)
if __name__ == "__main__":
    import importlib
    Lab(workers=1).trials(importlib.import_module("sleeper").trial, [{"file": sys.argv[1]}])
'''


@pytest.mark.slow
@pytest.mark.parametrize("end", ["Ctrl-C", "killed", "out of memory"])
def test_no_process_outlives_the_command(tmp_path, end):
    """Ctrl-C goes to all processes of a terminal, and only one of them speaks."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    file = tmp_path / "pid"
    env = os.environ | {"PYTHONPATH": f"{CLONE}{os.pathsep}{tmp_path}"}
    parent = subprocess.Popen([sys.executable, "-m", "sleeper", str(file)], env=env, cwd=tmp_path,
                              stderr=subprocess.PIPE, text=True, start_new_session=True,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    wait(lambda: file.exists() and file.read_text())
    if end == "Ctrl-C":
        os.killpg(parent.pid, signal.SIGINT)
    elif end == "out of memory":  # the system kills the largest process
        os.kill(int(file.read_text()), signal.SIGKILL)
    else:
        parent.kill()
    said = parent.communicate(timeout=60)[1]
    assert said.count("Traceback") <= 1 and "SpawnProcess" not in said
    assert ("a process of trials was killed" in said) == (end == "out of memory")
    wait(lambda: has_ended(file.read_text()))


def has_ended(pid: str) -> bool:
    """Gone, or dead and not yet buried, where a container has nobody who does that."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_runs_are_selected_by_their_settings():
    runs = [{"arm": arm, "seed": seed} for arm in "ab" for seed in (1, 2)]
    assert common.select(runs, arm="b") == runs[2:]
    assert common.select(runs, arm="a", seed=2) == [runs[1]] and common.select(runs, arm="c") == []


def test_spreads():
    assert common.format_mean([1.0, 2.0, 3.0], 2) == "2.00 ± 1.00"
    assert common.format_mean([1.25], 1) == "1.2"
    assert common.format_difference([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]) == "+1.000 (± 0.000)"
    assert common.difference([3.0], [1.0]) == (2.0, float("inf"))


@given(numbers)
def test_the_interval_is_students(a):
    b = [0.0] * len(a)
    mean, half = common.difference(a, b)
    spread = stats.sem(a)
    assert half == pytest.approx(stats.t.ppf(0.975, len(a) - 1) * spread, rel=1e-3, abs=1e-9)
    assert mean == pytest.approx(sum(a) / len(a), abs=1e-6)


def test_tables():
    rows = [["arm", "loss"], ["tied", "1.5"], ["untied", "10.25"]]
    assert common.to_text(rows) == "arm      loss\ntied      1.5\nuntied  10.25"
    assert common.to_markdown(rows) == ("| arm | loss |\n| - | -: |\n| tied | 1.5 |\n"
                                        "| untied | 10.25 |")


def test_a_saved_result_is_read_or_named(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    file = tmp_path / "tied.json"
    for text, why in ((None, "No such file"), ("{", "Expecting"), ('{"format": 7}', "format 7"),
                      ("{}", "format"), ("[1]", "list")):
        if text:
            file.write_text(text)
        with pytest.raises(UserError, match=f"{why}.*python -m experiments.tied"):
            common.load("tied")
    file.write_text('{"format": 1, "result": 5}')
    assert common.load("tied")["result"] == 5


def test_results_are_rounded_and_lists_of_numbers_are_lines():
    text = common.to_json({"a": common.rounded([1 / 3, 2, (1e-9 / 3,)]), "b": {"c": [], "d": "[x"}})
    assert '"c": []' in text and "0.3333333" in text and "[ 3.333333e-10 ]" in text
    assert json.loads(text) == {"a": [0.3333333, 2, [3.333333e-10]], "b": {"c": [], "d": "[x"}}


def test_mistakes_are_one_line():
    for flags, said in ((["--quik"], "--quick?"), (["--workers=0"], "at least 1"),
                        (["now"], "unrecognized arguments: now")):
        done = subprocess.run([sys.executable, "-m", "experiments.scale", *flags], cwd=CLONE,
                              capture_output=True, text=True)
        assert done.returncode == 2 and said in done.stderr
        assert done.stderr.startswith("python -m experiments.scale: ")
        assert len(done.stderr.splitlines()) == 1


def test_the_page_is_that_of_the_saved_results():
    """Whoever changes a result, a table or the page by hand hears of it."""
    page = pages.PAGE.read_text(encoding="utf-8")
    blocks = {name: pages.block(name, common.load(name)) for name in pages.NAMES}
    assert pages.rebuilt(page, blocks) == page


def test_the_page_has_a_section_and_a_figure_for_each_and_results_are_whole():
    page = pages.PAGE.read_text(encoding="utf-8")
    assert page.count("**Claim.**") == page.count("**What comes out.**") == len(pages.NAMES) == 12
    for name in pages.NAMES:
        record = common.load(name)
        assert not record["quick"] and not record["commit"].endswith("+"), name
        minutes = record["seconds"] * record["workers"] / 2 / 60
        assert minutes < 30, f"{name}: {minutes:.0f} min on two cores"
        assert (common.FIGURES / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    files = {p.stem for p in (CLONE / "experiments").glob("*.py")}
    assert files - set(pages.NAMES) == {"__init__", "all", "common", "training"}


def test_a_page_without_a_place_is_refused():
    with pytest.raises(UserError, match="0 places for tied"):
        pages.rebuilt("no place", {"tied": "table"})
    for old in ("", "old\n", "old\nand older\n"):
        assert pages.rebuilt(f"<!-- a -->\n{old}<!-- /a -->", {"a": r"\1 new"}) == (
            "<!-- a -->\n\\1 new\n<!-- /a -->")


@pytest.mark.slow
@pytest.mark.parametrize("name", pages.NAMES)
def test_a_figure_can_be_drawn_from_the_saved_result(name, tmp_path):
    import importlib

    record = json.loads((common.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    common.figure(importlib.import_module(f"experiments.{name}"), record["result"],
                  tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
