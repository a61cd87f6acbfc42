"""Where experiments run: trials side by side, in processes of one thread each."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import torch
from tqdm import tqdm

from kit.errors import UserError

_done: Any = None  # in a process of trials: jobs done by all of them, shared with the parent
_share = 0.0  # of its present job that it has told


class Lab:
    """Where an experiment runs its trials: at which size, in how many processes."""

    def __init__(self, quick: bool = False, workers: int = 1):
        self.quick, self.workers = quick, workers

    def trials(self, trial: Callable[..., Any], jobs: Sequence[dict[str, Any]]) -> list[Any]:
        """[trial(**job) for job in jobs], side by side in processes of one thread each.

        So results are the same for any number of workers. trial: a function at the top of a module;
        it says with `tick` how far it is.
        """
        context = multiprocessing.get_context("spawn")
        done = context.Value("d", 0.0)
        pool = ProcessPoolExecutor(self.workers, context, _begin, (done,))
        try:
            with pool, _one_thread(), _all_or_none():
                futures = [pool.submit(_run, trial, job) for job in jobs]
                _watch(futures, done)
                return [future.result() for future in futures]
        except BrokenProcessPool:
            raise UserError("a process of trials was killed, perhaps for want of memory; "
                            "--workers=1 takes less") from None


def tick(share: float) -> None:
    """A trial is further by this share of its way; outside of `Lab.trials` it means nothing."""
    global _share
    if _done is not None:
        _share += share
        with _done.get_lock():
            _done.value += share


def _begin(done: Any) -> None:
    """Once in each process of trials."""
    global _done
    _done = done
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    parent = multiprocessing.parent_process()

    def follow() -> None:  # a parent that is killed tells nobody
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run(trial: Callable[..., Any], job: dict[str, Any]) -> Any:
    global _share
    _share = 0.0
    result = trial(**job)
    tick(1 - _share)
    return result


def _watch(futures: Sequence[Future], done: Any) -> None:
    """A progress bar until all jobs are done; raises what one of them raised."""
    form = "{l_bar}{bar}| {n:.1f} of {total} trials [{elapsed}<{remaining}]"
    with tqdm(total=len(futures), bar_format=form, smoothing=0.1) as bar:
        left: Any = futures
        while left:
            ended, left = wait(left, timeout=0.5, return_when=FIRST_EXCEPTION)
            for future in ended:
                future.result()
            bar.update(min(done.value, len(futures)) - bar.n)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Processes that begin in the block have one thread for each library, not only for torch."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


@contextmanager
def _all_or_none() -> Iterator[None]:
    """What ends the block early ends the processes of trials too, wherever they are."""
    others = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
