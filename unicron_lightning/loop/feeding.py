"""The data of a loop, in training and in evaluations: by index, or as streams."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from unicron_lightning.data.fetch import Fetcher
from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.order import DataOrder, StepShape, check_loader
from unicron_lightning.data.passes import IndexedBatches, PassBatches, StreamBatches
from unicron_lightning.data.sources import as_loader
from unicron_lightning.data.steps import IndexedSteps, StepPace, Steps, StreamSteps, agree_on_ends
from unicron_lightning.data.streams import StreamEnds, StreamOpener, Streams, as_rank
from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.engine import Engine


def loader_of(data: Any, batch_size: int | None, streams: int, *, shuffle: bool) -> DataLoader[Any]:
    """Return data as a loader.

    Args:
        data: a data set, a `DataLoader`, or another iterable of batches.
        batch_size: of a data set.
        streams: number of streams of iterable data.
        shuffle: whether a data set with an index is shuffled.

    Raises:
        ConfigError: it cannot be read again, or the batch size is missing or contradicts the loader's.
    """
    if isinstance(data, DataLoader):
        if batch_size is not None and data.batch_size not in (None, batch_size):
            raise ConfigError(
                f"a batch size of {batch_size}, but DataLoader(batch_size={data.batch_size}): leave one out"
            )
    elif is_stream(data) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        if batch_size is None:
            raise ConfigError(
                f"the data is a {type(data).__qualname__} without a batch size: give one, or give a DataLoader"
            )
        data = DataLoader(data, batch_size=batch_size, shuffle=shuffle and not is_stream(data))
    loader = as_loader(data, streams)
    check_loader(loader)
    return loader


def is_stream(dataset: object) -> bool:
    """Whether a data set is read as streams."""
    return isinstance(dataset, IterableDataset)


def steps_of(
    engine: Engine,
    loader: DataLoader[Any],
    shape: StepShape,
    seed: int,
    pace: StepPace,
    own: Callable[[Sequence[int]], list[int]],
    ends: StreamEnds,
) -> Steps:
    """Return the global batches of training data.

    Args:
        engine: of this worker.
        loader: a result of `loader_of`.
        shape: of the steps; its devices are the streams.
        seed: of order and random state.
        pace: of the loop.
        own: as of `StreamSteps`.
        ends: of the streams, as the commits of the steps make them known.
    """
    if not is_stream(loader.dataset):
        order = DataOrder(loader, shape, seed)
        return IndexedSteps(order, partial(Fetcher, loader, order, seed), pace)

    streams = Streams(_opener(loader, shape.devices, seed), shape, ends)
    reading = partial(engine.activity.during, "data")
    return _LoopStreams(streams, pace, own=own, agree=partial(agree_on_ends, engine), reading=reading)


def batches_of(engine: Engine, loader: DataLoader[Any], streams: int, seed: int) -> PassBatches:
    """Return the batches of a pass over data.

    Args:
        engine: of this worker.
        loader: a result of `loader_of`.
        streams: number of streams of iterable data.
        seed: of order and random state.
    """
    if is_stream(loader.dataset):
        return StreamBatches(_opener(loader, streams, seed), streams, partial(engine.activity.during, "data"))
    order = DataOrder(loader, StepShape(devices=1, accumulation=1), seed)
    return IndexedBatches(order, partial(Fetcher, loader, order, seed))


def _opener(loader: DataLoader[Any], streams: int, seed: int) -> StreamOpener:
    return StreamOpener(loader, streams, seed, partial(as_rank, size=streams))


class _LoopStreams(StreamSteps):
    """Steps of streams. Each call of a step's function gets samples of its own, since it may change them in place."""

    @override
    def _batch(self, epoch: int, step: int) -> GlobalBatch:
        batch = super()._batch(epoch, step)
        kept = batch.fetch
        batch.fetch = lambda number: copy.deepcopy(kept(number))
        return batch
