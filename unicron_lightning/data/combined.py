"""Several loaders that are read at once, in place of Lightning's `CombinedLoader`.

Of data with an index, each micro-batch has a batch of each loader (`data.order.CombinedOrder`). If at least one loader
is a stream, all are read as streams, combined on each device: stream ``d`` of ``W`` is what device ``d`` would read
under Lightning's ``ddp``, where Lightning's own `CombinedLoader` combines the device's batches of each loader. Those of
a loader with an index are its batches ``d``, ``d + W``, ..., those of an iterable data set its stream ``d``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, SupportsIndex, TypeVar

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import TreeSpec, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import Self, override

from unicron_lightning.data.fetch import Ahead, CombinedFetcher, Fetcher
from unicron_lightning.data.loader import Items, TrainedInPlace
from unicron_lightning.data.order import CombinedOrder, DataOrder, PartOrder, StepShape, number_of
from unicron_lightning.data.passes import EvaluationLoader
from unicron_lightning.data.seeding import RandomPurpose, kept, place_seed
from unicron_lightning.data.steps import TrainingLoader
from unicron_lightning.data.streams import SeenAs, StreamOpener, end_workers, settings_of

MakeLoader = Callable[[int, int, "int | None"], Any]
"""Given epoch, device and number of worker processes, makes the loader of a device."""

_Whole = TypeVar("_Whole", bound=TrainingLoader | EvaluationLoader)


class PartLoader(TrainedInPlace):
    """One of several loaders. Its length is that of a device's part, as under ddp.

    Args:
        loader: the user's.
        order: of its samples, in rounds over the declared devices; None for a stream.
        seed: of augmentation.
        once: whether a stream is read once only; otherwise it has no length.
    """

    _fetcher: Fetcher | None = None  # type: ignore[assignment]

    def __init__(self, loader: DataLoader[Any], order: DataOrder | None, seed: int, *, once: bool = False) -> None:
        super().__init__(loader)
        self.order = order
        self._once = once
        self._seed = seed

    @property
    def rounds(self) -> float:
        """Number of batches of the first device; `math.inf` if it is known only at the end."""
        length = self._length()
        return math.inf if length is None else length

    def _length(self) -> int | None:
        if self.order is not None:
            return math.ceil(self.order.num_micro_batches(0) / self.order.devices)
        return sized_len(self._loader) if self._once else None

    def fetcher(self, number: int, order: PartOrder, ahead: Ahead) -> Fetcher:
        """Return a fetcher of this loader's part of the combined micro-batches, as loader ``number``."""
        self.close()
        seed = place_seed(self._seed, RandomPurpose.PART, number)
        self._fetcher = Fetcher(self._loader, order, seed, lambda start: filter(order.has, ahead(start)))
        return self._fetcher

    def opened(self) -> tuple[DataLoader[Any], DataOrder | None]:
        """Return the user's loader and its order, for a `CombinedOpener`."""
        return self._loader, self.order

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()


class Combined(CombinedLoader, Generic[_Whole]):
    """Several loaders that are read at once, each a `PartLoader` once Lightning has taken it.

    Args:
        users: the loaders and their mode.
        shape: of the steps; in an evaluation, of its rounds.
        whole: makes the loader of combined batches, whose items this one yields, once Lightning has taken all loaders.
    """

    def __init__(self, users: CombinedLoader, shape: StepShape, whole: Callable[[Any], _Whole]) -> None:
        super().__init__(users.iterables, users._mode)
        self._shape = shape
        self._make = whole
        self._whole: _Whole | None = None

    @property
    def whole(self) -> _Whole:
        """The loader of combined batches."""
        if self._whole is None:
            self._whole = self._make(self)
        return self._whole

    @property
    def mode(self) -> str:
        """Mode of `CombinedLoader`."""
        return self._mode

    @property
    def parts(self) -> list[PartLoader]:
        """The loaders."""
        return self.flattened

    @property
    def streams(self) -> bool:
        """Whether any loader is a stream, so that all are read as streams."""
        return any(part.order is None for part in self.parts)

    @property
    def most(self) -> float:
        """Largest number of batches of a device, by lengths and Lightning's limits; `math.inf` if there is none."""
        limits = self.limits or [math.inf] * len(self.parts)
        return number_of(self._mode, [min(part.rounds, limit) for part, limit in zip(self.parts, limits, strict=True)])

    @property
    def structure(self) -> TreeSpec:
        """Structure of the loaders, and thus of a batch."""
        return self._spec

    def order(self, most: float = math.inf) -> CombinedOrder:
        """Return the order of samples, if no loader is a stream; ``most`` limits the batches of a device."""
        orders = [part.order for part in self.parts if part.order is not None]
        return CombinedOrder(orders, self._mode, most * self._shape.devices, self._shape)

    def fetchers(self, order: CombinedOrder, ahead: Ahead) -> CombinedFetcher:
        """Return what fetches micro-batches of all loaders."""
        orders = [order.part(number) for number in range(len(self.parts))]
        made = [
            part.fetcher(number, own, ahead) for number, (part, own) in enumerate(zip(self.parts, orders, strict=True))
        ]
        return CombinedFetcher(orders, made, self.structure)

    @override
    def __iter__(self) -> Self:
        self._iterator = Items(enumerate(self.whole))  # type: ignore[assignment]
        return self

    @override
    def __next__(self) -> tuple[Any, int, int]:
        assert self._iterator is not None
        item: Any = next(self._iterator)
        number, batch = item
        return batch, number, 0

    @override
    def __len__(self) -> int:
        return len(self.whole)

    @override
    def reset(self) -> None:
        self._iterator = None
        if self._whole is not None:
            self._whole.end()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """A copy combines the ordinary loaders, as this object belongs to a run."""
        leaves = [part.ordinary if isinstance(part, PartLoader) else part for part in self.flattened]
        return CombinedLoader, (tree_unflatten(leaves, self._spec), self._mode)


class CombinedSteps(Combined[TrainingLoader]):
    """Yields the global batches of an epoch; their number is known once Lightning has set the limits."""


class CombinedPass(Combined[EvaluationLoader]):
    """Yields this rank's batches of an evaluation pass, of a mode that is not ``sequential``."""

    @override
    def __len__(self) -> int:
        return super().__len__() if math.isinf(self.most) else int(self.most)


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
    batches = _DeviceBatches(order, epoch, device, single=loader.batch_sampler is None)
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=batches, **settings)
    return DataLoader(loader.dataset, batch_sampler=batches, **settings)


class _DeviceBatches:
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
