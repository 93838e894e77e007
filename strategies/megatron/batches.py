"""Steps of a Megatron model, and their micro-batches: forward on this stage, and the loss on the last."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn
from torch.utils.data import DataLoader

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.seeding import place_seed, seed_all
from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.step import ReplicaStep
from unicron_lightning.strategies.megatron.checks import check_megatron_loader
from unicron_lightning.strategies.metrics.recording import LogCall
from unicron_lightning.strategies.metrics.sums import AllUsed, NormStatistics, StepSums
from unicron_lightning.strategies.micro_batch import FORWARD, TRANSFER
from unicron_lightning.strategies.parallelism import FinishedStep
from unicron_lightning.strategies.state.comparison import Divergence
from unicron_lightning.strategies.state.module_buffers import ModuleBuffers
from unicron_lightning.worker.rows import present

if TYPE_CHECKING:
    from unicron_lightning.strategies.megatron.parallel import MegatronParallel


class StageSteps:
    """Steps of a Megatron model; implements `StepRunner`.

    Args:
        grid: the parallelism that they belong to.
        divergence: compares the parameters of the replicas.

    Attributes:
        divergence: as above.
        grad_norm: norm of the last finished step's gradients, before clipping.
    """

    def __init__(self, grid: MegatronParallel, divergence: Divergence) -> None:
        self.grad_norm = 0.0
        self._grid = grid
        self.divergence = divergence
        self._size: int | None = None
        """Of the micro-batches, once a loader is known."""

    def check_data(self, loader: DataLoader[Any]) -> None:
        replicas = self._grid.strategy.shape.devices
        self._size = self._grid.member.model.micro_batch_size = check_megatron_loader(loader, replicas, self._size)

    def run(self, batch: GlobalBatch, *where: int) -> FinishedStep:
        strategy, member = self._grid.strategy, self._grid.member
        batches = StageBatches(self._grid, batch, where[0] if where else 0)
        digest = self.divergence.shard_digest(strategy.engine, lambda: dict(member.model.module.named_parameters()))
        model, fabric = member.model, member.fabric
        operation = ReplicaStep(batches.places.all, model, fabric, batches.call, batches.sums, digest=digest)
        strategy.engine.run(operation)
        self.divergence.check(operation, strategy.engine)
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
        places: of the micro-batches.
    """

    def __init__(self, grid: MegatronParallel, batch: GlobalBatch, step_in_epoch: int) -> None:
        self._grid = grid
        self._strategy = grid.strategy
        self._batch = batch
        self._index = step_in_epoch
        self._done: dict[int, tuple[Tensor, list[LogCall]]] = {}
        self.places = StagePlaces(batch)

    def call(self, micro_batches: Sequence[int], *, last: bool) -> None:
        """Run those at some places together with the partners; see `replica.step.Call`."""
        numbers = self.places.numbers(micro_batches)
        if numbers:
            divisor = self._strategy.shape.divisor(self._batch.in_full_step)
            self._grid.member.model.call(self.forward, numbers, divisor=divisor, last=last)
        for number in numbers:
            self._batch.finished(number)

    def forward(self, micro_batch: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Run a forward step; see `megatron.model.ForwardStep`."""
        module, results = self._strategy.module, self._strategy.results
        place = (FORWARD, self._batch.epoch, self._batch.step, micro_batch)
        activity = self._strategy.engine.activity
        activity.enter("data", micro_batch)
        samples = self._batch.fetch(micro_batch)
        activity.enter("compute", micro_batch)  # up to the next micro-batch's, with the schedule's backwards and waits
        data = stage_batch(self._grid, samples, place)
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

    def sums(self, places: Sequence[int]) -> StepSums:
        """Return the step's other sums, which one worker of each replica contributes."""
        norms, no_buffers = NormStatistics(self._strategy.module), ModuleBuffers(nn.Module())
        sums = StepSums(self._strategy.agreed, norms, no_buffers, AllUsed())
        if self._grid.tells:
            for micro_batch in self.places.numbers(places):
                sums.add(*self._done[micro_batch])
        return sums


class StagePlaces:
    """The micro-batches of a global batch by their places: their numbers in a full one.

    The replicas share places, so that each reads the stream of its device, also where others have ended.

    Args:
        batch: the global batch.

    Attributes:
        all: the places up to the last micro-batch, missing ones included.
    """

    def __init__(self, batch: GlobalBatch) -> None:
        self.all = range(batch.in_full_step[-1] + 1)
        self._batch = batch

    def numbers(self, places: Sequence[int]) -> list[int]:
        """Return the numbers of the micro-batches that there are at some places."""
        return [self._batch.micro_batches[each] for each in present(places, self._batch.in_full_step)]


def stage_batch(grid: MegatronParallel, samples: Any, place: tuple[int, ...], loader: int = 0) -> Any:
    """Return a micro-batch on this worker's device, and set the random state for computing it.

    Hooks of the transfer have another random state, which is the same on all workers of the replica.

    Args:
        grid: provides device, seed and place.
        samples: of the micro-batch.
        place: inputs of the random state.
        loader: Lightning's index of the data loader.
    """
    strategy = grid.strategy
    seed_all(place_seed(strategy.seed, TRANSFER, *place))
    data = strategy.to_device(samples, loader)
    seed_micro_batch(strategy.seed, place, *grid.coordinate, strategy.root_device)
    return data


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
        stage: its pipeline stage.
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
