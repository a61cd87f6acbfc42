"""Hugging Face: import GPT-2's weights from its hub or a folder, export a run for its library.

    python -m kit.hf import gpt2 --out_dir=out/gpt2
    python -m kit.hf export out/small exported
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from data import DataError, read_json
from data.prepare import Parser, tell
from data.tokenizer import make_tokenizer
from kit import errors, hf_export, hf_tokenizer, hf_weights
from kit.checkpoint import has_weights_alone, save_weights
from kit.errors import UserError
from kit.files import size_of
from kit.finding import out_root

HUB = {name: f"openai-community/{name}"  # nanoGPT's names for init_from
       for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
         "vocab.json", "merges.txt", "*.safetensors", "model.safetensors.index.json")
Say = Callable[[str], None]


def import_model(name: str, out_dir: Path, spec: str | None = None, overwrite: bool = False,
                 say: Say = tell) -> Path:
    """Write the weights of a hub's name or of a folder as a checkpoint folder, and return it.

    spec: the tokenizer, where the folder has none that can be read. UserError or DataError for what
    is not there, or is no GPT-2 of ours.
    """
    if has_weights_alone(out_dir) and not overwrite:
        raise UserError(f"{out_dir} has imported weights already; --overwrite replaces them")
    source = locate(name)
    find = partial(inside, source)
    if not (path := find("config.json")).exists():
        raise UserError(f"{source}: no config.json; expected a folder of Hugging Face's, with "
                        "config.json and model.safetensors")
    values = read_json(path, "fetch it again")
    config = hf_weights.architecture(path, values, say)
    tensors = hf_weights.headers(weight_files(source), path, config)  # before memory is taken
    tokenizer = make_tokenizer(spec) if spec else hf_tokenizer.from_hf(
        find, values.get("eos_token_id", 50256), say)
    if (rows := config.vocab_size) < tokenizer.vocab_size:
        raise UserError(f"{path}: {rows:,} rows of vocabulary are fewer than the "
                        f"{tokenizer.vocab_size:,} ids of the tokenizer {tokenizer.spec}")
    if rows > tokenizer.vocab_size:
        say(f"vocabulary: {rows:,} rows, cut to the {tokenizer.vocab_size:,} ids of the tokenizer")
    weights = hf_weights.read(tensors, config, tokenizer.vocab_size)
    biases = [n for n in weights if n.endswith(".bias")]
    if not (bias := any(bool(weights[n].any()) for n in biases)):
        weights = {n: w for n, w in weights.items() if n not in biases}
    config = replace(config, vocab_size=tokenizer.vocab_size, bias=bias)
    about = {"from": name if source.parent.name == "snapshots" else source.resolve().name,
             "revision": source.name if source.parent.name == "snapshots" else None}
    save_weights(out_dir, config, weights, tokenizer.to_json(), about)
    say(f"written to {out_dir}: {config.n_layer} layers x {config.n_embd}, context "
        f"{config.block_size}, {sum(w.numel() for w in weights.values()):,} parameters, "
        f"tokenizer {tokenizer.spec}")
    return out_dir


def pretrained(init_from: str, say: Say) -> Path | None:
    """The folder of gpt2, gpt2-medium, gpt2-large or gpt2-xl, imported if it is not there yet.

    None for any other text.
    """
    if init_from not in HUB:
        return None
    folder = out_root() / init_from
    return folder if has_weights_alone(folder) else import_model(init_from, folder, say=say)


def locate(name: str) -> Path:
    """The folder that a name means: of the hub's files, fetched now if need be, or itself."""
    if name not in HUB and Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise UserError(f"{name}: no such folder, and no name of the hub such as gpt2 or "
                        "openai-community/gpt2")
    from huggingface_hub import snapshot_download

    failed: list[Exception] = []
    for repo in (HUB[name], name) if name in HUB else (name,):  # a cache may have either
        try:
            return Path(snapshot_download(repo, allow_patterns=list(FILES)))
        except (OSError, ValueError) as e:  # what it raises is either, offline or unknown
            failed.append(e)
    raise UserError(f"{name}: neither a folder nor to be had from huggingface.co "
                    f"({type(failed[0]).__name__}) or its cache; check the name and the network, "
                    "or give a folder with config.json, model.safetensors and tokenizer.json")


def inside(folder: Path, name: str) -> Path:
    """A file of a folder, or of the hub's cache that the folder is in; UserError for another."""
    root = folder.resolve()
    root = root.parents[1] if root.parent.name == "snapshots" else root  # files are links there
    path = (folder / name).resolve()
    if not path.is_relative_to(root):
        raise UserError(f"{folder / name}: a link out of {root}, where its files belong")
    if path.exists():
        size_of(path)
    return path


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder: one, or those of an index."""
    one, index = (inside(folder, f"model.safetensors{end}") for end in ("", ".index.json"))
    if one.exists():
        return [one]
    if index.exists():
        names = read_json(index, "fetch it again").get("weight_map")
        if not isinstance(names, dict) or not names or any(
                Path(str(n)).name != n for n in names.values()):
            raise UserError(f"{index}: no map of tensors to files of its folder")
        return [inside(folder, name) for name in sorted({*names.values()})]
    if pickles := [*folder.glob("*.bin"), *folder.glob("*.pt")]:
        raise UserError(
            f"{folder}: {pickles[0].name} is a pickle, and opening one can run code; if you trust "
            'it, convert it: python -c "from transformers import AutoModelForCausalLM as A; '
            "A.from_pretrained('OLD').save_pretrained('NEW')\"")
    raise UserError(f"{folder}: no model.safetensors in it")


def main(argv: list[str]) -> int:
    """Run the command; returns 0."""
    parser = Parser(prog="python -m kit.hf", description=__doc__.splitlines()[0],
                    allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=partial(
        Parser, allow_abbrev=False))
    add = commands.add_parser("import", help="GPT-2's weights become a checkpoint").add_argument
    add("name", metavar="NAME", help="of the hub (gpt2, gpt2-medium, openai-community/gpt2, ...), "
        "or a folder with config.json and model.safetensors")
    add("--out_dir", type=Path, help="where it is written (default: out/NAME)")
    add("--tokenizer", metavar="SPEC", help="for a folder without one: gpt2, byte, a tokenizer.json"
        " of ours, ...")
    add("--overwrite", action="store_true", help="replace weights that were imported before")
    add = commands.add_parser("export", help="a run becomes a folder for transformers").add_argument
    add("run", metavar="RUN", help="a run's folder or a checkpoint's")
    add("folder", metavar="DIR", type=Path, help="the new folder")
    add("--step", type=int, help="which checkpoint of the run (default: the best)")
    add("--overwrite", action="store_true", help="replace an export that is there")
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # told by the one that knows the nearest name
        commands.choices[args.command].error(f"unrecognized arguments: {unknown[0]}")
    if args.command == "export":
        hf_export.export_run(args.run, args.folder, args.step, args.overwrite, tell)
        return 0
    if args.tokenizer and args.tokenizer.partition(":")[0] in ("char", "bpe"):
        raise UserError(f"--tokenizer={args.tokenizer} is made from text, and there is none here; "
                        "give the tokenizer.json that it became")
    out_dir = args.out_dir or out_root() / Path(args.name).name
    import_model(args.name, out_dir, args.tokenizer, args.overwrite)
    tell(f'next: python sample.py --out_dir={out_dir} --prompt "..."')
    return 0


if __name__ == "__main__":
    errors.run(main, (DataError,))
