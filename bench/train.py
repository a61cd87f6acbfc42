"""How fast do we train? Against nanoGPT, on the same data, shape and evaluation, side by side.

    python -m bench.train --nanogpt=~/nanoGPT                    all parts, three rounds
    python -m bench.train --nanogpt=~/nanoGPT --parts=loss       seconds to nanoGPT's loss
    python -m bench.train --parts=throughput --rounds=1          ours alone
    python -m bench.train --parts=muon --rounds=5                an update with Muon and with AdamW

loss: Tiny Shakespeare by characters, 4 layers, width 128, context 64: nanoGPT's 2,000 steps, our
short schedule and our long one. muon: an update of that shape with Muon and with AdamW alone.
throughput: GPT-2 124M at context 1024. All on the CPU; nanoGPT in fp32, as it runs there.
Each trial is a process of its own, nothing else runs meanwhile, and the sides take turns, round
after round. Seconds of training leave out evaluating and saving, for both sides. MFU is what our
train.py says of itself.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench import common
from bench.common import CLONE, ProcessFailed, Row, log
from bench.nanogpt import NanoGPT, Trial, check_clone
from data import data_root
from data.dataset import Dataset
from data.making.build import prepare
from data.prepare import resolve
from kit.errors import UserError, run

PARTS = ("loss", "muon", "throughput")
CHARS = "config/shakespeare_char_cpu.py"
CHARS_LONG = "config/shakespeare_char_cpu_long.py"
NANOGPT_CHARS = [  # its evaluations are its saves
    "config/train_shakespeare_char.py", *"--eval_iters=1 --log_interval=1 --eval_interval=250 "
    "--always_save_checkpoint=True --device=cpu --compile=False --block_size=64 --batch_size=12 "
    "--n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
    .split()]
SHORT = "--max_iters=100 --lr_decay_iters=100 --eval_interval=100 --eval_iters=1".split()
BIG = "bench124m"  # the data set of GPT-2 124M: Python source, enough of it for 50,257 ids
BIG_FLAGS = ("--block_size=1024 --n_layer=12 --n_head=12 --n_embd=768 --bias=False --device=cpu "
             "--log_interval=1 --eval_interval=1000000 --eval_iters=1 --warmup_iters=2 "
             "--batch_size=2 --gradient_accumulation_steps=1").split()
COLORS = {"nanoGPT": "#d94801", "ours": "#2171b5", "ours long": "#238b45"}
Rounds = list[dict[str, Trial]]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = common.command_line("bench.train", __doc__)
    add = parser.add_argument
    add("--nanogpt", metavar="PATH", help="a nanoGPT clone; without it ours runs alone")
    add("--rounds", type=int, default=3, help="trials of each side (default: %(default)s)")
    add("--parts", default=",".join(PARTS), help="some of %(default)s, with commas between")
    add("--text", metavar="FILE", help="Tiny Shakespeare, where it cannot be downloaded")
    add("--out", type=Path, default=Path("out/bench"), metavar="FOLDER",
        help="where train.jsonl and train.png go (default: %(default)s)")
    args = parser.parse_args(argv)
    args.parts = common.choose_parts(parser, args.parts, PARTS)
    common.require_positive(parser, args, "rounds")
    if args.text and not Path(args.text).is_file():
        parser.error(f"--text={args.text}: there is no such file")
    if args.nanogpt:
        args.nanogpt = check_clone(Path(args.nanogpt).expanduser())
    return args


# ------------------------------------------------------------------------------------- the trials


class Bench:
    """The parts, and the folder in which all trials run."""

    def __init__(self, args: argparse.Namespace, work: Path):
        self.args, self.work, self.nanogpt = args, work, None
        if args.nanogpt:
            (work / "nanogpt").mkdir()
            self.nanogpt = NanoGPT(args.nanogpt, work / "nanogpt")

    def characters(self) -> Path:
        """Tiny Shakespeare by characters, prepared for both."""
        dataset = resolve(self.args.text or "shakespeare_char", "char", log)
        if self.nanogpt:
            self.nanogpt.give(dataset, "shakespeare_char", Dataset(dataset).tokenizer.vocab_size)
        return dataset

    def ours(self, config: str, dataset: Path, flags: list[str]) -> Callable[[], Trial]:
        flags = [f"--dataset={dataset}", "--device=cpu", *flags]
        return lambda: train_ours(config, flags, self.work / "run")

    def theirs(self, dataset: Path, flags: list[str]) -> dict[str, Callable[[], Trial]]:
        """nanoGPT as the first side, if there is a clone of it."""
        return {"nanoGPT": lambda: self.nanogpt.train(flags, dataset)} if self.nanogpt else {}

    def rounds(self, sides: dict[str, Callable[[], Trial]]) -> Rounds:
        """Every side once a round, in the reverse order every second time: a drift meets both."""
        rounds: Rounds = []
        for number in range(1, self.args.rounds + 1):
            rounds.append(dict.fromkeys(sides))
            for name in list(sides) if number % 2 else reversed(sides):
                got = rounds[-1][name] = sides[name]()
                log(f"round {number} of {self.args.rounds}, {name}: {len(got.update_s):,} updates, "
                    f"{statistics.median(got.update_s):.4g} s each, {got.seconds:.0f} s")
        return rounds

    def loss(self) -> Row:
        dataset = self.characters()
        rounds = self.rounds(self.theirs(dataset, NANOGPT_CHARS) | {
            "ours": self.ours(CHARS, dataset, []),
            "ours long": self.ours(CHARS_LONG, dataset, [])})
        row = figures(rounds)
        print_figures("Tiny Shakespeare by characters; losses of the whole validation split", row)
        draw(rounds, self.args.out / "train.png",
             "Tiny Shakespeare by characters: 4 layers, 4 heads, width 128, context 64")
        return row

    def muon(self) -> Row:
        dataset, flags = self.characters(), [*SHORT, "--log_interval=1"]
        rounds = self.rounds({
            "ours": self.ours(CHARS, dataset, flags),
            "AdamW": self.ours(CHARS, dataset, [*flags, "--optimizer=adamw"])})
        row = figures(rounds, skip=10, base="AdamW")
        print_figures("Tiny Shakespeare, 12 rows of 64 an update: ours with Muon, AdamW alone", row)
        row["ratio"] = next(1 / m["ratio"] for m in row["medians"] if m["side"] == "ours")
        print(f"an update with Muon takes {row['ratio']:.2f} times as long as one with AdamW")
        return row

    def throughput(self) -> Row:
        dataset = data_root() / BIG
        if not (dataset / "dataset.json").is_file():
            common.in_new_process(prepare_big)
        if self.nanogpt:
            self.nanogpt.give(dataset, BIG)
        theirs = [f"--dataset={BIG}", *BIG_FLAGS, "--compile=False", "--max_iters=4",
                  "--lr_decay_iters=4"]  # it makes one update more than max_iters
        flags = [*BIG_FLAGS, "--max_iters=5", "--lr_decay_iters=5"]
        row = figures(self.rounds(self.theirs(dataset, theirs) | {
            "ours": self.ours("config/gpt2_124m.py", dataset, flags)}), skip=1)
        print_figures("GPT-2 124M, context 1024, 2 rows an update", row)
        return row


def train_ours(config: str, flags: list[str], out: Path) -> Trial:
    """Run our train.py; its folder is read and removed."""
    command = [sys.executable, CLONE / "train.py", config, *flags, f"--out_dir={out}",
               "--init_from=scratch", "--overwrite=True"]
    done = common.run_process(command, env={"BONSAI_OUT": str(out.parent)})
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]
    settings = json.loads((out / "config.json").read_text("utf-8"))
    shutil.rmtree(out)
    updates = [{"step": 0, "train_s": 0.0}] + [row for row in rows if "loss" in row]
    return Trial(
        [(b["train_s"] - a["train_s"]) / (b["step"] - a["step"])
         for a, b in zip(updates, updates[1:], strict=False)],
        updates[-1]["tokens"] / updates[-1]["step"],
        [(row["step"], row["train_s"], row["val_loss"]) for row in rows if "val_loss" in row],
        done.seconds, done.peak_mib,
        statistics.median(row["mfu"] for row in updates[1:]),
        " ".join(settings[name] for name in ("dtype", "muon_dtype") if settings[name]))


def prepare_big() -> None:
    """Python's library and parts of torch's: the first alone has too few pairs for 50,257 ids."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    folders = [str(torch / name) for name in ("_inductor", "distributed", "testing")]
    prepare(["stdlib", *folders], BIG, "bpe:50257", again=False, say=log)


