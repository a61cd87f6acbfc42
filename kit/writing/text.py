"""From ids to text: where a text starts, and what of it can be shown so far."""

import codecs
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

import torch

from kit.errors import UserError
from kit.sampling import Sampler
from kit.writing.window import steps
from model import GPT


class Tokenizer(Protocol):
    """What writing needs of a tokenizer of data.tokenizer."""

    eot: int | None  # the separator between documents

    def encode(self, text: str, unknown: str = "error") -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, id: int) -> bytes: ...


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """What a text without a prompt starts from: the separator or, if there is none, a newline."""
    if tokenizer.eot is not None:
        return [tokenizer.eot]
    try:
        return list(tokenizer.encode("\n"))
    except UserError:  # not even that
        return [0]


def write_sample(model: GPT, tokenizer: Tokenizer, start: list[int], end: int | None, seed: int,
               max_new_tokens: int = 300) -> str:
    """What a model writes after the ids `start`, up to the id `end` where that is one."""
    device, choose = next(model.parameters()).device, Sampler([seed], temperature=0.8, top_k=50)
    new = steps(model.eval(), torch.tensor([start], device=device), max_new_tokens, choose)
    ids = takewhile(lambda id: id != end, map(int, new))
    return tokenizer.decode(ids if end is None else [*start, *ids])


class TextStream:
    """Turns the bytes of tokens into text that can be shown at once, errors replaced.

    What may be half a character or the beginning of a stop is held back. Once one is complete,
    `stopped` is set; nothing from its beginning on is shown. Of several stops the first to be
    complete counts and, where one ends like another, the longest: so it does not matter how the
    text was cut into tokens.
    """

    def __init__(self, stop: str | Sequence[str] | None = None):
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.stops = [s for s in ([stop] if isinstance(stop, str) else stop or ()) if s]
        self.held, self.stopped = "", False

    def feed(self, data: bytes, final: bool = False) -> str:
        """The text that is now certain. `final`: nothing follows."""
        if self.stopped:
            return ""
        text = self.held + self.decoder.decode(data, final)
        found = [(text.index(s) + len(s), text.index(s)) for s in self.stops if s in text]
        if found:  # (end, beginning) of each
            self.stopped = True
            return text[: min(found)[1]]
        lengths = [n for s in self.stops for n in range(len(s)) if text.endswith(s[:n])]
        n = 0 if final else max(lengths, default=0)  # of what might begin a stop
        self.held = text[len(text) - n :]
        return text[: len(text) - n]
