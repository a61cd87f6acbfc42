"""kit/placing.py: a model in the precision that was asked for, by whatever kernels there are."""

from dataclasses import dataclass

import pytest
import torch

from kit.errors import UserError
from kit.kernels import native
from kit.kernels.leaves import NativeLinear, round_linears
from kit.placing import place
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


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_change_in_forward_that_text_would_lack_is_one_line(tiny, kernels):
    with pytest.raises(UserError, match="make the change in GPT.logits") as error:
        place(Softcap(tiny().config), CPU, Settings(kernels=kernels), pytest.fail)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("compile, kernels", [(False, "auto"), ("auto", "torch"), (False, "torch")])
@pytest.mark.parametrize("options", [dict(dtype="float32"), dict(dtype="bfloat16"),
                                     dict(quantize="int8"), dict(quantize="int4")], ids=str)
def test_without_own_kernels_it_is_the_plain_model_with_rounded_weights(
        tiny, compile, kernels, options):
    model, wanted = tiny(), tiny()
    said = place(model, CPU, Settings(**options, compile=compile, kernels=kernels), pytest.fail)
    weights = options.get("quantize") or options["dtype"]
    assert said == f"weights in {weights}, PyTorch's kernels"
    round_linears(wanted, weights)
    idx = torch.arange(8)[None]
    assert model(idx).equal(wanted(idx)) and "hidden" not in vars(model)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.skipif(CODE is None, reason=WHY)
def test_an_edited_model_is_said_once_and_holds_fewer_bits_if_asked(tiny):
    model = Scaled(tiny(n_embd=32).config)
    assert "by model.py alone" in place(model, CPU, Settings(), pytest.fail)
    assert not any(isinstance(m, NativeLinear) for m in model.modules())
    model = Scaled(tiny(n_embd=32).config)
    said = place(model, CPU, Settings(quantize="int8"), pytest.fail)
    assert "weights in int8, by model.py alone" in said
    assert sum(isinstance(m, NativeLinear) for m in model.modules()) == 9
