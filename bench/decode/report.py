"""The figures of `bench.decode`: medians, ratios, two tables and a picture."""

import statistics
from pathlib import Path

from bench.common import Row, print_table

COLORS = {"ours": "#2171b5", "older": "#9ecae1", "edited": "#756bb1", "llama.cpp": "#e6862d",
          "Hugging Face": "#6a9f58", "nanoGPT": "#9a9a9a"}
FIGURES = ("bandwidth_gb_s", "first_token_s", "import_torch_s")  # beside tokens/s
BITS = ("32", "16", "8", "4")
TASKS = {"512": "One text, 512 new tokens", "prefill": "Reading a prompt of 1,000",
         "batch 1": "One text at context 512", "batch 8": "8 texts at once",
         "batch 32": "32 texts at once"}


def medians(samples: list[Row]) -> list[Row]:
    """A row for each task, precision and side that ran: median and range, and ours over it."""
    rows = []
    for task in TASKS:
        for bits in BITS:
            ours = None
            for side in COLORS:  # ours comes first
                found = [s for s in samples
                         if (s["task"], s["bits"], s["side"]) == (task, bits, side)]
                if not found:
                    continue
                values = [s["tok_s"] for s in found]
                steady = [s["steady_tok_s"] for s in found]
                tok_s = statistics.median(values)
                ours = tok_s if side == "ours" else ours
                rows.append({"task": task, "bits": bits, "side": side, "way": found[0]["way"],
                             "tok_s": tok_s, "low": min(values), "high": max(values),
                             "steady_tok_s": None if None in steady else statistics.median(steady),
                             "ours": ours and ours / tok_s})
    return rows


def ratios(row: Row) -> Row:
    """What the table of medians does not say; of what did not run nothing.

    over_nanogpt: ours at 16 bits over nanoGPT, which runs in fp32. batch32_over_batch1: 32 texts at
    the precision that is best for them over one text at 16 bits; batch32_over_best_batch1: over one
    text at the precision that is best for it. bandwidth_share_16bit: the bytes that a token reads x
    steady tokens/s / the measured bandwidth.
    """
    rows = {(m["task"], m["side"], m["bits"]): m for m in medians(row["samples"])}
    found = {}
    if nanogpt := rows.get(("512", "nanoGPT", "32")):
        found["over_nanogpt"] = rows["512", "ours", "16"]["tok_s"] / nanogpt["tok_s"]
    one, many = ([m["tok_s"] for key, m in rows.items() if key[:2] == (task, "ours")]
                 for task in ("batch 1", "batch 32"))
    if many:
        found["batch32_over_batch1"] = max(many) / rows["batch 1", "ours", "16"]["tok_s"]
        found["batch32_over_best_batch1"] = max(many) / max(one)
    if "bandwidth_gb_s" in row:
        read = row["gb_per_token_16bit"] * rows["512", "ours", "16"]["steady_tok_s"]
        found["bandwidth_share_16bit"] = read / row["bandwidth_gb_s"]
    return found | {name: row[name] for name in FIGURES if name in row}


def print_figures(row: Row) -> None:
    """The medians and the ratios, on stdout."""
    if rows := medians(row["samples"]):
        print("\ntokens/s: of a whole call for 512 new ones, of the prompt for prefill, of all "
              "texts together for batch" + f"; older is {row['against']}" * bool(row["against"]))
        print_table(rows, [
            ("task", "task", ""), ("bits", "bits", ""), ("side", "side", ""),
            ("tok_s", "tokens/s", ",.1f"), ("low", "lowest", ",.1f"), ("high", "highest", ",.1f"),
            ("ours", "ours is x", ".2f"), ("way", "way", "")])
    print()
    print_table([{"name": name, "value": value} for name, value in ratios(row).items()],
                [("name", "figure", ""), ("value", "value", ".2f")])


def draw(row: Row, path: Path) -> None:
    """Tokens/s as bars, a panel for each of three tasks; no picture where none of them ran."""
    from matplotlib.figure import Figure  # slow to import; needs no display

    panels = {task: rows for task in ("512", "prefill", "batch 32")
              if (rows := [m for m in medians(row["samples"]) if m["task"] == task])}
    if not panels:
        return
    fig = Figure(figsize=(4 * len(panels) + 1, 4.8), layout="constrained")
    fig.suptitle(f"Tokens/s of {row['shape']['n_layer']} layers, width {row['shape']['n_embd']}, "
                 f"on {row['threads']} threads of {row['cpu']}", fontsize=11)
    for ax, (task, rows) in zip(fig.subplots(1, len(panels), squeeze=False)[0], panels.items(),
                                strict=True):
        bars = ax.barh([f"{m['side']}, {m['bits']} bits" for m in rows],
                       [m["tok_s"] for m in rows], color=[COLORS[m["side"]] for m in rows])
        ax.bar_label(bars, [f"{m['tok_s']:,.{0 if m['tok_s'] >= 10 else 1}f}" for m in rows],
                     padding=3)
        ax.set(title=TASKS[task], xlim=(0, 1.25 * max(m["tok_s"] for m in rows)))
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=130)
