"""Random segmentation: nothing dropped is the tokenizer's own, and the odds are those of the paper.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.making.tokenizers import make_tokenizer
from data.making.vocabulary import GPT2_PATTERN
from data.tokenizer import EOT, BPETokenizer
from experiments.segmentation import Segmenter, epochs, sample

CLONE = Path(__file__).parents[2]
REAL = (CLONE / "model.py").read_text(encoding="utf-8")
TOKENIZER = make_tokenizer("bpe:600", [REAL + "naïve Äpfel, 苹果 и яблоки 🍎🍏 aaaaaaa" * 9])
SEGMENTER = Segmenter(TOKENIZER)
# Characters known to Python's version of Unicode, mostly some that try the pattern and the merges
LETTERS = (st.characters(exclude_categories=("Cs", "Cn"))
           | st.sampled_from("a n\t\x1c\u2003'tüf果🍎_9"))
TEXTS = st.text(LETTERS, max_size=60)


def segment(text: str, p: float, seed: int = 0, by: Segmenter = SEGMENTER) -> list[int]:
    return by.segment(by.cut(text), p, np.random.default_rng(seed))[0].tolist()


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_nothing_left_out_gives_the_ids_of_the_tokenizer(text):
    assert segment(text, 0) == TOKENIZER.encode(text)


def test_also_of_a_real_text():
    for path in (CLONE / "kit").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert segment(text, 0) == TOKENIZER.encode(text)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.floats(0, 1), st.integers(0, 2**32))
def test_any_segmentation_has_the_bytes_of_the_text_and_a_seed_says_which(text, p, seed):
    ids = segment(text, p, seed)
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == text.encode("utf-8")
    assert segment(text, p, seed) == ids


def test_all_left_out_gives_bytes_and_another_seed_another_segmentation():
    assert segment(REAL, 1) == SEGMENTER.cut(REAL)[0].tolist()
    assert segment(REAL, 0.1, 1) != segment(REAL, 0.1, 2)


@pytest.mark.parametrize("text, odds", [
    ("ab", {("ab",): 0.7, ("a", "b"): 0.3}),
    # ab comes before bc; where it is left out, bc is left out or not in the same round
    ("abc", {("abc",): 0.7 * 0.7, ("ab", "c"): 0.7 * 0.3, ("a", "bc"): 0.3 * 0.7,
             ("a", "b", "c"): 0.09}),
    # the left pair is drawn before the right one, and a round with neither ends the word
    ("abab", {("ab", "ab"): 0.7 * 0.7 + 0.3 * 0.7 * 0.7, ("ab", "a", "b"): 0.7 * 0.3,
              ("a", "b", "ab"): 0.3 * 0.7 * 0.3, ("a", "b", "a", "b"): 0.09})])
def test_odds_of_a_small_vocabulary(text, odds):
    """Tokens ab < bc < abc = ab + c, p = 0.3, and the odds worked out by hand."""
    tokens = [bytes([b]) for b in range(256)] + [b"ab", b"bc", b"abc"]
    small = Segmenter(BPETokenizer("small", GPT2_PATTERN, [*tokens, None], {EOT: len(tokens)}))
    n = 20_000
    ids, place = small.segment(small.cut(f"{text} " * n), 0.3, np.random.default_rng(7))
    ends = np.append(place[1:], len(text + " ") * n)
    pieces = [tokens[i].decode() for i in ids]
    assert (np.char.str_len(pieces) == ends - place).all()
    words = [tuple(word.split("|")[:-1]) for word in "|".join(pieces).split(" ")]
    found = Counter(tuple(part for part in word if part) for word in words)
    del found[()]
    assert found.keys() == odds.keys()
    for word, share in odds.items():
        assert found[word] / n == pytest.approx(share, abs=5 * (share * (1 - share) / n) ** 0.5)


class Texts:
    """A split of the texts given, as its shards hold them."""

    def __init__(self, *texts: str):
        ids = [[TOKENIZER.eot, *TOKENIZER.encode(text)] for text in texts]
        self.ids = np.array([i for part in ids for i in part])
        self.n = len(self.ids)

    def read(self, start: int, n: int) -> np.ndarray:
        return self.ids[start : start + n]


def test_a_sample_is_whole_documents_of_the_bytes_asked_for():
    texts = ["one two", "three four five", "six\n"]
    words = sample(SEGMENTER, Texts(*texts), 26, seed=3)
    ids = SEGMENTER.segment(words, 0, np.random.default_rng(0))[0].tolist()
    assert TOKENIZER.decode(ids).split(EOT)[1:] == [
        texts[i] for i in np.random.default_rng(3).permutation(3)]
    cut = SEGMENTER.segment(sample(SEGMENTER, Texts(*texts), 9, seed=3), 0.5,
                            np.random.default_rng(0))[0].tolist()
    assert TOKENIZER.decode(cut).replace(EOT, "") == TOKENIZER.decode(ids).replace(EOT, "")[:9]


def test_batches_are_rows_of_the_text_and_each_epoch_is_another():
    words = sample(SEGMENTER, Texts(REAL), len(REAL.encode("utf-8")), seed=0)
    first, again = epochs(SEGMENTER, words, 0.1, 5), epochs(SEGMENTER, words, 0.1, 5)
    seen = set()
    for _ in range(60):
        (x, y), (x2, _) = next(first), next(again)
        assert (x == x2).all() and (x[:, 1:] == y[:, :-1]).all()
        for row in x:
            assert TOKENIZER.decode(row[row != TOKENIZER.eot]) in REAL
            seen.add(row.tobytes())
    assert len(seen) == 60 * 16  # never twice the same, though the text was read many times


@pytest.mark.slow
def test_quick_form(quick):
    """Where a model overfits heavily, random segmentation delays that; and it has its price."""
    result = quick("segmentation")
    none, random = result["runs"]["none"], result["runs"]["p = 0.1"]
    for a, b in zip(none, random, strict=True):
        assert a["bpb"]["45"][-1] > b["bpb"]["45"][-1] + 0.1
        assert 1.05 < b["tokens_per_byte"] / a["tokens_per_byte"] < 1.3
    assert 0.02 < result["price"]["0.1"] < 0.2
