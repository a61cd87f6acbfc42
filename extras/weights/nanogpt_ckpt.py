"""Convert nanoGPT's ckpt.pt into a checkpoint folder, as train.py writes one.

A .pt file is a pickle, and to open one is to run it. So this is the only place that does, when it
is asked to by name, with torch's unpickler that builds tensors and plain values only; and of what
comes out nothing is believed but the architecture and tensors of its names and shapes.
"""

import math
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.prepare import Parser, tell
from kit.errors import UserError
from kit.files import digest, size_of
from kit.hf.gpt2 import layers_in, shapes_with_biases
from kit.hf.importing import (
    MASK,
    finite,
    guess_tokenizer,
    next_step,
    refuse_edited_model,
    refuse_out_dir,
    save,
)
from model import GPTConfig

SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
PREFIXES = ("_orig_mod.", "module.", "transformer.")  # of compile, DDP, nanoGPT's ModuleDict
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def convert(source: Path, out_dir: Path, tokenizer: str | None = None, gelu: str = "erf",
            overwrite: bool = False) -> None:
    """Write the weights of a ckpt.pt to out_dir. gelu: "tanh" for nanoGPT before its nn.GELU."""
    refuse_out_dir(out_dir, overwrite)
    args, weights = read(source)
    made = guess_tokenizer(tokenizer, args["vocab_size"], source)
    tied = "lm_head.weight" not in weights or torch.equal(
        weights["lm_head.weight"], weights["wte.weight"])
    if tied:
        weights.pop("lm_head.weight", None)
    else:
        tell("the output head is not the token embedding: kept as one of its own")
    config = GPTConfig(**args, tie_embeddings=tied, gelu=gelu)
    refuse_edited_model(config, source)
    about = {"from": "nanoGPT's ckpt.pt", "file": source.name, "sha256": digest(source)}
    save(out_dir, config, weights, made, about, tell, overwrite)
    tell(next_step(out_dir))


# ------------------------------------------------------------------------------------- the .pt file


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Architecture, and the weights by our names; UserError for what is no nanoGPT's."""
    checkpoint = unpickle(path)
    if not isinstance(checkpoint, dict) or not {"model", "model_args"} <= checkpoint.keys():
        raise UserError(f"{path}: no checkpoint of nanoGPT, which is a dict with model and "
                        "model_args; other files are for their own importers")
    args, weights = architecture(path, checkpoint["model_args"]), {}
    if not isinstance(checkpoint["model"], dict):
        raise UserError(f"{path}: its model is of type {type(checkpoint['model']).__name__}, "
                        "expected a dict of tensors")
    for given, tensor in checkpoint["model"].items():
        if not isinstance(given, str):
            raise UserError(f"{path}: its model has the name {shown(given)}, expected text")
        name = our_name(given)
        if MASK.fullmatch(name):
            continue
        sound = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype in DTYPES and (
            tensor.layout == torch.strided and tensor.device.type == "cpu")
        if not sound:
            raise UserError(f"{path}: {given!s:.80} is no plain tensor of real numbers")
        if name in weights:
            raise UserError(f"{path}: holds {name:.80} twice")
        weights[name] = tensor.detach()
    refuse_misfit(path, args, weights)
    return args, {name: finite(path, name, w) for name, w in weights.items()}


def unpickle(path: Path) -> Any:
    """What torch's restricted unpickler makes of a file, with its tensors left on the disk."""
    size_of(path)
    if not stored(path):
        raise UserError(f"{path}: no whole file of torch.save, which is a zip archive; copy it "
                        "again, or save it anew with PyTorch 1.6 or later")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except MemoryError:
        raise
    except Exception as e:  # a broken or hostile pickle fails in every way there is
        why = re.sub(r"\s+", " ", str(e)).strip()
        banned = re.search(r"(?:Unsupported (?:global: GLOBAL|class)|GLOBAL) ([\w.]+)", why)
        why = f"it asks for {banned[1]}" if banned else f"{type(e).__name__}: {why:.120}"
        raise UserError(f"{path}: damaged, or holds more than tensors and plain values ({why}); "
                        "nothing of it was run; give a ckpt.pt as nanoGPT's train.py saves it"
                        ) from None


