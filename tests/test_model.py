"""The model against its contracts: causality, the cache, the loss, GPT-2's numbers."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kit.device import flops_per_token
from model import GPT, GPTConfig, KVCache

LOGN = ["off", "fixed", "clipped", "learned"]
T = 16


def make(attn_logn="off", **changes) -> GPT:
    torch.manual_seed(0)
    values = dict(vocab_size=61, block_size=T, n_layer=2, n_head=2, n_embd=32, attn_logn=attn_logn)
    if attn_logn == "clipped":
        values["logn_base"] = 4  # so that it does something inside the context
    return GPT(GPTConfig(**values | changes)).eval()


def tokens(rows: int, n: int = T, seed: int = 1) -> torch.Tensor:
    return torch.randint(61, (rows, n), generator=torch.Generator().manual_seed(seed))


def run_in_chunks(model: GPT, idx: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Logits of idx, fed to a cache in chunks of these lengths."""
    cache, logits, at = model.new_cache(len(idx)), [], 0
    for n in cuts:
        logits.append(model(idx[:, at : at + n], cache=cache))
        at += n
    return torch.cat(logits, 1)


# ------------------------------------------------------------------------------------ numbers


def test_gpt2_has_its_parameter_count():
    with torch.device("meta"):
        model = GPT(GPTConfig(bias=True))
    assert model.num_params() == 124_439_808


def test_untied_head_is_a_matrix_of_its_own():
    tied, untied = make(), make(tie_embeddings=False)
    assert untied.num_params() - tied.num_params() == 61 * 32
    assert tied.lm_head.weight is tied.wte.weight
    assert untied.lm_head.weight is not untied.wte.weight


@pytest.mark.parametrize("bias", [True, False])
def test_bias_is_everywhere_or_nowhere(bias):
    names = [n for n, _ in make(bias=bias).named_parameters()]
    assert any(n.endswith("bias") for n in names) == bias
    assert ("h.0.attn.c_attn.bias" in names) == bias and ("ln_f.bias" in names) == bias


def test_flops_of_gpt2_by_hand():
    """6 x (matrix parameters: 12 L C^2 + V C, norms and biases along) + 12 L C T."""
    with torch.device("meta"):
        model = GPT(GPTConfig())  # no biases
    params = 12 * (12 * 768**2 + 2 * 768) + 768 + 50257 * 768
    assert flops_per_token(model) == 6 * params + 12 * 12 * 768 * 1024


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("width, vocab", [(64, 257), (256, 2048), (768, 5000)])
def test_first_loss_is_that_of_guessing(tie, width, vocab):
    config = GPTConfig(vocab_size=vocab, block_size=32, n_layer=2, n_head=2, n_embd=width,
                       tie_embeddings=tie)
    model, idx = GPT(config), torch.randint(vocab, (4, 33))
    loss, n = model(idx[:, :-1], idx[:, 1:])
    assert n == 128
    assert (loss / n).item() == pytest.approx(math.log(vocab), rel=0.04)


def test_initial_scales():
    model = make(n_layer=8, n_embd=256, vocab_size=500, block_size=300)
    std = {n: p.std().item() for n, p in model.named_parameters() if p.ndim == 2}
    assert std["wte.weight"] == pytest.approx(0.02, rel=0.03)
    assert std["wpe.weight"] == pytest.approx(0.01, rel=0.03)
    assert std["h.3.attn.c_attn.weight"] == pytest.approx(0.02, rel=0.03)
    for name in ("h.3.attn.c_proj.weight", "h.3.mlp.c_proj.weight"):
        assert std[name] == pytest.approx(0.02 / 4, rel=0.03)


def test_init_std_scales_the_blocks_alone():
    """The same draws, larger: so a run with the default is what it always was."""
    weights = []
    for std in (0.02, 0.05):
        torch.manual_seed(0)
        weights.append(dict(GPT(GPTConfig(65, 16, 2, 2, 32), std).named_parameters()))
    for name, p in weights[0].items():
        scale = 2.5 if name.startswith("h.") and p.ndim == 2 else 1
        torch.testing.assert_close(weights[1][name], p * scale)


