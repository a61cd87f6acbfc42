"""Reading a model back: its architecture and weights, which are not believed until they fit."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from kit.device import Undrawn, without_memory
from kit.errors import UserError
from kit.files import read_json, size_of
from kit.run.store import WEIGHTS, check
from kit.settings import fits
from model import GPT, GPTConfig


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """On the CPU. UserError for a file that is not whole safetensors."""
    try:
        return load_file(path)
    except (SafetensorError, ValueError) as e:
        raise UserError(f"{path}: damaged: {e}") from None


def shapes_of(path: Path, leave_out: re.Pattern | None = None) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a file, by its header alone; UserError unless of real numbers.

    leave_out: the names of what is not looked at.
    """
    size_of(path)
    try:
        with safe_open(path, "pt") as f:
            slices = {name: f.get_slice(name) for name in f.keys()
                      if not (leave_out and leave_out.fullmatch(name))}
            odd = {s.get_dtype() for s in slices.values()} - {"F32", "F16", "BF16", "F64"}
            if odd:
                raise UserError(f"{path}: holds tensors of type {min(odd)}, which no model has")
            return {name: tuple(s.get_shape()) for name, s in slices.items()}
    except (SafetensorError, ValueError) as e:
        raise UserError(f"{path}: damaged: {e}") from None


def load_config(folder: Path) -> GPTConfig:
    """The architecture of a checkpoint; fields that an older one lacks take their defaults."""
    path, hints = folder / "model.json", get_type_hints(GPTConfig)
    values = {k: v for k, v in read_json(path).items() if k not in ("format", "seal")}
    for name, value in values.items():
        if name not in hints:  # another version's
            raise UserError(f"{path}: unknown field {name}")
        if not fits(value, hints[name]) or (isinstance(value, int) and value >= 2**31):
            raise UserError(f"{path}: {name} is {value!r:.50}")
    try:
        return GPTConfig(**values)
    except ValueError as e:
        raise UserError(f"{path}: {e}") from None


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a model: parameters, each once, and the numbers in its buffers.

    A model.py as it comes has no buffers; one that is edited may have some that training changes.
    """
    kept = set(model.state_dict())  # not those with persistent=False
    return dict(model.named_parameters()) | {
        name: b for name, b in model.named_buffers() if name in kept and b.is_floating_point()}


def shapes_of_model(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the GPT that model.py makes of it, from one without memory."""
    return {name: tuple(t.shape) for name, t in tensors_of(without_memory(config)).items()}


def refuse_lie(config: GPTConfig, path: Path) -> None:
    """UserError where an architecture is not that of a file of weights: before memory is taken."""
    theirs = shapes_of(path)
    if config.n_layer > 1000:  # to describe a model of so many would take minutes
        raise UserError(f"{path}: does not fit the model: {config.n_layer} layers; 1,000 are read")
    try:
        ours = shapes_of_model(config)  # what else is in the file may belong to an edited train.py
        refuse_difference({n: shape for n, shape in theirs.items() if n in ours}, ours, path)
    except RuntimeError as e:
        if "overflow" in str(e):  # more numbers than 64 bits count
            raise UserError(f"{path}: does not fit the model: {' '.join(str(e).split())[:150]}"
                            ) from e  # else an edited model that cannot be made without memory


def refuse_difference(theirs: dict[str, tuple[int, ...]], ours: dict[str, tuple[int, ...]],
                      path: Path) -> None:
    """UserError unless a file has the model's names and shapes."""
    if different := theirs.items() ^ ours.items():
        name = min(different)[0]
        raise UserError(f"{path}: does not fit the model: {name} is {theirs.get(name, 'absent')}, "
                        f"the model's is {ours.get(name, 'absent')}")


def positional(config: GPTConfig) -> set[str]:
    """The names of the parameters that have a row for each position: those that grow with it."""
    longer = replace(config, block_size=config.block_size + 1)
    try:
        shapes, others = shapes_of_model(config), shapes_of_model(longer)
    except RuntimeError:  # an edited model that cannot be made without memory
        return set()
    return {name for name, _ in shapes.items() ^ others.items()}


def load_weights(model: GPT, path: Path, extend: str | None = None, crop: bool = False) -> None:
    """Copy a model.safetensors into a model of exactly its names and shapes.

    crop, extend: the model may have fewer positions, or more, made as `extend` says.
    """
    mine, theirs, resized = tensors_of(model), shapes_of(path), set()
    for name in positional(model.config) & theirs.keys() if crop or extend else ():
        held, size = theirs[name], tuple(mine[name].shape)
        if not isinstance(mine[name], nn.Parameter):  # a table, as its constructor makes it
            del mine[name], theirs[name]
        elif held[1:] == size[1:] and (crop and held[0] > size[0] or extend and held[0] < size[0]):
            theirs[name] = size
            resized.add(name)
    refuse_difference(theirs, {n: tuple(t.shape) for n, t in mine.items()}, path)
    tensors = load_tensors(path)
    if resized:
        from kit.finetune import resize
    for name in resized:
        tensors[name] = resize(tensors[name].float(), len(mine[name]), extend)
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])


def load_model(folder: Path) -> tuple[GPT, dict[str, Any], dict[str, Any]]:
    """A checkpoint folder -> the model on the CPU, its tokenizer as JSON, its state."""
    state = check(folder, WEIGHTS)
    config, path = load_config(folder), folder / "model.safetensors"
    refuse_lie(config, path)
    with Undrawn():  # what would be drawn is overwritten; of 124 M numbers that takes 0.7 s
        model = GPT(config)
    load_weights(model, path)
    return model, read_json(folder / "tokenizer.json"), state
