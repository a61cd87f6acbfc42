"""Settings: one dataclass a script, filled from config files, left to right, and then from flags.

A config file holds `name = value` lines of literals and arithmetic; it is parsed, never executed.
"""

import ast
import contextlib
import io
import operator
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from kit.errors import UserError, did_you_mean

ALL = "; --help lists all"
CLONE = Path(__file__).resolve().parent.parent
Say = Callable[[str], None]  # what a warning or a line of progress is given to


class Loaded(NamedTuple):
    """The settings, and where they came from."""

    settings: Any
    files: list[Path]  # the config files, in order
    flags: list[str]  # as `--name=value`
    given: set[str]  # names that a file, a flag or the run before set; all others are defaults


def load(cls: type, argv: list[str], default_config: str | None = None,
         saved: Callable[[Any], dict | None] = lambda flags: None) -> Loaded:
    """Fill the dataclass `cls`; its check(), if any, refuses values that fight each other.

    Without a config file they start from what `saved` gives for the flags, or default_config.
    """
    hints = get_type_hints(cls)
    files, flags = split_arguments(argv, hints)
    chosen = bool(files)
    base: dict[str, Any] = {}
    if not files and default_config and not {"--help", "-h"} & set(flags):
        before = saved(parse_flags(cls(), flags, hints)) or {}
        base = {n: v for n, v in before.items() if n in hints and fits(v, hints[n])}
        files = [] if base else [default_config]
        if os.environ.get("RANK", "0") == "0":
            taken = "the settings that the run had" if base else default_config
            print(f"no config file given: taking {taken}", file=sys.stderr)
    paths = [find_config(f) for f in files]
    values: dict[str, Any] = {}
    for path in paths:
        values |= read_config(path, {name: hints[name] for name in hints if name != "debug"})
    settings = parse_flags(cls(**base | values), flags, hints)
    if hasattr(settings, "check"):
        settings.check()
    given = {f[2:].partition("=")[0] for f in flags} | (set(values) if chosen else set(base))
    return Loaded(settings, paths, flags, given)


def at_least(settings: Any, low: float, names: str) -> None:
    """UserError unless each named setting is not below `low` and fits into 64 bits."""
    for name in names.split():
        if not low <= (value := getattr(settings, name)) < 2**63:
            raise UserError(f"{name}={value}: must be at least {low} and below 2**63")


def in_range(settings: Any, low: float, high: float, names: str) -> None:
    """UserError unless each named setting lies strictly between low and high."""
    for name in names.split():
        if not low < (value := getattr(settings, name)) < high:
            raise UserError(f"{name}={value}: must be above {low:g} and below {high:g}")


def find_config(name: str) -> Path:
    """A config file by a path from where the user stands or, failing that, from the clone."""
    for path in (Path(name), CLONE / name):
        if path.is_file():
            return path
    known = ", ".join(sorted(f"config/{p.name}" for p in (CLONE / "config").glob("*.py")))
    raise UserError(f"{name}: no such config file; there are {known}; a setting is --name=value")


def read_config(path: Path, hints: dict[str, Any]) -> dict[str, Any]:
    """The values of a config file, each of the type of its setting."""
    if path.stat().st_size > 1 << 20:
        raise UserError(f"{path}: larger than 1 MiB, so no config file")
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows' editors write a mark first
        body = ast.parse(text).body
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not UTF-8 text at byte {e.start}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        why = getattr(e, "msg", "") or str(e) or "nested too deep"
        line = getattr(e, "lineno", None) or 1
        raise UserError(f"{path}:{line}: not a `name = value` line: {why}") from None
    values, lines = {}, text.split("\n")  # splitlines() would count form feeds too
    for node in body:
        try:
            values |= assignment(node, hints)
        except (ValueError, ArithmeticError, RecursionError) as e:
            text = lines[node.lineno - 1].strip()[:80]
            raise UserError(f"{path}:{node.lineno}: {text!r}: {e}") from None
    return values


