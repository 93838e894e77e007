"""Loaders of evaluation data for Lightning's loops: this rank's batches, or global batches of workers that hold the
model together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

from torch.utils.data import DataLoader

from unicron_lightning.data.combination import CombinedOrder
from unicron_lightning.data.fetch import Fetcher, Place
from unicron_lightning.data.loader import Closes, Fetches, GlobalBatch, InPlace, Items
from unicron_lightning.data.order import DataOrder, StepShape
from unicron_lightning.data.sources import name_of
from unicron_lightning.worker.report_sum import ReportSum
from unicron_lightning.worker.rows import plan_rows

ENDS: Final = 1 << 39
"""Numbers from here on report ends of streams, those below report batches."""


class PassBatches(Closes, Protocol):
    """The batches of an evaluation pass, by number: in each round, one for each device of the declared world."""

    def rounds(self) -> int | None:
        """Return the number of rounds; None if it is known only at the end."""

    def begin(self, epoch: int, most: float) -> None:
        """Begin a pass.

        Args:
            epoch: for shuffled data and random state.
            most: largest number of rounds; `math.inf` for no limit.
        """

    def todo(self, reports: ReportSum, rank: int, finished: set[int]) -> Iterable[int]:
        """Return this rank's share of the batches that no member has run, without those that it has run since.

        Args:
            reports: of all members.
            rank: of this worker.
            finished: numbers that this worker is to report; ends of streams are added.
        """

    def get(self, number: int) -> Any:
        """Return a batch of the newest `todo`."""

    def indices(self, number: int) -> list[Any] | None:
        """Return the data set indices of a batch; None if there are none."""

    def end(self) -> None:
        """End the pass."""


class IndexedBatches:
    """The batches of data with an index.

    Args:
        order: of the samples, divided as with ddp.
        fetcher: given what yields the places that this rank expects to need from one on, makes what fetches batches.

    Attributes:
        number: of batches in the present pass.
    """

    def __init__(
        self, order: DataOrder | CombinedOrder, fetcher: Callable[[Callable[[Place], Iterator[Place]]], Fetches]
    ) -> None:
        self.number = 0
        self._order = order
        self._epoch = 0
        self._planned: list[int] = []
        self._fetcher = fetcher(self._ahead)

    def rounds(self) -> int:
        return self._order.num_steps(self._epoch)

    def begin(self, epoch: int, most: float) -> None:
        self._epoch = epoch
        self.number = int(min(self._order.num_micro_batches(epoch), most * self._order.devices))

    def todo(self, reports: ReportSum, rank: int, finished: set[int]) -> list[int]:
        planned = plan_rows(range(self.number), reports.finished, rank, reports.world).rows
        self.expect([number for number in planned if number not in finished])
        return self._planned

    def expect(self, numbers: list[int]) -> None:
        """Request the samples of these batches ahead, instead of any requested before."""
        self._fetcher.end_epoch()
        self._planned = numbers

    def get(self, number: int) -> Any:
        return self._fetcher.get(self._order.place(self._epoch, number))

    def indices(self, number: int) -> list[Any]:
        return self._order.indices(*self._order.place(self._epoch, number))

    def end(self) -> None:
        self._fetcher.end_epoch()

    def close(self) -> None:
        self._fetcher.close()

    def _ahead(self, start: Place) -> Iterator[Place]:
        places = (self._order.place(self._epoch, number) for number in self._planned)
        return (place for place in places if place >= start)


class EvaluationLoader(InPlace):
    """Yields this rank's batches of an evaluation pass; a lost rank's batches are run at the pass's end.

    Args:
        loader: the user's.
        batches: its batches; the number of their rounds is the length.
        devices: of the declared world.
        begin: called with this loader when iteration starts; returns the batches to run.
        start: called with each batch's number before it is yielded.

    Attributes:
        batches, devices: as above.
        finished: numbers that this rank reports of the pass; for streams, with their ends.
        iterates: called when an iteration begins.
        unbounded: whether the length of streams is a number that is never reached, instead of none, so that Lightning
            reads no batch ahead.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: PassBatches,
        devices: int,
        begin: Callable[[Any], Iterable[int]],
        start: Callable[[int], None],
    ) -> None:
        super().__init__(loader)
        self.batches = self._fetcher = batches
        self.devices = devices
        self.finished: set[int] = set()
        self.iterates: Callable[[], None] = lambda: None
        self.unbounded = False
        self._begin = begin
        self._start = start

    def __len__(self) -> int:
        self.taken()
        rounds = self.batches.rounds()
        if rounds is not None:
            return rounds
        if not self.unbounded:
            raise TypeError(f"{name_of(self._loader)} is a stream, which has no length")
        return ENDS

    def begin(self, epoch: int, most: float) -> None:
        """Begin a pass.

        Args:
            epoch: for shuffled data and random state.
            most: Lightning's limit for each device of the declared world.
        """
        self.finished = set()
        self.batches.begin(epoch, most)

    def todo(self, reports: ReportSum, rank: int) -> Iterable[int]:
        """Return this rank's share of the batches that are missing in the members' reports."""
        return self.batches.todo(reports, rank, self.finished)

    def __iter__(self) -> Iterator[Any]:
        self.taken()
        self.iterates()
        return Items(self._pass())

    def _pass(self) -> Iterator[Any]:
        self.end()
        for number in self._begin(self):
            batch = self.fetch(number)
            self._start(number)
            yield batch

    def fetch(self, number: int) -> Any:
        """One batch by number."""
        return self.batches.get(number)

    def end(self) -> None:
        """End the pass."""
        self.batches.end()


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

    Attributes:
        iterates: as of `EvaluationLoader`.
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
        self.iterates: Callable[[], None] = lambda: None
        self._shape = shape
        self._order = DataOrder(loader, StepShape(devices=shape.devices, accumulation=1), seed)
        self._most = math.inf if most is None else most * shape.devices
        self._num_batches = 0
        self._limit = limit
        self._epoch = epoch
        self._share = share
        self._fetcher = Fetcher(loader, self._order, seed, self._ahead)

    def __len__(self) -> int:
        return math.ceil(self._whole(self._epoch()) / self._shape.micro_batches)

    def __iter__(self) -> Iterator[GlobalBatch]:
        self.iterates()
        return Items(self._pass())

    def _pass(self) -> Iterator[GlobalBatch]:
        self._fetcher.end_epoch()
        epoch = self._epoch()
        self._num_batches = int(min(self._whole(epoch), self._limit() * self._shape.devices))
        for place, numbers in enumerate(self._parts()):
            yield GlobalBatch(
                epoch,
                place,
                numbers,
                lambda number: self._fetcher.get(self._order.place(epoch, number)),
                lambda number: len(self._order.indices(*self._order.place(epoch, number))),
                in_full_step=range(len(numbers)),
            )

    def end(self) -> None:
        """End the pass."""
        self._fetcher.end_epoch()

    def _whole(self, epoch: int) -> int:
        """Number of batches of a pass by the data and the limit."""
        return int(min(self._order.num_micro_batches(epoch), self._most))

    def _parts(self) -> Iterator[range]:
        size = self._shape.micro_batches
        for first in range(0, self._num_batches, size):
            yield range(first, min(first + size, self._num_batches))

    def _ahead(self, start: Place) -> Iterator[Place]:
        numbers = (number for part in self._parts() for number in self._share(part))
        places = (self._order.place(start[0], number) for number in numbers)
        return (place for place in places if place >= start)
