"""Training and evaluation data that is no `DataLoader`, as one: sequences of batches, and loaders of other kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from unicron_lightning.data.chunks import ChunkedSamples, by_index, is_chunked
from unicron_lightning.errors import ConfigError


class Batches(Dataset[Any]):
    """A sequence of batches, such as a list.

    Args:
        users: the sequence.
    """

    def __init__(self, users: Any) -> None:
        self.users = users

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, index: int) -> Any:
        return self.users[index]


class Reopened(IterableDataset[Any]):
    """Batches of a loader that is no `DataLoader`, read anew by each iterator. Its length is that of the loader.

    Args:
        users: the loader.
    """

    def __init__(self, users: Iterable[Any]) -> None:
        self.users = users

    def __iter__(self) -> Iterator[Any]:
        return iter(self.users)

    def __len__(self) -> int:
        return len(self.users)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader, and of its sampler, if it takes one, as Lightning does."""
        for taking in (self.users, getattr(self.users, "sampler", None)):
            set_epoch = getattr(taking, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)


def as_loader(users: Any, devices: int, *, once: bool = False) -> DataLoader[Any]:
    """Return data as a `DataLoader`: a sequence by index, a loader of another kind as an iterable data set.

    Args:
        users: what the user gave as a loader; a `DataLoader` is returned as it is, unless its data set is litData's.
        devices: of the declared world.
        once: whether nothing is read again, so that an iterator that can be read once is enough.

    Raises:
        ConfigError: it can be read once only.
    """
    if isinstance(users, DataLoader):
        return by_index(users, devices) if is_chunked(users) else users
    if once and isinstance(users, Iterator):
        return _reopened(users)
    name = type(users).__qualname__
    if _has_index(users):
        batches = Batches(users)
        return DataLoader(batches, batch_size=None, sampler=SequentialSampler(batches), collate_fn=_as_it_is)
    if once and isinstance(users, Iterable):
        return _reopened(users)
    try:
        reads_itself = iter(users) is users
    except TypeError:
        raise ConfigError(f"the data is a {name}, which can't be iterated; expected a DataLoader or batches") from None
    if reads_itself:
        raise ConfigError(
            f"the data is a {name}, an iterator that can be read once: a lost rank's batches could not be read again. "
            "Give the batches as a list, or a class with an __iter__ that returns a new iterator each time, for "
            "example one that calls the generator function"
        )
    return _reopened(users)


def name_of(loader: DataLoader[Any]) -> str:
    """Return the name of the class that the user gave: of the data set, or of a loader of another kind."""
    dataset = loader.dataset
    return type(dataset.users if isinstance(dataset, Batches | Reopened | ChunkedSamples) else dataset).__qualname__


def _has_index(users: Any) -> bool:
    """Whether batches can be read by number, and in the order of an iteration."""
    if isinstance(users, Sequence | Tensor | numpy.ndarray):
        return True
    if isinstance(users, Mapping) or not hasattr(users, "__getitem__") or not hasattr(users, "__len__"):
        return False
    if not hasattr(users, "__iter__"):
        return True
    try:
        return len(users) > 0 and same(next(iter(users)), users[0])
    except (LookupError, TypeError, StopIteration):
        return False


def _reopened(users: Iterable[Any]) -> DataLoader[Any]:
    return DataLoader(Reopened(users), batch_size=None, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


def same(one: Any, other: Any) -> bool:
    """Whether two batches are equal: tensors by value, containers item by item, others by ``==``."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype == other.dtype
        return both and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
