"""Log n attention past the trained length: what is compared, and how entropy is taken."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments import logn
from experiments.logn import TRAINED, WAYS, T, by_octave, config, entropies, table
from experiments.training import by_position, widened
from model import GPT

VOCABULARY = 11


def trained(mode: str, size: int = T) -> GPT:
    """A model whose attention is far from even."""
    torch.manual_seed(0)
    return GPT(config(mode, size, VOCABULARY), init_std=0.3).eval()


def tokens(rows: int, size: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, size), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mode", TRAINED)
@pytest.mark.parametrize("way", WAYS)
def test_widened_model_at_its_own_length_is_the_trained_one(mode, way):
    model, idx = trained(TRAINED[mode]), tokens(2, T)
    same = widened(model, config(mode, T, VOCABULARY), way)
    torch.testing.assert_close(same(idx), model(idx))
    longer = widened(model, config(mode, 2 * T, VOCABULARY), way)
    assert longer(tokens(1, 2 * T)).shape == (1, 2 * T, VOCABULARY)
    assert longer.config.attn_logn == mode
    if way != "interpolate":  # the first positions stay as they are
        torch.testing.assert_close(longer(idx), model(idx))


def test_clipped_acts_past_the_trained_length_only():
    model, idx = trained("off"), tokens(2, 2 * T)
    off, clipped = (widened(model, config(mode, 2 * T, VOCABULARY), "copy")(idx)
                    for mode in ("off", "clipped"))
    torch.testing.assert_close(clipped[:, :T], off[:, :T], rtol=0, atol=0)
    assert (clipped[:, T:] - off[:, T:]).abs().max() > 1e-3


def test_entropy_of_even_attention_is_log_n():
    model = trained("fixed")
    for block in model.h:
        block.attn.c_attn.weight.data.zero_()
    expected = torch.arange(1, T + 1).log()
    torch.testing.assert_close(entropies(model, tokens(3, T)), expected)


@pytest.mark.parametrize("mode", TRAINED)
@torch.no_grad()
def test_entropy_by_hand(mode):
    size, model, seen = 2 * T, trained(mode, 2 * T), []
    for block in model.h:
        block.ln_1.register_forward_hook(lambda *args: seen.append(args[2].clone()))
    idx = tokens(1, size)
    found = entropies(model, idx)
    factor = {"off": lambda n: 1, "fixed": lambda n: math.log(n) / math.log(T),
              "clipped": lambda n: max(1, math.log(n) / math.log(T)),
              "learned": lambda n: math.log(n) / math.log(size)}[mode]  # as it begins
    n, every = 100, []
    for x, block in zip(seen, model.h, strict=True):
        q, k, _ = (x[0] @ block.attn.c_attn.weight.T).split(64, dim=1)
        for head in (slice(i, i + 16) for i in range(0, 64, 16)):
            scores = factor(n) * (k[:n, head] @ q[n - 1, head]) / 4
            p = scores.double().softmax(0)
            every.append(-(p * p.log()).sum().item())
    assert found[n - 1].item() == pytest.approx(sum(every) / 8, rel=1e-4)
    assert found.shape == (size,) and found[0] == 0


def test_by_octave():
    values = torch.arange(1.0, 65)
    assert by_octave(values) == {"8": 6.5, "16": 12.5, "32": 24.5, "64": 48.5}


@given(st.integers(1, 3), st.integers(1, 3))
def test_loss_by_position(rows, batches):
    model, rng = trained("off", 8), np.random.default_rng(rows)
    pairs = [tuple(rng.integers(VOCABULARY, size=(2, rows, 8))) for _ in range(batches)]
    found = by_position(model, pairs)
    x, y = (torch.from_numpy(np.concatenate(a)) for a in zip(*pairs, strict=True))
    for position in range(8):
        only = torch.full_like(y, -1)
        only[:, position] = y[:, position]
        loss, n = model(x, only)
        assert found[position].item() == pytest.approx((loss / n).item(), rel=1e-5)


def made_up() -> dict:
    """off loses 3 at every length, fixed as much, clipped 0.5 less after and learned 0.25 more."""
    after = {"off": 3.0, "fixed": 3.0, "clipped": 2.5, "learned": 3.25}
    runs = [{"mode": mode, "way": way, "seed": seed, "256": {
        "before": {"all": 9.0, "late": 3.0 + seed}, "after": {"all": 9.0, "late": after[mode]}}}
        for mode in TRAINED for way in WAYS for seed in (0, 1)]
    trained = [{"mode": mode, "seed": seed, "all": 9.0, "late": 2.0}
               for mode in ("off", "fixed", "learned") for seed in (0, 1)]
    return {"size": logn.QUICK, "trained": trained, "runs": runs}


def test_table_compares_with_off_of_the_same_positions():
    heads, *rows = table(made_up())
    assert heads[1:] == ["64", "256 before", "256 after"]
    assert len(rows) == 12 and all(len(row) == 4 for row in rows)
    found = {row[0]: row[1:] for row in rows}
    assert found["copy, off"] == ["2.000 ± 0.000", "3.500 ± 0.707", "3.000 ± 0.000"]
    assert found["copy, clipped"][2] == "-0.500 (± 0.000)"
    assert found["interpolate, learned"][1:] == ["+0.000 (± 0.000)", "+0.250 (± 0.000)"]


@pytest.mark.slow
def test_quick_form(quick):
    result = quick("logn")
    assert len(result["runs"]) == len(TRAINED) * len(WAYS)
    entropy = {(r["mode"], r["seed"]): r["entropy"] for r in result["runs"] if "entropy" in r}
    for seed in result["size"]["seeds"]:
        off, clipped = entropy["off", seed], entropy["clipped", seed]
        assert clipped["64"] == pytest.approx(off["64"], abs=1e-6)  # the same up to 64
        assert clipped["256"] < off["256"] - 2e-5  # sharper beyond, in hardly trained attention too
        assert off["256"] > off["64"] + 0.3  # attention spreads as keys come
