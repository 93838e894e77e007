"""Validation and test of a sharded model: rows of a pass's global batches, run by all replicas together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader
from typing_extensions import override

from unicron_lightning.data.order import check_loader
from unicron_lightning.data.seeding import place_seed, seed_all
from unicron_lightning.replica.step import ReplicaEvaluation
from unicron_lightning.strategies.fsdp.steps import ReplicaRows
from unicron_lightning.strategies.micro_batch import UNCOUNTED
from unicron_lightning.strategies.passes.evaluation import GlobalPasses, PassBatch
from unicron_lightning.strategies.state.module_buffers import EvaluationBuffers

if TYPE_CHECKING:
    from unicron_lightning.strategies.fsdp.parallel import FsdpParallel


class ShardedEvaluation(GlobalPasses):
    """Passes of a sharded model, of which each worker runs its own batch of a row.

    Args:
        parallel: the parallelism that they belong to.
    """

    def __init__(self, parallel: FsdpParallel) -> None:
        super().__init__(parallel.strategy)
        self._parallel = parallel

    @override
    def check_data(self, loader: DataLoader[Any]) -> None:
        check_loader(loader)

    @override
    def operation(self, batch: PassBatch) -> ReplicaEvaluation:
        member = self._parallel.member
        size, rows = self._parallel.size, _PassRows(self._parallel, batch)
        batches, device = range(len(rows.numbers) * size), member.model.device
        return ReplicaEvaluation(
            batches, lambda row: 0, member.fabric, device, rows.call, rows.results, tells=True, width=size
        )


class _PassRows:
    """One global batch, row by row.

    Args:
        parallel: provides module and place.
        batch: the global batch.
    """

    def __init__(self, parallel: FsdpParallel, batch: PassBatch) -> None:
        self._rows = ReplicaRows(batch.batch, parallel.size, parallel.shard)
        self.numbers = self._rows.numbers
        self._strategy = parallel.strategy
        self._batch = batch
        self._buffers = EvaluationBuffers(parallel.strategy.module)
        self._counted: dict[int, list[int]] = {}

    def call(self, rows: Sequence[int], _: int) -> None:
        """Run some rows forward, together with the partners."""
        strategy, engine, batch = self._strategy, self._strategy.engine, self._batch
        for row in rows:
            number, counts = self._rows.own(row)
            self._counted[row] = [number] if counts else []
            if self._rows.is_empty(row):
                continue
            engine.activity.enter("validation", number)
            engine.fault("validation", engine.step)
            samples = (batch.batch.fetch if counts else batch.batch.stand_in)(number)
            seed_all(place_seed(strategy.seed, *batch.place(number)))  # fetching may have drawn numbers
            data = strategy.to_device(samples, batch.loader)
            batch.metrics.start_micro_batch()
            try:
                with batch.recording(data) as calls, strategy.precision_plugin.val_step_context():
                    batch.run(data)
            except BaseException:
                batch.metrics.restore()
                raise
            finally:
                self._buffers.undo()
            batch.metrics.finish_micro_batch(number if counts else UNCOUNTED)
            if counts:
                batch.calls[number] = calls
                batch.batch.finished(number)

    def results(self, rows: Collection[int]) -> bytes:
        """Encode the values logged by this worker's batches of some rows."""
        return self._batch.results(number for row in rows for number in self._counted[row])
