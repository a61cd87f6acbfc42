"""How fast is decoding? Against Hugging Face, llama.cpp, nanoGPT and an older commit, in one run.

    python -m bench.decode                                  all parts, three rounds
    python -m bench.decode --nanogpt=~/nanoGPT --json       nanoGPT too; a last line of JSON
    python -m bench.decode --against=HEAD~20                an older commit of this clone too
    python -m bench.decode --parts=batch1,start --rounds=1

The model has GPT-2's smallest shape and random weights, the same for all. The parts:

batch1   one greedy text of 512 new tokens after a prompt of 16, at 32, 16, 8 and 4 bits a weight,
         and the share of the memory's bandwidth that ours reaches
prefill  the time to the first token after a prompt of 1,000
batch    1, 8 and 32 texts that go on from 448 tokens to 512
start    `python sample.py` from its start to its first token, beside `import torch`

Two more sides are this project's own. "edited" is the same model after an edit that native code
does not know, a squared ReLU in its MLPs, so that the model's own forward runs; it takes part in
batch1. "older" is the commit of --against, run by the bench.decode of that commit.

Fairness. Each turn of a side is a process of its own, and nothing else runs meanwhile; the sides
take turns, in the reverse order every second round; figures are medians. All use as many threads
as torch does. Greedy is the argmax of all 50,257 logits for everyone, and nothing stops early:
transformers gets no end token, which also spares it a processor. Where a peer has several ways
(transformers: bfloat16 or float16, sdpa or eager attention; llama.cpp: flash attention or not,
batches of 512 or 1,024, one cache for all texts or one each), all are tried in each turn, and the
fastest is taken; the table names it. llama.cpp's cache is fp16, as by
default; its files hold all matrices and the embedding in the one type, norms, biases and positions
in fp32. transformers has its default, dynamic cache, and no 8 and 4 bits here. nanoGPT has no
cache, is slow and runs in the first round only. At 32 bits ours and transformers must write the
same ids; how far the others agree is printed.
"""

import argparse
import importlib.util
import tempfile
from pathlib import Path
from typing import NamedTuple

from bench import common
from bench.common import ProcessFailed, Row, log
from bench.decode.report import BITS, draw, medians, print_figures, ratios
from bench.decode.sides import SHAPE, make_files, read_bandwidth
from bench.decode.start import measure_start
from bench.decode.worker import ask, check_out
from bench.nanogpt import check_clone
from kit.errors import UserError, run

NEEDS = {"Hugging Face": ("transformers",), "llama.cpp": ("llama_cpp", "gguf")}  # modules
AGREE = 64  # greedy ids that are compared


class Task(NamedTuple):
    """`rows` prompts of so many tokens, then `new` tokens each."""

    kind: str  # a side may do each kind in another way
    rows: int
    prompt: int
    new: int


PARTS = {"batch1": {"512": Task("decode", 1, 16, 512)},
         "prefill": {"prefill": Task("prefill", 1, 1000, 1)},
         "batch": {"batch 1": Task("decode", 1, 448, 65), "batch 8": Task("batch", 8, 448, 65),
                   "batch 32": Task("batch", 32, 448, 65)},
         "start": {}}
TRIAL = {"decode": Task("decode", 1, 16, 160), "prefill": Task("prefill", 1, 1000, 1),
         "batch": Task("batch", 8, 128, 17)}  # what the ways of a side are tried with


def parse(argv: list[str]) -> argparse.Namespace:
    parser = common.command_line("bench.decode", __doc__)
    add = parser.add_argument
    add("--nanogpt", metavar="PATH", help="a nanoGPT clone, as one more side of batch1")
    add("--against", metavar="COMMIT", help="an older commit of this clone, as one more side")
    add("--rounds", type=int, default=3, help="turns of each side (default: %(default)s)")
    add("--parts", default=",".join(PARTS), help="some of %(default)s, with commas between")
    add("--json", action="store_true", help="end with a line of JSON, the row of decode.jsonl")
    add("--out", type=Path, default=Path("out/bench"), metavar="FOLDER",
        help="where decode.jsonl and decode.png go (default: %(default)s)")
    add("--shape", default="12,12,768,50257", help=argparse.SUPPRESS)  # a small one, for tests
    args = parser.parse_args(argv)
    args.parts = common.choose_parts(parser, args.parts, tuple(PARTS))
    common.require_positive(parser, args, "rounds")
    args.shape = SHAPE | dict(zip(SHAPE, map(int, args.shape.split(",")), strict=False))
    if args.nanogpt:
        args.nanogpt = check_clone(Path(args.nanogpt).expanduser())
    return args


def takes_part(side: str, bits: str, name: str) -> bool:
    """Whether a side does a task; batches are for 16 bits, on our side also for 8 and 4."""
    if side in ("edited", "nanoGPT"):
        return name == "512"
    return (not name.startswith("batch") or bits == "16"
            or side in ("ours", "older") and bits != "32")


def rates(name: str, task: Task, got: Row) -> Row:
    """Tokens a second: of a whole call; of a prompt; or of all rows once the prompts are read."""
    later = task.rows * (task.new - 1)
    steady = later / got["later_s"] if later else None
    tok_s = {"512": task.new / got["seconds"], "prefill": task.prompt / got["first_s"]}
    return {"tok_s": tok_s.get(name, steady), "steady_tok_s": steady}


