"""Ranks: processes that train together, how they share an update and wait for each other.

torchrun starts them and tells each its rank. DDP keeps the whole model on every rank, FSDP2 a
share of it. What ranks tell each other is tensors and JSON, so nothing is unpickled here either.
"""

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from kit import errors
from kit.errors import UserError
from kit.job import Job, ParallelSettings, T
from kit.optimizer import blocks_of
from kit.parallel.rendezvous import first_line, join
from kit.parallel.sharding import ShardedMuon, like, whole
from model import GPT


class Ranks(Job):
    """This process among those that train together; `with` joins the group and leaves it."""

    muon = ShardedMuon

    def __init__(self, s: ParallelSettings):
        try:
            self.rank, self.world, local_rank, self.local_world = (
                int(os.environ.get(name, default)) for name, default in (
                    ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
            if not 0 <= self.rank < self.world:
                raise ValueError(f"rank {self.rank} of {self.world}")
        except ValueError as e:
            raise UserError(f"RANK, WORLD_SIZE and the like are set by torchrun: {e}") from None
        self.main, self.s = self.rank == 0, s
        self.command = ("torchrun", f"--nproc_per_node={self.local_world}")
        super().__init__(s, local_rank)
        if self.micro_steps % self.world == 0:  # ranks share the micro-batches of an update,
            self.micro_steps //= self.world
        elif self.micro_rows % self.world == 0:  # or else the rows of each
            self.micro_rows //= self.world
        else:
            self.refuse(f"{self.world} processes can share neither gradient_accumulation_steps="
                        f"{self.micro_steps} nor batch_size={self.micro_rows}; make one its "
                        "multiple")

    def __enter__(self) -> "Ranks":
        """Meet the others; UserError where that fails within s.timeout seconds."""
        s, device = self.s, self.device
        nccl = s.backend == "nccl" or (s.backend == "auto" and device.type == "cuda"
                                       and dist.is_nccl_available())
        if nccl and device.type != "cuda":
            self.refuse(f"backend=nccl is for GPUs, but the device is {device}; take gloo")
        if device.type == "mps":
            self.refuse("device=mps trains in one process; start it without torchrun")
        if device.type == "cuda":
            if s.device.startswith("cuda:") and self.local_world > 1:
                self.refuse(f"device={s.device}: each process of torchrun takes a GPU of its own; "
                            "leave device out")
            torch.cuda.set_device(device)
        self.patient, token = join(self.rank, self.world, nccl, s.timeout)
        self.launch.append(token)  # whatever process started us
        errors.silent = False  # from here on a mistake may be this rank's alone
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

    # ---- before training

    def refuse(self, text: str) -> NoReturn:
        raise UserError(text) if self.main else SystemExit(2)

    def on_main(self, work: Callable[[], T]) -> T:
        answer = error = None
        if self.main:
            try:
                answer = work()
            except Exception as e:
                error = e
        sent = self.send({"answer": answer, "failed": bool(error)})
        if error:
            raise error
        if sent["failed"]:  # rank 0 says why
            raise SystemExit(2)
        return answer if self.main else sent["answer"]

    def send(self, value: Any) -> Any:
        """Rank 0's value, as JSON, on every rank."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        dist.broadcast(size := torch.tensor([len(text)]), 0, group=self.patient)
        if not self.main:
            text = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(text, 0, group=self.patient)
        return json.loads(text.numpy().tobytes())

    def main_first(self, work: Callable[[], T]) -> T:
        done: list[T] = []
        self.on_main(lambda: done.append(work()))
        return done[0] if done else work()

    def same_everywhere(self, values: dict[str, Any], but: str) -> None:
        theirs = self.send(values)
        names = [n for n in values.keys() - but.split() if values[n] != theirs[n]]
        if self.max(len(names), self.patient):
            n = min(names, default="")
            if not n:  # the other one says it
                raise SystemExit(2)
            raise UserError(f"rank {self.rank}: {n} is {values[n]!r:.40}, that of rank 0 "
                            f"{theirs[n]!r:.40}; give all machines the same settings and data")

    # ---- the model and the optimizers

    def wrap(self, model: GPT, scaled: bool) -> nn.Module:
        self.parallel = self.send(self.choose(model))
        if self.parallel == "fsdp" and scaled:
            self.refuse("dtype=float16 does not go with parallel=fsdp; take bfloat16 or float32")
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, 0)
        if self.parallel == "ddp":
            return DDP(model.to(self.device), gradient_as_bucket_view=True)
        from torch.distributed.device_mesh import init_device_mesh  # slow to import
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh(self.device.type, (self.world,))
        for module in (*blocks_of(model), model):
            fully_shard(module, mesh=mesh)
        for name in ("hidden", "loss"):  # evaluation calls them outside of forward
            setattr(model, f"{name}_apart", getattr(model, name))
            register_fsdp_forward_method(model, f"{name}_apart")
        return model

    def choose(self, model: GPT) -> str:
        """ddp or fsdp; auto: fsdp where weights, gradients and AdamW fill half the memory."""
        if self.s.parallel != "auto":
            return self.s.parallel
        if self.device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.device).total_memory
        elif not hasattr(os, "sysconf"):  # Windows
            return "ddp"
        else:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / self.local_world
        return "fsdp" if 16 * model.num_params() > memory / 2 else "ddp"

    def synchronize(self, replica: nn.Module, last: bool) -> AbstractContextManager:
        if isinstance(replica, DDP):
            return nullcontext() if last else replica.no_sync()
        replica.set_requires_gradient_sync(last)
        return nullcontext()

    def whole(self, tensor: Tensor) -> Tensor:
        return whole(tensor)

    def shard(self, value: Tensor, pattern: Tensor) -> Tensor:
        return like(value, pattern)

    def broadcast(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        about = {n: (list(t.shape), str(t.dtype).split(".")[1]) for n, t in named.items()}
        received = {}
        for name, (shape, dtype) in self.send(about).items():
            tensor = named[name].contiguous() if self.main else torch.empty(
                shape, dtype=getattr(torch, dtype))
            dist.broadcast(tensor, 0)
            received[name] = tensor
        return received

    # ---- an update

    def gather(self, *values: float, group: "dist.ProcessGroup | None" = None) -> Tensor:
        """The values of all ranks, float64 (world, len(values)), the same on each."""
        mine = torch.tensor([values], dtype=torch.float64)
        all_of_them = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(all_of_them, mine, group=group)
        return torch.cat(all_of_them)

    def sum(self, *values: float) -> list[float]:
        return self.gather(*values).sum(0).tolist()

    def max(self, number: int | None, group: "dist.ProcessGroup | None" = None) -> int:
        return int(self.gather(number or 0, group=group).max())

    def all_reduce(self, count: Tensor) -> Tensor:
        dist.all_reduce(count)
        return count


def is_about_ranks(error: RuntimeError) -> bool:
    words = ("gloo", "nccl", "connection", "socket", "timed out")
    return isinstance(error, dist.DistError) or any(w in str(error).lower() for w in words)
