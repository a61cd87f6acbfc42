"""kit/optimizer.py: who is decayed by whom, the learning rate, and optimizers that go on."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kit.device import without_memory
from kit.errors import UserError
from kit.finetune import freeze
from kit.optimizer import (
    Muon,
    blocks_of,
    build_optimizers,
    lr_factor,
    set_lr,
    split_parameters,
)
from kit.run.moments import load_state, state_tensors
from model import GPT, GPTConfig
from train import TrainSettings

MODELS = [dict(tie_embeddings=t, bias=b, attn_logn=a)
          for t, b, a in itertools.product([True, False], [True, False], ["off", "learned"])]


def small(**changes) -> TrainSettings:
    return TrainSettings(**(dict(learning_rate=0.01, min_lr=0.001, warmup_iters=10,
                                 max_iters=100) | changes))


def update(model, optimizers, step: int, s: TrainSettings) -> float:
    """One update on tokens that depend on the step alone; returns the loss."""
    idx = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(step))
    loss, n = model(idx[:, :-1], idx[:, 1:])
    (loss / n).backward()
    set_lr(optimizers, step, s)
    for o in optimizers:
        o.step()
        o.zero_grad(set_to_none=True)
    return loss.item()


# ---------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_each_parameter_is_in_exactly_one_group(tiny, changes):
    model = tiny(**changes)
    hidden, embeddings, vectors = split_parameters(model)
    held = [*hidden, *embeddings, *vectors]
    assert len(held) == len(set(held)) and set(held) == set(model.parameters())
    assert sum(p.numel() for p in held) == model.num_params()
    names = {p: n for n, p in model.named_parameters()}
    assert all(names[p].startswith("h.") and p.ndim == 2 for p in hidden)
    assert len(hidden) == 2 * 4  # c_attn, c_proj, c_fc, c_proj of each layer
    tables = {"wte.weight", "wpe.weight"} | (set() if changes["tie_embeddings"]
                                             else {"lm_head.weight"})
    assert {names[p] for p in embeddings} == tables
    assert all(p.ndim == 1 for p in vectors)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_optimizers_cover_each_parameter_once_and_decay_only_matrices(tiny, changes, optimizer):
    model = tiny(**changes)
    optimizers = build_optimizers(model, small(optimizer=optimizer, weight_decay=0.3))
    groups = [g for o in optimizers for g in o.param_groups]
    held = [p for g in groups for p in g["params"]]
    assert len(held) == len(set(held)) and set(held) == set(model.parameters())
    for group in groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.3 if p.ndim >= 2 else 0.0)
    muon = {p for o in optimizers if type(o) is Muon
            for g in o.param_groups for p in g["params"]}
    hidden = set(split_parameters(model)[0])
    assert muon == (hidden if optimizer == "muon" else set())
    assert [type(o) for o in optimizers] == (
        [torch.optim.AdamW, Muon] if optimizer == "muon" else [torch.optim.AdamW])


def test_vectors_do_not_shrink_and_matrices_do(tiny):
    """With a gradient of zero an update is nothing but weight decay."""
    for optimizer in ("adamw", "muon"):
        model = tiny(bias=True)
        with torch.no_grad():  # biases begin at zero, where decay would not show
            for p in model.parameters():
                p.add_(1)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        s = small(optimizer=optimizer, weight_decay=0.5, decay_lr=False, muon_lr=0.02)
        optimizers = build_optimizers(model, s)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        set_lr(optimizers, 0, s)
        for o in optimizers:
            o.step()
        for name, p in model.named_parameters():
            lr = 0.02 if optimizer == "muon" and name.startswith("h.") else 0.01
            share = 1 - lr * 0.5 if p.ndim == 2 else 1.0
            assert torch.allclose(p, before[name] * share, rtol=1e-5, atol=1e-6), name


def test_settings_reach_the_optimizers(tiny):
    s = small(optimizer="muon", learning_rate=0.03, muon_lr=0.07, muon_momentum=0.6, beta1=0.8,
              beta2=0.88)
    adamw, muon = build_optimizers(tiny(), s)
    assert all(g["betas"] == (0.8, 0.88) and g["peak_lr"] == 0.03 for g in adamw.param_groups)
    assert all(g["peak_lr"] == 0.07 and g["momentum"] == 0.6 for g in muon.param_groups)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("names, stay", [
    ("wte", {"wte.weight"}), ("h", {"h."}), ("h.1", {"h.1."}), ("wte wpe", {"wte.", "wpe."}),
    ("h.0.attn  h.1.mlp.c_fc.weight", {"h.0.attn.", "h.1.mlp.c_fc.weight"}),
    ("wte wpe ln_f", {"wte.", "wpe.", "ln_f."})])
def test_what_is_frozen_stays_to_the_bit_and_the_rest_moves(tiny, names, stay, optimizer):
    model, s = tiny(tie_embeddings=names != "wte", bias=True), small(optimizer=optimizer)
    freeze(model, names)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizers = build_optimizers(model, s)
    held = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    assert len(held) == len(set(held)) == sum(p.requires_grad for p in model.parameters())
    for step in range(3):
        update(model, optimizers, step, s)
    still = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert still == {n for n in before if any(n.startswith(name) for name in stay)}


@pytest.mark.parametrize("names, words", [
    ("h.2", "freeze=h.2: no parameter.* h.0, h.1, ln_f, wpe, wte"), ("wt", "freeze=wt"),
    ("lm_head", "freeze=lm_head"), ("wte wpe h ln_f", "leaves nothing to train")])
def test_what_cannot_be_frozen_is_refused(tiny, names, words):
    with pytest.raises(UserError, match=words):
        freeze(tiny(), names)


def test_names_to_freeze_that_are_none():
    model = without_memory(GPTConfig(n_layer=40, n_embd=12 * 10**6))
    for names in ("", "wte h.0 h.39 h.5.mlp.c_fc", "h.0.attn ln_f.weight"):
        freeze(model, names)
    for wrong in ("h.40", "h.5.mlpx", "lm_head", "h.0.ln_1.bias", "h.x", "h."):
        with pytest.raises(UserError, match="no parameter is called so"):
            freeze(model, f"wte {wrong}")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_lower_blocks_learn_slower(tiny, optimizer):
    s = small(optimizer=optimizer, layer_lr_decay=0.5)
    model = tiny(tie_embeddings=False)
    optimizers = build_optimizers(model, s)
    set_lr(optimizers, 50, s)
    peak = {True: s.muon_lr, False: s.learning_rate}
    shares = {p: g["peak_lr"] / peak[isinstance(o, Muon)] for o in optimizers
              for g in o.param_groups for p in g["params"]}
    assert len(shares) == len(list(model.parameters()))
    expected = {"wte": 1 / 8, "wpe": 1 / 8, "h.0": 1 / 4, "h.1": 1 / 2, "ln_": 1, "lm_": 1}
    for name, p in model.named_parameters():
        assert shares[p] == pytest.approx(expected[name[:3]]), name
    factors = {g["lr"] / g["peak_lr"] for o in optimizers for g in o.param_groups}
    assert max(factors) - min(factors) < 1e-12  # one schedule for all


def test_both_optimizers_learn(tiny):
    for optimizer in ("adamw", "muon"):
        model, s = tiny(), small(optimizer=optimizer, warmup_iters=0, decay_lr=False)
        optimizers = build_optimizers(model, s)
        losses = [update(model, optimizers, 0, s) for _ in range(30)]
        assert losses[-1] < 0.6 * losses[0]


# --------------------------------------------------------------------------------- learning rate


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("end", [None, 60])
@pytest.mark.parametrize("cooldown", [0.05, 0.6, 1.0])
@pytest.mark.parametrize("warmup", [0, 1, 10, 50])
def test_the_rate_rises_to_its_peak_and_falls_to_its_end(schedule, end, cooldown, warmup):
    s = small(schedule=schedule, lr_decay_iters=end, cooldown=cooldown, warmup_iters=warmup)
    s.check()
    end = end or 100
    rate = [lr_factor(step, s) for step in range(120)]
    assert rate[0] > 0 and rate[warmup] == 1.0
    assert all(a < b for a, b in itertools.pairwise(rate[: warmup + 1]))  # rises all the way
    assert all(a >= b for a, b in itertools.pairwise(rate[warmup:]))  # and never again
    assert rate[end - 1] > rate[end] == pytest.approx(s.min_lr / s.learning_rate)
    assert set(rate[end:]) == {rate[end]}


def test_known_rates():
    """Values by hand: nanoGPT's cosine, and a line."""
    cosine = small(warmup_iters=20)  # from 20 to 100
    assert lr_factor(0, cosine) == 1 / 21 and lr_factor(19, cosine) == 20 / 21
    assert lr_factor(60, cosine) == pytest.approx(0.55)  # half way from 1 to 0.1
    assert lr_factor(40, cosine) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + 0.5**0.5))
    linear = small(warmup_iters=20, schedule="linear", cooldown=0.5)
    assert lr_factor(50, linear) == 1 and lr_factor(75, linear) == pytest.approx(0.55)
    assert lr_factor(40, linear) == 1 and lr_factor(99, linear) == pytest.approx(0.118)