def test_logits_are_those_of_transformers():
    """The forward pass is GPT-2's: the same weights give the same logits there."""
    transformers = pytest.importorskip("transformers")
    model = make(bias=True, n_embd=48, n_head=3)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=61, n_positions=T, n_embd=48, n_layer=2, n_head=3)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
        for name, p in theirs.transformer.named_parameters():
            ours = model.get_parameter(name)
            conv1d = p.ndim == 2 and not name.startswith("w")  # stored (in, out)
            p.copy_(ours.T if conv1d else ours)
        idx = tokens(3)
        torch.testing.assert_close(model(idx), theirs(idx).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [
    dict(n_embd=30, n_head=4), dict(n_layer=0), dict(dropout=1.0), dict(block_size=-1),
    dict(attn_logn="on"), dict(logn_base=9), dict(attn_logn="fixed", logn_base=1)])
def test_impossible_shapes_are_refused_in_a_line(wrong):
    with pytest.raises(ValueError) as error:
        GPTConfig(**wrong)
    assert "\n" not in str(error.value) and str(next(iter(wrong.values()))) in str(error.value)


# ---------------------------------------------------------------------------------- causality


@pytest.mark.parametrize("logn", LOGN)
@pytest.mark.parametrize("path", ["plain", "cache", "chunks", "tokens"])
@pytest.mark.parametrize("at", [0, 7, 15])
def test_a_token_changes_nothing_before_it(logn, path, at):
    model, idx = make(logn), tokens(2)
    changed = idx.clone()
    changed[:, at] = (changed[:, at] + 1) % 61
    cuts = {"cache": [T], "chunks": [5, 6, 5], "tokens": [1] * T}.get(path)
    run = (lambda x: run_in_chunks(model, x, cuts)) if cuts else model
    with torch.no_grad():
        a, b = run(idx), run(changed)
    assert torch.equal(a[:, :at], b[:, :at])
    assert not torch.equal(a[:, at:], b[:, at:])


@pytest.mark.parametrize("at", [0, 7, 15])
def test_causality_in_bf16(at):
    model, idx = make(), tokens(2)
    changed = idx.clone()
    changed[:, at] = (changed[:, at] + 1) % 61
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        a, b = model(idx), model(changed)
    assert torch.equal(a[:, :at], b[:, :at]) and not torch.equal(a[:, at:], b[:, at:])


def test_positions_beyond_the_context_are_refused():
    model = make()
    with pytest.raises(ValueError, match="17.*16"):
        model(tokens(1, 17))
    cache = model.new_cache()
    model(tokens(1, 10), cache=cache)
    with pytest.raises(ValueError, match="17.*16"):
        model(tokens(1, 7), cache=cache)


# -------------------------------------------------------------------------------------- cache


@pytest.mark.parametrize("logn", LOGN)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cut_into_chunks_gives_the_same_logits(logn, data):
    model, idx = make(logn), tokens(2)
    cuts, left = [], T
    while left:
        cuts.append(data.draw(st.integers(1, left)))
        left -= cuts[-1]
    with torch.no_grad():
        torch.testing.assert_close(run_in_chunks(model, idx, cuts), model(idx),
                                   rtol=0, atol=1e-5)


@pytest.mark.parametrize("logn", LOGN)
def test_rows_of_different_lengths_get_what_they_get_alone(logn):
    """Right padding, one prefill, trim, then tokens and a chunk at each row's own position."""
    model, idx, lengths = make(logn), tokens(3), torch.tensor([1, 5, 9])
    cache = model.new_cache(3)
    with torch.no_grad():
        model(idx[:, :9], cache=cache)
        cache.trim(lengths)
        rows = torch.arange(3)[:, None]
        for step in (1, 1, 3):
            here = cache.positions(step)
            logits = model(idx[rows, here], cache=cache)
            torch.testing.assert_close(logits, model(idx)[rows, here], rtol=0, atol=1e-5)


