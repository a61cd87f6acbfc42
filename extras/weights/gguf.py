"""Write a checkpoint as a GGUF file, which llama.cpp, Ollama and LM Studio run.

The file says that it holds a GPT-2, so a model.py that is not GPT-2 any more is refused. Matrices
are in the type asked for; norms, biases and positions, which are small, in f32.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm import tqdm

from data.instruct import CHAT_TEMPLATE
from data.prepare import Parser, of_run
from data.tokenizer import from_json
from extras.weights.gguf_vocabulary import ALMOST, Vocabulary, vocabulary, with_end
from kit.checkpoint import load_model
from kit.errors import UserError, plain
from kit.files import replacing
from kit.hf.gpt2 import refuse_unlike, shapes_with_biases
from kit.hf.importing import finite
from kit.run.locate import find_checkpoint, find_run
from kit.run.store import trained_with
from model import GPT, GPTConfig

if TYPE_CHECKING:
    from gguf import GGUFWriter

TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
STEP = 256  # positions, of llama.cpp's cache


def export(source: str | None, file: Path, kind: str = "f16", step: int | None = None,
           overwrite: bool = False, approximate: bool = False) -> None:
    """Write a run's checkpoint to file; None: of the newest. UserError for what cannot be there."""
    if file.is_dir() or (file.exists() and not overwrite):
        raise UserError(f"{file} is there already; give another name, or replace it: --overwrite")
    folder = find_checkpoint(find_run(source), step)
    if source is None:
        print(plain(f"of the newest run: {folder}"))
    model, json, state = load_model(folder)
    config, tokenizer = model.config, from_json(json)
    if config.attn_logn != "off":
        raise UserError(f"{folder}: attn_logn={config.attn_logn} is nothing that llama.cpp knows")
    refuse_unlike(model, folder, "llama.cpp cannot run it; sample.py and extras.serve can")
    weights = {name: finite(folder, name, p.detach()).numpy()
               for name, p in model.named_parameters()}
    made = vocabulary(tokenizer)
    if config.gelu == "erf":
        told = gelu_error(model)
        if not approximate:
            raise UserError(f"{folder}: gelu=erf, llama.cpp computes the tanh form: {told}; if "
                            "that will do, --approximate")
        print(f"gelu=erf, llama.cpp computes the tanh form: {told}")
    if len(made.tokens) > config.vocab_size:
        weights = with_end(weights)
    if rows := -config.block_size % STEP:
        print(f"context {config.block_size}, {config.block_size + rows} in the file: llama.cpp "
              "rounds up to that and would crash beyond the positions there are; the last one "
              f"repeats, so stop a text at {config.block_size} tokens")
        config = replace(config, block_size=config.block_size + rows)
        weights["wpe.weight"] = np.pad(weights["wpe.weight"], ((0, rows), (0, 0)), "edge")
    if made.pre in ALMOST:
        print(plain(f"{tokenizer.spec}: llama.cpp's {made.pre} is almost it: {ALMOST[made.pre]}"))
    place = folder.resolve()
    title = place.parents[1].name if place.parent.name == "ckpt" else place.name
    _, name, hash = trained_with(state)
    data = of_run(hash, name, tokenizer)
    chat = CHAT_TEMPLATE if data and data.is_chat else ""
    write(file, config, weights, made, kind, title, chat)
    print(plain(f"written to {file}: {folder} in {kind}, {file.stat().st_size:,} bytes"
                f"{', with the chat template of its data' if chat else ''}"))
    print(plain(f"next: llama-completion -m {file} -p TEXT, or FROM {file} in a Modelfile of "
                "Ollama"))


# ------------------------------------------------------------------------------------ the file


