"""From logits to the next token."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kit.topk import draw_from_all, first_above, likeliest

MAX = torch.finfo(torch.float32).max


class Choice(NamedTuple):
    """A chosen token in the eyes of the model, whatever the settings of the sampler."""

    logprob: float  # natural logarithm of its probability
    top: list[tuple[int, float]]  # the likeliest ids and theirs, the likeliest first


def choices(logits: Tensor, ids: Tensor, n: int) -> list[Choice]:
    """Raw logits (B, V) and the ids chosen (B,) -> one Choice a row, with the n likeliest."""
    logp = logits.log_softmax(-1)
    top = likeliest(logits, min(n, logits.size(-1)))
    rows = zip(logp.gather(1, ids[:, None])[:, 0].tolist(), top.tolist(),
               logp.gather(1, top).tolist(), strict=True)
    return [Choice(p, list(zip(ids, values, strict=True))) for p, ids, values in rows]


class Uniform:
    """Uniform numbers in [0, 1) in double precision, of one seed; fetched many at a time."""

    def __init__(self, seed: int):
        self.generator, self.ahead = torch.Generator().manual_seed(seed), []

    def __call__(self) -> float:
        if not self.ahead:
            many = torch.rand(64, generator=self.generator, dtype=torch.float64)
            self.ahead = many.flip(0).tolist()
        return self.ahead.pop()


class Sampler:
    """Chooses next tokens: logits (B, V) -> ids (B,). Each row draws from a generator of its own.

    In the order of Hugging Face: repetition_penalty (CTRL, arXiv 1909.05858), temperature (0: the
    likeliest), exactly top_k (None or 0: all), of these the fewest that reach top_p (nucleus,
    arXiv 1904.09751), of these the ones with at least min_p of the likeliest's probability (arXiv
    2407.01082). A row's ids depend on its seed and its logits, not on the batch or the device.

    seeds: one a row, or a Uniform that goes on. prompts: the ids that each row has read, needed
    for a repetition_penalty.
    logprobs: note in `chosen` what the model itself thought of the tokens of the last call, and
    of this many likeliest ones.
    """

    def __init__(self, seeds: Sequence[int | Uniform], *, temperature: float = 1.0,
                 top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0,
                 repetition_penalty: float = 1.0, prompts: Sequence[Sequence[int]] = (),
                 logprobs: int | None = None):
        if repetition_penalty != 1 and (len(prompts) != len(seeds) or not all(map(len, prompts))):
            raise ValueError("repetition_penalty: needs the ids that each row has read, "
                             f"{len(seeds)} prompts, none empty; {len(prompts)} given")
        self.generators = [seed if isinstance(seed, Uniform) else Uniform(seed) for seed in seeds]
        self.temperature, self.top_k = temperature, top_k
        self.top_p = max(top_p, 1e-300)  # the likeliest stays even for 0
        self.min_p = min(min_p, 1.0)
        self.penalty = repetition_penalty
        self.prompts, self.read = prompts, None  # (B, V): whether a row has read an id
        self.logprobs, self.chosen = logprobs, []

    def __call__(self, logits: Tensor) -> Tensor:
        """Raises FloatingPointError for NaN, infinity or a row of -inf; else -inf is never drawn.

        logits: (B, V) in fp32, on any device. The ids (B,) come back to it.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # what torch wakes spins on for a while, beside those of team.h
        try:
            return self.choose(logits)
        finally:
            torch.set_num_threads(threads)

    def choose(self, logits: Tensor) -> Tensor:
        if len(logits) != len(self.generators):
            raise ValueError(f"{len(logits)} rows of logits for {len(self.generators)} seeds")
        device = logits.device
        if device.type != "cuda":  # others lack float64 or a topk of int64
            logits = logits.cpu()
        if not logits.amax(-1).isfinite().all():  # the largest of a row with a NaN is NaN
            raise FloatingPointError("the model's logits are not finite: its weights are damaged")
        scores = logits if self.penalty == 1 else self.penalised(logits)
        if self.temperature == 0:
            ids = scores.argmax(-1)  # the first of equal ones
        else:
            u = torch.tensor([[draw()] for draw in self.generators], dtype=torch.float64)
            # all V of many rows overflow a CPU's cache: so many that 2**18 numbers meet
            n = len(logits) if self.top_k else max(1, 2**18 // logits.size(-1))
            parts = zip(scores.split(n), u.split(n), strict=True)
            ids = torch.cat([self.draw(*part) for part in parts])
        if self.read is not None:
            self.read.scatter_(1, ids[:, None].to(self.read.device), True)
        if self.logprobs is not None:
            self.chosen = choices(logits, ids, self.logprobs)
        return ids.to(device)

    def penalised(self, logits: Tensor) -> Tensor:
        """What a row has read or written is less likely; a finite logit stays finite."""
        if self.read is None:
            self.read = torch.zeros_like(logits, dtype=torch.bool)
            for row, ids in zip(self.read, self.prompts, strict=True):
                row[torch.tensor(ids, device=logits.device)] = True
        new = torch.where(logits > 0, logits / self.penalty, logits * self.penalty)
        return torch.where(self.read & (logits > -torch.inf), new.clamp(-MAX, MAX), logits)

    def draw(self, logits: Tensor, u: Tensor) -> Tensor:
        """Logits (B, V), uniform numbers (B, 1) in [0, 1) -> ids (B,)."""
        if not self.top_k and self.top_p == 1 and not self.min_p and self.temperature > 1e-30:
            return draw_from_all(logits.cpu(), self.temperature, u).to(logits.device)
        weights, ids = self.weigh(logits)
        mass = weights.cumsum(-1)
        drawn = first_above(mass, u * mass[:, -1:])
        return ids.gather(1, drawn.to(ids.device))[:, 0]

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, V) -> weights of the candidates, 0 for what top_p or min_p drops, and ids.

        Both are (B, K): the likeliest first or, where nothing must be sorted, all V as they come.
        The weights are in proportion to the probabilities, float64 on the CPU: there neither the
        batch nor the device makes a difference.
        """
        V = logits.size(-1)
        k = min(self.top_k or V, V)
        ids = likeliest(logits, k) if k < V else \
            torch.arange(V, device=logits.device).expand_as(logits)
        weights = (logits.gather(1, ids) if k < V else logits).cpu().double()
        weights -= weights.amax(-1, keepdim=True)  # at most 0: no temperature overflows
        weights.div_(self.temperature).exp_()
        if self.top_p < 1:
            enough = self.top_p * weights.cumsum(-1)[:, -1:]
            if k == V:
                ids, weights = self.sort(logits, weights, enough)
            before = F.pad(weights.cumsum(-1), (1, -1))  # weight of all that is likelier
            weights = weights.masked_fill(before >= enough, 0)
        if self.min_p > 0:
            weights = weights.masked_fill(weights < self.min_p, 0)  # the likeliest weighs 1
        return weights, ids

    def sort(self, logits: Tensor, weights: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest ids (B, K) and their weights; K is all V only where fewer weigh too little.

        Sorting 50,000 logits takes longer than a small model, and most often few are enough.
        """
        V = logits.size(-1)
        for k in (256, 4096, V):
            ids = likeliest(logits, min(k, V))
            heavy = weights.gather(1, ids.cpu())
            if (heavy.cumsum(-1)[:, -1:] >= enough).all():
                break
        return ids, heavy

    def select(self, rows: Tensor) -> None:
        """Go on with these rows (indices) alone, in this order, each at most once."""
        self.generators = [self.generators[row] for row in rows.tolist()]
        if self.read is not None:
            self.read = self.read[rows.to(self.read.device)]
        elif self.penalty != 1:
            self.prompts = [self.prompts[row] for row in rows.tolist()]
