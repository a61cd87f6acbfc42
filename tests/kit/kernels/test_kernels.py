"""kit/kernels: the same model, quicker."""

import copy
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kit.kernels import fast, native
from kit.kernels.leaves import FEW, NativeLinear, round_linears
from kit.kernels.quantize import integers, pack, rounded, unpack
from kit.kernels.step import Step
from kit.sampling import Sampler
from kit.writing.window import Window, steps
from model import GPT, GPTConfig, KVCache

CLONE = Path(__file__).parents[3]
CODE, WHY = native.library()
needs_code = pytest.mark.skipif(CODE is None, reason=WHY)
KINDS = native.KINDS
WAYS = [pytest.param(True, marks=needs_code, id="native"), pytest.param(False, id="library")]
ERROR = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.06}  # of logits of deviation 0.5, in all


def make(n_embd: int = 72, n_head: int = 2, **options) -> GPT:
    torch.manual_seed(1)
    config = dict(vocab_size=211, block_size=24, n_layer=2, bias=True) | options
    model = GPT(GPTConfig(n_embd=n_embd, n_head=n_head, **config)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(211, shape, generator=torch.Generator().manual_seed(2))


def through_cache(model: GPT, idx: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    cache = model.new_cache(len(idx))
    return torch.cat([model(part, cache=cache) for part in idx.split(pieces, 1)], 1)


def quick(model: GPT, weights: str, compiled: bool = True) -> GPT:
    model = copy.deepcopy(model)
    fast(model, weights, compiled)
    return model


def greedy(model: GPT, idx: torch.Tensor, n: int, **options) -> list[list[int]]:
    writing = steps(model, idx, n, lambda logits: logits.argmax(-1), **options)
    return [list(row) for row in zip(*(s.tolist() for s in writing), strict=True)]


# ------------------------------------------------------------------------------------ native steps


@needs_code
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(72, 2), (64, 1), (20, 4), (96, 6), (128, 2), (33, 3), (1, 1)])
@pytest.mark.parametrize("options", [dict(attn_logn="learned"), dict(bias=False, gelu="erf"),
                                     dict(attn_logn="fixed", tie_embeddings=False),
                                     dict(attn_logn="clipped", logn_base=4)], ids=str)
def test_in_fp32_a_step_is_that_of_model_py(shape, options, threads):
    model, idx = make(*shape, **options), tokens(3, 24)
    expected = model(idx)
    torch.set_num_threads(threads)
    try:
        for pieces in ([24], [1] * 24, [3, 1, 8, 12], [23, 1]):
            logits = through_cache(quick(model, "float32"), idx, pieces)
            assert (logits - expected).abs().max() < 1e-5 * max(1, expected.abs().max())
    finally:
        torch.set_num_threads(1)


@needs_code
@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("shape", [(72, 2), (64, 1), (20, 4), (128, 2)])
def test_in_fewer_bits_it_is_the_model_with_the_rounded_weights(weights, shape):
    """What is left is the rounding of activations and of the cache: small beside the logits."""
    model, idx = make(*shape), tokens(3, 24)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            if p.ndim == 2 and name not in ("wte.weight", "wpe.weight"):
                p.copy_(rounded(p, weights))
        plain.lm_head.weight = torch.nn.Parameter(rounded(model.lm_head.weight, weights))
        plain.wte.weight = torch.nn.Parameter(model.wte.weight.bfloat16().float())
    expected = plain(idx)
    for pieces in ([24], [3, 1, 8, 12]):
        error = through_cache(quick(model, weights), idx, pieces) - expected
        assert error.std() < (0.01 if weights == "bfloat16" else 0.02) * expected.std()


@needs_code
@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("rows", [2, 3, 5, 8, 13, FEW])
def test_a_row_gets_to_the_last_bit_what_it_gets_alone(weights, rows):
    model, idx = quick(make(), weights), tokens(rows, 6)
    cache, alone = model.new_cache(rows), [model.new_cache() for _ in range(rows)]
    for t in range(6):
        together = model(idx[:, t : t + 1], cache=cache)
        for i, own in enumerate(alone):
            assert torch.equal(model(idx[i : i + 1, t : t + 1], cache=own)[0], together[i])


