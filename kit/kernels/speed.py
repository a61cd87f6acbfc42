"""A trained GPT made fast on the CPU, in place: as fast as what model.py computes allows.

Two layers. Every nn.Linear, whatever the model, can hold its weights in fewer bits (leaves.py); the
model's own forward stays in charge. A model that computes what native.cpp computes also takes its
steps in one native call (step.py): that is checked, in shapes and in numbers, before it is done.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kit.kernels import native, step
from kit.kernels.leaves import (
    FEW,
    LibraryLinear,
    NativeLinear,
    linears_of,
    one_torch_thread,
)
from model import GPT, KVCache


def fast(model: GPT, weights: str = "float32", compiled: bool = True, asked: bool = True,
         exact: bool = False, unlike: str = "") -> str:
    """Change a model on the CPU, in place, for quick decoding -> a line that says what was done.

    weights: one of native.KINDS. Activations stay in fp32 outside of products in 16 bits or in
    integers; the cache of a checked model has the type of the weights (8 bits for int4), that of
    any other model is in fp32.
    compiled: False uses PyTorch's kernels, as on a machine without a compiler.
    asked: whether the user named this type; if not, a model that native.cpp does not compute is
    left as it is.
    exact: round only the weights and no activations. This costs a large model a third of its speed,
    and a small one, which is not bound by memory, nothing.
    unlike: a reason, already known, why native.cpp does not compute this model.
    """
    if any(isinstance(m, NativeLinear | LibraryLinear) for m in model.modules()) \
            or any(p.device.type != "cpu" for p in model.parameters()):
        raise ValueError("expected a GPT on the CPU that is not fast yet")
    code, why = native.library() if compiled else (None, "")
    model.eval().float().requires_grad_(False)
    unlike = unlike or (step.difference(model) if code else "")
    if unlike and not asked:
        return own_way("float32", unlike)
    linears = linears_of(model)
    quick = {linear: NativeLinear(linear, weights, code) if code else LibraryLinear(linear, weights)
             for _, _, linear in linears}  # one that is used in two places stays one
    for parent, name, linear in linears:
        setattr(parent, name, quick[linear])
    if code and not unlike:
        undo = step.install(model, "float32" if exact else weights, code)
        if unlike := step.disagreement(model):
            undo()
        elif not exact:
            step.round_activations(model)
    if unlike and not asked:
        for parent, name, linear in linears:
            setattr(parent, name, linear)
        return own_way("float32", unlike)
    model._apply = model.state_dict = model.load_state_dict = refuse  # leaves know addresses
    if unlike:
        model.hidden = on_one_thread(model.hidden)
        return own_way(weights, unlike)
    weights = "float16" if weights == "bfloat16" and not code else weights
    how = "native code" if code else "PyTorch's kernels" + (f", as {why}" if why else "")
    return f"weights in {weights}, {how}"


def refuse(*args: Any, **options: Any) -> None:
    raise RuntimeError("a fast model cannot be moved, converted, saved or loaded any more")


def on_one_thread(hidden: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`GPT.hidden` for a few tokens with native code's threads alone.

    Those of PyTorch spin for a while after each operator, and the two sets would wait for each
    other's processors hundreds of times a token.
    """
    def quiet(idx: Tensor, cache: KVCache | None = None) -> Tensor:
        if idx.numel() > FEW:
            return hidden(idx, cache)
        with one_torch_thread():
            return hidden(idx, cache)

    return quiet


def own_way(weights: str, unlike: str) -> str:
    return (f"weights in {weights}, by model.py alone, which is slower: {unlike}, so kit/kernels/"
            "native.cpp does not compute this model")
