"""Tied and untied embeddings: what a model says before it has learned anything."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import tied
from experiments.common import to_text


def start(model, idx, targets) -> float:
    with torch.no_grad():
        loss, n = model(idx, targets)
    return (loss / n).item()


def tokens(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids (32, CONTEXT) and targets, none of which is the token just read."""
    random = torch.Generator().manual_seed(5)
    idx = torch.randint(vocab_size, (32, tied.CONTEXT), generator=random)
    step = torch.randint(1, vocab_size, idx.shape, generator=random)
    return idx, (idx + step) % vocab_size


def test_models_of_a_seed_differ_in_the_length_of_their_rows_alone():
    small, large = tied.build("tied", 0.1, 50, 3), tied.build("tied", 0.2, 50, 3)
    apart, exchanged = tied.build("untied", 0.1, 50, 3), tied.build("exchanged", 0.1, 50, 3)
    assert torch.allclose(2 * small.wte.weight, large.wte.weight)
    assert small.lm_head.weight is small.wte.weight
    assert apart.lm_head.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert not torch.allclose(apart.lm_head.weight, apart.wte.weight)
    for other in (large, apart, exchanged):
        assert torch.equal(other.h[1].mlp.c_fc.weight, small.h[1].mlp.c_fc.weight)
    assert torch.equal(apart.wte.weight, small.wte.weight)
    assert apart.num_params() == small.num_params() + 50 * tied.WIDTH
    assert exchanged.num_params() == small.num_params()


def test_exchange_moves_halves_and_loses_nothing():
    idx, half = tokens(50)[0], tied.WIDTH // 2
    plain = tied.build("tied", 0.1, 50, 3).hidden(idx)
    moved = tied.build("exchanged", 0.1, 50, 3).hidden(idx)
    assert torch.equal(moved[..., :half], plain[..., half:])
    assert torch.equal(moved[..., half:], plain[..., :half])


def test_variance_of_the_branches_is_that_of_a_model():
    model = tied.build("tied", 0.1, 1000, 1)
    stream = []
    model.ln_f.register_forward_hook(lambda module, args, out: stream.append(args[0]))
    idx = tokens(1000)[0]
    model.hidden(idx)
    rest = stream[0] - model.wte(idx)
    assert rest.square().mean().item() == pytest.approx(tied.branch_variance(), rel=0.1)


@pytest.mark.parametrize("std", [0.005, 0.02, 0.1, 1.0])
def test_own_logit_is_that_of_a_model(std):
    idx = tokens(1000)[0]
    with torch.no_grad():
        logits = tied.build("tied", std, 1000, 1)(idx)
    own = logits.gather(-1, idx[..., None]).mean().item()
    assert own == pytest.approx(tied.own_logit(std), rel=0.06)


@pytest.mark.parametrize("kind", tied.KINDS)
@pytest.mark.parametrize("std", [0.02, 0.1, 1.0])
def test_loss_at_step_0_is_the_predicted_one(kind, std):
    idx, targets = tokens(1000)
    measured = start(tied.build(kind, std, 1000, 1), idx, targets)
    assert measured == pytest.approx(tied.predict(kind, std, 1000, 0.0), rel=0.03)


@settings(max_examples=15, deadline=None)
@given(st.integers(100, 500), st.floats(1e-3, 0.06))
def test_small_rows_cost_half_their_variance(vocab_size, std):
    loss = tied.predict("untied", std, vocab_size, 0.0)
    assert loss == pytest.approx(math.log(vocab_size) + tied.WIDTH * std**2 / 2, abs=0.02)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.1, 1.0), st.floats(0.0, 1.0))
def test_a_repeated_token_is_what_a_tied_model_bets_on(std, repeats):
    never, some = (tied.predict("tied", std, 100, share) for share in (0.0, repeats))
    assert never - some == pytest.approx(repeats * tied.own_logit(std))
    assert never > tied.own_logit(std) - 1e-9 > 0  # the sum of exp is at least one of them


def test_table_has_every_scale_and_the_parameters():
    runs = [{"kind": kind, "std": std, "seed": seed, "start": 9.0, "end": 4.0 + seed / 10,
             "parameters": 1234}
            for kind in tied.KINDS for std in (0.02, 1.0) for seed in (1, 2, 3)
            if kind != "exchanged" or std > 0.5]
    result = {"runs": runs, "stds": [0.02, 1.0], "grid": [0.02, 1.0], "updates": 7,
              "predicted": {"tied": [7.0, 99.0], "untied": [7.0, 33.0]}}
    rows = tied.table(result)
    assert [row[0] for row in rows[1:]] == ["0.02", "1", "parameters"]
    assert rows[2][1:3] == ["9.00 ± 0.00 (99.00)", "9.00 ± 0.00 (33.00)"]
    assert rows[1][5] == "" and rows[2][5] == "4.200 ± 0.100"
    assert rows[1][6:] == ["+0.000 (± 0.000)", ""] and rows[2][7] == "+0.000 (± 0.000)"
    assert to_text(rows).count("1,234") == 3


@pytest.mark.slow
def test_quick_form(quick):
    result = quick("tied")
    runs = {(run["kind"], run["std"]): run for run in result["runs"]}
    entropy = math.log(result["vocab_size"])
    assert runs["tied", 1.0]["start"] > 2 * runs["untied", 1.0]["start"] > 4 * entropy
    assert runs["exchanged", 1.0]["start"] < runs["tied", 1.0]["start"] / 2
    for kind in ("tied", "untied"):
        assert runs[kind, 0.02]["start"] == pytest.approx(entropy, abs=0.5)
        assert runs[kind, 0.02]["end"] < runs[kind, 0.02]["start"] - 1
        at = result["grid"].index(1.0)
        assert runs[kind, 1.0]["start"] == pytest.approx(result["predicted"][kind][at], rel=0.1)
    assert runs["tied", 1.0]["end"] > runs["tied", 0.02]["end"] + 5
