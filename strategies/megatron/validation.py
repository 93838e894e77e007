"""Validation of a Megatron model: global batches of the pass, run by all replicas together.

One worker of each replica contributes the values that its batches log.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.evaluation import ReplicaEvaluation
from unicron_lightning.strategies.megatron.batches import stage_batch
from unicron_lightning.strategies.megatron.checks import check_validation_loader
from unicron_lightning.strategies.passes.global_passes import GlobalPasses, PassBatch

if TYPE_CHECKING:
    from unicron_lightning.strategies.megatron.parallel import MegatronParallel


class StageEvaluation(GlobalPasses):
    """Validation passes.

    Args:
        grid: the parallelism that they belong to.
    """

    def __init__(self, grid: MegatronParallel) -> None:
        super().__init__(grid.strategy)
        self._grid = grid

    @override
    def check_data(self, loader: DataLoader[Any]) -> None:
        check_validation_loader(loader)

    @override
    def operation(self, batch: PassBatch) -> ReplicaEvaluation:
        member = self._grid.member
        return ReplicaEvaluation(
            batch.batch.micro_batches,
            batch.batch.count,
            member.fabric,
            member.model.device,
            partial(member.model.evaluate, partial(self._forward, batch)),
            batch.results,
            tells=self._grid.tells,
        )

    def _forward(self, batch: PassBatch, number: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Run a forward step; see `megatron.model.ForwardStep`."""
        module, engine = self._strategy.module, self._strategy.engine
        engine.activity.enter("validation", number)
        engine.fault("validation", engine.step)
        data = stage_batch(self._grid, batch.batch, number, batch.place(number), batch.loader)
        with batch.recording(data) as calls:
            output = batch.run(data)
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"validation_step returned {output!r}; under unicron_megatron it returns the output of the stage for "
                "one batch, a tensor, and validation_loss(output, batch) logs values computed from it on the last stage"
            )
        batch.calls[number] = calls
        judge: Any = getattr(module, "validation_loss", None)

        def loss(result: Tensor) -> Tensor:
            if judge is not None:
                with batch.recording(data) as more:
                    judge(result, data)
                batch.calls[number] = [*calls, *more]
            return torch.zeros((), device=result.device)  # the schedule needs a tensor, and writes into it

        return output, loss