def test_without_decay_the_rate_is_constant_from_the_first_update():
    for schedule in ("cosine", "linear"):
        s = small(decay_lr=False, schedule=schedule, lr_decay_iters=50)
        assert {lr_factor(step, s) for step in range(200)} == {1.0}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_the_rate_stays_between_its_end_and_its_peak(data):
    end = data.draw(st.integers(1, 1000))
    s = TrainSettings(max_iters=data.draw(st.integers(1, 1000)), lr_decay_iters=end,
                      warmup_iters=data.draw(st.integers(0, end - 1)), learning_rate=1.0,
                      min_lr=data.draw(st.floats(0, 1)), cooldown=data.draw(st.floats(1e-3, 1)),
                      schedule=data.draw(st.sampled_from(["cosine", "linear"])))
    s.check()
    step = data.draw(st.integers(0, 1200))
    low = 0 if step < s.warmup_iters else s.min_lr
    assert low <= lr_factor(step, s) * (1 + 1e-9) and lr_factor(step, s) <= 1


def test_set_lr_scales_every_group_from_its_own_peak(tiny):
    s = small(optimizer="muon", muon_lr=0.1)
    optimizers = build_optimizers(tiny(), s)
    for step in (0, 10, 55, 100, 3):  # in any order: nothing adds up
        factor = set_lr(optimizers, step, s)
        assert factor == lr_factor(step, s)
        for g in (g for o in optimizers for g in o.param_groups):
            assert g["lr"] == g["peak_lr"] * factor


