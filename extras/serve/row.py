"""A text that is being written beside others, and who chooses its tokens."""

from typing import Any

import torch
from torch import Tensor

from kit.sampling import Choice, Sampler, Uniform
from kit.writing.text import TextStream
from model import GPT

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logprobs")


class Row:
    """A job that is being written (extras/serve/engine.py).

    ids: the tokens of its window, of which the cache holds the first `held`.
    """

    def __init__(self, job: Any, model: GPT):
        r = job.request
        self.job, self.held, self.written = job, 0, 0
        self.ids = list(r.ids[-model.config.block_size :])
        self.stream, self.generator = TextStream(r.stop), Uniform(r.seed)
        self.settings = {name: getattr(r, name) for name in SETTINGS}
        self.read = None  # (V,): whether it has read an id, for a repetition_penalty
        if r.repetition_penalty != 1:
            self.read = read_of(r.ids, model.config.vocab_size) if r.read is None else r.read

    def add(self, id: int, choice: Choice | None, tokenizer: Any) -> None:
        r = self.job.request
        self.ids.append(id)
        self.written += 1
        ended = "stop" if id == r.end else "length" if self.written == r.max_tokens else None
        data = b"" if id == r.end else tokenizer.token_bytes(id)
        text = self.stream.feed(data, ended is not None)
        self.job.put(id, text, choice, "stop" if self.stream.stopped else ended)


def read_of(ids: list[int], vocab_size: int) -> Tensor:
    """(V,): whether an id is one of these."""
    read = torch.zeros(vocab_size, dtype=torch.bool)
    read[torch.tensor(ids)] = True
    return read


Group = tuple[list[Row], Tensor | None, Sampler]  # rows, their places (None: all), who chooses


def groups_of(rows: list[Row], device: torch.device) -> list[Group]:
    """Rows with the same settings share a sampler."""
    found: dict[tuple, list[int]] = {}
    for i, row in enumerate(rows):
        found.setdefault(tuple(row.settings.values()), []).append(i)
    groups = []
    for places in found.values():
        some = [rows[i] for i in places]
        sampler = Sampler([row.generator for row in some], prompts=[row.ids for row in some],
                          **some[0].settings)
        if some[0].read is not None:
            where = device if device.type == "cuda" else "cpu"  # as the sampler has its logits
            sampler.read = torch.stack([row.read.to(where) for row in some])  # a copy of each
            for row, read in zip(some, sampler.read, strict=True):
                row.read = read  # what the sampler notes from now on is the row's
        at = torch.tensor(places, device=device) if len(found) > 1 else None
        groups.append((some, at, sampler))
    return groups
