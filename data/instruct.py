"""Instruction data: what is said to the model, and what it learns to answer.

A sample is a chat, {"messages": [{"role": ..., "content": ...}, ...]}, or {"prompt": ...,
"completion": ...}. In tokens each message is <separator> <role, line end> <content> and a prompt
with its completion <separator> <prompt> <completion>; one more separator ends the sample. Header
and content are encoded apart, and no text encodes to a separator: no content can forge a turn.
The mask is 1 on what the assistant says (or the completion) and on the separator that ends it.
Samples lie end to end in ordinary shards, with the mask and their starts beside them.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from data.order import epoch_order
from data.shards import Shards, Split
from data.tokenizer import EOT
from kit.errors import UserError

# A chat in text that is as below in tokens, for libraries that read EOT in it as the separator
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ 'EOT' + message['role'] + '\\n' + message['content'] }}"
    "{% endfor %}{{ 'EOT' }}"
    "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}").replace("EOT", EOT)
CHUNK = 2048  # rows of an epoch that are sorted by length, and
GROUP = 64  # neighbours among them that stay together: rows of similar length without a rhythm
_SCAN = 1 << 20  # entries of a mask read at once
_NEVER = 2**31 - 1  # the place of the first target of a sample that has none


def has_form(record: dict) -> bool:
    """Whether a record is a sample by its keys."""
    return "messages" in record or ("prompt" in record and "completion" in record)


def canonical(record: dict) -> str | None:
    """A sample as JSON of one spelling, None without a target; ValueError says what is wrong."""
    if record.get("messages") in (None, "") and "prompt" in record:  # a table has every column
        sample = {key: _text(record, key) for key in ("prompt", "completion")}
    elif isinstance(record["messages"], list) and record["messages"]:
        sample = {"messages": [_message(m, i) for i, m in enumerate(record["messages"], 1)]}
    else:
        raise ValueError("messages is no list with one message at least")
    text = json.dumps(sample, ensure_ascii=False, separators=(",", ":"))
    return text if any(learn for _, _, learn in _turns(text)) else None


def _message(message: object, number: int) -> dict[str, str]:
    where = f"message {number}: "
    if not isinstance(message, dict):
        raise ValueError(f"{where}no object with role and content")
    role = _text(message, "role", where)
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", role):
        raise ValueError(f"{where}role {role[:40]!r} is no short word such as user or assistant")
    return {"role": role, "content": _text(message, "content", where)}


def _text(record: dict, key: str, where: str = "") -> str:
    text = record.get(key)
    if not isinstance(text, str):
        what = "missing" if text is None else f"of type {type(text).__name__} and no text"
        raise ValueError(f"{where}{key} is {what}")
    return text


def _turns(sample: str) -> Iterator[tuple[str, str, bool]]:
    """What goes before, what is said, and whether it is for the model to learn."""
    record = json.loads(sample)
    if "messages" not in record:
        yield record["prompt"], record["completion"], record["completion"] != ""
    for message in record.get("messages", ()):
        role, content = message["role"], message["content"]
        yield f"{role}\n", content, role == "assistant" and content != ""


def text_of(sample: str) -> str:
    """All text of a canonical sample: what its tokens decode to, without the separators."""
    return "".join(before + content for before, content, _ in _turns(sample))


def encode(sample: str, tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 (n,) and mask uint8 (n,) of a canonical sample; UserError without a separator."""
    if tokenizer.eot is None:
        raise UserError(f"--tokenizer={tokenizer.spec} has no separator; take byte, bpe:2048, gpt2")
    ids, mask = [tokenizer.eot], [False]
    for before, content, learn in _turns(sample):
        head, body = tokenizer.encode(before), tokenizer.encode(content)
        ids += [*head, *body, tokenizer.eot]
        mask += [False] * len(head) + [learn] * (len(body) + 1)
    return np.array(ids, np.int64), np.array(mask, np.uint8)


