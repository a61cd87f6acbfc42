"""failures.py: signals, a full disk, too little memory; what is left is said in one line."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from kit.errors import UserError
from kit.run import failures
from train import TrainSettings

NOT_WINDOWS = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="not on Windows")
OTHERS = ["SIGHUP", "SIGUSR1"]  # a lost terminal, a scheduler's warning


@pytest.fixture
def left(monkeypatch) -> list[int]:
    """The exit codes of all that would have left at once."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return codes


@pytest.fixture
def as_at_start():
    """SIGHUP and SIGUSR1 are not ignored, however these tests were started."""
    before = {n: signal.signal(n, lambda *_: None)
              for n in (getattr(signal, name, None) for name in OTHERS) if n}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", *(pytest.param(n, marks=NOT_WINDOWS)
                                                         for n in OTHERS)])
def test_the_first_signal_asks_the_second_leaves(name, left, monkeypatch, as_at_start):
    number = getattr(signal, name)
    before, now = signal.getsignal(number), [100.0]
    monkeypatch.setattr("kit.run.failures.time.monotonic", lambda: now[0])
    with failures.Interrupt() as interrupt:
        assert interrupt.signal is None
        signal.raise_signal(number)
        assert interrupt.signal == number and not left
        now[0] += 6
        signal.raise_signal(number)
        assert left == [128 + number]
        now[0] += 6
        signal.raise_signal(signal.SIGINT)
        assert left == [128 + number, 130]
    assert signal.getsignal(number) is before


@NOT_WINDOWS
@pytest.mark.parametrize("name", OTHERS)
def test_what_was_ignored_stays_ignored(name, as_at_start):
    """As under nohup."""
    number = getattr(signal, name)
    signal.signal(number, signal.SIG_IGN)
    with failures.Interrupt() as interrupt:
        signal.raise_signal(number)
        assert interrupt.signal is None
    assert signal.getsignal(number) == signal.SIG_IGN


@NOT_WINDOWS
@pytest.mark.parametrize("first, second", [("SIGHUP", "SIGHUP"), ("SIGHUP", "SIGTERM"),
                                           ("SIGTERM", "SIGHUP"), ("SIGINT", "SIGHUP")])
def test_a_terminal_that_hangs_up_twice_is_nobody_in_a_hurry(first, second, left, as_at_start):
    """Its shell sends SIGHUP, the system another one; a logout ends in SIGTERM and SIGHUP."""
    with failures.Interrupt() as interrupt:
        for name in (first, second):
            signal.raise_signal(getattr(signal, name))
        assert interrupt.signal == getattr(signal, first) and not left


def test_a_system_without_these_signals(monkeypatch, left):
    """As Windows."""
    for name in OTHERS:
        monkeypatch.delattr(signal, name, raising=False)
    with failures.Interrupt() as interrupt:
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.signal == signal.SIGTERM and not left
        signal.raise_signal(signal.SIGINT)
        assert left == [130]


def test_signals_are_left_alone_off_the_main_thread():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with failures.Interrupt() as interrupt:
            seen.append((interrupt.signal, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


@pytest.mark.parametrize("under_torchrun", [True, False])
def test_a_signal_that_torchrun_sends_on_is_not_a_second_one(under_torchrun, monkeypatch):
    """The terminal sends Ctrl-C to all processes, and torchrun passes its own on as SIGTERM."""
    left, now = [], [100.0]
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr("kit.run.failures.time.monotonic", lambda: now[0])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with failures.Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        now[0] += 1
        signal.raise_signal(signal.SIGTERM)
        assert left == ([] if under_torchrun else [143])
        assert interrupt.signal == signal.SIGINT  # the first one counts
        now[0] += 6
        signal.raise_signal(signal.SIGINT)
        assert left[-1] == 130


# -------------------------------------------------------------------------- a disk, a memory


def said(error: BaseException, path: Path, **settings) -> str:
    """The line that an error in the block becomes."""
    with pytest.raises(UserError) as raised, failures.explained(path, TrainSettings(**settings)):
        raise error
    assert raised.value.__cause__ is error and len(str(raised.value).splitlines()) == 1
    return str(raised.value)


FULL = OSError(28, "No space left on device", "out/x/log.jsonl")


def test_a_disk_that_fails_is_named_with_what_is_left(tmp_path, save):
    assert "there is no checkpoint yet" in said(FULL, tmp_path)
    folder = save(tmp_path, 10)
    for error, words in ((FULL, "No space left on device: out/x/log.jsonl"),
                         (OSError(28, "No space left on device"), "No space left on device"),
                         (PermissionError(13, "Permission denied", "x"), "Permission denied: x"),
                         (FileNotFoundError(2, "No such file", "gone"), "No such file: gone"),
                         (OSError("odd"), "odd")):
        message = said(error, tmp_path)
        assert words in message and f"the last good checkpoint is {folder}" in message
        assert "the same command again" in message


@pytest.mark.parametrize("error", [
    MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate "
                 "memory: you tried to allocate 1 bytes. Error code 12 (Cannot allocate memory)")])
def test_too_little_memory_says_what_to_set(error, tmp_path, save):
    folder = save(tmp_path, 10)
    message = said(error, tmp_path, batch_size=12, gradient_accumulation_steps=5)
    assert "out of memory with batch_size=12 and gradient_accumulation_steps=5" in message
    assert "--batch_size=6 --gradient_accumulation_steps=10 makes the same updates" in message
    message = said(error, tmp_path, batch_size=3)
    assert "a smaller batch_size, block_size, n_embd or n_layer needs less" in message
    assert f"the last good checkpoint is {folder}" in message


@pytest.mark.parametrize("error", [ValueError("ours"), RuntimeError("shapes differ"), KeyError(1),
                                   UserError("a mistake"), KeyboardInterrupt(), SystemExit(3),
                                   BrokenPipeError(32, "Broken pipe")])
def test_all_else_keeps_its_own_words_and_traceback(error, tmp_path):
    with pytest.raises(type(error)) as raised, failures.explained(tmp_path, TrainSettings()):
        raise error
    assert raised.value is error


def test_what_is_damaged_is_not_called_good(tmp_path, save):
    save(tmp_path, 10)
    (tmp_path / "ckpt" / "latest.json").write_text("{")
    assert failures.last_good(tmp_path) == "there is no checkpoint yet"
