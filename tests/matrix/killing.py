"""A SIGKILL at a place of a training, and the wait for the worker that replaces the dead one."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from matrix.features import Case

PLACES = ("training", "validation", "on_train_batch_end", "on_validation_start", "on_train_epoch_end")
MOST_SECONDS = 180.0
"""For the replacement to start."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When a worker is killed.

    Attributes:
        rank: of the worker.
        place: a step method or hook, of `PLACES`.
        step: the first global step at which it may be.
        delay: seconds from then; the worker continues meanwhile.
    """

    rank: int
    place: str
    step: int
    delay: float

    @classmethod
    def of_case(cls, name: str, case: Case, seed: int = 0) -> Kill:
        """A place that depends on the case and the seed only, in or before the first validation, if there is one."""
        picks = random.Random(f"{name} {seed}")
        place = picks.choice(("training", "training", "validation", "validation", *PLACES[2:]))
        late = case["when"] == "every_2_epochs" and case["length"] == "max_steps"
        if "valid" in place and (case["evaluation"] == "none" or late):
            place = "training"
        delay = picks.choice((0.0, picks.uniform(0, 0.006))) if place == "training" else 0.0
        step = 0 if "valid" in place else picks.randrange(3)
        return cls(rank=picks.randrange(2), place=place, step=step, delay=delay)

    def plain(self) -> dict[str, Any]:
        """Return the attributes as plain data."""
        return asdict(self)


class Killing(pl.Callback):
    """Kills the process once; the survivor then waits until its replacement may be admitted.

    Args:
        kill: when.
        folder: for marker files, which all processes of the case share.
    """

    def __init__(self, kill: Kill, folder: Path) -> None:
        self._kill = kill
        self._killed, self._returned = folder / "killed", folder / "returned"
        self.replaces = self._killed.exists()
        """Whether this process is the replacement."""
        self.joined_at: int | None = None
        self._waited = self.replaces

    def strike(self, trainer: pl.Trainer, place: str) -> None:
        """Die, if this is the place."""
        here = place == self._kill.place and trainer.global_step >= self._kill.step
        if not here or trainer.world_size != 2 or trainer.global_rank != self._kill.rank:
            return
        try:
            self._killed.touch(exist_ok=False)
        except FileExistsError:
            return
        if self._kill.delay:
            threading.Timer(self._kill.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.replaces:
            self._returned.touch()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.joined_at is None:
            self.joined_at = trainer.global_step
        if self._waited or not self._killed.exists() or trainer.world_size == 2:
            return
        engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
        deadline = time.monotonic() + MOST_SECONDS
        while not (self._returned.exists() and engine.control.newer_than(engine.world.epoch)):
            assert time.monotonic() < deadline, f"no replacement within {MOST_SECONDS} s"
            time.sleep(0.01)
        self._waited = True

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.strike(trainer, "on_train_batch_end")

    def on_validation_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.strike(trainer, "on_validation_start")

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.strike(trainer, "on_train_epoch_end")
