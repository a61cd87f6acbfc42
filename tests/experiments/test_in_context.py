"""The measures of learning from the context know what they measure."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng
from torch import nn

from experiments import in_context
from experiments.in_context import KEYS, LETTERS, REPEATED, SHOTS, T
from model import GPT, GPTConfig


class Looker(nn.Module):
    """Answers by looking up what followed the token before: a perfect induction head."""

    def forward(self, x):
        logits = torch.zeros(*x.shape, 256)
        for row, tokens in enumerate(x.tolist()):
            after = {}
            for i, token in enumerate(tokens):
                if token in after:
                    logits[row, i, after[token]] = 50.0
                if i + 1 < len(tokens):
                    after[token] = tokens[i + 1]
        return logits


@given(seed=st.integers(0, 2**32), length=st.integers(64, 90))
def test_repeats_have_a_period(seed, length):
    for row in in_context.repeats(default_rng(seed), 3, length):
        assert len(row) == length and np.isin(row, LETTERS).all()
        assert any((row[p:] == row[:-p]).all() for p in range(8, 33))


@given(seed=st.integers(0, 2**32))
def test_twice_is_different_letters_twice(seed):
    rows = in_context.twice(default_rng(seed), 3)
    assert (rows[:, :REPEATED] == rows[:, REPEATED:]).all()
    assert all(len(set(row)) == REPEATED for row in rows.tolist())


@given(seed=st.integers(0, 2**32))
def test_mappings_map(seed):
    for row in in_context.mappings(default_rng(seed), 3):
        text = bytes(row.tolist()).decode()
        assert len(text) == T and text[::2].islower() and text[1::2].isupper()
        pairs = set(zip(text[::2], text[1::2], strict=True))
        assert len(pairs) == len(set(text[::2])) == len(set(text[1::2])) <= KEYS


def test_a_perfect_induction_head_reads_the_second_occurrence():
    rows = torch.from_numpy(in_context.twice(default_rng(0), 4))
    first, second = in_context.occurrences(Looker(), rows)
    assert first == pytest.approx(np.log(256), abs=1e-3) and second < 1e-3


def test_a_perfect_induction_head_remembers_all_pairs():
    pairs = torch.from_numpy(in_context.mappings(default_rng(0), 4000))
    right = in_context.accuracy(Looker(), pairs)
    assert len(right) == SHOTS + 1 and right[0] == 0
    for k, share in enumerate(right):  # it does not guess a new key's value
        assert share == pytest.approx(1 - (1 - 1 / KEYS) ** k, abs=0.04)
        assert share <= in_context.remembering(k) + 0.04
    assert in_context.remembering(0) == pytest.approx(1 / 26)


def test_look_of_heads_made_by_hand():
    torch.manual_seed(0)
    model = GPT(GPTConfig(256, T, n_layer=2, n_head=2, n_embd=8)).eval()
    rows = torch.from_numpy(in_context.twice(default_rng(0), 4))
    with torch.no_grad():
        for block in model.h:
            block.attn.c_attn.weight.zero_()  # all heads look everywhere alike
    everywhere = np.mean([1 / (i + 1) for i in range(REPEATED, 2 * REPEATED)])
    assert in_context.induction(model, rows) == pytest.approx(everywhere, rel=1e-5)
    with torch.no_grad():  # one head of the second layer looks REPEATED - 1 back
        angle = 2 * np.pi * torch.arange(T) / 64
        circle = torch.stack([angle.cos(), angle.sin(), -angle.cos(), -angle.sin()], 1)
        model.wte.weight.zero_()
        model.wpe.weight.zero_()[:, :4] = circle
        turn = torch.tensor(2 * np.pi * (REPEATED - 1) / 64)
        back = torch.tensor([[turn.cos(), turn.sin()], [-turn.sin(), turn.cos()]])
        weight = model.h[1].attn.c_attn.weight
        weight[0:2, :2], weight[8:10, :2] = 40 * back, 40 * torch.eye(2)
    assert in_context.induction(model, rows) > 0.9


def test_update_of_the_fall():
    assert in_context.fell({"second": [5.0, 3.0, 1.9, 2.5], "every": 20}) == 40
    assert in_context.fell({"second": [5.0, 3.0], "every": 20}) is None


def test_mixed_batches_are_repeatable_and_shifted():
    def texts(step):
        return np.full((2, T), step), np.full((2, T), step + 1)

    (x, y), (again, _), (other, _) = (in_context.mixed(texts, 6, 1)(step) for step in (0, 0, 1))
    assert x.shape == y.shape == (8, T) and (x == again).all() and (x != other).any()
    assert (x[:2] == 0).all() and (y[:2] == 1).all()
    assert (x[2:, 1:] == y[2:, :-1]).all()


@pytest.mark.slow
def test_two_layers_learn_what_one_cannot(quick):
    runs = quick("in_context")["mixed"]
    (one,), (two,) = runs["1"], runs["2"]
    assert two["second"][-1] < one["second"][-1] - 1
    assert two["accuracy"][-1] > one["accuracy"][-1] + 0.3
    assert two["induction"] > one["induction"]
    assert in_context.fell(one) is None
