"""Weights & Biases, which some runs log to as well."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any


class Wandb:
    """A run of Weights & Biases; whatever fails there is one warning and training goes on.

    Its own environment variables (WANDB_PROJECT, WANDB_NAME, WANDB_MODE, ...) count where the
    settings say nothing. A run that goes on goes on there too. Without a key it logs offline.
    """

    def __init__(self, settings: dict[str, Any], name: str, run_id: str | None,
                 warn: Callable[[str], None]):
        self.run, self.warn, self.id = None, warn, run_id
        with self.guard():
            import wandb  # slow, and it may be missing

            mode = None
            if not (os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False)):
                mode = "offline"
                warn("wandb: no key (wandb login, or WANDB_API_KEY), so it logs offline; "
                     "`wandb sync` uploads it later")
            project = settings["wandb_project"] or os.environ.get("WANDB_PROJECT")
            name = settings["wandb_run_name"] or os.environ.get("WANDB_NAME") or name
            self.run = wandb.init(project=project or "bonsaigpt", name=name, config=settings,
                                  id=run_id, resume="allow", mode=mode)
            self.id = self.run.id

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as e:  # a logger must not end a run, whatever it raises
            self.run = None
            reason = " ".join(f"{type(e).__name__}: {e}".split())
            self.warn(f"wandb is off from here on, log.jsonl goes on: {reason}")

    def log(self, row: dict[str, Any]) -> None:
        with self.guard():
            if self.run:
                self.run.log(row, step=row["step"])

    def finish(self) -> None:
        with self.guard():
            if self.run:
                self.run.finish()
