"""The order of a data set in an epoch, divided into global micro-batches independently of the computing ranks.

With torch's default samplers the samples of step ``s`` and their division into micro-batches are those of Lightning's
``ddp`` with the declared number of devices: the order is `DistributedSampler`'s permutation of (seed, epoch); per
accumulation round, device ``r`` of ``W`` takes every ``W``-th sample. Unlike there, no samples are repeated to fill the
last round: a micro-batch there may be smaller, and the last step of an epoch may have fewer.

Of several loaders that are read at once (`CombinedOrder`), micro-batches are numbered over the declared devices, round
after round, like the batches of each loader. Under Lightning's ``ddp`` device ``d`` gets in round ``r`` its ``r``-th
batch of each loader. So micro-batch ``n = r x W + d`` has batch ``n`` of each loader that still has one.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from unicron_lightning.data.seeding import seeded
from unicron_lightning.errors import ConfigError

MicroBatchId = tuple[int, int, int]
"""Epoch, step within the epoch, micro-batch within the step."""


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Composition of a step.

    Attributes:
        devices: micro-batches computed in parallel in the declared world (devices x nodes).
        accumulation: rounds of parallel micro-batches per optimizer step; with a schedule, the most of any epoch.
        schedule: pairs of an epoch and the rounds from that epoch on, by epoch, the first one 0; empty: the rounds are
            always the same.
    """

    devices: int
    accumulation: int
    schedule: tuple[tuple[int, int], ...] = ()

    @property
    def micro_batches(self) -> int:
        """M, the micro-batches of a full step: the most that any step of the task has."""
        return self.devices * self.accumulation

    def of(self, epoch: int) -> StepShape:
        """Composition of the steps of an epoch."""
        if not self.schedule:
            return self
        rounds = next(rounds for first, rounds in reversed(self.schedule) if first <= epoch)
        return StepShape(devices=self.devices, accumulation=rounds)

    def steps(self, batches: int) -> int:
        """Number of steps of so many batches for each device."""
        return -(-batches // self.accumulation)

    def divisor(self, places: Sequence[int]) -> float:
        """Number by which the loss of each micro-batch of a step is divided before its backward: M in a full step.

        A step at the end of the data may have fewer. Under Lightning's ddp, each round there is divided by the
        accumulation, and repeated samples complete the last one: the gradient is the mean over the step's micro-batches
        times rounds / accumulation.

        Args:
            places: numbers of the step's micro-batches in a full step, ``round x devices + device``; not empty.
        """
        rounds = len({place // self.devices for place in places})
        return len(places) * self.accumulation / rounds

    def batch_index(self, step: int, place: int) -> int:
        """Lightning's index of a device's batch in the epoch, for the micro-batch at a place of a step."""
        return step * self.accumulation + place // self.devices


class EpochOrder(ABC):
    """Division of epochs into steps, by their numbers of micro-batches.

    Attributes:
        shape: of the steps.
        varies: whether epochs may have different numbers of micro-batches.
    """

    shape: StepShape
    varies = False

    @abstractmethod
    def num_micro_batches(self, epoch: int) -> int:
        """Micro-batches of an epoch."""

    @abstractmethod
    def indices(self, epoch: int, step: int, micro_batch: int) -> list[Any]:
        """The data set indices of a micro-batch."""

    @property
    def devices(self) -> int:
        """Micro-batches of a round: one for each device of the declared world."""
        return self.shape.devices

    def place(self, epoch: int, number: int) -> MicroBatchId:
        """The place of a micro-batch that is counted from the start of the epoch."""
        return epoch, *divmod(number, self.shape.of(epoch).micro_batches)

    def num_steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch."""
        return math.ceil(self.num_micro_batches(epoch) / self.shape.of(epoch).micro_batches)


class DataOrder(EpochOrder):
    """Order and division of one data loader's samples.

    Args:
        loader: the user's, over a map-style data set.
        shape: of the steps; evaluation uses one round.
        seed: of the default shuffle and of user samplers.
        shuffle: whether to shuffle even if the loader requests no order, as Lightning does under ddp for training.

    Attributes:
        shape: of the steps.
        varies: whether epochs may have different numbers of micro-batches: a batch sampler of the user decides.

    Raises:
        ConfigError: the sampler has no length.
    """

    def __init__(self, loader: DataLoader[Any], shape: StepShape, seed: int, shuffle: bool = False) -> None:
        check_loader(loader)
        self._shuffle = shuffle
        self.shape = shape
        self._seed = seed
        self._epoch: int | None = None
        self._cut: Sequence[list[int]] = []
        batch_sampler = loader.batch_sampler
        self._own_batches = batch_sampler is not None and type(batch_sampler) is not BatchSampler
        self._batches = batch_sampler
        self._sampler: Any = loader.sampler if not self._own_batches else None
        self._batch_size = 1
        self._drop_last = False
        if isinstance(batch_sampler, BatchSampler) and not self._own_batches:
            self._sampler = batch_sampler.sampler
            self._batch_size = batch_sampler.batch_size
            self._drop_last = batch_sampler.drop_last
        if isinstance(self._sampler, DistributedSampler):
            self._sampler = _whole(self._sampler)
        self.varies = self._own_batches and not isinstance(batch_sampler, list | tuple)

    def num_micro_batches(self, epoch: int) -> int:
        """Micro-batches of an epoch."""
        if self._own_batches:
            return len(self._batches_of(epoch))
        size, per_round = len(self._sampler), self._batch_size * self.shape.devices
        if self._drop_last:
            return size // per_round * self.shape.devices
        full, rest = divmod(size, per_round)
        return full * self.shape.devices + min(rest, self.shape.devices)

    def indices(self, epoch: int, step: int, micro_batch: int) -> list[int]:
        """The data set indices of a micro-batch."""
        return self._batches_of(epoch)[step * self.shape.of(epoch).micro_batches + micro_batch]

    def _batches_of(self, epoch: int) -> Sequence[list[int]]:
        if epoch != self._epoch:
            self._cut = self._order_of(epoch)
            self._epoch = epoch
        return self._cut

    def _order_of(self, epoch: int) -> Sequence[list[int]]:
        if self._own_batches:
            assert self._batches is not None
            with self._fixed(self._batches, epoch):
                return [list(batch) for batch in self._batches]
        if self._is_permutation():
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(len(self._sampler), generator=generator)
        elif type(self._sampler) is SequentialSampler:
            order = torch.arange(len(self._sampler))
        elif isinstance(self._sampler, DistributedSampler):
            self._sampler.set_epoch(epoch)
            order = torch.tensor(list(self._sampler))
        else:
            with self._fixed(self._sampler, epoch):
                items = list(self._sampler)
            if not all(isinstance(item, int) for item in items):
                return _DividedOrder(items, self._batch_size, self.shape.devices, self.num_micro_batches(epoch))
            order = torch.tensor(items)
        return _DividedOrder(order, self._batch_size, self.shape.devices, self.num_micro_batches(epoch))

    def _is_permutation(self) -> bool:
        """Whether the order is `DistributedSampler`'s of (seed, epoch)."""
        sampler = self._sampler
        if isinstance(sampler, SequentialSampler):
            return self._shuffle
        return type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None

    def _fixed(self, sampler: Any, epoch: int) -> Any:
        """Set random state from (seed, epoch), so that a user's sampler yields the same order on all ranks."""
        for source in (sampler, getattr(sampler, "sampler", None)):
            if source is None:
                continue
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)
            if isinstance(getattr(source, "generator", None), torch.Generator):
                source.generator.manual_seed(self._seed + epoch)
        return seeded(self._seed, epoch, 0, 0)


class CombinedOrder(EpochOrder):
    """The order of the samples of several loaders, by `CombinedLoader`'s modes.

    Args:
        orders: of each loader, in rounds over the declared devices.
        mode: ``min_size`` ends with the shortest loader; ``max_size`` with the longest, the others have none by then;
            ``max_size_cycle`` with the longest, the others begin again.
        most: largest number of micro-batches that Lightning's limits allow.
        shape: of the steps.
    """

    def __init__(self, orders: Sequence[DataOrder], mode: str, most: float, shape: StepShape) -> None:
        self.shape = shape
        self._orders = orders
        self._mode = mode
        self._sizes = [order.num_micro_batches(0) for order in orders]
        ends = mode != "max_size" and 0 in self._sizes
        self._number = 0 if ends else int(min(most, number_of(mode, self._sizes)))

    def num_micro_batches(self, epoch: int) -> int:
        """Micro-batches of an epoch; all epochs have the same number.

        Raises:
            ConfigError: a loader has another number of batches than in the first epoch.
        """
        for loader, (order, first) in enumerate(zip(self._orders, self._sizes, strict=True)):
            if (found := order.num_micro_batches(epoch)) != first:
                raise ConfigError(
                    f"the batch sampler of loader {loader} yields {found} batches in epoch {epoch} and {first} in the "
                    "first one: of several loaders that are read at once, each has the same number in all epochs"
                )
        return self._number

    def indices(self, epoch: int, step: int, micro_batch: int) -> list[Any]:
        """Pairs of loader and data set index."""
        parts = range(len(self._orders))
        return [(part, index) for part in parts for index in self.part(part).indices(epoch, step, micro_batch)]

    def part(self, loader: int) -> PartOrder:
        """Return the order of one of the loaders."""
        return PartOrder(self._orders[loader], partial(self._batch, self._sizes[loader]))

    def _batch(self, size: int, epoch: int, step: int, micro_batch: int) -> int | None:
        number = step * self.shape.of(epoch).micro_batches + micro_batch
        return number % size if self._mode == "max_size_cycle" else number if number < size else None


class PartOrder:
    """Batches of one of several loaders at the places of the combined micro-batches.

    Args:
        order: of the loader.
        batch: returns the number of its batch at a place; None: it has ended.
    """

    def __init__(self, order: DataOrder, batch: Callable[..., int | None]) -> None:
        self._order = order
        self._batch = batch

    def has(self, place: MicroBatchId) -> bool:
        """Whether the loader has a batch in a micro-batch."""
        return self._batch(*place) is not None

    def indices(self, epoch: int, step: int, micro_batch: int) -> list[int]:
        """The data set indices; empty if the loader has no batch there."""
        batch = self._batch(epoch, step, micro_batch)
        return [] if batch is None else self._order.indices(*self._order.place(epoch, batch))


def number_of(mode: str, numbers: Sequence[float]) -> float:
    """Return the number of combined batches of loaders that have so many, by `CombinedLoader`'s modes."""
    return min(numbers) if mode == "min_size" else max(numbers)


class _DividedOrder(Sequence[list[int]]):
    """An order divided into micro-batches on demand: device ``r`` of a round takes every W-th sample of the round."""

    def __init__(self, order: Any, batch_size: int, devices: int, number: int) -> None:
        self._order, self._batch_size, self._devices, self._number = order, batch_size, devices, number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: Any) -> Any:
        round_, device = divmod(index, self._devices)
        start = round_ * self._devices * self._batch_size
        part = self._order[start : start + self._devices * self._batch_size][device :: self._devices]
        return part.tolist() if isinstance(part, torch.Tensor) else list(part)


def _whole(sampler: DistributedSampler[Any]) -> DistributedSampler[Any]:
    """The user's distributed sampler without its division, which is the strategy's task."""
    return DistributedSampler(
        sampler.dataset,
        num_replicas=1,
        rank=0,
        shuffle=sampler.shuffle,
        seed=sampler.seed,
        drop_last=sampler.drop_last,
    )


def is_stateful(loader: object) -> bool:
    """Whether a loader is torchdata's ``StatefulDataLoader``."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(loader, module.StatefulDataLoader)


def check_loader(loader: DataLoader[Any]) -> None:
    """Reject loaders whose micro-batches cannot be distributed exactly.

    Args:
        loader: the user's.

    Raises:
        ConfigError: the loader is not supported; the message states the reason and a remedy.
    """
    if type(loader).__iter__ is not DataLoader.__iter__ and not is_stateful(loader):
        raise ConfigError(
            f"{type(loader).__qualname__} is a DataLoader with an __iter__ of its own, which the unicron strategy "
            "would bypass: it fetches batches by number. Move its work into the data set or into collate_fn"
        )
    if isinstance(loader.dataset, IterableDataset):
        return  # read as a stream
    source: Sampler[Any] | Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    try:
        len(source)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        raise ConfigError(
            f"the sampler {type(source).__qualname__} has no length; the unicron strategy needs it: define __len__"
        ) from None
