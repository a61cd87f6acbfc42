"""Where a trained model runs, and in how many bits."""

from collections.abc import Callable
from typing import Any

import torch

from kit import native
from kit.device import DTYPES, fast_dtype, name_of
from kit.errors import UserError
from kit.fast import fast
from model import GPT


def place(model: GPT, device: torch.device, s: Any, note: Callable[[str], None],
          loss: Callable[[], float | None] = lambda: None) -> str:
    """Move a model to the device, in the precision that s.dtype, s.quantize and s.compile mean.

    Returns what that is. loss: that of the model as it is, to tell what rounding costs.
    """
    if device.type != "cpu" or s.dtype == "float16":
        if s.quantize != "none" or s.compile is True:
            raise UserError(f"quantize={s.quantize}, compile={s.compile}: for --device=cpu, "
                            f"not {device.type}, and without --dtype=float16")
        model.to(device, fast_dtype(device) if s.dtype == "auto" else DTYPES[s.dtype]).eval()
        return name_of(model.wte.weight.dtype)
    large = model.num_params() > 20e6  # a smaller one is read from the processor's cache
    weights = s.dtype if s.dtype != "auto" else "bfloat16" if large else "float32"
    if s.quantize == "none":
        late = s.compile == "auto" and not large and native.build_aside()  # 3 s: for the next text
        return fast(model, weights, bool(s.compile) and not late)
    before = loss()
    how = fast(model, s.quantize, s.compile)
    if before and (after := loss()):
        note(f"{s.quantize}: loss {after:.4f} on a part of the validation split, in float32 "
             f"{before:.4f}: {100 * (after / before - 1):+.2f} %")
    return how
