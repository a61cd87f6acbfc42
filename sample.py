"""Write with a trained model.

    python sample.py --prompt "def read_file("                     from the newest run
    python sample.py --out_dir=out/small --temperature=0 --stop="\\n\\n"

Prompt and text go to stdout, everything else to stderr.
"""

import sys
from dataclasses import dataclass
from typing import Literal

import torch

from data import DataError
from data.instruct import question
from data.tokenizer import Tokenizer, from_json
from kit.device import DTYPES, choose_device, name_of
from kit.errors import UserError, plain, run
from kit.finding import find_checkpoint, find_run, same_tokenizer
from kit.loading import load_model
from kit.metrics import Progress
from kit.sampling import Sampler, TextStream, start_ids
from kit.settings import at_least, in_range, load
from model import GPT


@dataclass
class SampleSettings:
    """Continue a prompt with a trained model, token by token."""

    prompt: str = ""  # text to continue; empty: start a new document
    ask: str | None = None  # a user's message; a model trained on chats answers, and ends there
    out_dir: str | None = None  # a run or checkpoint folder; None: the newest run
    step: int | None = None  # which checkpoint; None: the best
    num_samples: int = 1  # continuations, side by side
    max_new_tokens: int = 500  # length of each
    temperature: float = 0.8  # 0: always the likeliest token; below 1: bolder, above 1: wilder
    top_k: int = 50  # choose among the k likeliest; 0: all
    top_p: float = 1.0  # choose among the likeliest that make up this share; 1: all
    seed: int = 1337  # of the first sample; the next ones take the seeds after it
    stop: str | None = None  # end before this text, such as "<|endoftext|>"; None: do not
    context_keep: int | None = None  # tokens kept when the context is full; None: half of it
    unknown: Literal["error", "skip"] = "error"  # characters that a char tokenizer has not seen
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bf16 on cuda
    debug: bool = False  # show tracebacks of mistakes

    def check(self) -> None:
        at_least(self, 0, "temperature top_k top_p seed")
        at_least(self, 1, "num_samples max_new_tokens")
        in_range(self, -1, 1 + 1e-9, "top_p")
        if self.stop == "":
            raise UserError("stop: an empty text; leave --stop out to go on to the end")
        if self.ask is not None and self.prompt:
            raise UserError(f"ask={self.ask!r} and prompt={self.prompt!r}: give one of them")


def note(text: str) -> None:
    print(plain(text), file=sys.stderr, flush=True)


def main(argv: list[str]) -> None:
    s = load(SampleSettings, argv).settings
    device = choose_device(s.device)
    folder = find_checkpoint(find_run(s.out_dir), s.step)
    model, tokenizer_json, state = load_model(folder)
    tokenizer = from_json(tokenizer_json)
    same_tokenizer(folder, tokenizer)
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = model.to(device, auto if s.dtype == "auto" else DTYPES[s.dtype]).eval()
    known = Progress.from_state(state)
    loss = f"validation loss {known.val_loss:.4f}, {known.val_bpb or 0:.4f} bits per byte, " \
        if known.val_loss else ""
    note(f"{folder}: step {known.step}, {loss}{model.num_params():,} parameters, "
         f"{name_of(model.wte.weight.dtype)} on {device}")
    keep = s.context_keep
    if keep is not None and not 1 <= keep < model.config.block_size:
        raise UserError(f"context_keep={keep}: expected 1 to {model.config.block_size - 1}, "
                        "less than the model's context")
    write(s, model, tokenizer, prompt_ids(s, model, tokenizer))


def prompt_ids(s: SampleSettings, model: GPT, tokenizer: Tokenizer) -> list[int]:
    if s.ask is not None:
        ids = question(s.ask, tokenizer)
    else:
        ids = list(tokenizer.encode(s.prompt, unknown=s.unknown)) or start_ids(tokenizer)
    if len(ids) > model.config.block_size:
        note(f"the prompt has {len(ids)} tokens, the model's context is {model.config.block_size}: "
             "it sees the newest of them")
    return ids


def write(s: SampleSettings, model: GPT, tokenizer: Tokenizer, prompt: list[int]) -> None:
    """Print the samples: the first unwritten one as it comes, the others when their turn comes."""
    idx = torch.tensor([prompt], device=model.wte.weight.device)
    choose = Sampler(s.num_samples, s.temperature, s.top_k, s.top_p, s.seed)
    streams = [TextStream(s.stop) for _ in range(s.num_samples)]
    texts = [s.prompt] * s.num_samples  # what is known of each and not yet on the screen
    turn = 0
    for left, ids in zip(range(s.max_new_tokens, 0, -1),
                         model.generate(idx, s.max_new_tokens, choose, num_samples=s.num_samples,
                                        context_keep=s.context_keep), strict=True):
        for i, stream in enumerate(streams):
            answered = s.ask is not None and int(ids[i]) == tokenizer.eot
            data = b"" if answered else tokenizer.token_bytes(int(ids[i]))
            texts[i] += stream.feed(data, final=answered or left == 1)
            stream.stopped |= answered
        while turn < s.num_samples:
            shown = plain(texts[turn]) if sys.stdout.isatty() else texts[turn]
            print(shown, end="", flush=True)
            texts[turn] = ""
            if not streams[turn].stopped and left > 1:
                break
            print(flush=True)
            turn += 1
            if turn < s.num_samples:
                note("-" * 40)
        if turn == s.num_samples:
            break


if __name__ == "__main__":
    run(main, mistakes=(DataError, FloatingPointError))
