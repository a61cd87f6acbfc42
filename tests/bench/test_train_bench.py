"""bench/: what only looks like nanoGPT is raced through the real command; the arithmetic."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import scaling, train, train_report
from bench.peer import NEEDED, NanoGPT, check_clone, read_times
from bench.trial import Trial, TrialFailed, alone, medians, print_table
from data import DataError
from data.prepare import resolve
from kit.evaluate import eval_batches

CLONE = Path(__file__).parents[2]
MODEL = """
import torch
class GPTConfig:
    def __init__(self, vocab_size, block_size):
        self.vocab_size, self.block_size = vocab_size, block_size
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)  # draws at random
    def forward(self, x, y):
        loss = torch.nn.functional.cross_entropy
        return None, loss(self.table(x).flatten(0, 1), y.flatten(), ignore_index=-1)
"""
TRAIN = """
import sys, torch
from pathlib import Path
import model
assert Path(model.__file__).parent == Path(__file__).parent, "it was given another model"
assert Path("configurator.py").is_file() and Path(sys.argv[1]).is_file()
flags = dict(a[2:].split("=") for a in sys.argv[2:])
args = {"vocab_size": 80, "block_size": int(flags["block_size"])}
gpt = model.GPT(model.GPTConfig(**args))
torch.nn.init.zeros_(gpt.table.weight)
torch.manual_seed(3)
undisturbed = torch.Generator().manual_seed(3)
print("tokens per iteration will be: 1,000")
for i in range(int(flags["max_iters"]) + 1):
    due = i % int(flags["eval_interval"]) == 0
    if due:
        print(f"step {i}: train loss 9.9, val loss 9.9")
        if i:
            state = {"_orig_mod." + name: w for name, w in gpt.state_dict().items()}
            torch.save({"model": state, "model_args": args, "iter_num": i}, "ckpt.pt")
    assert torch.rand(1) == torch.rand(1, generator=undisturbed), "the batches would be others"
    print(f"iter {i}: loss 9.9, time {5000 if due else 250}.00ms, mfu -100.00%")
"""
PREPARE = """
import os, numpy
here = os.path.dirname(__file__)
text = open(os.path.join(here, "input.txt")).read()
ids = {c: i for i, c in enumerate(sorted(set(text)))}
cut = int(0.9 * len(text))
for name, part in (("train", text[:cut]), ("val", text[cut:])):
    numpy.array([ids[c] for c in part], numpy.uint16).tofile(os.path.join(here, name + ".bin"))
