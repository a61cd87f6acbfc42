"""A trained run as a folder that Hugging Face's transformers load, checked before it is there."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data import read_json
from data.dataset import Dataset
from data.instruct import CHAT_TEMPLATE
from data.prepare import of_run
from data.tokenizer import EOT, Tokenizer, from_json
from kit.checkpoint import load_model
from kit.errors import UserError, plain
from kit.files import replacing_folder, to_text, write_text
from kit.hf import tokenizer as hf_tokenizer
from kit.hf.gpt2 import compare, gpt2, refuse_unlike, stored_shapes, transposed
from kit.hf.importing import finite, headers, read_weights
from kit.run.locate import find_checkpoint, find_run
from kit.run.store import imported, trained_with, write_tensors
from kit.settings import Say
from model import GPT, GPTConfig

WRITTEN = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
           "tokenizer_config.json", "bonsai.json", "README.md"}
TOLD = ("batch_size", "gradient_accumulation_steps", "max_iters", "optimizer", "learning_rate",
        "muon_lr", "weight_decay", "schedule", "warmup_iters", "dropout", "seed")  # of the settings
TEXT, LOGITS = 4096, 128  # tokens whose ids and whose logits are compared with the export's


def export_run(run: str | None, folder: Path, step: int | None, overwrite: bool,
               say: Say) -> Path:
    """Write the best checkpoint of a run, or that of a step, as a new folder, and return it.

    run: None takes the newest. UserError for a model or tokenizer without a form there, or for a
    folder that is not empty.
    """
    refuse_other(folder, overwrite)
    source = find_checkpoint(find_run(run), step)
    if run is None:
        say(plain(f"of the newest run: {source}"))
    model, value, state = load_model(source)
    tokenizer = from_json(value)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise UserError(f"{source}: its tokenizer has {tokenizer.vocab_size} ids, its model "
                        f"{model.config.vocab_size}")
    _, name, hash = trained_with(state)
    data = of_run(hash, name, tokenizer)
    texts = described(model, tokenizer, bool(data and data.is_chat))
    refuse_unlike(model, source, "transformers cannot run it; sample.py and extras.serve can")
    tensors, final = stored(model, source), Path(os.path.abspath(folder))
    final.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(final) as aside:
        for file, content in texts.items():
            write_text(aside / file, to_text(content))
        write_tensors(aside / "model.safetensors", tensors, like="config.json")
        worst, library = difference(aside, model, tokenizer)
        write_text(aside / "README.md", card(model, tokenizer, state, data, worst, library))
    say(plain(f"{source}, step {state['step']}, written to {folder}: read back by {library}, its "
              f"logits differ by {worst:.1e} at most"))
    return final


def refuse_other(folder: Path, overwrite: bool) -> None:
    """UserError unless an export may be written here: where nothing is, or over an export."""
    there = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    if folder.is_dir() and folder.samefile("."):  # replaced, it would be gone from under the shell
        raise UserError(f"{folder} is the folder that you are in; give the name of a new one")
    if not os.path.lexists(folder) or (folder.is_dir() and not there):
        return
    if not overwrite or not folder.is_dir():
        raise UserError(f"{folder} is there already; --overwrite replaces an export, or give "
                        "another folder")
    if there - WRITTEN:
        raise UserError(f"{folder} holds {min(there - WRITTEN)}, which is of no export, so it is "
                        "not replaced; give another folder")
    try:
        ours = read_json(folder / "bonsai.json").get("format") == hf_tokenizer.BONSAI_FORMAT
    except (UserError, OSError):
        ours = False
    if not ours:
        raise UserError(f"{folder} has no bonsai.json of an export, so it is another's and not "
                        "replaced; give another folder")


def described(model: GPT, tokenizer: Tokenizer, chat: bool) -> dict[str, dict[str, Any]]:
    """The JSON files of an export, by their names."""
    return {"config.json": config_json(model.config, tokenizer.eot),
            "generation_config.json": generation_config(tokenizer, model.config.block_size),
            "tokenizer.json": hf_tokenizer.to_hf(tokenizer),
            "tokenizer_config.json": tokenizer_config(tokenizer, model.config.block_size, chat),
            "bonsai.json": {"format": hf_tokenizer.BONSAI_FORMAT,
                            "tokenizer": {"spec": tokenizer.spec, "hash": tokenizer.hash}}}


def tokenizer_config(tokenizer: Tokenizer, block_size: int, chat: bool) -> dict[str, Any]:
    """The tokenizer_config.json beside it.

    Without model_input_names a tokenizer of transformers 4 gives token_type_ids, and GPT-2 adds
    their embeddings to those of the text. padding_side stays "right", as transformers advise for
    GPT-2: its positions count the padding on the left, except in `generate`, which asks for that.
    """
    eot = {} if tokenizer.eot is None else {"bos_token": EOT, "eos_token": EOT, "pad_token": EOT}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size,
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False, **eot,
            **({"chat_template": CHAT_TEMPLATE} if chat else {})}


def generation_config(tokenizer: Tokenizer, block_size: int) -> dict[str, Any]:
    """Drawing as sample.py does, up to the end of the text or of the positions.

    Without max_length a pipeline writes 256 tokens and fails beyond the positions. One of
    transformers 4 does so with 20, too, which it takes for its own default.
    """
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eot)
    return {"do_sample": True, "temperature": 0.8, "top_k": 50,
            "max_length": 19 if block_size == 20 else block_size, **ends}


def card(model: GPT, tokenizer: Tokenizer, state: dict[str, Any], data: Dataset | None,
         worst: float, library: str) -> str:
    """README.md: what was trained on what and how, what came out, and how to load it."""
    c, (settings, dataset, _) = model.config, trained_with(state)
    facts = {"layers": c.n_layer, "heads": c.n_head, "width": c.n_embd, "context": c.block_size,
             "parameters": sum(p.numel() for p in model.parameters()), "biases": c.bias,
             "output head": "tied" if c.tie_embeddings else "its own",
             "tokenizer": tokenizer.spec, "vocabulary": tokenizer.vocab_size}
    if dataset:  # the rest of its path describes the user's machine
        facts["dataset"] = Path(dataset).name
    if data:
        train = data.meta["splits"]["train"]
        facts |= {f"training {key}": train[key] for key in ("documents", "tokens")}
    facts["weights from"] = (imported(state) or {}).get("from")
    facts |= {"updates": state["step"], "tokens seen": state.get("tokens"),
              "validation loss": state.get("val_loss"),
              "validation bits per byte": state.get("val_bpb")}
    facts |= {name: settings.get(name) for name in TOLD}
    rows = "\n".join(f"| {n} | {cell(v)} |" for n, v in facts.items() if v is not None)
    notes = [f"Read back by {library}, its logits differ by {worst:.1e} at most."]
    if tokenizer.eot is not None:
        notes.append("Before each text stood `<|endoftext|>` in training; begin with it for a text "
                     "of its own. Hugging Face's tokenizers take these characters in a text for "
                     "the special token, the ones that this model was trained with never do.")
        notes.append('For several prompts at once load the tokenizer with `padding_side="left"`; '
                     "texts that are only read need their padding on the right.")
    else:
        notes.append("The tokenizer knows the characters of its text; another one is an error.")
    if data and data.is_chat:
        notes.append("A chat goes through `apply_chat_template`. The training encoded role and "
                     "content apart, so content that begins with white space may be cut elsewhere.")
    prompt, new = example(tokenizer, c.block_size)
    return CARD.format(rows=rows, prompt=prompt, new=new, context=c.block_size,
                       notes="\n".join(f"- {note}" for note in notes))


def example(tokenizer: Tokenizer, block_size: int) -> tuple[str, int]:
    """A prompt that the tokenizer knows, as Python spells it, and how many tokens may follow."""
    ids = tokenizer.encode("Once upon a time", unknown="skip")[: max(1, block_size // 2)] or [0]
    return repr(tokenizer.decode(ids)), max(1, min(50, block_size - len(ids)))


def cell(value: Any) -> str:
    """A value for a table of Markdown, whatever it holds."""
    kind = type(value)
    text = f"{value:,}" if kind is int else f"{value:.5g}" if kind is float else str(value)[:200]
    return "".join(c if c.isalnum() or c in " .,:_-/+" else f"&#{ord(c)};" for c in text)


CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
---
# A GPT trained with bonsaiGPT

| | |
|-|-|
{rows}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
batch = tokenizer({prompt}, return_tensors="pt")
print(tokenizer.decode(model.generate(**batch, max_new_tokens={new})[0]))
```

- It has {context} positions for the prompt and the new tokens together, and fails beyond them.
  Without `max_new_tokens` a text goes on until it ends or the positions do; with it, transformers 5
  warns of two lengths and takes this one.
{notes}
"""


