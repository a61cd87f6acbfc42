"""kit/writing/drafts.py: the text of plain decoding, in fewer steps."""

import copy
import dataclasses
import itertools
import json
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.tokenizer import ByteTokenizer
from kit.kernels import fast, native
from kit.kernels.leaves import FEW
from kit.sampling import Sampler
from kit.writing import drafts, window
from kit.writing.drafts import MOST, Draft
from kit.writing.prompts import Prompt
from kit.writing.rows import write
from model import GPT, GPTConfig
from sample import SampleSettings

CODE, WHY = native.library()
needs_code = pytest.mark.skipif(CODE is None, reason=WHY)
BYTES = ByteTokenizer()
VOCAB, SIZE = 23, 16


def make(vocab_size: int = VOCAB, scale: float = 1.6, **options) -> GPT:
    """Untrained, with weights so large that it repeats itself now and then, and not always."""
    torch.manual_seed(3)
    config = dict(vocab_size=vocab_size, block_size=SIZE, n_layer=2, n_head=2, n_embd=24) | options
    model = GPT(GPTConfig(**config)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p)).mul_(scale)
    return model


PLAIN = make()


def quick(weights: str, compiled: bool = True) -> GPT:
    model = copy.deepcopy(PLAIN)
    fast(model, weights, compiled)
    return model


QUICK = {kind: quick(kind) for kind in native.KINDS}


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """Few different ids: n-grams come again, and go on otherwise."""
    return torch.randint(4, (1, length), generator=torch.Generator().manual_seed(seed))


def sampler(idx: torch.Tensor, seed: int = 5, **options) -> Sampler:
    return Sampler([seed], prompts=idx.tolist(), **options)


