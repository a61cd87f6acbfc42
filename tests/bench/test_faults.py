"""bench.faults: the short campaign, and that it would notice a run that is lost."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench import faults
from bench.faults import Ended, Lost, ending
from kit.errors import UserError

CLONE = Path(__file__).parents[2]
SABOTAGE = """
import json, sys
from bench import faults
from kit.run import moments, store
moments.load_state = lambda *args: None  # goes on with new momenta
store.examine = lambda run, warn: [  # takes any checkpoint for a sound one
    (folder, json.loads((folder / "state.json").read_text()))
    for folder in store.newest_first(run)]
sys.exit(faults.main(sys.argv[1:]))
"""


def campaign(command: list[str], tmp_path: Path) -> tuple[subprocess.CompletedProcess, dict]:
    """Run it with its temporary files in tmp_path/temp -> the process, its rows by fault."""
    temp = tmp_path / "temp"
    temp.mkdir()
    done = subprocess.run([sys.executable, *command], cwd=CLONE, capture_output=True, text=True,
                          env=os.environ | {"TMPDIR": str(temp), "PYTHONPATH": str(CLONE)})
    rows = json.loads(done.stdout.splitlines()[-1])["faults"] if done.stdout else []
    return done, {row["fault"]: row for row in rows}


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_is_left(tmp_path):
    flags = "--kills=1 --damages=2 --signals=1 --full=1".split()
    done, rows = campaign(["-m", "bench.faults", *flags], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {fault: row["tried"] for fault, row in rows.items() if fault != "disk full"} == {
        "kill -9 at any moment": 1, "kill -9 at a file event": 1, "SIGTERM": 1,
        "bit flipped": 1, "file truncated": 1}
    assert "disk full" in rows or "only root" in done.stderr
    assert all(row["survived"] == row["tried"] for row in rows.values())
    assert done.stdout.splitlines()[0].split() == "fault tried survived lost of them silent".split()
    left = [p.name for p in (tmp_path / "temp").iterdir()]
    assert not [name for name in left if not name.startswith("torchinductor_")]  # torch's own
    assert not (tmp_path / "out").exists() and not (tmp_path / "data").exists()  # not its folders
    mounts = Path("/proc/mounts")
    assert not mounts.exists() or str(tmp_path) not in mounts.read_text()


@pytest.mark.slow
def test_what_is_lost_or_silently_used_is_counted_and_kept(tmp_path):
    script = tmp_path / "sabotage.py"
    script.write_text(SABOTAGE)
    flags = "--kills=1 --damages=2 --signals=0 --full=0 --seed=4".split()
    done, rows = campaign([str(script), *flags], tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert rows["kill -9 at a file event"]["lost"] == 1  # with this seed in the middle of the run
    assert rows["bit flipped"]["silent"] == rows["file truncated"]["silent"] == 1
    assert "ended otherwise than the undisturbed run: " in done.stderr
    assert "not named: ckpt/best.json" in done.stderr
    work = Path(done.stderr.split("what was lost is in ")[1].strip())
    assert (work / "kill_-9_at_a_file_event-0" / "out" / "run" / "log.jsonl").exists()
    assert "going on" in (work / "kill_-9_at_a_file_event-0" / "out2.txt").read_text()


@pytest.mark.parametrize("seed", range(20))
def test_damage_is_damage(tmp_path, seed):
    path, data = tmp_path / "file", bytes(range(50))
    path.write_bytes(data)
    faults.flip(path, random.Random(seed))
    flipped = path.read_bytes()
    assert len(flipped) == 50
    assert sum((a ^ b).bit_count() for a, b in zip(data, flipped, strict=True)) == 1
    faults.truncate(path, random.Random(seed))
    assert len(path.read_bytes()) < 50 and flipped.startswith(path.read_bytes())


def test_named_is_the_file_or_its_checkpoint_beside_the_word():
    weights, config = Path("run/ckpt/step_000003/model.json"), Path("run/config.json")
    assert faults.is_named(weights, "hello\nx/model.json: damaged, set aside")
    assert faults.is_named(weights, "step_000003 is damaged")
    assert not faults.is_named(weights, "the best is step_000003")
    assert not faults.is_named(config, "something in the run is damaged")
    assert not faults.is_named(config, "damaged, I fear\nconfig.json")


def test_a_refusal_is_one_line_and_exit_code_2():
    assert Ended(2, "", "train.py: no\n", 0.1).refusal() == "train.py: no"
    for code, err in ((1, "no"), (0, "no"), (2, "Traceback\nno"), (2, ""), (-9, "")):
        with pytest.raises(Lost):
            Ended(code, "", err, 0.1).refusal()


def test_an_ending_without_a_checkpoint_is_lost(tmp_path):
    with pytest.raises(Lost, match="no complete run"):
        ending(tmp_path)


def test_wrong_use_is_one_line(monkeypatch, capsys, tmp_path):
    for flag in ("--kills=-1", "--damage=3", "--seed=x"):
        with pytest.raises(SystemExit) as stop:
            faults.main([flag])
        assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1, flag
    monkeypatch.delattr(os, "fork")
    with pytest.raises(UserError, match="Windows"):
        faults.main([])
