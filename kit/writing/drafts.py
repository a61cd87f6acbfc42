"""Lookup decoding: a text that repeats itself is written several tokens at a time.

What followed the newest tokens where they last occurred is a draft of what comes next; the model
reads it in one pass, which costs little more than one token where weights are read from memory.
The sampler then chooses each token from the model's own logits, as without a draft, and as long as
it chooses what the draft says the next logits are there already. So the text has the same
distribution and, where logits do not depend on how many tokens go through the model at once (see
kit/kernels), it is to the last token that of kit.writing.window.steps with the same seed.

The idea: Prompt Lookup Decoding (github.com/apoorvumang/prompt-lookup-decoding), which is an
n-gram for the draft model of Speculative Decoding (arXiv 2211.17192).
"""

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from kit.writing.rows import MOST_DRAFTED as MOST
from kit.writing.window import Window
from model import GPT


class Draft:
    """Guesses how a text goes on: as it did where its newest tokens last occurred.

    The longest of `sizes` newest tokens that occurred counts, and its latest occurrence. A guess
    has 1, 3, 7, 15 or 31 tokens, at most `most`: with the one before them they make a step of 2,
    4, 8 ... tokens, which native code does best. A guess that is all right doubles the next step,
    another one halves it. The sizes were measured with `bench.lookup` of 0.1.
    """

    def __init__(self, ids: Sequence[int], most: int, sizes: Sequence[int] = (4, 3, 2)):
        self.ids: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}  # some tokens -> where the text went on
        self.widest = 2 ** ((most + 1).bit_length() - 1)
        self.width = min(4, self.widest)  # tokens of the next step that has a guess
        self.sizes = sizes
        for id in ids:
            self.add(id)

    def add(self, id: int) -> None:
        """The text goes on with this token."""
        for n in self.sizes:
            if len(self.ids) >= n:
                self.after[tuple(self.ids[-n:])] = len(self.ids)
        self.ids.append(id)

    def guess(self, most: int) -> list[int]:
        """At most so many next tokens; none where the newest ones are new together."""
        for n in self.sizes:
            if at := self.after.get(tuple(self.ids[-n:])):
                period = len(self.ids) - at  # what would be copied next may be guessed itself
                length = max(0, min(most, self.width - 1))
                return [self.ids[at + i % period] for i in range(length)]
        return []

    def learn(self, guessed: int, right: int) -> None:
        """So many tokens of a guess were right."""
        if guessed:
            step = 2 * self.width if right == guessed else self.width // 2
            self.width = max(2, min(step, self.widest))


@torch.inference_mode()
def steps(model: GPT, idx: Tensor, max_new_tokens: int, choose: Callable[[Tensor], Tensor], *,
          lookup: int, context_keep: int | None = None) -> Generator[Tensor, Tensor | None, None]:
    """As window.steps, for one prompt idx (1, T), with drafts of at most `lookup` tokens."""
    if len(idx) != 1 or not 1 <= lookup <= MOST:
        raise ValueError(f"{len(idx)} rows, lookup={lookup}: expected one row, 1 to {MOST}")
    window, size = Window(model, idx, context_keep=context_keep), model.config.block_size
    text, drafted, left = Draft(idx[0].tolist(), lookup), [], max_new_tokens
    states = window.x[:, None]  # (1, 1 + drafted, C): of the newest token and of its draft
    while left > 0:
        logits = model.logits(states).float()
        for right in range(len(drafted) + 1):
            ids = choose(logits[:, right])
            left -= 1
            rows = yield ids
            if not left or (rows is not None and not len(rows)):
                return
            text.add(int(ids))
            if right == len(drafted) or drafted[right] != text.ids[-1]:
                break
        if right < len(drafted):  # the rest of it was wrong
            window.forget(int(window.n) - (len(drafted) - right))
        text.learn(len(drafted), right)
        # a full window is cut before its next token, not earlier, as it is without drafts
        drafted = text.guess(min(left, size - int(window.n)) - 1)
        states = window.append(torch.tensor([text.ids[-1:] + drafted], device=idx.device))
