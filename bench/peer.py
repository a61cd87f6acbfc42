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
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.trial import CLONE, Trial, TrialFailed, alone
from data import DataError
from data.dataset import SPLITS, Dataset

NEEDED = ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py",
          "data/shakespeare_char/prepare.py")


def check_clone(clone: Path) -> Path:
    """The absolute path of a nanoGPT clone; DataError for anything else."""
    for name in NEEDED:
        if not (clone / name).is_file():
            raise DataError(f"--nanogpt={clone} is no nanoGPT clone, it has no {name}; make one "
                            "with git clone https://github.com/karpathy/nanoGPT")
    return clone.resolve()


class NanoGPT:
    """A clone, and the folder that stands in for it while it trains."""

    def __init__(self, clone: Path, room: Path):
        self.clone, self.room = clone, room
        shutil.copytree(clone / "config", room / "config")
        shutil.copy(clone / "configurator.py", room)  # train.py looks for it where it is run

    def give_text(self, dataset: Path, name: str = "shakespeare_char") -> None:
        """Let its own script prepare the text of our character set; the ids must be ours."""
        data, folder = Dataset(dataset), self.room / "data" / name
        ids = {split: getattr(data, split).read(0, getattr(data, split).n) for split in SPLITS}
        folder.mkdir(parents=True)
        text = "".join(data.tokenizer.decode(ids[split].tolist()) for split in SPLITS)
        (folder / "input.txt").write_text(text, encoding="utf-8", newline="")
        shutil.copy(self.clone / "data" / name / "prepare.py", folder)
        alone([sys.executable, folder / "prepare.py"], self.room)
        for split in SPLITS:
            theirs = np.fromfile(folder / f"{split}.bin", dtype=np.uint16)
            if not np.array_equal(theirs, ids[split]):
                raise DataError(f"nanoGPT's {split}.bin of {len(theirs):,} tokens is not our "
                                f"{split} split of {len(ids[split]):,} in {dataset}: no comparison "
                                "on different data; prepare the set again, or give another --text")

    def give_tokens(self, dataset: Path, name: str) -> None:
        """Our tokens as the bare files that it reads; without meta.pkl it takes 50,304 ids."""
        data, folder = Dataset(dataset), self.room / "data" / name
        folder.mkdir(parents=True)
        for split in (data.train, data.val):
            split.read(0, split.n).astype(np.uint16).tofile(folder / f"{split.name}.bin")

    def train(self, flags: list[str], dataset: Path) -> Trial:
        """Run its train.py; what it would save is evaluated on the val split of `dataset`."""
        found = self.room / "evaluations.jsonl"
        found.unlink(missing_ok=True)
        done = alone([sys.executable, Path(__file__), self.clone, dataset, found, *flags],
                     self.room, {"PYTHONDONTWRITEBYTECODE": "1"})  # no caches in the clone
        *losses, gpu = [json.loads(line) for line in found.read_text("utf-8").splitlines()]
        update_s, tokens = read_times(done.stdout)
        spent = [0.0, *np.cumsum(update_s).tolist()]
        curve = [(row["iter"], spent[row["iter"]], row["val_loss"]) for row in losses]
        return Trial(update_s, tokens, curve, done.seconds, gpu["gpu_mib"] or done.peak_mib, {})


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
        raise TrialFailed("nanoGPT's train.py did not print its tokens and the time of each "
                          "iteration, as its version of 2022 to 2025 does")
    usual = statistics.median(plain)
    return ([usual if i in evaluated else times[i] for i in range(len(times))],
            int(tokens[1].replace(",", "")))


def drive(clone: str, dataset: str, found: str, *flags: str) -> None:
    """Be nanoGPT's train.py, but for torch.save; in a process of its own."""
    import torch

    val = Dataset(dataset).val
    # `model` must be theirs, and our `train` and `prepare` out of sight; data is loaded already
    mine = {str(CLONE), str(CLONE / "bench")}
    sys.path[:] = [clone] + [path for path in sys.path if path not in mine]

    def evaluate_instead(saved: dict[str, Any], path: str) -> None:
        row = {"iter": saved["iter_num"], "val_loss": whole_loss(saved, val)}
        with open(found, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    torch.save, sys.argv = evaluate_instead, ["train.py", *flags]
    runpy.run_path(str(Path(clone) / "train.py"), run_name="__main__")
    on_gpu = torch.cuda.is_available() and torch.cuda.max_memory_allocated()
    with open(found, "a", encoding="utf-8") as file:
        file.write(json.dumps({"gpu_mib": on_gpu / 2**20 if on_gpu else None}) + "\n")


def whole_loss(saved: dict[str, Any], val: Any) -> float:
    """Nats per token of nanoGPT's weights on all windows of a split, each token a target once."""
    import torch

    from model import GPT, GPTConfig  # nanoGPT's

    weights = {name.removeprefix("_orig_mod."): w for name, w in saved["model"].items()}
    device = next(iter(weights.values())).device
    with torch.random.fork_rng(devices=[]):  # its batches must be those of an undisturbed run
        model = GPT(GPTConfig(**saved["model_args"])).to(device).eval()
    model.load_state_dict(weights)
    block = saved["model_args"]["block_size"]
    at_once, total, targets = max(1, 4096 // block), 0.0, 0
    bf16 = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    with torch.no_grad(), bf16:
        windows = val.fixed_windows(block)
        for i in range(0, windows, at_once):
            x, y = (torch.from_numpy(a).to(device)
                    for a in val.window(i, min(at_once, windows - i), block))
            n = int((y >= 0).sum())
            total += model(x, y)[1].item() * n  # a mean; it leaves out targets of -1 as we do
            targets += n
    return total / targets


if __name__ == "__main__":
    drive(*sys.argv[1:])
