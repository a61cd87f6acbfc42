"""The figures of `bench.train`: what follows from the trials, its tables and its picture."""

import statistics
from pathlib import Path
from typing import Any

from bench.trial import Row, Trial, apart, medians, print_table, sizes

Curve = list[tuple[int, float, float]]  # (updates, seconds of training, validation loss)
Rounds = list[dict[str, Trial]]
STYLE = {"nanoGPT": "#d94801", "ours": "#2171b5", "ours long": "#238b45"}


def seconds_to(curve: Curve, target: float) -> float | None:
    """Seconds of training until the first evaluation at or below a loss; None: never."""
    return next((seconds for _, seconds, loss in curve if loss <= target), None)


def flops_per_token(rounds: Rounds) -> int:
    """By one formula for both sides, that of our model, at the shape of our run."""
    return apart(sizes, [rounds[0]["ours"].shape])[0][1]


def share(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def race_rows(rounds: Rounds, target: float | None, peak: float) -> Row:
    """Loss, time and the seconds to a target loss, of every trial and as medians.

    target: None takes nanoGPT's last loss of the same round, which it reaches at its end.
    """
    flops, rows = flops_per_token(rounds), []
    for number, trials in enumerate(rounds, 1):
        theirs = trials.get("nanoGPT")
        goal = theirs.curve[-1][2] if target is None and theirs else target
        for side, trial in trials.items():
            updates, train_s, loss = trial.curve[-1]
            tok_s = updates * trial.update_tokens / train_s
            at = None if goal is None else seconds_to(trial.curve, goal)
            rows.append({"round": number, "side": side, "loss": loss, "train_s": train_s,
                         "time": share(train_s, theirs and theirs.curve[-1][1]), "to_goal_s": at,
                         "tok_s": tok_s, "mfu": tok_s * flops / peak, "peak_mib": trial.peak_mib,
                         "seconds": trial.seconds, "goal": goal})
        these = rows[-len(trials):]
        base = next((row["to_goal_s"] for row in these if row["side"] == "nanoGPT"), None)
        for row in these:
            row["to_goal"] = share(row["to_goal_s"], base)
    return summary(rows)


def speed_rows(rounds: Rounds, peak: float, skip: int) -> Row:
    """Seconds of an update, tokens/s and MFU of every trial and as medians.

    skip: updates at the beginning that are left out, since they are slower.
    """
    flops, rows = flops_per_token(rounds), []
    for number, trials in enumerate(rounds, 1):
        update_s = {side: statistics.median(t.update_s[skip:]) for side, t in trials.items()}
        tok_s = {side: t.update_tokens / update_s[side] for side, t in trials.items()}
        for side, trial in trials.items():
            rows.append({"round": number, "side": side, "update_s": update_s[side],
                         "tok_s": tok_s[side], "ratio": share(tok_s[side], tok_s.get("nanoGPT")),
                         "of_adamw": share(update_s[side], update_s.get("AdamW")),
                         "mfu": tok_s[side] * flops / peak, "peak_mib": trial.peak_mib,
                         "dtypes": trial.dtypes or None})
    return summary(rows)


def summary(rows: list[Row]) -> Row:
    return {"trials": rows, "medians": [row | {"round": "median"} for row in medians(rows, "side")]}


def show_race(title: str, row: Row) -> None:
    goal = row["medians"][0]["goal"]
    print(f"\n{title}; losses are of the whole validation split")
    columns = [("round", "round", ""), ("side", "side", ""), ("loss", "last loss", ".4f"),
               ("train_s", "train s", ".1f"), ("time", "of nanoGPT's", ".3f")]
    if goal is not None:
        columns += [("to_goal_s", f"s to {goal:.4f}", ".1f"), ("to_goal", "of nanoGPT's", ".3f")]
    columns += [("tok_s", "tokens/s", ",.0f"), ("mfu", "MFU", ".1%"),
                ("peak_mib", "peak MiB", ",.0f"), ("seconds", "s in all", ".1f")]
    print_table(row["trials"] + row["medians"], columns)


def show_speed(title: str, row: Row) -> None:
    print(f"\n{title}; medians of the updates of a trial")
    columns = [("round", "round", ""), ("side", "side", ""), ("update_s", "s an update", ".4f"),
               ("tok_s", "tokens/s", ",.1f"), ("ratio", "x nanoGPT's", ".2f"),
               ("mfu", "MFU", ".1%"), ("peak_mib", "peak MiB", ",.0f"),
               ("dtypes", "products, Muon", "")]
    if any(trial["of_adamw"] for trial in row["trials"]):
        columns.insert(3, ("of_adamw", "of AdamW's", ".2f"))
    print_table(row["trials"] + row["medians"], columns)


def draw(rounds: Rounds, path: Path, title: str) -> str:
    """Validation loss against seconds of training; the round of median time in full colour."""
    from matplotlib.figure import Figure  # slow to import; needs no display

    fig = Figure(figsize=(8, 4.8), layout="constrained")
    ax = fig.subplots()
    last = max(trial.curve[-1][1] for trials in rounds for trial in trials.values())
    for side in rounds[0]:
        curves = sorted((r[side].curve for r in rounds), key=lambda curve: curve[-1][1])
        middle = (len(curves) - 1) // 2
        for i, curve in enumerate(curves):
            _, seconds, losses = zip(*curve, strict=True)
            bold: dict[str, Any] = {"linewidth": 2, "marker": "o", "markersize": 3.5, "zorder": 3}
            ax.plot(seconds, losses, color=STYLE[side],
                    **(bold if i == middle else {"linewidth": 1, "alpha": 0.3}))
        _, seconds, loss = curves[middle][-1]
        early = seconds < 0.6 * last  # below the end of a curve that falls early there is room
        end = 0.015 * last if early else max(curve[-1][1] for curve in curves)
        ax.annotate(f"{side}\n{loss:.3f} after {seconds:.0f} s", (end, loss), color=STYLE[side],
                    xytext=(0, -10) if early else (8, 0), textcoords="offset points",
                    va="top" if early else "center")
        if side == "nanoGPT":
            ax.plot([0, seconds], [loss, loss], "--", color="#737373", linewidth=1)
            ax.annotate("nanoGPT's last loss", (0.62 * last, loss), xytext=(0, -4), fontsize=9,
                        textcoords="offset points", color="#737373", va="top", ha="center")
    lowest = min(trial.curve[-1][2] for trials in rounds for trial in trials.values())
    highest = max(trial.curve[0][2] for trials in rounds for trial in trials.values())
    ax.set(xlabel="seconds of training, without evaluating and saving", xlim=(0, 1.25 * last),
           ylabel="loss on the whole validation split (nats per character)",
           ylim=(lowest - 0.1, min(highest + 0.05, lowest + 1.2)))
    ax.set_title(title)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=130)
    return path.name
