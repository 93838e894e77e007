"""Fault injection from within a script."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from unicron_lightning.faults.arrivals import SCRIPT
from unicron_lightning.faults.fault import Fault, Faults
from unicron_lightning.strategies.fault_tolerant import strategy_of
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.injector import Injector


class FaultInjection(Callback):
    """Injects faults into the workers of this task, see docs/faults.md.

    The coordinator keeps the strikes: a worker that replaces another one does not start from zero.

    Args:
        faults: texts of the language or `Fault`s, e.g. a `Faults`; or the path of a file of them.
        seed: seed of random draws, for faults that have none of their own.

    Raises:
        ConfigError: a text that is no fault; another strategy than ``unicron``.
    """

    def __init__(self, faults: Iterable[Fault | str] | Path, seed: int = 0) -> None:
        self.faults = Faults.read(faults) if isinstance(faults, Path) else Faults(faults)
        self.seed = seed
        self._engine: Engine | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        engine = strategy_of(trainer, self).engine
        if engine is self._engine:  # of an earlier run of the same script
            return
        self._engine = engine
        for place, (fault, words) in enumerate(zip(self.faults, self.faults.texts, strict=True)):
            Injector.of(engine).add(f"{place}: {words}", fault, self.seed)

    def point(self, name: str) -> None:
        """Pass a point of the script's own: faults with ``point=NAME`` strike here. No effect before a fit."""
        if self._engine is not None:
            self._engine.fault(SCRIPT, name)