def assignment(node: ast.stmt, hints: dict[str, Any]) -> dict[str, Any]:
    """{name: value} of a `name = value` line, {} of a docstring; ValueError for anything else."""
    match node:
        case ast.Expr(ast.Constant(str())):
            return {}
        case ast.Assign([ast.Name(name)], expression):
            if name not in hints:
                raise ValueError(f"unknown setting {name}{did_you_mean(name, hints, ALL)}")
            value = literal(expression)
            if not fits(value, hints[name]):
                raise ValueError(f"expected {spell(hints[name])}")
            if is_list(hints[name]):
                return {name: (value,)}
            is_float = type(value) is int and float in options(hints[name])
            return {name: float(value) if is_float else value}
    raise ValueError("not `name = value`; a config file is never executed")


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
             ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos}


def literal(node: ast.expr) -> Any:
    """The value of a literal or of arithmetic on numbers; ValueError for anything else."""
    if isinstance(node, ast.Constant):
        value = node.value
    else:
        if type(getattr(node, "op", None)) not in OPERATORS:
            raise ValueError("only literals and arithmetic are allowed")
        operands = [literal(n) for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
        if not all(type(x) in (int, float) for x in operands):
            raise ValueError("arithmetic is for numbers")
        if isinstance(node.op, ast.Pow) and abs(operands[1]) > 64:
            raise ValueError("a power too large")  # 9**9**9 would compute for ever
        value = OPERATORS[type(node.op)](*operands)
    if type(value) is int and abs(value) >= 2**63:
        raise ValueError("a number too large")
    return value


def split_arguments(argv: list[str], hints: dict[str, Any]) -> tuple[list[str], list[str]]:
    """argv -> (config files, flags as `--name=value`); `--name value` is taken too."""
    files, flags, args = [], [], iter(argv)
    for arg in args:
        if arg in ("--help", "-h"):
            flags.append(arg)
        elif match := re.fullmatch(r"--([\w-]+)(=.*)?", arg, re.DOTALL):
            name, value = match[1].replace("-", "_"), match[2]
            if name not in hints:
                raise UserError(f"unknown setting --{match[1]}{did_you_mean(name, hints, ALL)}")
            if value is None:
                value = "=" + next(args, "--")
                if value.startswith("=--"):
                    raise UserError(f"--{name} needs a value: --{name}={spell(hints[name])}")
            flags.append(f"--{name}{value}")
        elif re.match(r"-*\w[\w-]*=", arg):
            raise UserError(f"{arg}: a setting is written with two dashes: --{arg.lstrip('-')}")
        elif arg.startswith("-"):
            raise UserError(f"{arg}: expected --name=value or a config file")
        else:
            files.append(arg)
    return files, flags


def parse_flags(settings: Any, flags: list[str], hints: dict[str, Any]) -> Any:
    """The settings with the flags applied, one after the other so that a wrong one is known.

    A setting of type tuple[str, ...] may be given several times.
    """
    import tyro  # here, so that reading a config file needs no parser

    lists: dict[str, tuple[str, ...]] = {}
    for flag in flags:
        name, _, value = flag[2:].partition("=")
        if is_list(hints.get(name)):
            lists[name] = (*lists.get(name, ()), value)  # as it is: text needs no parser
            continue
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # tyro's errors fill a box
                settings = tyro.cli(type(settings), args=[flag], default=settings,
                                    use_underscores=True, config=(tyro.conf.FlagConversionOff,))
        except SystemExit as stop:
            if not stop.code:  # --help
                raise
            raise UserError(f"{flag}: expected {spell(hints[name])}") from None
    return replace(settings, **lists)


def is_list(hint: Any) -> bool:
    """Whether a setting is of type tuple[str, ...]."""
    return get_origin(hint) is tuple


def options(hint: Any) -> list[Any]:
    """The types of a union and the texts of a Literal: `Literal["auto"] | int` -> ["auto", int]."""
    return [o for a in get_args(hint) if a is not ... for o in options(a)] or [hint]


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a setting's type; a whole number is also a float."""
    kinds = options(hint)
    return type(value) in kinds or value in kinds or (type(value) is int and float in kinds)


def spell(hint: Any) -> str:
    """A type in words."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "True or False",
             type(None): "None"}
    return " or ".join(words.get(o, o) for o in options(hint))
