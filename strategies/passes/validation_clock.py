"""Validation by the clock: one rank's clock decides for all, so that all validate after the same step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import lightning.pytorch as pl

from unicron_lightning.copying import OfProcess


class TimedValidation(OfProcess):
    """Have Lightning validate when rank 0 finds that ``Trainer(val_check_interval=...)``, a duration, has passed.

    Lightning compares each rank's own clock with the time of its last validation. Here that time is set to the past or
    to the future, as was decided.

    Args:
        trainer: whose interval counts; nothing is exchanged if it is no duration.
        decide: gives rank 0's answer on all ranks.
    """

    def __init__(self, trainer: pl.Trainer, decide: Callable[[bool], bool]) -> None:
        self._trainer = trainer
        self._decide = decide
        self._interval: float | None = getattr(trainer, "_val_check_time_interval", None)
        self._last = time.monotonic()

    def stepped(self) -> None:
        """Decide, after a step, whether validation is due."""
        if self._interval is not None:
            due = self._decide(time.monotonic() - self._last >= self._interval)
            self._trainer._last_val_time = -math.inf if due else math.inf  # type: ignore[attr-defined]

    def validated(self) -> None:
        """Note the end of a validation."""
        self._last = time.monotonic()
