"""Processes that train together: who they are, how they share an update, how they wait.

torchrun starts them and tells each its rank. A process alone is rank 0 of 1: the same code, but
without a group and without waiting. DDP keeps the whole model on every rank, FSDP2 a share of it.
What ranks tell each other is tensors and JSON, so nothing is unpickled here either.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

from kit.errors import UserError, let_go, plain
from kit.parallel.rendezvous import first_line, join
from kit.parallel.sharding import blocks_of, whole
from model import GPT


def say(text: str) -> None:
    """A line for the person, from rank 0 alone, above the bar; work goes on where nobody reads."""
    if os.environ.get("RANK", "0") == "0":
        try:
            tqdm.write(plain(text))
        except OSError:  # the terminal is closed, the reader of a pipe has gone
            let_go(sys.stdout)


class Ranks:
    """This process among those that train together; `with` joins the group and leaves it."""

    def __init__(self) -> None:
        try:
            self.rank, self.world, local_rank, self.local_world = (
                int(os.environ.get(name, default)) for name, default in (
                    ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
            if not 0 <= self.rank < self.world:
                raise ValueError(f"rank {self.rank} of {self.world}")
        except ValueError as e:
            raise UserError(f"RANK, WORLD_SIZE and the like are set by torchrun: {e}") from None
        self.main = self.rank == 0
        self.local_rank = local_rank if self.world > 1 else None  # on this machine
        self.launch = [f"{os.environ.get('TORCHELASTIC_RUN_ID')}-{os.getppid()}"]

    def join(self, device: torch.device, s: Any) -> "Ranks":
        """Meet the others; UserError where that fails within s.timeout seconds."""
        nccl = s.backend == "nccl" or (s.backend == "auto" and device.type == "cuda"
                                       and dist.is_nccl_available())
        if nccl and device.type != "cuda":
            self.refuse(f"backend=nccl is for GPUs, but the device is {device}; take gloo")
        if self.world == 1:
            if s.parallel != "auto":
                self.refuse(f"parallel={s.parallel} needs several processes: torchrun "
                            "--nproc_per_node=2 train.py ...; or take --parallel=auto")
            return self
        if device.type == "mps":
            self.refuse("device=mps trains in one process; start it without torchrun")
        if device.type == "cuda":
            if s.device.startswith("cuda:") and self.local_world > 1:
                self.refuse(f"device={s.device}: each process of torchrun takes a GPU of its own; "
                            "leave device out")
            torch.cuda.set_device(device)
        self.patient, token = join(self.rank, self.world, nccl, s.timeout)
        self.launch.append(token)  # whatever the process is that started us
        return self

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        """Leave the group, so that nobody waits for us; name the cause where another one went."""
        if not dist.is_initialized():
            return
        if kind is None:
            dist.destroy_process_group()
        if isinstance(error, RuntimeError) and is_about_ranks(error):
            raise UserError(f"rank {self.rank}: another rank has gone, or did not answer in time "
                            f"(--timeout): {first_line(error)}; the same command goes on from the "
                            "last checkpoint") from error

    # ---- what only rank 0 does

    def refuse(self, text: str) -> NoReturn:
        """End for a reason that all ranks know of; one says it."""
        raise UserError(text) if self.main else SystemExit(2)

    def tell(self, value: Any) -> Any:
        """Rank 0's value, as JSON, on every rank."""
        if self.world == 1:
            return value
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        dist.broadcast(size := torch.tensor([len(text)]), 0, group=self.patient)
        if not self.main:
            text = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(text, 0, group=self.patient)
        return json.loads(text.numpy().tobytes())

    def once(self, work: Callable[[], Any]) -> Any:
        """What `work` returns on rank 0, as JSON, on every rank; all end if it fails there."""
        answer = error = None
        if self.main:
            try:
                answer = work()
            except Exception as e:
                error = e
        said = self.tell({"answer": answer if self.world > 1 else None, "failed": bool(error)})
        if error:
            raise error
        if said["failed"]:  # rank 0 says why
            raise SystemExit(2)
        return answer if self.main else said["answer"]

    def alike(self, work: Callable[[], Any]) -> Any:
        """What `work` returns; a mistake that is the same on all ranks is said once."""
        try:
            return work()
        except UserError as e:
            return self.refuse(str(e))

    def first(self, work: Callable[[], Any]) -> Any:
        """Everybody's own result of `work`, with rank 0 before the others; all end if it fails."""
        done: list[Any] = []
        self.once(lambda: done.append(work()))
        return done[0] if done else work()

    def refuse_other(self, values: dict[str, Any], but: str) -> None:
        """UserError unless all ranks have the same values, those named in `but` aside."""
        theirs = self.tell(values)
        names = [n for n in values.keys() - but.split() if values[n] != theirs[n]]
        if self.world > 1 and self.agree(len(names), self.patient):
            n = min(names, default="")
            if not n:  # the other one says it
                raise SystemExit(2)
            raise UserError(f"rank {self.rank}: {n} is {values[n]!r:.40}, that of rank 0 "
                            f"{theirs[n]!r:.40}; give all machines the same settings and data")

    # ---- an update

    def divide(self, batch_size: int, accumulation: int) -> tuple[int, int]:
        """batch_size x accumulation rows of an update -> (rows of a piece, pieces of each rank).

        Ranks share micro-steps where they divide, else rows; UserError where neither does. Rank r
        takes the pieces r, r + world, r + 2 world, ...
        """
        if accumulation % self.world == 0:
            return batch_size, accumulation // self.world
        if batch_size % self.world == 0:
            return batch_size // self.world, accumulation
        self.refuse(f"{self.world} processes can share neither gradient_accumulation_steps="
                    f"{accumulation} nor batch_size={batch_size}; make one its multiple")

    def gather(self, *values: float, group: Any = None) -> Tensor:
        """The values of all ranks, float64 (world, len(values)), the same on each."""
        mine = torch.tensor([values], dtype=torch.float64)
        if self.world == 1:
            return mine
        all_of_them = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(all_of_them, mine, group=group)
        return torch.cat(all_of_them)

    def agree(self, number: int | None, group: Any = None) -> int:
        """The largest number that any rank gives; None is 0."""
        return int(self.gather(number or 0, group=group).max())

    def add(self, *values: float) -> list[float]:
        """Sums over all ranks, in the same order everywhere."""
        return self.gather(*values).sum(0).tolist()

    def total(self, count: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, without leaving the device."""
        if self.world > 1:
            dist.all_reduce(count)
        return count

    # ---- the model

    def choose(self, wanted: str, model: GPT, device: torch.device) -> str:
        """none, ddp or fsdp; auto: fsdp where weights, gradients and AdamW fill half the memory."""
        if self.world == 1 or wanted != "auto":
            return "none" if self.world == 1 else wanted
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
        elif not hasattr(os, "sysconf"):  # Windows
            return "ddp"
        else:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / self.local_world
        return "fsdp" if 16 * model.num_params() > memory / 2 else "ddp"

    def place(self, model: GPT, device: torch.device, parallel: str) -> nn.Module:
        """Give every rank rank 0's weights, bring them to the device; what to call for a loss."""
        if self.world > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.data, 0)
        if parallel == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh  # slow to import
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            mesh = init_device_mesh(device.type, (self.world,))
            for module in (*blocks_of(model), model):
                fully_shard(module, mesh=mesh)
            for name in ("hidden", "loss"):  # evaluation calls them outside of forward
                setattr(model, f"{name}_apart", getattr(model, name))
                register_fsdp_forward_method(model, f"{name}_apart")
            return model
        model.to(device)
        return DDP(model, gradient_as_bucket_view=True) if parallel == "ddp" else model

    def piece(self, model: nn.Module, last: bool) -> AbstractContextManager:
        """Around forward and backward of a piece: gradients meet in the last one of an update."""
        if isinstance(model, DDP):
            return nullcontext() if last else model.no_sync()
        if self.world > 1:
            model.set_requires_gradient_sync(last)
        return nullcontext()

    def snapshot(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole copies of tensors on rank 0's CPU; nothing on the others."""
        copies = {}
        for name, tensor in named.items():
            tensor = whole(tensor.detach())
            if self.main:
                copies[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return copies

    def spread(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rank 0's tensors, on the CPU, on every rank."""
        if self.world == 1:
            return named
        about = {n: (list(t.shape), str(t.dtype).split(".")[1]) for n, t in named.items()}
        received = {}
        for name, (shape, dtype) in self.tell(about).items():
            tensor = named[name].contiguous() if self.main else torch.empty(
                shape, dtype=getattr(torch, dtype))
            dist.broadcast(tensor, 0)
            received[name] = tensor
        return received


def is_about_ranks(error: RuntimeError) -> bool:
    words = ("gloo", "nccl", "connection", "socket", "timed out")
    return isinstance(error, dist.DistError) or any(w in str(error).lower() for w in words)
