"""Curves of several runs in one picture, and a table: `python -m kit.plot out/*`."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kit.errors import UserError, run
from kit.files import replacing
from kit.progress import spell_time
from kit.run.locate import out_root
from kit.run.log import read_log

MOST = 4000  # points of a curve that are kept, an even number; a picture shows no more
LONGEST_NAME = 36  # characters
AXES = {"step": "update", "tokens": "tokens", "train_s": "seconds of training",
        "elapsed_s": "seconds in all", "val_loss": "validation loss (nats per token)",
        "val_bpb": "validation, bits per byte", "loss": "loss (nats per token)"}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a5195", "#56b4e9", "#8c6d1f", "#333333")
MARKERS, STYLES = "osD^vPX", ("-", "--", ":")  # 8 and 7: 56 pairs before one returns


@dataclass
class Points:
    """Points (x, y) of a curve; of very many, the means of equally many neighbours."""

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    share: int = 1  # rows of a point
    total: float = 0.0  # of those rows that make no whole point yet
    n: int = 0

    def add(self, x: float, y: float) -> None:
        self.total, self.n = self.total + y, self.n + 1
        if self.n == self.share:
            self.x.append(x)
            self.y.append(self.total / self.n)
            self.total, self.n = 0.0, 0
        if len(self.x) == MOST:
            self.share *= 2
            self.x = self.x[1::2]
            self.y = [(a + b) / 2 for a, b in zip(self.y[::2], self.y[1::2], strict=True)]


@dataclass
class Curve:
    """What a log tells: the points to draw, how far the run came, its best evaluation."""

    name: str
    train: Points = field(default_factory=Points)
    val: Points = field(default_factory=Points)
    last: dict[str, float] = field(default_factory=dict)  # the newest of each number
    best: dict[str, float] = field(default_factory=dict)  # a row of the log; none was made: empty
    by: str = "val_loss"  # what is best

    def rank(self) -> tuple[float, str]:
        return self.best.get(self.by, float("inf")), self.name

    def label(self) -> str:
        if not self.best:
            return f"{self.name}  (no evaluation)"
        return f"{self.best[self.by]:.4f}  {self.name}"


def read_curve(path: Path, name: str, x: str, y: str) -> Curve:
    """Read a log once, from beginning to end, in memory that does not grow with it."""
    curve = Curve(name, by="val_bpb" if y == "val_bpb" else "val_loss")
    rows = tqdm(read_log(path), name, unit=" rows", delay=2, leave=False, disable=None)
    for row in rows:
        row = {key: value for key, value in row.items() if value is not None}
        curve.last |= row
        value = row.get(curve.by)
        if value is not None and value <= curve.best.get(curve.by, value):
            if value != curve.best.get(curve.by):  # of equal ones the first
                curve.best = row
        for points, number in ((curve.val, value), (curve.train, row.get("loss"))):
            if number is not None and x in row:
                points.add(row[x], number)
    return curve


def find_runs(given: Sequence[str]) -> Iterator[Path]:
    """The folders with a log among those given, each once, or all in out/; others are named."""
    root = out_root()
    paths = [Path(p) for p in given] or (sorted(root.iterdir()) if root.is_dir() else [])
    seen = set()
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such folder; expected runs, as out/*")
        if path.resolve() in seen:
            continue
        seen.add(path.resolve())
        if (path / "log.jsonl").is_file():
            yield path
        elif path.is_dir() or given and path.name != "latest.json":  # which out/* names too
            print(f"{path}: no run, left out", file=sys.stderr)


def name_of(path: Path, others: Sequence[Path]) -> str:
    """A run's name, with the folder that it lies in where another one is called the same."""
    from kit.errors import visible

    path = path.absolute()
    alike = [p for p in others if p.absolute().name == path.name]
    name = visible(path.name if len(alike) < 2 else f"{path.parent.name}/{path.name}")
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[1 - half:]}"


def top_of(curves: Sequence[Curve]) -> float:
    """The highest that a curve stands after the first fifth of its way: what can be compared."""
    late = [y for c in curves for p in (c.val if c.val.x else c.train,)
            for x, y in zip(p.x, p.y, strict=True) if x >= p.x[0] + (p.x[-1] - p.x[0]) / 5]
    low = min(late)
    return max(late) + 0.05 * (max(late) - low or abs(low))


