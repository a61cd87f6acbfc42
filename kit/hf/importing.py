"""Weights of others become a checkpoint folder: Hugging Face's, and what all importers share.

Nothing of a file is believed: a configuration that ours cannot be, tensors that do not fit it and
links out of a folder are each refused in one line, before memory is taken.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from torch import Tensor

from data import read_json
from data.making.tokenizers import make_tokenizer
from data.prepare import tell
from data.tokenizer import Tokenizer
from kit.checkpoint import shapes_of
from kit.errors import UserError, plain
from kit.files import read_json as read_sealed
from kit.files import size_of
from kit.hf.gpt2 import layers_in, refuse_edited, stored_shapes, transposed
from kit.hf.tokenizer import from_hf
from kit.run.locate import GPT2, out_root
from kit.run.store import WEIGHTS, check, imported, refuse_filled, save_weights
from kit.settings import Say
from model import GPTConfig

MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")  # buffers of attention
PADDED = 128  # a vocabulary may be filled up to a multiple of 64 (nanoGPT) or 128 (llm.c)
GPT2_SIZES = (50257, 50304)
HUB = {name: f"openai-community/{name}" for name in GPT2}
ALONE, INDEX = "model.safetensors", "model.safetensors.index.json"
TEXTS = ("config.json", "tokenizer.json", "vocab.json", "merges.txt", "bonsai.json", INDEX)

# What config.json must say (or leave out): all else would need another model
FIXED = {"model_type": "gpt2", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
         "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf", "gelu_python": "erf"}
SIZES = {"vocab_size": 50257, "n_positions": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768}
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


# ----------------------------------------------------------------------- what all importers share


def refuse_out_dir(out_dir: Path, overwrite: bool) -> None:
    """UserError for a folder that must not be written, before any work is done."""
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
    """The tokenizer that the user names; UserError for one that is learned from text."""
    if spec.partition(":")[0] in ("char", "bpe"):
        raise UserError(f"--tokenizer={spec} is learned from a text, and there is none here; give "
                        "the tokenizer.json that it became, that of the data set")
    return make_tokenizer(spec)


def guess_tokenizer(spec: str | None, vocab_size: int, source: Path) -> Tokenizer:
    """The tokenizer of weights that do not name one: `spec`, or gpt2 if it has as many ids."""
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


def save(out_dir: Path, config: GPTConfig, weights: dict[str, Tensor], tokenizer: Tokenizer,
         about: dict[str, Any], say: Say, overwrite: bool = False) -> None:
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


# -------------------------------------------------------------------- a folder, or the hub's


def import_model(name: str, out_dir: Path, spec: str | None = None, overwrite: bool = False,
                 say: Say = tell) -> Path:
    """Write the weights of a hub's name or of a folder as a checkpoint folder, and return it.

    spec: the tokenizer, if the folder has none that can be read. UserError or UserError for what is
    missing or is not a GPT-2 that model.py computes, and if model.py is not a GPT-2 any more.
    """
    refuse_out_dir(out_dir, overwrite)
    made = tokenizer_of(spec) if spec else None
    source, repo = locate(name)
    find = partial(inside, source)
    if not (path := find("config.json")).exists():
        raise UserError(f"{source}: no config.json; expected a folder of Hugging Face's, with "
                        "config.json and model.safetensors")
    values = read_json(path, "fetch it again")
    config = architecture(path, values, say)
    refuse_edited_model(config, source)
    made = made or from_hf(find, values.get("eos_token_id", 50256), say)
    if config.vocab_size < made.vocab_size:
        raise UserError(f"{path}: {config.vocab_size:,} rows of vocabulary are fewer than the "
                        f"{made.vocab_size:,} ids of the tokenizer {made.spec}")
    names = weight_names(source)
    if repo:  # now that it is known to be such a GPT-2
        fetch(repo, names, source.name)
    elif names == [ALONE] and not find(ALONE).exists():
        refuse_pickle(source)
    files = [find(name) for name in names]
    tensors = headers(files, path, config)  # before memory is taken
    about = {"from": name if repo else source.resolve().name,
             "revision": source.name if repo else None}
    save(out_dir, config, read_weights(tensors, config), made, about, say, overwrite)
    return out_dir


def pretrained(init_from: str, say: Say) -> Path:
    """The folder of one of GPT2, imported if it is not there yet.

    UserError if something else is in that folder, or if model.py is not GPT-2 any more, which it
    may have become since the import.
    """
    folder = out_root() / init_from
    if holds(folder, init_from):
        refuse_edited_model(GPTConfig(bias=True), folder)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{init_from}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"waiting for another process that is importing {init_from}")
        lock.acquire()
    try:
        return folder if holds(folder, init_from) else import_model(init_from, folder, say=say)
    finally:
        lock.release()


def holds(folder: Path, name: str) -> bool:
    """Whether a folder holds these weights of the hub; UserError for others or damaged ones."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    try:
        about = imported(read_sealed(folder / "state.json")) or {}
    except (UserError, OSError):
        about = {}
    if about.get("from") not in (name, HUB[name]) or not about.get("revision"):
        what = f"weights of {about['from']}" if about.get("from") else "something else"
        raise UserError(f"--init_from={name} takes {folder}, but that holds {what} and not "
                        f"{HUB[name]}; move it away, or start from what it holds with "
                        f"--init_from={folder}")
    check(folder, WEIGHTS)
    return True


