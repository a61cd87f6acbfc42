"""bench/: what only looks like nanoGPT is raced through the real command; the arithmetic."""

import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import train
from bench.common import ProcessFailed, print_table, run_process
from bench.nanogpt import NEEDED, NanoGPT, Trial, check_clone, read_times
from data.dataset import Dataset
from data.prepare import resolve
from kit.errors import UserError
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


@pytest.fixture
def clone(tmp_path) -> Path:
    texts = dict(zip(NEEDED, (TRAIN, MODEL, "", ""), strict=True))
    for name, text in texts.items():
        (tmp_path / "nano" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nano" / name).write_text(text)
    return tmp_path / "nano"


def trial(curve: list, per_update: float = 0.5, tokens: int = 100) -> Trial:
    return Trial([9.0] + [per_update] * 9, tokens, curve, 10.0, 300.0)


def test_both_sides_are_raced_on_the_same_text(clone, tmp_path, text_file, monkeypatch, capsys):
    before = sorted(clone.rglob("*"))
    newest = Path(os.environ["BONSAI_OUT"]) / "latest.json"  # the run that sample.py would take
    newest.parent.mkdir(exist_ok=True)
    newest.write_text("theirs")
    tiny = tmp_path / "tiny.py"
    tiny.write_text("max_iters = 4\neval_interval = 2\nwarmup_iters = 1\nbatch_size = 2\n"
                    "n_layer = 1\nn_head = 1\nn_embd = 32\nblock_size = 16\ndtype = 'float32'\n")
    monkeypatch.setattr(train, "CHARS", str(tiny))
    monkeypatch.setattr(train, "CHARS_LONG", str(tiny))
    monkeypatch.setattr(train, "NANOGPT_CHARS", [
        *train.NANOGPT_CHARS, "--max_iters=4", "--eval_interval=2"])
    assert train.main([f"--nanogpt={clone}", "--parts=loss", "--rounds=1", f"--text={text_file}",
                       f"--out={tmp_path / 'figures'}"]) == 0
    out, err = capsys.readouterr()
    row = json.loads(out.splitlines()[-1])
    assert [(t["round"], t["side"]) for t in row["loss"]["trials"]] == [
        (1, "nanoGPT"), (1, "ours"), (1, "ours long")]
    theirs, mine, _ = row["loss"]["trials"]
    assert theirs["loss"] == pytest.approx(math.log(80), abs=1e-5)  # weights of zero, all windows
    assert theirs["train_s"] == 1.0  # updates 0 to 3, with a median for two of them
    assert theirs["to_goal_s"] == 0.5  # its weights do not move: there at its first evaluation
    assert theirs["tok_s"] == 4000 and theirs["peak_mib"] > 100 and mine["peak_mib"] > 100
    assert mine["loss"] < theirs["loss"] and mine["to_goal_s"] <= mine["train_s"]
    assert mine["to_goal"] == pytest.approx(mine["to_goal_s"] / 0.5) and 0 < mine["mfu"] < 1
    assert (tmp_path / "figures" / "train.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "figures" / "train.jsonl").read_text()) == row
    assert "round 1 of 1, ours long: " in err and "median" in out
    assert sorted(clone.rglob("*")) == before  # the user's clone is as it was
    assert str(tmp_path) not in out and newest.read_text() == "theirs"


@pytest.mark.parametrize("flag,word", [
    ("--nanogpt={0}", "no nanoGPT clone, it has no train.py"),
    ("--parts=loss,sound", "--parts=sound: the parts are loss, muon, throughput"),
    ("--text={0}/none.txt", "no such file"), ("--rounds=0", "expected more than 0")])
def test_a_wrong_use_is_one_line(flag, word, tmp_path):
    done = subprocess.run([sys.executable, "-m", "bench.train", flag.format(tmp_path)], cwd=CLONE,
                          capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and word in done.stderr


def test_a_clone_that_lacks_a_file(clone):
    (clone / "configurator.py").unlink()
    with pytest.raises(UserError, match="has no configurator.py"):
        check_clone(clone)


def test_it_reads_our_ids(clone, tmp_path, text_file):
    dataset = resolve(str(text_file), "char", lambda line: None)
    (tmp_path / "a").mkdir()
    NanoGPT(clone, tmp_path / "a").give(dataset, "shakespeare_char", 80)
    folder = tmp_path / "a" / "data" / "shakespeare_char"
    ids = np.fromfile(folder / "val.bin", np.uint16)
    assert len(ids) == len(text_file.read_text()) - int(0.9 * len(text_file.read_text()))
    val = Dataset(dataset).val
    assert (ids == val.read(0, val.n)).all()
    assert pickle.loads((folder / "meta.pkl").read_bytes()) == {"vocab_size": 80}


def test_a_failing_trial_ends_with_its_last_words(clone, tmp_path, text_file, capsys):
    (clone / "train.py").write_text("raise SystemExit('the card is on fire')")
    assert train.main([f"--nanogpt={clone}", "--parts=loss", f"--text={text_file}",
                       f"--out={tmp_path / 'figures'}"]) == 1
    assert "the card is on fire" in capsys.readouterr().err
    assert not (tmp_path / "figures").exists()
    with pytest.raises(ProcessFailed, match="Traceback(.|\n)*ZeroDivisionError"):
        run_process([sys.executable, "-c", "1 / 0"])


def test_times_are_nanogpts_own_but_for_those_with_an_evaluation():
    lines = ["tokens per iteration will be: 24,576", "step 0: train loss 4.1, val loss 4.2",
             "iter 0: loss 4.2, time 1234.56ms, mfu -100.00%", "iter 1: loss 4.1, time 100.00ms, m",
             "iter 2: loss 4.1, time 300.00ms, mfu", "step 3: train loss 4.0, val loss 4.1",
             "saving checkpoint to out", "iter 3: loss 4.0, time 999.00ms, mfu 1.00%"]
    assert read_times("\n".join(lines)) == ([0.2, 0.1, 0.3, 0.2], 24576)
    for missing in (0, 3):  # its tokens; one of its iterations
        with pytest.raises(ProcessFailed, match="did not print"):
            read_times("\n".join(lines[:missing] + lines[missing + 1:]))


def test_the_windows_are_those_of_our_evaluation(text_file):
    val = Dataset(resolve(str(text_file), "char", lambda line: None)).val
    theirs = [val.window(i, min(64, val.fixed_windows(64) - i), 64)
              for i in range(0, val.fixed_windows(64), 64)]
    for (x, y), (a, b) in zip(theirs, eval_batches(val, 64, 12), strict=True):
        assert (x == a).all() and (y == b).all()


def test_seconds_to_a_loss_and_ratios_are_those_of_the_round():
    curve = [(10, 5.0, 2.5), (20, 10.0, 1.9), (30, 15.0, 1.8)]
    assert train.seconds_to(curve, 1.9) == 10.0
    assert train.seconds_to(curve, 1.85) == 15.0
    assert train.seconds_to(curve, 1.7) is None
    rounds = [{"nanoGPT": trial([(100, t, 1.9)]), "ours": trial(curve)} for t in (40, 50, 80)]
    row = train.figures(rounds)
    assert [t["to_goal"] for t in row["trials"] if t["side"] == "ours"] == [0.25, 0.2, 0.125]
    theirs, mine = row["medians"]
    assert theirs["train_s"] == theirs["to_goal_s"] == 50 and theirs["tok_s"] == 200
    assert mine["to_goal"] == 0.2 and mine["train_s"] == 15 and mine["tok_s"] == 200
    alone = train.figures([{"ours": trial(curve)}])["medians"][0]
    assert alone["to_goal_s"] is alone["ratio"] is None and alone["loss"] == 1.8


def test_throughput_leaves_the_first_updates_out():
    rounds = [{"nanoGPT": trial([], 2.0), "ours": trial([], 0.5, 100)}]
    theirs, mine = train.figures(rounds, skip=1)["medians"]
    assert (theirs["tok_s"], mine["tok_s"], mine["ratio"]) == (50, 200, 4)
    assert mine["update_s"] == 0.5 and mine["loss"] is None


def test_an_update_is_compared_with_adamws_of_the_same_round(capsys):
    rounds = [{"ours": trial([], 0.3 * slow), "AdamW": trial([], 0.2 * slow)} for slow in (1, 9, 2)]
    row = train.figures(rounds, skip=1, base="AdamW")
    assert [t["ratio"] for t in row["trials"]] == pytest.approx([2 / 3, 1] * 3)
    train.print_figures("Muon", row)
    out = capsys.readouterr().out
    assert "x AdamW's" in out and "last loss" not in out  # no column without a figure


def test_tables_and_medians_say_what_is_missing(capsys):
    rows = [{"round": 1, "side": side, "dtypes": None, "x": x}
            for side, x in (("a", 1.0), ("a", None), ("b", 2.0))]
    assert [(row["side"], row["x"]) for row in train.medians(rows)] == [("a", None), ("b", 2.0)]
    print_table(rows[1:], [("side", "side", ""), ("x", "seconds", ".1f")])
    assert capsys.readouterr().out == "side  seconds\n   a        -\n   b      2.0\n"