@needs_code
@pytest.mark.parametrize("weights", KINDS)
def test_several_tokens_of_a_row_at_once_are_one_after_the_other(weights):
    """What lookup decoding rests on."""
    model, idx = quick(make(), weights), tokens(2, 24)
    one, several = (through_cache(model, idx, p) for p in ([1] * 24, [1, 7, 3, 13]))
    assert torch.equal(one, several)


@needs_code
def test_rows_at_different_positions():
    model, idx, lengths = make(attn_logn="learned"), tokens(4, 9), torch.tensor([1, 5, 9, 4])
    model = quick(model, "float32")
    window = Window(model, idx, lengths)
    window.append(tokens(4, 1))
    for i, n in enumerate(lengths):
        ids = torch.cat([idx[i, :n], tokens(4, 1)[i]])[None]
        assert torch.allclose(window.x[i], model.hidden(ids)[0, -1], atol=1e-5)


@needs_code
@pytest.mark.parametrize("weights", KINDS)
def test_ragged_rows_in_a_batch_are_what_they_are_alone_to_the_last_bit(weights):
    model, n_rows = quick(make(), weights), FEW + 3  # more than go through at once
    idx, lengths = tokens(n_rows, 9), torch.randint(1, 10, (n_rows,))
    window = Window(model, idx, lengths, context_keep=5)
    for step in range(20):  # across a cut of the window
        window.append(tokens(n_rows, 20)[:, step : step + 1])
    window.select(torch.arange(n_rows - 1, -1, -1))
    for row in (0, 7, FEW, FEW + 2):
        i = n_rows - 1 - row
        alone = Window(model, idx[i : i + 1, : lengths[i]], context_keep=5)
        for step in range(20):
            alone.append(tokens(n_rows, 20)[i : i + 1, step : step + 1])
        n = alone.n[0]
        assert n == window.n[row] and torch.equal(alone.tokens[0, :n], window.tokens[row, :n])
        assert torch.equal(alone.x[0], window.x[row])


@needs_code
@pytest.mark.parametrize("weights", KINDS)
def test_long_prompts_and_draws_in_a_batch_are_those_of_each_alone(weights):
    model, lengths = quick(make(block_size=100), weights), torch.tensor([3, 70, 33, 100])
    idx, options = tokens(4, 100), dict(top_k=20, temperature=1.3)
    writing = steps(model, idx, 50, Sampler([5, 6, 7, 8], **options), lengths=lengths)
    together = [list(row) for row in zip(*(s.tolist() for s in writing), strict=True)]
    for i, n in enumerate(lengths):
        alone = steps(model, idx[i : i + 1, :n], 50, Sampler([5 + i], **options))
        assert [int(id) for id in alone] == together[i]


@needs_code
def test_nothing_in_nothing_out():
    model = quick(make(), "int8")
    assert model.lm_head(torch.zeros(1, 0, 72)).shape == (1, 0, 211)
    assert model.lm_head(torch.zeros(0, 1, 72)).shape == (0, 1, 211)


@needs_code
@pytest.mark.parametrize("gain", [0.2, 5.0])
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_prompts_are_read_in_what_this_cpu_multiplies_fast(weights, gain, monkeypatch):
    monkeypatch.setattr("kit.device.bf16_gain", lambda: gain)
    model, idx = make(block_size=300), tokens(2, 290)
    changed, seen, real = quick(model, weights), [], F.scaled_dot_product_attention
    expected = model(idx)
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda q, *a, **k: (seen.append(q.dtype), real(q, *a, **k))[1])
    logits = through_cache(changed, idx, [290])
    assert seen == [torch.bfloat16 if gain > 1 else torch.float32] * 2
    assert logits.dtype == torch.float32
    assert (logits - expected).std() < 0.05 * expected.std()


