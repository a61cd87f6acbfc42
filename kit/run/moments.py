"""The state of optimizers as the named tensors of a checkpoint, and back."""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kit.errors import UserError


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    return {p: name for name, p in model.named_parameters()}


def state_tensors(optimizers: list[Optimizer], model: nn.Module) -> dict[str, Tensor]:
    """The optimizers' state as {parameter name.state name: tensor}, whatever groups there are."""
    names = names_of(model)
    return {f"{names[p]}.{key}": value for o in optimizers for p, state in o.state.items()
            for key, value in state.items()}


def keys_of(optimizer: Optimizer, ndim: int) -> set[str]:
    """What an optimizer keeps for a parameter of so many dimensions, as a step of one tells."""
    p = nn.Parameter(torch.zeros([1] * ndim))
    p.grad = torch.zeros_like(p)
    trial = object.__new__(type(optimizer))  # copy.copy would leave out what is its own
    vars(trial).update(vars(optimizer), state=defaultdict(dict),
                       param_groups=[{**optimizer.param_groups[0], "params": [p]}])
    trial.step()
    return set(trial.state[p])


def load_state(optimizers: list[Optimizer], model: nn.Module,
               tensors: dict[str, Tensor],
               shard: Callable[[Tensor, Tensor], Tensor] = lambda value, p: value) -> None:
    """Put back what `state_tensors` gave; UserError unless each parameter has all of it.

    shard: makes a whole tensor one that is sharded as a parameter is.
    """
    names, expected = names_of(model), {}
    for o in optimizers:
        params = [p for g in o.param_groups for p in g["params"]]
        keys = {n: keys_of(o, n) for n in {p.ndim for p in params}}
        expected |= {f"{names[p]}.{key}": (o, p, key) for p in params for key in keys[p.ndim]}
    if not tensors:  # no update was made
        return
    if different := expected.keys() ^ tensors.keys():
        raise UserError(f"the optimizer's state does not fit the model: {min(different)} is "
                        f"{'missing' if min(different) in expected else 'unknown'}")
    for key, (o, p, name) in expected.items():
        value = tensors[key]
        if value.shape not in (p.shape, ()) or value.dtype != torch.float32:
            raise UserError(f"the optimizer's state does not fit the model: {key} is "
                            f"{tuple(value.shape)} of {value.dtype}, expected {tuple(p.shape)} of "
                            "float32")
        number = value.ndim == 0 and p.ndim > 0  # as AdamW's count of steps
        value = value.to("cpu" if number and p.device.type == "mps" else p.device)
        o.state[p][name] = value if number else shard(value, p)
