"""Steps and validation of a Megatron model: forward on this stage, and the loss on the last.

In validations, global batches of the pass are run by all replicas together. One worker of each replica contributes the
values that its batches log.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from unicron_lightning.data.loader import BatchRows, GlobalBatch
from unicron_lightning.data.seeding import RandomPurpose, place_seed, seed_all
from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.step import ReplicaEvaluation, ReplicaStep
from unicron_lightning.strategies.megatron.checks import check_megatron_loader
from unicron_lightning.strategies.parallelism import FinishedStep, StepRunner
from unicron_lightning.strategies.passes.evaluation import PassBatch
from unicron_lightning.worker.comparison import Divergence
from unicron_lightning.worker.module_buffers import ModuleBuffers
from unicron_lightning.worker.sums import AllUsed, LogCall, NormStatistics, StepSums
from unicron_lightning.worker.witness import WitnessedStep

if TYPE_CHECKING:
    from unicron_lightning.strategies.megatron.parallel import MegatronParallel


class StageSteps(StepRunner):
    """Steps of a Megatron model.

    Args:
        grid: the parallelism that they belong to.
        divergence: compares the parameters of the replicas.
    """

    def __init__(self, grid: MegatronParallel, divergence: Divergence) -> None:
        super().__init__(divergence)
        self._grid = grid
        self._size: int | None = None
        """Of the micro-batches, once a loader is known."""

    def begin_fit(self) -> None:
        """Forget the size of micro-batches in an earlier fit."""
        self._size = None

    @override
    def check_data(self, loader: DataLoader[Any]) -> None:
        replicas = self._grid.strategy.shape.devices
        self._grid.strategy.witness.check_data(loader.dataset)
        self._size = self._grid.member.model.micro_batch_size = check_megatron_loader(loader, replicas, self._size)

    def run(self, batch: GlobalBatch, *where: int) -> FinishedStep:
        strategy, member = self._grid.strategy, self._grid.member
        batches = StageBatches(self._grid, batch, where[0] if where else 0)
        digest = self.divergence.shard_digest(strategy.engine, lambda: dict(member.model.module.named_parameters()))
        model, fabric = member.model, member.fabric
        repeat = fabric.released(batches.repeat, model.device)
        witness = batches.witness = strategy.witness.of_step(strategy.engine.step, model.gradients, repeat)
        rest = (batches.call, batches.sums, None, digest, witness)
        operation = ReplicaStep(batches.rows.numbers, model, fabric, *rest)
        self._commit(strategy.engine, operation)
        assert operation.sums is not None
        self.grad_norm = operation.grad_norm
        loss, calls, _ = operation.sums.finish()
        output = torch.tensor(loss, device=strategy.root_device)
        return FinishedStep(operation=operation, loss=loss, calls=calls, output=output)

    def backward(self, loss: Tensor) -> Tensor:
        """Return the loss: Megatron's schedule has run the backward."""
        return loss


