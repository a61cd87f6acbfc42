"""Residuals, parts of blocks, paths."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments import rank_collapse as r
from experiments.common import select
from experiments.training import MaskedGPT
from model import GPTConfig


def test_composite_norm():
    x = torch.tensor([[1.0, -2.0], [3.0, 0.5]])
    assert r.composite_norm(x).item() == pytest.approx((4.0 * 3.5) ** 0.5)  # column 0, row 1
    assert r.composite_norm(torch.stack([x, 2 * x])).tolist() == pytest.approx(
        [14 ** 0.5, 2 * 14 ** 0.5])


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 9))
def test_the_mean_is_within_a_factor_of_two_of_any_row(seed, T, C):
    torch.manual_seed(seed)
    x, other = torch.randn(T, C).double(), torch.randn(C).double()
    assert r.residual(x) <= 2 * r.composite_norm(x - other) + 1e-12
    equal = other.expand(T, C)
    assert r.residual(equal) <= 1e-12 * r.composite_norm(equal)
    assert r.residual(x + other).item() == pytest.approx(r.residual(x).item())


@pytest.mark.parametrize("kind", r.KINDS)
def test_whole_blocks_are_those_of_the_model(kind):
    model, idx = r.build("quick", kind, 1), torch.arange(64).view(2, 32)
    plain = MaskedGPT(GPTConfig(r.VOCAB, 32, 12, 4, 32))
    plain.load_state_dict(model.state_dict())
    plain.mask = model.mask
    torch.testing.assert_close(model(idx), plain(idx))
    states = r.layers(model, idx)
    torch.testing.assert_close(model.ln_f(states[-1]), plain.hidden(idx))
    torch.testing.assert_close(states[0], model.wte(idx) + model.wpe.weight)


def test_parts_that_are_taken_away_do_nothing():
    model, idx = r.build("quick", "causal", 1), torch.arange(32)[None]
    block, x = model.h[0], r.layers(model, idx)[0]
    attention = block.attn(block.ln_1(x), None, model.mask, None)  # the model's own
    made = {name: r.layers(r.take(model, **parts), idx)[1] for name, parts in r.PARTS.items()}
    torch.testing.assert_close(made["attention alone"], attention)
    torch.testing.assert_close(made["attention + skip"], x + attention)
    torch.testing.assert_close(made["attention + MLP"], block.mlp(block.ln_2(attention)))
    bare = r.layers(r.take(model, skip=False, dense=False, norm=False), idx)[1]
    torch.testing.assert_close(bare, block.attn(x, None, model.mask, None))


@pytest.mark.parametrize("kind", r.KINDS)
@pytest.mark.parametrize("skip", [False, True])
def test_a_network_is_the_sum_of_its_paths(kind, skip, monkeypatch):
    assert r.paths(skip, kind, 5) < 1e-13
    full_range = range

    def without_the_last(n):  # one head or the skip forgotten: another network
        return full_range(n - 1)

    monkeypatch.setattr(r, "range", without_the_last, raising=False)
    assert r.paths(skip, kind, 5) > 1e-3


def test_full_attention_cubes_a_residual_and_causal_attention_does_not():
    for kind, expected in (("full", 3), ("causal", 1)):
        model = r.build("quick", kind, 2)
        kept = copy.deepcopy(model.state_dict())
        assert r.power(model, skip=False, seed=2) == pytest.approx(expected, abs=0.02)
        assert r.power(model, skip=True, seed=2) == pytest.approx(1, abs=0.02)
        assert all(torch.equal(a, kept[name]) for name, a in model.state_dict().items())


def test_small_residuals_are_spelt_from_least_to_largest():
    assert r.format_residual([2.7e-5, 5.4e-3, 7e-5]) == "3e-05 to 5e-03"
    assert r.format_residual([2.1e-16, 1.9e-16]) == "2e-16"
    assert r.format_residual([0.1, 0.3, 0.2]) == "0.200 ± 0.100"


@pytest.mark.slow
def test_quick_form(quick):
    result = quick("rank_collapse")
    runs = select(result["runs"], size="quick")
    (full,), (causal,) = (select(runs, kind=kind, part=r.WHOLE) for kind in r.KINDS)
    (alone,) = select(runs, kind="causal", part="attention alone")
    for when in ("start", "end"):
        assert full[when]["attention alone"][-1] < 1e-13
        assert full[when]["whole block"][-1] > 0.05
        assert causal[when]["attention alone"][-1] < 0.1 * causal[when]["whole block"][-1]
    assert causal["bpb"] < alone["bpb"] - 0.2
    assert max(full["paths"] + causal["paths"]) < 1e-13
    assert full["powers"][0] > 2.5 and causal["powers"][0] < 1.5
