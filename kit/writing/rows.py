"""Rows that are written side by side, and the lines that tell of them."""

import json
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kit.device import FEW, device_of
from kit.sampling import Choice, Sampler
from kit.writing import window
from kit.writing.prompts import Prompt
from kit.writing.text import TextStream

MOST_DRAFTED = FEW - 1  # tokens; with the one before them, what one step of kit/kernels takes


class Row:
    """One sample: the tokens that were chosen for it, and the text that is certain so far.

    end: the id that ends an answer, None without. Tokens of a stop or end count and are listed.
    """

    def __init__(self, prompt: Prompt, index: int, sample: int, seed: int, limit: int,
                 stop: Sequence[str], end: int | None):
        self.prompt, self.index, self.sample, self.seed = prompt, index, sample, seed
        self.limit, self.end, self.stream = limit, end, TextStream(stop)
        self.ids: list[int] = []
        self.choices: list[Choice] = []  # one a token, where asked for
        self.pieces: list[str] = []  # certain, and not yet taken by `fresh`
        self.ended: str | None = None  # or "stop", "end", "length"

    def take(self, id: int, tokenizer: Any) -> None:
        self.ids.append(id)
        if id == self.end:
            self.ended = "end"
        elif len(self.ids) == self.limit:
            self.ended = "length"
        data = b"" if id == self.end else tokenizer.token_bytes(id)
        self.pieces.append(self.stream.feed(data, final=self.ended is not None))
        if self.stream.stopped:
            self.ended = "stop"

    def fresh(self) -> str:
        """The text that became certain since the last call."""
        text, self.pieces = "".join(self.pieces), []
        return text


def batches(prompts: Sequence[Prompt], s: Any, end: int | None) -> Iterator[list[Row]]:
    """The rows of all prompts in order, at most s.batch_size at once.

    A batch is all samples of some prompts, or some samples of one: a prompt is read once for all
    of its samples there. Row r, counted over all, takes s.seed + r unless its line has a seed.
    """
    n, size = s.num_samples, s.batch_size
    together = max(1, size // n)
    for first in range(0, len(prompts), together):
        for sample in range(0, n, size):
            yield [Row(p, i, j, s.seed + i * n + j if p.seed is None else p.seed + j,
                       p.max_new_tokens or s.max_new_tokens, s.stop if p.stop is None else p.stop,
                       end)
                   for i, p in enumerate(prompts[first : first + together], first)
                   for j in range(sample, min(n, sample + size))]


def make_sampler(s: Any, seeds: Sequence[int], prompts: Sequence[Sequence[int]],
                 logprobs: int | None = None) -> Sampler:
    return Sampler(seeds, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p,
                   repetition_penalty=s.repetition_penalty, prompts=prompts, logprobs=logprobs)


def write_batch(model: Any, tokenizer: Any, rows: list[Row], s: Any) -> Iterator[int]:
    """Write the rows of a batch side by side; yields the tokens of each step, one a row.

    A row that has ended leaves at once. One row alone is written with drafts, if s.lookup says so.
    """
    device, size = device_of(model), model.config.block_size
    sampler = make_sampler(s, [r.seed for r in rows], [r.prompt.ids for r in rows], s.logprobs)
    prompts = [r.prompt.ids[-size:] for r in rows if r.sample == rows[0].sample]
    lengths = torch.tensor([len(ids) for ids in prompts])
    idx = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, ids in zip(idx, prompts, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    if s.lookup and len(rows) == 1:
        from kit.writing.drafts import steps as drafted

        steps = drafted(model, idx.to(device), rows[0].limit, sampler, lookup=s.lookup,
                        context_keep=s.context_keep)
    else:
        steps = window.steps(model, idx.to(device), max(r.limit for r in rows), sampler,
                             num_samples=len(rows) // len(prompts), lengths=lengths.to(device),
                             context_keep=s.context_keep)
    ids = next(steps)
    while True:
        for row, id in zip(rows, ids.tolist(), strict=True):
            row.take(id, tokenizer)
        if s.logprobs is not None:
            for row, choice in zip(rows, sampler.chosen, strict=True):
                row.choices.append(choice)
        yield len(rows)
        left = [i for i, row in enumerate(rows) if row.ended is None]
        if not left:
            return steps.close()
        going = None
        if len(left) < len(rows):
            rows, going = [rows[i] for i in left], torch.tensor(left, device=device)
            sampler.select(going)
        ids = steps.send(going)


# ----------------------------------------------------------------------------------------- output


def to_json(row: Row, tokenizer: Any, logprobs: bool) -> str:
    """A finished row as a line of JSON; what might split or disturb a line is escaped."""
    def told(id: int, logprob: float) -> dict[str, Any]:
        return {"id": id, "text": tokenizer.decode([id]),
                "logprob": logprob if logprob > -math.inf else None}

    value = {"index": row.index, "sample": row.sample, "seed": row.seed, "prompt": row.prompt.text,
             "text": row.fresh(), "tokens": len(row.ids), "ended": row.ended, **row.prompt.others}
    if logprobs:
        value["logprobs"] = [
            {**told(id, choice.logprob), "bytes": list(tokenizer.token_bytes(id)),
             "top": [told(*other) for other in choice.top]}
            for id, choice in zip(row.ids, row.choices, strict=True)]
    return re.sub("[\x7f-\x9f\u2028\u2029\ud800-\udfff]", lambda c: f"\\u{ord(c[0]):04x}",
                  json.dumps(value, ensure_ascii=False))


def write(model: Any, tokenizer: Any, prompts: Sequence[Prompt], s: Any, end: int | None,
          show: Callable[[str], None], note: Callable[[str], None]) -> None:
    """Write all samples in order; each line of JSON when its sample has ended.

    Text is streamed: the first unwritten sample as it comes, the others when their turn comes.
    """
    from tqdm import tqdm

    in_json = s.prompts_file is not None or s.logprobs is not None
    total, done, tokens = len(prompts) * s.num_samples, 0, 0
    bar = tqdm(total=total, unit=" samples", miniters=0, file=sys.stderr,
               disable=None if in_json and total > 1 else True)  # None: unless on a terminal
    with bar:
        for rows in batches(prompts, s, end):
            for row in rows if not in_json and s.ask is None else ():
                row.pieces.append(row.prompt.text)
            waiting = deque(rows)
            for new in write_batch(model, tokenizer, rows, s):
                tokens += new
                bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
                bar.update(done + sum(row.ended is not None for row in rows) - bar.n)
                while waiting and waiting[0].ended is not None:
                    row = waiting.popleft()
                    bar.clear()
                    text = to_json(row, tokenizer, s.logprobs is not None) if in_json else \
                        row.fresh()
                    show(text + "\n")
                    if not in_json and (waiting or done + len(rows) < total):
                        note("-" * 40)
                if waiting and not in_json:
                    show(waiting[0].fresh())
            done += len(rows)