# ----------------------------------------------------------------------- configuration and weights


def config_json(config: GPTConfig, eot: int | None) -> dict[str, Any]:
    """The config.json of a model; UserError for one that GPT2LMHeadModel has no word for."""
    if config.attn_logn != "off":
        raise UserError(f"this model multiplies its queries by log n (attn_logn={config.attn_logn})"
                        ", which GPT2LMHeadModel does not; one with attn_logn=off can be exported")
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
            "vocab_size": config.vocab_size, "n_positions": config.block_size,
            "n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd,
            "n_inner": None, "activation_function": "gelu" if config.gelu == "erf" else "gelu_new",
            "resid_pdrop": config.dropout, "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout, "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": config.tie_embeddings, "bos_token_id": eot, "eos_token_id": eot,
            "pad_token_id": eot, "dtype": "float32"}


def stored(model: GPT, source: Path) -> dict[str, Tensor]:
    """The tensors of a GPT-2 under GPT2LMHeadModel's names, in fp32, with zeros for biases.

    source: its checkpoint, named by the UserError for weights that are no numbers.
    """
    ours, out = dict(model.named_parameters()), {}
    for name, shape in stored_shapes(model.config).items():
        w = finite(source, name, ours[name].detach()) if name in ours else torch.zeros(shape)
        stored_as = name if name == "lm_head.weight" else f"transformer.{name}"
        out[stored_as] = transposed(name, w).contiguous()
    return out