class Steps:
    """How many tokens went through the model at each step after the prompt."""

    def __init__(self, model: GPT, monkeypatch: pytest.MonkeyPatch):
        self.tokens: list[int] = []
        real = model.hidden

        def hidden(idx, cache=None):
            self.tokens.append(idx.size(1))
            return real(idx, cache)

        monkeypatch.setattr(model, "hidden", hidden)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A list that gets (tokens, right tokens) of each draft; the last of a text is not judged."""
    judged, learn = [], Draft.learn

    def learn_and_tell(self, guessed, right):
        if guessed:
            judged.append((guessed, right))
        learn(self, guessed, right)

    monkeypatch.setattr(Draft, "learn", learn_and_tell)
    return judged


# ------------------------------------------------------------------------------------------ drafts


def follow(ids: list[int], sizes: tuple[int, ...], most: int) -> list[int]:
    """What Draft.guess shall be, by looking through the whole text."""
    for n in sizes:
        found = [end for end in range(n, len(ids)) if ids[end - n : end] == ids[-n:]]
        if found:
            ahead = list(ids)
            for i in range(most):  # a copy that reaches the end goes on in itself
                ahead.append(ahead[found[-1] + i])
            return ahead[len(ids) :]
    return []


@given(st.lists(st.integers(0, 3), max_size=60), st.sampled_from([1, 3]),
       st.sampled_from([(4, 3, 2), (3, 2), (2,), (5, 1)]))
def test_a_guess_is_what_followed_the_latest_occurrence_of_the_longest_suffix(ids, most, sizes):
    draft = Draft([], most, sizes)
    for i, id in enumerate(ids):
        assert draft.guess(99) == follow(ids[:i], sizes, most)
        draft.add(id)
    assert draft.guess(99) == follow(ids, sizes, most) == Draft(ids, most, sizes).guess(99)
    assert len(draft.after) <= len(sizes) * len(ids)  # bounded by the text
    assert draft.guess(1) == follow(ids, sizes, 1)
    assert draft.guess(0) == draft.guess(-1) == []


def test_what_has_a_period_is_continued_in_it():
    draft = Draft([7, 1, 2, 3, 1, 2, 3], 8)
    draft.learn(3, 3)
    assert draft.guess(9) == [1, 2, 3, 1, 2, 3, 1]
    assert Draft([5, 5, 5], 3).guess(9) == [5, 5, 5]
    assert Draft([1, 2, 3], 3).guess(9) == []


@pytest.mark.parametrize("most, expected", [
    (31, [3, 1, 1, 3, 7, 15, 31, 31, 15, 7]), (15, [3, 1, 1, 3, 7, 15, 15, 15, 7, 3]),
    (14, [3, 1, 1, 3, 7, 7, 7, 7, 3, 1]), (2, [1] * 10), (1, [1] * 10)])
def test_guesses_grow_with_success(most, expected):
    draft, lengths = Draft([5] * 9, most), []
    for share in (0, 0, 1, 1, 1, 1, 1, 0.9, 0, 0):
        guess = draft.guess(99)
        lengths.append(len(guess))
        draft.learn(len(guess), int(share * len(guess)))
        draft.learn(0, 0)  # no guess tells nothing
    assert lengths == expected


def test_a_long_text_costs_no_more_per_token():
    """Work per token is counted, not timed: look-ups and insertions, never a scan."""
    draft = Draft(range(100_000), 4)

    class Unscannable(list):
        def __iter__(self):
            raise AssertionError("went through the whole text")
        __contains__ = index = count = __iter__

    draft.ids = Unscannable(draft.ids)
    for id in (7, 8, 9):
        draft.add(id)
    assert draft.guess(4) == [10, 11, 12]


# ---------------------------------------------------------------------------------- the same text


@needs_code
@pytest.mark.parametrize("kind", native.KINDS)
@pytest.mark.parametrize("n", [1, 3, 10, MOST])
@pytest.mark.parametrize("options", [dict(temperature=0), dict(temperature=0.7),
                                     dict(temperature=1.2, top_k=6, repetition_penalty=1.1),
                                     dict(top_p=0.8), dict(min_p=0.1)], ids=str)
def test_the_text_is_that_of_plain_decoding(kind, n, options, monkeypatch):
    """Past the window several times, from prompts of all lengths."""
    model, judged = QUICK[kind], watch(monkeypatch)
    for length, keep in ((1, None), (5, 1), (SIZE - 1, 15), (SIZE, 3), (SIZE + 5, None)):
        idx = prompt(length, seed=n)
        plain = window.steps(model, idx, 5 * SIZE, sampler(idx, **options), context_keep=keep)
        drafted = drafts.steps(model, idx, 5 * SIZE, sampler(idx, **options), lookup=n,
                                  context_keep=keep)
        assert list(map(int, drafted)) == list(map(int, plain)), (length, keep)
    assert any(right == 0 for _, right in judged)
    assert any(right for _, right in judged) or options != dict(temperature=0)


@needs_code
def test_the_text_is_the_same_where_a_draft_was_right_in_part(monkeypatch):
    model, judged = QUICK["bfloat16"], watch(monkeypatch)
    for seed in range(20):
        idx = prompt(9, seed)
        plain = window.steps(model, idx, 3 * SIZE, sampler(idx, seed, temperature=0.3))
        drafted = drafts.steps(model, idx, 3 * SIZE, sampler(idx, seed, temperature=0.3),
                                  lookup=7)
        assert list(map(int, drafted)) == list(map(int, plain))
    assert {(3, 0), (3, 1), (3, 2), (3, 3)} <= set(judged)


@pytest.mark.parametrize("model", [PLAIN, quick("float32", compiled=False)])
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_without_native_code_too_unless_tokens_tie(model, temperature):
    idx = prompt(7)
    plain = window.steps(model, idx, 5 * SIZE, sampler(idx, temperature=temperature))
    drafted = drafts.steps(model, idx, 5 * SIZE, sampler(idx, temperature=temperature), lookup=4)
    assert list(map(int, drafted)) == list(map(int, plain))


@needs_code
@given(st.lists(st.integers(0, 3), min_size=1, max_size=2 * SIZE), st.integers(1, MOST),
       st.integers(1, 3 * SIZE), st.integers(1, SIZE - 1), st.integers(0, 99))
def test_any_prompt_draft_length_and_cut(ids, n, new, keep, seed):
    idx, model = torch.tensor([ids]), QUICK["float32"]
    plain = window.steps(model, idx, new, sampler(idx, seed), context_keep=keep)
    drafted = drafts.steps(model, idx, new, sampler(idx, seed), lookup=n, context_keep=keep)
    assert list(map(int, drafted)) == list(map(int, plain))


@needs_code
def test_drafts_are_used_and_tried_in_one_pass(monkeypatch):
    """A text that repeats itself takes a fraction of the steps, and none is longer than told."""
    model, idx = make(block_size=80), torch.tensor([[1, 2, 3, 1, 2, 3]])
    with torch.no_grad():
        model.wpe.weight.zero_()  # greedy text without positions soon goes round in a circle
    fast(model, "float32")
    steps = Steps(model, monkeypatch)
    text = drafts.steps(model, idx, 60, sampler(idx, temperature=0), lookup=7)
    greedy = list(map(int, text))
    assert len(greedy) == 60 and max(steps.tokens[1:]) == 8
    passes, steps.tokens = len(steps.tokens), []
    assert list(map(int, window.steps(model, idx, 60, sampler(idx, temperature=0)))) == greedy
    assert passes < 0.6 * len(steps.tokens)


def test_the_last_token_is_not_overshot(monkeypatch):
    """A draft ends where the text does, and nothing is read that is not needed."""
    model, idx = make(), torch.tensor([[5, 5, 5]])
    steps = Steps(model, monkeypatch)
    always = drafts.steps(model, idx, 8, lambda logits: torch.tensor([5]), lookup=20)
    assert list(map(int, always)) == [5] * 8
    assert steps.tokens == [3, 4, 3]  # the first token, it and three, the fifth and two
    assert list(drafts.steps(model, idx, 0, pytest.fail, lookup=2)) == []


def test_a_token_is_chosen_once_and_only_when_it_is_asked_for():
    """A sampler has a state: what nobody takes must not be drawn."""
    calls = []

    def choose(logits):
        assert logits.shape == (1, VOCAB) and logits.dtype == torch.float32
        calls.append(1)
        return torch.tensor([5])

    steps = drafts.steps(make(), torch.tensor([[5, 5, 5]]), 30, choose, lookup=4)
    for n in range(1, 20):
        assert next(steps).tolist() == [5] and len(calls) == n
    with pytest.raises(StopIteration):
        steps.send(torch.tensor([], dtype=torch.int64))  # no row goes on
    assert len(calls) == 19


def test_the_row_may_be_named_as_the_one_to_go_on():
    idx = prompt(9)
    one, other = (drafts.steps(PLAIN, idx, 30, sampler(idx), lookup=4) for _ in range(2))
    expected = list(map(int, one))
    ids = [int(next(other))] + [int(other.send(torch.tensor([0]))) for _ in range(29)]
    assert ids == expected


@pytest.mark.parametrize("rows, n", [(2, 4), (1, 0), (1, MOST + 1)])
def test_one_row_and_as_many_tokens_as_a_step_takes(rows, n):
    with pytest.raises(ValueError, match="expected one row, 1 to 31"):
        next(drafts.steps(PLAIN, prompt(5).expand(rows, 5), 9, pytest.fail, lookup=n))
    assert MOST == FEW - 1


def test_a_context_of_one_token():
    model, idx = make(block_size=1), torch.tensor([[3, 1, 3]])
    plain = list(map(int, window.steps(model, idx, 20, sampler(idx))))
    assert list(map(int, drafts.steps(model, idx, 20, sampler(idx), lookup=4))) == plain


# ------------------------------------------------------------------------------------- statistics


@pytest.fixture(scope="module")
def joint():
    """A tiny model, a prompt, and the exact probability of each three tokens that may follow."""
    model, idx = make(vocab_size=3, scale=0.9, n_layer=1), torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    texts = torch.tensor(list(itertools.product(range(3), repeat=3)))
    whole = torch.cat([idx.expand(len(texts), -1), texts], 1)
    logp = model(whole[:, :-1])[:, -3:].double().log_softmax(-1).detach()
    p = logp.gather(2, texts[:, :, None]).sum((1, 2)).exp()
    assert abs(float(p.sum()) - 1) < 1e-5 and p.min() > 5e-3
    fast(model, "float32")
    return model, idx, {tuple(t): float(q) for t, q in zip(texts.tolist(), p, strict=True)}


def chi_square(found: Counter, expected: dict[tuple[int, ...], float]) -> float:
    """In deviations from what is expected of it: near 0, if the counts are of these odds."""
    n, free = found.total(), len(expected) - 1
    x = sum((found[t] - n * p) ** 2 / (n * p) for t, p in expected.items())
    return (x - free) / math.sqrt(2 * free)


@needs_code
def test_what_is_written_has_the_distribution_of_the_model(joint, monkeypatch):
    model, idx, expected = joint
    judged = watch(monkeypatch)

    def texts(n: int, **options) -> Counter:
        """The first three of five tokens, so that the draft that they come from is judged."""
        return Counter(tuple(map(int, drafts.steps(
            model, idx, 5, sampler(idx, seed, **options), lookup=4)))[:3] for seed in range(n))

    assert chi_square(texts(3000), expected) < 4
    good = sum(right > 0 for _, right in judged) / len(judged)
    assert len(judged) > 1000 and 0.2 < good < 0.8
    assert chi_square(texts(1000, temperature=0.7), expected) > 6  # it would be noticed


# ------------------------------------------------------------------------------- through write()


def written(model: GPT, text: str, **settings) -> tuple[str, str]:
    """What write() shows without and with drafts."""
    shown = []
    for n in (0, 6):
        s, out = SampleSettings(prompt=(text,), lookup=n, **settings), []
        s.check()
        one = Prompt(text)
        one.ids = BYTES.encode(text)
        write(model, BYTES, [one], s, BYTES.eot, out.append, pytest.fail)
        shown.append("".join(out))
    return tuple(shown)


@pytest.fixture(scope="module")
def writer():
    """Writes some letters, over and over and not always the same."""
    model = make(vocab_size=257, block_size=32, scale=2.0)
    with torch.no_grad():
        model.wpe.weight.mul_(0.2)
        model.wte.weight[:97], model.wte.weight[103:] = 0, 0
    fast(model, "float32", CODE is not None)
    return model


@pytest.mark.parametrize("settings", [
    dict(), dict(temperature=0.0), dict(repetition_penalty=1.3), dict(top_k=6, logprobs=3),
    dict(temperature=0.0, logprobs=0, repetition_penalty=1.2), dict(context_keep=5),
    dict(max_new_tokens=1)], ids=str)
def test_what_is_shown_is_the_same(writer, settings):
    plain, drafted = written(writer, "abcabcab", **dict(max_new_tokens=150) | settings)
    assert plain == drafted and len(plain) > 8


def test_stops_inside_a_draft(writer):
    """Wherever a text is told to stop, it does so after the same token."""
    options = dict(max_new_tokens=100, temperature=0.5, top_k=6, logprobs=0)
    text = json.loads(written(writer, "abcabcab", **options)[0])["text"]
    stops = {text[i : i + 3] for i in range(40)}
    assert len(stops) > 3
    for stop in stops:
        plain, drafted = written(writer, "abcabcab", **options, stop=(stop,))
        assert plain == drafted and '"ended": "stop"' in plain


def test_the_setting_is_of_sample_py():
    names = [f.name for f in dataclasses.fields(SampleSettings)]
    assert "lookup" in names and SampleSettings().lookup == 0
