"""Rows of text that are written side by side; they join and leave between any two steps.

Each gets the very ids that it would get alone. A prompt is read in a cache of its own, which is
copied into the first free row of a larger one, the store; a step writes a token for all its rows.
One that leaves is replaced by the last. The idea: Orca (Yu et al., OSDI 2022).
"""

import copy
import logging
import math
import mmap
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from kit.device import FEW, device_of
from kit.sampling import Choice, Sampler, Uniform
from kit.writing.text import TextStream
from kit.writing.window import CHUNK
from model import GPT, KVCache

if TYPE_CHECKING:
    from extras.serve.engine import Job

log = logging.getLogger(__name__)
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logprobs")
READING = 0.01  # seconds between two steps that prompts may be read for, however short a step is
ALONE = 2**33  # multiplications up to which one thread reads a prompt: where others want the
# processor too, each time that PyTorch's threads meet costs a time slice


class Row:
    """A job that is being written (extras/serve/engine.py).

    ids: the tokens of its window, of which the cache holds the first `held`.
    """

    def __init__(self, job: "Job", model: GPT):
        r = job.request
        self.job, self.held, self.written = job, 0, 0
        self.ids = list(r.ids[-model.config.block_size :])
        self.stream, self.generator = TextStream(r.stop), Uniform(r.seed)
        self.settings = {name: getattr(r, name) for name in SETTINGS}
        self.read = None  # (V,): whether it has read an id, for a repetition_penalty
        if r.repetition_penalty != 1:
            self.read = read_of(r.ids, model.config.vocab_size) if r.read is None else r.read

    def add(self, id: int, choice: Choice | None, tokenizer: Tokenizer) -> None:
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


def blank(x: Tensor, rows: int, length: int) -> Tensor:
    """Zeros like x (B, H, S, D) for more rows and positions.

    On a CPU the system gives this memory page by page as it is written to: short texts take little.
    """
    shape = (rows, x.size(1), length, x.size(3))
    if x.device.type != "cpu":
        return x.new_zeros(shape)
    try:
        memory = mmap.mmap(-1, math.prod(shape) * x.itemsize)
    except OSError as e:
        raise MemoryError from e
    return torch.frombuffer(memory, dtype=x.dtype).view(shape)


@torch.inference_mode()
def ends_alike(model: GPT) -> bool:
    """Whether `layers` ends in what `hidden` gives, also in a model.py that somebody has edited."""
    idx = torch.zeros(1, 2, dtype=torch.int64)
    *_, last = model.layers(idx[:, : model.config.block_size])
    return torch.equal(last, model.hidden(idx[:, : model.config.block_size]))


def choose(sampler: Sampler, logits: Tensor
           ) -> tuple[list[int], list[FloatingPointError | None]]:
    """A token for each row of the logits (B, V), and what is wrong with the row's logits."""
    try:
        return sampler(logits).tolist(), [None] * len(logits)
    except FloatingPointError as e:  # before anything was drawn
        fine = logits.amax(-1).isfinite()  # the largest of a row with a NaN is NaN
        logits[~fine] = 0  # of which anything may be drawn: nobody will see it
        return sampler(logits).tolist(), [None if ok else e for ok in fine.tolist()]


