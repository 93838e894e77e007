"""Global batches, the items of Lightning's loops, and the loaders that take the places of the user's there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from unicron_lightning.copying import OfProcess
from unicron_lightning.data.seeding import preserved
from unicron_lightning.data.sources import Reopened, as_it_is, name_of
from unicron_lightning.data.streams import ENDS, StreamEnds


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
        is_stream: whether its samples are read from streams.
        stand_in: returns the samples for a micro-batch whose results do not count, by number: its own, or others.
    """

    __slots__ = (
        *("_own", "_share", "count", "ends", "epoch", "fetch", "finished", "in_full_step", "is_stream"),
        *("micro_batches", "stand_in", "step"),
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
        self.is_stream = stand_in is not None
        self.stand_in = stand_in or fetch
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
        return as_it_is, (self.own(),)

    def place(self, number: int) -> int:
        """Return the number that a micro-batch would have in a full step."""
        return self.in_full_step[self.micro_batches.index(number)]

    def num_samples(self) -> int:
        """Number of data set items in the whole step, over all ranks."""
        return sum(self.count(micro_batch) for micro_batch in self.micro_batches)


class BatchRows:
    """The rows of a global batch that replicas share: each has the micro-batches that it has in a full one.

    So each replica reads the streams of its devices, also where others have ended. Where some are missing, a worker has
    one that does not count.

    Args:
        batch: the global batch.
        size: micro-batches of a row: one for each shard, or one that a replica computes together.
        shard: of this worker.

    Attributes:
        numbers: of all rows.
    """

    def __init__(self, batch: GlobalBatch, size: int = 1, shard: int = 0) -> None:
        self.numbers = list(range(batch.in_full_step[-1] // size + 1))
        self._size, self._shard = size, shard
        self._present = dict(zip(batch.in_full_step, batch.micro_batches, strict=True))
        self._last = batch.micro_batches[-1]

    def own(self, row: int) -> tuple[int, bool]:
        """Return this worker's micro-batch of a row, and whether it counts."""
        number = self._present.get(row * self._size + self._shard)
        return self._last if number is None else number, number is not None

    def counted(self, rows: Iterable[int]) -> list[int]:
        """Return this worker's micro-batches of some rows that count."""
        return [number for number, counts in map(self.own, rows) if counts]

    def is_empty(self, row: int) -> bool:
        """Return whether no shard has a micro-batch that counts."""
        return not any(place in self._present for place in self._places(row))

    def is_complete(self, row: int) -> bool:
        """Return whether each shard has a micro-batch that counts."""
        return all(place in self._present for place in self._places(row))

    def _places(self, row: int) -> range:
        return range(row * self._size, (row + 1) * self._size)


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
        iterates: called when an iteration begins.
        unbounded: whether the length of streams is a number that is never reached, instead of none, so that Lightning
            reads no batch ahead.
    """

    _fetcher: Closes

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.taken: Callable[[], None] = lambda: None
        self.iterates: Callable[[], None] = lambda: None
        self.unbounded = False
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

    def __len__(self) -> int:
        self.taken()
        length = self._length()
        if length is None and not self.unbounded:
            raise TypeError(f"{name_of(self._loader)} is a stream, which has no length")
        return ENDS if length is None else length

    def __iter__(self) -> Iterator[Any]:
        self.taken()
        self.iterates()
        return Items(self._items())

    def _length(self) -> int | None:
        """Return the number of items; None if it is known only at the end."""
        raise NotImplementedError

    def _items(self) -> Iterator[Any]:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Forward other attributes, such as ``batch_size`` and ``collate_fn``, to the user's loader.

        Its state does not count: positions are those of Lightning's counters.
        """
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """A copy of a trainer has the ordinary loader, as this one belongs to a run."""
        return as_it_is, (self.ordinary,)

    def close(self) -> None:
        """Stop the loader's worker processes."""
        self._fetcher.close()


class TrainedInPlace(InPlace):
    """A loader whose state is empty, since the position is in Lightning's counters.

    The methods' existence makes Lightning resume exactly.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore nothing."""


class Items(OfProcess, Iterator[Any]):
    """The items of a loader in a run; Lightning leaves out an ordinary loader's when a trainer is copied, too."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __next__(self) -> Any:
        return next(self._items)
