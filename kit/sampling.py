"""From logits to the next token, and from tokens to text on the screen."""

import codecs

import torch
from torch import Tensor


def filter_logits(logits: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """Logits (B, V) -> logits / temperature with the unlikely tokens at -inf; temperature > 0.

    top_k: keep exactly k, ties resolved; None or 0 keeps all.
    top_p: then keep the fewest tokens whose probabilities reach p (nucleus sampling,
    arXiv 1904.09751), at least one; 1 keeps all.
    """
    temperature = min(max(temperature, 1e-30), 1e30)  # float32 would read it as 0 or infinity
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # at most 0: no overflow
    if top_k and top_k < logits.size(-1):
        values, kept = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, values)
    if top_p < 1:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
        p = values.softmax(-1)
        before = p.cumsum(-1) - p  # probability of all that is likelier
        before[..., 0] = -1
        logits = torch.full_like(logits, -torch.inf).scatter(
            -1, order, values.masked_fill(before >= top_p, -torch.inf))
    return logits


class Sampler:
    """Chooses next tokens: logits (B, V) -> ids (B,). Row i draws from its own seed, seed + i."""

    def __init__(self, rows: int, temperature: float = 1.0, top_k: int | None = None,
                 top_p: float = 1.0, seed: int = 0):
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generators = [torch.Generator().manual_seed(seed + i) for i in range(rows)]

    def __call__(self, logits: Tensor) -> Tensor:
        if not logits.isfinite().all():
            raise FloatingPointError("the model's logits are not finite: its weights are damaged")
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        p = filter_logits(logits, self.temperature, self.top_k, self.top_p).softmax(-1)
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


class TextStream:
    """Turns the bytes of tokens into text that can be shown at once.

    A character of several bytes waits until it is whole. With `stop`, text that may be the
    beginning of it waits too; when it is complete, `stopped` is set and it is never shown.
    The pieces together are the bytes' UTF-8 decoding, errors replaced, up to the stop.
    """

    def __init__(self, stop: str | None = None):
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.stop, self.held, self.stopped = stop, "", False

    def feed(self, data: bytes, final: bool = False) -> str:
        """The text that is now certain. `final`: nothing follows."""
        if self.stopped:
            return ""
        text, self.held = self.held + self.decoder.decode(data, final), ""
        if not self.stop:
            return text
        if (at := text.find(self.stop)) >= 0:
            self.stopped = True
            return text[:at]
        if not final:
            n = next((n for n in range(min(len(self.stop) - 1, len(text)), 0, -1)
                      if text.endswith(self.stop[:n])), 0)
            text, self.held = text[: len(text) - n], text[len(text) - n :]
        return text
