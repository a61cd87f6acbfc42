"""The checkpoint that somebody means: of the newest run, of a run, of a step, a folder itself."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from filelock import FileLock

from kit.checkpoint import load_config, refuse_lie
from kit.errors import UserError
from kit.files import read_json, write_json
from kit.run import store
from kit.settings import CLONE, Say
from model import GPTConfig

WORDS = ("auto", "scratch", "resume")  # any other init_from is a folder with weights, or
GPT2 = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # nanoGPT's names for those of the hub


def out_root() -> Path:
    """The folder of all runs: out/ in the clone, or $BONSAI_OUT."""
    return Path(os.environ.get("BONSAI_OUT", CLONE / "out"))


def remember(path: Path) -> None:
    """Make this the newest run, the one that sample.py takes; where that can be written."""
    root = out_root()
    with contextlib.suppress(OSError):  # no reason to end a run
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".lock"):
            for stale in root.glob(".tmp-*-latest.json"):  # of a process that was killed here
                stale.unlink(missing_ok=True)
            write_json(root / "latest.json", {"path": str(path.resolve())})


def find_run(out_dir: str | None) -> Path:
    """The run folder given, or the newest."""
    pointer = out_root() / "latest.json"
    if not out_dir and not pointer.exists():
        raise UserError("no run yet: `python train.py config/small.py` makes one, "
                        "or name a run's folder")
    path = Path(out_dir or str(read_json(pointer).get("path")))
    if not path.is_dir():
        raise UserError(f"{path}: no such folder of a run or a checkpoint"
                        f"{foreign(path) if path.exists() else ''}")
    return path


def settings_in(path: Path) -> dict[str, Any] | None:
    """What a run was started with, of config.json or of a checkpoint; None if neither says."""
    for file in (path / "config.json",
                 *(f / "state.json" for f in store.newest_first(path))):
        with contextlib.suppress(
                UserError, OSError, LookupError, TypeError, AttributeError):
            saved = read_json(file)
            return dict(saved.get("run", saved)["settings"].items())
    return None


def same_place(a: Any, b: str) -> bool:
    """Whether two values of init_from mean the same."""
    return a == b or (isinstance(a, str) and os.path.isdir(a) and os.path.isdir(b)
                      and os.path.samefile(a, b))


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """Of a run: the step asked for, else the best, else the newest. A checkpoint is itself."""
    found, best = store.newest_first(path), path / "ckpt" / "best.json"
    if step is not None:
        found = [p for p in found if store.step_of(p) == step]
    elif (path / "model.safetensors").exists() and (path / "model.json").exists():
        return path
    elif best.exists():
        name = store.pointed(path, "best")
        if not name:
            raise UserError(f"{best}: damaged, or its checkpoint is gone; take one with --step=")
        return path / "ckpt" / name
    if not found and step is None and (hint := foreign(path)):
        raise UserError(f"{path}: no checkpoint of ours{hint}")
    if not found:
        steps = [str(store.step_of(p)) for p in store.newest_first(path)[::-1]]
        asked = "" if step is None else f" for --step={step}"
        raise UserError(f"{path}: no checkpoint{asked}; steps there: {', '.join(steps) or 'none'}")
    return found[0]


def foreign(path: Path) -> str:
    """Which command turns the weights of another program into ours; nothing if they are none."""
    here, files = path.is_dir(), {p.name for p in path.iterdir()} if path.is_dir() else {path.name}
    if here and "config.json" in files and any(
            name.endswith((".safetensors", ".safetensors.index.json")) for name in files):
        command = f"kit.hf import {quote(str(path))}"
    elif path.suffix == ".pt" or "ckpt.pt" in files:
        command = f"extras.nanogpt_ckpt {quote(str(path / 'ckpt.pt' if here else path))}"
    elif path.suffix == ".bin":
        command = f"extras.llmc {quote(str(path))}"
    else:
        return ""
    return f"; for weights of another program: python -m {command} --out_dir=FOLDER"


def find_source(init_from: str, say: Say = print) -> Path | None:
    """The checkpoint whose weights a new run starts from; None for auto, scratch and resume."""
    if init_from in WORDS:
        return None
    if init_from in GPT2:
        from kit.hf.importing import pretrained

        return pretrained(init_from, say)
    if not Path(init_from).is_dir():
        raise UserError(f"init_from={init_from}: expected auto, scratch, resume, gpt2, or a folder "
                        f"of weights: a run or a checkpoint{foreign(Path(init_from))}. A run that "
                        "began with it goes on without: python train.py --out_dir=RUN")
    folder = find_checkpoint(Path(init_from))
    store.check(folder, store.WEIGHTS)
    return folder


def adopt_architecture(settings: Any, given: set[str], source: Path | None) -> None:
    """A run from weights has their architecture; UserError where a `given` setting is another."""
    if source is None:
        if settings.extend_positions:
            raise UserError(f"extend_positions={settings.extend_positions}: needs weights to start "
                            "from: --init_from=RUN")
        return
    config = load_config(source)
    refuse_lie(config, source / "model.safetensors")
    settings.block_size = context_for(config, settings, given, source)
    if (config.attn_logn, config.logn_base) == ("clipped", None):
        config = replace(config, logn_base=max(config.block_size, 2))  # whatever the context is now
    names = vars(config).keys() & vars(settings).keys() - {"vocab_size", "dropout", "block_size"}
    for name in sorted(names):
        ours, theirs = getattr(settings, name), getattr(config, name)
        if name in given and ours != theirs:
            raise UserError(f"{name}={ours}, but the weights of {source} have {name}={theirs}; "
                            f"drop {name} to take theirs")
        setattr(settings, name, theirs)


def context_for(config: GPTConfig, settings: Any, given: set[str], source: Path) -> int:
    """The context of a run from weights: theirs, a smaller one, or with extend_positions a larger.
    """
    size, how = config.block_size, settings.extend_positions
    wanted = settings.block_size if "block_size" in given else size
    if wanted > size and how is None:
        raise UserError(f"block_size={wanted}, but the weights of {source} have {size} positions; "
                        "--extend_positions=interpolate, hierarchical or copy makes more of them")
    if how and wanted <= size:
        raise UserError(f"extend_positions={how}, but the weights of {source} have {size} "
                        f"positions: give a larger --block_size than that, not {wanted}")
    return wanted


def same_tokenizer(folder: Path, tokenizer: Any) -> None:
    """UserError unless the checkpoint was trained with this tokenizer."""
    theirs = read_json(folder / "tokenizer.json")
    if theirs.get("hash") != tokenizer.hash:
        raise UserError(f"{folder} was trained with tokenizer {theirs.get('spec')}, the data set "
                        f"has another, {tokenizer.spec}; prepare it with that one: python -m "
                        f"data.prepare SOURCE --name=NAME --tokenizer={folder / 'tokenizer.json'}")
    if (ids := load_config(folder).vocab_size) != tokenizer.vocab_size:
        raise UserError(f"{folder}: its tokenizer has {tokenizer.vocab_size} ids, its model {ids}")