def locate(name: str) -> tuple[Path, str | None]:
    """The folder that a name means, and its repository if it is the hub's.

    Of a repository all but the weights is fetched.
    """
    if name not in HUB and Path(name).is_dir():
        return Path(name), None
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise UserError(f"{name}: no such folder, and no name of the hub such as gpt2 or "
                        "openai-community/gpt2")
    failed: list[UserError] = []
    for repo in (HUB[name], name) if name in HUB else (name,):  # a cache may have either
        try:
            return fetch(repo, TEXTS), repo
        except UserError as e:
            failed.append(e)
    raise failed[0]


def fetch(repo: str, names: Iterable[str], revision: str | None = None) -> Path:
    """The cached folder of a repository of the hub, with those of these files that it has."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[*names]))
    except (OSError, ValueError) as e:  # what it raises is either, offline or unknown
        raise UserError(f"{repo}: neither a folder nor to be had from huggingface.co "
                        f"({type(e).__name__}) or its cache; check the name and the network, or "
                        "give a folder with config.json, model.safetensors and tokenizer.json"
                        ) from None


def inside(folder: Path, name: str) -> Path:
    """A file of a folder, or of the hub's cache that the folder is in; UserError for another."""
    root = resolved(folder)
    root = root.parents[1] if root.parent.name == "snapshots" else root  # files are links there
    path = resolved(folder / name)
    if not path.is_relative_to(root):
        raise UserError(f"{folder / name}: a link out of {root}, where its files belong")
    if path.exists():
        size_of(path)
    return path


def weight_names(folder: Path) -> list[str]:
    """The files of weights of a folder: one, or those that an index names."""
    index = inside(folder, INDEX)
    if inside(folder, ALONE).exists() or not index.exists():
        return [ALONE]
    names = read_json(index, "fetch it again").get("weight_map")
    if not isinstance(names, dict) or not names or not all(
            re.fullmatch(r"\w[\w.-]{,200}\.safetensors", str(name)) for name in names.values()):
        raise UserError(f"{index}: no map of tensors to files of its folder")
    return sorted({*names.values()})


def refuse_pickle(folder: Path) -> None:
    """UserError for a folder without safetensors."""
    if pickles := [*folder.glob("*.bin"), *folder.glob("*.pt")]:
        raise UserError(
            f"{folder}: {pickles[0].name} is a pickle, and opening one can run code; if you trust "
            'it, convert it: python -c "from transformers import AutoModelForCausalLM as A; '
            "A.from_pretrained('OLD').save_pretrained('NEW')\"")
    raise UserError(f"{folder}: no model.safetensors in it")


