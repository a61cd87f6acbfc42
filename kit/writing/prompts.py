"""What shall be continued: prompts from flags, files and standard input."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import Any

from kit.errors import UserError

OURS = ("index", "sample", "text", "tokens", "ended", "logprobs")  # of a line of the output


@dataclass
class Prompt:
    """What is to be continued; None: as the settings say."""

    text: str
    where: str = "prompt"  # file and line, for what is said of it
    seed: int | None = None  # of its first sample
    max_new_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    others: dict[str, Any] = field(default_factory=dict)  # keys of its line that go through
    ids: list[int] = field(default_factory=list)


def decode(data: bytes, where: str) -> str:
    """UTF-8 as text, without a byte order mark; UserError names the offset of what is none."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as e:
        raise UserError(f"{where}: not UTF-8 text at byte {e.start}") from None


def read_prompts(data: bytes, name: str) -> list[Prompt]:
    """The prompts of a file: a line each, or the objects of .jsonl; UserError names the line.

    An empty line of text is an empty prompt; blank lines of .jsonl are left out. Standard input,
    of name "-", is .jsonl if its first line is an object.
    """
    where = "standard input" if name == "-" else name
    lines = decode(data, where).split("\n")
    lines = lines if lines[-1] else lines[:-1]  # splitlines() would split at more
    if name.endswith(".jsonl") or (name == "-" and lines and is_object(lines[0])):
        prompts = [parse_prompt(line, f"{where}:{n}") for n, line in enumerate(lines, 1)
                   if line.strip()]
    else:
        prompts = [Prompt(line.removesuffix("\r"), f"{where}:{n}")
                   for n, line in enumerate(lines, 1)]
    if not prompts:
        raise UserError(f"{where}: no prompt in it; expected one a line")
    return prompts


def is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def parse_prompt(line: str, where: str) -> Prompt:
    """{"prompt": text} and perhaps seed, max_new_tokens, stop and others; UserError otherwise."""
    try:
        value = json.loads(line, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as e:
        why = getattr(e, "msg", None) or str(e) or "nested too deep"
        raise UserError(f"{where}: not a line of JSON: {why}") from None
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise UserError(f'{where}: expected an object {{"prompt": "..."}}, got {line.strip():.60}')
    stop = value.pop("stop", None)
    stops = [stop] if isinstance(stop, str) else stop
    if stop is not None and not (isinstance(stops, list) and all(
            isinstance(s, str) and s for s in stops)):
        raise UserError(f"{where}: stop is {stop!r:.60}; expected a text or a list of texts")
    if taken := [key for key in OURS if key in value]:
        raise UserError(f"{where}: key {taken[0]!r} is one of the output's own; rename it")
    return Prompt(value.pop("prompt"), where, whole(value, "seed", 0, where),
                  whole(value, "max_new_tokens", 1, where),
                  None if stop is None else tuple(stops), value)


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def whole(value: dict[str, Any], name: str, low: int, where: str) -> int | None:
    """Take a whole number out of a line; None where there is none."""
    number = value.pop(name, None)
    if number is not None and (type(number) is not int or not low <= number < 2**63):
        raise UserError(f"{where}: {name} is {number!r:.60}; expected a whole number, "
                        f"at least {low}")
    return number


def gather(s: Any, note: Callable[[str], None]) -> list[Prompt]:
    """What shall be continued, from flags, a file or standard input."""
    if s.prompts_file is not None:
        data = read_stdin(note) if s.prompts_file == "-" else Path(s.prompts_file).read_bytes()
        return read_prompts(data, s.prompts_file)
    if s.ask is not None:
        return [Prompt(s.ask)]
    if s.prompt:
        several = len(s.prompt) > 1
        return [Prompt(t, f"prompt {i}" if several else "prompt") for i, t in enumerate(s.prompt)]
    if is_terminal(sys.stdin):
        return [Prompt("")]
    text = decode(read_stdin(note), "standard input")
    return [Prompt(text[: -2 if text.endswith("\r\n") else -1] if text.endswith("\n") else text)]


def read_stdin(note: Callable[[str], None]) -> bytes:
    if sys.stdin is None:
        return b""
    late = Timer(3, note, ["waiting for standard input; `< /dev/null` begins a new document"])
    late.daemon = True
    late.start()
    try:
        with open(0, "rb", closefd=False) as f:
            return f.read()
    finally:
        late.cancel()


def is_terminal(stream) -> bool:
    return stream is not None and stream.isatty()  # there is none where it was closed
