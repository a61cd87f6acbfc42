"""Write with a trained model.

    python sample.py                                       on a terminal: type and write in turns
    python sample.py --prompt="def read_file("             from the newest run
    printf 'def f(' | python sample.py --temperature=0     a filter
    python sample.py --prompts_file=prompts.txt            a prompt a line, JSON lines come out

Prompt and text go to stdout, everything else to stderr.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from data.tokenizer import Tokenizer, from_json
from kit.checkpoint import load_model
from kit.device import choose_device
from kit.errors import UserError, plain, run
from kit.inference import install, prepare
from kit.progress import describe
from kit.run.locate import find_checkpoint, find_run, same_tokenizer
from kit.settings import at_least, in_range, load
from kit.writing.prompts import Prompt, gather, is_terminal
from kit.writing.rows import MOST_DRAFTED, write
from kit.writing.text import start_ids
from model import GPT


@dataclass
class SampleSettings:
    """Continue prompts with a trained model, token by token; on a terminal, in turns with you."""

    prompt: tuple[str, ...] = ()  # text to continue, several times: several; empty: a new document
    ask: str | None = None  # a user's message; a model trained on chats answers, and ends there
    prompts_file: str | None = None  # a prompt a line, or .jsonl of {"prompt": ...}; - is stdin
    chat: bool = False  # on a terminal: each line is a user's message, see --ask
    out_dir: str | None = None  # a run or checkpoint folder; None: the newest run
    step: int | None = None  # which checkpoint; None: the best
    num_samples: int = 1  # continuations of each prompt
    batch_size: int = 32  # rows that are written side by side
    max_new_tokens: int = 500  # length of each
    temperature: float = 0.8  # 0: always the likeliest token; below 1: bolder, above 1: wilder
    top_k: int = 50  # choose among the k likeliest; 0: all
    top_p: float = 1.0  # choose among the likeliest that make up this share; 1: all
    min_p: float = 0.0  # choose among those with this share of the likeliest's probability; 0: all
    repetition_penalty: float = 1.0  # above 1: what is there already becomes less likely; 1: off
    seed: int = 1337  # of the first sample; the next ones take the seeds after it
    stop: tuple[str, ...] = ()  # end before this text, such as "<|endoftext|>"; several: any
    logprobs: int | None = None  # JSON lines with log-probabilities and this many alternatives
    lookup: int = 0  # draft so many tokens from the text so far, for one row at a time; 0: off
    context_keep: int | None = None  # tokens kept when the context is full; None: half of it
    unknown: Literal["error", "skip"] = "error"  # characters that a char tokenizer has not seen
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: 16 bits if that pays
    quantize: Literal["none", "int8", "int4"] = "none"  # fewer bits for the weights, on the CPU
    kernels: Literal["auto", "torch"] = "auto"  # torch: none of our own on the CPU, PyTorch's alone
    compile: Literal["auto"] | bool = "auto"  # False: as --kernels=torch; True: as auto
    debug: bool = False  # show tracebacks of mistakes

    def check(self) -> None:
        at_least(self, 0, "temperature top_k top_p min_p seed")
        at_least(self, 1, "num_samples batch_size max_new_tokens")
        in_range(self, -1, 1 + 1e-9, "top_p min_p")
        in_range(self, 0, 1e30, "repetition_penalty")
        if self.logprobs is not None and not 0 <= self.logprobs <= 1000:
            raise UserError(f"logprobs={self.logprobs}: expected None or 0 to 1000")
        if self.quantize != "none" and self.dtype != "auto":
            raise UserError(f"quantize={self.quantize} and dtype={self.dtype}: give one of them")
        if "" in self.stop:
            raise UserError("stop: an empty text; leave --stop out to go on to the end")
        in_range(self, -1, MOST_DRAFTED + 1, "lookup")
        several = self.num_samples > 1 or len(self.prompt) > 1 or self.prompts_file is not None
        if self.lookup and several and self.batch_size > 1:
            raise UserError(f"lookup={self.lookup}: writes one row at a time; add --batch_size=1")
        given = [n for n in ("prompt", "ask", "prompts_file") if getattr(self, n) not in ((), None)]
        if len(given) > 1:
            first, second = (f"{name}={getattr(self, name)!r:.60}" for name in given[:2])
            raise UserError(f"{first} and {second}: give one of them")

    @property
    def interactive(self) -> bool:
        """Whether nothing to continue was given and both ends are a terminal."""
        alone = not self.prompt and (self.ask, self.prompts_file, self.logprobs) == (None,) * 3
        return alone and self.num_samples == 1 and all(map(is_terminal, (sys.stdin, sys.stdout)))


def note(text: str) -> None:
    print(plain(text), file=sys.stderr, flush=True)


def show(text: str) -> None:
    print(plain(text) if sys.stdout.isatty() else text, end="", flush=True)


def main(argv: list[str]) -> None:
    s = load(SampleSettings, argv).settings
    if s.chat and not s.interactive:
        raise UserError("chat=True: needs a terminal and no prompt; --ask= asks once")
    if s.lookup and s.interactive:
        raise UserError(f"lookup={s.lookup}: not when you write in turns; give a --prompt")
    device = choose_device(s.device)
    with install(s, device, note):
        prompts = [] if s.interactive else gather(s, note)
        model, tokenizer = open_model(s, device)
        if s.interactive:
            return converse(s, model, tokenizer)
        end = tokenizer.eot if s.ask is not None else None
        for prompt in prompts:
            prompt.ids = prompt_ids(s, prompt, tokenizer)
        note_long([p for p in prompts if len(p.ids) > model.config.block_size], model)
        write(model, tokenizer, prompts, s, end, show, note)


def open_model(s: SampleSettings, device: torch.device) -> tuple[GPT, Tokenizer]:
    """The model of the settings, on the device and in its precision, with its tokenizer."""
    folder = find_checkpoint(find_run(s.out_dir), s.step)
    model, tokenizer_json, state = load_model(folder)
    tokenizer, size = from_json(tokenizer_json), model.config.block_size
    same_tokenizer(folder, tokenizer)
    if s.context_keep is not None and not 1 <= s.context_keep < size:
        raise UserError(f"context_keep={s.context_keep}: expected 1 to {size - 1}, "
                        "less than the model's context")

    def loss() -> float | None:  # of the model as it is now, to say what rounding costs
        from kit.measure import quick_loss

        return quick_loss(model, state, tokenizer)

    how = prepare(model, device, s, note, loss)
    note(f"{folder}: {describe(state)}{model.num_params():,} parameters, {how} on {device}")
    return model, tokenizer


def prompt_ids(s: SampleSettings, prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a prompt; of a user's message those up to where the answer begins."""
    if s.ask is not None:
        from data.instruct import question

        return question(s.ask, tokenizer)
    try:
        return tokenizer.encode(prompt.text, unknown=s.unknown) or start_ids(tokenizer)
    except UserError as e:
        raise UserError(f"{prompt.where}: {e}") from None


def note_long(prompts: list[Prompt], model: GPT) -> None:
    """Say of prompts beyond the model's context that it sees their end alone."""
    if prompts:
        many = f" ({len(prompts)} such prompts)" if len(prompts) > 1 else ""
        note(f"the {prompts[0].where} has {len(prompts[0].ids)} tokens, the model's context is "
             f"{model.config.block_size}: it sees the newest of them{many}")


def converse(s: SampleSettings, model: GPT, tokenizer: Tokenizer) -> None:
    """Write in turns with the person at the terminal."""
    from kit.writing.session import Session, talk

    question = None
    if s.chat:
        from data.instruct import question
    asking = question and partial(question, tokenizer=tokenizer)
    talk(Session(s, model, tokenizer, show, note, asking))


if __name__ == "__main__":
    run(main, mistakes=(FloatingPointError,))
