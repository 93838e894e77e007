"""Lightning's side of checkpoints that are written while training continues."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from unicron_lightning.checkpoints.beside import CheckpointsBeside, TakenCheckpoint, memory_of
from unicron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy


class Persisting(CheckpointsBeside):
    """This worker's part in writing checkpoints of a trainer.

    Args:
        strategy: provides session, state and reports.
    """

    def __init__(self, strategy: FaultTolerantStrategy) -> None:
        super().__init__(strategy)
        self._strategy = strategy

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a trainer writes nothing yet."""
        return {"_strategy": self._strategy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(Persisting(state["_strategy"])))

    @override
    def use(self, folder: str, partners: int, *, overlap: bool) -> None:
        """Start this worker's writer.

        Raises:
            ConfigError: the strategy's checkpoints cannot be there.
        """
        if "://" in folder and not self._strategy.parallelism.checkpoints.at_urls:
            raise ConfigError(
                f"UnicronCheckpoint({folder!r}): checkpoints of the strategy {self._strategy.strategy_name} are "
                "folders of a file system that all workers see; expected a local path"
            )
        super().use(folder, partners, overlap=overlap)

    def save(self, trainer: pl.Trainer, path: Any, *, weights_only: bool) -> None:
        """Stage a checkpoint and have it written; for all members together."""
        strategy = self._strategy

        def take() -> TakenCheckpoint:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only)
            strategy.complete(checkpoint)
            late = strategy.module.automatic_optimization and _continues(trainer)
            return TakenCheckpoint(
                step=int(checkpoint["global_step"]),
                resumable="optimizer_states" in checkpoint,
                held=partial(strategy.parallelism.checkpoints.held, checkpoint),
                steady=_steady(strategy) if late else (),
            )

        self.write(path, take)

    @override
    def held_parts(self) -> Sequence[str]:
        return self._strategy.parallelism.checkpoints.held_parts()

    @override
    def written(self, step: int) -> None:
        self._strategy.parallelism.checkpoints.written(step)

    @override
    def remove_now(self, path: str) -> None:
        self._strategy.checkpoint_io.remove_checkpoint(path)


def _steady(strategy: FaultTolerantStrategy) -> set[int]:
    """Return the addresses of the memory that changes in the optimizer's step only."""
    states = (state for each in strategy.optimizers for state in each.state.values() if isinstance(state, dict))
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    kept += strategy.parallelism.checkpoints.steady()
    return memory_of([*strategy.module.parameters(), *kept]) - memory_of(strategy.parallelism.unsteady())


def _continues(trainer: pl.Trainer) -> bool:
    """Whether the next gradients follow, without a validation or an end, in whose hooks parameters may change."""
    loop, every = trainer.fit_loop.epoch_loop, trainer.val_check_batch
    if loop.batch_progress.is_last_batch or trainer.should_stop or trainer.global_step == trainer.max_steps:
        return False
    if not trainer.enable_validation:
        return True
    done = loop.batch_idx + 1, loop.total_batch_idx + 1
    return isinstance(every, int | float) and not any(each % every == 0 for each in done)
