"""``trainer.should_stop`` of one rank is that of all, as a flag that Lightning reads on each rank by itself.

Where a loop of a fit looks for a stop next, the ranks that want one run the operation `STOP`. If all want it, they stop
there, as under Lightning's own strategies. Otherwise the operation gives way to that of the other ranks, and the end
is part of the commit of the next step, after which all ranks stop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from unicron_lightning.copying import OfProcess, replace_method
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import agree_to_stop, takes_stop


class Stopping(OfProcess):
    """Agreement of the ranks on the end of a fit.

    Args:
        trainer: whose loops look for a stop.
        engine: of this worker.

    Attributes:
        agreed: whether the ranks have agreed on the present ``should_stop=True``.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine) -> None:
        self.agreed = False
        self._trainer, self._engine = trainer, engine
        engine.wants_stop = engine.stops = False
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        for loop, name in ((fit, "on_run_start"), (epoch, "on_run_start"), (fit, "on_advance_end")):
            surround(loop, name, after=self._look)
        surround(epoch, "on_advance_end", before=self._look_before_validation, after=self._look)

    def committed(self) -> None:
        """After a step: stop if the members have agreed to in its commit."""
        if takes_stop(self._engine):
            self._trainer.should_stop = self.agreed = True

    def _look_before_validation(self) -> None:
        """A stop is a reason for a validation; not for one rank alone after the last step of the fit."""
        trainer = self._trainer
        if trainer.should_stop and not self.agreed and self._is_last_step() and self._engine.world.size > 1:
            trainer.should_stop = False
        self._look()

    def _look(self) -> None:
        trainer, engine = self._trainer, self._engine
        if not trainer.should_stop:
            self.agreed = False
        elif not self.agreed and engine.world.size > 1 and not self._is_over():
            trainer.should_stop = self.agreed = agree_to_stop(engine)

    def _is_over(self) -> bool:
        """Whether the fit has reached a limit, so that it ends on all ranks."""
        fit = self._trainer.fit_loop
        epochs: int = fit.epoch_progress.current.processed  # type: ignore[attr-defined]
        return _reached(fit.epoch_loop.global_step, fit.max_steps) or _reached(epochs, fit.max_epochs)

    def _is_last_step(self) -> bool:
        fit = self._trainer.fit_loop
        epochs = fit.epoch_progress.current.processed  # type: ignore[attr-defined]
        epochs += int(fit.epoch_loop._num_ready_batches_reached())
        return self._is_over() or _reached(epochs, fit.max_epochs)


def _reached(number: int, limit: int | None) -> bool:
    return limit is not None and limit != -1 and number >= limit


def surround(
    loop: Any, name: str, *, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> None:
    """Have a method of a loop call functions before and after itself, in place of those of an earlier fit."""

    def surrounded(own: Callable[..., Any], *args: Any) -> None:
        if before is not None:
            before()
        own(*args)
        if after is not None:
            after()

    replace_method(loop, name, surrounded)