def common_start(a: list, b: list) -> int:
    """The number of elements that two lists have in common at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


class Race:
    """The sides that take part and what was measured."""

    def __init__(self, args: argparse.Namespace, work: Path):
        self.args, self.work = args, work
        self.samples: list[Row] = []
        self.ids: dict[tuple[str, str], list] = {}  # greedy ids of each side
        self.older = check_out(args.against, work) if args.against else None
        self.missing = [side for side, modules in NEEDS.items()
                        if not all(map(importlib.util.find_spec, modules))]
        for side in self.missing:
            log(f"{side} is left out, it needs {' and '.join(NEEDS[side])}: "
                "pip install transformers llama-cpp-python gguf")
        bits_of = {"ours": BITS, "older": BITS if args.against else (), "edited": BITS,
                   "Hugging Face": ("16", "32"), "llama.cpp": BITS,
                   "nanoGPT": ("32",) if args.nanogpt else ()}
        self.sides = [(side, bits) for bits in BITS for side in bits_of
                      if bits in bits_of[side] and side not in self.missing]
        self.threads, self.weights_a_token = common.in_new_process(
            make_files, work, args.shape, "llama.cpp" not in self.missing)

    def turn(self, side: str, bits: str, number: int) -> None:
        """One process of a side: a trial of its ways for each kind of task, ids, all its tasks."""
        tasks = {name: task for part in self.args.parts for name, task in PARTS[part].items()
                 if takes_part(side, bits, name)}
        if not tasks and (number > 1 or side in ("edited", "nanoGPT")):
            return
        kinds = dict.fromkeys(["decode", *(task.kind for task in tasks.values())])
        questions = [TRIAL[kind]._asdict() | {"choose": True} for kind in kinds]
        questions.append(Task("decode", 1, 16, AGREE)._asdict() | {"ids": True})
        questions += [task._asdict() for task in tasks.values()]
        clone = {"older": self.older, "nanoGPT": self.args.nanogpt}.get(side)
        note, *answers = ask(side, bits, self.work, self.threads, questions, clone)
        log(f"round {number}, {side}, {bits} bits: {note['note']}")
        self.ids[side, bits] = answers[len(kinds)]["ids"]
        for (name, task), got in zip(tasks.items(), answers[len(kinds) + 1:], strict=True):
            self.samples.append({"round": number, "side": side, "bits": bits, "task": name,
                                 "way": got["variant"]} | rates(name, task, got))
            log(f"    {name}: {self.samples[-1]['tok_s']:,.1f} tokens/s, {got['variant']}")

    def agree(self) -> Row:
        """How many greedy ids of each side equal ours at 32 bits, up to the first that differs.

        UserError if Hugging Face at 32 bits differs. An edited model is another model.
        """
        agree = {f"{side} {bits}": common_start(self.ids["ours", "32"], ids)
                 for (side, bits), ids in self.ids.items() if side != "edited"}
        print(f"of {AGREE} greedy ids, equal to ours at 32 bits up to the first that differs: "
              + ", ".join(f"{name} {n}" for name, n in agree.items()), flush=True)
        if (n := agree.get("Hugging Face 32", AGREE)) < AGREE:
            raise UserError(f"at 32 bits ours and Hugging Face write the same {n} ids and then "
                            "different ones: there is nothing to compare")
        return {"alike": agree, "alike_of": AGREE}

    def run(self) -> Row:
        """All rounds; what was measured before a process failed counts."""
        row, parts = {}, self.args.parts
        try:
            for number in range(1, self.args.rounds + 1):
                turns = [s for s in self.sides if s[0] != "nanoGPT" or number == 1]
                for side in turns if number % 2 else turns[::-1]:  # a drift meets all
                    if parts != ["start"]:
                        self.turn(*side, number)
                if number == 1 and self.ids:
                    row |= self.agree()
            if "batch1" in parts:
                row |= {"bandwidth_gb_s": common.in_new_process(read_bandwidth),
                        "gb_per_token_16bit": 2 * self.weights_a_token / 1e9}
            if "start" in parts:
                row |= measure_start(self.work, self.args.rounds)
        except ProcessFailed as failure:
            log(f"bench.decode: {failure}")
            row["failed"] = str(failure)
        return row | {"samples": self.samples}


def main(argv: list[str]) -> int:
    args = parse(argv)
    row = common.machine() | {"shape": args.shape}
    if args.nanogpt:
        row["nanogpt"] = common.git_commit(args.nanogpt)
    with tempfile.TemporaryDirectory() as work:
        race = Race(args, Path(work))
        row |= {"threads": race.threads, "missing": race.missing,
                "against": race.older and race.older.name}
        print(f"{row['cpu']}, {race.threads} threads, torch {row['torch']}", flush=True)
        row |= race.run()
    if not race.samples and "first_token_s" not in row:
        return 1
    print_figures(row)
    row |= {"medians": medians(race.samples)} | ratios(row)
    draw(row, args.out / "decode.png")
    common.append_row(row, args.out / "decode.jsonl", args.json)
    return int("failed" in row)


if __name__ == "__main__":
    run(main)