# ---------------------------------------------------------------- configuration and weights


def architecture(path: Path, values: dict[str, Any], say: Say) -> GPTConfig:
    """What config.json tells, with GPT2Config's defaults; UserError for what ours cannot be."""
    def get(key: str, default: Any, sound: Callable[[Any], bool], expected: str) -> Any:
        value = values.get(key, default)
        if not sound(value):
            raise UserError(f"{path}: {key} is {value!r:.60}; this model has {expected}")
        return value

    for key, only in FIXED.items():
        get(key, None if key == "model_type" else only,
            lambda v, only=only: v == only and type(v) is type(only), f"{only!r} only")
    vocab_size, n_positions, *sizes = (
        get(key, default, lambda n: type(n) is int and 0 < n < 2**31,
            "a whole number above 0 there") for key, default in SIZES.items())
    drops = [get(key, 0.1, lambda p: type(p) in (int, float), "a number there")
             for key in DROPOUTS]
    get("n_inner", None, lambda n: n in (None, 4 * sizes[2]), "4 * n_embd")
    tied = get("tie_word_embeddings", True, lambda v: type(v) is bool, "true or false there")
    gelu = get("activation_function", "gelu_new", lambda v: isinstance(v, str) and v in GELUS,
               "gelu_new and gelu")
    if len({*drops}) > 1:
        say(f"dropout: {drops[0]}, that of resid_pdrop; embd_pdrop and attn_pdrop are {drops[1:]}")
    try:
        return GPTConfig(vocab_size, n_positions, *sizes, float(drops[0]), bias=True,
                         tie_embeddings=tied, gelu=GELUS[gelu])
    except ValueError as e:
        raise UserError(f"{path}: {e}") from None


def headers(files: Iterable[Path], path: Path, config: GPTConfig) -> dict[str, tuple[Path, str]]:
    """Our name of each tensor -> its file and its name there, once all are known to fit."""
    found: dict[str, tuple[Path, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if not file.exists():
            raise UserError(f"{file}: missing, so the weights are not complete")
        for name, shape in shapes_of(file, leave_out=MASK).items():
            ours = name.removeprefix("transformer.")
            if ours in found:
                raise UserError(f"{file}: {name} is there twice; expected one tensor of each name")
            found[ours], shapes[ours] = (file, name), shape
    if (layers := layers_in(found)) != config.n_layer:  # before a model of so many is described
        raise UserError(f"{path}: n_layer is {config.n_layer}, but there are weights of {layers}")
    expected = stored_shapes(config)
    if config.tie_embeddings and "lm_head.weight" in shapes:
        expected["lm_head.weight"] = expected["wte.weight"]
    for name in sorted(expected.keys() | shapes.keys()):
        if shapes.get(name) != expected.get(name):
            where = found[name][0] if name in found else path.parent
            raise UserError(f"{where}: {name:.80} is {shapes.get(name, 'absent')}, in the model of "
                            f"config.json {expected.get(name, 'absent')}")
    return found


def read_weights(tensors: dict[str, tuple[Path, str]], config: GPTConfig) -> dict[str, Tensor]:
    """The tensors of `headers` as our model has them, in fp32."""
    weights = {}
    for ours, (file, name) in tensors.items():
        with safe_open(file, "pt") as f:
            w = transposed(ours, finite(file, name, f.get_tensor(name)))
        weights[ours] = w.clone(memory_format=torch.contiguous_format)
    if config.tie_embeddings and "lm_head.weight" in weights:
        if not torch.equal(weights.pop("lm_head.weight"), weights["wte.weight"]):
            raise UserError(f"{tensors['lm_head.weight'][0]}: lm_head.weight is not wte.weight, "
                            "though config.json says tie_word_embeddings")
    return weights
