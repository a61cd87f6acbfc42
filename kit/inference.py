"""Where a trained model runs, and in how many bits."""

from collections.abc import Callable
from typing import Any

import torch

from kit.device import DTYPES, fast_dtype, name_of
from kit.errors import UserError
from kit.kernels import fast, native
from kit.kernels.leaves import round_linears
from kit.writing.recompute import astray, settle
from model import GPT


def kernels_of(s: Any) -> str:
    """The setting `kernels`; compile=False, as it was once called, means torch."""
    if s.compile is True and s.kernels == "torch":
        raise UserError("compile=True and kernels=torch: give one of them")
    return "torch" if s.compile is False else s.kernels


def place(model: GPT, device: torch.device, s: Any, note: Callable[[str], None],
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
    large = model.num_params() > 20e6  # a smaller one is read from the processor's cache
    asked = s.quantize if s.quantize != "none" else s.dtype
    auto = kernels_of(s) == "auto"
    weights = asked if asked != "auto" else "bfloat16" if large and auto else "float32"
    before = loss() if s.quantize != "none" else None
    if not auto or s.quantize == "none" and not large and native.build_aside():
        how = plain(model, weights)  # where it is built aside, 3 s: for the next text
    else:
        how = fast(model, weights, asked=asked != "auto", exact=not large, unlike=why)
    how += settle(model, why)
    if before and (after := loss()):
        note(f"{s.quantize}: loss {after:.4f} on a part of the validation split, in float32 "
             f"{before:.4f}: {100 * (after / before - 1):+.2f} %")
    return how


def plain(model: GPT, weights: str) -> str:
    """The model as model.py has it, by PyTorch's kernels; fewer bits only round its weights."""
    model.eval()
    if weights != "float32":
        round_linears(model, weights)
    return f"weights in {weights}, PyTorch's kernels"