@pytest.mark.parametrize("gain", [0.0, 5.0])
def test_without_a_compiler_too_many_tokens_meet_the_dtype_that_is_fast(gain, monkeypatch):
    monkeypatch.setattr("kit.device.bf16_gain", lambda: gain)
    model, seen, real = quick(make(), "bfloat16", compiled=False), set(), F.linear
    monkeypatch.setattr(F, "linear", lambda x, *a: (seen.add(x.dtype), real(x, *a))[1])
    model(tokens(1, 4))
    assert seen == {torch.float16}
    seen.clear()
    model(tokens(2, 20))
    assert seen == {torch.bfloat16 if gain else torch.float32}


@needs_code
@pytest.mark.parametrize("logn", ["off", "clipped", "learned"])
@pytest.mark.parametrize("keep", [None, 1, 23])
def test_text_far_past_the_window_is_that_of_model_py(logn, keep):
    model, idx, lengths = make(attn_logn=logn), tokens(3, 9), torch.tensor([9, 1, 4])
    options = dict(lengths=lengths, context_keep=keep, num_samples=2)
    text = greedy(quick(model, "float32"), idx, 120, **options)
    assert text == greedy(model, idx, 120, **options)


@needs_code
def test_the_cache_may_be_in_16_bits_or_not():
    model, idx = quick(make(), "float32"), tokens(2, 12)
    exact, near = (KVCache(2, 2, 12, dtype=d) for d in (torch.float32, torch.bfloat16))
    for t in range(12):
        a, b = (model(idx[:, t : t + 1], cache=c) for c in (exact, near))
        assert 0 < (a - b).abs().max() < 0.02
    assert quick(make(), "int4").new_cache().dtype == torch.int8


@needs_code
def test_two_python_threads_at_once():
    """Each call has the team for itself; the texts do not mix."""
    model, idx, got = quick(make(), "float32"), tokens(4, 6), {}
    expected = greedy(model, idx, 60)
    torch.set_num_threads(2)

    def work(i: int) -> None:
        got[i] = greedy(model, idx[i : i + 1], 60)[0]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
    finally:
        torch.set_num_threads(1)
    assert [got[i] for i in range(4)] == expected