def question(text: str, tokenizer) -> list[int]:
    """Ids of a user's message, up to where the assistant's answer begins."""
    sample = json.dumps({"messages": [{"role": "user", "content": text},
                                      {"role": "assistant", "content": ""}]})
    return encode(sample, tokenizer)[0][:-1].tolist()


class Samples:
    """The samples of one split, one a row, padded on the right to the longest of the batch.

    starts: first token of each sample, int64 (n_samples,). pad: the id of padding, which y = -1
    tells apart. long: what becomes of a sample of more than block_size + 1 tokens, "drop" or
    "truncate"; one without a target is dropped. UserError if tokens, mask and starts do not fit.
    """

    def __init__(self, name: str, tokens: Split, mask: Shards, starts: np.ndarray, pad: int,
                 long: str = "drop"):
        self.name, self.tokens, self.mask, self.pad, self.long = name, tokens, mask, pad, long
        self.n_tokens: int = tokens.n_tokens
        self._bounds = np.append(starts, self.n_tokens).astype(np.int64)
        self.starts = self._bounds[:-1]
        fits = mask.n == self.n_tokens and self._bounds[0] == 0 and self._bounds.min() == 0
        if not fits or (np.diff(self._bounds) < 1).any():  # below 0, a difference may overflow
            raise UserError(
                f"the {name} split's {self.n_tokens:,} tokens, mask of {mask.n:,} and starts of "
                f"{self.starts.size:,} samples do not fit together; prepare the dataset again")
        self._first, self._targets = self._scan()
        self._left: dict[int, np.ndarray] = {}  # by block_size

    def _scan(self) -> tuple[np.ndarray, int]:
        """Place of each sample's first target within it, int32 (n_samples,), and all targets."""
        first, targets = np.full(self.starts.size, _NEVER, np.int32), 0
        for begin in range(0, self.n_tokens, _SCAN):
            said = self.mask.read(begin, min(_SCAN, self.n_tokens - begin)) == 1
            low, high = np.searchsorted(self.starts, (begin, begin + said.size))
            said[self.starts[low:high] - begin] = False  # nothing comes before to predict it from
            targets += int(np.count_nonzero(said))
            rises = begin + np.flatnonzero(said & ~np.append(False, said[:-1]))
            sample = np.searchsorted(self.starts, rises, side="right") - 1
            np.minimum.at(first, sample, (rises - self.starts[sample]).astype(np.int32))
        return first, targets

    def _samples(self, block_size: int) -> np.ndarray:
        """Numbers of the samples that are left at this context, the shortest first."""
        if block_size not in self._left:
            lengths = np.diff(self._bounds)
            fits = (lengths <= block_size + 1) | (self.long == "truncate")
            left = np.flatnonzero(fits & (self._first <= block_size))
            self._left[block_size] = left[np.argsort(lengths[left], kind="stable")]
        return self._left[block_size]

    def prompt(self, i: int) -> list[int]:
        """What a sample has before its first target; all of it if there is none."""
        n = min(int(self._first[i]), int(self._bounds[i + 1] - self._bounds[i]))
        return self.tokens.read(int(self.starts[i]), n).tolist()

    def are_chats(self, tokenizer) -> bool:
        """Whether an assistant is who speaks first of what is learned in each of 64 samples."""
        head = [self.pad, *tokenizer.encode("assistant\n")]  # in a prompt no separator is repeated
        return all(self.prompt(i)[-len(head):] == head for i in range(min(64, self.starts.size)))

    def require(self, block_size: int) -> None:
        """UserError unless at least one sample is left at this context."""
        if self._samples(block_size).size:
            return
        needs = np.diff(self._bounds)[self._first < _NEVER] - 1
        cut = "" if self.long == "truncate" else "keep beginnings with --long_samples=truncate, "
        remedy = f"set --block_size={needs.min()} or more, {cut}or " if needs.size else ""
        raise UserError(f"none of the {self.name} split's {self.starts.size:,} samples has a "
                        f"target left at --block_size={block_size}; {remedy}prepare others")

    def epoch_rows(self, block_size: int) -> int:
        """Samples that are left at this context: the rows of an epoch."""
        return self._samples(block_size).size

    def batch(self, first: int, n: int, block_size: int, seed: int
              ) -> tuple[np.ndarray, np.ndarray]:
        """Training rows first .. first + n - 1: x and y, int64 (n, T), T <= block_size.

        Row i of a seed is always the same sample; only T depends on the rows it comes with.
        """
        self.require(block_size)
        samples = self._samples(block_size)
        return self._rows(samples[_order(first, n, samples.size, seed)], n, block_size)

    def _rows(self, samples: np.ndarray, n: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """x and y of some samples, and rows of zeros without a target up to the n-th."""
        starts = self._bounds[samples]
        lengths = np.minimum(self._bounds[samples + 1] - starts, block_size + 1) - 1
        width = _width(lengths.max(initial=1), block_size)
        x, y = np.zeros((n, width), dtype=np.int64), np.full((n, width), -1, dtype=np.int64)
        for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            ids, said = self.tokens.read(start, length + 1), self.mask.read(start, length + 1)
            x[i, :length], x[i, length:] = ids[:-1], self.pad
            y[i, :length] = np.where(said[1:] == 1, ids[1:], -1)
        return x, y

    fixed_windows = epoch_rows  # evaluation takes each sample that is left, once

    def window(self, i: int, n: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Evaluation rows i .. i + n - 1, the shortest first; past the end as in `Split.window`."""
        return self._rows(self._samples(block_size)[i:i + n], n, block_size)

    def report(self, block_size: int, batch_size: int) -> str:
        """What there is, what is left out, and how much of a batch is padding, in one line."""
        samples, lengths = self._samples(block_size), np.diff(self._bounds) - 1
        n, longer = self.starts.size, lengths > block_size
        text = (f"{self.name}: {n:,} samples, {self.n_tokens:,} tokens, "
                f"{self._targets / max(1, self.n_tokens):.1%} of them targets; {longer.sum():,} "
                f"samples longer than the context of {block_size}, {longer[samples].sum():,} "
                f"truncated, {n - samples.size:,} dropped")
        if not samples.size:
            return text
        batches = -(-min(samples.size, 2**16) // batch_size)  # enough to tell
        order = _order(0, batches * batch_size, samples.size, seed=0)
        used = np.minimum(lengths[samples[order]], block_size).reshape(batches, batch_size)
        room = batch_size * _width(used.max(axis=1), block_size).sum()
        return f"{text}; {1 - used.sum() / room:.1%} padding in batches of {batch_size}"


def _order(first: int, n: int, size: int, seed: int) -> np.ndarray:
    """Which of `size` samples, sorted by length, the rows first .. first + n - 1 are, (n,)."""
    parts = []
    while n > 0:
        epoch, row = divmod(first, size)
        parts.append(_deal(epoch, row // CHUNK, size, seed)[row % CHUNK:][:n])
        first, n = first + parts[-1].size, n - parts[-1].size
    return np.concatenate(parts)


@lru_cache(4)
def _deal(epoch: int, chunk: int, size: int, seed: int) -> np.ndarray:
    """One chunk of an epoch: sorted, and then its groups of neighbours shuffled."""
    begin = chunk * CHUNK
    n = min(CHUNK, size - begin)
    order = np.sort(epoch_order(epoch * size + begin, n, size, seed))
    groups, number = -(-n // GROUP), epoch * -(-size // CHUNK) + chunk
    rank = epoch_order(number * groups, groups, groups, seed + 2**32)  # not the rows' own order
    return order[np.argsort(rank[np.arange(n) // GROUP], kind="stable")]


def _width(longest: np.ndarray, block_size: int) -> np.ndarray:
    """Columns for rows up to so long: a multiple of 8, so that few shapes occur, or the context."""
    return np.minimum(-(-longest // 8) * 8, block_size)
