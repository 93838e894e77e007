"""Steps and validation of a sharded model: rows of S micro-batches, one for each shard of a replica."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from unicron_lightning.data.loader import BatchRows, GlobalBatch
from unicron_lightning.data.order import check_loader
from unicron_lightning.data.seeding import place_seed, seed_all
from unicron_lightning.fsdp.mesh import local_shards
from unicron_lightning.replica.step import ReplicaEvaluation, ReplicaStep
from unicron_lightning.strategies.metrics.sums import StepMetrics
from unicron_lightning.strategies.micro_batch import MicroBatches
from unicron_lightning.strategies.parallelism import FinishedStep
from unicron_lightning.strategies.passes.evaluation import GlobalPasses, PassBatch
from unicron_lightning.worker.buckets import FlatBucket
from unicron_lightning.worker.comparison import Divergence
from unicron_lightning.worker.effects import UNCOUNTED, Effects
from unicron_lightning.worker.module_buffers import EvaluationBuffers
from unicron_lightning.worker.rows import Balance
from unicron_lightning.worker.sums import AllUsed, LogCall, StepSums

if TYPE_CHECKING:
    from unicron_lightning.strategies.fsdp.parallel import FsdpParallel


class ShardedSteps:
    """Steps of a sharded model; implements `StepRunner`.

    Args:
        parallel: the parallelism that they belong to.
        divergence: compares the parameters of the replicas.

    Attributes:
        divergence: as above.
        grad_norm: norm of the last finished step's gradients over the whole model, before clipping.
        balance: rows of the replicas by speed; None: equally many.
    """

    def __init__(self, parallel: FsdpParallel, divergence: Divergence) -> None:
        self.grad_norm = 0.0
        self._parallel = parallel
        self.divergence = divergence
        self.balance: Balance | None = None
        self._gradients: list[Tensor | None] = []
        self._effects: Effects | None = None

    def begin_fit(self, balance: Balance | None) -> None:
        """Begin with a complete model."""
        self.balance = balance
        module = self._parallel.strategy.module
        self._effects = Effects(module, StepMetrics(module))

    def check_data(self, loader: DataLoader[Any]) -> None:
        """Refuse nothing more than `data.order.check_loader`."""

    def run(self, batch: GlobalBatch, *where: int) -> FinishedStep:
        strategy, member, effects = self._parallel.strategy, self._parallel.member, self._effects
        assert effects is not None
        rows = StepRows(self._parallel, batch, effects, takes_index=bool(where))
        digest = self.divergence.shard_digest(strategy.engine, member.model.shard)
        operation = ReplicaStep(rows.numbers, member.model, member.fabric, rows.call, rows.sums, self.balance, digest)
        strategy.engine.run(operation)
        self.divergence.check(operation, strategy.engine)
        assert operation.sums is not None
        self.grad_norm = operation.grad_norm
        self._gradients = [parameter.grad for parameter in member.model.gradients.parameters]
        loss, calls, _ = operation.sums.finish()
        effects.norms.commit(len(batch.micro_batches))
        return FinishedStep(operation=operation, loss=loss, calls=calls, output=rows.output(loss))

    def backward(self, loss: Tensor) -> Tensor:
        """Give the parameters their gradients, which Lightning has reset, with the usual hooks."""
        strategy = self._parallel.strategy
        plugin, module = strategy.precision_plugin, strategy.module
        Precision.pre_backward(plugin, loss, module)
        spare = self._parallel.is_spare
        for parameter, grad in zip(self._parallel.member.model.gradients.parameters, self._gradients, strict=True):
            parameter.grad = torch.zeros_like(parameter) if spare and parameter.requires_grad else grad
        self._gradients = []
        return plugin.post_backward(loss, module)


class StepRows:
    """Runs this worker's micro-batches of a step, row by row.

    Args:
        parallel: provides module and place.
        batch: locates the samples.
        effects: of the micro-batches on the module.
        takes_index: whether the module's ``training_step`` takes the batch index.

    Attributes:
        numbers: of all rows of the step.
    """

    def __init__(self, parallel: FsdpParallel, batch: GlobalBatch, effects: Effects, *, takes_index: bool) -> None:
        self._rows = BatchRows(batch, parallel.size, parallel.shard)
        self.numbers = self._rows.numbers
        self._parallel = parallel
        self._effects = effects
        self._micro_batches = batch.micro_batches
        self._done: dict[int, _RowResult] = {}
        self._row = _RowResult(number=0, counts=False)
        effects.begin(batch.micro_batches[0], parallel.strategy.agreed, anew=batch.step == 0)
        self._batches = MicroBatches(parallel.strategy, batch, self._add, effects, takes_index=takes_index)

    def call(self, micro_batches: Sequence[int], *, last: bool) -> None:
        """Run some rows together with the partners; see `replica.step.Call`."""
        bucket = self._effects.norms.bucket
        for row in micro_batches:
            number, counts = self._rows.own(row)
            self._row = self._done[row] = _RowResult(number=number, counts=counts)
            if self._rows.is_empty(row):
                continue
            if bucket is not None:
                bucket.local.zero_()
            try:
                self._batches.run(number, counts=counts)
            except BaseException:
                self._effects.restore()
                raise
            self._parallel.strategy.engine.activity.computed()
            if bucket is not None and counts:
                self._row.norms = bucket.local.clone()

    def _add(self, loss: Tensor | None, calls: Sequence[LogCall]) -> None:
        """Record the results of a micro-batch that counts."""
        assert loss is not None, "no micro-batch is skipped"
        self._row.results.append((loss.detach().clone(), calls))

    def sums(self, rows: Sequence[int]) -> ShardedSums:
        """Return the step's other sums, over this worker's micro-batches of some rows."""
        effects, done = self._effects, [self._done[row] for row in rows]
        counted = {each.number for each in done if each.counts}
        if effects.norms.bucket is not None:
            effects.norms.bucket.local.zero_()
            for each in done:
                if each.norms is not None:
                    effects.norms.bucket.local.add_(each.norms)
        if self._micro_batches[0] not in counted:
            effects.buffers.withdraw()
        assert effects.metrics is not None
        recorded = effects.metrics.recorded
        effects.metrics.recorded = {number: recorded[number] for number in counted & recorded.keys()}
        sums = ShardedSums(self._parallel.strategy.agreed, effects.norms, effects.buffers, AllUsed(), effects.metrics)
        for loss, calls in (result for each in done for result in each.results):
            sums.add(loss, calls)
        return sums

    def output(self, loss: float | None) -> Any:
        """Return the output of ``training_step`` for Lightning's hooks."""
        return self._batches.output(loss)


