"""kit/evaluate.py: sums by hand, separators and masks, and a model that is left as it was."""

import math
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.evaluate import eval_batches, evaluate, spell_loss

LENGTHS = np.array([1, 2, 3, 1, 1, 4, 1, 1, 1, 2, 13])  # bytes of the 11 tokens; 10 separates


def some_batches(n: int = 3, masked: bool = True, seed: int = 0) -> list:
    """n batches of (x, y), int64 (2, 8), with separators and, if masked, missing targets."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(n):
        tokens = rng.integers(0, 11, (2, 9))
        tokens[0, 4] = 10
        x, y = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        if masked:
            y[1, 5:] = -1
        batches.append((x, y))
    return batches


def by_hand(model, batches, separator: int | None) -> dict[str, float]:
    """The same from full logits, token by token, in double precision."""
    nats = text_nats = n = n_bytes = 0
    with torch.no_grad():
        for x, y in batches:
            logp = F.log_softmax(model(torch.from_numpy(x)).double(), -1)
            for row in range(y.shape[0]):
                for t, target in enumerate(y[row]):
                    if target == -1:
                        continue
                    nats, n = nats - logp[row, t, target].item(), n + 1
                    if target != separator:
                        text_nats -= logp[row, t, target].item()
                        n_bytes += LENGTHS[target]
    return {"loss": nats / n, "perplexity": math.exp(nats / n),
            "bpb": text_nats / math.log(2) / n_bytes}


@pytest.mark.parametrize("separator", [10, None])
@pytest.mark.parametrize("tie", [True, False])
def test_loss_perplexity_and_bits_per_byte_by_hand(tiny, separator, tie):
    model = tiny(tie_embeddings=tie, dropout=0.5)
    with torch.no_grad():
        model.wte.weight.mul_(30)  # far from a uniform guess
    batches = some_batches()
    assert any((y == 10).any() for _, y in batches) and any((y == -1).any() for _, y in batches)
    result = evaluate(model, batches, LENGTHS, separator, nullcontext)
    assert result == pytest.approx(by_hand(model.eval(), batches, separator), rel=1e-5)


def test_a_separator_counts_in_the_loss_but_not_in_bits_per_byte(tiny):
    model = tiny()
    x, y = some_batches(1, masked=False)[0]
    with_it = evaluate(model, [(x, y)], LENGTHS, 10, nullcontext)
    without = evaluate(model, [(x, np.where(y == 10, -1, y))], LENGTHS, 10, nullcontext)
    assert with_it["bpb"] == pytest.approx(without["bpb"], rel=1e-5)
    assert with_it["loss"] != pytest.approx(without["loss"], rel=1e-4)


def test_a_uniform_model_needs_log2_of_the_vocabulary(tiny):
    model = tiny()
    torch.nn.init.zeros_(model.ln_f.weight)  # all logits are 0
    result = evaluate(model, some_batches(), np.ones(11, dtype=np.int64), None, nullcontext)
    assert result["loss"] == pytest.approx(math.log(11))
    assert result["perplexity"] == pytest.approx(11, rel=1e-5)
    assert result["bpb"] == pytest.approx(math.log2(11))


def test_masked_rows_and_batches_add_nothing(tiny):
    model, batches = tiny(), some_batches()
    empty = (batches[0][0], np.full_like(batches[0][1], -1))
    assert evaluate(model, [empty, *batches, empty], LENGTHS, 10, nullcontext) == evaluate(
        model, batches, LENGTHS, 10, nullcontext)


def test_only_separators_are_no_division_by_zero(tiny):
    x = np.full((1, 8), 10)
    result = evaluate(tiny(), [(x, x)], LENGTHS, 10, nullcontext)
    assert math.isfinite(result["loss"]) and result["bpb"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_batch_size_makes_no_difference(tiny, batch_size):
    model = tiny()
    x, y = (np.concatenate(a) for a in zip(*some_batches(4), strict=True))
    parts = [(x[i : i + batch_size], y[i : i + batch_size]) for i in range(0, 8, batch_size)]
    assert evaluate(model, parts, LENGTHS, 10, nullcontext) == pytest.approx(
        evaluate(model, [(x, y)], LENGTHS, 10, nullcontext), rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was_and_dropout_is_off(tiny, training):
    model = tiny(dropout=0.5).train(training)
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    modes = {n: m.training for n, m in model.named_modules()}
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    results = [evaluate(model, some_batches(), LENGTHS, 10, nullcontext) for _ in range(2)]
    assert results[0] == results[1]
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1] == state[1]).all()
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name]) and p.grad is None


def test_no_graph_is_built(tiny):
    seen = []
    evaluate(tiny(), some_batches(), LENGTHS, 10,
             lambda: seen.append(torch.is_grad_enabled()) or nullcontext())
    assert seen == [False] * 3 and torch.is_grad_enabled()


def test_it_stops_when_told_and_restores_the_mode(tiny):
    model, seen = tiny().train(), []

    def batches():
        for batch in some_batches(5):
            seen.append(batch)
            yield batch

    asked = iter([False, False, True])
    assert evaluate(model, batches(), LENGTHS, 10, nullcontext, lambda: next(asked)) is None
    assert len(seen) == 3 and model.training


def test_the_mode_is_restored_when_a_batch_fails(tiny):
    model = tiny().train()
    with pytest.raises(ValueError, match="block_size=8"):
        evaluate(model, [(np.zeros((1, 9), np.int64),) * 2], LENGTHS, 10, nullcontext)
    assert model.training


def test_the_precision_is_the_callers(tiny):
    model, batches = tiny(), some_batches()
    exact = evaluate(model, batches, LENGTHS, 10, nullcontext)
    rough = evaluate(model, batches, LENGTHS, 10, partial(torch.autocast, "cpu", torch.bfloat16))
    assert rough != exact and rough["loss"] == pytest.approx(exact["loss"], rel=0.02)


def test_a_hopeless_loss_has_a_perplexity(tiny):
    model = tiny()
    with torch.no_grad():
        model.ln_f.weight.fill_(1e6)
        model.wte.weight.mul_(1e3)
    result = evaluate(model, some_batches(), LENGTHS, 10, nullcontext)
    assert result["loss"] > 1000 and math.isfinite(result["perplexity"])


def test_spell_loss():
    assert spell_loss({"loss": 1.23456, "perplexity": 3.4369, "bpb": 0.98765}) == (
        "validation loss 1.2346, perplexity 3.44, 0.9877 bits per byte")


# --------------------------------------------------------------------------------------- batches


class Windows:
    """A split of n tokens 0, 1, 2, ... that tells which windows were read."""

    def __init__(self, n: int):
        self.n, self.read = n, []

    def fixed_windows(self, block_size: int) -> int:
        return -(-(self.n - 1) // block_size)

    def window(self, i: int, n: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        self.read += range(i, i + n)
        y = np.arange(i * block_size + 1, (i + n) * block_size + 1).reshape(n, block_size)
        return y - 1, np.where(y < self.n, y, -1)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(2, 400), st.sampled_from([1, 3, 8]), st.integers(1, 7))
def test_the_whole_split_is_read_each_token_a_target_once(n, block_size, batch_size):
    targets = [t for _, y in eval_batches(Windows(n), block_size, batch_size) for t in y.flat]
    assert sorted(t for t in targets if t != -1) == list(range(1, n))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(2, 400), st.integers(1, 7), st.integers(1, 30))
def test_some_batches_are_spread_evenly(n, batch_size, eval_iters):
    split = Windows(n)
    batches = list(eval_batches(split, 3, batch_size, eval_iters))
    there = -(-split.fixed_windows(3) // batch_size)
    assert len(batches) == min(eval_iters, there)
    assert all(1 <= len(x) <= batch_size and x.shape == y.shape for x, y in batches)
    assert len(set(split.read)) == len(split.read) and max(split.read) < split.fixed_windows(3)
    firsts = [x[0, 0] // 3 // batch_size for x, _ in batches]  # their places among all batches
    gaps = {b - a for a, b in zip(firsts, firsts[1:] + [there], strict=True)}
    assert firsts[0] == 0 and max(gaps) - min(gaps) <= 1


def test_few_batches_are_the_same_every_time():
    firsts = [[x[0, 0] for x, _ in eval_batches(Windows(500), 3, 4, 5)] for _ in range(2)]
    assert firsts[0] == firsts[1]