@needs_code
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_threads_of_its_own():
    code = ("import os, torch\n"
            "from kit.kernels import fast\nfrom kit.writing.window import steps\n"
            "from model import GPT, GPTConfig\n"
            "torch.set_num_threads(2)\n"
            "m = GPT(GPTConfig(vocab_size=9, block_size=8, n_layer=1, n_head=1, n_embd=8))\n"
            "fast(m)\n"
            "def write(): return [int(i) for i in steps(m, torch.tensor([[1]]), 5,"
            " lambda l: l.argmax(-1))]\n"
            "a = write()\n"
            "pid = os.fork()\n"
            "if pid == 0: os._exit(0 if write() == a else 1)\n"
            "assert os.waitpid(pid, 0)[1] == 0\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=CLONE,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@needs_code
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("place", ["wpe.weight", "h.0.attn.c_attn.bias", "h.1.ln_2.weight"])
def test_what_is_not_finite_is_seen(weights, place, bad):
    model = make()
    with torch.no_grad():
        dict(model.named_parameters())[place][..., -1] = bad
    model = quick(model, weights)
    with pytest.raises(FloatingPointError):
        list(steps(model, tokens(1, 1), 4, Sampler([1])))


@needs_code
def test_ids_and_positions_that_cannot_be_are_refused():
    model = quick(make(), "float32")
    for id in (-1, 211, 2**40):
        cache = model.new_cache()
        with pytest.raises(IndexError):
            model.hidden(torch.tensor([[id]]), cache)
        assert cache.pos == 0
    cache = model.new_cache(1, 4)
    model.hidden(tokens(1, 4), cache)
    with pytest.raises(ValueError, match="room for 4"):
        model.hidden(tokens(1, 1), cache)
    for rows in (1, 3, 4):
        with pytest.raises(ValueError, match="a cache of 2 rows"):
            model.hidden(tokens(rows, 1), model.new_cache(2))


@needs_code
def test_ids_of_another_type_and_caches_of_another_layout():
    model, idx = quick(make(), "float32"), tokens(2, 6)
    expected = through_cache(model, idx, [1] * 6)
    assert torch.equal(through_cache(model, idx.int(), [1] * 6), expected)
    cache = model.new_cache(2)
    model(idx[:, :1], cache=cache)
    cache.trim(0)
    cache.k, cache.v = ([a.transpose(2, 3).contiguous().transpose(2, 3) for a in held]
                        for held in (cache.k, cache.v))
    logits = torch.cat([model(part, cache=cache) for part in idx.split(1, 1)], 1)
    assert torch.equal(logits, expected)


@needs_code
def test_a_fast_model_stays_where_it_is():
    """The native code knows the addresses of its weights."""
    model = quick(make(), "bfloat16")
    for move in (model.half, model.float, lambda: model.to("meta"), model.share_memory,
                 model.state_dict, lambda: model.load_state_dict({})):
        with pytest.raises(RuntimeError, match="a fast model"):
            move()
    for again in (model, GPT(model.config).to("meta")):
        with pytest.raises(ValueError, match="on the CPU"):
            fast(again)
    assert model(tokens(1, 3)).isfinite().all()


# ----------------------------------------------------------------------------------- edited models


class Patched:
    """Edits that people make in model.py, made in a model: each changes its forward pass."""

    def wider_mlp(model):
        for block in model.h:
            block.mlp.c_fc, block.mlp.c_proj = nn.Linear(72, 432), nn.Linear(432, 72)

    def deeper_mlp(model):
        for block in model.h:
            block.mlp.c_fc = nn.Sequential(block.mlp.c_fc, nn.Linear(288, 288))

    def rms_norm(model):
        for block in model.h:
            block.ln_1, block.ln_2 = nn.RMSNorm(72), nn.RMSNorm(72)

    def functional_norm(model):
        for block in model.h:
            block.forward = partial(one_norm, block)

    def qk_norm(model):
        for block in model.h:
            attend(block.attn, lambda q, k, v: (8 * F.normalize(q, dim=-1), F.normalize(k, dim=-1),
                                                v))

    def clamped_values(model):
        attend(model.h[1].attn, lambda q, k, v: (q, k, v.clamp(-2, 2)))

    def value_residual(model):
        attend(model.h[1].attn, lambda q, k, v: (q, k, v + 0.5 * k))

    def post_norm(model):
        for block in model.h:
            block.forward = partial(norm_after, block)

    def parallel_block(model):
        for block in model.h:
            block.forward = partial(side_by_side, block)

    def relu_squared(model):
        for block in model.h:
            mlp = block.mlp
            mlp.forward = lambda x, mlp=mlp: mlp.c_proj(F.relu(mlp.c_fc(x)).square())

    def scaled_embedding(model):
        model.wte.register_forward_hook(lambda m, args, out: 3 * out)

    def scaled_layer(model):
        forward = model.h[1].mlp.forward
        model.h[1].mlp.forward = lambda x: 1.02 * forward(x)

    def another_epsilon(model):
        model.ln_f.eps = 1e-3

    def alibi(model):
        biased(model, lambda ahead: -0.1 * ahead.float())

    def window_attention(model):
        biased(model, lambda ahead: torch.where(ahead < 8, 0.0, -torch.inf))

    def more_parameters(model):
        model.h[0].attn.gain = nn.Parameter(torch.tensor(1.5))
        forward = model.h[0].attn.forward
        model.h[0].attn.forward = lambda *args: model.h[0].attn.gain * forward(*args)

    def lora(model):
        class Adapted(nn.Linear):
            def forward(self, x):
                return super().forward(x) + 0.3 * x
        new = Adapted(72, 72)
        new.load_state_dict(model.h[0].attn.c_proj.state_dict())
        model.h[0].attn.c_proj = new


def one_norm(block, x, *rest):
    x = x + block.attn(F.rms_norm(x, (72,)), *rest)
    return x + block.mlp(F.rms_norm(x, (72,)))


def norm_after(block, x, *rest):
    x = block.ln_1(x + block.attn(x, *rest))
    return block.ln_2(x + block.mlp(x))


def side_by_side(block, x, *rest):
    return x + block.attn(block.ln_1(x), *rest) + block.mlp(block.ln_2(x))


def attend(attn, change) -> None:
    """Attention whose q, k, v are changed before they are used and stored."""
    def forward(x, pos, mask, store):
        B, T, C = x.shape
        q, k, v = (a.view(B, T, 2, -1).transpose(1, 2) for a in attn.c_attn(x).split(C, 2))
        q, k, v = change(q, k, v)
        k, v = store(k, v) if store else (k, v)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and T > 1)
        return attn.c_proj(y.transpose(1, 2).reshape(B, T, C))

    attn.forward = forward


