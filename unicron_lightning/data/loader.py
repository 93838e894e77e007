"""Loaders for Lightning's loops: one item per optimizer step in training, this rank's batches in evaluation.

Positions are read from Lightning's own progress counters, the single source of truth: restoring the counters (from a
checkpoint or a peer's state) restores the data position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from unicron_lightning.copying import OfProcess
from unicron_lightning.data.fetch import Fetcher, Place
from unicron_lightning.data.order import DataOrder, StepShape
from unicron_lightning.data.seeding import preserved


class GlobalBatch:
    """One optimizer step's data for Lightning's loop: the places of the samples instead of the samples.

    For hooks such as ``on_train_batch_end`` it behaves like a batch of this rank's samples: accesses beyond its own
    attributes (an item, its length, ``.shape``) are forwarded to ``own()``, which fetches samples only then. It is no
    dataclass, because Lightning's precision plug-ins look for tensors in dataclasses, and refuse frozen ones.

    Attributes:
        epoch, step: place; ``step`` counts within the epoch.
        micro_batches: numbers of its micro-batches.
        fetch: returns the collated samples of a micro-batch, by number, on the CPU.
        count: returns the number of data set items in a micro-batch, by number.
        finished: called with the number of a micro-batch that this worker has computed.
    """

    __slots__ = ("_own", "_share", "count", "epoch", "fetch", "finished", "micro_batches", "step")

    def __init__(
        self,
        epoch: int,
        step: int,
        micro_batches: range,
        fetch: Callable[[int], Any],
        count: Callable[[int], int],
        share: Callable[[range], list[int]] = lambda numbers: list(numbers[:1]),
        finished: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.epoch = epoch
        self.step = step
        self.micro_batches = micro_batches
        self.fetch = fetch
        self.count = count
        self.finished = finished
        self._share = share
        self._own: Any = None

    def own(self) -> Any:
        """This rank's micro-batches as one batch, on the CPU; the first of the step if the rank has none."""
        if self._own is None:
            numbers = self._share(self.micro_batches) or list(self.micro_batches[:1])
            with preserved():
                self._own = joined([self.fetch(number) for number in numbers])
        return self._own

    def __getitem__(self, key: Any) -> Any:
        return self.own()[key]

    def __len__(self) -> int:
        return len(self.own())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.own())

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # special names that Python and its copiers look for do not exist in a batch
            raise AttributeError(name)
        return getattr(self.own(), name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """A copy is a batch of this rank's samples."""
        return _same, (self.own(),)

    def num_samples(self) -> int:
        """Number of data set items in the whole step, over all ranks."""
        return sum(self.count(micro_batch) for micro_batch in self.micro_batches)


def joined(batches: Sequence[Any]) -> Any:
    """Join batches: concatenate tensors, join mappings and sequences item by item, and list other values.

    Tensors that differ in more than their first dimension stay in a list.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        if first.dim() and len({tuple(each.shape[1:]) for each in batches}) == 1:
            return torch.cat(list(batches))
        return list(batches)
    if isinstance(first, Mapping):
        return {key: joined([each[key] for each in batches]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(joined(parts) for parts in zip(*batches, strict=True)))
    if isinstance(first, list | tuple) and len({len(each) for each in batches}) == 1:
        return type(first)(joined(parts) for parts in zip(*batches, strict=True))
    return list(batches)


class Closes(Protocol):
    """Reads batches, possibly with worker processes."""

    def close(self) -> None:
        """Stop the worker processes."""


class InPlace:
    """A loader that replaces the user's in Lightning's loops.

    Args:
        loader: the user's.

    Attributes:
        ordinary: the loader that scripts see instead.
        taken: called when a loop has taken this loader (Lightning asks for its length), and when an iteration begins.
    """

    _fetcher: Closes

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.taken: Callable[[], None] = lambda: None
        self.ordinary = loader

    @property
    def ordinary(self) -> DataLoader[Any]:
        return self._ordinary

    @ordinary.setter
    def ordinary(self, loader: DataLoader[Any]) -> None:
        self._ordinary = loader
        self.dataset = loader.dataset
        self.sampler = loader.sampler  # Lightning sets its epoch
        self.batch_sampler = loader.batch_sampler
        self.num_workers = loader.num_workers

    def __getattr__(self, name: str) -> Any:
        """Forward other attributes, such as ``batch_size`` and ``collate_fn``, to the user's loader.

        Its state does not count: positions are those of Lightning's counters.
        """
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """A copy of a trainer has the ordinary loader, as this one belongs to a run."""
        return _same, (self.ordinary,)

    def close(self) -> None:
        """Stop the loader's worker processes."""
        self._fetcher.close()


class _Items(OfProcess, Iterator[Any]):
    """The items of a loader in a run; Lightning leaves out an ordinary loader's when a trainer is copied, too."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __next__(self) -> Any:
        return next(self._items)


def _same(value: Any) -> Any:
    return value


class StepLoader(InPlace):
    """Base of the loaders that yield the `GlobalBatch` es of an epoch in training.

    Args:
        loader: the user's.
        position: returns the present (epoch, step within it), from Lightning's counters.
        share: returns this rank's part of a range in the present world, in order.
        boundary: called before each step, where worlds change.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        position: Callable[[], tuple[int, int]],
        share: Callable[[range], list[int]],
        boundary: Callable[[], None],
    ) -> None:
        super().__init__(loader)
        self._position = position
        self._share = share
        self._boundary = boundary

    def __iter__(self) -> Iterator[GlobalBatch]:
        self.taken()
        return _Items(self._epoch())

    def _epoch(self) -> Iterator[GlobalBatch]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Empty, since the position is in Lightning's counters. The method's existence makes Lightning resume
        exactly.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""


