"""A clone without one of its folders still trains and writes, to the bit what PyTorch's kernels do.

What needs the folder ends in one line.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]
SIZES = ["--n_layer=1", "--n_embd=8", "--n_head=1", "--block_size=16", "--batch_size=2",
         "--gradient_accumulation_steps=1", "--max_iters=2", "--warmup_iters=0", "--min_lr=1e-4",
         "--tokenizer=byte", "--dropout=0.5", "--dtype=float32"]


@pytest.fixture
def run(tmp_path):
    """run(*words) -> the outcome of `python *words` in a copy of the code; run.path is its root."""
    for name in ("config", "data", "extras", "kit"):
        shutil.copytree(CLONE / name, tmp_path / name,
                        ignore=shutil.ignore_patterns("__pycache__", "*.bin"))
    for name in ("model.py", "train.py", "sample.py"):
        shutil.copy(CLONE / name, tmp_path)
    (tmp_path / "my.txt").write_text("To be, or not to be.\n" * 99)
    env = {k: v for k, v in os.environ.items() if not k.startswith("BONSAI")}

    def run(*words: str, **more: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *words], cwd=tmp_path, env=env | more,
                              capture_output=True, text=True)

    run.path = tmp_path
    return run


def remove(run, folder: str) -> None:
    """As git does, which leaves behind what Python has compiled."""
    shutil.rmtree(run.path / folder)
    (run.path / folder / "__pycache__").mkdir(parents=True)


def train(run, *flags: str) -> tuple[list[float], str]:
    """Losses of a tiny run, and what it said."""
    done = run("train.py", "--dataset=my.txt", *SIZES, "--out_dir=out/a", *flags)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run.path / "out/a/log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row], done.stdout


def sample(run, *flags: str) -> subprocess.CompletedProcess:
    return run("sample.py", "--out_dir=out/a", "--prompt=To", "--max_new_tokens=8", *flags)


def one_line(done: subprocess.CompletedProcess, text: str) -> None:
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and text in done.stderr, done


def test_without_kernels_and_hugging_face(run):
    losses, _ = train(run, "--kernels=torch")
    text = sample(run, "--kernels=torch").stdout
    shutil.rmtree(run.path / "out")
    remove(run, "kit/kernels")
    remove(run, "kit/hf")
    again, said = train(run)
    assert again == losses and "kernels of PyTorch" in said and "note" not in said
    done = sample(run)
    assert (done.returncode, done.stdout) == (0, text) and "PyTorch's kernels" in done.stderr
    config = json.loads((run.path / "out/a/config.json").read_text())
    assert config["kernels"] == config["kernels_lost"] == []
    one_line(sample(run, "--quantize=int8"), "this needs kit/kernels")
    for name in ("to_gguf", "llmc", "nanogpt_ckpt"):
        one_line(run("-m", f"extras.{name}", "x", "y"), "this needs kit/hf")
    one_line(run("train.py", "config/tiny.py", "--init_from=gpt2", "--dataset=my.txt"),
             "this needs kit/hf")


def test_a_run_goes_on_without_the_kernels_that_it_had(run):
    train(run)
    remove(run, "kit/kernels")
    _, said = train(run, "--max_iters=4", "--init_from=resume")
    assert "kernels that the run had are not to be had now" in said
    config = json.loads((run.path / "out/a/config.json").read_text())
    assert config["kernels_lost"] == [{"step": 2, "kernels": ["attention", "dropout", "loss"]}]


def test_without_all_other_doors(run):
    """One copy loses all at once; what each is needed for is refused in a line."""
    losses, _ = train(run, "--kernels=torch")
    text = sample(run, "--kernels=torch").stdout
    name = next(p.parent.name for p in (run.path / "data").glob("*/dataset.json"))
    shutil.rmtree(run.path / "out")
    for folder in ("kit/parallel", "data/making", "extras"):
        remove(run, folder)
    for file in ("session.py", "drafts.py"):
        (run.path / "kit" / "writing" / file).unlink()
    prepared = [f"--dataset={name}", "--kernels=torch"]
    assert train(run, *prepared)[0] == losses
    done = sample(run, "--kernels=torch")
    assert (done.returncode, done.stdout) == (0, text)
    drafts = sample(run, "--lookup=3")  # said after the line of the model
    assert drafts.returncode == 2 and not drafts.stdout
    assert "this needs kit/writing/drafts" in drafts.stderr.splitlines()[-1]
    (run.path / "other.txt").write_text("Another text.\n" * 99)
    one_line(run("train.py", "config/tiny.py", "--dataset=other.txt"), "this needs data/making")
    one_line(run("-m", "data.prepare", "other.txt"), "this needs data/making")
    one_line(run("train.py", "config/tiny.py", f"--dataset={name}", RANK="0", WORLD_SIZE="2"),
             "this needs kit/parallel")