def biased(model, bias) -> None:
    """Attention with a bias by distance, alike with and without a cache."""
    for block in model.h:
        def forward(x, pos, mask, store, attn=block.attn):
            B, T, C = x.shape
            q, k, v = (a.view(B, T, 2, -1).transpose(1, 2) for a in attn.c_attn(x).split(C, 2))
            k, v = store(k, v) if store else (k, v)
            ahead = pos.view(-1, 1, T, 1) - torch.arange(k.size(2))  # (1 or B, 1, T, S)
            hide = torch.where(ahead < 0, -torch.inf, bias(ahead))
            y = F.scaled_dot_product_attention(q, k, v, hide)
            return attn.c_proj(y.transpose(1, 2).reshape(B, T, C))

        block.attn.forward = forward


EDITS = [name for name in vars(Patched) if not name.startswith("_")]


@needs_code
@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_model_writes_what_its_own_forward_writes(edit, weights):
    """Not what native.cpp would make of it, which is believed only where both agree."""
    model, plain, idx = make(), make(), tokens(2, 9)
    for each in (model, plain):
        torch.manual_seed(3)
        getattr(Patched, edit)(each)
    said = fast(model, weights)
    native_step = edit == "wider_mlp"
    assert ("by model.py alone" in said) == (not native_step) and "\n" not in said
    assert isinstance(model.hidden, Step) == native_step
    if weights != "float32":
        round_linears(plain, weights)
    expected = plain(idx)
    error = max((through_cache(model, idx, pieces) - expected).abs().max() / expected.std()
                for pieces in ([9], [1] * 9, [3, 1, 5]))
    assert error < (0.15 if native_step and weights != "float32" else 1e-3)


@needs_code
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_model_is_left_alone_where_nobody_asked_for_fewer_bits(edit):
    if edit == "wider_mlp":
        return
    model = make()
    getattr(Patched, edit)(model)
    before = list(model.modules())
    said = fast(model, "bfloat16", asked=False)
    assert list(model.modules()) == before and "hidden" not in vars(model)
    assert said.startswith("weights in float32, by model.py alone") and "\n" not in said
    assert all(p.dtype == torch.float32 for p in model.parameters())


@needs_code
@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("shape", [(72, 2), (64, 1), (20, 4), (128, 2), (1, 1)])
@pytest.mark.parametrize("options", [dict(attn_logn="learned"), dict(bias=False, gelu="erf"),
                                     dict(attn_logn="fixed", tie_embeddings=False),
                                     dict(attn_logn="clipped", logn_base=4),
                                     dict(block_size=1), dict(block_size=2)], ids=str)
def test_the_model_as_it_is_agrees_with_native_code(shape, options, weights):
    said = fast(make(*shape, **options), weights, asked=False)
    assert said == f"weights in {weights}, native code"


@needs_code
@pytest.mark.parametrize("name", ["c_attn", "c_proj", "fc", "proj"])
def test_native_code_refuses_a_matrix_of_another_size(name):
    """Defence in depth: what `difference` would have to miss first."""
    model = quick(make(), "float32")
    wide = NativeLinear(nn.Linear(80, 90), "float32", CODE)
    field = {"c_attn": "attn", "c_proj": "proj", "fc": "fc", "proj": "out"}[name]
    setattr(model.hidden.layers[1], field, wide.struct)
    with pytest.raises(ValueError, match="another size"):
        model.hidden(tokens(1, 1), model.new_cache())


