"""A step of a sharded model in rows of S micro-batches: this worker's one of each row, and the step's small sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from unicron_lightning.data.loader import BatchRows, GlobalBatch
from unicron_lightning.data.passes import RowPart
from unicron_lightning.fsdp.gradients import ExactShardedGradients, ShardedGradients
from unicron_lightning.worker.buckets import FlatBucket
from unicron_lightning.worker.control.activity import Activity
from unicron_lightning.worker.effects import Effects
from unicron_lightning.worker.exact_sums import ExactSums, OrderedSums
from unicron_lightning.worker.sums import AllUsed, LogCall, StepSums, SumsLayout
from unicron_lightning.worker.witness import WitnessedStep


def number_of_rows(micro_batches: Sequence[int], size: int) -> int:
    """Return the number of rows of S micro-batches, one for each shard; the last one may be incomplete."""
    return -(-len(micro_batches) // size)


class StepRows:
    """Runs this worker's micro-batches of a step, row by row.

    Args:
        batch: locates the samples.
        part: this worker's part of each row.
        effects: of the micro-batches on the module.
        agreed: the members' agreement on the step's sums.
        activity: of this worker.
        gradients: of the model.
        anew: whether to search the metric objects again.

    Attributes:
        numbers: of all rows of the step.
        witness: of the step, if it has one.
    """

    witness: WitnessedStep | None = None

    def __init__(
        self,
        batch: GlobalBatch,
        part: RowPart,
        effects: Effects,
        agreed: SumsLayout,
        activity: Activity,
        gradients: ShardedGradients,
        *,
        anew: bool = False,
    ) -> None:
        self._rows = BatchRows(batch, part.size, part.shard)
        self._speaks = part.speaks
        self.numbers = self._rows.numbers
        self._effects = effects
        self._agreed = agreed
        self._activity = activity
        self._gradients = gradients
        self._micro_batches = batch.micro_batches
        self._done: dict[int, _RowResult] = {}
        self._row = _RowResult(number=0, counts=False)
        effects.begin(batch.micro_batches[0], agreed, anew=anew)

    def renew(self) -> None:
        """Begin with the module's present buffers: this worker was a spare, and has got the state of another one."""
        self._effects.begin(self._micro_batches[0], self._agreed, anew=False)

    def call(self, run: Callable[..., None], micro_batches: Sequence[int], *, last: bool) -> None:
        """Run some rows together with the partners; see `replica.step.Call`.

        Args:
            run: runs a micro-batch, given its number and ``counts``, whether it counts; reports to `add`.
            micro_batches: the rows.
            last: as there.
        """
        bucket = self._effects.norms.bucket
        for row in micro_batches:
            number, counts = self._rows.own(row)
            self._row = self._done[row] = _RowResult(number=number, counts=counts)
            if self._rows.is_empty(row):
                continue
            if bucket is not None:
                bucket.local.zero_()
            try:
                if self.witness is not None and row == self.witness.own:
                    self.witness.observe(lambda _: run(number, counts=counts), row)  # noqa: B023 - called at once
                else:
                    run(number, counts=counts)
            except BaseException:
                self._effects.restore()
                raise
            self._gradients.take()
            self._activity.computed()
            if bucket is not None and counts:
                self._row.norms = bucket.local.clone()

    def repeat(self, run: Callable[..., None], row: int) -> None:
        """Repeat a row of another replica together with the partners; all but the gradients is dropped."""
        number, counts = self._rows.own(row)
        if not self._rows.is_empty(row):
            run(number, counts=counts)

    def add(self, loss: Tensor | None, calls: Sequence[LogCall], number: int) -> None:
        """Record the results of a micro-batch that counts."""
        assert loss is not None, "no micro-batch is skipped"
        whole = loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach().clone()  # type: ignore[attr-defined]
        self._row.results.append((whole, calls))

    def sums(self, rows: Sequence[int]) -> ShardedSums:
        """Return the step's other sums, over this worker's micro-batches of some rows; none if another one has them."""
        effects, done = self._effects, [self._done[row] for row in rows if self._speaks]
        counted = {each.number for each in done if each.counts}
        if effects.norms.bucket is not None:
            effects.norms.bucket.local.zero_()
            for each in done:
                if each.norms is not None:
                    effects.norms.bucket.local.add_(each.norms)
        if self._micro_batches[0] not in counted:
            effects.buffers.withdraw()
        if effects.metrics is not None:
            recorded = effects.metrics.recorded
            effects.metrics.recorded = {number: recorded[number] for number in counted & recorded.keys()}
        parts = (self._agreed, effects.norms, effects.buffers, AllUsed(), effects.metrics)
        if isinstance(self._gradients, ExactShardedGradients):
            numbers = self._micro_batches
            sums: ShardedSums = ExactShardedSums(*parts, numbers, ExactSums(self._agreed, len(numbers)))
        else:
            sums = ShardedSums(*parts)
        for each in done:
            for loss, calls in each.results:
                sums.add(loss, calls, each.number)
        return sums


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


class ExactShardedSums(ShardedSums, OrderedSums):
    """`ShardedSums` that do not depend on the division of the micro-batches."""

    @override
    def totals(self) -> list[float]:
        return [each + 0.0 for each in super().totals()]
