"""Loaders of evaluation data for Lightning's loops: this rank's batches, or global batches of workers that hold the
model together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from unicron_lightning.data.fetch import Fetcher, Place
from unicron_lightning.data.loader import GlobalBatch, InPlace, Items
from unicron_lightning.data.order import DataOrder, StepShape


class EvaluationLoader(InPlace):
    """Yields this rank's batches of an evaluation pass; a lost rank's batches are run at the pass's end.

    Args:
        loader: the user's.
        order: of its samples, divided as with ddp: a round has a batch for each device of the declared world, and
            ``len`` is the number of rounds.
        seed: of augmentation.
        begin: called with this loader when iteration starts; returns the batches to run.
        start: called with each batch's number before it is yielded.
    """

    _fetcher: Fetcher

    def __init__(
        self,
        loader: DataLoader[Any],
        order: DataOrder,
        seed: int,
        begin: Callable[[Any], list[int]],
        start: Callable[[int], None],
    ) -> None:
        super().__init__(loader)
        self.num_batches = 0
        self.epoch = 0
        self.devices = order.devices
        self._order = order
        self._begin = begin
        self._start = start
        self._planned: list[int] = []
        self._fetcher = Fetcher(loader, order, seed, self._ahead)

    def __len__(self) -> int:
        self.taken()
        return self._order.num_steps()

    def limit(self, per_device: int) -> None:
        """Set the pass's batches from Lightning's limit for each device of the declared world."""
        self.num_batches = min(self._order.num_micro_batches, per_device * self.devices)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for shuffled evaluation data."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.taken()
        return Items(self._pass())

    def _pass(self) -> Iterator[Any]:
        self._fetcher.end_epoch()
        self._planned = self._begin(self)
        for number in self._planned:
            batch = self.fetch(number)
            self._start(number)
            yield batch

    def fetch(self, number: int) -> Any:
        """One batch by number."""
        return self._fetcher.get(self._order.place(self.epoch, number))

    def indices(self, number: int) -> list[Any]:
        """The data set indices of a batch."""
        return self._order.indices(*self._order.place(self.epoch, number))

    def end(self) -> None:
        """End the pass."""
        self._fetcher.end_epoch()

    def _ahead(self, start: Place) -> Iterator[Place]:
        places = (self._order.place(self.epoch, number) for number in self._planned)
        return (place for place in places if place >= start)


class PassLoader(InPlace):
    """Yields an evaluation pass in global batches, for workers that hold the model together.

    Args:
        loader: the user's.
        shape: of training steps; a global batch here has as many of the loader's batches, the last one fewer.
        seed: of augmentation.
        most: largest number of batches for each of the shape's devices; None: all.
        limit: returns a further limit of this kind when a pass begins; `math.inf` for none.
        epoch: returns the present epoch, for shuffled data.
        share: returns this worker's batches of a global batch in the present world, in order.
    """

    _fetcher: Fetcher

    def __init__(
        self,
        loader: DataLoader[Any],
        shape: StepShape,
        seed: int,
        most: int | None,
        limit: Callable[[], float],
        epoch: Callable[[], int],
        share: Callable[[range], list[int]],
    ) -> None:
        super().__init__(loader)
        self._shape = shape
        self._order = order = DataOrder(loader, StepShape(devices=shape.devices, accumulation=1), seed)
        self._whole = order.num_micro_batches
        if most is not None:
            self._whole = min(self._whole, most * shape.devices)
        self._num_batches = self._whole
        self._limit = limit
        self._epoch = epoch
        self._share = share
        self._fetcher = Fetcher(loader, self._order, seed, self._ahead)

    def __len__(self) -> int:
        return math.ceil(self._whole / self._shape.micro_batches)

    def __iter__(self) -> Iterator[GlobalBatch]:
        self._fetcher.end_epoch()
        epoch = self._epoch()
        self._num_batches = int(min(self._whole, self._limit() * self._shape.devices))
        for place, numbers in enumerate(self._parts()):
            yield GlobalBatch(
                epoch,
                place,
                numbers,
                lambda number: self._fetcher.get(self._order.place(epoch, number)),
                lambda number: len(self._order.indices(*self._order.place(epoch, number))),
            )

    def end(self) -> None:
        """End the pass."""
        self._fetcher.end_epoch()

    def _parts(self) -> Iterator[range]:
        size = self._shape.micro_batches
        for first in range(0, self._num_batches, size):
            yield range(first, min(first + size, self._num_batches))

    def _ahead(self, start: Place) -> Iterator[Place]:
        numbers = (number for part in self._parts() for number in self._share(part))
        places = (self._order.place(start[0], number) for number in numbers)
        return (place for place in places if place >= start)
