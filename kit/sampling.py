"""From logits to the next token, and from tokens to text on the screen."""

import codecs
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor


def filter_logits(logits: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """Logits (B, V) -> logits / temperature with the unlikely tokens at -inf; temperature > 0.

    Exactly top_k stay (None or 0: all), of them the fewest whose probabilities reach top_p
    (nucleus sampling, arXiv 1904.09751), at least one.
    """
    temperature = min(max(temperature, 1e-30), 1e30)  # float32 would read it as 0 or infinity
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # at most 0: no overflow
    if not top_k and top_p >= 1:
        return logits
    V = logits.size(-1)
    values, ids = logits.topk(min(top_k or V, V))  # the likeliest first
    if top_p < 1:
        p = values.softmax(-1)
        before = p.cumsum(-1) - p  # probability of all that is likelier
        before[..., 0] = -1
        values = values.masked_fill(before >= top_p, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(-1, ids, values)


class Sampler:
    """Chooses next tokens: logits (B, V) -> ids (B,). Row i draws from its own seed, seed + i."""

    def __init__(self, rows: int, temperature: float = 1.0, top_k: int | None = None,
                 top_p: float = 1.0, seed: int = 0):
        self.filters = temperature, top_k, top_p
        self.generators = [torch.Generator().manual_seed(seed + i) for i in range(rows)]

    def __call__(self, logits: Tensor) -> Tensor:
        if not logits.isfinite().all():
            raise FloatingPointError("the model's logits are not finite: its weights are damaged")
        if self.filters[0] == 0:
            return logits.argmax(dim=-1)
        p = filter_logits(logits, *self.filters).softmax(-1)
        # argmax of p / Exp(1) noise is a draw from p; the noise of a row is its own, on any device
        noise = torch.stack([torch.empty(len(row)).exponential_(generator=g)
                             for row, g in zip(p, self.generators, strict=True)])
        return (p / noise.clamp(min=1e-30).to(p.device)).argmax(dim=-1)


def start_ids(tokenizer) -> list[int]:
    """What a text without a prompt starts from: the separator or, for want of one, a newline."""
    if tokenizer.eot is not None:
        return [tokenizer.eot]
    try:
        return list(tokenizer.encode("\n"))
    except ValueError:  # not even that
        return [0]


def write_text(model: Any, tokenizer: Any, start: list[int], end: int | None, seed: int,
               max_new_tokens: int = 300) -> str:
    """What a model writes after the ids `start`, up to the id `end` where that is one."""
    device, choose = next(model.parameters()).device, Sampler(1, 0.8, top_k=50, seed=seed)
    new = model.eval().generate(torch.tensor([start], device=device), max_new_tokens, choose)
    ids = takewhile(lambda id: id != end, map(int, new))
    return tokenizer.decode(ids if end is None else [*start, *ids])


class TextStream:
    """Turns the bytes of tokens into text that can be shown at once, errors replaced.

    What may be half a character or the beginning of `stop` is held back. Once `stop` is complete,
    `stopped` is set; nothing from there on is shown.
    """

    def __init__(self, stop: str | None = None):
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.stop, self.held, self.stopped = stop or "", "", False

    def feed(self, data: bytes, final: bool = False) -> str:
        """The text that is now certain. `final`: nothing follows."""
        if self.stopped:
            return ""
        text = self.held + self.decoder.decode(data, final)
        if self.stop and self.stop in text:
            self.stopped = True
            return text.partition(self.stop)[0]
        lengths = range(1 if final else len(self.stop))  # of what might begin the stop; 0 always
        n = max((n for n in lengths if text.endswith(self.stop[:n])), default=0)
        self.held = text[len(text) - n :]
        return text[: len(text) - n]