def write(file: Path, config: GPTConfig, weights: dict[str, np.ndarray], made: Vocabulary,
          kind: str, title: str, chat: str = "") -> None:
    """A GGUF file, put in its place whole. weights: fp32 by our names, biases may be left out."""
    try:
        import gguf
    except ImportError:
        raise UserError("this needs the gguf package: pip install -r extras/requirements.txt"
                        ) from None
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
    plan, uneven = [], []
    for name, w in {**zero_biases(config), **weights}.items():
        # A head with the row of with_end is exact, or that row would not be.
        exact = w.ndim == 1 or name == "wpe.weight" or (
            name == "lm_head.weight" and len(w) > config.vocab_size)
        short = kind.startswith("q") and w.shape[-1] % 32
        type_ = gguf.GGMLQuantizationType["F32" if exact else "F16" if short else kind.upper()]
        uneven += [name] * bool(short and not exact)
        plan.append((names.get_name(name, (".weight", ".bias")), w, type_))
    if uneven:
        print(f"{kind} goes by 32 numbers: {len(uneven)} matrices whose rows are no multiple of "
              f"that are in f16, such as {uneven[0]}")
    with replacing(file) as aside:
        writer = gguf.GGUFWriter(aside, "gpt2")
        describe(writer, config, made, kind, title, chat)
        for name, w, type_ in plan:
            size = int(np.prod(gguf.quants.quant_shape_to_byte_shape(w.shape, type_)))
            writer.add_tensor_info(name, w.shape, np.dtype(np.float32), size, raw_dtype=type_)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            [opened] = writer.fout
            writer.write_padding(opened, opened.tell())
            for name, w, type_ in tqdm(plan, file.name, unit="tensors", disable=None):
                with np.errstate(over="ignore"):  # told below
                    data = gguf.quants.quantize(np.ascontiguousarray(w, np.float32), type_)
                if data.dtype == np.float16 and not np.isfinite(data).all():
                    raise UserError(f"{name} has weights beyond 65,504, the largest of f16; take "
                                    "--type=f32")
                opened.write(data.data)  # writer.write_tensor_data hides why a disk takes no more
                writer.write_padding(opened, data.nbytes)
        finally:
            writer.close()


def zero_biases(config: GPTConfig) -> dict[str, np.ndarray]:
    """Those of a GPT-2 of this shape: llama.cpp knows none without."""
    return {name: np.zeros(shape, np.float32) for name, shape in shapes_with_biases(config).items()
            if name.endswith(".bias")}


def describe(writer: "GGUFWriter", config: GPTConfig, made: Vocabulary, kind: str, title: str,
             chat: str) -> None:
    """All of the file that is no tensor."""
    import gguf

    writer.add_name(title)
    writer.add_file_type(gguf.LlamaFileType[TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(len(made.tokens))
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(made.pre)
    writer.add_token_list(made.tokens)
    writer.add_token_types([int(gguf.TokenType[t]) for t in made.types])
    writer.add_token_merges(made.merges)
    writer.add_bos_token_id(made.end)
    writer.add_eos_token_id(made.end)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    if chat:
        writer.add_chat_template(chat)


@torch.no_grad()
def gelu_error(model: GPT) -> str:
    """How far the logits of random tokens move when the exact GELU becomes the tanh form."""
    ids = torch.randint(model.config.vocab_size, (1, min(model.config.block_size, 256)),
                        generator=torch.Generator().manual_seed(0))
    exact = model.eval()(ids)
    for block in model.h:
        block.mlp.approximate = "tanh"
    close = model(ids)
    for block in model.h:
        block.mlp.approximate = "none"
    other = (exact.argmax(-1) != close.argmax(-1)).float().mean().item()
    return (f"on random tokens logits are up to {(exact - close).abs().max() / exact.std():.1e} "
            f"of their deviation off, and {other:.1%} of the likeliest tokens are others")


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m extras.to_gguf", description=__doc__.splitlines()[0],
                    allow_abbrev=False)
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="a run, of which the best checkpoint is taken, or a "
        "checkpoint (default: the newest run)")
    add("file", type=Path, metavar="FILE.gguf", help="to write")
    add("--type", choices=TYPES, default="f16", help="of the matrices (default: %(default)s)")
    add("--step", type=int, help="of the checkpoint (default: the best)")
    add("--approximate", action="store_true", help="write a model with the exact GELU (gelu=erf), "
        "as nanoGPT's are, though llama.cpp computes the tanh form")
    add("--overwrite", action="store_true", help="replace a file that is there")
    add("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv)
    export(args.run, args.file, args.type, args.step, args.overwrite, args.approximate)
    return 0
