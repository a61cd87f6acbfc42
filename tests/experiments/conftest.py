"""Experiments learn from one text: it is prepared once for all their tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]


@pytest.fixture
def shared_text(tmp_path_factory, monkeypatch) -> Path:
    """A folder of data sets for all tests and processes of this run."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    monkeypatch.setenv("BONSAI_DATA", str(base / "experiments-data"))
    return base


@pytest.fixture
def quick(tmp_path, shared_text):
    """quick(name): run the experiment's quick form as its command -> the result."""

    def run(name: str) -> dict:
        done = subprocess.run([sys.executable, "-m", f"experiments.{name}", "--quick",
                               "--workers=1"], cwd=CLONE, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) > 1  # a table
        picture = tmp_path / "out" / "experiments" / f"{name}.png"
        assert picture.read_bytes()[:4] == b"\x89PNG"
        record = json.loads(picture.with_suffix(".json").read_text(encoding="utf-8"))
        assert record["quick"] and record["name"] == name
        return record["result"]

    return run
