"""Hugging Face: import GPT-2's weights from its hub or a folder, export a run for its library.

    python -m kit.hf import gpt2 --out_dir=out/gpt2
    python -m kit.hf export out/small exported
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from data import read_json
from data.prepare import Parser, tell
from kit.errors import UserError
from kit.files import read_json as read_sealed
from kit.files import size_of
from kit.hf import tokenizer, weights
from kit.hf.importing import (
    keep,
    next_step,
    refuse_edited_model,
    refuse_place,
    resolved,
    tokenizer_of,
)
from kit.run.locate import GPT2, out_root
from kit.run.store import WEIGHTS, check, imported
from model import GPTConfig

HUB = {name: f"openai-community/{name}" for name in GPT2}
INDEX = "model.safetensors.index.json"
TEXTS = ("config.json", "tokenizer.json", "vocab.json", "merges.txt", "bonsai.json", INDEX)
Say = Callable[[str], None]


def import_model(name: str, out_dir: Path, spec: str | None = None, overwrite: bool = False,
                 say: Say = tell) -> Path:
    """Write the weights of a hub's name or of a folder as a checkpoint folder, and return it.

    spec: the tokenizer, where the folder has none that can be read. UserError or DataError for what
    is not there or is no GPT-2 of ours, and where model.py is none any more.
    """
    refuse_place(out_dir, overwrite)
    made = tokenizer_of(spec) if spec else None
    source, repo = locate(name)
    find = partial(inside, source)
    if not (path := find("config.json")).exists():
        raise UserError(f"{source}: no config.json; expected a folder of Hugging Face's, with "
                        "config.json and model.safetensors")
    values = read_json(path, "fetch it again")
    config = weights.architecture(path, values, say)
    refuse_edited_model(config, source)
    made = made or tokenizer.from_hf(find, values.get("eos_token_id", 50256), say)
    if config.vocab_size < made.vocab_size:
        raise UserError(f"{path}: {config.vocab_size:,} rows of vocabulary are fewer than the "
                        f"{made.vocab_size:,} ids of the tokenizer {made.spec}")
    if repo:  # now that it is known to be a GPT-2 of ours
        fetch(repo, indexed(source) or ["model.safetensors"], source.name)
    tensors = weights.headers(weight_files(source), path, config)  # before memory is taken
    about = {"from": name if repo else source.resolve().name,
             "revision": source.name if repo else None}
    keep(out_dir, config, weights.read(tensors, config), made, about, say,
         overwrite)
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
    """Whether these weights of the hub are in a folder; UserError if others are, or damaged."""
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
    """The folder that a name means, and of one of the hub the repository: its texts are fetched."""
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


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder: one, or those of an index."""
    one = inside(folder, "model.safetensors")
    if one.exists():
        return [one]
    if names := indexed(folder):
        return [inside(folder, name) for name in names]
    if pickles := [*folder.glob("*.bin"), *folder.glob("*.pt")]:
        raise UserError(
            f"{folder}: {pickles[0].name} is a pickle, and opening one can run code; if you trust "
            'it, convert it: python -c "from transformers import AutoModelForCausalLM as A; '
            "A.from_pretrained('OLD').save_pretrained('NEW')\"")
    raise UserError(f"{folder}: no model.safetensors in it")


def indexed(folder: Path) -> list[str]:
    """The files of weights that an index names, if there is one."""
    if not (index := inside(folder, INDEX)).exists():
        return []
    names = read_json(index, "fetch it again").get("weight_map")
    if not isinstance(names, dict) or not names or not all(
            re.fullmatch(r"\w[\w.-]{,200}\.safetensors", str(name)) for name in names.values()):
        raise UserError(f"{index}: no map of tensors to files of its folder")
    return sorted({*names.values()})


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
    add("run", nargs="?", metavar="RUN", help="a run's folder or a checkpoint's (default: the "
        "newest run)")
    add("folder", metavar="DIR", type=Path, help="the new folder")
    add("--step", type=int, help="which checkpoint of the run (default: the best)")
    add("--overwrite", action="store_true", help="replace an export that is there")
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # told by the one that knows the nearest name
        commands.choices[args.command].error(f"unrecognized arguments: {unknown[0]}")
    if args.command == "export":
        from kit.hf.export import export_run

        export_run(args.run, args.folder, args.step, args.overwrite, tell)
        return 0
    name = Path(args.name).resolve().name if Path(args.name).is_dir() else Path(args.name).name
    out_dir = args.out_dir or out_root() / name
    import_model(args.name, out_dir, args.tokenizer, args.overwrite)
    tell(next_step(out_dir))
    return 0
