"""Several processes train one model: the same result, however the work is shared; `-m slow`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

CLONE = Path(__file__).parents[1]
CONFIG = """
n_layer = 2
n_head = 2
n_embd = 32
block_size = 16
batch_size = 4
gradient_accumulation_steps = 2
max_iters = 10
lr_decay_iters = 10
warmup_iters = 2
learning_rate = 1e-3
min_lr = 1e-4
eval_interval = 5
dtype = "float32"
tokenizer = "byte"
"""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]


@pytest.fixture
def config(tmp_path, text_file) -> list[str]:
    """The first arguments of every run here."""
    path = tmp_path / "ranks.py"
    path.write_text(CONFIG)
    return [str(path), f"--dataset={text_file}"]


@pytest.fixture
def chats(tmp_path) -> str:
    """Samples of many lengths, so that masks and numbers of targets differ between ranks."""
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"prompt": "q" * (i % 7), "completion": "a" * (1 + i % 9)})
                            + "\n" for i in range(300)))
    return str(path)


@pytest.fixture
def train(tmp_path, config):
    """train({name: (world, *flags)}) runs each in turn; returns {name: (exit codes, output)}.

    The folder of a run is its name up to a colon: so one run can go on.
    """
    def go(runs: dict[str, tuple], **job) -> dict[str, tuple[list[int], str]]:
        jobs = [{"world": world, "out": str(tmp_path / f"{name.replace(':', '-')}.out"),
                 "argv": [*config, f"--out_dir={tmp_path / name.partition(':')[0]}", *flags], **job}
                for name, (world, *flags) in runs.items()]
        (tmp_path / "jobs.json").write_text(json.dumps(jobs))
        done = subprocess.run([sys.executable, str(CLONE / "tests" / "fork_ranks.py"),
                               str(tmp_path / "jobs.json")], capture_output=True, text=True,
                              timeout=300)
        assert done.returncode == 0, done.stderr
        codes = [json.loads(line) for line in done.stdout.splitlines()]
        outputs = ["".join(Path(f"{job['out']}.{i}").read_text() for i in range(job["world"]))
                   for job in jobs]
        return dict(zip(runs, zip(codes, outputs, strict=True), strict=True))

    return go


def weights(run: Path, step: int = 10) -> dict:
    return load_file(run / "ckpt" / f"step_{step:06d}" / "model.safetensors")


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def far(a: Path, b: Path) -> float:
    """The largest difference between two runs: of a loss, a norm or a weight."""
    one, other = rows(a), rows(b)
    assert [r["step"] for r in one] == [r["step"] for r in other]
    differences = [abs(x[key] - y[key]) for x, y in zip(one, other, strict=True)
                   for key in ("loss", "val_loss", "val_bpb", "grad_norm", "tokens") if key in x]
    theirs = weights(b)
    return max(*differences, *(float((w - theirs[n]).abs().max()) for n, w in weights(a).items()))


def ended(results: dict) -> None:
    for name, (codes, output) in results.items():
        assert set(codes) == {0}, f"{name}: {output}"


@pytest.mark.parametrize("flags", [
    ("--dropout=0.2", "--attn_logn=learned", "--tie_embeddings=False", "--bias=True"),
    ("chats", "--batch_size=2", "--gradient_accumulation_steps=1", "--eval_iters=3")])
def test_one_rank_two_ranks_and_shards_are_the_same(train, tmp_path, chats, flags):
    """Micro-steps shared, rows shared, masks and ragged batches: to 1e-5 over ten updates."""
    flags = [f"--dataset={chats}" if f == "chats" else f for f in flags]
    ended(train({"one": (1, *flags), "ddp": (2, *flags, "--parallel=ddp"),
                 "fsdp": (2, *flags, "--parallel=fsdp")}))
    for run in ("ddp", "fsdp"):
        assert far(tmp_path / "one", tmp_path / run) < 1e-5


def test_muon_is_the_same_where_its_iterations_are_exact(train, tmp_path):
    flags = ("--optimizer=muon", "--muon_lr=0.01")
    runs = {"one": (1, *flags), "ddp": (2, *flags), "fsdp": (2, *flags, "--parallel=fsdp")}
    ended(train(runs, fp32_muon=True))
    assert far(tmp_path / "one", tmp_path / "ddp") < 1e-5
    assert far(tmp_path / "one", tmp_path / "fsdp") < 1e-5
    ended(train({f"{name}-bf16": how for name, how in runs.items()}))
    for name in ("ddp", "fsdp"):
        pairs = zip(rows(tmp_path / "one-bf16"), rows(tmp_path / f"{name}-bf16"), strict=True)
        losses = [abs(a["loss"] - b["loss"]) for a, b in pairs if "loss" in a]
        assert len(losses) == 10 and max(losses) < 2e-3


def test_a_run_goes_on_with_another_number_of_ranks(train, tmp_path):
    """1 -> 2 sharded -> 3 replicas -> 1, two or three updates each."""
    flags = ("--gradient_accumulation_steps=6", "--optimizer=muon", "--init_from=resume")
    runs = {"whole": (1, "--init_from=auto", *flags[:2])}
    for n, (world, parallel) in enumerate(
            [(1, "auto"), (2, "fsdp"), (3, "ddp"), (1, "auto")]):
        start = "--init_from=auto" if n == 0 else flags[2]
        runs[f"parts:{n}"] = (world, f"--parallel={parallel}", *flags[:2], start,
                              "--eval_interval=5", f"--max_iters={(3, 5, 8, 10)[n]}")
    ended(train(runs, fp32_muon=True))
    theirs = weights(tmp_path / "parts")
    assert max(float((w - theirs[n]).abs().max())
               for n, w in weights(tmp_path / "whole").items()) < 1e-5


def test_more_ranks_than_there_is_to_evaluate(train, tmp_path, text_file):
    """A validation split of a single batch: the other rank has one without a target."""
    flags = ("--eval_iters=1", "--max_iters=5")
    results = train({"one": (1, *flags), "two": (2, *flags), "one:by 2": (2, "--eval_only=True"),
                     "one:by 1": (1, "--eval_only=True")})
    ended(results)
    assert rows(tmp_path / "one")[-1]["val_loss"] == pytest.approx(
        rows(tmp_path / "two")[-1]["val_loss"], abs=1e-5)
    said, alone = results["one:by 2"][1], results["one:by 1"][1]  # the whole split
    assert said == alone and "validation loss" in said


def test_what_cannot_be_shared_is_one_line(train, tmp_path):
    results = train({"odd": (2, "--batch_size=3", "--gradient_accumulation_steps=1"),
                     "nccl": (2, "--backend=nccl"), "gone": (2, "--dataset=nowhere"),
                     "alone": (1, "--parallel=fsdp")})
    for name, words in (("odd", "batch_size=3"), ("nccl", "backend=nccl"), ("gone", "nowhere"),
                        ("alone", "torchrun")):
        codes, output = results[name]
        assert set(codes) == {2}, output
        lines = output.splitlines()
        assert words in lines[0], output
        assert len(lines) == 1, output


WANDB = """
import os