# ------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("tie", [True, False])
def test_optimizers_go_on_bit_for_bit(tiny, optimizer, tie):
    s = small(optimizer=optimizer)
    model = tiny(tie_embeddings=tie)
    optimizers = build_optimizers(model, s)
    for step in range(5):
        update(model, optimizers, step, s)
    held = {k: v.clone() for k, v in state_tensors(optimizers, model).items()}
    weights = {k: v.clone() for k, v in model.state_dict().items()}

    again = tiny(seed=9, tie_embeddings=tie)
    again.load_state_dict(weights)
    others = build_optimizers(again, s)
    load_state(others, again, held)
    back = state_tensors(others, again)
    assert back.keys() == held.keys()
    assert all(torch.equal(back[k], held[k]) and back[k].dtype == held[k].dtype for k in held)
    for step in range(5, 10):
        assert update(model, optimizers, step, s) == update(again, others, step, s)
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("tie", [True, False])
def test_tensors_are_named_after_their_parameters(tiny, tie):
    model, s = tiny(tie_embeddings=tie), small(optimizer="muon")
    optimizers = build_optimizers(model, s)
    assert state_tensors(optimizers, model) == {}  # nothing before the first update
    update(model, optimizers, 0, s)
    tensors = state_tensors(optimizers, model)
    assert {k.rpartition(".")[0] for k in tensors} == {n for n, _ in model.named_parameters()}
    assert tensors["wte.weight.exp_avg"].shape == model.wte.weight.shape
    assert tensors["h.1.attn.c_attn.weight.momentum_buffer"].shape == (48, 16)
    assert ("lm_head.weight.exp_avg" in tensors) is not tie
    assert all(isinstance(t, torch.Tensor) for t in tensors.values())  # so that no pickle is needed


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_that_does_not_fit_is_no_silent_loss(tiny, optimizer):
    model, s = tiny(), small(optimizer=optimizer)
    optimizers = build_optimizers(model, s)
    update(model, optimizers, 0, s)
    whole = state_tensors(optimizers, model)
    fresh = build_optimizers(model, s)

    def refused(changes: dict, words: str) -> None:
        tensors = {n: t for n, t in (whole | changes).items() if t is not None}
        with pytest.raises(UserError, match="does not fit the model: " + words):
            load_state(fresh, model, tensors)
        assert state_tensors(fresh, model) == {}

    refused({"h.7.ln_1.weight.exp_avg": torch.zeros(16)}, r"h\.7\.ln_1\.weight\.exp_avg is unknown")
    for name in whole:
        refused({name: None}, f"{name} is missing")
    refused({"h.0.attn.c_attn.weight.max_exp_avg_sq": torch.zeros(48, 16)}, "h.0.*is unknown")
    with pytest.raises(UserError, match=r"wpe.weight.exp_avg is \(16, 8\).*expected \(8, 16\)"):
        load_state(fresh, model, whole | {"wpe.weight.exp_avg": torch.zeros(16, 8)})


