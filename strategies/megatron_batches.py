"""Micro-batches of a Megatron model: forward on this stage, and the loss on the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.nn import Parameter

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron.randomness import seed_micro_batch
from unicron_lightning.strategies.module_buffers import ModuleBuffers
from unicron_lightning.strategies.recording import LogCall, RecordingResults
from unicron_lightning.strategies.sums import NormStatistics, StepSums, SumsLayout

if TYPE_CHECKING:
    from unicron_lightning.strategies.megatron import UnicronMegatronStrategy

_FORWARD = 1
"""Distinguishes the random state of computing from that of fetching, at the same place."""


class StageBatches:
    """Runs the micro-batches of one step on this worker's stage.

    Args:
        strategy: provides module, seed and place.
        trainer: provides the results that the module logs to.
        batch: locates the samples.
        step_in_epoch: Lightning's batch index.
    """

    def __init__(
        self, strategy: UnicronMegatronStrategy, trainer: pl.Trainer, batch: GlobalBatch, step_in_epoch: int
    ) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._batch = batch
        self._index = step_in_epoch
        self._done: dict[int, tuple[Tensor, list[LogCall]]] = {}

    def forward(self, micro_batch: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Run a forward step; see `megatron.model.ForwardStep`."""
        module = self._strategy.lightning_module
        assert module is not None
        place = (_FORWARD, self._batch.epoch, self._batch.step, micro_batch)
        data = stage_batch(self._strategy, self._batch, micro_batch, place)
        results = self._trainer.fit_loop.epoch_loop._results
        assert isinstance(results, RecordingResults)
        with results.recording(data) as calls:
            output = module.training_step(data, self._index)
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"training_step returned {output!r}; under unicron_megatron it returns the output of the stage for one "
                "micro-batch, a tensor, and loss(output, batch) makes the loss of it on the last stage"
            )

        make_loss: Any = module.loss

        def loss(result: Tensor) -> Tensor:
            with results.recording(data) as more:
                value: Tensor = make_loss(result, data)
            self._done[micro_batch] = value.detach().clone(), [*calls, *more]
            return value

        return output, loss

    def sums(self, layout: SumsLayout, micro_batches: Sequence[int]) -> StepSums:
        """Return the step's other sums, which one worker of each replica contributes."""
        assert self._strategy.lightning_module is not None
        norms, no_buffers = NormStatistics(self._strategy.lightning_module), ModuleBuffers(nn.Module())
        sums = StepSums(layout, norms, no_buffers, _AllUsed())
        if self._strategy.fabric.shape.tells(self._strategy.fabric.own_shard):
            for micro_batch in micro_batches:
                sums.add(*self._done[micro_batch])
        return sums


def stage_batch(
    strategy: UnicronMegatronStrategy, batch: GlobalBatch, number: int, place: tuple[int, ...], loader: int = 0
) -> Any:
    """Return a micro-batch on this worker's device, and set the random state for computing it.

    Args:
        strategy: provides device, seed and place in the grid.
        batch: locates the samples.
        number: number of the micro-batch.
        place: inputs of the random state.
        loader: Lightning's index of the data loader.
    """
    module = strategy.lightning_module
    assert module is not None
    data = module._on_before_batch_transfer(batch.fetch(number), dataloader_idx=loader)
    data = strategy.batch_to_device(data, dataloader_idx=loader)
    seed_micro_batch(strategy.seed, place, *strategy.coordinate, strategy.root_device)
    return data


class _AllUsed:
    """Reports all parameters as used, because Megatron's buckets hold all of them."""

    used: Sequence[bool] = ()
    parameters: Sequence[Parameter] = ()
