"""A wider window by interpolation: arms that read the same tokens at the same rates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import wider_window
from experiments.training import Recipe
from experiments.wider_window import FLOOR, WIDE, T, cut, rest_of, table
from kit.optimizer import lr_factor


def batches(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Two windows of consecutive numbers and those that follow them."""
    x = (2 * step + np.arange(2))[:, None] * WIDE + np.arange(WIDE)
    return x, x + 1


@given(st.integers(0, 6), st.integers(6, 9))
def test_arms_read_the_same_tokens_in_the_same_order(done, updates):
    short, wide = cut(batches, T), cut(batches, WIDE, done)
    parts = [short(step) for step in range(done)] + [wide(step) for step in range(updates - done)]
    for x, y in parts:
        assert x.size == 2 * WIDE and (y == x + 1).all()  # a target is the token that follows
    assert {x.shape[1] for x, _ in parts[:done]} <= {T}
    assert {x.shape[1] for x, _ in parts[done:]} <= {WIDE}
    read = np.concatenate([x.ravel() for x, _ in parts])
    assert (read == np.arange(updates * 2 * WIDE)).all()


@given(st.integers(40, 2000), st.floats(0.5, 1))
def test_rates_go_on_as_they_would_have_unless_too_low_to_learn(updates, share):
    whole, done = Recipe(max_iters=updates, warmup_iters=5), round(updates * share)
    rest, left = rest_of(whole, done), updates - done
    assert rest.max_iters == left
    for step in range(left):
        rate = rest.muon_lr * lr_factor(step, rest)
        assert rate / rest.muon_lr == pytest.approx((left - step) / left)  # linear to zero
        if lr_factor(done, whole) >= FLOOR:
            assert rate == pytest.approx(whole.muon_lr * lr_factor(done + step, whole))
        else:
            assert rest.muon_lr == pytest.approx(FLOOR * whole.muon_lr)
    assert rest.learning_rate / whole.learning_rate == pytest.approx(rest.muon_lr / whole.muon_lr)


def made_up() -> dict:
    def loss(early: float, late: float) -> list[float]:
        return 12 * [early] + 4 * [late]

    runs = [{"seed": seed, "share": share, "seconds": 10 + share, "loss": loss(3, 3 - share)}
            for seed in (0, 1) for share in (0.0, 0.25, 1.0)]
    short = [{"seed": seed, "seconds": 9.0, "loss": [3.0, 3.0, 3.0, 2.0]} for seed in (0, 1)]
    return {"size": wider_window.QUICK, "short": short, "runs": runs}


def test_table_compares_with_wide_windows_from_the_beginning():
    heads, *rows = table(made_up())
    assert all(len(row) == len(heads) for row in rows)
    assert [row[0] for row in rows] == ["none, read at 64", "0%", "25%", "100%"]
    stays, zero, quarter, wide = (row[1:] for row in rows)
    assert wide == ["2.750 ± 0.000", "", "2.000 ± 0.000", "", "11.0 ± 0.0"]
    assert quarter[2:4] == ["2.750 ± 0.000", "+0.750 (± 0.000)"]
    assert zero[:2] == ["3.000 ± 0.000", "+0.250 (± 0.000)"]
    assert stays[0] == "2.750 ± 0.000" and stays[2] == "2.000 ± 0.000"  # its own last quarter


@pytest.mark.slow
def test_quick_form(quick):
    result = quick("wider_window")  # so few updates tell no arm from another
    assert len(result["short"]) == 1 and len(result["runs"]) == 3
    for run in result["runs"] + result["short"]:
        assert np.mean(run["loss"]) < np.log(512) - 0.7  # better than an even guess
        assert run["seconds"] > 0
    losses = {tuple(run["loss"]) for run in result["runs"]}
    assert len(losses) == 3  # no arm is another's
