"""What `python -m kit.evaluate` does: the loss of a checkpoint on a whole split.

Also what train.py does with --eval_only.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kit.checkpoint import load_model, load_weights
from kit.device import (
    DTYPES,
    autocast,
    choose_device,
    choose_dtype,
    install_kernels,
    name_of,
    prepare_device,
    wanted_kernels,
)
from kit.errors import UserError, plain
from kit.evaluate import Batch, eval_batches, evaluate, spell_loss
from kit.job import Job, say
from kit.run.locate import WORDS, find_checkpoint, find_run, same_tokenizer
from kit.run.store import WEIGHTS, check, trained_with
from kit.writing.text import Tokenizer
from model import GPT


def note(text: str) -> None:
    print(text, file=sys.stderr)


def evaluate_only(s: Any, source: Path | None, data: Any, job: Job) -> int:
    """Say the loss of a run's best checkpoint, or of `source`; nothing is written."""
    folder = source or Path(job.on_main(lambda: str(find_checkpoint(find_run(s.out_dir)))))
    same_tokenizer(folder, data.tokenizer)
    if source:  # with as many positions as the run would have
        model, state = GPT(s.model_config(data.vocab_size)), check(folder, WEIGHTS)
        load_weights(model, folder / "model.safetensors", s.extend_positions, crop=True)
    else:
        model, _, state = load_model(folder)
    batches = eval_batches(data.val, model.config.block_size, s.batch_size, s.eval_iters,
                           job.rank, job.world)
    dtype = DTYPES[job.on_main(
        lambda: name_of(choose_dtype(s.dtype, job.device, state.get("run"))))]
    with install_kernels(wanted_kernels(s.kernels, job.device), say) as own:
        own.take_loss(model)
        result = evaluate(model.to(job.device), batches, data.token_byte_lengths(),
                          data.separator, partial(autocast, job.device, dtype), add=job.sum)
    say(f"{folder}, step {state['step']}: {spell_loss(result)}")
    return 0


def evaluate_split(model: GPT, data: Any, split: Any, block_size: int, batch_size: int,
                   precision: Callable[[], AbstractContextManager]) -> dict[str, Any]:
    """What `evaluate` gives, of every window or sample of a split, with tokens, bytes and rows.

    The same for any batch size, but for rounding in a row: none depends on its neighbours, and
    all is added in double precision. Nothing of a batch is kept but its sums.
    """
    rows = split.fixed_windows(block_size)
    if not rows:
        split.require(block_size)  # raises, and says what would do
    starts = range(0, rows, batch_size)

    def batches() -> Iterator[Batch]:
        with tqdm(total=rows, unit="row", disable=None, leave=False) as bar:
            for k in spread(len(starts)):
                n = min(batch_size, rows - starts[k])
                yield split.window(starts[k], n, block_size)
                bar.update(n)

    return evaluate(model, batches(), data.token_byte_lengths(), data.separator, precision,
                    loss=partial(added_in_double, model.loss)) | {"rows": rows}


def spread(n: int) -> Iterator[int]:
    """0 .. n - 1, far apart: samples lie sorted by length, and short ones tell no time left."""
    stride = next(s for s in range(round(0.618 * n), n + 2) if math.gcd(s, n) == 1) if n else 1
    return (k * stride % n for k in range(n))


def added_in_double(loss: Callable[..., tuple[Tensor, Tensor]], x: Tensor,
                    targets: Tensor) -> tuple[Tensor, Tensor]:
    """`GPT.loss`, but its sum is exact for any number of rows: chunks are added in float64."""
    x, targets = x.reshape(-1, x.size(-1)), targets.reshape(-1)
    rows = 256 if x.device.type == "cpu" else 2048  # as many as its logits are made of at once
    parts = [loss(*some)[0] for some in zip(x.split(rows), targets.split(rows), strict=True)]
    return torch.stack(parts).cpu().double().sum(), (targets >= 0).sum()


def open_data(dataset: str | None, folder: Path, state: dict[str, Any]) -> tuple[str, Any]:
    """The data set to measure a checkpoint on and how it was named; None: that of its run.

    Text is prepared if need be: with the tokenizer that the run asked for, else the checkpoint's.
    """
    from data.dataset import Dataset
    from data.prepare import prepared, prepares_for, resolve

    settings, name, hash = trained_with(state)
    own = dataset is None
    dataset = name if own else dataset
    if dataset is None:
        raise UserError(f"{folder} does not say what it was trained on; give --dataset=")
    tokenizer = settings.get("tokenizer") if own else None
    started = own and settings.get("init_from", "auto") in WORDS  # so with the usual tokenizer
    if tokenizer is None and not started and prepares_for(dataset, folder / "tokenizer.json"):
        tokenizer = str(folder / "tokenizer.json")
    long = "truncate" if settings.get("long_samples") == "truncate" else "drop"
    at = prepared(hash, name) if own else None  # its text may be gone
    data = Dataset(at or resolve(dataset, tokenizer, note), tokenizer, long=long)
    same_tokenizer(folder, data.tokenizer)
    if own and data.hash != hash:
        note(f"note: {plain(dataset)} has changed since the run began")
    return dataset, data


