"""Claim: random segmentation helps a model of little text (BPE dropout, against usual dropout).

Subword regularisation (Kudo, arXiv 1804.10959; kexue.fm 9768) reads another segmentation each time.
BPE dropout (Provilkov et al., arXiv 1910.13267) leaves out each possible merge with probability p.
A small model reads little text, segmented again each epoch; it is tested on the standard one.

    python -m experiments.segmentation [--quick]
"""

from collections.abc import Iterator
from itertools import count, islice

import numpy as np
import regex  # comes with tiktoken
import torch

from data.dataset import Dataset
from data.making.bytelevel import merges
from data.shards import Split
from data.tokenizer import Tokenizer
from experiments import common, training
from experiments.common import COLORS, Lab, Result, Rows, format_difference, format_mean
from kit.evaluate import eval_batches, evaluate
from model import GPT, GPTConfig

ARMS = {  # p: probability that a merge is left out; dropout: that of the model
    "none": dict(p=0.0, dropout=0.0),
    **{f"p = {p}": dict(p=p, dropout=0.0) for p in (0.05, 0.1, 0.2)},
    "dropout 0.1": dict(p=0.0, dropout=0.1), "both 0.1": dict(p=0.1, dropout=0.1)}
T, ROWS = 64, 16  # context and rows of an update
NEVER = np.int32(2**31 - 1)  # the rank of a pair that no merge joins
Words = tuple[np.ndarray, np.ndarray]  # ids of bytes (n,), number of the word of each (n,)


class Segmenter:
    """Byte pair encoding with dropout of merges, of all words of a text at once.

    Each round every word merges the pair of the lowest rank, the leftmost of equals, of those that
    are not left out in this round; a word with none is finished. With p = 0 the ids are those of
    the tokenizer, whose library has no seed. For small vocabularies: it fills a table of pairs.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, n, special = tokenizer, tokenizer.vocab_size, tokenizer.special.values()
        id_of = {tokenizer.token_bytes(i): i for i in range(n) if i not in special}
        self.byte_ids = np.array([id_of[bytes([b])] for b in range(256)], np.int32)
        self.merged = np.full((n, n), NEVER)  # left, right -> id of both, which is its rank too
        longer = [token for token in id_of if len(token) > 1]
        for token, (left, right) in zip(longer, merges(list(id_of)), strict=True):
            self.merged[id_of[left], id_of[right]] = id_of[token]
        pattern = tokenizer.to_json()["pattern"]  # to `regex` four more characters are \s
        pattern = pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")
        self.pattern = regex.compile(pattern)

    def cut(self, text: str) -> Words:
        """The words of a text, as the tokenizer's own pattern has them."""
        lengths = [len(word.encode("utf-8")) for word in self.pattern.findall(text)]
        word = np.repeat(np.arange(len(lengths)), lengths)
        return self.byte_ids[np.frombuffer(text.encode("utf-8"), np.uint8)], word

    def segment(self, words: Words, p: float, rng: np.random.Generator) -> Words:
        """Words -> ids of their tokens (m,), and the place in `words` where each begins (m,)."""
        ids, word, place, finished = words[0].copy(), words[1], np.arange(len(words[0])), []
        while len(ids):
            rank = np.full(len(ids), NEVER)
            rank[:-1] = np.where(word[1:] == word[:-1], self.merged[ids[:-1], ids[1:]], NEVER)
            rank[rng.random(len(ids), np.float32) < p] = NEVER
            starts = np.flatnonzero(np.diff(word, prepend=-1))
            order = rank * np.int64(len(ids)) + np.arange(len(ids))  # by rank, then from the left
            best = np.minimum.reduceat(order, starts) % len(ids)  # of each word
            merging = rank[best] != NEVER
            going = np.repeat(merging, np.diff(starts, append=len(ids)))
            finished.append((ids[~going], place[~going]))
            left = best[merging]
            ids[left] = rank[left]
            going[left + 1] = False  # the right part is in the left one now
            ids, word, place = ids[going], word[going], place[going]
        ids, place = (np.concatenate(a) for a in zip((ids, place), *finished, strict=True))
        order = np.argsort(place)
        return ids[order], place[order]


def sample(segmenter: Segmenter, split: Split, n_bytes: int, seed: int) -> Words:
    """n_bytes of text, of whole documents but for the last, a separator before each."""
    ids, decode, eot = split.read(0, split.n), segmenter.tokenizer.decode, segmenter.tokenizer.eot
    documents, parts, left = np.split(ids, np.flatnonzero(ids == eot))[1:], [], n_bytes
    order = iter(np.random.default_rng(seed).permutation(len(documents)))
    while left:
        text = decode(documents[next(order)][1:]).encode("utf-8")[:left]
        letters, word = segmenter.cut(text.decode("utf-8", errors="ignore"))
        parts.append((np.append(np.int32(eot), letters), np.append(-1, word)))
        left -= len(text)
    letters, word = (np.concatenate(a) for a in zip(*parts, strict=True))
    return letters, np.cumsum(np.diff(word, prepend=-1) != 0)


