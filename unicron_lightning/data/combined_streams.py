"""Several loaders of which at least one is a stream: all are read as streams, combined on each device.

Stream ``d`` of ``W`` is what device ``d`` would read under Lightning's ``ddp``: Lightning's own `CombinedLoader`
combines the device's batches of each loader. Those of a loader with an index are its batches ``d``, ``d + W``, ...,
those of an iterable data set its stream ``d``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import TreeSpec, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from unicron_lightning.data.order import DataOrder
from unicron_lightning.data.seeding import kept
from unicron_lightning.data.stream_reader import SeenAs, StreamOpener, end_workers, settings_of

MakeLoader = Callable[[int, int, "int | None"], Any]
"""Given epoch, device and number of worker processes, makes the loader of a device."""


class Together(IterableDataset[Any]):
    """Stands for the data sets of several loaders.

    Args:
        datasets: the iterable ones among them.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        self._datasets = datasets

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("several loaders are read by `CombinedOpener`")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of each data set that takes one."""
        for dataset in self._datasets:
            set_epoch = getattr(dataset, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)


class CombinedOpener(StreamOpener):
    """Opens the streams of several loaders.

    Args:
        parts: each loader of the user with its order over the declared devices, in rounds; None for a stream.
        mode: of `CombinedLoader`.
        structure: of the loaders, and thus of a batch.
        devices, seed, seen_as, once: as for `StreamOpener`.
    """

    def __init__(
        self,
        parts: Sequence[tuple[DataLoader[Any], DataOrder | None]],
        mode: str,
        structure: TreeSpec,
        devices: int,
        seed: int,
        seen_as: SeenAs,
        *,
        once: bool = False,
    ) -> None:
        streams = [loader.dataset for loader, order in parts if order is None]
        size = sum(loader.batch_size or 1 for loader, _ in parts)
        super().__init__(DataLoader(Together(streams), batch_size=size), devices, seed, seen_as, once=once)
        self._mode = mode
        self._structure = structure
        self._parts: list[MakeLoader] = []
        names = []
        for loader, order in parts:
            opener = StreamOpener(loader, devices, seed, seen_as)
            opener.stateful = False
            names.append(opener.name)
            self._parts.append(opener.loader_of if order is None else partial(loader_of_device, loader, order))
        self._names = names
        self.name = " with ".join(names)

    def parts(self, batch: Any) -> dict[str, Any]:
        """Return the loaders' batches; without those that are None, as under ``max_size`` after a loader's end."""
        batches = enumerate(zip(self._names, self._structure.flatten_up_to(batch), strict=True))
        return {f"{name} (loader {number})": part for number, (name, part) in batches if part is not None}

    def loader_of(self, epoch: int, stream: int, workers: int | None = None) -> Any:
        loaders = [_Again(make(epoch, stream, workers)) for make in self._parts]
        return _OfDevice(loaders, self._mode, self._structure)


def loader_of_device(
    loader: DataLoader[Any], order: DataOrder, epoch: int, device: int, workers: int | None = None
) -> DataLoader[Any]:
    """Return a loader of a device's batches of data with an index."""
    with kept():
        if order.num_micro_batches(epoch):
            order.indices(*order.place(epoch, 0))  # a sampler of the user draws numbers, once in an epoch
    settings = settings_of(loader, device, order.devices, workers)
    settings["persistent_workers"] = loader.persistent_workers and settings["num_workers"] > 0
    batches = _Batches(order, epoch, device, single=loader.batch_sampler is None)
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=batches, **settings)
    return DataLoader(loader.dataset, batch_sampler=batches, **settings)


class _Batches:
    """Data set indices of a device's batches: a sampler.

    Args:
        order: of the samples.
        epoch: of the order.
        device: of the declared world.
        single: whether each batch is one item of the data set, as of a sequence of batches.
    """

    def __init__(self, order: DataOrder, epoch: int, device: int, *, single: bool) -> None:
        self._order, self._epoch, self._single = order, epoch, single
        self._numbers = range(device, order.num_micro_batches(epoch), order.devices)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Any]:
        for number in self._numbers:
            indices = self._order.indices(*self._order.place(self._epoch, number))
            yield indices[0] if self._single else indices


class _Again:
    """A loader whose next iterator ends the worker processes of the one before, unless they are persistent."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if not self._loader.persistent_workers:
            self.close()
        self._iterator = iter(self._loader)
        return self._iterator

    def close(self) -> None:
        """End the worker processes."""
        iterator, self._iterator = self._iterator, None
        end_workers(iterator)


class _OfDevice:
    """The combined batches of a device; read by a `StreamReader`.

    Args:
        loaders: of the device.
        mode, structure: as for `CombinedOpener`.
    """

    num_workers = 0

    def __init__(self, loaders: list[_Again], mode: Any, structure: TreeSpec) -> None:
        self._loaders = loaders
        self._structure = structure
        self._batches = CombinedLoader(loaders, mode)

    def __iter__(self) -> Iterator[Any]:
        iter(self._batches)
        return self

    def __next__(self) -> Any:
        return tree_unflatten(next(self._batches)[0], self._structure)

    def _shutdown_workers(self) -> None:
        for loader in self._loaders:
            loader.close()
