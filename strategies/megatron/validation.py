"""Validation of a Megatron model: global batches of the pass, run by all replicas together.

One worker of each replica contributes the values that its batches log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.step import ReplicaEvaluation
from unicron_lightning.strategies.megatron.batches import StagePlaces, stage_batch
from unicron_lightning.strategies.megatron.checks import check_validation_loader
from unicron_lightning.strategies.passes.evaluation import GlobalPasses, PassBatch

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
        member, part = self._grid.member, StagePass(self._grid, batch)
        device = member.model.device
        return ReplicaEvaluation(
            part.places.all, part.size, member.fabric, device, part.call, part.results, tells=self._grid.tells
        )


class StagePass:
    """Runs the batches of one global batch of a pass on this worker's stage.

    Args:
        grid: provides module and place.
        batch: the global batch.

    Attributes:
        places: of its batches.
    """

    def __init__(self, grid: MegatronParallel, batch: PassBatch) -> None:
        self._grid = grid
        self._batch = batch
        self.places = StagePlaces(batch.batch)

    def size(self, place: int) -> int:
        """Return the number of samples at a place; batches can be missing only among those of one size."""
        batch = self._batch.batch
        return batch.count(next(iter(self.places.numbers([place])), batch.micro_batches[0]))

    def call(self, places: Sequence[int], size: int) -> None:
        """Run the batches at some places forward, together with the partners."""
        batch = self._batch.batch
        numbers = self.places.numbers(places)
        if numbers:
            self._grid.member.model.evaluate(self._forward, numbers, size)
        for number in numbers:
            batch.finished(number)

    def results(self, places: Collection[int]) -> bytes:
        """Encode the values logged by the batches at some places."""
        return self._batch.results(self.places.numbers(sorted(places)))

    def _forward(self, number: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Run a forward step; see `megatron.model.ForwardStep`."""
        batch, strategy = self._batch, self._grid.strategy
        module, engine = strategy.module, strategy.engine
        engine.activity.enter("validation", number)
        engine.fault("validation", engine.step)
        data = stage_batch(self._grid, batch.batch.fetch(number), batch.place(number), batch.loader)
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
