"""Several loaders that are read at once, in place of Lightning's `CombinedLoader`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, SupportsIndex

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import TreeSpec, tree_unflatten
from torch.utils.data import DataLoader
from typing_extensions import override

from unicron_lightning.data.combination import Combination, CombinedOrder, PartOrder, number_of
from unicron_lightning.data.fetch import Fetcher, Place
from unicron_lightning.data.loader import Fetches, IndexedSteps, InPlace, Items
from unicron_lightning.data.order import DataOrder, StepShape
from unicron_lightning.data.seeding import place_seed
from unicron_lightning.data.sources import name_of
from unicron_lightning.data.stream_loader import StreamLoader

Ahead = Callable[[Place], Iterator[Place]]

_PART = 3
"""Distinguishes the random state of one loader's augmentation from that of the others."""


class PartLoader(InPlace):
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
        if self.order is not None:
            return math.ceil(self.order.num_micro_batches(0) / self.order.devices)
        length = sized_len(self._loader) if self._once else None
        return math.inf if length is None else length

    def __len__(self) -> int:
        self.taken()
        rounds = self.rounds
        if math.isinf(rounds):
            raise TypeError(f"{name_of(self._loader)} is a stream, which has no length")
        return int(rounds)

    def fetcher(self, number: int, order: PartOrder, ahead: Ahead) -> Fetcher:
        """Return a fetcher of this loader's part of the combined micro-batches, as loader ``number``."""
        self.close()
        self._fetcher = Fetcher(self._loader, order, place_seed(self._seed, _PART, number), ahead)
        return self._fetcher

    def opened(self) -> tuple[DataLoader[Any], DataOrder | None]:
        """Return the user's loader and its order, for a `CombinedOpener`."""
        return self._loader, self.order

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()

    def state_dict(self) -> dict[str, Any]:
        """Empty, as that of `StepLoader`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""


class Combined(CombinedLoader):
    """Several loaders that are read at once, each a `PartLoader` once Lightning has taken it.

    Args:
        users: the loaders and their mode.
        shape: of the steps.
    """

    def __init__(self, users: CombinedLoader, shape: StepShape) -> None:
        super().__init__(users.iterables, users._mode)
        self._shape = shape

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
        sizes = tuple(order.num_micro_batches(0) for order in orders)
        combination = Combination(mode=self._mode, sizes=sizes, most=most * self._shape.devices)
        return CombinedOrder(orders, combination, self._shape)

    def fetchers(self, order: CombinedOrder, ahead: Ahead) -> Fetches:
        """Return what fetches micro-batches of all loaders."""
        return _Fetchers(self.parts, order, ahead, self.structure)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """A copy combines the ordinary loaders, as this object belongs to a run."""
        leaves = [part.ordinary if isinstance(part, PartLoader) else part for part in self.flattened]
        return CombinedLoader, (tree_unflatten(leaves, self._spec), self._mode)


class CombinedSteps(Combined):
    """Yields the global batches of an epoch of several loaders.

    Args:
        users, shape: as for `Combined`.
        steps: makes the steps of an order.
        stream: makes the loader of streams.
    """

    def __init__(
        self,
        users: CombinedLoader,
        shape: StepShape,
        steps: Callable[[CombinedOrder], IndexedSteps],
        stream: Callable[[CombinedSteps], StreamLoader],
    ) -> None:
        super().__init__(users, shape)
        self._make = steps
        self._stream = stream
        self._made: IndexedSteps | None = None
        self._opened: StreamLoader | None = None

    @property
    def steps(self) -> IndexedSteps:
        """The global batches, if no loader is a stream; their number is known once Lightning has set the limits."""
        if self._made is None:
            order = self.order(self.most)
            self._made = self._make(order)
            self._made.fetcher = self.fetchers(order, self._made.ahead)
        return self._made

    @property
    def stream(self) -> StreamLoader | None:
        """The loader of streams, if there are any."""
        if self._opened is None and self.streams:
            self._opened = self._stream(self)
        return self._opened

    @override
    def __iter__(self) -> CombinedSteps:
        source: Any = Items(self.steps.epoch()) if self.stream is None else iter(self.stream)
        self._iterator = source
        self.flattened[0].taken()
        return self

    @override
    def __next__(self) -> Any:
        assert self._iterator is not None
        return next(self._iterator), 0, 0

    @override
    def __len__(self) -> int:
        return self.steps.length if self.stream is None else len(self.stream)

    @override
    def reset(self) -> None:
        self._iterator = None
        if self._made is not None:
            self._made.fetcher.end_epoch()
        if self._opened is not None:
            self._opened.close()

    def close(self) -> None:
        """End the run; the parts are closed by themselves."""
        if self._made is not None:
            self._made.close()


class _Fetchers:
    """Fetches micro-batches of several loaders; implements `Fetches`.

    Args:
        parts: the loaders.
        order: of their samples.
        ahead: yields the places that this rank expects to need.
        structure: of the loaders, and thus of a batch.
    """

    def __init__(self, parts: Sequence[PartLoader], order: CombinedOrder, ahead: Ahead, structure: TreeSpec) -> None:
        self._orders = [order.part(number) for number in range(len(parts))]
        self._fetchers = [
            part.fetcher(number, own, partial(_needed, own, ahead))
            for number, (part, own) in enumerate(zip(parts, self._orders, strict=True))
        ]
        self._structure = structure

    def get(self, place: Place) -> Any:
        pairs = zip(self._orders, self._fetchers, strict=True)
        batches = [fetcher.get(place) if own.has(place) else None for own, fetcher in pairs]
        return tree_unflatten(batches, self._structure)

    def drop_before(self, place: Place) -> None:
        for fetcher in self._fetchers:
            fetcher.drop_before(place)

    def end_epoch(self) -> None:
        for fetcher in self._fetchers:
            fetcher.end_epoch()

    def close(self) -> None:
        for fetcher in self._fetchers:
            fetcher.close()


def _needed(order: PartOrder, ahead: Ahead, start: Place) -> Iterator[Place]:
    return (place for place in ahead(start) if order.has(place))