def stored(path: Path) -> bool:
    """Whether it is a zip archive, and uncompressed: torch compresses nothing, a bomb does."""
    try:
        with zipfile.ZipFile(path) as archive:
            return all(part.compress_type == zipfile.ZIP_STORED for part in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return False


def architecture(path: Path, args: Any) -> dict[str, Any]:
    """nanoGPT's model_args as settings of GPTConfig; a field that older versions lacked is True."""
    if not isinstance(args, dict):
        raise UserError(f"{path}: its model_args are no dict")
    plain = {"bias": bool, "dropout": (float, int), **dict.fromkeys(SIZES, int)}
    if unknown := sorted(map(shown, args.keys() - plain.keys())):
        raise UserError(f"{path}: model_args has {unknown[0]}, which nanoGPT's GPT has not; "
                        "its architecture is another")
    if missing := [name for name in SIZES if name not in args]:
        raise UserError(f"{path}: model_args lacks {missing[0]}; no checkpoint of nanoGPT")
    for name, value in args.items():
        sound = isinstance(value, plain[name]) and isinstance(value, bool) == (name == "bias")
        if not sound or (name in SIZES and not 1 <= value < 2**31):
            raise UserError(f"{path}: model_args has {name}={shown(value)}")
    try:
        GPTConfig(**args)
    except ValueError as e:
        raise UserError(f"{path}: {e}") from None
    return {"bias": True, **args}


def shown(value: Any) -> str:
    """A value of the file in a few letters; lists can hold themselves a billion times over."""
    if isinstance(value, str):
        return repr(value[:50])
    short = isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**63)
    return repr(value) if short else f"something of type {type(value).__name__}"


def our_name(name: str) -> str:
    """'_orig_mod.transformer.h.0.ln_1.weight' -> 'h.0.ln_1.weight'"""
    while stripped := next((p for p in PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(stripped)
    return name


def refuse_misfit(path: Path, args: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """UserError unless names and shapes are those of the architecture, and in the file."""
    if (layers := layers_in(weights)) != args["n_layer"]:
        raise UserError(f"{path}: {layers} layers in its weights, n_layer={args['n_layer']}")
    theirs = {name: tuple(w.shape) for name, w in weights.items()}
    # A tensor can claim any shape over a few bytes that it repeats.
    claimed = sum(math.prod(shape) * weights[name].itemsize for name, shape in theirs.items()
                  if name != "lm_head.weight")  # it shares those of wte
    if claimed > size_of(path):
        raise UserError(f"{path}: its tensors claim {claimed:,} bytes, the file has "
                        f"{size_of(path):,}")
    ours = {name: shape for name, shape in shapes_with_biases(
        GPTConfig(**args, tie_embeddings=False)).items() if args["bias"] or "bias" not in name}
    theirs.setdefault("lm_head.weight", ours["lm_head.weight"])  # some forks store it once
    if different := [n for n in {**ours, **theirs} if theirs.get(n) != ours.get(n)]:
        name = different[0]
        raise UserError(f"{path}: does not fit its model_args: {name:.80} is "
                        f"{theirs.get(name) or 'absent'}, nanoGPT's is {ours.get(name, 'absent')}")


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m extras.nanogpt_ckpt", description=__doc__.splitlines()[0],
                    allow_abbrev=False)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CKPT.pt", help="that nanoGPT's train.py saved")
    add("--out_dir", type=Path, required=True, metavar="FOLDER", help="to write")
    add("--tokenizer", metavar="SPEC", help="of its tokens, as of data.prepare; often the "
        "tokenizer.json of a set of extras.nanogpt_bin (default: gpt2, if it has as many ids)")
    add("--gelu", choices=("erf", "tanh"), default="erf", help="nanoGPT has the exact GELU, erf; "
        "its versions of 2022 and early 2023 had tanh (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace weights that were imported before")
    add("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv)
    convert(args.checkpoint, args.out_dir, args.tokenizer, args.gelu, args.overwrite)
    return 0
