"""How fast do we write? Against Hugging Face, llama.cpp and nanoGPT, side by side in one run.

    python -m bench.decode                                  all parts, three rounds
    python -m bench.decode --nanogpt=~/nanoGPT --json       nanoGPT too; a last line of JSON
    python -m bench.decode --against=HEAD~20                an older commit of this clone too
    python -m bench.decode --parts=batch1,start --rounds=1

The model has GPT-2's smallest shape and random weights, the same for all. batch1: greedy text of
128 and 512 new tokens after 16, at 32, 16, 8 and 4 bits a weight, and how much of the memory's
bandwidth ours reaches. prefill: the time to the first token after 16 and after 1,000. batch: 1, 8
and 32 texts of 448 tokens that go on to 512. start: `python sample.py` to its first token.
nanogpt: nanoGPT's generate, one round of it, for it is slow.
batch32_over_batch1 is our best precision at 32 texts over 16 bits at one; over the best at one it
is batch32_over_best_batch1.

Two more sides are ours. edited is the same model after an edit that native code does not know, a
squared ReLU in its MLPs, so that its own forward writes; it takes part in batch1. older is the
commit of --against, whose files are imported in a process of its own; what it takes is compared as
over_older_Nbit, this commit's tokens/s over its.

Fairness. Each side is a process that loads its model once and waits without using a core while
others run; the sides take turns, in the other order every second round; figures are medians. All
use as many threads as torch does. Greedy is the argmax of all 50,257 logits for everyone, and
nothing stops early: transformers gets no end token, which also spares it a processor. Where a
peer has several ways (transformers: bfloat16 or float16, sdpa or eager attention; llama.cpp: flash
attention or not, batches of 512 or 1,024, one cache for all texts or one each), all are tried
before each kind of task, and the best is its way; the table says which. A small trial comes first,
for without AVX512-FP16 float16 is quick for one text and ten times slower for the rest. llama.cpp
is called by its low-level functions and numpy takes the argmax, which takes a tenth of the time of
its own greedy sampler; its cache is fp16, as by default; its files hold all matrices and the
embedding in the one type, norms, biases and positions in fp32. transformers has its default,
dynamic cache, and no 8 and 4 bits here. At 32 bits ours and transformers must write the same ids.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

from bench.decode.model import SHAPE
from bench.decode.report import draw, keys, show
from bench.decode.rounds import Bench
from bench.peer import check_clone
from bench.trial import CLONE, TrialFailed, commit, keep, machine, tell
from data.prepare import Parser

PARTS = ("batch1", "prefill", "batch", "start", "nanogpt")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="bench.decode", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--nanogpt", metavar="PATH", help="a nanoGPT clone; without it that part is left out")
    add("--against", metavar="COMMIT", help="an older commit of this clone, as one more side")
    add("--rounds", type=int, default=3, help="turns of each side (default: %(default)s)")
    add("--parts", default=",".join(PARTS), help="some of %(default)s, with commas between")
    add("--json", action="store_true", help="end with a line of JSON, the row of decode.jsonl")
    add("--out", type=Path, default=Path("out/bench"), metavar="FOLDER",
        help="where decode.jsonl and decode.png go (default: %(default)s)")
    add("--shape", default=",".join(map(str, list(SHAPE.values())[:4])), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    explicit, args.parts = args.parts != ",".join(PARTS), args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts={','.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    if args.rounds < 1:
        parser.error(f"--rounds={args.rounds}: expected 1 or more")
    args.shape = SHAPE | dict(zip(SHAPE, map(int, args.shape.split(",")), strict=False))
    if args.against:
        args.against = short_name(args.against, parser)
    if args.nanogpt:
        args.nanogpt = check_clone(Path(args.nanogpt).expanduser())
    elif "nanogpt" in args.parts:
        if explicit:
            parser.error("--parts=nanogpt: needs --nanogpt=PATH, a clone of it")
        args.parts.remove("nanogpt")
    return args


def short_name(commit: str, parser: Parser) -> str:
    """The short name of a commit that has native code or its equal; else the parser ends it all."""
    def git(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", "-C", str(CLONE), *words], capture_output=True, text=True)

    found = git("rev-parse", "--verify", "--short", "--end-of-options", f"{commit}^{{commit}}")
    if found.returncode:
        parser.error(f"--against={commit}: not a commit of this clone")
    name = found.stdout.strip()
    if all(git("cat-file", "-e", f"{name}:{path}").returncode
           for path in ("kit/kernels/__init__.py", "kit/fast.py")):
        parser.error(f"--against={commit}: it has neither kit/kernels nor kit/fast.py")
    return name


def main(argv: list[str]) -> int:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    row = machine() | ({"nanogpt": commit(args.nanogpt)} if args.nanogpt else {})
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(args, Path(work))
        row |= {"threads": bench.threads, "shape": args.shape, "missing": bench.missing,
                "against": args.against}
        print(f"{row['cpu']}, {bench.threads} threads, torch {row['torch']}", flush=True)
        try:
            if set(args.parts) & {"batch1", "prefill", "batch"}:
                row |= bench.guard()
            for part in (part for part in PARTS if part in args.parts):
                row |= getattr(bench, part)()
        except TrialFailed as failure:
            tell(f"bench.decode: {failure}")
            row["failed"] = str(failure)
        finally:
            bench.close()
    row |= {"samples": bench.samples}
    row |= keys(row)
    show(row)
    for side, how in bench.missing.items():
        print(f"\n{side} is left out: {how} brings it")
    if not bench.samples and "failed" in row:
        return 1
    keep(row | {"png": draw(row, args.out / "decode.png")}, args.out, "decode.jsonl", args.json)
    return int("failed" in row)
