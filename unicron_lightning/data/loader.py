"""Loaders of training data for Lightning's loop: one item per optimizer step.

Positions are read from Lightning's own progress counters, the single source of truth: restoring the counters (from a
checkpoint or a peer's state) restores the data position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from unicron_lightning.copying import OfProcess
from unicron_lightning.data.fetch import Fetcher, Place
from unicron_lightning.data.order import DataOrder, StepShape
from unicron_lightning.data.seeding import preserved
from unicron_lightning.data.sources import Reopened

if TYPE_CHECKING:
    from unicron_lightning.data.streams import StreamEnds


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
        in_full_step: of each micro-batch its number in a step without missing ones: ``round x devices + device``.
        ends: lengths of streams in an evaluation, which its results make known to all; None without streams.
        stand_in: returns the samples for a micro-batch whose results do not count, by number: its own, or others.
    """

    __slots__ = (
        *("_own", "_share", "count", "ends", "epoch", "fetch", "finished", "in_full_step", "micro_batches"),
        *("stand_in", "step"),
    )

    def __init__(
        self,
        epoch: int,
        step: int,
        micro_batches: range,
        fetch: Callable[[int], Any],
        count: Callable[[int], int],
        share: Callable[[range], list[int]] = lambda numbers: list(numbers[:1]),
        finished: Callable[[int], None] = lambda number: None,
        in_full_step: Sequence[int] | None = None,
        stand_in: Callable[[int], Any] | None = None,
    ) -> None:
        self.epoch = epoch
        self.step = step
        self.micro_batches = micro_batches
        self.fetch = fetch
        self.count = count
        self.finished = finished
        self.in_full_step = micro_batches if in_full_step is None else in_full_step
        self.ends: StreamEnds | None = None
        self.stand_in = fetch if stand_in is None else stand_in
        self._share = share
        self._own: Any = None

    def own(self) -> Any:
        """This rank's micro-batches as one batch, on the CPU; if the rank has none, samples in place of the first."""
        if self._own is None:
            numbers = self._share(self.micro_batches)
            with preserved():
                batches = [self.fetch(number) for number in numbers]
                self._own = joined(batches or [self.stand_in(self.micro_batches[0])])
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

    def place(self, number: int) -> int:
        """Return the number that a micro-batch would have in a full step."""
        return self.in_full_step[self.micro_batches.index(number)]

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
        shapes = {tuple(each.shape[1:]) if isinstance(each, Tensor) else None for each in batches}
        if first.dim() and len(shapes) == 1:
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
        ordinary: the loader that scripts see instead; the user's, if it is no `DataLoader`.
        taken: called when a loop has taken this loader (Lightning asks for its length), and when an iteration begins.
    """

    _fetcher: Closes

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.taken: Callable[[], None] = lambda: None
        self.ordinary = loader

    @property
    def ordinary(self) -> Any:
        return self._ordinary

    @ordinary.setter
    def ordinary(self, loader: Any) -> None:
        self._ordinary = loader
        shown = loader if isinstance(loader, DataLoader) else self._loader
        self.dataset = shown.dataset.users if isinstance(shown.dataset, Reopened) else shown.dataset
        self.sampler = shown.sampler  # Lightning sets its epoch
        self.batch_sampler = shown.batch_sampler
        self.num_workers = shown.num_workers

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


class Items(OfProcess, Iterator[Any]):
    """The items of a loader in a run; Lightning leaves out an ordinary loader's when a trainer is copied, too."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __next__(self) -> Any:
        return next(self._items)


def _same(value: Any) -> Any:
    return value


class StepLoader(InPlace):
    """Base of the loaders that yield the `GlobalBatch` es of an epoch in training.

    Attributes:
        varies: whether epochs may have different numbers of steps, known when they begin.
    """

    varies = False

    def __iter__(self) -> Iterator[GlobalBatch]:
        self.taken()
        return Items(self._epoch())

    def _epoch(self) -> Iterator[GlobalBatch]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Empty, since the position is in Lightning's counters. The method's existence makes Lightning resume
        exactly.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""


class Numbered(Protocol):
    """Order of an epoch's micro-batches: `DataOrder`, or that of several loaders."""

    @property
    def shape(self) -> StepShape:
        """Composition of the steps."""

    @property
    def varies(self) -> bool:
        """Whether epochs may have different numbers of micro-batches."""

    def num_steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch."""

    def micro_batches(self, step: int, epoch: int) -> range:
        """Return the numbers of a step's micro-batches."""

    def indices(self, epoch: int, step: int, micro_batch: int) -> list[Any]:
        """Return the data set indices of a micro-batch."""


