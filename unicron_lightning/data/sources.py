"""Training and evaluation data that is no `DataLoader`, as one: sequences of batches, and loaders of other kinds.

Of libraries, the `StreamingDataset` of litData and that of MosaicML are read by index, in training and in evaluations.
Both are iterable data sets of which two iterators cannot be open at a time: litData's iterator is the data set itself,
and MosaicML's counts a data epoch for each. Their samples can be read by their global numbers all the same. Chunks
(MosaicML: shards) are dealt out to the declared devices, as both libraries do, so that a worker that reads one device's
samples needs its chunks only.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler

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
    """Batches of a loader that is no `DataLoader`, read from its start by each iterator. Its length is the loader's.

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
        return DataLoader(batches, batch_size=None, sampler=SequentialSampler(batches), collate_fn=as_it_is)
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
    return DataLoader(Reopened(users), batch_size=None, collate_fn=as_it_is)


def as_it_is(item: Any) -> Any:
    """Return an item: stands for a function that would change it."""
    return item


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


_LITDATA = "litdata.streaming.dataset"
_MOSAICML = "streaming.base.dataset"
_PASSED_ON = (
    "batch_size",
    "drop_last",
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


class ChunkedSamples(Dataset[Any]):
    """The samples of a data set in chunks, by number.

    Args:
        users: the data set; it is not opened before a sample is read, as each worker process opens its own.
        size: number of samples.
    """

    def __init__(self, users: Any, size: int) -> None:
        self.users = users
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self.users[index]


class ChunkOrder(Sampler[int]):
    """Numbers of samples, chunk by chunk: device ``d`` of ``W`` has every ``W``-th chunk.

    Args:
        chunks: the samples of each chunk.
        devices: of the declared world.
        seed: of the shuffle of chunks, and of samples within each; None: they are not shuffled.
    """

    def __init__(self, chunks: Sequence[range], devices: int, seed: int | None) -> None:
        self._chunks = chunks
        self._devices = devices
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the shuffle depends."""
        self._epoch = epoch

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed((self._seed or 0) + self._epoch)
        chunks = [self._chunks[place] for place in self._order(len(self._chunks), generator)]
        numbers = [[chunk[place] for place in self._order(len(chunk), generator)] for chunk in chunks]
        by_device = [itertools.chain(*numbers[device :: self._devices]) for device in range(self._devices)]
        rounds = itertools.zip_longest(*by_device)
        return (number for each in rounds for number in each if number is not None)

    def _order(self, size: int, generator: torch.Generator) -> list[int]:
        return list(range(size)) if self._seed is None else torch.randperm(size, generator=generator).tolist()


def is_chunked(loader: DataLoader[Any]) -> bool:
    """Whether a loader's data set is litData's or MosaicML's."""
    return _is_of(loader.dataset, _LITDATA) or _is_of(loader.dataset, _MOSAICML)


def by_index(loader: DataLoader[Any], devices: int) -> DataLoader[Any]:
    """Return a loader of the samples by index, with the settings of the user's.

    Raises:
        ConfigError: the data set does not have each of its samples once, or is one process's part.
    """
    users: Any = loader.dataset
    chunks, seed = _shards(users) if _is_of(users, _MOSAICML) else _litdata_chunks(users)
    order = ChunkOrder(chunks, devices, seed)
    settings = {name: getattr(loader, name) for name in _PASSED_ON}
    return DataLoader(ChunkedSamples(users, len(order)), sampler=order, **settings)


def _is_of(dataset: Any, library: str) -> bool:
    module = sys.modules.get(library)
    return module is not None and isinstance(dataset, module.StreamingDataset)


def _litdata_chunks(users: Any) -> tuple[list[range], int | None]:
    opened = copy.deepcopy(users)
    opened[0]
    intervals = opened.cache._reader.config.intervals
    return [range(each.roi_start_idx, each.roi_end_idx) for each in intervals], users.seed if users.shuffle else None


def _shards(users: Any) -> tuple[list[range], int | None]:
    chosen, samples = [int(stream.choose) for stream in users.streams], users.samples_per_stream.tolist()
    if chosen != samples:
        raise ConfigError(
            f"the StreamingDataset chooses {chosen} samples of its streams' {samples}; expected all of them: a data "
            "epoch uses each sample once. Leave out proportion, repeat, choose and epoch_size"
        )
    if len(users) != users.size:
        raise ConfigError(
            f"the StreamingDataset is one process's part: {len(users)} of {users.size} samples. Build it inside `with "
            "unicron_lightning.data.alone.as_only_process()`: otherwise it waits for the other workers of the "
            "present world, which a worker that returns later would not find"
        )
    ends = list(itertools.accumulate(users.samples_per_shard.tolist(), initial=0))
    return [range(*both) for both in itertools.pairwise(ends)], users.shuffle_seed if users.shuffle else None
