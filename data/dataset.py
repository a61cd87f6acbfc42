"""A dataset, opened: `Dataset(folder).train.rows(...)` is all that a training loop needs."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data import canonical_hash, read_json
from data.shards import Shards, Split, check_header
from data.tokenizer import from_json
from kit.errors import UserError

if TYPE_CHECKING:
    from data.instruct import Samples

FORMAT = 1  # of dataset.json
SPLITS = ("train", "val")
_FILES = [{"file": str, "tokens": int, "sha256": str}]
_SPLIT = {"documents": int, "bytes": int, "tokens": int, "shards": _FILES}
_SHAPE = {  # what a dataset.json has at least, in lists that are not empty
    "name": str, "tokenizer": str, "tokenizer_hash": str, "vocab_size": int, "skipped": {},
    "val_below": str | None,
    "sources": [{"source": str, "sha256": str, "documents": int, "bytes": int}],
    "splits": dict.fromkeys(SPLITS, _SPLIT)}
_SAMPLES = {"splits": dict.fromkeys(SPLITS, {"mask": _FILES, "starts": _FILES})}


def misfit(value: object, shape: object, path: str = "") -> str | None:
    """The path of what is missing or of another type in a JSON value, if anything is."""
    if isinstance(shape, dict) and isinstance(value, dict):
        parts = [(f"{path}.{key}", value.get(key), of) for key, of in shape.items()]
    elif isinstance(shape, list) and isinstance(value, list) and value:
        parts = [(f"{path}[{i}]", item, shape[0]) for i, item in enumerate(value)]
    else:
        fits = not isinstance(shape, (dict, list)) and isinstance(value, shape)
        return None if fits else path
    return next(filter(None, (misfit(item, of, at) for at, item, of in parts)), None)


class Dataset:
    """A folder that `data.prepare` wrote, or any folder of llm.c shards.

    train and val are a `Split` each, or `Samples` if it is instruction data (kind "instruct").
    align ("document", "off" or None: as prepared) and long: see `Split` and `Samples`.

    Without `dataset.json` the shards are those named *train*.bin and *val*.bin, and their
    tokenizer is the one given by name, gpt2 by default; with it, both are as recorded there.
    UserError for a folder with no shards, or with parts that do not belong together.
    """

    def __init__(self, folder: str | Path, tokenizer: str | None = None,
                 align: str | None = None, long: str = "drop", verify: bool = False):
        self.folder, self._long = Path(folder), long
        if (self.folder / "dataset.json").exists():
            self._open_prepared()
        else:
            self._open_foreign(tokenizer or "gpt2")
        self.vocab_size: int = self.tokenizer.vocab_size
        self.separator: int | None = self.tokenizer.eot
        self.hash = canonical_hash(self.meta)  # of its shards' hashes: equal hash, equal data
        self._opened: list[tuple[Shards, list[dict]]] = []  # with what is recorded of them
        self.train, self.val = map(self._split, SPLITS)
        if (align or self.meta.get("align")) == "document":
            if self.separator is None or self.kind != "text":
                what = "instruction data" if self.kind != "text" else "without separators"
                raise UserError(f"--align=document: {self.folder} is {what}; leave --align out")
            self.train.align = self.separator
        if verify:
            self.verify()

    def token_byte_lengths(self) -> np.ndarray:
        """Bytes of text behind each id, int64 (vocab_size,); none behind special ones."""
        tokens = map(self.tokenizer.token_bytes, range(self.vocab_size))
        lengths = np.fromiter(map(len, tokens), np.int64)
        lengths[list(self.tokenizer.special.values())] = 0
        return lengths

    @property
    def is_chat(self) -> bool:
        """Whether these are chats, not texts nor prompts with their completions."""
        return self.kind == "instruct" and self.train.are_chats(self.tokenizer)

    def _open_prepared(self) -> None:
        self.meta = read_json(self.folder / "dataset.json")
        if (version := self.meta.get("format")) != FORMAT:
            raise self._broken(f"dataset.json has format {version!r}, expected {FORMAT}")
        self.kind = self.meta.get("kind", "text")  # the first sets did not say
        if self.kind not in ("text", "instruct"):
            raise self._broken(f"dataset.json is of kind {self.kind!r}, expected text or instruct")
        wrong = misfit(self.meta, _SHAPE) or self.kind == "instruct" and misfit(self.meta, _SAMPLES)
        below = self.meta.get("val_below", "missing") or "0" * 16
        if not wrong and not re.fullmatch("[0-9a-f]{16}", below):
            wrong = ".val_below"
        if wrong:
            raise self._broken(f"dataset.json is broken at {wrong[1:]}")
        self.tokenizer = from_json(read_json(self.folder / "tokenizer.json"))
        if self.meta["tokenizer_hash"] != self.tokenizer.hash:
            raise self._broken("tokenizer.json is not the tokenizer that made these shards")

    def _broken(self, what: str) -> UserError:
        return UserError(f"{self.folder}: {what}; prepare the dataset again")

    def _open_foreign(self, tokenizer: str) -> None:
        self.kind, self.meta = "text", {"splits": {}}  # all that published shards tell
        for name in SPLITS:
            paths = sorted(path for path in self.folder.glob(f"*{name}*.bin")
                           if name == "train" or "train" not in path.name)
            if not paths:
                raise UserError(f"{self.folder} has neither dataset.json nor {name} shards "
                                f"(*{name}*.bin); prepare it: python -m data.prepare --help")
            self.meta["splits"][name] = {"shards": [
                {"file": path.name, "tokens": check_header(path)[0]} for path in paths]}
        from data.making.tokenizers import make_tokenizer

        self.tokenizer = make_tokenizer(tokenizer)
        self.meta["tokenizer_hash"] = self.tokenizer.hash

    def _split(self, name: str) -> "Split | Samples":
        part = self.meta["splits"][name]
        split = Split(name, self._paths(part["shards"]), self.vocab_size)
        self._opened.append((split, part["shards"]))
        recorded = sum(shard["tokens"] for shard in part["shards"])
        if split.n_tokens != recorded:
            raise self._broken(f"the {name} shards hold {split.n_tokens:,} tokens, but "
                               f"dataset.json says {recorded:,}")
        if self.kind == "text":
            return split
        from data.instruct import Samples

        starts = Shards(self._paths(part["starts"]), "starts")
        if starts.n > split.n:  # before they fill the memory
            raise self._broken(f"the {name} split has more samples than tokens")
        mask = Shards(self._paths(part["mask"]), "mask", limit=2)
        self._opened += [(mask, part["mask"]), (starts, part["starts"])]
        return Samples(name, split, mask, starts.read(0, starts.n), self.separator, self._long)

    def _paths(self, files: list[dict]) -> list[Path]:
        for name in (file["file"] for file in files):
            if Path(name).name != name or "\\" in name:
                raise self._broken(f"dataset.json names {name!r}, which is no file of this folder")
        return [self.folder / file["file"] for file in files]

    def verify(self) -> None:
        """Read every byte: UserError unless hashes are as recorded and ids in the vocabulary."""
        for shards, recorded in self._opened:
            shards.verify(recorded)
