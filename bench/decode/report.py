"""The figures of `bench.decode`: medians, ratios, its tables and its picture."""

import statistics
from pathlib import Path

from bench.trial import Row, print_table

SIDES = {"ours": "#2171b5", "older": "#9ecae1", "edited": "#756bb1", "llama.cpp": "#e6862d",
         "Hugging Face": "#6a9f58", "nanoGPT": "#9a9a9a"}
BITS = ("32", "16", "8", "4")
FEW = "16"  # the bits of batches


def middle(samples: list[Row], side: str, bits: str, task: str, key: str = "tok_s"
           ) -> float | None:
    """The median over rounds of one side's figure; None where it did not run."""
    values = [row[key] for row in samples
              if (row["side"], row["bits"], row["task"]) == (side, bits, task)]
    return None if not values or None in values else statistics.median(values)


def share(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def keys(row: Row) -> Row:
    """The ratios of a run, of medians; None where a side did not run.

    over_X_Nbit: our tokens/s of 512 new ones over X's, both at N bits. over_nanogpt: ours at 16
    bits over nanoGPT's, which runs in fp32; over_nanogpt_32bit: both in fp32. batch32_over_batch1:
    our 32 texts at the precision that is best for them over one text at 16 bits, at context 512.
    bandwidth_share_16bit: the weights that a token reads x steady tokens/s / the measured reading.
    over_older_Nbit: this commit's tokens/s of 512 new ones over the older one's.
    edited_over_ours_Nbit: the edited model's over those of the model as it is.
    """
    samples = row["samples"]

    def ours(bits: str, task: str) -> float | None:
        return middle(samples, "ours", bits, task)

    def over(side: str, bits: str, task: str = "512") -> float | None:
        return share(ours(bits, task), middle(samples, side, bits, task))

    one = {bits: f for bits in BITS if (f := ours(bits, "batch 1"))}
    many = {bits: f for bits in BITS if (f := ours(bits, "batch 32"))}
    best_one, best_many = max(one.values(), default=None), max(many.values(), default=None)
    steady, per_token = middle(samples, "ours", "16", "512", "steady_tok_s"), row.get(
        "gb_per_token_16bit")
    nano = middle(samples, "nanoGPT", "32", "512")
    return {
        "over_hugging_face_16bit": over("Hugging Face", "16"),
        "over_hugging_face_32bit": over("Hugging Face", "32"),
        **{f"over_llama_cpp_{bits}bit": over("llama.cpp", bits) for bits in BITS},
        **{f"over_older_{bits}bit": over("older", bits) for bits in BITS},
        **{f"edited_over_ours_{bits}bit": share(middle(samples, "edited", bits, "512"),
                                                ours(bits, "512")) for bits in BITS},
        "prefill_over_llama_cpp_16bit": over("llama.cpp", "16", "prefill"),
        "prefill_over_hugging_face_16bit": over("Hugging Face", "16", "prefill"),
        "batch32_over_batch1": share(best_many, one.get("16")),
        "batch32_over_batch1_16bit": share(many.get("16"), one.get("16")),
        "batch32_over_best_batch1": share(best_many, best_one),
        "batch32_best_bits": max(many, key=many.get, default=None),
        "bandwidth_share_16bit": share(steady and per_token and steady * per_token,
                                       row.get("bandwidth_gb_s")),
        "over_nanogpt": share(ours("16", "512"), nano),
        "over_nanogpt_32bit": share(ours("32", "512"), nano),
        "first_token_s": row.get("first_token_s"), "import_torch_s": row.get("import_torch_s")}


def lines(samples: list[Row], tasks: list[str]) -> list[Row]:
    """A row for each side and precision that ran one of the tasks: medians, and ours over them."""
    rows = []
    for bits in BITS:
        for side in SIDES:
            mine = [s for s in samples if (s["side"], s["bits"]) == (side, bits)
                    and s["task"] in tasks]
            if not mine:
                continue
            row = {"bits": bits, "side": side,
                   "way": ", ".join(dict.fromkeys(s["way"] for s in mine))}
            for task in tasks:
                found = [s["tok_s"] for s in mine if s["task"] == task]
                row |= {task: middle(samples, side, bits, task),
                        f"{task} low": min(found, default=None),
                        f"{task} high": max(found, default=None),
                        f"{task} steady": middle(samples, side, bits, task, "steady_tok_s"),
                        f"{task} first_s": middle(samples, side, bits, task, "first_s"),
                        f"{task} ours": share(middle(samples, "ours", bits, task),
                                              middle(samples, side, bits, task))}
            rows.append(row)
    return rows


def show(row: Row) -> None:
    """The tables of the parts that ran, on stdout."""
    samples, ends = row["samples"], [("bits", "bits", ""), ("side", "side", "")]
    if found := lines(samples, ["128", "512"]):
        print("\nOne text, greedy, after a prompt of 16: tokens/s of the whole call; medians")
        print_table(found, [*ends, ("128", "128 new", ",.1f"), ("512", "512 new", ",.1f"),
                            ("512 low", "lowest", ",.1f"), ("512 high", "highest", ",.1f"),
                            ("512 steady", "steady", ",.1f"), ("512 ours", "ours is x", ".2f"),
                            ("way", "way", "")])
    if ratios := [f"{ratio:.2f} at {bits} bits" for bits in BITS
                  if (ratio := row.get(f"over_older_{bits}bit")) and row.get("against")]:
        print(f"\nOurs, tokens/s over {row['against']}'s, 512 new: {', '.join(ratios)}")
    if found := lines(samples, ["first", "prefill"]):
        for one in found:
            one["ms"] = one["first first_s"] and 1000 * one["first first_s"]
            one["s"] = one["prefill first_s"]
        print("\nThe first token: after 16 tokens, and after 1,000")
        print_table(found, [*ends, ("ms", "ms after 16", ",.1f"), ("s", "s after 1,000", ".3f"),
                            ("prefill", "tokens/s", ",.0f"), ("prefill low", "lowest", ",.0f"),
                            ("prefill high", "highest", ",.0f"),
                            ("prefill ours", "ours is x", ".2f"), ("way", "way", "")])
    batches = [f"batch {n}" for n in (1, 8, 32)]
    if found := lines(samples, batches):
        for one in found:
            one["growth"] = share(one["batch 32"], one["batch 1"])
        print("\nTexts side by side, from 448 tokens to 512: tokens/s of all together; medians")
        print_table(found, [*ends, *((name, name, ",.1f") for name in batches),
                            ("growth", "32 over 1", ".2f"), ("batch 32 ours", "ours is x", ".2f"),
                            ("way", "way", "")])
    if row.get("bandwidth_gb_s"):
        part = row["bandwidth_share_16bit"]
        print(f"\nMemory reads {row['bandwidth_gb_s']:.1f} GB/s; ours at 16 bits, "
              f"{row['gb_per_token_16bit']:.3f} GB a token, takes {part:.0%} of it")
    if row.get("first_token_s"):
        print(f"\n`python sample.py` to its first token: {row['first_token_s']:.2f} s; "
              f"`import torch` alone: {row['import_torch_s']:.2f} s, difference "
              f"{row['first_token_s'] - row['import_torch_s']:+.2f} s")


def draw(row: Row, path: Path) -> str | None:
    """Tokens/s as bars, a panel for each of the three parts that ran; None where none did."""
    from matplotlib.figure import Figure  # slow to import; needs no display

    samples = row["samples"]
    panels = [("One text, 512 new tokens", [(f"{bits} bits", bits, "512") for bits in BITS]),
              ("Reading a prompt of 1,000", [(f"{bits} bits", bits, "prefill") for bits in BITS]),
              ("Texts side by side, 16 bits", [(f"batch {n}", FEW, f"batch {n}")
                                               for n in (1, 8, 32)])]
    panels = [(title, groups) for title, groups in panels
              if any(middle(samples, "ours", bits, task) for _, bits, task in groups)]
    if not panels:
        return None
    present = [side for side in SIDES if any(s["side"] == side for s in samples)]
    fig = Figure(figsize=(10, 4.8), layout="constrained")
    if row.get("shape"):
        layers, width = row["shape"]["n_layer"], row["shape"]["n_embd"]
        machine = f"{row['threads']} threads of {row['cpu']}"
        fig.suptitle(f"Tokens/s of {layers} layers, width {width}, on {machine}", fontsize=11)
    for ax, (title, groups) in zip(fig.subplots(1, len(panels), squeeze=False)[0], panels,
                                   strict=True):
        bars(ax, samples, groups)
        ax.set_title(title, fontsize=12)
    handles = [fig.axes[0].barh([0], [0], color=SIDES[side]) for side in present]
    fig.legend(handles, present, loc="outside lower center", ncols=len(present), frameon=False,
               fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=130)
    return path.name


def bars(ax, samples: list[Row], groups: list[tuple[str, str, str]]) -> None:
    """A bar for each side that ran a (label, bits, task), downwards, the figure at its end."""
    y, ticks, longest = 0.0, [], 0.0
    for label, bits, task in groups:
        found = [(side, f) for side in SIDES if (f := middle(samples, side, bits, task))]
        if not found:
            continue
        ticks.append((y + (len(found) - 1) / 2, label))
        for side, tok_s in found:
            ax.barh(y, tok_s, height=0.92, color=SIDES[side])
            ax.annotate(f"{tok_s:,.0f}" if tok_s >= 10 else f"{tok_s:.1f}", (tok_s, y), (3, 0),
                        textcoords="offset points", va="center", fontsize=10.5)
            y, longest = y + 1, max(longest, tok_s)
        y += 0.7
    ax.set(xlim=(0, 1.2 * longest), ylim=(y - 1, -0.8))
    ax.set_yticks(*zip(*ticks, strict=True), fontsize=11)
    ax.locator_params(axis="x", nbins=4)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="x", alpha=0.25)
    ax.set_axisbelow(True)
