"""Steps and validation of a sharded model: rows of S micro-batches, one for each shard of a replica."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from unicron_lightning.data.loader import BatchRows, GlobalBatch
from unicron_lightning.data.seeding import place_seed, seed_all
from unicron_lightning.fsdp.gradients import clip_factor, clip_shards
from unicron_lightning.fsdp.mesh import check_norms
from unicron_lightning.fsdp.rows import StepRows
from unicron_lightning.replica.step import ReplicaEvaluation, ReplicaStep
from unicron_lightning.strategies.metrics.sums import StepMetrics
from unicron_lightning.strategies.micro_batch import MicroBatches
from unicron_lightning.strategies.parallelism import FinishedStep, StepRunner
from unicron_lightning.strategies.passes.evaluation import PassBatch
from unicron_lightning.worker.comparison import Divergence
from unicron_lightning.worker.effects import UNCOUNTED, Effects
from unicron_lightning.worker.module_buffers import EvaluationBuffers
from unicron_lightning.worker.rows import Balance

if TYPE_CHECKING:
    from unicron_lightning.strategies.fsdp.parallel import FsdpParallel


class ShardedSteps(StepRunner):
    """Steps of a sharded model.

    Args:
        parallel: the parallelism that they belong to.
        divergence: compares the parameters of the replicas.

    Attributes:
        balance: rows of the replicas by speed; None: equally many.
    """

    def __init__(self, parallel: FsdpParallel, divergence: Divergence) -> None:
        super().__init__(divergence)
        self._parallel = parallel
        self.balance: Balance | None = None
        self._gradients: list[Tensor | None] = []
        self._effects: Effects | None = None

    def begin_fit(self, balance: Balance | None) -> None:
        """Begin with a complete model."""
        self.balance = balance
        module = self._parallel.strategy.module
        self._effects = Effects(module, StepMetrics(module))
        if self._parallel.strategy.reproducible:
            check_norms(module)

    def check_data(self, loader: DataLoader[Any]) -> None:
        """See `Witness.check_data`."""
        self._parallel.strategy.witness.check_data(loader.dataset)

    def run(self, batch: GlobalBatch, *where: int) -> FinishedStep:
        strategy, member, effects = self._parallel.strategy, self._parallel.member, self._effects
        assert effects is not None
        options = (strategy.agreed, strategy.engine.activity, member.model.gradients)
        rows = StepRows(batch, self._parallel.holder.part, effects, *options, anew=batch.step == 0)
        batches = MicroBatches(strategy, batch, rows.add, effects, takes_index=bool(where))
        digest = self.divergence.shard_digest(strategy.engine, member.model.shard)
        repeat = self._parallel.holder.released(partial(rows.repeat, batches.repeat))
        witness = rows.witness = strategy.witness.of_step(strategy.engine.step, member.model.gradients, repeat)
        rest = (partial(rows.call, batches.run), rows.sums, self.balance, digest, witness)
        operation = ReplicaStep(rows.numbers, member.model, member.fabric, *rest)
        member.model.loaded = rows.renew
        self._commit(strategy.engine, operation)
        assert operation.sums is not None
        self.grad_norm = operation.grad_norm
        self._gradients = [parameter.grad for parameter in member.model.gradients.parameters]
        loss, calls, _ = operation.sums.finish()
        effects.norms.commit(len(batch.micro_batches))
        return FinishedStep(operation=operation, loss=loss, calls=calls, output=batches.output(loss))

    def backward(self, loss: Tensor) -> Tensor:
        """Give the parameters their gradients, which Lightning has reset, with the usual hooks."""
        strategy = self._parallel.strategy
        plugin, module = strategy.precision_plugin, strategy.module
        Precision.pre_backward(plugin, loss, module)
        spare = self._parallel.holder.is_spare
        for parameter, grad in zip(self._parallel.member.model.gradients.parameters, self._gradients, strict=True):
            parameter.grad = torch.zeros_like(parameter) if spare and parameter.requires_grad else grad
        model = self._parallel.member.model
        for updates in () if spare else model.updates.values():
            updates.hand()
        self._gradients = []
        return plugin.post_backward(loss, module)


def keep_spares(plugin: Precision, is_spare: Callable[[], bool], updates: Callable[[Any], None]) -> None:
    """Make a precision plugin take the gradients of a spare, which hooks have seen as zeros, from its optimizer.

    A spare keeps its state until it gets that of a member.

    Args:
        plugin: Lightning's.
        is_spare: whether this worker is one in the present step.
        updates: called with the optimizer when only its own update is left of its step.
    """
    after = plugin._after_closure

    def closed(model: Any, optimizer: Any) -> None:
        after(model, optimizer)
        if is_spare():
            for parameter in plugin.main_params(optimizer):
                parameter.grad = None
        updates(optimizer)

    plugin._after_closure = closed  # type: ignore[method-assign]


def clipped(trainer: pl.Trainer, norm: Callable[[], float], gradient: Tensor) -> Tensor:
    """Return a part of a gradient, clipped as the trainer's options state.

    Args:
        trainer: of the run.
        norm: returns the norm of the present gradients over the whole model.
        gradient: this worker's part.
    """
    most = trainer.gradient_clip_val
    if not most:
        return gradient
    if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        return gradient.clamp(-most, most)
    return gradient * clip_factor(norm(), float(most))


def clip_by_agreed_norm(plugin: Precision, norm: Callable[[], float], staged: Callable[[], bool]) -> None:
    """Make a precision plugin clip by a norm that the shards have agreed on before the commit, since no communication
    may follow it.

    Args:
        plugin: Lightning's.
        norm: returns the norm of the present gradients over the whole model.
        staged: whether the update has been computed already, from gradients that were `clipped`.
    """

    def clip(optimizer: Optimizer, clip_val: int | float) -> None:
        if staged():
            return
        clip_shards(plugin.main_params(optimizer), float(clip_val), norm())

    by_value = plugin.clip_grad_by_value

    def clip_value(optimizer: Optimizer, clip_val: int | float) -> None:
        held = any(parameter.grad is not None for parameter in plugin.main_params(optimizer))
        if held and not staged():  # torch refuses a spare's
            by_value(optimizer, clip_val)

    plugin.clip_grad_by_norm = clip  # type: ignore[method-assign]
    plugin.clip_grad_by_value = clip_value  # type: ignore[method-assign]


def sharded_evaluation(parallel: FsdpParallel, batch: PassBatch) -> ReplicaEvaluation:
    """Return the operation of a global batch of a pass, of which each worker runs its own batch of a row."""
    member, size, rows = parallel.member, parallel.size, _PassRows(parallel, batch)
    member.model.loaded = rows.renew
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
        part = parallel.holder.part
        self._rows = BatchRows(batch.batch, part.size, part.shard)
        self.numbers = self._rows.numbers
        self._strategy = parallel.strategy
        self._batch = batch
        self._counted: dict[int, list[int]] = {}
        self.renew()

    def renew(self) -> None:
        """Begin with the module's present buffers."""
        self._buffers = EvaluationBuffers(self._strategy.module)

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
