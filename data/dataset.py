"""A dataset, opened: `Dataset(folder).train.rows(...)` is all that a training loop needs."""

import functools
from pathlib import Path

import numpy as np

from data import DataError
from data.shards import Split, check_header
from data.tokenizer import Tokenizer, canonical_hash, from_json, make_tokenizer, read_json

FORMAT = 1  # of dataset.json
SPLITS = ("train", "val")


class Dataset:
    """A folder that `data.prepare` wrote, or any folder of llm.c shards.

    Without `dataset.json` the shards are those named *train*.bin and *val*.bin, and their
    tokenizer is the one given by name, gpt2 by default; with it, both are as recorded there.
    DataError for a folder with no shards, or with parts that do not belong together.
    """

    def __init__(self, folder: str | Path, tokenizer: str | None = None):
        self.folder = Path(folder)
        self.meta: dict  # dataset.json, or its like for published shards
        self.tokenizer: Tokenizer
        self._shards: dict[str, list[tuple[Path, int]]]  # by split: path, number of tokens
        if (self.folder / "dataset.json").exists():
            self._open_prepared()
        else:
            self._open_foreign(tokenizer or "gpt2")
        self.vocab_size: int = self.tokenizer.vocab_size
        self.separator: int | None = self.tokenizer.eot

    @property
    def hash(self) -> str:
        """Hex SHA-256 of dataset.json, which holds those of the shards: equal hash, equal data.

        Of published shards it knows names, token counts and tokenizer only.
        """
        return canonical_hash(self.meta)

    @functools.cached_property
    def train(self) -> Split:
        """The training split, opened and checked when first asked for."""
        return self._split("train")

    @functools.cached_property
    def val(self) -> Split:
        """The validation split, opened and checked when first asked for."""
        return self._split("val")

    def token_byte_lengths(self) -> np.ndarray:
        """Bytes of text behind each id, int64 (vocab_size,), to turn losses into bits per byte.

        Zero for the separator and other special ids, which are no text.
        """
        special = set(self.tokenizer.special.values())
        return np.array([0 if id in special else len(self.tokenizer.token_bytes(id))
                         for id in range(self.vocab_size)], dtype=np.int64)

    def _split(self, name: str) -> Split:
        split = Split(name, [path for path, _ in self._shards[name]], self.vocab_size)
        recorded = sum(tokens for _, tokens in self._shards[name])
        if split.n_tokens != recorded:
            raise DataError(f"{self.folder}: the {name} shards hold {split.n_tokens:,} tokens, but "
                            f"dataset.json says {recorded:,}; prepare the dataset again")
        return split

    def _open_prepared(self) -> None:
        path = self.folder / "dataset.json"
        self.meta = read_json(path)
        if self.meta.get("format") != FORMAT:
            raise DataError(f"{path} has format {self.meta.get('format')!r}, expected {FORMAT}; "
                            "prepare the dataset again")
        self.tokenizer = from_json(read_json(self.folder / "tokenizer.json"))
        try:
            self._shards = {name: [(self.folder / shard["file"], int(shard["tokens"]))
                                   for shard in self.meta["splits"][name]["shards"]]
                            for name in SPLITS}
            made_by = self.meta["tokenizer_hash"]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is broken ({type(error).__name__}: {error}); prepare the "
                            "dataset again") from None
        if made_by != self.tokenizer.hash:
            raise DataError(f"{self.folder}: tokenizer.json is not the tokenizer that made these "
                            "shards; prepare the dataset again")

    def _open_foreign(self, tokenizer: str) -> None:
        if tokenizer == "char" or tokenizer.startswith("bpe:"):
            raise DataError(f"{self.folder} holds shards without dataset.json, made by a tokenizer "
                            f"that {tokenizer} cannot rebuild; name theirs, as --tokenizer=gpt2")
        self._shards = {name: [(path, check_header(path)[0])
                               for path in foreign_shards(self.folder, name)] for name in SPLITS}
        for name, shards in self._shards.items():
            if not shards:
                raise DataError(f"{self.folder} has neither dataset.json nor {name} shards "
                                f"(*{name}*.bin); prepare it: python -m data.prepare --help")
        self.tokenizer = make_tokenizer(tokenizer)
        self.meta = {"tokenizer_hash": self.tokenizer.hash, "splits": {
            name: [(path.name, tokens) for path, tokens in shards]
            for name, shards in self._shards.items()}}


def foreign_shards(folder: Path, split: str) -> list[Path]:
    """The *train*.bin of a folder without dataset.json, or those of its *val*.bin that are not."""
    return sorted(path for path in folder.glob(f"*{split}*.bin")
                  if split == "train" or "train" not in path.name)
