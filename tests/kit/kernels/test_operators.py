"""kit/kernels/operators.py: under PyTorch's own names, and gone again when told so."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.kernels.operators import ChunkedCrossEntropy, install, take_loss
from model import GPT, GPTConfig


@pytest.fixture(autouse=True)
def installed():
    with install(warn=pytest.fail) as kernels:
        yield kernels


def make(**changes) -> GPT:
    torch.manual_seed(0)
    values = dict(vocab_size=61, block_size=16, n_layer=2, n_head=2, n_embd=32)
    return GPT(GPTConfig(**values | changes))


def tokens(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(61, (rows, 16), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------- the handle


def test_restoring_brings_back_the_bits_of_pytorch(installed):
    x = torch.randn(40, 40).bfloat16()
    q = torch.randn(1, 2, 16, 8).bfloat16()

    def results() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [F.dropout(x, 0.5, True), F.scaled_dot_product_attention(q, q, q, is_causal=True)]

    ours = results()
    installed.restore()
    theirs = results()
    assert installed.names == [] and not torch.equal(ours[0], theirs[0])
    with install():
        assert all(map(torch.equal, results(), ours))
    assert all(map(torch.equal, results(), theirs))


def test_what_torch_refuses_is_one_line_and_its_own_kernel_stays(installed, monkeypatch):
    installed.restore()
    said, real = [], torch.library.Library.impl

    def refuse(self, operator, *args):
        if operator == "dropout":
            raise RuntimeError("not\nthis time")
        return real(self, operator, *args)

    monkeypatch.setattr(torch.library.Library, "impl", refuse)
    with install(warn=said.append) as kernels:
        assert kernels.names == ["attention"]
    assert len(said) == 1 and "dropout stays PyTorch's own" in said[0] and "\n" not in said[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_kernel_does_not_expect_is_pytorchs_to_the_last_bit(dtype, installed):
    q, k = torch.randn(1, 2, 7, 8, dtype=dtype), torch.randn(1, 2, 9, 8, dtype=dtype)
    mask = torch.rand(7, 9) > 0.3

    def results() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [F.dropout(q, 0.5, True), F.scaled_dot_product_attention(q, k, k, mask),
                F.scaled_dot_product_attention(q, k, k, mask, 0.2),
                F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], is_causal=True, scale=0.1,
                                               enable_gqa=True)]

    ours = results()
    installed.restore()
    assert all(map(torch.equal, ours, results()))


@pytest.mark.parametrize("change", [dict(scale=0.3), dict(enable_gqa=True), dict(mask=True),
                                    dict(long=True)], ids=str)
def test_unusual_attention_in_bf16_is_right(change):
    q = torch.randn(2, 4, 5, 8)
    k = torch.randn(2, 2 if "enable_gqa" in change else 4, 9 if "long" in change else 5, 8)
    options = {n: v for n, v in change.items() if n in ("scale", "enable_gqa")}
    mask = torch.randn(5, k.size(2)) if "mask" in change else None
    want = F.scaled_dot_product_attention(q, k, k, mask, is_causal=mask is None, **options)
    half = [x.bfloat16() for x in (q, k, k)]
    got = F.scaled_dot_product_attention(*half, mask if mask is None else mask.bfloat16(),
                                         is_causal=mask is None, **options)
    torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.05)


# ----------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("T, S, masked", [(16, 16, False), (5, 16, True), (1, 16, False),
                                          (256, 256, False), (600, 600, False)])
def test_attention_by_products_is_that_of_the_fused_kernel(T, S, masked):
    """The bf16 path of a CPU against fp32: same values within bf16, same gradients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8).bfloat16() for n in (T, S, S))
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T) if masked else None
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        y = F.scaled_dot_product_attention(*leaves, mask, is_causal=not masked and T > 1)
        assert y.dtype == dtype
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.05)


def test_attention_dropout_acts_on_each_path():
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (torch.randn(1, 2, 16, 8, dtype=dtype) for _ in range(3))
        assert not torch.equal(*(
            F.scaled_dot_product_attention(q, k, v, None, p, True) for p in (0.5, 0.0)))