def test_cache_expand_select_and_put():
    model, idx = make(), tokens(4)
    with torch.no_grad():
        full = model(idx)
        cache = model.new_cache(2)
        model(idx[:2, :9], cache=cache)
        cache.trim(torch.tensor([6, 9]))
        cache.expand(2)  # rows 0 0 1 1
        assert cache.positions(1)[:, 0].tolist() == [6, 6, 9, 9]
        cache.select(torch.tensor([3, 0]))  # rows 1 0
        other = model.new_cache(1, length=3)
        model(idx[3:, :3], cache=other)
        cache.put(torch.tensor([1]), other)  # rows 1 3
        assert cache.positions(1)[:, 0].tolist() == [9, 3]
        logits = model(torch.stack([idx[1, 9], idx[3, 3]])[:, None], cache=cache)
    torch.testing.assert_close(logits[0, 0], full[1, 9], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[1, 0], full[3, 3], rtol=0, atol=1e-5)


def test_cache_is_a_plain_number_while_rows_agree():
    cache = KVCache(2, batch_size=3)
    cache.advance(6)
    cache.trim(torch.tensor([4, 4, 4]))
    assert cache.pos == 4 and cache.positions(2).tolist() == [4, 5]
    assert cache.mask(1) is None
    assert cache.mask(2).squeeze().tolist() == [[True] * 5 + [False], [True] * 6]


def test_cache_that_is_too_short_says_so():
    model = make()
    with pytest.raises(ValueError, match="room for 4.*5"):
        model(tokens(1, 5), cache=KVCache(2, length=4))


# -------------------------------------------------------------------------------------- log n


def test_query_scales_by_hand():
    pos = torch.tensor([0, 1, 63])
    logs = [0, math.log(2), math.log(64)]
    fixed = make("fixed").h[0].attn.query_scale(pos).flatten().tolist()
    assert fixed == pytest.approx([x / math.log(512) for x in logs])
    clipped = make("clipped", logn_base=16).h[0].attn.query_scale(pos).flatten().tolist()
    assert clipped == pytest.approx([1, 1, math.log(64) / math.log(16)])
    learned = make("learned").h[0].attn.query_scale(pos)
    assert learned.shape == (1, 2, 3, 1)
    assert learned[0, 1, :, 0].tolist() == pytest.approx([x / math.log(T) for x in logs])


def test_clipped_changes_nothing_inside_the_trained_context():
    torch.testing.assert_close(make("clipped", logn_base=T)(tokens(2)), make("off")(tokens(2)))


@pytest.mark.parametrize("logn", ["fixed", "clipped", "learned"])
def test_each_form_does_something(logn):
    assert not torch.allclose(make(logn)(tokens(2)), make("off")(tokens(2)), atol=1e-6)


def test_learned_scale_is_trained():
    model = make("learned")
    model(tokens(2), tokens(2, seed=2))[0].backward()
    assert model.h[1].attn.logn_scale.grad.abs().sum() > 0


# --------------------------------------------------------------------------------------- loss


def test_a_batch_without_targets_adds_nothing():
    model = make()
    loss, n = model(tokens(2), torch.full((2, T), -1))
    loss.backward()
    assert (loss.item(), n.item()) == (0.0, 0)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_masked_targets_and_their_sum():
    """Sums over parts are the sum over the whole, however unequal the parts."""
    model, idx, y = make(), tokens(4), tokens(4, seed=2)
    y[0, 2:] = y[3, :14] = -1
    whole, n = model(idx, y)
    parts = [model(idx[i : i + 1], y[i : i + 1]) for i in range(4)]
    assert n == sum(p[1] for p in parts) == 2 + T + T + 2
    torch.testing.assert_close(whole, sum(p[0] for p in parts))
    nan_elsewhere = F.cross_entropy(model(idx).view(-1, 61), y.view(-1), ignore_index=-1,
                                    reduction="sum")
    torch.testing.assert_close(whole, nan_elsewhere)


