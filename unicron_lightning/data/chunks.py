"""The `StreamingDataset` of litData and that of MosaicML by index, in training and in evaluations.

Both are iterable data sets of which two iterators cannot be open at a time: litData's iterator is the data set itself,
and MosaicML's counts a data epoch for each. Their samples can be read by their global numbers all the same. Chunks
(MosaicML: shards) are dealt out to the declared devices, as both libraries do, so that a worker that reads one device's
samples needs its chunks only.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from unicron_lightning.errors import ConfigError

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
