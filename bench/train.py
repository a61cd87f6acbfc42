"""How fast do we train against nanoGPT? The same data, shape and evaluation, side by side.

    python -m bench.train --nanogpt=~/nanoGPT                    all parts, three rounds
    python -m bench.train --nanogpt=~/nanoGPT --parts=loss       seconds to nanoGPT's loss
    python -m bench.train --parts=throughput --rounds=1          ours alone
    python -m bench.train --parts=muon --rounds=5                an update with Muon and with AdamW

loss: Tiny Shakespeare by characters, 4 layers, width 128, context 64: nanoGPT's 2,000 steps, our
short schedule and our long one. muon: an update of that shape with Muon and with AdamW alone.
throughput: GPT-2 124M at context 1024. gpu: both kinds on a GPU.
Each trial is a process of its own, nothing else runs meanwhile, and the sides take turns, round
after round. Seconds of training leave out evaluating and saving, for both sides.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.peer import NanoGPT, check_clone
from bench.train_report import draw, race_rows, show_race, show_speed, speed_rows
from bench.trial import Row, Trial, TrialFailed, apart, introduce, keep, ours, tell
from data import DataError
from data.making.build import prepare
from data.making.sources import data_root
from data.prepare import Parser, resolve
from kit.errors import run

PARTS = ("loss", "muon", "throughput", "gpu")
OURS = {"ours": "config/shakespeare_char_cpu.py",
        "ours long": "config/shakespeare_char_cpu_long.py"}
OURS_MUON = {"ours": "config/shakespeare_char_cpu.py"}
OURS_GPU = {"ours": "config/shakespeare_char.py"}
CHARS_TITLE = "Tiny Shakespeare by characters"
TARGET_GPU = 1.4697  # nanoGPT's best on the 6/6/384 shape, by its README
CHARS = ["config/train_shakespeare_char.py", "--eval_iters=1", "--log_interval=1",
         "--eval_interval=250", "--always_save_checkpoint=True"]  # its evaluations are its saves
CHARS_CPU = [*CHARS, *"--device=cpu --compile=False --block_size=64 --batch_size=12 --n_layer=4 "
             "--n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0".split()]
BIG = "bench124m"  # the data set of GPT-2 124M: Python source, enough of it for 50,257 ids
BOTH = "--block_size=1024 --n_layer=12 --n_head=12 --n_embd=768 --bias=False --log_interval=1 " \
       "--eval_interval=1000000 --eval_iters=1 --warmup_iters=2".split()
CPU = ["--device=cpu", "--batch_size=2", "--gradient_accumulation_steps=1"]
GPU = ["--device=cuda", "--batch_size=32", "--gradient_accumulation_steps=4"]
H200 = 790e12  # FLOP/s of its bf16 products, as measured by others


class Bench:
    """What the parts share: the folder aside, nanoGPT if there is one, rounds, extra flags."""

    def __init__(self, args: argparse.Namespace, work: Path):
        self.args, self.work = args, work
        self.nano = None
        if args.nanogpt:
            clone = check_clone(Path(args.nanogpt).expanduser())
            (work / "nanogpt").mkdir()
            self.nano = NanoGPT(clone, work / "nanogpt")

    def text(self) -> Path:
        """The characters, prepared for both."""
        dataset = resolve(self.args.text or "shakespeare_char", "char", tell)
        if self.nano and not (self.nano.room / "data" / "shakespeare_char").exists():
            self.nano.give_text(dataset)
        return dataset

    def tokens(self) -> Path:
        """Tokens of a vocabulary of GPT-2's size, prepared for both."""
        dataset = data_root() / BIG
        if not (dataset / "dataset.json").is_file():
            apart(prepare_big)
        if self.nano and not (self.nano.room / "data" / BIG).exists():
            self.nano.give_tokens(dataset, BIG)
        return dataset

    def sides(self, dataset: Path, theirs: list[str], configs: dict[str, str], flags: list[str]
              ) -> dict[str, Callable[[], Trial]]:
        """The trials of a round, in their order, ready to be called."""
        def one(config: str) -> Callable[[], Trial]:
            return lambda: ours(config, [f"--dataset={dataset}", *flags, *self.args.ours_also],
                                self.work / "run")

        found = {name: one(config) for name, config in configs.items()}
        if self.nano:
            theirs = [*theirs, *self.args.theirs_also]
            found = {"nanoGPT": lambda: self.nano.train(theirs, dataset)} | found
        return found

    def rounds(self, sides: dict[str, Callable[[], Trial]]) -> list[dict[str, Trial]]:
        """Every side once a round."""
        rounds = []
        for number in range(1, self.args.rounds + 1):
            rounds.append({})
            order = list(sides.items())
            for name, trial in order if number % 2 else order[::-1]:  # a drift meets both
                got = rounds[-1][name] = trial()
                end = f"loss {got.curve[-1][2]:.4f}, " if got.curve else ""
                tell(f"round {number} of {self.args.rounds}, {name}: {end}{len(got.update_s):,} "
                     f"updates, {statistics.median(got.update_s):.4g} s each, {got.seconds:.0f} s")
        return rounds

    def loss(self, peak: float) -> Row:
        dataset = self.text()
        rounds = self.rounds(self.sides(dataset, CHARS_CPU, OURS, ["--device=cpu"]))
        row = race_rows(rounds, None, peak)
        show_race(f"{CHARS_TITLE}, on the CPU: nanoGPT in fp32, as it runs there", row)
        shape = "4 layers, 4 heads, width 128, context 64"
        return row | {"png": draw(rounds, self.args.out / "train.png", f"{CHARS_TITLE}: {shape}")}

    def muon(self, peak: float) -> Row:
        dataset = self.text()
        short = ["--max_iters=100", "--eval_interval=100", "--eval_iters=1"]
        flags = [*short, "--device=cpu", "--lr_decay_iters=100", "--log_interval=1"]
        sides = self.sides(dataset, [*CHARS_CPU, *short], OURS_MUON, flags)
        adamw = self.sides(dataset, [], {"AdamW": OURS_MUON["ours"]}, [*flags, "--optimizer=adamw"])
        row = speed_rows(self.rounds({**sides, "AdamW": adamw["AdamW"]}), peak, skip=10)
        show_speed("Tiny Shakespeare by characters, 4 layers, width 128, 12 rows of 64, on the "
                   "CPU: ours with Muon beside AdamW alone", row)
        row["ratio"] = next(m["of_adamw"] for m in row["medians"] if m["side"] == "ours")
        print(f"an update with Muon takes {row['ratio']:.2f} times as long as one with AdamW")
        return row

    def throughput(self, peak: float) -> Row:
        dataset = self.tokens()
        theirs = [f"--dataset={BIG}", *BOTH, *CPU, "--compile=False", "--max_iters=4",
                  "--lr_decay_iters=4"]  # it makes one update more than max_iters
        flags = [*BOTH, *CPU, "--max_iters=5", "--lr_decay_iters=5"]
        rounds = self.rounds(self.sides(dataset, theirs, {"ours": "config/gpt2_124m.py"}, flags))
        row = speed_rows(rounds, peak, skip=1)
        show_speed("GPT-2 124M, context 1024, 2 rows an update, on the CPU: nanoGPT in fp32, as it "
                   "runs there", row)
        return row

    def gpu(self, _: float) -> Row | None:
        name = apart(gpu_name)
        if name is None:
            print("\ngpu: torch sees no CUDA device; with one, --parts=gpu measures tokens/s, MFU "
                  f"and memory of GPT-2 124M and the seconds to {TARGET_GPU} on the 6/6/384 shape")
            return None
        peak = H200 if "H200" in name else apart(gpu_peak)
        theirs = [f"--dataset={BIG}", *BOTH, *GPU, "--max_iters=40", "--lr_decay_iters=40"]
        flags = [*BOTH, *GPU, "--max_iters=40", "--lr_decay_iters=40"]
        big = {"ours": "config/gpt2_124m.py"}
        speed = speed_rows(self.rounds(self.sides(self.tokens(), theirs, big, flags)), peak, 10)
        show_speed(f"GPT-2 124M, context 1024, {name}, peak {peak / 1e12:.0f} TFLOP/s", speed)
        sides = self.sides(self.text(), [*CHARS, "--device=cuda"], OURS_GPU, ["--device=cuda"])
        rounds = self.rounds(sides)
        race, title = race_rows(rounds, TARGET_GPU, peak), f"{CHARS_TITLE}: 6 layers, 384 wide"
        show_race(f"{title}, context 256, {name}", race)
        return {"name": name, "peak_tflops": round(peak / 1e12, 1), "124m": speed, "chars": race,
                "png": draw(rounds, self.args.out / "train_gpu.png", title)}