@dataclass(kw_only=True)
class _RowResult:
    """This worker's micro-batch of a row.

    Attributes:
        number: of the micro-batch.
        counts: whether it counts.
        results: its loss and logged values, once it is done.
        norms: its changes of batch-norm statistics.
    """

    number: int
    counts: bool
    results: list[tuple[Tensor, Sequence[LogCall]]] = field(default_factory=list)
    norms: Tensor | None = None


class ShardedSums(StepSums):
    """The sums of one step, which are all small ones: a broken replica's are discarded until these are summed."""

    @override
    def totals(self) -> list[float]:
        large = (value for bucket in self._flat() for value in bucket.local.double().tolist())
        return [*super().totals(), *large]

    @override
    def read(self, totals: Sequence[float]) -> bool:
        end = len(totals) - sum(bucket.local.numel() for bucket in self._flat())
        start = end
        for bucket in self._flat():
            values = totals[start : start + bucket.local.numel()]
            bucket.reduced.copy_(torch.tensor(values, dtype=torch.float64))
            start += len(values)
        return super().read(totals[:end])

    def _flat(self) -> list[FlatBucket]:
        return [bucket for bucket in self.buckets if isinstance(bucket, FlatBucket)]


def keep_spares(plugin: Precision, is_spare: Callable[[], bool]) -> None:
    """Make a precision plugin take the gradients of a spare, which hooks have seen as zeros, from its optimizer.

    A spare keeps its state until it gets that of a member.

    Args:
        plugin: Lightning's.
        is_spare: whether this worker is one in the present step.
    """
    after = plugin._after_closure

    def closed(model: Any, optimizer: Any) -> None:
        after(model, optimizer)
        if is_spare():
            for parameter in plugin.main_params(optimizer):
                parameter.grad = None

    plugin._after_closure = closed  # type: ignore[method-assign]


def clip_by_agreed_norm(plugin: Precision, norm: Callable[[], float]) -> None:
    """Make a precision plugin clip by a norm that the shards have agreed on before the commit, since no communication
    may follow it.

    Args:
        plugin: Lightning's.
        norm: returns the norm of the present gradients over the whole model.
    """

    def clip(optimizer: Optimizer, clip_val: int | float) -> None:
        factor = min(1.0, float(clip_val) / (norm() + 1e-6))
        grads = [parameter.grad for parameter in plugin.main_params(optimizer) if parameter.grad is not None]
        if grads:  # a spare has none
            torch._foreach_mul_(local_shards(grads), factor)

    by_value = plugin.clip_grad_by_value

    def clip_value(optimizer: Optimizer, clip_val: int | float) -> None:
        if any(parameter.grad is not None for parameter in plugin.main_params(optimizer)):  # torch refuses a spare's
            by_value(optimizer, clip_val)

    plugin.clip_grad_by_norm = clip  # type: ignore[method-assign]
    plugin.clip_grad_by_value = clip_value  # type: ignore[method-assign]


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
            batches, lambda row: 0, member.fabric, device, rows.evaluate, rows.results, tells=True, width=size
        )


class _PassRows:
    """One global batch, row by row.

    Args:
        parallel: provides module and place.
        batch: the global batch.
    """

    def __init__(self, parallel: FsdpParallel, batch: PassBatch) -> None:
        self._rows = BatchRows(batch.batch, parallel.size, parallel.shard)
        self.numbers = self._rows.numbers
        self._strategy = parallel.strategy
        self._batch = batch
        self._buffers = EvaluationBuffers(parallel.strategy.module)
        self._counted: dict[int, list[int]] = {}

    def evaluate(self, rows: Sequence[int], _: int) -> None:
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
