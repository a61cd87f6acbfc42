"""Convert a model file of llm.c, as its train_gpt2 writes, into a checkpoint folder.

The file is 256 int32 of header, which say magic, version and shape, and then one tensor after the
other, each kind for all layers at once (https://github.com/karpathy/llm.c, its write_model). So its
length follows from its header, and nothing is read before both fit.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data.prepare import Parser, tell
from data.shards import LAYOUTS
from kit.errors import UserError
from kit.files import digest, size_of
from kit.hf.gpt2 import shapes_with_biases
from kit.hf.importing import (
    finite,
    guess_tokenizer,
    next_step,
    refuse_edited_model,
    refuse_out_dir,
    save,
)
from model import GPTConfig

MAGIC = 20240326
STORED = {3: "<f4", 5: "<u2"}  # version -> numbers: fp32, or bf16, of which numpy knows the bits
HEADER = 256  # int32


def convert(source: Path, out_dir: Path, tokenizer: str | None = None,
            overwrite: bool = False) -> None:
    """Write the weights of a model_*.bin or gpt2_124M*.bin to out_dir."""
    refuse_out_dir(out_dir, overwrite)
    config, padded, dtype = read_header(source)
    refuse_edited_model(config, source)
    made = guess_tokenizer(tokenizer, config.vocab_size, source)
    weights = dict(read_tensors(source, config, padded, dtype))
    about = {"from": "llm.c's model file", "file": source.name, "sha256": digest(source)}
    save(out_dir, config, weights, made, about, tell, overwrite)
    tell(next_step(out_dir))


def read_header(path: Path) -> tuple[GPTConfig, int, str]:
    """Architecture, rows of the padded embedding, numpy's name of the numbers; else UserError."""
    size = size_of(path)
    header = np.fromfile(path, "<i4", HEADER).tolist()
    if tuple(header[:2]) in LAYOUTS["tokens"]:
        raise UserError(f"{path}: tokens of llm.c, not a model; give its model_*.bin or gpt2_*.bin")
    if len(header) < HEADER or header[0] != MAGIC:
        raise UserError(f"{path}: no model file of llm.c, which begins with {MAGIC}; give its "
                        "model_*.bin or gpt2_*.bin")
    if header[1] not in STORED:
        raise UserError(f"{path}: version {header[1]} of llm.c's format; expected 3 (fp32) or 5 "
                        "(bf16): write it again with llm.c of May 2024 or later")
    shape = dict(zip(("block_size", "vocab_size", "n_layer", "n_head", "n_embd"), header[2:7],
                     strict=True))
    padded = header[7]
    try:
        config = GPTConfig(**shape, bias=True, gelu="tanh")
        if padded < config.vocab_size:
            raise ValueError(f"vocab_size={config.vocab_size} and only {padded} rows of embedding")
    except ValueError as e:
        raise UserError(f"{path}: its header says {e}; it is damaged") from None
    dtype = STORED[header[1]]
    numbers = sum(math.prod(shape) * (config.n_layer if "{}" in name else 1)
                  for name, shape in layout(config, padded))
    expected = 4 * HEADER + numbers * np.dtype(dtype).itemsize
    if size != expected:
        raise UserError(f"{path}: has {size:,} bytes, by its header {expected:,}; copy it again")
    return config, padded, dtype


def layout(config: GPTConfig, padded: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the order of the file; {} stands for all layers, one after the other."""
    one = shapes_with_biases(replace(config, n_layer=1, vocab_size=padded))
    return [(name.replace("h.0.", "h.{}."), shape) for name, shape in one.items()]


def read_tensors(path: Path, config: GPTConfig, padded: int, dtype: str
                 ) -> Iterator[tuple[str, Tensor]]:
    """Each tensor by our name, in fp32."""
    at = 4 * HEADER
    for name, shape in tqdm(layout(config, padded), path.name, unit="kinds", disable=None):
        for layer in range(config.n_layer if "{}" in name else 1):
            stored = np.fromfile(path, dtype, math.prod(shape), offset=at)
            at += stored.nbytes
            if dtype == "<u2":  # bf16 is the upper half of an fp32
                stored = (stored.astype(np.uint32) << 16).view(np.float32)
            name_here = name.format(layer)
            yield name_here, finite(path, name_here, torch.from_numpy(stored.reshape(shape)))


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m extras.llmc", description=__doc__.splitlines()[0],
                    allow_abbrev=False)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL.bin", help="that llm.c or its train_gpt2.py wrote")
    add("--out_dir", type=Path, required=True, metavar="FOLDER", help="to write")
    add("--tokenizer", metavar="SPEC", help="of its tokens, as of data.prepare (default: gpt2, if "
        "it has as many ids)")
    add("--overwrite", action="store_true", help="replace weights that were imported before")
    add("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv)
    convert(args.model, args.out_dir, args.tokenizer, args.overwrite)
    return 0