class TrainingLoader(StepLoader):
    """Yields the global batches of a data set with an index.

    Args:
        loader: the user's.
        order: of its samples.
        seed: of augmentation.
        limit: largest number of batches for each of the shape's devices in an epoch; None: all.
        position, share, boundary: as for `StepLoader`.
        ended: called at the end of an epoch.
    """

    _fetcher: Fetcher

    def __init__(
        self,
        loader: DataLoader[Any],
        order: DataOrder,
        seed: int,
        limit: int | None,
        position: Callable[[], tuple[int, int]],
        share: Callable[[range], list[int]],
        boundary: Callable[[], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(loader, position, share, boundary)
        self._order = order
        self._limit = limit
        self._ended = ended
        self._fetcher = Fetcher(loader, order, seed, self._ahead)

    def __len__(self) -> int:
        self.taken()
        return self.steps(self._position()[0])

    @property
    def shape(self) -> StepShape:
        """Composition of its steps."""
        return self._order.shape

    def steps(self, epoch: int) -> int:
        """Number of steps in an epoch."""
        steps = self._order.num_steps(epoch)
        return steps if self._limit is None else min(steps, self._order.shape.of(epoch).steps(self._limit))

    def _epoch(self) -> Iterator[GlobalBatch]:
        self._fetcher.end_epoch()
        while True:
            self._boundary()
            epoch, step = self._position()
            if step >= self.steps(epoch):
                self._fetcher.end_epoch()
                self._ended()
                return
            self._fetcher.drop_before((epoch, step, 0))
            yield self.at(epoch, step)

    def at(self, epoch: int, step: int) -> GlobalBatch:
        """The global batch of a place."""
        order = self._order
        return GlobalBatch(
            epoch,
            step,
            order.micro_batches(step, epoch),
            lambda m: self._fetcher.get((epoch, step, m)),
            lambda m: len(order.indices(epoch, step, m)),
            self._share,
        )

    def samples(self, batch: GlobalBatch, micro_batch: int) -> list[Any]:
        """The data set indices of a micro-batch in a global batch."""
        return self._order.indices(batch.epoch, batch.step, micro_batch)

    def _ahead(self, start: Place) -> Iterator[Place]:
        epoch, first, _ = start
        for step in range(first, self.steps(epoch)):
            for micro_batch in self._share(self._order.micro_batches(step, epoch)):
                if (epoch, step, micro_batch) >= start or step > first:
                    yield epoch, step, micro_batch


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
        return _Items(self._pass())

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