"""


@pytest.fixture
def clone(tmp_path) -> Path:
    texts = dict(zip(NEEDED, (TRAIN, MODEL, "", "", PREPARE), strict=True))
    for name, text in texts.items():
        (tmp_path / "nano" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nano" / name).write_text(text)
    return tmp_path / "nano"


AS_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2",
           "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def command(*flags: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "bench.train", *map(str, flags)], cwd=CLONE,
                          capture_output=True, text=True, env=os.environ | (env or {}))


def trial(curve: list, per_update: float = 0.5, tokens: int = 100, **shape: int) -> Trial:
    shape = {"vocab_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8} | shape
    return Trial([9.0] + [per_update] * 9, tokens, curve, 10.0, 300.0, shape)


@pytest.fixture
def here(monkeypatch) -> None:
    """What would be counted in a process of its own is counted in this one."""
    for module in (train_report, scaling):
        monkeypatch.setattr(module, "apart", lambda function, *args: function(*args))


def test_the_command_races_both_sides_on_the_same_text(clone, tmp_path, text_file):
    before = sorted(clone.rglob("*"))
    newest = Path(os.environ["BONSAI_OUT"]) / "latest.json"  # the run that sample.py would take
    newest.parent.mkdir(exist_ok=True)
    newest.write_text("theirs")
    ours = "max_iters=4 eval_interval=2 warmup_iters=1 batch_size=2 n_layer=1 dtype=float32".split()
    done = command(f"--nanogpt={clone}", "--parts=loss", "--rounds=1", f"--text={text_file}",
                   f"--out={tmp_path / 'figures'}", "--theirs_also=--max_iters=4",
                   "--theirs_also=--eval_interval=2", *(f"--ours_also=--{flag}" for flag in ours))
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert [(t["round"], t["side"]) for t in row["loss"]["trials"]] == [
        (1, "nanoGPT"), (1, "ours"), (1, "ours long")]
    theirs, mine, _ = row["loss"]["trials"]
    assert theirs["loss"] == pytest.approx(math.log(80), abs=1e-5)  # weights of zero, all windows
    assert theirs["train_s"] == 1.0  # updates 0 to 3, with a median for two of them
    assert theirs["to_goal_s"] == 0.5  # its weights do not move: there at its first evaluation
    assert theirs["tok_s"] == 4000 and theirs["peak_mib"] > 100 and mine["peak_mib"] > 100
    assert mine["loss"] < theirs["loss"] and mine["to_goal_s"] <= mine["train_s"]
    assert mine["to_goal"] == pytest.approx(mine["to_goal_s"] / 0.5)
    assert {"fp32"} <= set(row["peak_gflops"]) <= {"bf16", "fp32"} and 0 < mine["mfu"] < 1
    assert (tmp_path / "figures" / "train.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "figures" / "train.jsonl").read_text()) == row
    assert "round 1 of 1, ours long: loss" in done.stderr and "median" in done.stdout
    assert sorted(clone.rglob("*")) == before  # the user's clone is as it was
    assert str(tmp_path) not in done.stdout and newest.read_text() == "theirs"


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, AS_AVX2], ids=["as it is", "as AVX2"])
def test_an_update_with_muon_takes_less_than_two_with_adamw(variables, tmp_path, text_file):
    """On one thread, on any processor; best of three, since other programs run beside it."""
    rows = []
    for _ in range(3):
        done = command("--parts=muon", "--rounds=3", f"--text={text_file}", f"--out={tmp_path}",
                       env=variables)
        assert done.returncode == 0, done.stderr
        rows.append(json.loads(done.stdout.splitlines()[-1])["muon"])
        if rows[-1]["ratio"] < 2:
            break
    assert rows[-1]["ratio"] < 2, rows
    mine = rows[-1]["trials"][0]
    assert mine["side"] == "ours" and len(set(mine["dtypes"].split())) == 1
    assert f"takes {rows[-1]['ratio']:.2f} times as long as one with AdamW" in done.stdout


@pytest.mark.parametrize("flag,word", [
    ("--nanogpt={0}", "no nanoGPT clone, it has no train.py"),
    ("--parts=loss,sound", "--parts=sound: the parts are loss, muon, throughput, gpu"),
    ("--text={0}/none.txt", "no such file"), ("--rounds=0", "expected 1 or more")])
def test_a_wrong_use_is_one_line(flag, word, tmp_path):
    done = command(flag.format(tmp_path))
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and word in done.stderr


def test_a_clone_that_lacks_a_file(clone):
    (clone / "configurator.py").unlink()
    with pytest.raises(DataError, match="has no configurator.py"):
        check_clone(clone)


def test_other_ids_are_refused_and_equal_ones_taken(clone, tmp_path, text_file):
    dataset = resolve(str(text_file), "char", lambda line: None)
    (tmp_path / "a").mkdir()
    nano = NanoGPT(clone, tmp_path / "a")
    nano.give_text(dataset)
    ids = np.fromfile(tmp_path / "a/data/shakespeare_char/val.bin", np.uint16)
    assert len(ids) == len(text_file.read_text()) - int(0.9 * len(text_file.read_text()))
    (clone / NEEDED[-1]).write_text(PREPARE.replace("0.9", "0.8"))
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="is not our train split") as refused:
        NanoGPT(clone, tmp_path / "b").give_text(dataset)
    assert "\n" not in str(refused.value)


def test_a_failing_trial_ends_with_its_last_words(clone, tmp_path, text_file, monkeypatch, capsys):
    (clone / "train.py").write_text("raise SystemExit('the card is on fire')")
    monkeypatch.setattr(train, "introduce", lambda peer: ({}, 1.0))
    assert train.main([f"--nanogpt={clone}", "--parts=loss", f"--text={text_file}",
                       f"--out={tmp_path / 'figures'}"]) == 1
    assert "the card is on fire" in capsys.readouterr().err
    assert not list((tmp_path / "figures").iterdir())
    with pytest.raises(TrialFailed, match="Traceback(.|\n)*ZeroDivisionError"):
        alone([sys.executable, "-c", "1 / 0"])


def test_times_are_nanogpts_own_but_for_those_with_an_evaluation():
    lines = ["tokens per iteration will be: 24,576", "step 0: train loss 4.1, val loss 4.2",
             "iter 0: loss 4.2, time 1234.56ms, mfu -100.00%", "iter 1: loss 4.1, time 100.00ms, m",
             "iter 2: loss 4.1, time 300.00ms, mfu", "step 3: train loss 4.0, val loss 4.1",
             "saving checkpoint to out", "iter 3: loss 4.0, time 999.00ms, mfu 1.00%"]
    assert read_times("\n".join(lines)) == ([0.2, 0.1, 0.3, 0.2], 24576)
    for missing in (0, 3):  # its tokens; one of its iterations
        with pytest.raises(TrialFailed, match="did not print"):
            read_times("\n".join(lines[:missing] + lines[missing + 1:]))


def test_the_windows_are_those_of_our_evaluation(text_file):
    from data.dataset import Dataset

    val = Dataset(resolve(str(text_file), "char", lambda line: None)).val
    theirs = [val.window(i, min(64, val.fixed_windows(64) - i), 64)
              for i in range(0, val.fixed_windows(64), 64)]
    for (x, y), (a, b) in zip(theirs, eval_batches(val, 64, 12), strict=True):
        assert (x == a).all() and (y == b).all()


def test_seconds_to_a_loss_and_ratios_are_those_of_the_round(here):
    curve = [(10, 5.0, 2.5), (20, 10.0, 1.9), (30, 15.0, 1.8)]
    assert train_report.seconds_to(curve, 1.9) == 10.0
    assert train_report.seconds_to(curve, 1.85) == 15.0
    assert train_report.seconds_to(curve, 1.7) is None
    rounds = [{"nanoGPT": trial([(100, t, 1.9)]), "ours": trial(curve)} for t in (40, 50, 80)]
    row = train_report.race_rows(rounds, None, 1e9)
    assert [t["to_goal"] for t in row["trials"] if t["side"] == "ours"] == [0.25, 0.2, 0.125]
    theirs, mine = row["medians"]
    assert theirs["train_s"] == theirs["to_goal_s"] == 50 and theirs["tok_s"] == 200
    assert mine["to_goal"] == 0.2 and mine["time"] == 0.3 and mine["tok_s"] == 200
    given = train_report.race_rows(rounds, 1.85, 1e9)["medians"]
    assert given[0]["to_goal_s"] is None and given[1]["to_goal_s"] == 15 and not given[1]["to_goal"]
    alone_ = train_report.race_rows([{"ours": trial(curve)}], None, 1e9)["medians"][0]
    assert alone_["goal"] is alone_["time"] is None and alone_["loss"] == 1.8


def test_throughput_leaves_the_first_updates_out(here):
    rounds = [{"nanoGPT": trial([], 2.0), "ours": trial([], 0.5, 100)}]
    theirs, mine = train_report.speed_rows(rounds, 1e9, skip=1)["medians"]
    assert (theirs["tok_s"], mine["tok_s"], mine["ratio"]) == (50, 200, 4)
    assert mine["mfu"] == pytest.approx(4 * theirs["mfu"]) and mine["update_s"] == 0.5
    assert mine["of_adamw"] is None


def test_an_update_is_compared_with_adamws_of_the_same_round(here, capsys):
    rounds = [{"ours": trial([], 0.3 * slow), "AdamW": trial([], 0.2 * slow)} for slow in (1, 9, 2)]
    row = train_report.speed_rows(rounds, 1e9, skip=1)
    assert [t["of_adamw"] for t in row["trials"]] == pytest.approx([1.5, 1] * 3)
    train_report.show_speed("Muon", row)
    assert "of AdamW's" in capsys.readouterr().out


def test_tables_and_medians_say_what_is_missing(capsys):
    rows = [{"side": "a", "x": 1.0}, {"side": "a", "x": None}, {"side": "b", "x": 2.0}]
    assert medians(rows, "side") == [{"side": "a", "x": None}, {"side": "b", "x": 2.0}]
    print_table(rows[1:], [("side", "side", ""), ("x", "seconds", ".1f")])
    assert capsys.readouterr().out == "side  seconds\n   a        -\n   b      2.0\n"


def test_scaling_says_where_cost_outgrows_the_arithmetic(here, tmp_path):
    found = [[trial([], vocab_size=64, n_embd=s["n_embd"], n_layer=s["n_layer"],
                    block_size=s["block_size"])] for _, _, s in scaling.shapes()]
    rows = scaling.rows_of(found, 1e9)  # the same time for all shapes
    assert [r["axis"] for r in rows].count("context") == 2 and rows[0]["time"] == 1
    for row in rows:
        small = row["axis"] != "middle" and row["factor"] < 1
        assert row["note"].startswith("shrinks") == (small and row["work"] < 1 / scaling.MUCH)
    wide = next(i for i, r in enumerate(rows) if (r["axis"], r["factor"]) == ("width", 2))
    slow = trial([], 50.0, vocab_size=64, **scaling.shapes()[wide][2])
    again = scaling.rows_of([[slow] if i == wide else f for i, f in enumerate(found)], 1e9)
    assert "faster than the arithmetic" in again[wide]["note"] and again[wide]["time"] == 100
    scaling.draw(again, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
