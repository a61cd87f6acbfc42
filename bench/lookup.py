"""What does lookup decoding (kit/writing/drafts.py) gain, and what does it cost? On the CPU.

    python -m bench.lookup                     what a step of several tokens costs
    python -m bench.lookup --text=FILE         how well drafts guess a text, too
    python -m bench.lookup --out_dir=RUN       how fast a trained model writes with drafts, too

steps: one to 32 tokens of one row go through a GPT of GPT-2's smallest shape and its head, after
256. A draft of n tokens pays where more of them are right, on average, than the table says.

text: pieces of 1,024 tokens are gone through as if a model had written their second half, with
drafts from suffixes of several lengths. Tokens a step are exact; the speed is what the times of
the steps in bfloat16 make of them, without the sampler. The sizes in kit/writing/drafts.py are
from here.

run: tokens a second, plain and with drafts of at most 1, 3, 7 and 15 tokens, after prompts from the
validation split (or --prompt). The text must be that of plain decoding; else it says so.

All that is compared takes turns, in the other order every second round; figures are medians.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import DataError
from data.prepare import Parser
from kit.errors import UserError, run

KINDS, WIDTHS = ("bfloat16", "int8", "int4"), (1, 2, 3, 4, 5, 8, 12, 16, 24, 32)
SIZES = ((2,), (3,), (3, 2), (4, 3, 2), (5, 4, 3, 2), (4, 3, 2, 1), (8, 4, 2))
MOSTS, PIECE = (1, 3, 7, 15), 1024


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="bench.lookup", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="UTF-8, in the tokens of the run, else bytes")
    add("--out_dir", metavar="RUN", help="a run or checkpoint folder")
    add("--prompt", help="what the run goes on with, instead of its validation split")
    add("--prompts", type=int, default=8, help="texts of the run (default: %(default)s)")
    add("--new", type=int, default=256, help="length of each in tokens (default: %(default)s)")
    add("--rounds", type=int, default=5, help="turns (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("prompts", "new", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}={getattr(args, name)}: expected 1 or more")
    if args.prompt and not args.out_dir:
        parser.error("--prompt: needs --out_dir=RUN, who goes on with it")
    return args


def in_turns(things: tuple[Any, ...], rounds: int) -> list[Any]:
    """Each thing once a round, in the other order every second round."""
    return [thing for r in range(rounds) for thing in things[:: -1 if r % 2 else 1]]


# ------------------------------------------------------------------------------------------ steps


def step_times(kind: str, rounds: int) -> tuple[str, dict[int, float]]:
    """What the model is, and the seconds of a step of each of WIDTHS tokens."""
    import torch

    from kit.kernels import fast
    from model import GPT, GPTConfig

    torch.manual_seed(1)
    model, found = GPT(GPTConfig(bias=True)), {width: [] for width in WIDTHS}
    how, cache = fast(model, kind), model.new_cache()
    idx = torch.randint(model.config.vocab_size, (1, 256 + max(WIDTHS)))
    with torch.inference_mode():
        model.hidden(idx[:, :256], cache)
        for width in WIDTHS[:1] * 3 + tuple(in_turns(WIDTHS, 3 * rounds)):
            start = time.perf_counter()
            model.logits(model.hidden(idx[:, 256 : 256 + width], cache))
            found[width].append(time.perf_counter() - start)
            cache.trim(256)
    found[1] = found[1][3:]  # the first few warm it up
    return how, {width: statistics.median(times) for width, times in found.items()}


def show_steps(rounds: int) -> dict[int, float]:
    """Print the table of steps -> the times in bfloat16."""
    tables = {}
    for kind in KINDS:
        how, tables[kind] = step_times(kind, rounds)
        if kind == KINDS[0]:
            print(f"124M parameters, {how.partition(', ')[2]}: a step of several tokens\n")
            print(f"{'tokens':8}" + "".join(f"{width:>7}" for width in WIDTHS))
        times = tables[kind]
        print(f"{kind:8}" + "".join(f"{1e3 * t:7.1f}" for t in times.values()) + "  ms")
        print(f"{'':8}" + "".join(f"{t / times[1] - 1:7.2f}" for t in times.values())
              + "  right tokens of a draft pay for it", flush=True)
    return tables[KINDS[0]]


# ------------------------------------------------------------------------------------------- text


def replay(ids: list[int], start: int, most: int, sizes: tuple[int, ...]) -> Counter:
    """How often a step of so many tokens was taken, had a model written ids[start:]."""
    from kit.writing.drafts import Draft

    draft, widths, i = Draft(ids[:start], most, sizes), Counter(), start
    while i < len(ids):
        guess, right = draft.guess(len(ids) - i - 1), 0
        while right < len(guess) and guess[right] == ids[i + right]:
            right += 1
        for id in ids[i : i + right + 1]:
            draft.add(id)
        draft.learn(len(guess), right)
        widths[1 + len(guess)] += 1
        i += right + 1
    return widths


def show_text(path: Path, tokenizer: Any, times: dict[int, float]) -> None:
    ids = tokenizer.encode(path.read_text(encoding="utf-8"), unknown="skip")
    pieces = [ids[i : i + PIECE] for i in range(0, len(ids) - PIECE + 1, PIECE)][:100]
    if not pieces:
        raise UserError(f"{path}: {len(ids)} tokens; expected at least {PIECE}")
    print(f"\n{path.name} in tokens of {tokenizer.spec}: {len(pieces)} pieces; "
          "tokens a step, and speed against plain decoding\n")
    print(f"{'suffixes':14}" + "".join(f"{f'at most {most}':>18}" for most in MOSTS))
    written = len(pieces) * (PIECE - PIECE // 2)
    for sizes in SIZES:
        cells = []
        for most in MOSTS:
            widths = sum((replay(p, PIECE // 2, most, sizes) for p in pieces), Counter())
            cost = sum(n * np.interp(width, list(times), list(times.values()))
                       for width, n in widths.items())
            cells.append(f"{written / widths.total():.2f}{written * times[1] / cost:7.2f} x")
        print(f"{', '.join(map(str, sizes)):14}" + "".join(f"{c:>18}" for c in cells), flush=True)


# -------------------------------------------------------------------------------------------- run


def run_prompts(folder: Path, tokenizer: Any, args: argparse.Namespace, n: int) -> list[list[int]]:
    """Ids to go on with: --prompt, or n tokens each from the validation split of the run."""
    from data.dataset import Dataset
    from data.making.sources import data_root
    from kit.files import read_json

    if args.prompt:
        return [tokenizer.encode(args.prompt)] * args.prompts
    config = folder.parent.parent / "config.json"
    name = read_json(config)["settings"]["dataset"] if config.is_file() else ""
    at = [p for p in (data_root() / name, Path(name)) if (p / "dataset.json").is_file()]
    if not at:
        raise UserError(f"{folder}: its data set {name!r} is not here; give a --prompt")
    split = Dataset(at[0]).val
    starts = np.linspace(0, split.n - n, args.prompts + 2).astype(int)[1:-1].tolist()
    return split.read_rows(starts, n).tolist()


def show_run(folder: Path, model: Any, tokenizer: Any, args: argparse.Namespace) -> None:
    import torch

    from kit.kernels import fast
    from kit.sampling import Sampler
    from kit.writing import drafts, window

    prompts = run_prompts(folder, tokenizer, args, max(1, model.config.block_size // 2))
    how = fast(model, "bfloat16" if model.num_params() > 20e6 else "float32")
    print(f"\n{folder}: {model.num_params():,} parameters, {how}\n{len(prompts)} texts of "
          f"{args.new} tokens\n")
    print(f"{'temperature':12}{'at most':>8}{'tokens/s':>10}{'speed':>8}{'tokens a step':>15}")
    passes, logits = [], model.logits

    def counted(x: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        return logits(x)

    model.logits = counted

    def write(most: int, temperature: float) -> tuple[float, list[list[int]]]:
        start, texts = time.perf_counter(), []
        for seed, ids in enumerate(prompts):
            choose = Sampler([seed], temperature=temperature, top_k=50)
            options = dict(lookup=most) if most else {}
            steps = drafts.steps if most else window.steps
            new = steps(model, torch.tensor([ids]), args.new, choose, **options)
            texts.append(list(map(int, new)))
        return time.perf_counter() - start, texts

    for temperature in (0, 0.8):
        times, found = {most: [] for most in (0, *MOSTS)}, {}
        for most in in_turns((0, *MOSTS), args.rounds):
            passes.clear()
            seconds, texts = write(most, temperature)
            times[most].append(seconds)
            found[most] = len(passes), texts
        total = len(prompts) * args.new
        plain = statistics.median(times[0])
        for most, (steps, texts) in found.items():
            seconds = statistics.median(times[most])
            other = sum(a != b for a, b in zip(texts, found[0][1], strict=True))
            print(f"{temperature:<12}{most or 'plain':>8}{total / seconds:10.0f}"
                  f"{plain / seconds:6.2f} x{total / steps:15.2f}"
                  + f"  {other} texts differ" * bool(other), flush=True)


def main(argv: list[str]) -> None:
    from data.tokenizer import ByteTokenizer, from_json
    from kit.checkpoint import load_model
    from kit.run.locate import find_checkpoint, find_run

    args, model, tokenizer = parse(argv), None, ByteTokenizer()
    if args.out_dir:
        folder = find_checkpoint(find_run(args.out_dir))
        model, tokenizer_json, _ = load_model(folder)
        tokenizer = from_json(tokenizer_json)
    times = show_steps(args.rounds)
    if args.text:
        show_text(args.text, tokenizer, times)
    if model:
        show_run(folder, model, tokenizer, args)


if __name__ == "__main__":
    run(main, mistakes=(DataError,))