# ------------------------------------------------------------------------------------- the figures


def figures(rounds: Rounds, skip: int = 0, base: str = "nanoGPT") -> Row:
    """A row for each trial and, as medians over rounds, for each side.

    ratio: tokens/s over those of the side `base` in the same round, of the median update without
    the first `skip`, which are slower. to_goal_s: seconds of training until the first evaluation at
    or below nanoGPT's last loss of the round; to_goal: that over nanoGPT's own.
    """
    rows = []
    for number, trials in enumerate(rounds, 1):
        update_s = {side: statistics.median(t.update_s[skip:]) for side, t in trials.items()}
        goal = trials["nanoGPT"].curve[-1:] if "nanoGPT" in trials else []
        to_goal = {side: seconds_to(t.curve, goal[0][2]) if goal else None
                   for side, t in trials.items()}
        for side, trial in trials.items():
            _, train_s, loss = trial.curve[-1] if trial.curve else (0, None, None)
            rows.append({
                "round": number, "side": side, "dtypes": trial.dtypes, "update_s": update_s[side],
                "tok_s": trial.update_tokens / update_s[side],
                "ratio": quotient(update_s.get(base), update_s[side]), "mfu": trial.mfu,
                "peak_mib": trial.peak_mib, "loss": loss, "train_s": train_s,
                "to_goal_s": to_goal[side],
                "to_goal": quotient(to_goal[side], to_goal.get("nanoGPT"))})
    return {"trials": rows, "medians": medians(rows), "base": base}


