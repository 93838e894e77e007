"""Steps of a sharded model: rows of S micro-batches, one for each shard of a replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.fsdp.mesh import local_shards
from unicron_lightning.replica.step import ReplicaStep
from unicron_lightning.strategies.metrics.recording import LogCall
from unicron_lightning.strategies.metrics.sums import NormStatistics, StepSums
from unicron_lightning.strategies.micro_batch import Effects, MicroBatches
from unicron_lightning.strategies.parallelism import FinishedStep
from unicron_lightning.strategies.state.module_buffers import ModuleBuffers

if TYPE_CHECKING:
    from unicron_lightning.strategies.fsdp.parallel import FsdpParallel


class ShardedSteps:
    """Steps of a sharded model; implements `StepRunner`.

    Args:
        parallel: the parallelism that they belong to.

    Attributes:
        grad_norm: norm of the last finished step's gradients over the whole model, before clipping.
    """

    def __init__(self, parallel: FsdpParallel) -> None:
        self.grad_norm = 0.0
        self._parallel = parallel
        self._gradients: list[Tensor | None] = []

    def check_data(self, loader: DataLoader[Any]) -> None:
        """Refuse nothing more than `data.order.check_loader`."""

    def run(self, batch: GlobalBatch, *where: int) -> FinishedStep:
        strategy, member = self._parallel.strategy, self._parallel.member
        rows = StepRows(self._parallel, batch, takes_index=bool(where))
        operation = ReplicaStep(rows.numbers, member.model, member.fabric, rows.call, rows.sums)
        strategy.engine.run(operation)
        assert operation.sums is not None
        self.grad_norm = operation.grad_norm
        self._gradients = [parameter.grad for parameter in member.model.gradients.parameters]
        loss, calls, _ = operation.sums.finish()
        return FinishedStep(operation=operation, loss=loss, calls=calls, output=rows.output(loss))

    def backward(self, loss: Tensor) -> Tensor:
        """Give the parameters their gradients, which Lightning has reset, with the usual hooks."""
        strategy = self._parallel.strategy
        plugin, module = strategy.precision_plugin, strategy.module
        Precision.pre_backward(plugin, loss, module)
        for parameter, grad in zip(self._parallel.member.model.gradients.parameters, self._gradients, strict=True):
            parameter.grad = grad
        self._gradients = []
        return plugin.post_backward(loss, module)


class StepRows:
    """Runs this worker's micro-batches of a step, row by row.

    Args:
        parallel: provides module and place.
        batch: locates the samples.
        takes_index: whether the module's ``training_step`` takes the batch index.

    Attributes:
        numbers: of all rows of the step.
    """

    def __init__(self, parallel: FsdpParallel, batch: GlobalBatch, *, takes_index: bool) -> None:
        self.numbers = list(range(parallel.rows(batch.micro_batches)))
        self._parallel = parallel
        self._micro_batches = batch.micro_batches
        self._done: dict[int, list[tuple[Tensor, Sequence[LogCall]]]] = {}
        self._row = 0
        effects = Effects(pl.LightningModule())
        effects.begin(batch, parallel.strategy.agreed)
        self._batches = MicroBatches(parallel.strategy, batch, self, effects, takes_index=takes_index)

    def call(self, micro_batches: Sequence[int], *, last: bool) -> None:
        """Run some rows together with the partners; see `replica.step.Call`."""
        for row in micro_batches:
            self._row, self._done[row] = row, []
            number, counts = self._parallel.micro_batch(row, self._micro_batches)
            self._batches.run(number, counts=counts)

    def add(self, loss: Tensor, calls: Sequence[LogCall]) -> None:
        """Record the results of a micro-batch that counts."""
        self._done[self._row].append((loss.detach().clone(), calls))

    def sums(self, rows: Sequence[int]) -> StepSums:
        """Return the step's other sums, over this worker's micro-batches of some rows."""
        nothing = pl.LightningModule()
        sums = StepSums(self._parallel.strategy.agreed, NormStatistics(nothing), ModuleBuffers(nn.Module()), _AllUsed())
        for row in rows:
            for loss, calls in self._done[row]:
                sums.add(loss, calls)
        return sums

    def output(self, loss: float) -> Any:
        """Return the output of ``training_step`` for Lightning's hooks."""
        return self._batches.output(loss)


class ShardedPrecision(Precision):
    """Clipping by a norm that the shards have agreed on before the commit, since no communication may follow it.

    Args:
        norm: returns the norm of the present gradients over the whole model.
    """

    def __init__(self, norm: Callable[[], float]) -> None:
        self._norm = norm

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        factor = min(1.0, float(clip_val) / (self._norm() + 1e-6))
        grads = [parameter.grad for parameter in self.main_params(optimizer) if parameter.grad is not None]
        if grads:  # a spare has none
            torch._foreach_mul_(local_shards(grads), factor)


class _AllUsed:
    """Reports all parameters as used: unused ones have no gradient after the reduction."""

    used: Sequence[bool] = ()
    parameters: Sequence[Parameter] = ()
