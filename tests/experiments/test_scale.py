"""The scale of attention: gradients with known answers, attention with a factor of its own."""

import math
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from experiments import scale
from model import GPT, GPTConfig

POS = torch.arange(20)


def tiny() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=5, block_size=20, n_layer=1, n_head=2, n_embd=8), 0.4)


def attention(c: float, power: float) -> nn.Module:
    return scale.scaled(tiny().h[0].attn, c, power)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=2, max_size=12), st.floats(0.01, 5))
def test_gradient_is_half_the_norm_of_the_jacobian(scores, alpha):
    s = torch.tensor(scores, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: (alpha * x).softmax(-1), s)
    assert scale.gradient(s, alpha).item() == pytest.approx(jacobian.abs().sum().item() / 2)


def test_gradient_of_equal_scores():
    assert scale.gradient(torch.zeros(3, 8), 2.0).tolist() == [2 * (1 - 1 / 8)] * 3


def test_limit_of_two_scores_is_known():
    assert scale.limit(2) == pytest.approx(1 / math.sqrt(math.pi))  # density of |s1 - s2| at 0
    # q has two dimensions, so that the mean of sqrt(2) / |q| is sqrt(pi)
    assert scale.limit(2, 2) == pytest.approx(1)


@pytest.mark.parametrize("d", [0, 4])
def test_mean_gradient_rises_to_the_limit(d):
    found = scale.curve(16, d, [1], 2**17)
    at = dict(zip(scale.ALPHAS, found["mean"][0], strict=True))
    assert at[1.0] < found["there"][0] < at[2.0] < at[4.0] < at[8.0]  # 0.84 sqrt(log 16) = 1.40
    assert at[16.0] == pytest.approx(scale.limit(16, d), rel=0.06)
    assert at[0.25] == pytest.approx(0.25 * (1 - math.exp(0.25**2) / 16), rel=0.01)
    assert 3 < found["half"][0] < 5


def test_factor_1_is_plain_attention():
    x = torch.randn(2, 20, 8)
    plain, scaled = tiny().h[0].attn, attention(1.0, 0.0)
    assert torch.equal(plain(x, POS, None, None), scaled(x, POS, None, None))


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_scores_are_multiplied(power):
    x, scaled = torch.randn(2, 20, 8), attention(3.0, power)
    q, k, v = (a.view(2, 20, 2, 4).transpose(1, 2) for a in scaled.c_attn(x).split(8, dim=2))
    scores = q @ k.mT / 2  # d = 4
    for n in range(1, 21):  # keys that query n - 1 sees
        scores[:, :, n - 1] *= 3 * math.log(n) ** power
        scores[:, :, n - 1, n:] = -math.inf
    expected = scaled.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 20, 8))
    assert torch.allclose(scaled(x, POS, None, None), expected, atol=1e-5)


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_spread_is_the_deviation_of_the_scores(power):
    model, idx = tiny(), torch.randint(5, (2, 20))
    block = model.h[0]
    block.attn = scale.scaled(block.attn, 3.0, power)
    with torch.no_grad():
        x = block.ln_1(model.wte(idx) + model.wpe(POS))
        q, k, _ = (a.view(2, 20, 2, 4).transpose(1, 2)
                   for a in block.attn.c_attn(x).split(8, dim=2))
        each = [(q[b, h, n - 1] @ k[b, h, :n].T / 2 * 3 * math.log(n) ** power).std(correction=0)
                / math.sqrt(math.log(n)) for b in (0, 1) for h in (0, 1) for n in range(16, 21)]
        assert scale.spreads(model, idx) == [pytest.approx(fmean(map(float, each)), rel=1e-5)]
        model.wpe.weight.zero_()
        assert scale.spreads(model, torch.ones_like(idx)) == [pytest.approx(0, abs=1e-5)]


def test_queries_and_keys_begin_with_variance_1():
    model, idx = scale.build(1.0, 0.0, 50, 1), torch.arange(50)[None]
    q, k, _ = model.h[0].attn.c_attn(model.h[0].ln_1(model.wte(idx))).chunk(3, dim=-1)
    assert q.var().item() == pytest.approx(1, rel=0.1)
    assert k.var().item() == pytest.approx(1, rel=0.1)
    assert all(block.attn.query_scale(POS).eq(1).all() for block in model.h)


def test_table_compares_with_factor_1():
    runs = [{"c": c, "power": power, "seed": seed, "rate": 1.0, "loss": c + seed / 100,
             "start": [0.5, 0.4], "end": [0.6, 0.7]}
            for c, power in ((1.0, 0.0), (2.0, 0.0), (2.0, 0.5)) for seed in (1, 2, 3)]
    case = {"n": 16, "d": 4, "limit": 2.0, "mean": [[1.0]], "there": [1.0, 1.0], "half": [3.0, 3.0]}
    rows = scale.table({"cases": [case], "runs": runs})
    assert rows[1][0].endswith("n = 16, q and k of 4") and rows[1][1] == "50.0 ± 0.0 % of its limit"
    assert rows[3][1:3] == ["2.020 ± 0.010", "+1.000 (± 0.000) to times 1"]
    assert rows[3][3] == "0.50, 0.40 → 0.60, 0.70"
    assert rows[4][0] == "loss, scores times 2 √(log n)"


@pytest.mark.slow
def test_quick_form(quick):
    result = quick("scale")
    for case in result["cases"]:  # the claimed maximum is far below what larger factors give
        at = dict(zip(result["alphas"], case["mean"][0], strict=True))
        assert case["there"][0] < 0.75 * case["limit"]
        assert at[8.0] > 1.3 * case["there"][0]
    runs = {run["c"]: run for run in result["runs"]}
    for layer in (0, 1):
        spreads = [runs[c]["start"][layer] for c in (0.125, 1.0, 16.0)]
        assert spreads == sorted(spreads)
    assert runs[1.0]["loss"] < runs[0.125]["loss"] - 0.05
