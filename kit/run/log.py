"""log.jsonl: what a run measured, one JSON object a line."""

import contextlib
import json
import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from kit.files import replacing, size_of
from kit.progress import is_number

FORMAT = 1
LONGEST_LINE = 1 << 16  # characters


class Log:
    """log.jsonl, one JSON object a line, the first with the format version.

    A run that goes on is cut back to its checkpoint: `step`, and the last evaluation made by then.
    """

    def __init__(self, path: Path, step: int = 0, last_eval: int = 0):
        self.path = path
        old = read_log(path) if step and path.exists() else ()
        kept = (row for row in old if "format" not in row
                and row["step"] <= (last_eval if "val_loss" in row else step))
        with replacing(path) as aside, aside.open("w", encoding="utf-8") as f:
            for row in chain([{"format": FORMAT, "step": 0}], kept):
                f.write(to_line(row))

    def write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as f:
            f.write(to_line(row))


def to_line(row: dict[str, Any]) -> str:
    """A row as JSON, which has no NaN and no infinity: they become null."""
    odd = {k: None for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    return json.dumps(row | odd) + "\n"


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a log; what a crash tore is left out."""
    size_of(path)  # a plain file?
    with path.open(encoding="utf-8", errors="replace") as f:
        while line := f.readline(LONGEST_LINE):
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and is_number(row.get("step")) and row["step"] >= 0:
                    yield {k: v for k, v in row.items() if v is None or is_number(v)}