def main(argv: list[str]) -> int:
    from data.prepare import Parser

    parser = Parser(prog="python -m kit.evaluate", allow_abbrev=False, description="The loss of a "
                    "checkpoint on a whole split, also as perplexity and as bits per byte.")
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="a run, of which the best checkpoint is taken, or a "
        "checkpoint (default: the newest run)")
    add("--dataset", metavar="NAME_OR_PATH", help="as of train.py; text is prepared with the "
        "tokenizer of the checkpoint (default: that of its run)")
    add("--step", type=int, help="of the checkpoint (default: the best)")
    add("--split", choices=("val", "train"), default="val", help="(default: %(default)s)")
    add("--batch_size", type=int, help="rows at once (default: 4,096 tokens of them)")
    add("--block_size", type=int, help="a smaller context than the model has")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "auto"),
        help="of products; in 16 bits the figure depends on machine and batch size, too")
    add("--kernels", default="auto", choices=("auto", "torch"),
        help="torch: none of our own, PyTorch's alone (default: %(default)s)")
    add("--json", action="store_true", help="one JSON object on standard output")
    add("--debug", action="store_true", help="show tracebacks of mistakes")
    args = parser.parse_args(argv)
    told = measure(args)
    if args.json:
        print(json.dumps(told))
        return 0
    t = {k: plain(v) if isinstance(v, str) else v for k, v in told.items()}
    print(f"{t['checkpoint']}, step {t['step']:,}\n{t['dataset']}, {t['split']}: {t['tokens']:,} "
          f"tokens, {t['bytes']:,} bytes of text, in {t['rows']:,} rows of at most "
          f"{t['block_size']:,}; {t['dtype']} on {t['device']}\nloss {t['loss']:.4f}, "
          f"perplexity {t['perplexity']:.4g}, {t['bpb']:.4f} bits per byte")
    return 0


def measure(args: Any) -> dict[str, Any]:
    """What the command says: of which checkpoint, on what, and the figures."""
    if args.run and not Path(args.run).exists():
        raise UserError(f"{args.run}: no such folder; expected a run or a checkpoint")
    folder = find_checkpoint(find_run(args.run), args.step)
    device = choose_device(args.device)
    model, _, state = load_model(folder)
    dtype = choose_dtype(args.dtype, device, state.get("run"))
    longest = model.config.block_size
    block_size = longest if args.block_size is None else args.block_size
    if not 1 <= block_size <= longest:
        raise UserError(f"--block_size={block_size}: the model of {folder} takes 1 to {longest}")
    batch_size = max(1, 4096 // block_size) if args.batch_size is None else args.batch_size
    if batch_size < 1:
        raise UserError(f"--batch_size={batch_size}: must be at least 1")
    dataset, data = open_data(args.dataset, folder, state)
    split = getattr(data, args.split)
    if data.kind == "instruct":  # samples may be left out
        rows = min(batch_size, max(1, split.fixed_windows(block_size)))
        print(split.report(block_size, rows), file=sys.stderr)
    if device.type == "cpu" or dtype != torch.float32:  # on a GPU it would also allow TF32
        prepare_device(device)
    with install_kernels(wanted_kernels(args.kernels, device), note) as own:
        own.take_loss(model)
        result = evaluate_split(model.to(device), data, split, block_size, batch_size,
                                partial(autocast, device, dtype))
    if not math.isfinite(result["loss"]):
        raise UserError(f"{folder}: loss {result['loss']}: its weights are damaged, or overflow")
    digits = {"loss": 6, "bpb": 6, "perplexity": 5}  # those that rounding leaves alone
    figures = {k: float(f"{v:.{digits[k]}g}") if k in digits else v for k, v in result.items()}
    return {"checkpoint": str(folder), "step": state["step"], "dataset": dataset,
            "split": args.split, **figures, "block_size": block_size, "dtype": name_of(dtype),
            "device": str(device)}


def quick_loss(model: GPT, state: dict[str, Any], tokenizer: Tokenizer) -> float | None:
    """The loss on some windows of the validation split of a run, if that is here; seconds."""
    from data.prepare import of_run

    _, name, hash = trained_with(state)
    data = of_run(hash, name, tokenizer)
    if data is None:
        return None
    size = model.config.block_size
    iters = min(32, 1 + int(2e8 / model.num_params()))  # of 1024 tokens
    batches = eval_batches(data.val, size, max(1, 1024 // size), iters)
    return evaluate(model, batches, data.token_byte_lengths(), data.separator, nullcontext)["loss"]
