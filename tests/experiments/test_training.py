"""The loop that experiments share, and the model with a mask."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.training import MaskedGPT, Recipe, prefix_mask, train
from model import GPT, GPTConfig

TINY = GPTConfig(vocab_size=13, block_size=16, n_layer=2, n_head=2, n_embd=32)


def batches(step: int) -> tuple[np.ndarray, np.ndarray]:
    rows = (np.arange(17) + np.random.default_rng(step).integers(0, 13, (4, 1))) % 13
    return rows[:, :-1], rows[:, 1:]


def test_training_learns_counts_and_is_the_same_each_time():
    found, steps = [], []
    for _ in range(2):
        torch.manual_seed(3)
        model = GPT(TINY)
        found.append(train(model, batches, Recipe(max_iters=40, warmup_iters=4), each=steps.append))
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(np.log(13), abs=0.1) and found[0][-1] < 0.5
    assert steps == [*range(41)] * 2
    assert not model.training


def test_targets_of_minus_one_are_none():
    torch.manual_seed(3)
    model = GPT(TINY)
    losses = train(model, lambda step: (batches(step)[0], np.full((4, 16), -1)),
                   Recipe(max_iters=2, warmup_iters=1))
    assert losses == [0.0, 0.0]


def test_a_causal_mask_is_no_mask():
    torch.manual_seed(1)
    model, plain = MaskedGPT(TINY), GPT(TINY)
    plain.load_state_dict(model.state_dict())
    model.mask = prefix_mask(16, 0)
    idx = torch.randint(13, (3, 16))
    torch.testing.assert_close(model(idx), plain(idx), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="cache"):
        model(idx, cache=plain.new_cache())


@given(st.integers(1, 12), st.data())
def test_who_sees_whom(T, data):
    prefix = data.draw(st.integers(0, T))
    mask = prefix_mask(T, prefix)
    for query in range(T):
        for key in range(T):
            assert mask[query, key] == (key <= query or max(query, key) < prefix)


def test_a_prefix_is_seen_from_within_and_the_rest_is_not():
    """Changing one token moves the states that may see it and no others."""
    torch.manual_seed(1)
    model = MaskedGPT(TINY)
    model.mask = prefix_mask(16, 6)
    idx = torch.randint(12, (1, 16))
    for changed, first in ((5, 0), (6, 6), (10, 10)):
        other = idx.clone()
        other[0, changed] = 12
        moved = (model.hidden(idx) - model.hidden(other)).abs().amax(-1)[0] > 0
        assert moved[first:].all() and not moved[:first].any()
