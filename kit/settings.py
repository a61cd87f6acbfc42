"""Settings: one dataclass a script, filled from config files and flags, with errors of one line.

Order: defaults < config files, left to right < flags. A config file holds `name = value` lines of
literals and arithmetic; it is parsed, never executed. nanoGPT's config files read as they are.
"""

import ast
import contextlib
import difflib
import io
import operator
import os
import re
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

S = TypeVar("S")
CLONE = Path(__file__).resolve().parent.parent


class UserError(Exception):
    """A person's mistake, in a line: what was given, what was expected, what to do."""

    def __str__(self) -> str:
        return "\\n".join(super().__str__().splitlines())  # a line, whatever it quotes


def run(main: Callable[[list[str]], int | None], mistakes: tuple[type[Exception], ...]) -> None:
    """Call main(arguments) and exit; a mistake or a failing disk is a line and exit code 2."""
    argv = sys.argv[1:]
    debug = bool({"--debug", "--debug=True"} & set(argv))
    try:
        code = main([a for a in argv if a != "--debug"]) or 0
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has gone, as in `sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (UserError, OSError, *mistakes) as e:
        if debug:
            raise
        text = f"{e.strerror}: {e.filename}" if getattr(e, "filename", None) else str(e)
        print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


class Loaded(typing.NamedTuple, typing.Generic[S]):
    """The settings, and where they came from."""

    settings: S
    files: list[Path]  # the config files, in order
    flags: list[str]  # as `--name=value`
    given: set[str]  # names that a file or a flag set; all others are defaults


def load(cls: type[S], argv: list[str], default_config: str | None = None) -> Loaded[S]:
    """Fill the dataclass `cls` from config files and flags.

    cls.check(), where there is one, is called at the end to refuse values that fight each other.
    """
    hints = typing.get_type_hints(cls)
    files, flags = split_arguments(argv, hints)
    if not files and default_config and not {"--help", "-h"} & set(flags):
        print(f"no config file given: taking {default_config}", file=sys.stderr)
        files = [default_config]
    paths = [find_config(f) for f in files]
    values: dict[str, Any] = {}
    for path in paths:
        values |= read_config(path, hints)
    settings = parse_flags(cls, cls(**values), flags, hints)
    if hasattr(settings, "check"):
        settings.check()
    return Loaded(settings, paths, flags, set(values) | {f[2:].partition("=")[0] for f in flags})


def at_least(settings: Any, low: float, names: str) -> None:
    """UserError unless each named setting is not below `low` and fits into 64 bits."""
    for name in names.split():
        value = getattr(settings, name)
        if not low <= value < 2**63:
            bound = "below 2**63" if value > low else f"at least {low}"
            raise UserError(f"{name}={value}: must be {bound}")


def in_range(settings: Any, low: float, high: float, names: str) -> None:
    """UserError unless each named setting lies strictly between low and high."""
    for name in names.split():
        if not low < getattr(settings, name) < high:
            value = getattr(settings, name)
            raise UserError(f"{name}={value}: must be above {low:g} and below {high:g}")


# ------------------------------------------------------------------------------------ config files


def find_config(name: str) -> Path:
    """A config file by a path from where the user stands or, failing that, from the clone."""
    for path in (Path(name), CLONE / name):
        if path.is_file():
            return path
    known = ", ".join(sorted(f"config/{p.name}" for p in (CLONE / "config").glob("*.py")))
    raise UserError(f"{name}: no such config file; there are {known}")


def read_config(path: Path, hints: dict[str, Any]) -> dict[str, Any]:
    """The values of a config file, each checked against the type of its setting."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows' editors write a mark first
        body = ast.parse(text, str(path)).body
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not UTF-8 text at byte {e.start}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        why = getattr(e, "msg", "") or "nested too deep"
        line = getattr(e, "lineno", None) or 1
        raise UserError(f"{path}:{line}: not a `name = value` line: {why}") from None
    values, lines = {}, text.split("\n")  # splitlines() would count form feeds too
    for node in body:
        where = f"{path}:{node.lineno}: {lines[node.lineno - 1].strip()[:80]!r}"
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            continue  # a docstring
        single = isinstance(node, ast.Assign) and len(node.targets) == 1
        if not (single and isinstance(node.targets[0], ast.Name)):
            raise UserError(f"{where}: not `name = value`; a config file is never executed")
        name = node.targets[0].id
        if name not in hints:
            raise UserError(f"{where}: unknown setting {name}{nearest(name, hints)}")
        try:
            value = literal(node.value)
        except (ValueError, ArithmeticError, TypeError, RecursionError) as e:
            raise UserError(f"{where}: {e}; only literals and arithmetic are allowed") from None
        if not fits(value, hints[name]):
            raise UserError(f"{where}: expected {spell(hints[name])}")
        is_float = float in (hints[name], *get_args(hints[name]))
        values[name] = float(value) if type(value) is int and is_float else value
    return values


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
             ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos}


def literal(node: ast.expr) -> Any:
    """The value of a literal or of arithmetic on numbers; ValueError for anything else."""
    if isinstance(node, ast.Constant):
        value = node.value
    else:
        if type(getattr(node, "op", None)) not in OPERATORS:
            raise ValueError("not a literal")
        operands = [literal(n) for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
        if not all(type(x) in (int, float) for x in operands):
            raise ValueError("arithmetic is for numbers")
        if isinstance(node.op, ast.Pow) and abs(operands[1]) > 64:
            raise ValueError("a power too large")  # 9**9**9 would compute for ever
        value = OPERATORS[type(node.op)](*operands)
    if type(value) is int and abs(value) >= 2**63:
        raise ValueError("a number too large")
    return value


# ------------------------------------------------------------------------------------------- flags


def split_arguments(argv: list[str], hints: dict[str, Any]) -> tuple[list[str], list[str]]:
    """argv -> (config files, flags as `--name=value`); `--name value` is taken too."""
    files, flags, args = [], [], list(argv)
    while args:
        arg = args.pop(0)
        if arg in ("--help", "-h"):
            flags.append(arg)
        elif match := re.fullmatch(r"--([\w-]+)(=.*)?", arg, re.DOTALL):
            name, value = match[1].replace("-", "_"), match[2]
            if name not in hints:
                raise UserError(f"unknown setting --{match[1]}{nearest(name, hints)}")
            if value is None:
                if not args or args[0].startswith("--"):
                    raise UserError(f"--{name} needs a value: --{name}={spell(hints[name])}")
                value = "=" + args.pop(0)
            flags.append(f"--{name}{value}")
        elif match := re.fullmatch(r"-*(\w[\w-]*)=(.*)", arg, re.DOTALL):
            raise UserError(f"{arg}: a setting is written with two dashes: --{match[1]}={match[2]}")
        elif arg.startswith("-"):
            raise UserError(f"{arg}: expected --name=value or a config file")
        else:
            files.append(arg)
    return files, flags


def parse_flags(cls: type[S], default: S, flags: list[str], hints: dict[str, Any]) -> S:
    """tyro's parser, with one line instead of its error boxes."""
    import tyro  # here, so that reading a config file needs no parser

    def parse(args: list[str]) -> S:
        return tyro.cli(cls, args=args, default=default, use_underscores=True,
                        config=(tyro.conf.FlagConversionOff,))

    silence = io.StringIO()
    try:
        with contextlib.redirect_stderr(silence):
            return parse(flags)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
    for flag in flags:
        with contextlib.redirect_stderr(silence):
            try:
                parse([flag])
            except SystemExit:
                name = flag[2:].partition("=")[0]
                raise UserError(f"{flag}: expected {spell(hints[name])}") from None
    raise UserError(f"cannot read the flags {' '.join(flags)}: {silence.getvalue()}")


# ------------------------------------------------------------------------------------------- types


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from a config file is of a setting's type; a whole number is also a float."""
    if get_origin(hint) is Literal:
        return any(type(value) is type(a) and value == a for a in get_args(hint))
    if get_args(hint):  # a union
        return any(fits(value, h) for h in get_args(hint))
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


def spell(hint: Any) -> str:
    """A type in words."""
    if get_args(hint):  # of a union: types; of a Literal: values
        return " or ".join(a if isinstance(a, str) else spell(a) for a in get_args(hint))
    names = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
    return "None" if hint is type(None) else names.get(hint, str(hint))


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """`; did you mean ...?` where some known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; --help lists all"
