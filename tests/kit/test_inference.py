"""kit/inference.py: a model in the precision that was asked for, by whatever kernels there are."""

import copy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kit.errors import UserError
from kit.inference import prepare
from kit.kernels import native
from kit.kernels.leaves import NativeLinear, round_linears
from kit.writing.recompute import astray, settle
from kit.writing.window import steps
from model import GPT

CPU = torch.device("cpu")
CODE, WHY = native.library()


@dataclass
class Settings:
    dtype: str = "auto"
    quantize: str = "none"
    kernels: str = "auto"
    compile: object = "auto"


class Softcap(GPT):
    def forward(self, idx, targets=None, cache=None):
        out = super().forward(idx, targets, cache)
        return out if targets is not None else 30 * torch.tanh(out / 30)


class Scaled(GPT):
    def hidden(self, idx, cache=None):
        return 2 * super().hidden(idx, cache)


class Mixing(GPT):
    """Each token's embedding is added to that of the one before it, which no cache knows."""

    def layers(self, idx, cache=None):
        for x in super().layers(idx, cache):
            yield x + F.pad(x, (0, 0, 1, -1))


class HalfWindow(GPT):
    """A window of attention that only prompts and training know: steps see all."""

    def __init__(self, config, init_std=0.02):
        super().__init__(config, init_std)
        for block in self.h:
            block.attn.forward = partial(in_window, block.attn, block.attn.forward)


def in_window(attn, forward, x, pos, mask, store):
    T = x.size(1)
    if T == 1:
        return forward(x, pos, mask, store)
    near = torch.ones(T, T, dtype=torch.bool).tril().triu(-2)
    return forward(x, pos, near if mask is None else mask, store)


class Forgetful(GPT):
    def hidden(self, idx, cache=None):
        return super().hidden(idx)


class Raising(GPT):
    def hidden(self, idx, cache=None):
        assert cache is None, "no caches here"
        return super().hidden(idx)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kind", [Softcap, Mixing, HalfWindow, Forgetful, Raising])
def test_what_a_cache_cannot_follow_writes_each_token_from_the_whole_text(tiny, kernels, kind):
    torch.manual_seed(0)
    model = kind(tiny().config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8)
    plain = copy.deepcopy(model).eval()
    said = prepare(model, CPU, Settings(kernels=kernels), pytest.fail)
    assert ", each token from the whole text, which is slower: " in said and "\n" not in said
    lengths, idx = torch.tensor([1, 5, 3]), torch.randint(11, (3, 5))
    rows = list(steps(model, idx, 20, lambda logits: logits.argmax(-1), lengths=lengths))
    for row, n in enumerate(lengths.tolist()):
        seen = idx[row, :n].tolist()
        for ids in rows:
            with torch.no_grad():
                assert int(plain(torch.tensor([seen]))[0, -1].argmax()) == int(ids[row])
            seen = [*seen, int(ids[row])]
            seen = seen[-4:] if len(seen) > 8 else seen


@pytest.mark.parametrize("kind", [Softcap, Mixing, HalfWindow, Forgetful, Raising])
def test_a_large_model_is_judged_by_a_narrow_one(tiny, kind, monkeypatch):
    for c in (GPT, kind):
        model, before = c(tiny(block_size=40, n_layer=3).config), torch.get_rng_state()
        monkeypatch.setattr(model, "num_params", lambda: 10**9)
        assert bool(astray(model)) == (c is kind)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_is_as_it_was_is_left_alone(tiny):
    for options in (dict(), dict(attn_logn="learned"), dict(block_size=1), dict(block_size=2)):
        model = tiny(**options)
        assert settle(model) == "" and not {"hidden", "logits", "layers"} & vars(model).keys()


@pytest.mark.parametrize("compile, kernels", [(False, "auto"), ("auto", "torch"), (False, "torch")])
@pytest.mark.parametrize("options", [dict(dtype="float32"), dict(dtype="bfloat16"),
                                     dict(quantize="int8"), dict(quantize="int4")], ids=str)
def test_without_own_kernels_it_is_the_plain_model_with_rounded_weights(
        tiny, compile, kernels, options):
    model, wanted = tiny(), tiny()
    said = prepare(model, CPU, Settings(**options, compile=compile, kernels=kernels), pytest.fail)
    weights = options.get("quantize") or options["dtype"]
    assert said == f"weights in {weights}, PyTorch's kernels"
    round_linears(wanted, weights)
    idx = torch.arange(8)[None]
    assert model(idx).equal(wanted(idx)) and "hidden" not in vars(model)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_alone_lead_nothing_astray(tiny, dtype):
    assert "whole text" not in prepare(tiny(), CPU, Settings(dtype=dtype), pytest.fail)


def test_compile_and_kernels_that_fight_are_refused(tiny):
    with pytest.raises(UserError, match="compile=True and kernels=torch"):
        prepare(tiny(), CPU, Settings(compile=True, kernels="torch"), pytest.fail)


@pytest.mark.skipif(CODE is None, reason=WHY)
def test_an_edited_model_is_said_once_and_holds_fewer_bits_if_asked(tiny):
    model = Scaled(tiny(n_embd=32).config)
    assert "by model.py alone" in prepare(model, CPU, Settings(), pytest.fail)
    assert not any(isinstance(m, NativeLinear) for m in model.modules())
    model = Scaled(tiny(n_embd=32).config)
    said = prepare(model, CPU, Settings(quantize="int8"), pytest.fail)
    assert "weights in int8, by model.py alone" in said
    assert sum(isinstance(m, NativeLinear) for m in model.modules()) == 9


def test_a_compiled_model_is_tried_as_it_is_written(tiny, monkeypatch):
    """At the end of a training on a GPU: compiled, forward rounds in another way."""
    model = tiny()
    monkeypatch.setattr(model, "_compiled_call_impl", lambda *args: pytest.fail("compiled"))
    assert settle(model) == ""
