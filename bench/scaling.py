"""How do speed and memory grow with width, depth and context? Seven shapes around a middle one.

    python -m bench.scaling [--rounds=2] [--updates=6]

Each trial is train.py in a process of its own, with Muon and the same tokens an update, round after
round; the data is the known set stdlib with its 4,096 tokens. What an update should cost follows
from its FLOPs (`kit.device.flops_per_token`); the table says where it costs more.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.trial import Trial, TrialFailed, apart, introduce, keep, ours, print_table, sizes, tell
from data import DataError
from data.prepare import Parser, resolve
from kit.errors import run

Rows = list[dict[str, Any]]
MIDDLE = {"n_embd": 256, "n_layer": 4, "block_size": 256}
AXES = {"width": ("n_embd", "#2171b5"), "depth": ("n_layer", "#d94801"),
        "context": ("block_size", "#238b45")}
HEAD = 64  # width of a head: heads grow with the width, as one would have it
MUCH = 1.1  # so much above the arithmetic is worth a word; less is noise here


def shapes() -> list[tuple[str, float, dict[str, int]]]:
    """(axis, factor, shape): the middle, then half and twice of each of its sizes."""
    return [("middle", 1.0, MIDDLE)] + [
        (axis, factor, MIDDLE | {name: int(MIDDLE[name] * factor)})
        for axis, (name, _) in AXES.items() for factor in (0.5, 2.0)]


def trial(shape: dict[str, int], args: argparse.Namespace, dataset: Path, out: Path) -> Trial:
    settings: dict[str, Any] = shape | {
        "n_head": max(1, shape["n_embd"] // HEAD), "dataset": dataset, "optimizer": "muon",
        "batch_size": args.tokens // shape["block_size"], "gradient_accumulation_steps": 1,
        "max_iters": args.updates, "warmup_iters": 1, "eval_interval": args.updates,
        "eval_iters": 1, "log_interval": 1}
    return ours("config/small.py", [f"--{name}={value}" for name, value in settings.items()], out)


def rows_of(found: list[list[Trial]], peak: float) -> Rows:
    """A row for each shape, from its trials of all rounds; the first update is left out."""
    rows = []
    counts = apart(sizes, [trials[0].shape for trials in found])
    for (axis, factor, shape), trials, (params, flops) in zip(shapes(), found, counts, strict=True):
        times = [statistics.median(t.update_s[1:]) / t.update_tokens for t in trials]
        seconds = statistics.median(times)  # of a token
        rows.append({"axis": axis, "factor": factor, **shape, "params": params, "flops": flops,
                     "tok_s": 1 / seconds, "rounds_tok_s": [round(1 / t, 1) for t in times],
                     "mfu": flops / seconds / peak,
                     "peak_mib": statistics.median(t.peak_mib for t in trials)})
    middle = rows[0]
    for row in rows:
        row["time"], row["work"] = middle["tok_s"] / row["tok_s"], row["flops"] / middle["flops"]
        excess = row["time"] / row["work"]
        less = row["factor"] < 1  # a smaller shape that costs more than its share: a fixed cost
        row["note"] = "" if excess < MUCH else (
            f"shrinks {excess:.2f} x less than the arithmetic" if less else
            f"grows {excess:.2f} x faster than the arithmetic")
    return rows


def show(rows: Rows) -> None:
    print_table(rows, [
        ("axis", "axis", ""), ("n_embd", "width", ""), ("n_layer", "layers", ""),
        ("block_size", "context", ""), ("params", "parameters", ","),
        ("flops", "FLOPs/token", ".3g"), ("tok_s", "tokens/s", ",.0f"), ("mfu", "MFU", ".1%"),
        ("peak_mib", "peak MiB", ",.0f"),
        ("work", "FLOPs x", ".2f"), ("time", "time x", ".2f"), ("note", "", "")])


def draw(rows: Rows, path: Path) -> str:
    """Time of a token against its FLOPs, both relative to the middle; memory against each size."""
    from matplotlib.figure import Figure  # slow to import; needs no display

    fig = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = fig.subplots(1, 2)
    ends = [min(row["work"] for row in rows), max(row["work"] for row in rows)]
    left.plot(ends, ends, "--", color="#737373", linewidth=1, zorder=1)
    left.annotate("as the arithmetic", (ends[1] / 2, ends[1] / 2), xytext=(6, -4), va="top",
                  textcoords="offset points", color="#737373", fontsize=9)  # below all lines
    for place, (axis, (name, color)) in enumerate(AXES.items()):
        line = sorted((r for r in rows if r["axis"] in (axis, "middle")), key=lambda r: r["factor"])
        left.plot([r["work"] for r in line], [r["time"] for r in line], "o-", color=color)
        right.plot([r["factor"] for r in line], [r["peak_mib"] for r in line], "o-", color=color)
        left.text(0.04, 0.95 - 0.07 * place, f"{axis} {', '.join(str(r[name]) for r in line)}",
                  transform=left.transAxes, color=color, va="top")
        right.annotate(axis, (line[-1]["factor"], line[-1]["peak_mib"]), xytext=(8, 0),
                       textcoords="offset points", color=color, va="center")
    left.set(xscale="log", yscale="log", xlabel="FLOPs of a token, relative to the middle shape",
             ylabel="time of a token, relative", title="Time against arithmetic")
    shape = rows[0]
    right.set(xscale="log", xlim=(0.45, 3), ylim=(0, None), ylabel="peak memory, MiB",
              xlabel=f"size, relative to {shape['n_layer']} layers, width {shape['n_embd']}, "
                     f"context {shape['block_size']}", title="Memory, same tokens an update")
    plain = [v for v in (0.25, 0.5, 1, 2, 4) if ends[0] * 0.8 <= v <= ends[1] * 1.25]
    for axis, ticks in ((left.xaxis, plain), (left.yaxis, plain), (right.xaxis, [0.5, 1, 2])):
        axis.set_ticks(ticks, [f"{v:g}" for v in ticks])
        axis.set_ticks([], minor=True)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=130)
    return path.name


def main(argv: list[str]) -> int:
    parser = Parser(prog="bench.scaling", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=2, help="trials of each shape (default: %(default)s)")
    add("--updates", type=int, default=6, help="of a trial, at least 3 (default: %(default)s)")
    add("--tokens", type=int, default=4096, help="of an update (default: %(default)s)")
    add("--out", type=Path, default=Path("out/bench"), metavar="FOLDER",
        help="where scaling.jsonl and scaling.png go (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.updates < 3 or args.tokens < 512:
        parser.error("expected at least --rounds=1, --updates=3 and --tokens=512")
    args.out.mkdir(parents=True, exist_ok=True)
    dataset = apart(resolve, "stdlib", None, tell)
    found: list[list[Trial]] = [[] for _ in shapes()]
    with tempfile.TemporaryDirectory() as work:
        row, peak = introduce()
        for number in range(1, args.rounds + 1):
            for (axis, factor, shape), trials in zip(shapes(), found, strict=True):
                try:
                    trials.append(trial(shape, args, dataset, Path(work) / "run"))
                except TrialFailed as failure:
                    tell(f"bench.scaling: {failure}")
                    return 1
                tell(f"round {number} of {args.rounds}, {axis} x {factor:g}: "
                     f"{trials[-1].update_s[-1]:.3g} s an update, {trials[-1].seconds:.0f} s")
    rows = rows_of(found, peak)
    show(rows)
    print()
    figures = {"tokens": args.tokens, "shapes": rows, "png": draw(rows, args.out / "scaling.png")}
    keep(row | figures, args.out, "scaling.jsonl")
    return 0


if __name__ == "__main__":
    run(main, mistakes=(DataError,))