@needs_code
def test_embeddings_that_an_edit_has_untied_stay_two(monkeypatch):
    """What config.tie_embeddings says is not what model.py does, once somebody has edited it."""
    model = make()
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.wte.weight))
    plain, idx = copy.deepcopy(model), tokens(2, 9)
    fast(model, "bfloat16")
    assert (through_cache(model, idx, [1] * 9) - plain(idx)).std() < 0.02 * plain(idx).std()


@needs_code
def test_one_scale_for_all_heads_is_not_handed_to_native_code():
    model = make(attn_logn="learned")
    for block in model.h:
        block.attn.logn_scale = nn.Parameter(torch.full((1,), 0.3))
    assert "logn_scale is new" in fast(model, "float32")


@needs_code
def test_a_cache_of_other_layers_is_refused():
    model = quick(make(), "float32")
    with pytest.raises(ValueError, match="1 layers for 2"):
        model.hidden(tokens(1, 1), KVCache(1, 1, 24))


@needs_code
def test_the_trial_of_both_ways_leaves_no_trace():
    model, before = make(), torch.get_rng_state()
    fast(model, "int8")
    assert torch.equal(torch.get_rng_state(), before)
    assert model.new_cache().longest == 0


# ---------------------------------------------------------------------------------- other machines


@pytest.mark.slow
@needs_code
@pytest.mark.parametrize("machine", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_code_for_lesser_processors_gives_the_same(machine, tmp_path, monkeypatch):
    """Without AVX, with AVX2, with AVX-512 but no VNNI."""
    flags = native.processor()
    needed = {"x86-64": "", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}[machine]
    if needed not in flags:
        pytest.skip(f"this processor has no {needed}")
    native.compile_to(tmp_path / "code.so", native.compiler(), ([f"-march={machine}"],))
    code = native.load(tmp_path / "code.so")
    for weights in KINDS:
        model, idx = make(), tokens(9, 24)
        expected = through_cache(quick(model, weights), idx, [1, 2, 3, 18])
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda: (code, ""))
            logits = through_cache(quick(model, weights), idx, [1, 2, 3, 18])
        error = (logits - expected).std() / expected.std()
        assert error < (1e-6 if weights == "float32" else 0.02), weights


SANITIZED = """
import ctypes, sys
import torch
from kit.kernels import fast, native, step
from kit.kernels.leaves import NativeLinear
from model import GPT, GPTConfig
code = native.load(sys.argv[1])
native.library = lambda: (code, "")
torch.set_num_threads(2)
torch.manual_seed(0)
for weights in native.KINDS:
    for C, H, more in ((33, 3, {}), (64, 1, dict(bias=True)), (20, 4, dict(attn_logn="learned"))):
        model = GPT(GPTConfig(vocab_size=61, block_size=37, n_layer=2, n_head=H, n_embd=C, **more))
        for block in model.h:  # a width that is no multiple of anything
            block.mlp.c_fc = torch.nn.Linear(C, 45, bias=bool(more.get("bias")))
            block.mlp.c_proj = torch.nn.Linear(45, C, bias=bool(more.get("bias")))
        assert "native code" in fast(model, weights), weights
        for rows in (1, 3, 9, 32):
            cache = model.new_cache(rows)
            for T in (1, 1):
                model.hidden(torch.randint(61, (rows, T)), cache)
            cache.trim(torch.arange(rows) % 2 + 1)
            model.hidden(torch.randint(61, (rows, 1)), cache)
        cache = model.new_cache()
        for T in (5, 31, 1):
            model.logits(model.hidden(torch.randint(61, (1, T)), cache))
        for wrong in (61, -1, 2**40):
            try:
                model.hidden(torch.tensor([[wrong]]), model.new_cache())
                sys.exit("an id that cannot be was taken")
            except IndexError:
                pass
        wide = NativeLinear(torch.nn.Linear(700, 800), weights, code)
        model.hidden.layers[1].fc = wide.struct
        try:
            model.hidden(torch.tensor([[1]]), model.new_cache())
            sys.exit("a matrix of another size was taken")
        except ValueError:
            pass
    for n_in, n_out in ((1, 1), (31, 17), (100, 250)):
        linear = NativeLinear(torch.nn.Linear(n_in, n_out), weights, code)
        for exact in (False, True):
            linear.exact = exact
            for tokens in (1, 2, 5, 31):
                linear(torch.randn(tokens, n_in))
"""