def draw(curves: Sequence[Curve], path: Path, x: str, y: str, log: str = "", title: str = "",
         whole: bool = False) -> None:
    """Write the picture: validation with markers, with y=loss also the training loss, faint.

    Of several curves the steep beginning may rise out of it, but not if `whole`.
    """
    from matplotlib.figure import Figure  # here, because it is slow to import; needs no display

    fig = Figure(figsize=(11, 6), layout="constrained")
    ax = fig.subplots()
    lines, names = [], []
    for i, curve in enumerate(curves):
        style = {"color": COLORS[i % len(COLORS)], "zorder": 3 - i / len(curves)}  # best in front
        if y == "loss" and curve.train.x:
            faint = ax.plot(curve.train.x, running_mean(curve.train.y), alpha=0.4, linewidth=1,
                            **style)
            if len(curves) == 1:
                lines, names = faint, ["training, running mean"]
        many = len(curve.val.x) > 20  # then not all have a marker, each curve at its own places
        lines += ax.plot(curve.val.x, curve.val.y, marker=MARKERS[i % len(MARKERS)], markersize=6,
                         markeredgecolor="white", markeredgewidth=0.6, linewidth=1.4,
                         linestyle=STYLES[i // len(COLORS) % len(STYLES)],
                         markevery=(i % 7 / 100, 0.07) if many else 1, **style)
        names.append(curve.label())
    if "x" not in log:
        ax.xaxis.set_major_formatter("{x:,.10g}")
    for axis in log:
        getattr(ax, f"set_{axis}scale")("log")
    if len(curves) > 1 and not whole and "y" not in log:
        ax.set_ylim(top=min(top_of(curves), ax.get_ylim()[1]))
    ax.set(xlabel=AXES[x], ylabel=AXES[y])
    ax.set_title(title, parse_math=False)
    ax.grid(alpha=0.25)
    outside = len(curves) > 8
    legend = (fig if outside else ax).legend(
        lines, [str(i) for i in range(len(lines))],  # no name: one might begin with _ or $
        loc="outside right upper" if outside else "upper right", fontsize="small",
        handlelength=3.2, title="bits per byte" if y == "val_bpb" else "best validation loss")
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(name)
    with replacing(path) as aside, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name in letters that the font lacks
        fig.savefig(aside, dpi=130, format="png")


def running_mean(values: Sequence[float], share: float = 0.02) -> list[float]:
    """The mean of all values so far, and later an exponential one over `share` of them."""
    mean, means = 0.0, []
    for n, value in enumerate(values, 1):
        mean += (value - mean) / min(n, max(1.0, share * len(values)))
        means.append(mean)
    return means


def table(curves: Sequence[Curve]) -> Iterator[str]:
    """The lines of a table: how far each run came and its best evaluation."""
    rows = [("run", "updates", "tokens", "best loss", "bits per byte", "at step", "train time")]
    for c in curves:
        numbers = [f"{c.best[k]:.4f}" if k in c.best else "-" for k in ("val_loss", "val_bpb")]
        counts = [f"{of[k]:,.0f}" if k in of else "-" for of, k in (
            (c.last, "step"), (c.last, "tokens"), (c.best, "step"))]
        spent = spell_time(c.last["train_s"]) if "train_s" in c.last else "-"
        rows.append((c.name, *counts[:2], *numbers, counts[2], spent))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        yield "  ".join([name.ljust(widths[0]), *(
            cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))])


def main(argv: list[str]) -> int:
    from data.prepare import Parser
    from kit.errors import visible

    parser = Parser(prog="python -m kit.plot", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="run folders (default: all in out/)")
    add("--out", default="runs.png", help="the picture (default: %(default)s)")
    add("--x", choices=("step", "tokens", "train_s", "elapsed_s"), default="step")
    add("--y", choices=("val_loss", "val_bpb", "loss"), default="val_loss",
        help="loss: validation, and faintly the smoothed training loss (default: %(default)s)")
    add("--log", choices=("x", "y", "xy"), default="", help="axes with a logarithmic scale")
    add("--whole", action="store_true", help="with all of the beginning; without, it may rise out "
        "of a picture of several runs, whose ends can so be told apart")
    add("--title", default="")
    add("--debug", action="store_true", help="show tracebacks of mistakes")
    args = parser.parse_args(argv)
    out = Path(args.out)
    if out.is_dir() or out.suffix.lower() != ".png":
        raise UserError(f"--out={out}: expected a file that ends in .png")
    paths = list(find_runs(args.runs))
    curves: list[Any] = []
    for path in paths:
        curve = read_curve(path / "log.jsonl", name_of(path, paths), args.x, args.y)
        if curve.val.x or (args.y == "loss" and curve.train.x):
            curves.append(curve)
        else:
            print(f"{path}: no {args.y} over {args.x} in its log, left out", file=sys.stderr)
    if not curves:
        where = "among those given" if args.runs else f"in {out_root()}"
        raise UserError(f"no run to draw {where}; python train.py config/small.py makes one")
    curves.sort(key=Curve.rank)
    draw(curves, out, args.x, args.y, args.log, visible(args.title), args.whole)
    for line in table(curves):
        print(line)
    print(f"written to {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    from kit.errors import UserError

    run(main)
