"""Weights of other programs become a checkpoint folder: what all importers share."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from data.tokenizer import Tokenizer, make_tokenizer
from kit.errors import UserError, plain
from kit.hf.gpt2 import refuse_edited
from kit.run.locate import out_root
from kit.run.store import refuse_filled, save_weights
from model import GPTConfig

MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")  # buffers of attention
PADDED = 128  # a vocabulary may be filled up to a multiple of 64 (nanoGPT) or 128 (llm.c)
GPT2_SIZES = (50257, 50304)


def refuse_place(out_dir: Path, overwrite: bool) -> None:
    """UserError for a folder that is not to be written: told before any work."""
    root, here = out_root().resolve(), Path.cwd()
    if here == resolved(out_dir):  # replaced, it would be gone from under the shell
        raise UserError(f"--out_dir={out_dir} is the folder that you are in; give one of its own, "
                        f"such as {out_root() / 'imported'}")
    if root.is_relative_to(resolved(out_dir)):
        raise UserError(f"{out_dir} holds all runs; give --out_dir a folder of its own, such as "
                        f"{out_root() / 'imported'}")
    refuse_filled(out_dir, overwrite)


def refuse_edited_model(config: GPTConfig, source: Path) -> None:
    """UserError where model.py would compute something else from weights of a GPT-2.

    Nothing in the weights shows it: names and shapes may be those of the edited model as well.
    """
    refuse_edited(config, source, "weights of GPT-2 would compute something else in it: undo the "
                  "edit, or train from scratch")


def tokenizer_of(spec: str) -> Tokenizer:
    """The tokenizer that somebody names; UserError for one that would be learned from text."""
    if spec.partition(":")[0] in ("char", "bpe"):
        raise UserError(f"--tokenizer={spec} is learned from a text, and there is none here; give "
                        "the tokenizer.json that it became, that of the data set")
    return make_tokenizer(spec)


def guess_tokenizer(spec: str | None, vocab_size: int, source: Path) -> Tokenizer:
    """That of weights which do not say it: the one named, or gpt2 if it has as many ids."""
    if spec is None and vocab_size not in GPT2_SIZES:
        raise UserError(f"{source}: has {vocab_size:,} ids and does not say of which tokenizer; "
                        "give --tokenizer=, such as the tokenizer.json of the data set that "
                        "extras.nanogpt_bin made of its train.bin")
    made = tokenizer_of(spec or "gpt2")
    ids = made.vocab_size
    padded = vocab_size % 64 == 0 and ids < vocab_size <= -(-ids // PADDED) * PADDED
    if vocab_size != ids and not padded:
        raise UserError(f"{source}: has {vocab_size:,} ids, the tokenizer {made.spec} {ids:,}; "
                        "give the --tokenizer that it was trained with")
    return made


def resolved(path: Path) -> Path:
    """A path without links; UserError for one whose links go round."""
    try:
        return path.resolve()
    except (RuntimeError, OSError):  # of Python before 3.13, and of a name that is too long
        raise UserError(f"{path}: leads nowhere, its links go round or its name is too long"
                        ) from None


def finite(source: Path, name: str, w: Tensor) -> Tensor:
    """A tensor in fp32; UserError where that holds anything else than numbers."""
    w = w.float()
    if not bool(w.isfinite().all()):
        raise UserError(f"{source}: {name} holds NaN or infinity, so these weights are damaged; "
                        "take others, such as an earlier checkpoint")
    return w


def keep(out_dir: Path, config: GPTConfig, weights: dict[str, Tensor], tokenizer: Tokenizer,
         about: dict[str, Any], say: Callable[[str], None], overwrite: bool = False) -> None:
    """Save weights in fp32, without rows beyond the tokenizer's ids and without zero biases.

    about: where they come from.
    """
    ids, rows = tokenizer.vocab_size, len(weights["wte.weight"])
    if rows > ids:
        say(plain(f"vocabulary: {rows:,} rows, cut to the {ids:,} ids of the tokenizer "
                  f"{tokenizer.spec}"))
    cut = {name: w[:ids] for name, w in weights.items() if name in ("wte.weight", "lm_head.weight")}
    weights = {name: w.float().contiguous() for name, w in (weights | cut).items()}
    biases = [name for name in weights if name.endswith(".bias")]
    bias = any(bool(weights[name].any()) for name in biases)
    if biases and not bias:  # some formats have no other way to have none
        say("all biases are zero: left out")
        weights = {name: w for name, w in weights.items() if name not in biases}
    config = replace(config, vocab_size=ids, bias=bias)
    save_weights(out_dir, config, weights, tokenizer.to_json(), about, overwrite)
    say(plain(f"written to {out_dir}: {sum(w.numel() for w in weights.values()):,} parameters, "
              f"{config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, context "
              f"{config.block_size:,}, {ids:,} ids of {tokenizer.spec}, "
              f"{'with' if bias else 'without'} biases, gelu={config.gelu}"))


def next_step(out_dir: Path) -> str:
    return plain(f'next: python sample.py --out_dir={out_dir} --prompt "...", or train on: '
                 f"python train.py --init_from={out_dir} --dataset=NAME")
