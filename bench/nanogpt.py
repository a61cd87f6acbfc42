"""nanoGPT as a process: its own train.py, from the user's clone, run in a folder aside.

None of its code is here and nothing is written into the clone. Its checkpoints are not written
either: they are evaluated on the whole validation split, in the process that trains, by its own
model class and on the windows that our evaluation reads.
"""

import json
import re
import runpy
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import CLONE, ProcessFailed, run_process
from data.dataset import Dataset
from data.shards import Split
from kit.errors import UserError

NEEDED = ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py")


class Trial(NamedTuple):
    """One training run, ours or nanoGPT's."""

    update_s: list[float]  # seconds of each update
    update_tokens: float  # tokens of one
    curve: list[tuple[int, float, float]]  # (updates, seconds of training, validation loss)
    seconds: float  # of the whole process
    peak_mib: float
    mfu: float | None = None  # None for nanoGPT, like dtypes
    dtypes: str | None = None  # of the products and, if it is the optimizer, of Muon's


def check_clone(clone: Path) -> Path:
    """The absolute path of a nanoGPT clone; UserError for anything else."""
    for name in NEEDED:
        if not (clone / name).is_file():
            raise UserError(f"--nanogpt={clone} is no nanoGPT clone, it has no {name}; make one "
                            "with git clone https://github.com/karpathy/nanoGPT")
    return clone.resolve()


class NanoGPT:
    """A clone, and the folder that stands in for it while it trains."""

    def __init__(self, clone: Path, folder: Path):
        self.clone, self.folder = clone, folder
        shutil.copytree(clone / "config", folder / "config")
        shutil.copy(clone / "configurator.py", folder)  # train.py looks for it where it is run

    def give(self, dataset: Path, name: str, vocab_size: int | None = None) -> None:
        """Our ids as the files that it reads; without a vocab_size it takes 50,304."""
        data, folder = Dataset(dataset), self.folder / "data" / name
        folder.mkdir(parents=True, exist_ok=True)
        for split in (data.train, data.val):
            split.read(0, split.n).astype(np.uint16).tofile(folder / f"{split.name}.bin")
        if vocab_size:
            meta = f"(dVvocab_size\nI{vocab_size}\ns."  # {"vocab_size": ...} as pickle writes it
            (folder / "meta.pkl").write_text(meta, newline="")

    def train(self, flags: list[str], dataset: Path) -> Trial:
        """Run its train.py; what it would save is evaluated on the val split of `dataset`."""
        found = self.folder / "evaluations.jsonl"
        found.write_text("")
        done = run_process([sys.executable, Path(__file__), self.clone, dataset, found, *flags],
                           self.folder, {"PYTHONDONTWRITEBYTECODE": "1"})  # no caches in the clone
        losses = [json.loads(line) for line in found.read_text("utf-8").splitlines()]
        update_s, tokens = read_times(done.stdout)
        elapsed = [0.0, *np.cumsum(update_s).tolist()]
        curve = [(row["iter"], elapsed[row["iter"]], row["val_loss"]) for row in losses]
        return Trial(update_s, tokens, curve, done.seconds, done.peak_mib)


def read_times(printed: str) -> tuple[list[float], int]:
    """What nanoGPT prints with log_interval=1 -> (seconds of each iteration, tokens of one).

    The times are its own: from the end of one iteration to the end of the next, so they leave out
    none of its work. The few in which it also evaluates and saves are replaced by the median of
    the others, so that it pays for neither. Ours are those of the updates, also without both;
    what each of the two writes to its log after an update is the only difference.
    """
    tokens = re.search(r"^tokens per iteration will be: ([\d,]+)", printed, re.M)
    times = {int(i): float(ms) / 1000 for i, ms in
             re.findall(r"^iter (\d+): loss .*, time ([\d.]+)ms", printed, re.M)}
    evaluated = {int(i) for i in re.findall(r"^step (\d+): train loss", printed, re.M)}
    plain = [s for i, s in times.items() if i not in evaluated]
    if not tokens or not plain or sorted(times) != list(range(len(times))):
        raise ProcessFailed("nanoGPT's train.py did not print its tokens and the time of each "
                            "iteration, as its version of 2022 to 2025 does")
    usual = statistics.median(plain)
    return ([usual if i in evaluated else times[i] for i in range(len(times))],
            int(tokens[1].replace(",", "")))


def train_and_evaluate(clone: str, dataset: str, found: str, *flags: str) -> None:
    """Be nanoGPT's train.py, but for torch.save; in a process of its own."""
    import torch

    val = Dataset(dataset).val
    # `model` must be theirs, and our `train` and `data` out of sight; data is loaded already
    ours = {str(CLONE), str(CLONE / "bench")}
    sys.path[:] = [clone] + [path for path in sys.path if path not in ours]

    def evaluate_instead(saved: dict[str, Any], path: str) -> None:
        row = {"iter": saved["iter_num"], "val_loss": validation_loss(saved, val)}
        with open(found, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    torch.save, sys.argv = evaluate_instead, ["train.py", *flags]
    runpy.run_path(str(Path(clone) / "train.py"), run_name="__main__")


def validation_loss(saved: dict[str, Any], val: Split) -> float:
    """Nats per token of nanoGPT's weights on all windows of a split, each token a target once."""
    import torch

    from model import GPT, GPTConfig  # nanoGPT's

    weights = {name.removeprefix("_orig_mod."): w for name, w in saved["model"].items()}
    with torch.random.fork_rng(devices=[]):  # its batches must be those of an undisturbed run
        model = GPT(GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict(weights)
    block = saved["model_args"]["block_size"]
    at_once, total, targets, windows = max(1, 4096 // block), 0.0, 0, val.fixed_windows(block)
    with torch.no_grad():
        for i in range(0, windows, at_once):
            x, y = map(torch.from_numpy, val.window(i, min(at_once, windows - i), block))
            n = int((y >= 0).sum())
            total += model(x, y)[1].item() * n  # a mean; it leaves out targets of -1 as we do
            targets += n
    return total / targets


if __name__ == "__main__":
    train_and_evaluate(*sys.argv[1:])
