"""Text in, token shards out: the room that prepares what the model reads.

`sources` finds documents, `tokenizer` turns text into ids and back, `build` writes a dataset folder
and `prepare` is its command; `shards` and `dataset` open what was written.
"""

import hashlib
import json
import os
import stat
from pathlib import Path

from kit.errors import UserError

LARGEST_JSON = 64 << 20  # bytes; the largest that we write is a tokenizer of a few megabytes


def data_root() -> Path:
    """The folder of prepared sets: $BONSAI_DATA, else `data/` of this clone."""
    return Path(os.environ.get("BONSAI_DATA") or Path(__file__).parent).absolute()


def canonical_hash(value: object) -> str:
    """Hex SHA-256 of a JSON value, whatever the order of its keys and the spaces in its file."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise UserError("a JSON file is nested too deep; prepare the dataset again") from None
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def read_json(path: Path, way: str = "prepare the dataset again") -> dict:
    """Read a JSON object; UserError with the way out if the file is missing or no such thing."""
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode) or info.st_size > LARGEST_JSON:
            raise ValueError(f"no plain file of at most {LARGEST_JSON >> 20} MiB")
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("no object")
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {way}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path} is not JSON ({error}); {way}") from None
    return value
