"""How the processes that torchrun started find each other, also after some of them have died."""

import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from kit.errors import UserError

PATIENCE = timedelta(days=1)  # for what rank 0 does before training, such as preparing a corpus


def join(rank: int, world: int, nccl: bool, timeout: float) -> "tuple[dist.ProcessGroup, str]":
    """Make the group of all ranks; UserError where that fails within `timeout` seconds.

    Returns a second group, whose members wait for a day, and a word that all starts by one
    torchrun have in common.
    """
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    wait = timedelta(seconds=timeout)
    try:
        theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own
        store = dist.TCPStore(host, int(port), is_master=rank == 0 and not theirs, timeout=wait,
                              wait_for_workers=False, use_libuv=os.name != "nt")
        token = store.compare_set("launch", "", secrets.token_hex(8)).decode()
        store = dist.PrefixStore(meet(store, rank, world, timeout), store)
        dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", timeout=wait,
                                store=store, rank=rank, world_size=world)
        return dist.new_group(backend="gloo", timeout=PATIENCE), token
    except (RuntimeError, ValueError, TimeoutError) as e:
        raise UserError(f"rank {rank} of {world} did not meet the others at {host}:{port} within "
                        f"{timeout:g} s: {first_line(e)}") from None


def meet(store: "dist.Store", rank: int, world: int, timeout: float) -> str:
    """A name that the living ranks of this start agree on, in seconds; TimeoutError if they do not.

    torchrun keeps one store over its restarts (torch 2.9 to 2.13) with what the dead wrote there,
    and a group would read their addresses. So rank 0 proposes a name, the others sign it, and it
    counts once rank 0 has confirmed the signatures.
    """
    me, end = secrets.token_hex(8), time.monotonic() + timeout

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    if rank == 0:
        store.set("meeting", me)
    while time.monotonic() < end:
        name = read("meeting")
        if rank == 0:
            signed = [read(f"{me}/{other}") for other in range(1, world)]
            if all(signed):
                store.set(f"{me}/confirmed", " ".join(signed))
                return me
        elif name:
            store.set(f"{name}/{rank}", me)
            if me in read(f"{name}/confirmed"):
                return name
        time.sleep(0.02)
    raise TimeoutError("not all of them came")


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
