"""Data and masks of the three trainings, attention matrices, exact determinants."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import full_rank as f
from experiments.training import MaskedGPT, attention_scores, denoising, prefix_mask
from model import GPTConfig


def random_scores(seed, n, d):
    torch.manual_seed(seed)
    q, k = torch.randn(2, n, d).double()
    return q @ k.T / math.sqrt(d)


def hide(scores, prefix):
    return scores.masked_fill(~prefix_mask(len(scores), prefix), -math.inf)


def rows(step):
    x = np.arange(step, step + 160).reshape(4, 40)
    return x, x + 1


def test_hidden_bytes_are_the_targets():
    batches = denoising(rows, 999, seed=1)
    x, y = batches(0)
    hidden = x == 999
    assert 0.05 < hidden.mean() < 0.4
    assert np.array_equal(np.where(hidden, y, x), rows(0)[0]) and (y[~hidden] == -1).all()
    assert np.array_equal(batches(0)[0], x)
    assert not np.array_equal(batches(1)[0] == 999, hidden)


@pytest.mark.parametrize("kind", f.KINDS)
def test_scores_are_those_of_the_model(kind):
    torch.manual_seed(0)
    model = MaskedGPT(GPTConfig(9, 8, 1, 2, 16), 0.5)
    model.mask, idx = f.mask_of(kind, 8), torch.arange(8).view(1, 8)
    (s,) = attention_scores(model, idx, torch.float64)
    attn, x = model.h[0].attn, model.h[0].ln_1(model.wte(idx) + model.wpe(torch.arange(8)))
    v = attn.c_attn(x)[..., 32:].view(1, 8, 2, 8).transpose(1, 2)
    y = attn.c_proj((s.softmax(-1).float() @ v).transpose(1, 2).reshape(1, 8, 16))
    torch.testing.assert_close(y, attn(x, torch.arange(8), model.mask, None))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 3), st.integers(0, 7))
def test_exact_determinant(seed, n, d, prefix):
    s = random_scores(seed, n, d)
    sign, log = f.exact_log10_det(hide(s, 0))
    diagonal = hide(s, 0).log_softmax(-1).diagonal().sum().item() / math.log(10)
    assert sign == 1 and log == pytest.approx(diagonal, abs=1e-9)
    mixed = hide(s + 9 * torch.eye(n).flip(0), min(prefix, n))  # well conditioned
    expected = torch.linalg.slogdet(mixed.softmax(-1))
    sign, log = f.exact_log10_det(mixed)
    if expected.logabsdet > -12:
        assert sign == expected.sign
        assert log == pytest.approx(expected.logabsdet.item() / math.log(10), abs=1e-6)


def test_equal_queries_leave_no_rank_unless_attention_is_causal():
    s = random_scores(3, 6, 2)
    s[4] = s[1]
    assert f.exact_log10_det(s) == (0, -math.inf)
    assert f.exact_log10_det(hide(s, 5))[0] == 0  # both within the prefix
    assert f.exact_log10_det(hide(s, 4))[0] != 0
    assert f.exact_log10_det(hide(s, 0))[0] == 1


def test_digits_are_enough_where_floats_are_not():
    s = random_scores(4, 40, 2) / 100
    few, many = f.exact_log10_det(s), f.exact_log10_det(s, digits=300)
    assert few[0] == many[0] and few[1] == pytest.approx(many[1], abs=1e-6)
    assert torch.linalg.slogdet(s.softmax(-1)).logabsdet / math.log(10) > few[1] + 10


def test_examine():
    torch.manual_seed(0)
    model = MaskedGPT(GPTConfig(258, 64, f.LAYERS, 2, 16), 0.02)
    idx = torch.randint(257, (1, 64))
    causal, full = (f.examine(model, kind, idx, exact=False) for kind in ("causal", "full"))
    harmonic = -sum(math.log10(i) for i in range(1, 65))  # nearly 1/i on the diagonal
    assert causal["log10_det"] == pytest.approx(harmonic, rel=0.02)
    assert causal["rank"]["float32"] == 1 and full["rank"]["bf16"] < 0.1
    assert len(causal["log10_sigma"]) == 64 and sorted(causal["log10_sigma"])[-1] <= 0


def test_table_gives_no_digits_of_rounding():
    def state(least):
        return {"rank": dict.fromkeys(f.TOLERANCES, 0.5), "log10_sigma": [-1.0, least]}

    runs = [{"kind": kind, "d": 4, "seed": seed,
             "end": {"64": {**state(-6.0 - seed), "exact_signs": [1, -1], "exact_log10_det": -90.0},
                     "256": state(-17.0)}} for kind in f.KINDS for seed in (1, 2, 3)]
    heads, *rows = f.table({"dims": [4], "runs": runs})
    assert [row[heads.index("log10 smallest / largest")] for row in rows] == (
        ["-8.0 ± 1.0"] * 3 + ["< -15"] * 3)
    assert rows[0][-2:] == ["-90 ± 0", "3 of 6"] and rows[3][-2:] == ["", ""]


@pytest.mark.slow
def test_quick_form(quick):
    result = quick("full_rank")
    for n in f.LENGTHS:
        (causal,), (prefix,), (full,) = (f.ends(result, kind, 4, n) for kind in f.KINDS)
        for name in ("float32", "bf16"):
            assert causal["rank"][name] > prefix["rank"][name] > full["rank"][name]
        assert causal["rank"]["float32"] > 0.9 and full["rank"]["float32"] < 0.7
    small = [f.ends(result, kind, 4, 64)[0] for kind in f.KINDS]
    assert small[0]["exact_signs"] == [1] * 4
    assert small[0]["exact_log10_det"] > small[2]["exact_log10_det"] + 50
