"""The check of an export: read back through its own tokenizer, it must be the model that was here.

That model.py is a GPT-2 at all is not asked here: `kit.hf.gpt2` has made sure of it.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from kit.hf import weights
from kit.hf.gpt2 import compare, gpt2
from model import GPT, GPTConfig

TEXT = 4096  # tokens whose ids are compared
MOST = 128  # of them, whose logits are compared; more would take long on a large model
PROMPT, GENERATED = 16, 8  # tokens


@torch.no_grad()
def difference(folder: Path, model: GPT, tokenizer: Tokenizer) -> tuple[float, str]:
    """Largest difference between the logits of an export and of the model, and who read the export.

    RuntimeError where the export is not what it should be.
    """
    text = some_text(tokenizer)
    ids = torch.tensor([tokenizer.encode(text)[: min(model.config.block_size, MOST)]])
    expected = model.eval()(ids)
    try:
        import transformers  # noqa: F401
    except ImportError:
        worst, same = compare(read_here(folder, model.config, ids), expected)
        library = "this project (transformers is not installed)"
    else:
        there, batch = load_there(folder, tokenizer, text)
        worst, same = compare(there(**first(batch, ids.size(1))).logits.float(), expected)
        library = "transformers"
    if not same:
        raise RuntimeError(f"the logits of {folder} differ by {worst} when {library} reads it")
    if library == "transformers" and not generates(there, batch, model):
        raise RuntimeError(f"{folder} generates tokens that are not the likeliest of the model")
    return worst, library


def some_text(tokenizer: Tokenizer) -> str:
    """The text of tokens that are drawn with a fixed seed, so that any tokenizer knows it."""
    special = {*tokenizer.special.values()}
    ids = [id for id in range(tokenizer.vocab_size)
           if id not in special and tokenizer.token_bytes(id)]
    drawn = torch.randint(len(ids), (TEXT,), generator=torch.Generator().manual_seed(0))
    return tokenizer.decode(ids[i] for i in drawn.tolist())


def first(batch: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    return {name: rows[:, :n] for name, rows in batch.items()}


def load_there(folder: Path, tokenizer: Tokenizer, text: str) -> tuple[Any, dict[str, Tensor]]:
    """The export as transformers load it, and what its tokenizer makes of a text.

    RuntimeError if that has other ids than ours.
    """
    from transformers import AutoTokenizer, GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    encode = AutoTokenizer.from_pretrained(folder)
    batch = encode(text, truncation=True, max_length=TEXT, return_tensors="pt")
    if batch["input_ids"].tolist() != [tokenizer.encode(text)[:TEXT]]:
        raise RuntimeError(f"the tokenizer of {folder} gives other ids than {tokenizer.spec} here")
    return GPT2LMHeadModel.from_pretrained(folder).eval(), batch


def generates(there: Any, batch: dict[str, Tensor], model: GPT) -> bool:
    """Whether it continues the beginning of a batch by what the model finds likeliest."""
    size = model.config.block_size
    T = max(1, min(PROMPT, size // 2))
    length = T + max(1, min(GENERATED, size - T))  # the last one is not read, so it has a place
    out = there.generate(**first(batch, T), top_k=1, max_length=length)
    ours = model(out[:, :-1])[:, T - 1 :]  # of each new token (1, N, V)
    chosen = ours.gather(2, out[:, T:, None]).squeeze(2)
    return compare(chosen, ours.amax(2))[1]  # of equally likely ones it may take either


def read_here(folder: Path, config: GPTConfig, ids: Tensor) -> Tensor:
    """The logits of what is in model.safetensors, without transformers and without model.py."""
    files = weights.headers([folder / "model.safetensors"], folder / "config.json", config)
    return gpt2(weights.read(files, config), config, ids)
