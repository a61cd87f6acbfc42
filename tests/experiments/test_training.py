"""The loop that experiments share, and the model with a mask."""

import importlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from experiments.common import Lab
from experiments.training import (
    MaskedGPT,
    Recipe,
    after_prefix,
    attention_scores,
    prefix_mask,
    train,
)
from kit.errors import UserError
from model import GPT, MLP, CausalSelfAttention, GPTConfig

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


def test_what_the_prefix_shows_is_no_target():
    x, y = batches(0)
    kept = y.copy()
    same, targets = after_prefix(lambda step: (x, y), 6)(0)
    mask = prefix_mask(16, 6)
    for t in range(16):  # y[t] is x[t + 1]
        seen = t + 1 < 16 and bool(mask[t, t + 1])
        assert (targets[:, t] == (-1 if seen else y[:, t])).all()
    assert same is x and (y == kept).all()


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


def test_training_leaves_pytorchs_kernels_as_they_were():
    """And the model has the hand-written loss, which agrees with its own."""
    torch.manual_seed(3)
    model, x = GPT(TINY), torch.ones(64, dtype=torch.bfloat16)
    plain = model.loss
    torch.manual_seed(1)
    before = torch.dropout(x, 0.5, True)
    train(model, batches, Recipe(max_iters=1, warmup_iters=1))
    torch.manual_seed(1)
    assert torch.equal(torch.dropout(x, 0.5, True), before)
    states, targets = torch.randn(5, 32), torch.randint(13, (5,))
    assert model.loss != plain
    torch.testing.assert_close(model.loss(states, targets)[0], plain(states, targets)[0])


def test_a_model_with_other_logits_trains_by_its_own_loss():
    class Capped(GPT):
        def logits(self, x: torch.Tensor) -> torch.Tensor:
            return 3 * torch.tanh(super().logits(x) / 3)

    torch.manual_seed(3)
    model = Capped(TINY)
    losses = train(model, batches, Recipe(max_iters=40, warmup_iters=4))
    assert "loss" not in vars(model) and losses[-1] < losses[0] - 1


def test_scores_are_masked_and_of_each_layer():
    torch.manual_seed(1)
    model, idx = GPT(TINY), torch.randint(13, (2, 9))
    first, second = attention_scores(model, idx)
    assert first.shape == second.shape == (2, 2, 9, 9)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    assert ((first == -torch.inf) == future).all()
    q, k, _ = model.h[0].attn.c_attn(model.h[0].ln_1(
        model.wte(idx) + model.wpe(torch.arange(9)))).view(2, 9, 3, 2, 16).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(first, (q @ k.mT / 4).masked_fill(future, -torch.inf))


def test_scores_are_those_of_a_model_with_a_scale_and_a_bias_of_its_own(monkeypatch):
    """As ALiBi and muP have them, by keyword."""
    idx, bias = torch.randint(13, (2, 9)), torch.randn(9, 9)

    def biased(self, x, pos, mask, store):
        q, k, v = self.c_attn(x).view(2, 9, 3, 2, 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.5)
        torch.testing.assert_close(y, (q @ k.mT / 2 + bias).softmax(-1) @ v)
        made.append(q @ k.mT / 2 + bias)
        return self.c_proj(y.transpose(1, 2).reshape(2, 9, 32))

    made: list[torch.Tensor] = []
    monkeypatch.setattr(CausalSelfAttention, "forward", biased)
    for scores, wanted in zip(attention_scores(GPT(TINY), idx), made, strict=True):
        torch.testing.assert_close(scores, wanted)


# ------------------------------------------------------------------------- an edited model.py


def by_hand(self, x, pos, mask, store):
    """Attention that is not PyTorch's, and asks no mask."""
    B, T, C = x.shape
    q, k, v = (a.view(B, T, self.n_head, -1).transpose(1, 2) for a in self.c_attn(x).split(C, 2))
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    p = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(future, -torch.inf).softmax(-1)
    return self.c_proj((p @ v).transpose(1, 2).reshape(B, T, C))


def squared_relu(self, x):
    return self.c_proj(torch.relu(self.c_fc(x)).square())


def louder(self, x, pos, mask, store, attend=CausalSelfAttention.forward):
    return 2 * attend(self, x, pos, mask, store)


def without_positions(self, *args, init=GPT.__init__, **options):
    init(self, *args, **options)
    del self.wpe


def measured(name: str, monkeypatch) -> None:
    """An experiment whose trials are left out: what is before them, or how it refuses."""
    module = importlib.import_module(f"experiments.{name}")
    lab = Lab(quick=True)
    monkeypatch.setattr(lab, "trials", lambda *_: pytest.fail("it goes on to its trials"))
    module.measure(lab)


@pytest.mark.parametrize("name", ["full_rank", "prefix_lm", "rank_collapse"])
def test_who_needs_masks_says_so(name, monkeypatch):
    monkeypatch.setattr(CausalSelfAttention, "forward", by_hand)
    with pytest.raises(UserError, match="does not heed its mask"):
        measured(name, monkeypatch)


@pytest.mark.parametrize("name", ["in_context", "logn", "scale"])
def test_who_reads_attention_says_so(name, monkeypatch):
    monkeypatch.setattr(CausalSelfAttention, "forward", by_hand)
    with pytest.raises(UserError, match="calls it 0 times in 2 layers"):
        measured(name, monkeypatch)


@pytest.mark.parametrize("name,word", [
    ("rank_collapse", "GPT-2's blocks apart"), ("svm", "computes something else")])
def test_who_takes_the_model_apart_needs_its_parts(name, word, monkeypatch):
    pytest.importorskip("cvxpy")
    monkeypatch.setattr(CausalSelfAttention, "forward", louder)
    with pytest.raises(UserError, match=word):
        measured(name, monkeypatch)


@pytest.mark.parametrize("name", ["logn", "wider_window"])
def test_a_part_that_is_gone_is_named(name, monkeypatch):
    monkeypatch.setattr(GPT, "__init__", without_positions)
    with pytest.raises(UserError, match="wpe.weight") as found:
        measured(name, monkeypatch)
    assert "\n" not in str(found.value)


def test_a_mask_works_with_an_edited_model(monkeypatch):
    monkeypatch.setattr(MLP, "forward", squared_relu)
    torch.manual_seed(1)
    model, plain, idx = MaskedGPT(TINY), GPT(TINY), torch.randint(13, (3, 16))
    plain.load_state_dict(model.state_dict())
    model.mask = prefix_mask(16, 0)
    torch.testing.assert_close(model(idx), plain(idx), atol=1e-5, rtol=0)
    losses = train(model, batches, Recipe(max_iters=20, warmup_iters=2))
    assert losses[-1] < losses[0] - 0.5