def test_bf16_autocast_stays_near_fp32():
    model, idx, y = make(n_embd=64), tokens(4), tokens(4, seed=2)
    want = model(idx, y)[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = model(idx, y)[0]
    got.backward()
    assert got.item() == pytest.approx(want.item(), rel=2e-3) and got.item() != want.item()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_dropout_is_off_when_evaluating_and_on_when_training():
    model, idx = make(dropout=0.5), tokens(2)
    assert torch.equal(model(idx), model(idx))
    model.train()
    assert not torch.equal(model(idx), model(idx))


def test_trim_keeps_its_own_numbers_and_refuses_what_is_not_there():
    model = make()
    cache, lengths = model.new_cache(2), torch.tensor([3, 5])
    model(tokens(2, 6), cache=cache)
    cache.trim(lengths)
    lengths += 1
    assert cache.positions(1)[:, 0].tolist() == [3, 5]
    with pytest.raises(ValueError, match="holds 5 positions and cannot keep 9"):
        cache.trim(9)


# --------------------------------------------------------------------------- the generic loss


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_the_loss_in_chunks_is_that_of_all_logits(chunk, monkeypatch):
    monkeypatch.setattr(GPT, "CHUNK", chunk)
    model, idx, y = make(), tokens(2), tokens(2, seed=2)
    y[0, :3] = -1
    loss, n = model(idx, y)
    want = F.cross_entropy(model(idx).view(-1, 61), y.view(-1), ignore_index=-1, reduction="sum")
    torch.testing.assert_close(loss, want)
    assert n == 29
    got, expected = (torch.autograd.grad(x, list(model.parameters())) for x in (loss, want))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_logits_of_one_chunk_exist_at_once(monkeypatch):
    monkeypatch.setattr(GPT, "CHUNK", 8)
    made, real = [], GPT.logits
    monkeypatch.setattr(GPT, "logits", lambda self, x: (made.append(len(x)), real(self, x))[1])
    make()(tokens(2), tokens(2, seed=2))[0].backward()
    assert made == [8] * 8  # four chunks, each again for its gradient


class Softcap(GPT):
    def logits(self, x):
        return 5 * torch.tanh(super().logits(x) / 5)


def test_an_edited_exit_is_that_of_loss_and_text():
    """A softcap in `logits` alone: forward, loss, its gradient and generate all have it."""
    torch.manual_seed(0)
    model, idx, y = Softcap(make().config), tokens(2), tokens(2, seed=2)
    with torch.no_grad():
        model.wte.weight.mul_(40)
    logits = model(idx)
    assert 4 < logits.abs().max() <= 5
    loss, _ = model(idx, y)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), y.flatten(),
                                                     reduction="sum"))
    likeliest = model(idx[:, :3])[:, -1].argmax(-1)
    assert model.generate(idx[:, :3], 1, temperature=0)[:, 3].equal(likeliest)


class Dropped(GPT):
    def logits(self, x):
        return super().logits(F.dropout(x, 0.5, self.training))


def test_dropout_in_the_exit_has_one_mask_for_value_and_gradient():
    torch.manual_seed(0)
    model = Dropped(make().config).train()
    x, y = torch.randn(40, 32, requires_grad=True), torch.randint(61, (40,))
    torch.manual_seed(1)
    loss, _ = model.loss(x, y)
    got = torch.autograd.grad(loss, x)[0]
    torch.manual_seed(1)
    want = torch.autograd.grad(model.loss_of(x, y), x)[0]
    torch.testing.assert_close(got, want)


# ----------------------------------------------------------------------------------- generate