# ---------------------------------------------------------------------------------------- the check


@torch.no_grad()
def difference(folder: Path, model: GPT, tokenizer: Tokenizer) -> tuple[float, str]:
    """Largest difference between the logits of an export and of the model, and who read the export.

    transformers read it the way of a user, through its tokenizer. RuntimeError where the export is
    not what it should be.
    """
    text, config = some_text(tokenizer), model.config
    ids = torch.tensor([tokenizer.encode(text)[: min(config.block_size, LOGITS)]])
    try:
        from transformers import AutoTokenizer, GPT2LMHeadModel
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        library = "this project (transformers is not installed)"
        files = headers([folder / "model.safetensors"], folder / "config.json", config)
        got = gpt2(read_weights(files, config), config, ids)
    else:
        library = "transformers"
        disable_progress_bar()
        encode = AutoTokenizer.from_pretrained(folder)
        batch = encode(text, truncation=True, max_length=TEXT, return_tensors="pt")
        if batch["input_ids"].tolist() != [tokenizer.encode(text)[:TEXT]]:
            raise RuntimeError(f"the tokenizer of {folder} gives other ids than {tokenizer.spec} "
                               "here")
        beginning = {name: rows[:, : ids.size(1)] for name, rows in batch.items()}
        got = GPT2LMHeadModel.from_pretrained(folder).eval()(**beginning).logits.float()
    worst, same = compare(got, model.eval()(ids))
    if not same:
        raise RuntimeError(f"the logits of {folder} differ by {worst} when {library} reads it")
    return worst, library


def some_text(tokenizer: Tokenizer) -> str:
    """The text of tokens that are drawn with a fixed seed, so that any tokenizer knows it."""
    special = {*tokenizer.special.values()}
    ids = [id for id in range(tokenizer.vocab_size)
           if id not in special and tokenizer.token_bytes(id)]
    drawn = torch.randint(len(ids), (TEXT,), generator=torch.Generator().manual_seed(0))
    return tokenizer.decode(ids[i] for i in drawn.tolist())