@pytest.mark.slow
@needs_code
def test_native_code_under_sanitizers(tmp_path):
    """No write or read beyond what it was handed, and nothing that C++ leaves undefined."""
    compiler = native.compiler()
    found = [subprocess.run([*compiler, f"-print-file-name=lib{name}.so"], capture_output=True,
                            text=True).stdout.strip() for name in ("asan", "ubsan")]
    if not all(Path(path).is_absolute() for path in found):
        pytest.skip("this compiler has no sanitizers")
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
    native.compile_to(tmp_path / "code.so", compiler, ([*native.MACHINE[0], *flags],))
    (tmp_path / "run.py").write_text(SANITIZED)
    env = os.environ | {"LD_PRELOAD": " ".join(found), "PYTHONPATH": str(CLONE),
                        "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    done = subprocess.run([sys.executable, str(tmp_path / "run.py"), str(tmp_path / "code.so")],
                          cwd=CLONE, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@needs_code
def test_damaged_code_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setenv("CXX", f"env {native.compiler()[0]}")  # with an argument
    path = native.build()
    content = path.read_bytes()
    for harm in (lambda: os.truncate(path, 4096), lambda: os.truncate(path, 0),
                 lambda: path.write_bytes(b"junk"), path.unlink):
        path.write_bytes(content)
        assert native.compiled() == path == native.build()
        harm()
        assert native.compiled() is None
    path.write_bytes(b"junk")
    assert native.build().stat().st_size > 10_000 and native.compiled()
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.slow
@needs_code
def test_another_process_compiles_for_the_next_time(tmp_path, monkeypatch):
    clone = native.SOURCES[0].parent
    for name in ("native.py", *native.NAMES):
        (tmp_path / name).write_bytes((clone / name).read_bytes())
    monkeypatch.setattr(native, "SOURCES", [tmp_path / n for n in native.NAMES])
    monkeypatch.setattr(native, "FOLDER", tmp_path / "__pycache__")
    assert native.build_aside() and not native.build_aside()  # one is enough
    deadline = time.monotonic() + 60
    while not native.compiled() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert native.compiled() and not native.build_aside()


def test_where_nothing_can_be_written_the_library_does_it(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(native, "FOLDER", tmp_path / "file")
    native.library.cache_clear()
    try:
        code, why = native.library()
    finally:
        native.library.cache_clear()
    assert code is None and "file" in why and "\n" not in why


@pytest.mark.parametrize("compiler", ["false", "/nowhere/c++"])
def test_without_a_compiler_the_library_does_it_and_that_is_said(compiler, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    native.library.cache_clear()
    try:
        code, why = native.library()
    finally:
        native.library.cache_clear()
    assert code is None and compiler in why and "\n" not in why
    monkeypatch.setattr(native, "library", lambda: (None, why))
    model = make()
    assert "PyTorch's kernels" in fast(model, "float32") and compiler in fast(make(), "int8")
    assert greedy(model, tokens(1, 3), 9) == greedy(make(), tokens(1, 3), 9)


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(72, 2), (20, 4), (64, 1)])
def test_both_ways_stay_near_the_model(weights, shape, compiled):
    model, idx = make(*shape), tokens(3, 24)
    expected, changed = model(idx), quick(model, weights, compiled)
    for pieces in ([24], [1] * 24, [3, 1, 20]):
        assert (through_cache(changed, idx, pieces) - expected).abs().max() < ERROR[weights]
    assert (changed(idx) - expected).abs().max() < ERROR[weights]
    a, b = changed(idx, idx), model(idx, idx)
    assert a[1] == b[1] and abs(a[0] / b[0] - 1) < 1e-3


@pytest.mark.parametrize("compiled", WAYS)
def test_targets_without_any_and_none_real(compiled):
    model, idx = quick(make(), "int8", compiled), tokens(2, 8)
    loss, n = model(idx, torch.full_like(idx, -1))
    assert loss == 0 and n == 0


# ------------------------------------------------------------------------------------ quantization


@given(st.integers(1, 40), st.integers(1, 70), st.sampled_from([4, 8]), st.integers(0, 99))
def test_what_was_packed_is_unpacked(n_out, n_in, bits, seed):
    w = torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(seed))
    packed, scale = pack(w, bits)
    back = unpack(packed, scale, bits, (n_out, n_in))
    assert back.shape == w.shape
    assert packed.numel() == -(-n_out // 16) * 16 * -(-n_in // 32) * 32 * bits // 8
    assert (back - w).abs().max() <= w.abs().max() * (0.6 / 127 if bits == 8 else 0.2)
    again = unpack(*pack(back, bits), bits, (n_out, n_in))
    assert (again - back).abs().max() <= w.abs().max() * (0.6 / 127 if bits == 8 else 0.2)


def test_zeros_and_extremes():
    for bits in (4, 8):
        for value in (0.0, 1e-30, 1e30, -3.0):
            w = torch.full((16, 32), value)
            back = unpack(*pack(w, bits), bits, (16, 32))
            assert torch.allclose(back, w, rtol=0.01)


def test_four_bits_are_better_than_the_plain_rule():
    """Of several scales the best, so never worse than the one by the largest weight alone."""
    w = torch.randn(400, 32, generator=torch.Generator().manual_seed(3))
    q, scale = integers(w, 4)
    assert q.min() >= -8 and q.max() <= 7 and torch.equal(q, q.round())
    most, at = w.abs().max(-1, keepdim=True)
    plain = (w.gather(-1, at) / -8).bfloat16().float()
    error, by_rule = ((r - w).square().sum(-1) for r in (
        q * scale.float(), (w / plain).round().clamp(-8, 7) * plain))
    assert (error <= by_rule + 1e-6).all() and error.mean() < 0.93 * by_rule.mean()


@pytest.mark.slow
def test_rounding_a_trained_model_costs_little():
    """A model that has learned something: int8 within 0.2 % of its loss, int4 within 2 %."""
    text = (CLONE / "model.py").read_bytes()
    data = torch.tensor(list(text), dtype=torch.int64)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, block_size=64, n_layer=2, n_head=2, n_embd=64))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(300):
        at = torch.randint(len(data) - 65, (16, 1)) + torch.arange(65)
        loss, n = model(data[at[:, :-1]], data[at[:, 1:]])
        optimizer.zero_grad()
        (loss / n).backward()
        optimizer.step()
    rows = data[: 64 * 150].view(150, 64)

    @torch.no_grad()
    def mean(model: GPT) -> float:
        loss, n = model(rows[:, :-1], rows[:, 1:])
        return float(loss / n)

    before = mean(model.eval())
    assert before < 2.5  # bytes of Python at random: 5.5
    for weights, most in (("bfloat16", 0.001), ("int8", 0.002), ("int4", 0.02)):
        for compiled in (False, True) if CODE else (False,):
            assert abs(mean(quick(model, weights, compiled)) / before - 1) < most, weights


@needs_code
@pytest.mark.parametrize("n_layer", [1, 2])
@pytest.mark.parametrize("weights", KINDS)
def test_the_first_rows_of_a_larger_cache_are_a_cache(weights, n_layer):
    model = quick(make(n_layer=n_layer), weights)
    idx = tokens(2, 9)
    alone, larger = model.new_cache(2), model.new_cache(5)
    model.hidden(tokens(5, 1), larger)
    larger.trim(0)
    before = larger.k + larger.v
    for x in before:
        x.zero_()
    larger.k, larger.v = [x[:2] for x in larger.k], [x[:2] for x in larger.v]
    larger.batch_size = 2
    for part in idx.split([4, 1, 1, 3], 1):
        assert torch.equal(model.hidden(part, alone), model.hidden(part, larger))
    for x, y, z in zip(before, larger.k + larger.v, alone.k + alone.v, strict=True):
        assert x.data_ptr() == y.data_ptr()  # nothing was copied
        assert torch.equal(x[:2], z) and not x[2:].any()
