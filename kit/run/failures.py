"""What befalls a process that trains: signals, a full disk, too little memory; each in one line."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kit.errors import UserError, out_of_memory, spell_os_error
from kit.run import store


class Interrupt:
    """Inside `with`, a signal that asks to end only sets `signal`; a second one leaves at once.

    Ctrl-C and SIGTERM; SIGHUP (the terminal is gone) and SIGUSR1 (a scheduler's warning) too,
    unless they were ignored before, as nohup does. Windows does not have these two.
    """

    signal: int | None = None
    at = 0.0  # when it came

    def __enter__(self) -> "Interrupt":
        on_main = threading.current_thread() is threading.main_thread()  # else Python forbids it
        others = [getattr(signal, name, None) for name in ("SIGHUP", "SIGUSR1")]
        heeded = [n for n in others if n and signal.getsignal(n) != signal.SIG_IGN]
        numbers = (signal.SIGINT, signal.SIGTERM, *heeded) if on_main else ()
        self.before = {n: signal.signal(n, self.handle) for n in numbers}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame: Any) -> None:
        # torchrun sends on what the terminal sent us too; that a terminal is gone may be told by
        # its shell, by the system, and by a logout that ends all
        repeats = ("TORCHELASTIC_RUN_ID" in os.environ
                   or getattr(signal, "SIGHUP", None) in (number, self.signal))
        if self.signal and not (repeats and time.monotonic() - self.at < 5):
            os._exit(128 + number)
        self.signal, self.at = self.signal or number, time.monotonic()


@contextlib.contextmanager
def explained(path: Path, settings: Any) -> Iterator[None]:
    """Turn a failing disk or memory in the block into a line that says what is left and to do."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as e:
        raise UserError(f"{spell_os_error(e)}; {last_good(path)}. Once this is mended, give "
                        "the same command again") from e
    except (MemoryError, RuntimeError) as e:
        if out_of_memory(e):
            s, less = settings, "a smaller batch_size, block_size, n_embd or n_layer needs less"
            if s.batch_size % 2 == 0:
                less = (f"--batch_size={s.batch_size // 2} --gradient_accumulation_steps="
                        f"{2 * s.gradient_accumulation_steps} makes the same updates in less")
            raise UserError(f"out of memory with batch_size={s.batch_size} and "
                            f"gradient_accumulation_steps={s.gradient_accumulation_steps}: {less}; "
                            f"{last_good(path)}") from e
        raise


def skip_update(p: Any, scaler: Any, loss: float, norm: float, limit: float,
             give_up: Callable[[int, str], None], say: Callable[[str], None]) -> bool:
    """Whether to skip an update of this loss and gradient norm, as skip_spikes=limit says.

    p: the Progress, which counts. Gives up where they are not finite and nobody asked to skip.
    """
    overflow = scaler.is_enabled() and not math.isfinite(norm)  # the scaler sees to it
    bad = not math.isfinite(loss) or not (math.isfinite(norm) or overflow)
    step, what = p.step + 1, f"the loss is {loss}, the gradient norm {norm}"
    hopeless = overflow and scaler.get_scale() < 2**-14
    if hopeless or (bad and not limit):
        give_up(step, what)
    skip = p.is_spike(math.nan if bad else norm, limit)
    if skip:
        say(f"step {step:,}: skipped, {what}")
        if p.skipped_in_a_row >= 20:
            give_up(step, f"20 updates in a row were skipped; {what}")
    return skip or overflow


def last_good(path: Path) -> str:
    """Where the newest checkpoint is, for a message."""
    name = store.pointed(path, "latest")
    return f"the last good checkpoint is {path / 'ckpt' / name}" if name else \
        "there is no checkpoint yet"
