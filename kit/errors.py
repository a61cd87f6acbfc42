"""Mistakes and mishaps as one line on the terminal, and the exit code that goes with them."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TextIO

# until the ranks of a job have met, all make the same mistakes, and rank 0 says them
silent = os.environ.get("RANK", "0") != "0"


class UserError(Exception):
    """A person's mistake, in a line: what was given, what was expected, what to do."""

    def __str__(self) -> str:
        return visible("\n".join(super().__str__().splitlines()))  # a line, whatever it quotes


def plain(text: str) -> str:
    """Text without the codes that could move the cursor of a terminal or change its title."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda code: ascii(code[0])[1:-1], text)


def visible(text: str, keep: str = "") -> str:
    """Text with all that a terminal would obey or hide written as in Python: newline is \\n."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def did_you_mean(word: str, names: Iterable[str], otherwise: str = "") -> str:
    """The end of a message about an unknown name: the nearest one there is, if one is near."""
    near = get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else otherwise


def run(main: Callable[[list[str]], int | None], mistakes: tuple[type[Exception], ...] = ()
        ) -> None:
    """Call main(arguments) and exit; a mistake or a failing disk is a line and exit code 2."""
    script, *argv = sys.argv
    name = Path(script).name
    name = Path(script).parent.name if name == "__main__.py" else name
    debug = bool({"--debug", "--debug=True"} & set(argv))
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None where it was closed
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):  # a console may lack letters that a model writes
        if hasattr(stream, "reconfigure"):  # and a log is to have each line when it is said
            stream.reconfigure(errors="backslashreplace", line_buffering=True)

    def complain(text: str) -> None:
        with contextlib.suppress(OSError):  # nobody may read any more
            print(f"{name}: {text}", file=sys.stderr)

    try:
        code = main([a for a in argv if a != "--debug"]) or 0
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has gone, as in `sample.py | head`
        code = 1
    except KeyboardInterrupt:
        complain("interrupted")
        code = 130
    except ModuleNotFoundError as e:
        if debug or (e.name or "").partition(".")[0] not in ("data", "kit", "extras"):
            raise
        complain(f"this needs {e.name.replace('.', '/')}, which is not in this clone")
        code = 2
    except (UserError, OSError, *mistakes) as e:
        if debug:
            raise
        if not silent:
            complain(plain(spell_os_error(e)))
        code = 2
    except (MemoryError, RuntimeError) as e:
        if debug or not out_of_memory(e):
            raise
        complain("out of memory; a smaller batch_size (with more gradient_accumulation_steps), "
                 "block_size or model needs less")
        code = 2
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # or Python fails at it once more, and ends with 120
            let_go(stream)
    sys.exit(code)


def let_go(stream: TextIO) -> None:
    """Nobody reads it any more: what it still holds, and all that follows, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def out_of_memory(e: BaseException) -> bool:
    """Whether an error says that memory is full: Python's, torch's on a CPU or on a GPU."""
    return (isinstance(e, MemoryError) or type(e).__name__ == "OutOfMemoryError"
            or (isinstance(e, RuntimeError) and "can't allocate memory" in str(e)))


def spell_os_error(e: BaseException) -> str:
    """'No space left on device: out/small/log.jsonl'; of another error its own words."""
    name = getattr(e, "filename2", None) or getattr(e, "filename", None)
    text = getattr(e, "strerror", None) or str(e)
    return f"{text}: {name}" if name else text
