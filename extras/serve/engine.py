"""The engine of a server: many texts at once, written by a thread of its own; see batch.py."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from extras.serve.batch import Batch, Row
from kit.errors import out_of_memory
from kit.sampling import Choice
from model import GPT

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What is to be written; see Sampler for the settings."""

    ids: list[int]  # what the model reads first, not empty; of a long one the newest block_size
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # the text draws from a generator of its own
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # this many alternatives for each token
    end: int | None = None  # the id that ends the text: its token comes, without text of its own
    read: Tensor | None = None  # (V,) on the CPU: whether an id was read, for a repetition_penalty,
    # where ids are not all of it; requests may share it


class Token(NamedTuple):
    id: int
    text: str  # what became certain with it, see TextStream
    choice: Choice | None


class Full(Exception):
    """As many requests as may wait are waiting."""


class Job:
    """A request on its way. `take` and `cancel` may be called from any thread.

    ended: None, "stop" (one of the stops, or the end), "length", what `cancel` was told, or
    "error: ...". It is set after the last token was put: who looks at it first and then takes
    misses nothing.
    """

    def __init__(self, request: Request, news: Callable[["Job"], None],
                 wake: Callable[[], None]):
        self.request, self.news, self.wake = request, news, wake
        self.ended: str | None = None
        self.cancelled: str | None = None
        self.tokens: deque[Token] = deque()

    def take(self) -> list[Token]:
        """The tokens that are new since the last call; one thread at a time may take them."""
        return [self.tokens.popleft() for _ in range(len(self.tokens))]

    def cancel(self, why: str = "cancelled") -> None:
        """End it with the step that is being made."""
        self.cancelled = self.cancelled or why

    # what follows is for the engine's thread

    def put(self, id: int, text: str, choice: Choice | None, ended: str | None) -> None:
        self.tokens.append(Token(id, text, choice))
        self.ended = ended
        self.news(self)

    def going(self) -> bool:
        """Whether it is to go on; one that was cancelled ends here."""
        if self.cancelled and self.ended is None:
            self.ended = self.cancelled
            self.news(self)
        return self.ended is None

    def fail(self, error: Exception) -> None:
        reason = "out of memory" if out_of_memory(error) else str(error) or repr(error)
        self.ended = f"error: {reason}"
        self.news(self)


class Engine:
    """Writes for all who ask: `rows` texts at once, `waiting` more may wait, first come first.

    model: in eval mode, where it is to run. running, waiting: requests at the moment; tokens:
    written since the beginning. An exception ends the jobs that it concerns and no others.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, rows: int = 32, waiting: int = 64):
        self.model, self.tokenizer, self.most = model, tokenizer, rows + waiting
        self.changed, self.closed = threading.Condition(), False
        self.queue: deque[Row] = deque()
        self.wakes: dict[int, Callable[[], None]] = {}  # to be called, each once
        self.batch = Batch(model, tokenizer, rows, torch.get_num_threads(), self.pull)
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self.thread.start()

    @property
    def running(self) -> int:
        return len(self.batch)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def tokens(self) -> int:
        return self.batch.tokens

    def submit(self, request: Request, wake: Callable[[], None] = lambda: None) -> Job:
        """A job, or Full. Quick for ids that fit into the window; extras/serve/api.py checks them.

        wake: called in the engine's thread when there is something to take or the job has ended;
        of jobs that share the very same one, once for all. It must be quick.
        """
        job = Job(request, self.news, wake)
        row = Row(job, self.model)
        with self.changed:
            if self.closed:
                raise RuntimeError("the engine is closed")
            if self.running + self.waiting >= self.most:
                raise Full(f"{self.waiting} requests are waiting")
            self.queue.append(row)
            self.changed.notify()
        return job

    def close(self) -> None:
        """End all jobs as cancelled, and the thread."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()

    # ------------------------------------------------------------------------ the engine's thread

    @torch.inference_mode()
    def run(self) -> None:
        while self.wait():
            try:
                self.batch.turn()
            except Exception as e:  # a step failed: its rows are lost, others may come
                log.exception("a step failed")
                for row in self.batch.all():
                    if row.job.ended is None:
                        row.job.fail(e)
                self.batch.clear()
            self.wake_all()
        for row in [*self.batch.all(), *self.queue]:  # nobody can submit any more
            row.job.cancel()
            row.job.going()
        self.queue.clear()
        self.batch.clear()
        self.wake_all()

    def wait(self) -> bool:
        """Until there is something to do; False: to end."""
        with self.changed:
            if any(row.job.cancelled for row in self.queue):
                self.queue = deque(row for row in self.queue if row.job.going())
            if not self.batch and not self.queue and not self.wakes:
                self.batch.clear()  # an idle server is small
                self.changed.wait_for(lambda: self.queue or self.closed)
            return not self.closed

    def pull(self) -> Row | None:
        with self.changed:
            return self.queue.popleft() if self.queue else None

    def news(self, job: Job) -> None:
        self.wakes[id(job.wake)] = job.wake

    def wake_all(self) -> None:
        wakes, self.wakes = self.wakes, {}
        for wake in wakes.values():
            try:
                wake()
            except Exception:  # whoever was to be woken may have gone
                log.debug("a wake failed", exc_info=True)
