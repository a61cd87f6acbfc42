"""GPT and UniLM differ in what the input sees of itself, and in nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng

from experiments import common, prefix_lm
from experiments.training import MaskedGPT, after_prefix, prefix_mask
from model import GPTConfig


def test_answers_of_a_known_question():
    p = np.array([[1, 2, 3, 0] * 4])  # a step on the ring of the first four, from 16 places
    rng = type("Fixed", (), {"integers": lambda self, n, size: p})()
    assert prefix_lm.hops(rng, 1)[1].tolist() == [[3, 0, 1, 2] * 4]  # p[p[p[0]]] = p[p[1]] = 3
    assert prefix_lm.sort(rng, 1)[1].tolist() == [[0] * 4 + [1] * 4 + [2] * 4 + [3] * 4]


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5))
def test_answers_follow_from_questions(seed, rows):
    x, y = prefix_lm.sort(default_rng(seed), rows)
    assert (np.diff(y) >= 0).all()
    assert [sorted(row) for row in x.tolist()] == y.tolist()
    x, y = prefix_lm.hops(default_rng(seed), rows)
    assert y.tolist() == [[row[row[row[i]]] for i in range(len(row))] for row in x.tolist()]


@pytest.mark.parametrize("name", ["sort", "hops"])
def test_windows_are_question_mark_answer(name):
    task = prefix_lm.make_task(name, 3)
    (x, y), (x_again, _), (other, _) = task.batches(0), prefix_lm.make_task(name, 3).batches(0), \
        task.batches(1)
    assert x.shape == y.shape == (64, task.T) and (x == x_again).all() and (x != other).any()
    assert (x[:, 1:] == y[:, :-1]).all()
    assert (x[:, task.prefix - 1] == prefix_lm.NUMBERS).all()  # the mark ends the input
    assert max(x.max(), y.max()) < task.vocab_size
    _, hidden = after_prefix(task.batches, task.prefix)(0)
    assert ((hidden >= 0).sum(1) == prefix_lm.LETTERS).all()
    assert (hidden[:, -prefix_lm.LETTERS:] == y[:, -prefix_lm.LETTERS:]).all()


@given(prefix=st.integers(1, 8), changed=st.integers(0, 7))
def test_who_sees_whom(prefix, changed):
    """A token matters to what comes after it, within the input also to what comes before."""
    torch.manual_seed(0)
    model = MaskedGPT(GPTConfig(11, 8, 1, 2, 8), init_std=0.5).eval()
    x = torch.arange(8)[None]
    other = x.clone()
    other[0, changed] = 10
    for arm_prefix in (0, prefix):  # GPT, UniLM
        model.mask = prefix_mask(8, arm_prefix)
        with torch.no_grad():
            moved = (model(x) != model(other)).any(-1)[0].tolist()
        first = 0 if changed < arm_prefix else changed
        assert moved == [i >= first for i in range(8)]


def test_loss_by_position_is_the_models_own():
    task = prefix_lm.make_task("sort", 1)
    torch.manual_seed(0)
    model = MaskedGPT(GPTConfig(task.vocab_size, task.T, 1, 2, 8)).eval()
    model.mask = prefix_mask(task.T, task.prefix)
    (x, y), = task.fixed
    with torch.no_grad():
        total, n = model(*map(torch.from_numpy, after_prefix(lambda step: (x, y), task.prefix)(0)))
    losses = prefix_lm.loss_by_position(model, task)
    assert losses.shape == (prefix_lm.LETTERS,)
    torch.testing.assert_close(losses.mean(), total / n)


def test_arms_differ_in_the_mask_alone():
    task = prefix_lm.make_task("hops", 1)
    gpt, unilm, every = (prefix_lm.build(task, arm, seed=1) for arm in prefix_lm.ARMS)
    for other in (unilm, every):
        torch.testing.assert_close(dict(other.state_dict()), dict(gpt.state_dict()), rtol=0, atol=0)
    assert (gpt.mask == every.mask).all()
    first = slice(task.prefix)
    assert unilm.mask[first, first].all() and not gpt.mask[first, first].all()
    assert (unilm.mask | ~gpt.mask).all()  # sees no less
    assert (unilm.mask[task.prefix :] == gpt.mask[task.prefix :]).all()
    assert (prefix_lm.build(task, "gpt", seed=2).wte.weight != gpt.wte.weight).any()


def test_trials_are_repeatable():
    runs = [prefix_lm.learn("hops", arm, seed=1, updates=1, every=1) for arm in ("gpt", "gpt")]
    assert runs[0] == runs[1] and len(runs[0]["curve"]) == 2
    assert runs[0]["curve"][0] == pytest.approx(np.log(33), abs=0.1)
    assert prefix_lm.last([runs[0]])[0] == pytest.approx(runs[0]["curve"][-1], rel=1e-5)


@pytest.mark.slow
def test_bidirectional_input_helps_where_the_input_is_a_puzzle(quick):
    """On text a few updates say nothing; three hops UniLM learns in the time that GPT does not."""
    result = quick("prefix_lm")
    assert result["text"].keys() == set(prefix_lm.ARMS)
    gpt, unilm = (prefix_lm.last(result["hops"][arm]) for arm in ("gpt", "unilm"))
    assert max(unilm) < 0.3 and min(gpt) > 0.8
    assert len(prefix_lm.table(result)) == 4  # heads, text, its first tokens, hops
    assert common.difference(unilm, gpt)[0] < -0.5
