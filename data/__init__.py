"""Text in, token shards out: the room that prepares what the model reads.

`sources` finds documents, `tokenizer` turns text into ids and back, `build` writes a dataset folder
and `prepare` is its command; `shards` and `dataset` open what was written.
"""

import hashlib
import json
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class DataError(ValueError):
    """A person's mistake or a broken file, in one line that says what was given and what to do."""


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest one there is, if one is near."""
    near = get_close_matches(word, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def canonical_hash(value: object) -> str:
    """Hex SHA-256 of a JSON value, whatever the order of its keys and the spaces in its file."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def read_json(path: Path, way: str = "prepare the dataset again") -> dict:
    """Read a JSON object; DataError with the way out if the file is missing or no such thing."""
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("no object")
    except FileNotFoundError:
        raise DataError(f"{path} is missing; {way}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); {way}") from None
    return value
