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

from data import DataError
from data.prepare import Parser
from data.tokenizer import Tokenizer, make_tokenizer
from kit.checkpoint import save_weights
from kit.errors import UserError, run
from kit.files import digest, size_of
from model import GPT, GPTConfig

SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
PREFIXES = ("_orig_mod.", "module.", "transformer.")  # of compile, DDP, nanoGPT's ModuleDict
MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # buffers of attention without a fused kernel
PADDED = 128  # a vocabulary may be filled up to a multiple of 64 (nanoGPT) or 128 (llm.c)
GPT2_SIZES = (50257, 50304)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def convert(source: Path, out_dir: Path, tokenizer: str | None = None, gelu: str = "erf",
            overwrite: bool = False) -> None:
    """Write the weights of a ckpt.pt to out_dir. gelu: "tanh" for nanoGPT before its nn.GELU."""
    refuse_filled(out_dir, overwrite)
    args, weights = read(source)
    made = open_tokenizer(tokenizer, args["vocab_size"], source)
    tied = "lm_head.weight" not in weights or torch.equal(
        weights["lm_head.weight"], weights["wte.weight"])
    if tied:
        weights.pop("lm_head.weight", None)
    else:
        print("the output head is not the token embedding: kept as one of its own")
    config = GPTConfig(**args, tie_embeddings=tied, gelu=gelu)
    write(out_dir, config, weights, made, source, "nanoGPT's ckpt.pt")


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
        name = our_name(str(given))
        if MASK.fullmatch(name):
            continue
        sound = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype in DTYPES and (
            tensor.layout == torch.strided and tensor.device.type == "cpu")
        if not sound:
            raise UserError(f"{path}: {given!s:.80} is no plain tensor of real numbers")
        if name in weights:
            raise UserError(f"{path}: holds {name} twice")
        weights[name] = tensor.detach()
    refuse_misfit(path, args, weights)
    return args, weights


def unpickle(path: Path) -> Any:
    """What torch's restricted unpickler makes of a file, with its tensors left on the disk."""
    size_of(path)
    if not zipfile.is_zipfile(path) or not stored(path):
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
    """Whether nothing in a zip archive is compressed: torch compresses nothing, a bomb does."""
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
    if unknown := sorted(map(str, args.keys() - plain.keys())):
        raise UserError(f"{path}: model_args has {unknown[0]:.50}, which nanoGPT's GPT has not; "
                        "its architecture is another")
    if missing := [name for name in SIZES if name not in args]:
        raise UserError(f"{path}: model_args lacks {missing[0]}; no checkpoint of nanoGPT")
    for name, value in args.items():
        sound = isinstance(value, plain[name]) and isinstance(value, bool) == (name == "bias")
        if not sound or (name in SIZES and not 1 <= value < 2**31):
            raise UserError(f"{path}: model_args has {name}={value!r:.50}")
    try:
        GPTConfig(**args)
    except ValueError as e:
        raise UserError(f"{path}: {e}") from None
    return {"bias": True, **args}


def our_name(name: str) -> str:
    """'_orig_mod.transformer.h.0.ln_1.weight' -> 'h.0.ln_1.weight'"""
    while stripped := next((p for p in PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(stripped)
    return name


def refuse_misfit(path: Path, args: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """UserError unless names and shapes are those of the architecture, and in the file."""
    layers = len({name.split(".")[1] for name in weights if name.startswith("h.")})
    if layers != args["n_layer"]:
        raise UserError(f"{path}: {layers} layers in its weights, n_layer={args['n_layer']}")
    theirs = {name: tuple(w.shape) for name, w in weights.items()}
    embedding = args["vocab_size"], args["n_embd"]
    ours = {"wte.weight": embedding, "wpe.weight": (args["block_size"], args["n_embd"])}
    # A tensor can claim any shape over a few bytes that it repeats.
    claimed = sum(math.prod(shape) * weights[name].itemsize for name, shape in theirs.items()
                  if name != "lm_head.weight")  # it shares those of wte
    if claimed > size_of(path):
        raise UserError(f"{path}: its tensors claim {claimed:,} bytes, the file has "
                        f"{size_of(path):,}")
    if all(theirs.get(name) == shape for name, shape in ours.items()):
        with torch.device("meta"):  # names and shapes without memory
            model = GPT(GPTConfig(**args, tie_embeddings=False))
        ours = {name: tuple(p.shape) for name, p in model.named_parameters()}
        theirs.setdefault("lm_head.weight", embedding)
    else:
        theirs = {name: theirs.get(name) for name in ours}
    if different := theirs.items() ^ ours.items():
        name = min(different)[0]
        raise UserError(f"{path}: does not fit its model_args: {name} is "
                        f"{theirs.get(name) or 'absent'}, nanoGPT's is {ours.get(name, 'absent')}")


# ------------------------------------------------------------------ what all foreign weights share


def refuse_filled(out_dir: Path, overwrite: bool) -> None:
    """UserError where something is that nobody said to replace: told before any work."""
    if not overwrite and out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise UserError(f"{out_dir} is there already; give another --out_dir, or replace imported "
                        "weights with --overwrite")


def open_tokenizer(spec: str | None, vocab_size: int, source: Path) -> Tokenizer:
    """The tokenizer of foreign weights, which do not say it; gpt2 if they have as many ids."""
    if spec is None and vocab_size not in GPT2_SIZES:
        raise UserError(f"{source}: has {vocab_size:,} ids and does not say of which tokenizer; "
                        "give --tokenizer=, such as the tokenizer.json of the data set that "
                        "extras.nanogpt_bin made of its train.bin")
    if spec is not None and (spec == "char" or re.fullmatch(r"bpe:\d+", spec)):
        raise UserError(f"--tokenizer={spec} is learned from a text; give the tokenizer.json of "
                        "the data set that the weights were trained on")
    made = make_tokenizer(spec or "gpt2")
    ids = made.vocab_size
    padded = vocab_size % 64 == 0 and vocab_size <= -(-ids // PADDED) * PADDED
    if vocab_size != ids and not (padded and ids < vocab_size):
        raise UserError(f"{source}: has {vocab_size:,} ids, the tokenizer {made.spec} {ids:,}; "
                        "give the --tokenizer that it was trained with")
    return made


def write(out_dir: Path, config: GPTConfig, weights: dict[str, Tensor], tokenizer: Tokenizer,
          source: Path, what: str) -> None:
    """Save foreign weights in fp32, without the rows beyond the tokenizer's ids."""
    ids = tokenizer.vocab_size
    if ids < config.vocab_size:
        print(f"{config.vocab_size - ids} rows of padding beyond the {ids:,} ids of "
              f"{tokenizer.spec}: cut off")
        for name in {"wte.weight", "lm_head.weight"} & weights.keys():
            weights[name] = weights[name][:ids].clone()
        config.vocab_size = ids
    weights = {name: w.float().contiguous() for name, w in weights.items()}
    save_weights(out_dir, config, weights, tokenizer.to_json(),
                 {"from": what, "file": source.name, "sha256": digest(source)})
    n = sum(w.numel() for w in weights.values())
    print(f"written to {out_dir}: {n:,} parameters, {config.n_layer} layers, {config.n_head} heads,"
          f" width {config.n_embd}, context {config.block_size:,}, {ids:,} ids of "
          f"{tokenizer.spec}, {'with' if config.bias else 'without'} biases, gelu={config.gelu}")
    print(f"next: python sample.py --out_dir={out_dir}, or train on: python train.py "
          f"--init_from={out_dir} --dataset=NAME")


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


if __name__ == "__main__":
    run(main, (DataError,))