def prepare_big() -> None:
    """Python's library and parts of torch's: the first alone has too few pairs for 50,257 ids."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    folders = [str(torch / name) for name in ("_inductor", "distributed", "testing")]
    prepare(["stdlib", *folders], BIG, "bpe:50257", again=False, say=tell)


def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def gpu_peak() -> float:
    import torch

    from kit.device import fast_dtype, peak_flops

    cuda = torch.device("cuda")
    return peak_flops(fast_dtype(cuda), cuda)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="bench.train", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--nanogpt", metavar="PATH", help="a nanoGPT clone; without it ours runs alone")
    add("--rounds", type=int, default=3, help="trials of each side (default: %(default)s)")
    add("--parts", default=",".join(PARTS), help="some of %(default)s, with commas between")
    add("--text", metavar="FILE", help="Tiny Shakespeare, where it cannot be downloaded")
    add("--out", type=Path, default=Path("out/bench"), metavar="FOLDER",
        help="where train.jsonl and train.png go (default: %(default)s)")
    for name in ("--theirs_also", "--ours_also"):  # one more flag for every trial of that side
        add(name, action="append", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts={','.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    if args.rounds < 1:
        parser.error(f"--rounds={args.rounds}: expected 1 or more")
    if args.text and not Path(args.text).is_file():
        parser.error(f"--text={args.text}: there is no such file")
    return args


def main(argv: list[str]) -> int:
    if not hasattr(os, "wait4"):
        raise DataError("bench.train measures memory as Linux and macOS tell it, not on Windows")
    args, found = parse(argv), {}
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        try:
            bench = Bench(args, Path(work))
            row, peak = introduce(bench.nano and bench.nano.clone)
            for part in (part for part in PARTS if part in args.parts):
                found[part] = getattr(bench, part)(peak)
                sys.stdout.flush()
        except TrialFailed as failure:
            tell(f"bench.train: {failure}")
            if not found:
                return 1
    print()
    keep(row | found, args.out, "train.jsonl")
    return 0 if len(found) == len(args.parts) else 1


if __name__ == "__main__":
    run(main, mistakes=(DataError,))