def epochs(segmenter: Segmenter, words: Words, p: float, seed: int) -> Iterator[tuple]:
    """Batches x, y (ROWS, T): every epoch is segmented, cut into windows and shuffled again."""
    for epoch in count():
        rng = np.random.default_rng([seed, epoch])
        ids = segmenter.segment(words, p, rng)[0].astype(np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(ids[rng.integers(T):], T + 1)[::T]
        order = rng.permutation(len(windows))
        for i in range(0, len(windows) - ROWS + 1, ROWS):
            rows = windows[order[i : i + ROWS]]
            yield rows[:, :-1], rows[:, 1:]


def trial(p: float, dropout: float, seed: int, tokenizer: str, n_bytes: int, n_embd: int,
          lengths: list[int], every: int) -> Result:
    """Train a model by each schedule -> bits per byte of validation after each `every` updates."""
    data, curves = training.stdlib(tokenizer), {}
    segmenter = Segmenter(data.tokenizer)
    words = sample(segmenter, data.train, n_bytes, seed)
    for n in lengths:
        torch.manual_seed(seed)  # also of dropout
        model = GPT(GPTConfig(data.vocab_size, T, 2, 4, n_embd, dropout), 0.05)
        curves[str(n)] = learn(model, data, epochs(segmenter, words, p, seed), n, every)
    tokens, _ = segmenter.segment(words, p, np.random.default_rng([seed, 0]))
    return {"bpb": curves, "tokens_per_byte": len(tokens) / n_bytes}


def learn(model: GPT, data: Dataset, batches: Iterator[tuple], updates: int,
          every: int) -> list[float]:
    """Train the model -> bits per byte of validation after each `every` updates."""
    bpb, lengths = [], data.token_byte_lengths()

    def measure(step: int) -> None:
        if step and step % every == 0:
            fixed = eval_batches(data.val, T, 8, 32)  # 16,384 tokens from 32 places
            bpb.append(evaluate(model, fixed, lengths, data.separator, torch.inference_mode)["bpb"])

    training.train(model, lambda _: next(batches), training.Recipe(updates), measure)
    return bpb


def price(p: float, seed: int, tokenizer: str, n_bytes: int, times: int) -> float:
    """Bits per byte that the standard segmentation costs a model that knows random ones perfectly.

    -log2 of its odds, counted word by word; half a hit in `times` at least, so a lower bound.
    """
    data, rng = training.stdlib(tokenizer), np.random.default_rng(seed)
    segmenter = Segmenter(data.tokenizer)
    words = sample(segmenter, data.val, n_bytes, seed)
    standard = segmenter.segment(words, 0, rng)[1]
    hits = np.zeros(words[1][-1] + 1)
    for _ in range(times):
        other = np.setxor1d(standard, segmenter.segment(words, p, rng)[1])  # beginnings of one only
        hits += np.bincount(words[1][other], minlength=len(hits)) == 0
    return float(-np.log2(np.maximum(hits, 0.5) / times).sum() / n_bytes)


def measure(lab: Lab) -> Result:
    names, seeds = (["none", "p = 0.1"], [1]) if lab.quick else (list(ARMS), [1, 2, 3])
    tokenizer = "bpe:512" if lab.quick else "bpe:1024"
    training.stdlib(tokenizer)  # prepared once, not by every process
    size = (dict(n_bytes=10_000, n_embd=64, lengths=[15, 45], every=15) if lab.quick else
            dict(n_bytes=200_000, n_embd=128, lengths=[150, 300], every=30))
    runs = iter(lab.trials(trial, [{**ARMS[name], "seed": seed, "tokenizer": tokenizer, **size}
                                   for name in names for seed in seeds]))
    odds = dict(n_bytes=5_000, times=20) if lab.quick else dict(n_bytes=40_000, times=200)
    random = sorted({ARMS[name]["p"] for name in names} - {0.0})
    prices = lab.trials(price, [{"p": p, "seed": 0, "tokenizer": tokenizer, **odds}
                                for p in random])
    return {"seeds": seeds, "size": size, "price": dict(zip(map(str, random), prices, strict=True)),
            "runs": {name: list(islice(runs, len(seeds))) for name in names}}


def lowest_and_end(runs: list[Result]) -> tuple[list[float], list[float]]:
    """Bits per byte of each seed: the lowest point of all, and the end of the long schedule."""
    curves = [list(run["bpb"].values()) for run in runs]
    return [min(map(min, of_seed)) for of_seed in curves], [of_seed[-1][-1] for of_seed in curves]


def table(result: Result) -> Rows:
    rows = [["", "tokens/byte", "bits/byte: price", "lowest", "end", "lowest - none", "end - none"]]
    none = lowest_and_end(result["runs"]["none"])
    for name, runs in result["runs"].items():
        here, cost = lowest_and_end(runs), result["price"].get(str(ARMS[name]["p"]), 0.0)
        tokens = np.mean([run["tokens_per_byte"] for run in runs])
        rows.append([name, f"{tokens:.3f}", f"{cost:.3f}", *map(format_mean, here),
                     *(["", ""] if name == "none" else map(format_difference, here, none))])
    return rows


def draw(result: Result, fig) -> None:
    runs, lengths = result["runs"], list(result["runs"]["none"][0]["bpb"])
    axes = fig.subplots(1, len(lengths), sharey=True)
    axes[0].set_ylabel("bits per byte, seeds shifted to one mean")
    for ax, n in zip(axes, lengths, strict=True):
        curves = np.array([[run["bpb"][n] for run in of_arm] for of_arm in runs.values()])
        curves -= curves.mean((0, 2), keepdims=True) - curves.mean()  # their texts differ
        updates = result["size"]["every"] * np.arange(1, curves.shape[2] + 1)
        for name, seeds, color in zip(runs, curves, COLORS, strict=False):
            ax.plot(updates, seeds.mean(0), color=color, label=name)
            ax.fill_between(updates, seeds.min(0), seeds.max(0), color=color, alpha=0.15, lw=0)
        ax.set(xlabel="updates", title=f"schedule of {n} updates")
    axes[-1].legend(loc="upper right", ncols=2)


if __name__ == "__main__":
    common.command("segmentation")
