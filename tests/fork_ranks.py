"""Runs train.py as 1, 2, ... ranks, each a forked process of its own: torch is imported once.

    python tests/fork_ranks.py JOBS.json

JOBS.json is a list of {"world": 2, "argv": [...], "out": FILE, "fp32_muon": bool, "hang": seconds,
"last_flags": more arguments for all but rank 0}; the exit codes of the ranks are printed as JSON,
one list a job.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import train
from kit.errors import run
from kit.run import folders


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rank(job: dict, number: int, port: int) -> None:
    """What one forked process does; never returns."""
    world = job["world"]
    if world > 1:
        os.environ.update(RANK=str(number), WORLD_SIZE=str(world), LOCAL_RANK=str(number),
                          LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(port))
    fd = os.open(f"{job['out']}.{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.argv = ["train.py", *job["argv"], *(job.get("last_flags", ()) if number else ())]
    muon = torch.float32 if job.get("fp32_muon") else torch.bfloat16  # whatever is faster here
    folders.muon_dtype = lambda *_: muon
    if job.get("hang") and number == 1:
        real = train.Trainer.update

        def update(trainer: train.Trainer) -> dict:
            if trainer.progress.step == 3:
                time.sleep(job["hang"])
            return real(trainer)

        train.Trainer.update = update
    code = 1
    try:
        run(train.main)
    except SystemExit as e:
        code = e.code
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        port, pids = free_port(), []
        for number in range(job["world"]):
            pid = os.fork()
            if not pid:
                rank(job, number, port)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
