"""What the benchmarks share: their command line, processes, the machine, tables, rows of results.

Nothing here imports torch: a benchmark measures its child processes, and on Linux the peak memory
of a child cannot be below what its parent held when it started it.
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from data.prepare import Parser

CLONE = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


class ProcessFailed(Exception):
    """A process of a benchmark that ended badly; the text is the end of its stderr."""


class Finished(NamedTuple):
    """What a process leaves."""

    stdout: str
    seconds: float  # from its start to its end
    peak_mib: float  # its peak memory


def command_line(name: str, doc: str) -> Parser:
    """A parser whose --help is the docstring of the benchmark."""
    return Parser(prog=name, description=doc, allow_abbrev=False,
                  formatter_class=argparse.RawDescriptionHelpFormatter)


def require_positive(parser: Parser, args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name) <= 0:
            parser.error(f"--{name}={getattr(args, name)}: expected more than 0")


def choose_parts(parser: Parser, given: str, known: tuple[str, ...]) -> list[str]:
    """'b,a' -> those of the known parts that were named, in their usual order."""
    if unknown := set(given.split(",")) - set(known):
        parser.error(f"--parts={','.join(sorted(unknown))}: the parts are {', '.join(known)}")
    return [part for part in known if part in given.split(",")]


def log(line: str) -> None:
    """Progress goes to stderr; stdout has the tables."""
    print(line, file=sys.stderr, flush=True)


def run_process(command: list[str | Path], cwd: Path = CLONE, env: dict[str, str] | None = None
                ) -> Finished:
    """Run a process to its end; ProcessFailed if its exit code is not 0."""
    with (tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out,
          tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as err):
        start = time.perf_counter()
        process = subprocess.Popen(list(map(str, command)), cwd=cwd, stdin=subprocess.DEVNULL,
                                   stdout=out, stderr=err, env=os.environ | (env or {}))
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            name = Path(command[1]).name
            raise ProcessFailed(f"{name} ended with {process.returncode}:\n{last_lines(err)}")
        out.seek(0)
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return Finished(out.read(), seconds, usage.ru_maxrss / unit)


def last_lines(file: Any) -> str:
    """The end of what a process wrote to a file."""
    file.seek(0)
    return "\n".join(file.read().splitlines()[-8:])


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns that needs torch or much memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def git_commit(folder: Path) -> str | None:
    """The short name of a git folder's commit, if there is one."""
    try:
        done = subprocess.run(["git", "-C", str(folder), "describe", "--always", "--dirty"],
                              capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def machine() -> Row:
    """Date, commit of this clone, torch and the processor: how a row of results begins."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return {"date": date.today().isoformat(), "commit": git_commit(CLONE),
            "torch": version("torch"), "cores": os.cpu_count(),
            "cpu": found[1].strip() if found else platform.processor() or platform.machine(),
            "threads": os.environ.get("OMP_NUM_THREADS", "default")}


def print_table(rows: list[Row], columns: list[tuple[str, str, str]]) -> None:
    """Columns are (key, title, format of a number); what is missing or None shows as '-'."""
    def cell(value: Any, form: str) -> str:
        return "-" if value is None else format(value, "" if isinstance(value, str) else form)

    lines = [[title for _, title, _ in columns]] + [
        [cell(row.get(key), form) for key, _, form in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)).rstrip())


def append_row(row: Row, path: Path, echo: bool) -> None:
    """Append a row of results, rounded to six digits, to a file of JSON lines, and print it."""
    rounded = json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.6g}"))
    line = json.dumps(rounded)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    if echo:
        print(line)