def seconds_to(curve: list[tuple[int, float, float]], goal: float) -> float | None:
    """Seconds of training until the first evaluation at or below a loss; None: never."""
    return next((seconds for _, seconds, loss in curve if loss <= goal), None)


def quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def medians(rows: list[Row]) -> list[Row]:
    """One row for each side: medians of numbers, None where one is missing."""
    found = []
    for side in dict.fromkeys(row["side"] for row in rows):
        these = [row for row in rows if row["side"] == side]
        found.append({"round": "median", "side": side, "dtypes": these[0]["dtypes"]})
        for key in [key for key in rows[0] if key not in found[-1]]:
            values = [row[key] for row in these]
            found[-1][key] = None if None in values else statistics.median(values)
    return found


def print_figures(title: str, row: Row) -> None:
    """The table of a part, without the columns that are empty in it."""
    columns = [("round", "round", ""), ("side", "side", ""), ("dtypes", "products, Muon", ""),
               ("update_s", "s an update", ".4f"), ("tok_s", "tokens/s", ",.1f"),
               ("ratio", f"x {row['base']}'s", ".2f"), ("mfu", "MFU", ".1%"),
               ("peak_mib", "peak MiB", ",.0f"), ("loss", "last loss", ".4f"),
               ("train_s", "train s", ".1f"), ("to_goal_s", "s to nanoGPT's", ".1f"),
               ("to_goal", "of nanoGPT's", ".3f")]
    rows = row["trials"] + row["medians"]
    print(f"\n{title}; medians of the updates of a trial")
    common.print_table(rows, [c for c in columns if any(r[c[0]] is not None for r in rows)])


def draw(rounds: Rounds, path: Path, title: str) -> None:
    """Validation loss against seconds of training; the round of median time in full colour."""
    from matplotlib.figure import Figure  # slow to import; needs no display

    fig = Figure(figsize=(8, 4.8), layout="constrained")
    ax = fig.subplots()
    for side in rounds[0]:
        curves = sorted((r[side].curve for r in rounds), key=lambda curve: curve[-1][1])
        middle = curves[(len(curves) - 1) // 2]
        _, seconds, loss = middle[-1]
        for curve in curves:
            ax.plot([s for _, s, _ in curve], [v for _, _, v in curve], color=COLORS[side],
                    label=f"{side}: {loss:.3f} after {seconds:.0f} s" if curve is middle else None,
                    linewidth=2 if curve is middle else 1, alpha=1 if curve is middle else 0.3)
        if side == "nanoGPT":
            ax.axhline(loss, linestyle="--", color="#737373", linewidth=1)
    lowest = min(trial.curve[-1][2] for trials in rounds for trial in trials.values())
    highest = max(trial.curve[0][2] for trials in rounds for trial in trials.values())
    ax.set(xlabel="seconds of training, without evaluating and saving", title=title,
           ylabel="loss on the whole validation split (nats per character)",
           ylim=(lowest - 0.1, min(highest + 0.05, lowest + 1.2)))
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=130)


def main(argv: list[str]) -> int:
    args, row = parse(argv), common.machine()
    if not hasattr(os, "wait4"):
        raise UserError("bench.train measures memory as Linux and macOS tell it, not on Windows")
    if args.nanogpt:
        row["nanogpt"] = common.git_commit(args.nanogpt)
    print(f"{row['cpu']}, {row['cores']} cores, torch {row['torch']}", flush=True)
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(args, Path(work))
        try:
            for part in args.parts:
                row[part] = getattr(bench, part)()
                sys.stdout.flush()
        except ProcessFailed as failure:
            log(f"bench.train: {failure}")
    if args.parts[0] in row:
        print()
        common.append_row(row, args.out / "train.jsonl", echo=True)
    return 0 if args.parts[-1] in row else 1


if __name__ == "__main__":
    run(main)