def say(word):
    with open(os.environ["SEEN"], "a") as f:
        f.write(word + "\\n")

def login(**settings):
    return True

def init(**settings):
    say("init")
    return Run()

class Run:
    id = "abc"
    def log(self, row, step):
        say(f"step {step}")
    def finish(self):
        say("finish")
"""


def test_only_rank_0_speaks_and_writes(train, tmp_path, monkeypatch):
    """Into the terminal, the run's folder and wandb, which sees steps that never fall."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "wandb.py").write_text(WANDB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    codes, output = train({"run": (2, "--wandb_log=True")})["run"]
    assert codes == [0, 0], output
    seen = (tmp_path / "seen").read_text().splitlines()
    steps = [int(word.split()[1]) for word in seen[1:-1]]
    assert seen[0] == "init" and seen[-1] == "finish"
    assert steps == sorted(steps) and len(steps) == 10 + 2
    assert (tmp_path / "run.out.1").read_text() == ""
    assert output.count("update: 4 rows x 16 tokens x 1 micro-steps x 2 processes (ddp) = 128") == 1


def torchrun(*args: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *args]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ranks_of(agent: subprocess.Popen) -> dict[int, int]:
    """rank -> process id of what a torchrun has started."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == agent.pid:
                number = re.search(rb"\0RANK=(\d+)\0", (path / "environ").read_bytes())
                if number:
                    found[int(number[1])] = int(path.name)
        except OSError:
            pass
    return found


def wait_for(path: Path, text: str, process: subprocess.Popen, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"no {text!r} in {path}: {process.communicate()}")


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_killed_rank_is_started_again_and_nothing_is_lost(config, tmp_path):
    """Rank 1, then rank 0; the command says overwrite=True, which only the first start does."""
    flags = ("--max_iters=60", "--lr_decay_iters=60", "--eval_interval=4", "--optimizer=muon",
             "--dropout=0.1", "--overwrite=True", "--timeout=30")
    command = torchrun("--standalone", "--nproc_per_node=2", "--max_restarts=3",
                       str(CLONE / "train.py"), *config, *flags)
    subprocess.run([*command, f"--out_dir={tmp_path / 'whole'}"], check=True, capture_output=True)
    agent = subprocess.Popen([*command, f"--out_dir={tmp_path / 'parts'}"], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for rank, step in ((1, 10), (0, 30)):
        wait_for(tmp_path / "parts" / "log.jsonl", f'"step": {step},', agent)
        os.kill(ranks_of(agent)[rank], signal.SIGKILL)
    out, err = agent.communicate(timeout=180)
    assert agent.returncode == 0, err
    assert out.count("going on with") == 2
    ours, theirs = (weights(tmp_path / name, 60) for name in ("whole", "parts"))
    assert all((w == theirs[n]).all() for n, w in ours.items())
    hidden = ("tok_s", "mfu", "elapsed_s", "train_s")
    whole, parts = ([{k: v for k, v in row.items() if k not in hidden}
                     for row in rows(tmp_path / name)] for name in ("whole", "parts"))
    assert whole == parts


def test_two_agents_meet_by_address_and_a_signal_saves(config, tmp_path):
    """As on two machines. A signal to one agent stops both at the same update."""
    address = ("--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1",
               f"--master_port={free_port()}")
    script = (str(CLONE / "train.py"), *config, f"--out_dir={tmp_path / 'run'}", "--timeout=60")
    agents = [subprocess.Popen([*torchrun(*address, f"--node_rank={n}"), *script,
                                "--max_iters=100000"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
              for n in range(2)]
    wait_for(tmp_path / "run" / "log.jsonl", '"step": 7,', agents[0])
    agents[1].send_signal(signal.SIGTERM)
    out = [agent.communicate(timeout=90) for agent in agents]
    assert "interrupted at step" in out[0][0], out
    step = int(re.search(r"interrupted at step (\d+), saved", out[0][0])[1])
    assert (tmp_path / "run" / "ckpt" / f"step_{step:06d}").is_dir()


def test_ranks_with_other_settings_are_refused(train):
    """Else they would train apart, and nobody would know."""
    codes, output = train({"run": (2,)}, last_flags=["--learning_rate=0.5"])["run"]
    assert codes == [2, 2] and "rank 1: learning_rate is 0.5" in output, output


def test_a_rank_that_hangs_is_not_waited_for_for_ever(train):
    """Rank 1 sleeps for 8 s in its fourth update; rank 0 waits for 4."""
    codes, output = train({"run": (2, "--timeout=4")}, hang=8)["run"]
    assert codes[0] == 2 and codes[1]
    assert "rank 0: another rank has gone, or did not answer in time (--timeout)" in output
    assert "Traceback" not in output
