"""Text in, token shards out: the room that prepares what the model reads.

`sources` finds documents, `tokenizer` turns text into ids and back, `build` writes a dataset folder
and `prepare` is its command; `shards` and `dataset` open what was written.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

LARGEST_JSON = 64 << 20  # bytes; the largest that we write is a tokenizer of a few megabytes


class DataError(ValueError):
    """A person's mistake or a broken file, in one line that says what was given and what to do."""

    def __str__(self) -> str:  # whatever it quotes, a file may not write to the terminal with it
        return visible(super().__str__())


def data_root() -> Path:
    """The folder of prepared sets: $BONSAI_DATA, else `data/` of this clone."""
    return Path(os.environ.get("BONSAI_DATA") or Path(__file__).parent).absolute()


def visible(text: str, keep: str = "") -> str:
    """Text with all that a terminal would obey or hide written as in Python: newline is \\n."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest one there is, if one is near."""
    near = get_close_matches(word, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def canonical_hash(value: object) -> str:
    """Hex SHA-256 of a JSON value, whatever the order of its keys and the spaces in its file."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise DataError("a JSON file is nested too deep; prepare the dataset again") from None
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def read_json(path: Path, way: str = "prepare the dataset again") -> dict:
    """Read a JSON object; DataError with the way out if the file is missing or no such thing."""
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode) or info.st_size > LARGEST_JSON:
            raise ValueError(f"no plain file of at most {LARGEST_JSON >> 20} MiB")
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("no object")
    except FileNotFoundError:
        raise DataError(f"{path} is missing; {way}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{path} is not JSON ({error}); {way}") from None
    return value