@pytest.mark.parametrize("logn", LOGN)
@pytest.mark.parametrize("start", [1, 5, 3 * T])
def test_generate_in_a_notebook_is_a_plain_loop(logn, start):
    model, idx = make(logn).train(), tokens(2, start)
    out = model.generate(idx, 3 * T, temperature=0)
    assert model.training and out.shape == (2, start + 3 * T) and torch.equal(out[:, :start], idx)
    model.eval()
    for row in out.tolist():
        seen = row[:start][-T:]
        for id in row[start:]:
            assert id == int(model(torch.tensor([seen]))[0, -1].argmax())
            seen = [*seen, id]
            seen = seen[-(T // 2) :] if len(seen) > T else seen


def test_generate_draws_among_the_likeliest():
    model, idx = make(), tokens(1, 4)
    torch.manual_seed(0)
    drawn = {int(model.generate(idx, 1, temperature=5.0, top_k=3)[0, -1]) for _ in range(60)}
    assert drawn == set(model(idx)[0, -1].topk(3).indices.tolist())
    assert model.generate(idx, 0).equal(idx)


# ------------------------------------------------------------------------- what people edit in


class Experts(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.experts = nn.Parameter(torch.empty(4, 32, 32))
        self.table = nn.Parameter(torch.full((3, 3), 7.0), requires_grad=False)
        self.init_weights(0.02)


def test_every_parameter_is_initialised_by_rule_or_refused():
    torch.manual_seed(0)
    model = Experts(make().config)
    assert 0.015 < model.experts.std() < 0.025 and (model.table == 7).all()
    model.gain = nn.Parameter(torch.full((3,), torch.nan))  # torch.empty gives what was there
    with pytest.raises(ValueError, match="gain: not initialised.*init_weights"):
        model.init_weights(0.02)


def test_a_cache_takes_heads_and_width_from_the_first_keys():
    cache = KVCache(1, batch_size=2, length=5)
    k, v = cache.append(0, torch.randn(2, 1, 3, 8), torch.randn(2, 1, 3, 4))
    assert cache.k[0].shape == (2, 1, 5, 8) and cache.v[0].shape == (2, 1, 5, 4)
    assert k.shape == (2, 1, 3, 8) and v.shape == (2, 1, 3, 4)


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_a_cache_gives_keys_in_the_dtype_of_the_new_ones(held):
    cache = KVCache(1, dtype=held)
    for dtype in (torch.float32, torch.bfloat16):
        k, v = cache.append(0, *torch.randn(2, 1, 2, 3, 8, dtype=dtype))
        assert k.dtype == v.dtype == dtype and cache.k[0].dtype == held
        cache.advance(3)


def test_copied_out_of_the_clone_it_trains_and_writes(tmp_path):
    shutil.copy(Path(__file__).parent.parent / "model.py", tmp_path)
    code = ("import torch\nfrom model import GPT, GPTConfig\ntorch.manual_seed(0)\n"
            "model = GPT(GPTConfig(vocab_size=5, block_size=8, n_layer=1, n_head=2, n_embd=16))\n"
            "text = torch.arange(9)[None] % 5\n"
            "adam = torch.optim.AdamW(model.parameters(), 0.01)\n"
            "for _ in range(60):\n"
            "    loss, n = model(text[:, :-1], text[:, 1:])\n"
            "    (loss / n).backward()\n    adam.step()\n    adam.zero_grad()\n"
            "assert loss / n < 0.1\n"
            "print(model.generate(text[:, :3], 20, temperature=0).tolist()[0])\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True)
    assert json.loads(done.stdout) == [i % 5 for i in range(23)], done.stderr


def test_it_reads_as_a_gpt_first():
    """GPT before line 150, and nothing of tricks: those are in kit/kernels."""
    text = (Path(__file__).parent.parent / "model.py").read_text(encoding="utf-8")
    before, rest = text.split("class GPT(nn.Module)")
    assert before.count("\n") < 150 and "---- skip at first\n" in rest
    assert not re.search(r"device\.type|itemsize|autocast|uint8|sampler", text)