class Fetches(Closes, Protocol):
    """Fetches micro-batches by number: `Fetcher`, or those of several loaders."""

    def get(self, place: Place) -> Any:
        """Return the collated micro-batch at ``place``."""

    def drop_before(self, place: Place) -> None:
        """Drop micro-batches before ``place``."""

    def end_epoch(self) -> None:
        """End this epoch's requests."""


class IndexedSteps:
    """The global batches of data with an index.

    Args:
        order: of the samples.
        limit: largest number of batches for each of the shape's devices in an epoch; None: all.
        position: returns the present (epoch, step within it), from Lightning's counters.
        share: returns this rank's part of a range in the present world, in order.
        boundary: called before each step, where worlds change.
        ended: called at the end of an epoch.

    Attributes:
        shape: composition of the steps.
        position: as above.
        fetcher: fetches the micro-batches; set before the first step.
        last: number of steps in the last epoch that was asked for.
    """

    fetcher: Fetches

    def __init__(
        self,
        order: Numbered,
        limit: int | None,
        position: Callable[[], tuple[int, int]],
        share: Callable[[range], list[int]],
        boundary: Callable[[], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.shape = order.shape
        self.last = 0
        self.position = position
        self._order = order
        self._limit = limit
        self._share = share
        self._boundary = boundary
        self._ended = ended
        self._over = False

    @property
    def length(self) -> int:
        """Number of steps in the present epoch.

        Once the run is over, Lightning's counters are past its last epoch, or an error has ended it, perhaps of this
        very number: it is that of the last epoch.
        """
        return self.last if self._over else self.number(self.position()[0])

    def close(self) -> None:
        """End the run."""
        self._over = True

    def number(self, epoch: int) -> int:
        """Return the number of steps in an epoch."""
        steps = self._order.num_steps(epoch)
        self.last = steps if self._limit is None else min(steps, self.shape.of(epoch).steps(self._limit))
        return self.last

    def epoch(self) -> Iterator[GlobalBatch]:
        """Yield the rest of the present epoch."""
        self.fetcher.end_epoch()
        while True:
            self._boundary()
            epoch, step = self.position()
            if step >= self.number(epoch):
                self.fetcher.end_epoch()
                self._ended()
                return
            self.fetcher.drop_before((epoch, step, 0))
            yield self.at(epoch, step)

    def at(self, epoch: int, step: int) -> GlobalBatch:
        """Return the global batch of a place."""
        order = self._order
        return GlobalBatch(
            epoch,
            step,
            order.micro_batches(step, epoch),
            lambda m: self.fetcher.get((epoch, step, m)),
            lambda m: len(order.indices(epoch, step, m)),
            self._share,
        )

    def samples(self, step: int) -> list[list[Any]]:
        """Return the data set indices of the micro-batches of a step of the first epoch."""
        return [self._order.indices(0, step, number) for number in self._order.micro_batches(step, 0)]

    def ahead(self, start: Place) -> Iterator[Place]:
        """Yield the places that this rank expects to need from ``start`` on, in order."""
        epoch, first, _ = start
        for step in range(first, self.number(epoch)):
            for micro_batch in self._share(self._order.micro_batches(step, epoch)):
                if (epoch, step, micro_batch) >= start or step > first:
                    yield epoch, step, micro_batch


class TrainingLoader(StepLoader):
    """Yields the global batches of a data set with an index.

    Args:
        loader: the user's.
        order: of its samples.
        seed: of augmentation.
        steps: the global batches.
    """

    _fetcher: Fetcher

    def __init__(self, loader: DataLoader[Any], order: DataOrder, seed: int, steps: IndexedSteps) -> None:
        super().__init__(loader)
        self.varies = order.varies
        self.steps = steps
        steps.fetcher = self._fetcher = Fetcher(loader, order, seed, steps.ahead)

    def __len__(self) -> int:
        self.taken()
        return self.steps.length

    def close(self) -> None:
        super().close()
        self.steps.close()

    def _epoch(self) -> Iterator[GlobalBatch]:
        return self.steps.epoch()

    def datasets(self) -> list[Any]:
        """Return the data sets of the loaders, of which this is one."""
        return [self.dataset]
