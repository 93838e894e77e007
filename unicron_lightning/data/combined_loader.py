"""Several loaders of training data, in place of Lightning's `CombinedLoader`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, SupportsIndex

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader
from typing_extensions import override

from unicron_lightning.data.combination import Combination, CombinedOrder, PartOrder
from unicron_lightning.data.fetch import Fetcher, Place
from unicron_lightning.data.loader import IndexedSteps, InPlace, Items
from unicron_lightning.data.order import DataOrder, StepShape
from unicron_lightning.data.seeding import place_seed

Ahead = Callable[[Place], Iterator[Place]]

_PART = 3
"""Distinguishes the random state of one loader's augmentation from that of the others."""


class PartLoader(InPlace):
    """One of several loaders of training data. Its length is that of a device's part, as under ddp.

    Args:
        loader: the user's.
        order: of its samples, in rounds over the declared devices.
        seed: of augmentation.
    """

    _fetcher: Fetcher | None = None  # type: ignore[assignment]

    def __init__(self, loader: DataLoader[Any], order: DataOrder, seed: int) -> None:
        super().__init__(loader)
        self.order = order
        self._seed = seed

    def __len__(self) -> int:
        self.taken()
        return math.ceil(self.order.num_micro_batches / self.order.devices)

    def fetcher(self, number: int, order: PartOrder, ahead: Ahead) -> Fetcher:
        """Return a fetcher of this loader's part of the combined micro-batches, as loader ``number``."""
        self.close()
        self._fetcher = Fetcher(self._loader, order, place_seed(self._seed, _PART, number), ahead)
        return self._fetcher

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()

    def state_dict(self) -> dict[str, Any]:
        """Empty, as that of `StepLoader`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""


class CombinedSteps(CombinedLoader):
    """Yields the global batches of an epoch of several loaders, each a `PartLoader` once Lightning has taken it.

    Args:
        users: the loaders and their mode.
        shape: of the steps.
        steps: makes the steps of an order.
    """

    def __init__(self, users: CombinedLoader, shape: StepShape, steps: Callable[[CombinedOrder], IndexedSteps]) -> None:
        super().__init__(users.iterables, users._mode)
        self._shape = shape
        self._make = steps
        self._made: IndexedSteps | None = None

    @property
    def steps(self) -> IndexedSteps:
        """The global batches; their number is known once Lightning has set the limits."""
        if self._made is None:
            parts: list[PartLoader] = self.flattened
            orders, limits = [part.order for part in parts], self.limits or [math.inf] * len(parts)
            combination = Combination(
                mode=self._mode,
                sizes=tuple(order.num_micro_batches for order in orders),
                limits=tuple(limit * self._shape.devices for limit in limits),
            )
            order = CombinedOrder(orders, combination, self._shape)
            self._made = self._make(order)
            self._made.fetcher = _Fetchers(parts, order, self._made.ahead, partial(tree_unflatten, treespec=self._spec))
        return self._made

    @override
    def __iter__(self) -> CombinedSteps:
        self._iterator = Items(self.steps.epoch())  # type: ignore[assignment]
        self.flattened[0].taken()
        return self

    @override
    def __next__(self) -> Any:
        assert self._iterator is not None
        return next(self._iterator), 0, 0

    @override
    def __len__(self) -> int:
        return self.steps.number(self.steps.position()[0])

    @override
    def reset(self) -> None:
        self._iterator = None
        if self._made is not None:
            self._made.fetcher.end_epoch()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """A copy combines the ordinary loaders, as this object belongs to a run."""
        leaves = [part.ordinary if isinstance(part, PartLoader) else part for part in self.flattened]
        return CombinedLoader, (tree_unflatten(leaves, self._spec), self._mode)


class _Fetchers:
    """Fetches micro-batches of several loaders; implements `Fetches`.

    Args:
        parts: the loaders.
        order: of their samples.
        ahead: yields the places that this rank expects to need.
        structure: makes a batch of the loaders' batches.
    """

    def __init__(
        self, parts: Sequence[PartLoader], order: CombinedOrder, ahead: Ahead, structure: Callable[[list[Any]], Any]
    ) -> None:
        self._orders = [order.part(number) for number in range(len(parts))]
        self._fetchers = [
            part.fetcher(number, own, partial(_needed, own, ahead))
            for number, (part, own) in enumerate(zip(parts, self._orders, strict=True))
        ]
        self._structure = structure

    def get(self, place: Place) -> Any:
        pairs = zip(self._orders, self._fetchers, strict=True)
        return self._structure([fetcher.get(place) if own.has(place) else None for own, fetcher in pairs])

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