class Batch:
    """At most `most` rows, counting those whose window is being read. One thread may use it.

    pull: gives a new row, or None. threads: those of a step and of long prompts.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, most: int, threads: int,
                 pull: Callable[[], Row | None]):
        self.model, self.tokenizer, self.most = model, tokenizer, most
        self.pull, self.device, self.size = pull, device_of(model), model.config.block_size
        self.macs = sum(m.in_features * m.out_features for m in model.modules()
                        if hasattr(m, "in_features"))  # multiplications of a token
        native = any(hasattr(m, "own_threads") for m in model.modules())  # waits for no thread
        self.threads = threads if native or self.macs > 2**23 else 1
        self.pauses = self.device.type == "cpu" and ends_alike(model)
        self.took, self.tokens = 0.0, 0  # seconds of the last step; written in all
        self.clear()

    def clear(self) -> None:  # and free the memory
        self.rows: list[Row] = []  # those in the store, in its order
        self.again: deque[Row] = deque()  # their window was full: it is to be read again
        self.row, self.reading = None, iter(())  # the one that is being read, and what does it
        self.latest: tuple[list[int], KVCache, Tensor] | None = None  # the last prompt, as read
        self.store: KVCache | None = None  # of as many rows as there were at once, by doubling
        self.cache: KVCache | None = None  # the rows of it that are in use
        self.groups: list[Group] | None = None

    def __len__(self) -> int:
        return len(self.rows) + len(self.again) + (self.row is not None)

    def all(self) -> list[Row]:
        return [*self.rows, *self.again, *([self.row] if self.row else [])]

    def turn(self) -> None:
        """Read prompts for a while, then write a token for each row; `clear` it if this raises."""
        torch.set_num_threads(1)
        self.leave()
        start = time.perf_counter()
        while self.read_on():
            if time.perf_counter() - start > max(self.took, READING):
                break  # who is being written gets half of the time
        if self.rows:
            start = time.perf_counter()
            self.step()
            self.leave()
            self.took = time.perf_counter() - start

    def step(self) -> None:
        rows, cache, held = self.rows, self.cache, [row.held for row in self.rows]
        cache.longest, alike = max(held), len(set(held)) == 1
        cache.pos = held[0] if alike else torch.tensor(held, device=self.device)
        ids = torch.tensor([row.ids[-1:] for row in rows], device=self.device)
        torch.set_num_threads(self.threads)
        logits = self.model.logits(self.model.hidden(ids, cache)[:, -1]).float()
        torch.set_num_threads(1)
        for row in rows:
            row.held += 1
        if self.groups is None:
            self.groups = groups_of(rows, self.device)
        self.write(logits, self.groups)

    def write(self, logits: Tensor, groups: list[Group]) -> None:
        """Choose a token for each row of the logits (B, V)."""
        for rows, at, sampler in groups:
            ids, errors = choose(sampler, logits if at is None else logits[at])
            choices = sampler.chosen or [None] * len(rows)
            for row, id, choice, error in zip(rows, ids, choices, errors, strict=True):
                try:
                    if error:
                        raise error
                    row.add(id, choice, self.tokenizer)
                    self.tokens += 1
                except Exception as e:  # the others go on
                    row.job.fail(e)

    def leave(self) -> None:
        """Rows that have ended go, and those with a full window, to read it again."""
        for i in reversed(range(len(self.rows))):
            row = self.rows[i]
            going = row.job.going()
            if going and row.held < self.size:
                continue
            last = self.rows.pop()
            if last is not row:
                self.rows[i] = last
                for held in self.store.k + self.store.v:
                    held[i, :, : last.held] = held[len(self.rows), :, : last.held]
            self.show()
            if going:
                self.again.append(row)

    def join(self, row: Row, cache: KVCache) -> None:
        """Put a row that has been read into the store."""
        n = len(self.rows)
        if self.store is None or n == self.store.batch_size:
            store, old = copy.copy(cache), self.store
            store.batch_size, store.length = min(max(1, 2 * n), self.most), self.size
            store.k, store.v = ([blank(x, store.batch_size, self.size) for x in held]
                                for held in (cache.k, cache.v))
            if n:
                end = max(row.held for row in self.rows)
                for new, held in zip(store.k + store.v, old.k + old.v, strict=True):
                    new[:n, :, :end] = held[:, :, :end]
            self.store, self.cache = store, copy.copy(store)
        for held, new in zip(self.store.k + self.store.v, cache.k + cache.v, strict=True):
            held[n, :, : row.held] = new[0, :, : row.held]
        self.rows.append(row)
        self.show()

    def show(self) -> None:  # the rows in use have changed
        n, self.groups = len(self.rows), None
        self.cache.batch_size = n
        self.cache.k = [x[:n] for x in self.store.k]
        self.cache.v = [x[:n] for x in self.store.v]

    def read_on(self) -> bool:
        """Read a piece of a prompt; False: there is none to read."""
        if self.row is None:
            full = len(self) >= self.most
            self.row = self.again.popleft() if self.again else None if full else self.pull()
            if self.row is None:
                return False
            self.reading = self.read(self.row)
        try:
            if self.row.job.going() and next(self.reading, "end") is None:
                return True
        except Exception as e:
            log.exception("a prompt could not be read")
            self.row.job.fail(e)
        self.row = None
        return True

    def read(self, row: Row) -> Iterator[None]:
        """Read its window in pieces; if it is new, choose a token; let it join."""
        new = not row.written
        if not new:  # the window was full: its newer half stays, as with kit.writing.window.Window
            row.ids = row.ids[-max(1, self.size // 2) :]
        ids = row.ids[:] if new else row.ids[:-1]  # the newest is what the next step reads
        if new and self.latest and self.latest[0] == ids:  # another text from the same prompt
            _, cache, x = self.latest
        else:
            cache = self.model.new_cache(1, max(1, len(ids)))
            some = ids or row.ids[:1]  # a cache knows its shape once it has read something
            x = yield from self.hidden(torch.tensor([some], device=self.device), cache)
            cache.trim(len(ids))
        row.held = len(ids)
        if new:
            self.latest = ids, cache, x
            self.write(self.model.logits(x).float(), groups_of([row], self.device))
        if row.job.ended is None and row.held == self.size:
            self.again.append(row)
        elif row.job.ended is None:
            self.join(row, cache)

    def hidden(self, idx: Tensor, cache: KVCache) -> Generator[None, None, Tensor]:
        """GPT.hidden of the last of idx (1, T), bit for bit -> (1, C); by layers if it is long."""
        model = self.model
        for part in idx.split(CHUNK, dim=1):
            T = part.size(1)
            if not self.pauses or T <= FEW:
                x = model.hidden(part, cache)
                continue
            threads = self.threads if self.macs * T > ALONE else 1
            layers, state = model.layers(part, cache), None
            while True:
                torch.set_num_threads(threads)
                state = next(layers, None)
                torch.set_num_threads(1)
                if state is None:
                    break
                x = state
                yield
        return x[:, -1]
