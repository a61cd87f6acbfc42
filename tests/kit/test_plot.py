"""kit/plot.py: which runs, their best, bounded memory, odd names, and what the picture shows."""

import json
import math
import random
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import plot
from kit.errors import UserError
from kit.errors import run as cli
from kit.plot import MOST, Points, draw, main, read_curve, running_mean

CLONE = Path(__file__).parents[2]
PNG = b"\x89PNG"


def write_log(folder: Path, final: float, updates: int = 40, every: int = 10, **odd) -> Path:
    """A run's log that falls to about `final`, with its best evaluation one before the last."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"format": 1, "step": 0}]
    for step in range(1, updates + 1):
        now = {"step": step, "tokens": 100 * step, "train_s": step / 2, "elapsed_s": float(step)}
        loss = final + 4 * math.exp(-step / 10)
        rows.append(now | {"loss": loss, "lr": 1e-3})
        if every and step % every == 0:
            val = final if step == updates - every else loss + 0.1
            rows.append(now | {"val_loss": val, "val_bpb": 2 * val} | odd)
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """drawn(*arguments) runs the command -> the figure that it saved, as matplotlib has it."""
    from matplotlib.figure import Figure

    kept, real = [], Figure.savefig
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: (
        kept.append(self), real(self, *args, **options)))

    def command(*argv: str):
        assert main([str(a) for a in argv]) == 0
        return kept.pop()

    return command


def refused(capsys, monkeypatch, *argv) -> str:
    """The one line of a mistake, through the exit that the command has."""
    monkeypatch.setattr("sys.argv", ["plot.py", *map(str, argv)])
    with pytest.raises(SystemExit) as stop:
        cli(main, (UserError,))
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "Traceback" not in "".join(lines)
    return lines[-1]


def legend(fig) -> list[str]:
    found = [*fig.legends, *(a.get_legend() for a in fig.axes if a.get_legend())]
    return [t.get_text() for t in found[0].get_texts()]


def test_curves_of_several_runs_sorted_by_their_best(drawn, tmp_path, capsys):
    runs = [write_log(tmp_path / "out" / name, best) for name, best in (
        ("late", 3.0), ("good", 1.25), ("fair", 2.0))]
    fig = drawn(*runs)
    assert (tmp_path / "runs.png").read_bytes().startswith(PNG)
    assert legend(fig) == ["1.2500  good", "2.0000  fair", "3.0000  late"]
    lines = fig.axes[0].get_lines()
    assert [list(line.get_xdata()) for line in lines] == [[10, 20, 30, 40]] * 3
    assert lines[0].get_ydata()[2] == 1.25 and {x.get_marker() for x in lines} == {"o", "s", "D"}
    assert fig.axes[0].get_ylabel() == "validation loss (nats per token)"
    head, first, *_ = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "run" and first.split() == [
        "good", "40", "4,000", "1.2500", "2.5000", "30", "20", "s"]


@pytest.mark.parametrize("x, last", [("step", 40), ("tokens", 4000), ("train_s", 20),
                                     ("elapsed_s", 40)])
def test_over_what_one_likes(drawn, tmp_path, x, last):
    fig = drawn(write_log(tmp_path / "a", 2.0), f"--x={x}", "--y=val_bpb", "--log=xy")
    ax, (line,) = fig.axes[0], fig.axes[0].get_lines()
    assert line.get_xdata()[-1] == last and line.get_ydata()[2] == 4.0
    assert ax.get_xscale() == ax.get_yscale() == "log" and ax.get_ylabel() == plot.AXES["val_bpb"]


def test_the_training_loss_is_smooth_and_faint(drawn, tmp_path):
    run = write_log(tmp_path / "a", 2.0, updates=400, every=100)
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    noise = random.Random(0)
    for row in (r for r in rows if "loss" in r):
        row["loss"] += noise.gauss(0, 0.3)
    (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, val = drawn(run, "--y=loss").axes[0].get_lines()
    assert train.get_alpha() < 0.5 and train.get_color() == val.get_color()
    jumps = [abs(b - a) for a, b in zip(train.get_ydata()[200:], train.get_ydata()[201:],
                                        strict=False)]
    assert max(jumps) < 0.2 and len(train.get_xdata()) == 400 and len(val.get_xdata()) == 4


def test_twelve_curves_differ_in_colour_marker_or_line(drawn, tmp_path):
    fig = drawn(*[write_log(tmp_path / f"run{i}", 2 + i / 10) for i in range(24)])
    looks = {(x.get_color(), x.get_marker(), x.get_linestyle()) for x in fig.axes[0].get_lines()}
    assert len(looks) == 24 and len(fig.legends) == 1  # beside the curves, not on them


def test_the_ends_of_several_curves_fill_the_picture(drawn, tmp_path):
    """The first evaluation, far above all others, would leave them a tenth of the height."""
    runs = [write_log(tmp_path / name, best, updates=100) for name, best in (("a", 2), ("b", 2.2))]
    assert drawn(*runs).axes[0].get_ylim()[1] < 2.8 < 3.4 < drawn(
        *runs, "--whole").axes[0].get_ylim()[1]
    assert drawn(runs[0]).axes[0].get_ylim()[1] > 3.4  # one alone has room
    high = write_log(tmp_path / "diverged", 9.0)
    assert drawn(*runs, high).axes[0].get_ylim()[1] > 9  # and what stays high is shown


def test_without_names_all_runs_are_drawn(drawn, tmp_path, capsys):
    for name in ("b", "a"):
        write_log(tmp_path / "out" / name, 2.0)
    (tmp_path / "out" / "latest.json").write_text("{}")
    assert legend(drawn()) == ["2.0000  a", "2.0000  b"]
    assert "left out" not in capsys.readouterr().err


def test_what_is_no_run_is_left_out_with_a_line(drawn, tmp_path, capsys):
    out = tmp_path / "out"
    write_log(out / "run", 2.0)
    write_log(out / "young", 2.0, every=0)
    (out / "bench").mkdir()
    for name in ("latest.json", "notes.txt"):
        (out / name).write_text("{}")
    assert legend(drawn(*sorted(out.iterdir()), out / "run")) == ["2.0000  run"]
    said = capsys.readouterr().err.splitlines()
    assert said == [f"{out / 'bench'}: no run, left out", f"{out / 'notes.txt'}: no run, left out",
                    f"{out / 'young'}: no val_loss over step in its log, left out",
                    "written to runs.png"]
    fig = drawn(*sorted(out.iterdir()), "--y=loss")
    assert legend(fig) == ["2.0000  run", "young  (no evaluation)"]
    table = capsys.readouterr().out.splitlines()
    assert table[2].split() == ["young", "40", "4,000", "-", "-", "-", "20", "s"]


@pytest.mark.parametrize("argv, words", [
    (["empty"], "no run to draw among those given"), (["nowhere"], "nowhere: no such folder"),
    ([], "no run to draw in"), (["run", "--out=runs.pdf"], "--out=runs.pdf: expected a file"),
    (["run", "--out=empty"], "--out=empty"), (["run", "--out=gone/a.png"], "No such file"),
    (["run", "--y=lr"], "invalid choice"), (["run", "--titel=x"], "did you mean --title")])
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, argv, words):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "run", 2.0)
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert words in refused(capsys, monkeypatch, *argv)
    assert sorted(tmp_path.rglob("*")) == before


ODD = ["$x_{", "_hidden", "a\nb\x1b[31m", "naïve 模型 🌱", "\u202etxt", "%s {0}", "n" * 200]


def test_odd_names_are_drawn_and_told_as_they_are(drawn, tmp_path, capsys, recwarn):
    fig = drawn(*[write_log(tmp_path / "out" / name, 2.0) for name in ODD],
                "--title=$\\frac{1}{\x07", "--y=loss")
    out = capsys.readouterr().out
    names = {text.removeprefix("2.0000  ") for text in legend(fig)}
    assert {"$x_{", "_hidden", "naïve 模型 🌱", "%s {0}", "a\\nb\\x1b[31m", "\\u202etxt"} < names
    assert max(map(len, names)) <= plot.LONGEST_NAME and len(out.splitlines()) == 1 + len(ODD)
    assert not any(c in out for c in "\x1b\u202e") and not recwarn.list


def test_runs_of_one_name_are_told_by_their_folders(drawn, tmp_path):
    fig = drawn(write_log(tmp_path / "a" / "small", 2.0), write_log(tmp_path / "b" / "small", 3.0))
    assert legend(fig) == ["2.0000  a/small", "3.0000  b/small"]


def test_a_torn_and_an_odd_log(drawn, tmp_path):
    run = write_log(tmp_path / "a", 2.0, tokens=None)
    with (run / "log.jsonl").open("a") as f:
        f.write('{"step": 50, "val_loss": NaN}\n{"step": 60, "val_loss": null, "tokens": 1}\n'
                '[1]\n{"step": "x"}\n{"step": 70, "val_loss": "low"}\n{"step": 80, "val_l')
    fig = drawn(run)
    assert list(fig.axes[0].get_lines()[0].get_xdata()) == [10, 20, 30, 40]


def test_the_old_picture_stays_where_the_disk_is_full(drawn, tmp_path, monkeypatch):
    run = write_log(tmp_path / "a", 2.0)
    drawn(run)
    before = (tmp_path / "runs.png").read_bytes()

    def full(self, path, **options):
        Path(path).write_bytes(PNG)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(OSError):
        main([str(run)])
    assert (tmp_path / "runs.png").read_bytes() == before and not [*tmp_path.glob(".tmp-*")]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 40), st.integers(1, 3), st.data())
def test_thinned_points_keep_the_mean_and_the_span(doublings, extra, data):
    n = min(MOST * 2, 211 * doublings) + extra
    points = Points()
    for i in range(n):
        points.add(i, float(i))
    assert 0 < len(points.x) < MOST and points.x == sorted(points.x)
    assert points.share == 1 if n < MOST else points.share >= 2
    covered = len(points.y) * points.share
    assert n - points.share < covered <= n
    assert sum(points.y) * points.share == pytest.approx(sum(range(covered)))


def test_a_log_of_any_length_takes_the_same_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "MOST", 400)  # or it would take long
    peaks = []
    for n in (2_000, 10_000):
        run = tmp_path / str(n)
        run.mkdir()
        with (run / "log.jsonl").open("w") as f:
            for step in range(n):
                f.write(f'{{"step": {step}, "loss": {5 - step / n}}}\n')
                if step % 4 == 0:  # the best of all is one among thousands
                    val = 1.5 if step == n // 2 else 4 - step / n
                    f.write(f'{{"step": {step}, "val_loss": {val}, "val_bpb": 1.0}}\n')
        tracemalloc.start()
        curve = read_curve(run / "log.jsonl", "a", "step", "loss")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert curve.best["step"] == n // 2 and curve.last["step"] == n - 1
        assert len(curve.train.x) < 400 and len(curve.val.x) < 400
    assert peaks[1] < 1.3 * peaks[0]


@pytest.mark.slow
def test_it_is_a_command(tmp_path):
    done = subprocess.run([sys.executable, "-m", "kit.plot", "nowhere"], cwd=CLONE,
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("plot.py: nowhere: no such folder")


# -------------------------------------------------------------------------------------- loss.png

HEADER = {"format": 1, "step": 0}


def train(step: int) -> dict:
    return {"step": step, "loss": 5.0 - step / 10}


def val(step: int) -> dict:
    return {"step": step, "val_loss": 4.0, "val_bpb": 2.0}


def loss_png(lines: list[dict], path: Path, title: str = "run") -> None:
    """What a run draws of itself."""
    log = path.with_name("log.jsonl")
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw([read_curve(log, title, "step", "loss")], path, "step", "loss", title=title)


@pytest.mark.parametrize("lines", [
    [], [HEADER], [HEADER, train(1)], [HEADER, val(1)], [HEADER, train(1), val(1)],
    [HEADER, *(train(s) for s in range(1, 3001)), *(val(s) for s in range(100, 3001, 100))],
    [{"step": 1, "val_loss": 3.0, "val_bpb": None}], [{"step": 1, "val_loss": 3.0}],
    [{"step": 1, "val_loss": 3.0, "val_bpb": 0.0}, {"step": 1, "val_loss": 3.0, "val_bpb": 1.0}],
    [{"step": 5, "note": "neither"}],
], ids=lambda rows: str(len(rows)))
def test_a_curve_is_drawn_whatever_there_is(tmp_path, lines):
    path = tmp_path / "loss.png"
    path.write_bytes(b"the old one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of a legend without entries
        loss_png(lines, path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n") and data.endswith(b"IEND\xaeB`\x82")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "loss.png"]


def test_a_title_is_text_not_mathematics(tmp_path):
    loss_png([train(1)], tmp_path / "loss.png", "costs $5_{ and $6 \\frac")
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_drawing_leaves_the_callers_matplotlib_alone(tmp_path):
    import matplotlib.pyplot as plt

    before = plt.get_backend(), plt.get_fignums()
    loss_png([train(1)], tmp_path / "loss.png")
    assert (plt.get_backend(), plt.get_fignums()) == before


def test_running_mean():
    assert running_mean([]) == [] and running_mean([3.0]) == [3.0]
    assert running_mean([9.0, 1.0] + [3.0] * 198)[1] == 5.0  # the first value does not linger
    assert running_mean((5.0,) * 100) == pytest.approx([5.0] * 100)  # also at its start
    mean = running_mean([0.0] * 100 + [1.0] * 100, share=0.05)  # over about 10
    assert mean[99] == 0 and 0.05 < mean[100] < 0.2 and mean[-1] > 0.99
    assert all(a <= b for a, b in zip(mean, mean[1:], strict=False))
