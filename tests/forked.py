"""Runs commands of Python one after the other, each a forked process: torch is imported once.

    python tests/forked.py < JOBS.json

JOBS.json is a list of {"argv": ["train.py", ...] or ["-m", "data.prepare", ...], "cwd": ..., "env":
{...}}. Prints a JSON list of [exit code, standard output, standard error].
"""

import json
import os
import runpy
import sys
import tempfile
import traceback
from glob import glob
from pathlib import Path


def child(argv: list[str], cwd: str, env: dict[str, str], out: int, err: int) -> int:
    """What one forked process does; its exit code."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    argv = [name for word in argv for name in sorted(glob(word)) or [word]]  # as a shell does
    first = os.getcwd() if argv[0] == "-m" else str(Path(argv[0]).resolve().parent)
    sys.path[:1] = [first, *env.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run(argv: list[str], cwd: str, env: dict[str, str]) -> tuple[int, str, str]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if not pid:
            code = child(argv, cwd, env, out.fileno(), err.fileno())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = [(f.seek(0), f.read().decode(errors="replace"))[1] for f in (out, err)]
        return code, *texts


if __name__ == "__main__":
    import safetensors.torch  # noqa: F401
    import torch
    import torch.optim
    import torch.utils.checkpoint  # noqa: F401
    import tqdm  # noqa: F401
    import tyro  # noqa: F401

    print(json.dumps([run(**job) for job in json.load(sys.stdin)]))
