"""The process that trains, and what it would share with others: alone, nothing.

`start` gives the job of this process. Where torchrun started several, that is kit.parallel's Ranks,
which does in each of these methods what one process need not.
"""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from kit.device import choose_device
from kit.errors import UserError, let_go, plain
from kit.optimizer import Muon
from model import GPT

T = TypeVar("T")


class ParallelSettings(Protocol):
    """Of train.py's settings those that say where and how processes train."""

    batch_size: int
    gradient_accumulation_steps: int
    device: str
    parallel: str
    backend: str
    timeout: float


def say(text: str) -> None:
    """Print a line above the progress bar, on rank 0 alone; go on where nobody reads it."""
    if os.environ.get("RANK", "0") == "0":
        try:
            tqdm.write(plain(text))
        except OSError:  # the terminal is closed, the reader of a pipe has gone
            let_go(sys.stdout)


def start(s: ParallelSettings) -> "Job":
    """The job of this process: alone, or one of those that torchrun started."""
    if (os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")) != ("0", "1"):
        from kit.parallel.ranks import Ranks

        return Ranks(s)
    job = Job(s)
    if s.backend == "nccl" and job.device.type != "cuda":
        raise UserError(f"backend=nccl is for GPUs, but the device is {job.device}; take gloo")
    if s.parallel != "auto":
        raise UserError(f"parallel={s.parallel} needs several processes: torchrun "
                        "--nproc_per_node=2 train.py ...; or take --parallel=auto")
    return job


class Job(AbstractContextManager):
    """One process, on s.device. Inside `with`, several of them are connected."""

    rank, world, local_world = 0, 1, 1
    main = True  # whether this process speaks and writes
    command = ("python",)  # what starts such a job
    parallel = "none"  # how the model is spread: none, ddp or fsdp
    muon: type[Muon] = Muon

    def __init__(self, s: ParallelSettings, local_rank: int | None = None):
        self.device = choose_device(s.device, local_rank)
        # a run that is started again by the same torchrun goes on
        self.launch = [f"{os.environ.get('TORCHELASTIC_RUN_ID')}-{os.getppid()}"]
        # rank r takes the micro-batches r, r + world, r + 2 world, ... of an update
        self.micro_rows, self.micro_steps = s.batch_size, s.gradient_accumulation_steps

    def __exit__(self, *error: object) -> None:
        pass

    # ---- before training

    def refuse(self, text: str) -> NoReturn:
        """End with a UserError that all ranks know of; one of them says it."""
        raise UserError(text)

    def on_main(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, on every rank: None or what JSON holds."""
        return work()

    def main_first(self, work: Callable[[], T]) -> T:
        """What `work` returns on each rank, done on rank 0 before the others."""
        return work()

    def same_everywhere(self, values: dict[str, Any], but: str) -> None:
        """UserError unless all ranks have the same values, those named in `but` aside."""

    # ---- the model and the optimizers

    def wrap(self, model: GPT, scaled: bool) -> nn.Module:
        """Bring a model to the device, with rank 0's weights; what to call for a loss.

        scaled: whether gradients are scaled, for fp16.
        """
        return model.to(self.device)

    def synchronize(self, replica: nn.Module, last: bool) -> AbstractContextManager:
        """Around a micro-batch: gradients of all ranks are added up in the `last` one."""
        return nullcontext()

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor that may be sharded over ranks, gathered; a call of all ranks."""
        return tensor

    def shard(self, value: Tensor, pattern: Tensor) -> Tensor:
        """This whole tensor, sharded as `pattern` is."""
        return value

    def snapshot(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole copies of tensors on rank 0's CPU; nothing on the others."""
        copies = ((name, self.whole(tensor.detach())) for name, tensor in named.items())
        return {name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
                for name, tensor in copies if self.main}

    def broadcast(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rank 0's tensors, on the CPU, on every rank."""
        return named

    # ---- an update

    def sum(self, *values: float) -> list[float]:
        """Sums over all ranks in double precision, in the same order everywhere."""
        return [*values]

    def max(self, number: int | None) -> int:
        """The largest number that any rank gives; None counts as 0."""
        return number or 0

    def all_reduce(self, count: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, without leaving the device."""
        return count
