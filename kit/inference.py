"""Where a trained model runs, and in how many bits."""

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from kit.device import DTYPES, Kernels, fast_dtype, install_kernels, name_of, wanted_kernels
from kit.errors import UserError
from kit.writing.recompute import astray, settle
from model import GPT


class Settings(Protocol):
    """What is read of the settings of sample.py and extras.serve, which explain them."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    quantize: Literal["none", "int8", "int4"]
    kernels: Literal["auto", "torch"]
    compile: Literal["auto"] | bool


def kernels_of(s: Settings) -> str:
    """The setting `kernels`; compile=False, as it was once called, means torch."""
    if s.compile is True and s.kernels == "torch":
        raise UserError("compile=True and kernels=torch: give one of them")
    return "torch" if s.compile is False else s.kernels


def install(s: Settings, device: torch.device, note: Callable[[str], None]) -> Kernels:
    """Until the end of `with`, the kernels that the settings mean."""
    return install_kernels(wanted_kernels(kernels_of(s), device), note)


def prepare(model: GPT, device: torch.device, s: Settings, note: Callable[[str], None],
            loss: Callable[[], float | None] = lambda: None) -> str:
    """Move a model to the device, in the precision that s.dtype, s.quantize and s.kernels mean.

    Returns what that is. loss: that of the model as it is, to tell what rounding costs.
    """
    why = astray(model)  # in fp32, as it was loaded: 16 bits would differ by their rounding
    if device.type != "cpu" or s.dtype == "float16":
        if s.quantize != "none" or s.compile is True:
            raise UserError(f"quantize={s.quantize}, compile={s.compile}: for --device=cpu, "
                            f"not {device.type}, and without --dtype=float16")
        model.to(device, fast_dtype(device) if s.dtype == "auto" else DTYPES[s.dtype]).eval()
        return name_of(next(model.parameters()).dtype) + settle(model, why)
    before = loss() if s.quantize != "none" else None
    how = on_cpu(model, s, why) + settle(model, why)
    if before and (after := loss()):
        note(f"{s.quantize}: loss {after:.4f} on a part of the validation split, in float32 "
             f"{before:.4f}: {100 * (after / before - 1):+.2f} %")
    return how


def on_cpu(model: GPT, s: Settings, unlike: str) -> str:
    """Make a model on the CPU as fast as kit/kernels can; PyTorch's kernels only round its weights.

    unlike: why it is known beforehand that native code does not compute this model.
    """
    asked = s.quantize if s.quantize != "none" else s.dtype
    model.eval()
    own = bool(wanted_kernels(kernels_of(s), torch.device("cpu")))
    large = model.num_params() > 20e6  # a smaller one is read from the processor's cache
    weights = asked if asked != "auto" else "bfloat16" if large and own else "float32"
    if own:
        from kit.kernels.native import build_aside
        from kit.kernels.speed import fast

        # where code is built aside, 3 s, it is for the next text
        if large or s.quantize != "none" or not build_aside():
            return fast(model, weights, asked=asked != "auto", exact=not large, unlike=unlike)
    if weights != "float32":
        from kit.kernels.leaves import round_linears

        round_linears(model, weights)
    return f"weights in {weights}, PyTorch's kernels"