def test_muon_is_the_librarys_within_its_rounding():
    """Ten steps on the matrices of a block, wide, square and tall: the same weights in bf16."""
    torch.manual_seed(0)
    shapes = [(96, 32), (32, 32), (128, 32), (32, 128)] * 2
    start = [torch.randn(s) for s in shapes]
    results = []
    for kind in (partial(Muon, dtype=torch.bfloat16), torch.optim.Muon):
        params = [torch.nn.Parameter(p.clone()) for p in start]
        optimizer = kind(params, lr=0.02, weight_decay=0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(10):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            assert optimizer.step(lambda: 3.0) == 3.0
        results.append((params, [optimizer.state[p]["momentum_buffer"] for p in params]))
    moved = [(p - s).norm() for p, s in zip(results[0][0], start, strict=True)]
    for ours, theirs, distance in zip(results[0][0], results[1][0], moved, strict=True):
        assert (ours - theirs).norm() < 0.01 * distance
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_muon_iterates_in_the_dtype_that_it_is_given(monkeypatch, tiny):
    """All its products are in it; the weights differ by no more than rounding, and stay fp32."""
    seen, real, found = set(), torch.baddbmm, []
    monkeypatch.setattr(torch, "baddbmm", lambda *a, **b: (seen.add(a[1].dtype), real(*a, **b))[1])
    for wanted, dtype in ((None, torch.float32), (torch.float32,) * 2, (torch.bfloat16,) * 2):
        torch.manual_seed(0)
        model, s = tiny(), small(optimizer="muon")
        before = {n: w.detach().clone() for n, w in model.named_parameters()}
        optimizers = build_optimizers(model, s, wanted)
        for w in model.parameters():
            w.grad = torch.randn_like(w)
        for o in optimizers:
            o.step()
        assert seen == {dtype}
        seen.clear()
        found.append({n: w.detach() - before[n] for n, w in model.named_parameters()})
        assert {w.dtype for w in found[-1].values()} == {torch.float32}
    exact, same, near = found
    for name, move in exact.items():
        assert torch.equal(move, same[name])
        assert (move - near[name]).norm() <= 0.05 * move.norm()


def test_muon_leaves_parameters_without_gradient_alone():
    a, b = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    a.grad = torch.eye(4)
    Muon([a, b], lr=0.1, weight_decay=0.1).step()
    assert torch.equal(b, torch.ones(4, 4)) and not torch.equal(a, torch.ones(4, 4))


class Nested(GPT):
    """nanoGPT's way: everything in a ModuleDict called transformer."""

    def __init__(self, config):
        super().__init__(config)
        self.transformer = nn.ModuleDict({"h": self.h})
        del self.h


def test_layers_are_found_wherever_a_model_keeps_them(tiny):
    model = Nested(tiny().config)
    assert len(blocks_of(model)) == 2 and len(split_parameters(model)[0]) == 8
    del model.transformer
    with pytest.raises(UserError, match="no nn.ModuleList of layers; take adamw"):
        build_optimizers(model, small(optimizer="muon"))
