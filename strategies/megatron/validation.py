"""Validation of a Megatron model: global batches of the pass, run by all replicas together, with equal logs on all
ranks.

One item of Lightning's validation loop is a global batch, as in training, and one operation of all members. One worker
of each replica contributes the values that its batches log. They are reduced in the order of batches, and logged by all
workers, so they do not depend on the distribution of the batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from unicron_lightning.data.loader import GlobalBatch, PassLoader
from unicron_lightning.data.order import StepShape
from unicron_lightning.data.seeding import preserved
from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.evaluation import ReplicaEvaluation
from unicron_lightning.strategies.megatron.batches import stage_batch
from unicron_lightning.strategies.megatron.checks import check_validation_loader
from unicron_lightning.strategies.metrics.recording import LogCall, RecordingResults, merge_calls
from unicron_lightning.worker import codec
from unicron_lightning.worker.operations import unpack_parts

if TYPE_CHECKING:
    from unicron_lightning.strategies.megatron.parallel import MegatronParallel

_VALIDATION: Final = 2
"""Distinguishes the random state from that of training, at the same place."""


class StageEvaluation:
    """Validation passes; implements `EvaluationRunner`.

    Args:
        grid: the parallelism that they belong to.
    """

    def __init__(self, grid: MegatronParallel) -> None:
        self._grid = grid
        self._strategy = grid.strategy

    def begin_run(self, trainer: pl.Trainer) -> None:
        trainer.fit_loop.epoch_loop.val_loop._results = RecordingResults(False, self._strategy.reduce)

    def loader(self, trainer: pl.Trainer, loader: DataLoader[Any], shape: StepShape) -> PassLoader:
        """Return the loader for the validation loop.

        Raises:
            ConfigError: for loaders whose batches cannot be distributed.
        """
        most = trainer.limit_val_batches
        return PassLoader(
            check_validation_loader(loader),
            shape,
            self._strategy.seed,
            most if isinstance(most, int) else None,
            lambda: trainer.num_sanity_val_steps if trainer.sanity_checking else math.inf,
            lambda: trainer.current_epoch,
            self._strategy.share,
        )

    def step(self, run: Callable[[], Any], args: Sequence[Any]) -> None:
        """Run a global batch of the pass, forward only, and log its results."""
        strategy, member = self._strategy, self._grid.member
        batch, *where = args
        if not isinstance(batch, GlobalBatch):
            raise ConfigError(
                f"a validation batch is a {type(batch).__qualname__} of several loaders; the unicron_megatron strategy "
                "runs them one after another: give a list of DataLoaders, or "
                'CombinedLoader(..., mode="sequential")'
            )
        strategy.engine.activity.enter("validation")
        stage = _StageValidation(self._grid, batch, where)
        operation = ReplicaEvaluation(
            batch.micro_batches,
            batch.count,
            member.fabric,
            member.model.device,
            partial(member.model.evaluate, stage.forward),
            stage.results,
            tells=self._grid.tells,
        )
        with strategy.collectives.refused("validation_step"), preserved():
            parts = strategy.engine.run(operation)
            stage.log(unpack_parts(parts))


class _StageValidation:
    """One global batch on this worker's stage.

    Args:
        grid: provides module, results and place.
        batch: locates the samples.
        where: the other arguments of ``validation_step``: Lightning's batch index, and that of the loader.
    """

    def __init__(self, grid: MegatronParallel, batch: GlobalBatch, where: Sequence[int]) -> None:
        self._grid = grid
        self._strategy = grid.strategy
        self._batch = batch
        self._where = where
        self._loader = where[1] if len(where) > 1 else 0
        self._calls: dict[int, list[LogCall]] = {}
        results = self._strategy.trainer.fit_loop.epoch_loop.val_loop._results
        assert isinstance(results, RecordingResults)
        self._results = results

    def forward(self, number: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Run a forward step; see `megatron.model.ForwardStep`."""
        module, engine = self._strategy.module, self._strategy.engine
        engine.activity.enter("validation", number)
        engine.fault("validation", engine.step)
        place = (_VALIDATION, self._batch.epoch, self._loader, number)
        data = stage_batch(self._grid, self._batch, number, place, self._loader)
        with self._results.recording(data) as calls:
            output = module.validation_step(data, *self._where)
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"validation_step returned {output!r}; under unicron_megatron it returns the output of the stage for "
                "one batch, a tensor, and validation_loss(output, batch) logs values computed from it on the last stage"
            )
        self._calls[number] = calls
        judge: Any = getattr(module, "validation_loss", None)

        def loss(result: Tensor) -> Tensor:
            if judge is not None:
                with self._results.recording(data) as more:
                    judge(result, data)
                self._calls[number] = [*calls, *more]
            return torch.zeros((), device=result.device)  # the schedule needs a tensor, and writes into it

        return output, loss

    def results(self, numbers: Collection[int]) -> bytes:
        """Encode the values logged by some batches."""
        return codec.encode({number: [call.plain() for call in self._calls[number]] for number in numbers})

    def log(self, parts: list[bytes]) -> None:
        """Log the values of all batches, reduced over them."""
        module, connector = self._strategy.module, self._strategy.trainer._logger_connector
        told: dict[int, list[Any]] = {}
        for part in parts:
            told.update(codec.decode(part))
        assert sorted(told) == list(self._batch.micro_batches), "each batch counts once"
        calls = [LogCall.from_plain(call) for number in sorted(told) for call in told[number]]
        # As after a step's first logged value: otherwise a later value would count as the pass's first.
        connector._current_fx = "validation_step"
        for call in merge_calls(calls):
            self._results.replay(call, module, self._strategy.root_device)