class StageBatches:
    """Runs the micro-batches of one step on this worker's stage.

    Args:
        grid: provides module, seed and place.
        batch: locates the samples.
        step_in_epoch: Lightning's batch index.

    Attributes:
        rows: of the micro-batches, one for each lane of a replica.
        witness: of the step, if it has one.
    """

    witness: WitnessedStep | None = None

    def __init__(self, grid: MegatronParallel, batch: GlobalBatch, step_in_epoch: int) -> None:
        self._grid = grid
        self._strategy = grid.strategy
        self._batch = batch
        self._index = step_in_epoch
        self._done: dict[int, tuple[Tensor, list[LogCall]]] = {}
        self._loaded = LoadedBatches(grid)
        self.rows = BatchRows(batch, grid.shape.width, grid.lane)

    def call(self, micro_batches: Sequence[int], *, last: bool) -> None:
        """Run some rows together with the partners; see `replica.step.Call`."""
        rows = [row for row in micro_batches if not self.rows.is_empty(row)]
        parts = self._parts(rows)
        for number, part in enumerate(parts, 1):
            if self.witness is not None and part == [self.witness.own]:
                self.witness.observe(lambda row: self._run([row], last=False), part[0])
            else:
                self._run(part, last=last and number == len(parts))
        if rows and self._grid.shape.context > 1 and self._grid.is_last:
            self._average(self.rows.counted(rows))
        for number in self.rows.counted(rows):
            self._batch.finished(number)

    def repeat(self, row: int) -> None:
        """Repeat a row of another replica together with the partners; all but the gradients is dropped."""
        held = dict(self._done)
        try:
            for part in self._parts([row] if not self.rows.is_empty(row) else []):
                self._run(part, last=False)
        finally:
            self._done = held

    def _run(self, rows: Sequence[int], *, last: bool) -> None:
        """Run rows in one call of Megatron's schedule."""
        divisor = self._strategy.shape.divisor(self._batch.in_full_step)
        idle = [row for row in rows if not self.rows.own(row)[1]]
        with self._loaded.calling(rows):
            self._grid.member.model.call(self.forward, rows, divisor=divisor, last=last, idle=idle)

    def _average(self, numbers: Sequence[int]) -> None:
        """Average losses and logged values of some micro-batches over the parts of each sequence."""
        done = [self._done[number] for number in numbers]
        means = iter(
            average_parts(
                self._grid, [value for loss, calls in done for value in (loss, *(each.value for each in calls))]
            )
        )
        for number, (_, calls) in zip(numbers, done, strict=True):
            loss = next(means)
            assert loss is not None
            self._done[number] = loss, [replace(each, value=next(means)) for each in calls]

    def _parts(self, rows: Sequence[int]) -> list[list[int]]:
        """Divide rows into calls of Megatron's schedule.

        An earlier stage has begun later micro-batches before it scales the routers' losses of one. Therefore a row in
        which some lane's micro-batch does not count is not in the pipeline together with others. A row that another
        replica repeats is alone, too, since its gradients are compared. Rows that are fewer than the interleaved
        schedule takes are repeated, and those with experts equally often.
        """
        shape, own = self._grid.shape, None if self.witness is None else self.witness.own
        alone = {row for row in rows if row == own or (shape.pipeline > 1 and not self.rows.is_complete(row))}
        runs = [list(run) for _, run in groupby(rows, key=lambda row: row if row in alone else None)]
        few = shape.pipeline if shape.virtual > 1 and self._grid.member.model.experts else 1
        return [part for run in runs for part in ([run] if len(run) >= few else [[row] for row in run])]

    def forward(self, row: int, virtual: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Run a forward step; see `megatron.model.ForwardStep`."""
        micro_batch, counts = self.rows.own(row)
        module, results = self._strategy.module, self._strategy.results
        place = (RandomPurpose.FORWARD, self._batch.epoch, self._batch.step, micro_batch)
        activity = self._strategy.engine.activity

        def load() -> Any:
            activity.enter("data", micro_batch)
            samples = (self._batch.fetch if counts else self._batch.stand_in)(micro_batch)
            activity.enter("compute", micro_batch)  # up to the next one's, with the schedule's backwards and waits
            return transfer_batch(self._grid, samples, place)

        data = self._loaded.get(row, virtual, load)
        self._grid.begin_stage(place, virtual)
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
            if counts:
                self._done[micro_batch] = value.detach().clone(), [*calls, *more]
            return value

        return output, loss

    def sums(self, rows: Sequence[int]) -> StepSums:
        """Return the step's other sums, which one worker of each replica contributes."""
        norms, no_buffers = NormStatistics(self._strategy.module), ModuleBuffers(nn.Module())
        sums = StepSums(self._strategy.agreed, norms, no_buffers, AllUsed())
        if self._grid.tells:
            for micro_batch in self.rows.counted(rows):
                sums.add(*self._done[micro_batch])
        return sums


class LoadedBatches:
    """The micro-batches of a call of the schedule on this worker's device, each loaded once for all virtual stages.

    Args:
        grid: provides the number of virtual stages.
    """

    def __init__(self, grid: MegatronParallel) -> None:
        self._virtual = grid.shape.virtual
        self._held: dict[int, Any] = {}
        self._last = -1

    @contextmanager
    def calling(self, rows: Sequence[int]) -> Iterator[None]:
        """Surround a call with some rows; nothing is held after it."""
        self._last = rows[-1]
        try:
            yield
        finally:
            self._held = {}

    def get(self, row: int, virtual: int, load: Callable[[], Any]) -> Any:
        """Return a row's batch, for one of the virtual stages; the last stage is its last user.

        A call that has fewer rows than pipeline stages repeats its last one.
        """
        if self._virtual == 1:
            return load()
        if row not in self._held:
            self._held[row] = load()
        ends = virtual == self._virtual - 1 and row != self._last
        return self._held.pop(row) if ends else self._held[row]


def transfer_batch(grid: MegatronParallel, samples: Any, place: tuple[int, ...], loader: int = 0) -> Any:
    """Return a micro-batch on this worker's device.

    Hooks of the transfer have a random state of their own, which is the same on all workers of the replica.

    Args:
        grid: provides device, seed and place.
        samples: of the micro-batch.
        place: inputs of the random state.
        loader: Lightning's index of the data loader.
    """
    strategy = grid.strategy
    seed_all(place_seed(strategy.seed, RandomPurpose.TRANSFER, *place))
    return strategy.to_device(samples, loader)


def average_parts(grid: MegatronParallel, values: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Average losses and logged values over the parts of each sequence: a collective of their workers.

    Raises:
        ConfigError: a torchmetrics object was logged, whose value is None: it has this worker's part alone.
        RuntimeError: the collective has failed.
    """
    if not values:
        return []
    numbers = [value.to(grid.member.model.device, torch.float64) for value in values if value is not None]
    if len(numbers) < len(values):
        raise ConfigError(
            f"self.log of a torchmetrics object with context_parallel_size={grid.shape.context}: it would see this "
            "worker's part of each sequence alone; log numbers, which are averaged over the parts"
        )
    means = torch.stack(numbers)
    dist.all_reduce(means, group=parallel_state.get_context_parallel_group())
    return [*(means / grid.shape.context)]


_SHARED: Final = "data-parallel-rng"
"""Megatron's name of the state that is the same on all tensor-parallel workers."""


def seed_micro_batch(seed: int, place: tuple[int, ...], tensor: int, stage: int, device: torch.device) -> None:
    """Set all random state, as a function of the micro-batch.

    Megatron keeps named states for regions that must differ or agree among tensor-parallel workers. Each of them, and
    the default one, is set before a micro-batch's forward; backward draws nothing, and recomputation restores the
    forward's.

    Args:
        seed: of the task.
        place: epoch, step and micro-batch.
        tensor: this worker's tensor-parallel rank.
        stage: number of its pipeline stage, among all virtual ones.
        device: of the model.
    """
    seed_all(place_seed(seed, *place, stage))
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    states = tracker.get_states()
    if not states:
        return
    generator = torch.Generator(device=device)
    for name in states:
        own = 0 if name == _SHARED else 1 + tensor
        generator.manual_seed(place_seed(seed, *place, stage, own, zlib.crc32(name.encode())))
        states[name] = generator.get_state()
    tracker.set_states(states)


def stage_evaluation(grid: MegatronParallel, batch: PassBatch) -> ReplicaEvaluation:
    """Return the operation of a global batch of a validation."""
    part, fabric, device = StagePass(grid, batch), grid.member.fabric, grid.member.model.device
    width = grid.shape.width
    batches = range(len(part.rows.numbers) * width)
    return ReplicaEvaluation(
        batches, part.size, fabric, device, part.evaluate, part.results, tells=grid.tells, width=width
    )


class StagePass:
    """Runs the batches of one global batch of a pass on this worker's stage.

    Args:
        grid: provides module and place.
        batch: the global batch.

    Attributes:
        rows: of its batches.
    """

    def __init__(self, grid: MegatronParallel, batch: PassBatch) -> None:
        self._grid = grid
        self._batch = batch
        self._loaded = LoadedBatches(grid)
        self.rows = BatchRows(batch.batch, grid.shape.width, grid.lane)

    def size(self, row: int) -> int:
        """Return the number of samples in a row; batches can be missing only among those of one size."""
        batch = self._batch.batch
        return batch.count(self.rows.own(row)[0])

    def evaluate(self, rows: Sequence[int], size: int) -> None:
        """Run the batches of some rows forward, together with the partners."""
        batch = self._batch.batch
        rows = [row for row in rows if not self.rows.is_empty(row)]
        if rows:
            with self._loaded.calling(rows):
                self._grid.member.model.evaluate(self._evaluate_stage, rows, size)
            if self._grid.shape.context > 1 and self._grid.is_last:
                self._average(self.rows.counted(rows))
        for number in self.rows.counted(rows):
            batch.finished(number)

    def _average(self, numbers: Sequence[int]) -> None:
        """Average the logged values of some batches over the parts of each sequence."""
        logged = self._batch.calls
        means = iter(average_parts(self._grid, [call.value for number in numbers for call in logged[number]]))
        for number in numbers:
            logged[number] = [replace(call, value=next(means)) for call in logged[number]]

    def results(self, rows: Collection[int]) -> bytes:
        """Encode the values logged by the batches of some rows."""
        return self._batch.results(self.rows.counted(sorted(rows)))

    def _evaluate_stage(self, row: int, virtual: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Run a forward step; see `megatron.model.ForwardStep`."""
        number, counts = self.rows.own(row)
        batch, strategy = self._batch, self._grid.strategy
        module, engine = strategy.module, strategy.engine
        engine.activity.enter("validation", number)
        engine.fault("validation", engine.step)

        def load() -> Any:
            samples = (batch.batch.fetch if counts else batch.batch.stand_in)(number)
            return transfer_batch(self._grid, samples, batch.place(number), batch.loader)

        data = self._loaded.get(row, virtual, load)
        self._grid.begin_stage(batch.place(number), virtual)
        with batch.recording(data) as calls:
            output = batch.run(data)
        losses = f"{batch.method.removesuffix('_step')}_loss"
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"{batch.method} returned {output!r}; under unicron_megatron it returns the output of the stage for "
                f"one batch, a tensor, and {losses}(output, batch) logs values computed from it on the last stage"
            )
        if counts:
            batch.calls[number] = calls
        judge: Any = getattr(module, losses, None)

        def loss(result: Tensor) -> Tensor:
            if judge is not None:
                with batch.recording(data) as more:
                    judge(result, data)
                if counts:
                    batch.calls[number] = [*calls, *more]
            return torch.zeros((), device=result.device)  # the schedule needs a tensor, and writes into it

        return output, loss
