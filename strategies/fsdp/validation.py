"""Validation of a sharded model: rows of a pass's global batches, run by all replicas together, with equal logs on all
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from unicron_lightning.data.loader import GlobalBatch, PassLoader
from unicron_lightning.data.order import StepShape, check_loader
from unicron_lightning.data.seeding import place_seed, preserved, seed_all
from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.evaluation import ReplicaEvaluation
from unicron_lightning.strategies.metrics.recording import LogCall, RecordingResults, merge_calls
from unicron_lightning.worker import codec
from unicron_lightning.worker.engine import Report
from unicron_lightning.worker.ledger import share
from unicron_lightning.worker.operations import unpack_parts

if TYPE_CHECKING:
    from unicron_lightning.strategies.fsdp.parallel import FsdpParallel

_VALIDATION: Final = 2
"""Distinguishes the random state from that of training, at the same place."""


class ShardedEvaluation:
    """Validation passes; implements `EvaluationRunner`.

    Args:
        parallel: the parallelism that they belong to.
    """

    def __init__(self, parallel: FsdpParallel) -> None:
        self._parallel = parallel
        self._strategy = parallel.strategy

    def begin_run(self, trainer: pl.Trainer) -> None:
        trainer.fit_loop.epoch_loop.val_loop._results = RecordingResults(False, self._strategy.reduce)

    def loader(self, trainer: pl.Trainer, loader: DataLoader[Any], shape: StepShape) -> PassLoader:
        """Return the loader for the validation loop.

        Raises:
            ConfigError: for loaders whose batches cannot be distributed.
        """
        check_loader(loader)
        most = trainer.limit_val_batches
        return PassLoader(
            loader,
            shape,
            self._strategy.seed,
            most if isinstance(most, int) else None,
            lambda: trainer.num_sanity_val_steps if trainer.sanity_checking else math.inf,
            lambda: trainer.current_epoch,
            self._strategy.share,
        )

    def step(self, run: Callable[[], Any], args: Sequence[Any]) -> None:
        """Run a global batch of the pass, forward only, and log its results."""
        strategy, member = self._strategy, self._parallel.member
        batch, *where = args
        if not isinstance(batch, GlobalBatch):
            raise ConfigError(
                f"a validation batch is a {type(batch).__qualname__} of several loaders; unicron_fsdp runs them "
                'one after another: give a list of DataLoaders, or CombinedLoader(..., mode="sequential")'
            )
        strategy.engine.activity.enter("validation")
        rows = _ValidationRows(self._parallel, batch, where)
        operation = RowEvaluation(
            rows.numbers, lambda row: 0, member.fabric, member.model.device, rows.call, rows.results, tells=True
        )
        with strategy.collectives.refused("validation_step"), preserved():
            parts = strategy.engine.run(operation)
            rows.log(unpack_parts(parts))


class RowEvaluation(ReplicaEvaluation):
    """Some rows of a pass, of which each worker has the results of its own batches."""

    def plan(self, reports: Sequence[Report | None], rank: int) -> None:
        place = self._fabric.place
        assert place is not None
        left = unfinished_rows(self._batches, reports, place.layout.shards, self._fabric.shape.shards)
        own = [] if place.replica is None else share(left, place.replica, len(place.layout.replicas))
        self._calls = [own] if own else []


def unfinished_rows(
    rows: Sequence[int], reports: Sequence[Report | None], shards: Sequence[int | None], size: int
) -> list[int]:
    """The rows of which some shard's results are on no present worker.

    Args:
        rows: all.
        reports: of the members, by rank; None for members that have not begun.
        shards: of the members, by rank.
        size: number of shards.
    """
    done: list[set[int]] = [set() for _ in range(size)]
    for report, shard in zip(reports, shards, strict=True):
        if report is not None and shard is not None:
            done[shard].update(report["finished"])
    finished = set.intersection(*done)
    return [row for row in rows if row not in finished]


class _ValidationRows:
    """One global batch, row by row.

    Args:
        parallel: provides module, results and place.
        batch: locates the samples.
        where: the other arguments of ``validation_step``: Lightning's batch index, and that of the loader.
    """

    def __init__(self, parallel: FsdpParallel, batch: GlobalBatch, where: Sequence[int]) -> None:
        self.numbers = list(range(parallel.rows(batch.micro_batches)))
        self._parallel = parallel
        self._strategy = parallel.strategy
        self._batch = batch
        self._where = where
        self._loader = where[1] if len(where) > 1 else 0
        self._calls: dict[int, dict[int, list[LogCall]]] = {}
        results = self._strategy.trainer.fit_loop.epoch_loop.val_loop._results
        assert isinstance(results, RecordingResults)
        self._results = results

    def call(self, rows: Sequence[int], _: int) -> None:
        """Run some rows forward, together with the partners."""
        strategy, engine = self._strategy, self._strategy.engine
        numbers = self._batch.micro_batches
        for row in rows:
            number, counts = self._parallel.micro_batch(row, numbers)
            engine.activity.enter("validation", number)
            engine.fault("validation", engine.step)
            seed_all(place_seed(strategy.seed, _VALIDATION, self._batch.epoch, self._loader, number))
            data = strategy.module._on_before_batch_transfer(self._batch.fetch(number), dataloader_idx=self._loader)
            data = strategy.batch_to_device(data, dataloader_idx=self._loader)
            with self._results.recording(data) as calls, torch.no_grad():
                strategy.module.validation_step(data, *self._where)
            self._calls[row] = {number: calls} if counts else {}

    def results(self, rows: Collection[int]) -> bytes:
        """Encode the values logged by this worker's batches of some rows."""
        return codec.encode(
            {number: [call.plain() for call in calls] for row in rows for number, calls in self._calls[row].items()}
        )

    def log(self, parts: list[bytes]) -> None:
        """Log the values of all batches, reduced over them."""
        module, connector = self._strategy.module, self._strategy.trainer._logger_connector
        logged: dict[int, list[Any]] = {}
        for part in parts:
            logged.update(codec.decode(part))
        assert sorted(logged) == list(self._batch.micro_batches), "each batch counts once"
        calls = [LogCall.from_plain(call) for number in sorted(logged) for call in logged[number]]
        connector._current_fx = "validation_step"  # otherwise a later value would count as the pass's first
        for call in merge_calls(calls):
            self._results.replay(call, module, self._strategy.root_device)
