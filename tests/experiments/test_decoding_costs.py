"""Costs of decoding: the arithmetic, the cache that keeps the graph, who is faster."""

from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from experiments import common, decoding_costs
from model import GPT, GPTConfig

SHAPE = {"vocab_size": 50, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}


class Counter(TorchFunctionMode):
    """Multiplications and additions of all products of matrices, also where a mask hides them."""

    total = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.total += 2 * args[0].numel() * y.size(-1)
        elif func is F.scaled_dot_product_attention:
            q, k, v = args[:3]
            self.total += 2 * q.numel() * k.size(2) + 2 * q[..., 0].numel() * v[0, 0].numel()
        return y


def apart(a: list, b: list) -> float:
    return max(((x - y).abs().max() / x.abs().max()).item() for x, y in zip(a, b, strict=True))


@pytest.fixture
def ids():
    return torch.randint(50, (3, 25))


@pytest.mark.parametrize("T", [1, 2, 20])
def test_flops_are_those_that_a_counter_sees(T):
    model, ids = GPT(GPTConfig(**SHAPE)), torch.randint(50, (1, T))
    for way, cache in (("with cache", model.new_cache()), ("without", None)):
        with torch.no_grad(), Counter() as counter:
            decoding_costs.write(model, ids, cache)
        hidden = 4 * 2 * 16 * T * (T - 1) // 2 if way == "without" else 0
        assert decoding_costs.flops(SHAPE, T, way) == counter.total - hidden


def test_both_ways_write_the_same(ids):
    model = GPT(GPTConfig(**SHAPE), init_std=0.2)
    with torch.inference_mode():
        cache, row = model.new_cache(), ids[:1]
        model.hidden(row, cache)
        for T in (25, 3, 17, 1):  # shorter and longer again, as rounds go
            a, b = (decoding_costs.write(model, row[:, :T], c) for c in (cache, None))
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@given(L=st.integers(1, 4), H=st.integers(1, 3), D=st.integers(1, 8), T=st.integers(1, 40),
       dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_bytes_are_what_the_tensors_hold(L, H, D, T, dtype):
    model = GPT(GPTConfig(vocab_size=5, block_size=40, n_layer=L, n_head=H, n_embd=H * D)).to(dtype)
    held = decoding_costs.held(model, T)
    assert decoding_costs.cache_bytes(L, H * D, T, dtype.itemsize) == held


def test_the_figure_of_pope_et_al():
    """PaLM 540B with 48 heads of 128 in 118 layers, 512 rows of 2,048: 3 TB in 16 bits."""
    assert decoding_costs.cache_bytes(118, 48 * 128, 512 * 2048, 2) / 1e12 == pytest.approx(3, 0.02)


@pytest.mark.parametrize("chunk", [1, 5, 24])
def test_gradients_flow_through_the_cache(ids, chunk):
    model = GPT(GPTConfig(**SHAPE), init_std=0.2).double()
    both = [decoding_costs.gradients(model, ids, n) for n in (None, chunk)]
    assert apart(*both) < 1e-12


def test_fp32_agrees_to_its_rounding_and_double_stays_double():
    found = decoding_costs.compare(SHAPE | {"block_size": 64}, rows=2, seed=0)
    assert 0 < found["float64"] < 1e-12 < 1e-9 < found["float32"] < 1e-4


def test_a_cache_without_the_graph_has_other_gradients(ids, monkeypatch):
    append = decoding_costs.GraphCache.append
    monkeypatch.setattr(decoding_costs.GraphCache, "append", lambda self, layer, k, v: append(
        self, layer, k, v) if not self.longest else tuple(
        torch.cat((old[:, :, :-1].detach(), old[:, :, -1:]), 2)
        for old in append(self, layer, k, v)))
    model = GPT(GPTConfig(**SHAPE), init_std=0.2)
    assert apart(*(decoding_costs.gradients(model, ids, n) for n in (None, 1))) > 0.01


def test_gradients_are_those_of_the_model_s_own_loss(ids):
    model = GPT(GPTConfig(**SHAPE))
    ours = decoding_costs.gradients(model, ids)
    model.zero_grad()
    model(ids[:, :-1], ids[:, 1:])[0].backward()
    assert apart(ours, [p.grad for p in model.parameters()]) < 1e-5


@given(st.floats(-1, 3), st.floats(0.1, 10))
def test_exponents(slope, factor):
    sizes = [1, 2, 4, 8, 16]
    values = [[1e9, factor * 16]] * 2 + [[factor * n**slope, factor * 16] for n in sizes[2:]]
    assert decoding_costs.growth(sizes, values) == pytest.approx([slope, 0], abs=1e-6)


def test_spread_is_a_median_with_quartiles():
    assert decoding_costs.spread([1, 2, 3, 4, 100]) == "3.00 (2.00 to 4.00)"
    assert decoding_costs.spread([-0.05, 0, 0.01]) == "0.000 (-0.025 to 0.005)"
    assert decoding_costs.spread([1234.5]) == "1234 (1234 to 1234)"


def test_in_turn_takes_all_in_each_round(monkeypatch):
    clock, calls = iter(range(10_000)), []
    monkeypatch.setattr(decoding_costs.time, "perf_counter", lambda: next(clock))
    ways = {name: lambda size, name=name: calls.append((name, size)) for name in "ab"}
    ms = decoding_costs.in_turn(ways, [3, 5], 2)
    assert calls == [("a", 3), ("b", 3), ("a", 5), ("b", 5)] * 3
    assert ms == {"a": [[1000, 1000]] * 2, "b": [[1000, 1000]] * 2}


@pytest.mark.slow
def test_direction(command):
    result = command("decoding_costs")
    ends = {way: median(ms[-1]) for way, ms in result["decoding"].items()}
    assert ends["without"] > 3 * ends["with cache"]  # 37 times on a quiet machine
    for ms in result["training"].values():
        assert median(ms["stepwise"][-1]) > 1.5 * median(ms["at once"][-1])  # 15 and 7 times
    for found in result["gradients"]:
        assert found["float64"] < 1e-12 and found["float32"] < 1e-4
    table = decoding_costs.table(result)
    assert len({len(row) for row in table}) == 1 and common.to_markdown(table)
