"""Experiments learn from one text: it is prepared once for all their tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import common

CLONE = Path(__file__).parents[2]


@pytest.fixture
def shared_text(tmp_path_factory, monkeypatch) -> Path:
    """A folder of data sets for all tests and processes of this run."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    monkeypatch.setenv("BONSAI_DATA", str(base / "experiments-data"))
    return base


@pytest.fixture
def quick(tmp_path, shared_text, monkeypatch, capsys):
    """quick(name): run the experiment's quick form, its trials in this process -> the result."""

    def run(name: str) -> dict:
        monkeypatch.setattr(common.Lab, "trials", lambda lab, trial, jobs: [
            trial(**job) for job in jobs])
        assert common.main(name, ["--quick"]) == 0
        assert len(capsys.readouterr().out.splitlines()) > 1  # a table
        return saved(tmp_path, name)

    return run


@pytest.fixture
def command(tmp_path, shared_text):
    """command(name): the same as a command, its trials in a process of their own."""

    def run(name: str) -> dict:
        done = subprocess.run([sys.executable, "-m", f"experiments.{name}", "--quick",
                               "--workers=1"], cwd=CLONE, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) > 1
        return saved(tmp_path, name)

    return run


def saved(tmp_path: Path, name: str) -> dict:
    picture = tmp_path / "out" / "experiments" / f"{name}.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    record = json.loads(picture.with_suffix(".json").read_text(encoding="utf-8"))
    assert record["quick"] and record["name"] == name
    return record["result"]