# ------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("shape", [(7,), (3, 5, 11), (64, 129)])
@pytest.mark.parametrize("p", [1e-4, 0.2, 0.5, 0.999])
def test_dropout_from_random_bytes(shape, p):
    """Kept values are scaled so that the mean stays, as often as asked, and gradients follow."""
    torch.manual_seed(3)
    x = torch.ones(400, *shape, dtype=torch.bfloat16, requires_grad=True)
    y = F.dropout(x, p, True)
    y.sum().backward()
    assert y.shape == x.shape and y.dtype == x.dtype and torch.equal(x.grad, y)
    share = (y == 0).float().mean().item()
    n, want = y.numel(), min(max(round(256 * p), 1), 255) / 256
    assert abs(want - p) <= 1 / 256 and abs(share - want) < 5 * math.sqrt(want * (1 - want) / n)
    kept = y[y != 0].float()
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - want)), rtol=4e-3, atol=0)
    torch.manual_seed(3)
    assert torch.equal(F.dropout(x, p, True), y) and not torch.equal(F.dropout(x, p, True), y)
    assert F.dropout(x, p, False) is x and F.dropout(x, 0.0, True) is x


def test_dropout_of_neighbours_is_independent():
    torch.manual_seed(0)
    kept = (F.dropout(torch.ones(2**20, dtype=torch.bfloat16), 0.25, True) != 0).double()
    for lag in (1, 2, 7, 8, 9, 64):
        both = (kept[lag:] * kept[:-lag]).mean().item()
        assert abs(both - 0.75**2) < 5e-3, lag


def test_dropout_in_fp32_is_the_librarys():
    x = torch.randn(50, 7)
    torch.manual_seed(1)
    want = F.dropout(x, 0.3, True)
    torch.manual_seed(1)
    assert torch.equal(F.dropout(x, 0.3, True), want)


# ---------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("rows", [1, 7, 1024])
def test_chunked_loss_and_its_gradients_are_those_of_the_library(rows, monkeypatch):
    monkeypatch.setattr(ChunkedCrossEntropy, "rows", lambda *_: rows)
    torch.manual_seed(0)
    x, w = torch.randn(40, 8, requires_grad=True), torch.randn(13, 8, requires_grad=True)
    y = torch.randint(-1, 13, (40,))
    ours = ChunkedCrossEntropy.apply(x, w, y, True)
    got = torch.autograd.grad(ours * 0.3, (x, w))
    theirs = F.cross_entropy(x @ w.T, y, ignore_index=-1, reduction="sum")
    want = torch.autograd.grad(theirs * 0.3, (x, w))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(got, want)
    with torch.no_grad():
        torch.testing.assert_close(ChunkedCrossEntropy.apply(x, w, y, False), theirs)


def test_full_logits_never_exist(monkeypatch):
    monkeypatch.setattr(ChunkedCrossEntropy, "rows", lambda *_: 8)
    largest = 0
    real = F.log_softmax

    def spy(logits, **kwargs):
        nonlocal largest
        largest = max(largest, len(logits))
        return real(logits, **kwargs)

    monkeypatch.setattr(F, "log_softmax", spy)
    model = make()
    assert take_loss(model)
    model(tokens(2), tokens(2, seed=2))[0].backward()
    assert largest == 8


def test_chunks_keep_the_logits_small_and_fp32_as_it_was():
    """Bits of an fp32 run depend on its chunks, so they never change on a CPU."""
    for V in (65, 4096, 50257):
        assert ChunkedCrossEntropy.rows("cpu", torch.float32, V) == 256
        assert ChunkedCrossEntropy.rows("cpu", torch.bfloat16, V) * V <= max(2**20, 256 * V)
        assert ChunkedCrossEntropy.rows("cuda", torch.bfloat16, V) == 2048


def test_the_loss_is_taken_where_it_is_that_of_the_model():
    for options in (dict(), dict(tie_embeddings=False), dict(bias=True), dict(n_embd=2, n_head=1)):
        model, plain = make(**options), make(**options)
        assert take_loss(model)
        for m in (model, plain):
            m(tokens(2), tokens(2, seed=2))[0].backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


class Softcap(GPT):
    def logits(self, x):
        return 30 * torch.tanh(super().logits(x) / 30)


class Bias(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def logits(self, x):
        return super().logits(x) + self.bias


class ZLoss(GPT):
    def loss_of(self, x, targets):
        z = self.logits(x).logsumexp(-1)
        return super().loss_of(x, targets) + 1e-4 * z.square().sum()


class Deeper(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, config.vocab_size))


class Factorised(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.down = nn.Linear(32, 8)
        self.lm_head = nn.Linear(8, config.vocab_size, bias=False)

    def logits(self, x):
        return self.lm_head(self.down(x))


@pytest.mark.parametrize("kind", [Softcap, Bias, ZLoss, Deeper, Factorised])
def test_an_edited_loss_or_exit_keeps_the_models_own(kind):
    torch.manual_seed(0)
    model, before = kind(make().config), torch.get_rng_state()
    assert not take_loss(model) and "loss" not in vars(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
