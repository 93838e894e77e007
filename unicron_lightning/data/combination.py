"""Several loaders of training data: which batches of them are a micro-batch.

Micro-batches of an epoch are numbered over the devices of the declared world, round after round, like the batches of
each loader. Under Lightning's ``ddp`` device ``d`` gets in round ``r`` its ``r``-th batch of each loader. So
micro-batch ``n = r x W + d`` has batch ``n`` of each loader that still has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from unicron_lightning.data.fetch import Place
from unicron_lightning.data.order import DataOrder, EpochOrder, StepShape
from unicron_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Combination:
    """The micro-batches of an epoch, by `CombinedLoader`'s modes.

    Attributes:
        mode: ``min_size`` ends with the shortest loader; ``max_size`` with the longest, the others have none by then;
            ``max_size_cycle`` with the longest, the others begin again.
        sizes: number of batches of each loader in an epoch, over all devices.
        most: largest number of micro-batches that Lightning's limits allow.
    """

    mode: str
    sizes: tuple[int, ...]
    most: float

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches in an epoch."""
        if self.mode != "max_size" and 0 in self.sizes:
            return 0
        return int(min(self.most, number_of(self.mode, self.sizes)))

    def batches(self, number: int) -> list[int | None]:
        """Return the batch of each loader in a micro-batch; None: the loader has ended."""
        if self.mode == "max_size_cycle":
            return [number % size for size in self.sizes]
        return [number if number < size else None for size in self.sizes]


def number_of(mode: str, numbers: Sequence[float]) -> float:
    """Return the number of combined batches of loaders that have so many."""
    return min(numbers) if mode == "min_size" else max(numbers)


class CombinedOrder(EpochOrder):
    """The order of the samples of several loaders; implements `Numbered`.

    Args:
        orders: of each loader, in rounds over the declared devices.
        combination: of their batches.
        shape: of the steps.

    Attributes:
        shape: of the steps.
        varies: False, as all epochs have the same number of micro-batches.
    """

    varies = False

    def __init__(self, orders: Sequence[DataOrder], combination: Combination, shape: StepShape) -> None:
        self._orders = orders
        self._combination = combination
        self.shape = shape

    def num_micro_batches(self, epoch: int) -> int:
        """Micro-batches of an epoch.

        Raises:
            ConfigError: a loader has another number of batches than in the first epoch.
        """
        for loader, order in enumerate(self._orders):
            found, first = order.num_micro_batches(epoch), self._combination.sizes[loader]
            if found != first:
                raise ConfigError(
                    f"the batch sampler of loader {loader} yields {found} batches in epoch {epoch} and {first} in the "
                    "first one: of several loaders that are read at once, each has the same number in all epochs"
                )
        return self._combination.num_micro_batches

    def indices(self, epoch: int, step: int, micro_batch: int) -> list[Any]:
        """Return pairs of loader and data set index."""
        parts = range(len(self._orders))
        place = epoch, step, micro_batch
        return [(part, index) for part in parts for index in self.part(part).indices(*place)]

    def part(self, loader: int) -> PartOrder:
        """Return the order of one of the loaders."""
        return PartOrder(self._orders[loader], partial(self._batch, loader))

    def _batch(self, loader: int, epoch: int, step: int, micro_batch: int) -> int | None:
        number = step * self.shape.of(epoch).micro_batches + micro_batch
        return self._combination.batches(number)[loader]


class PartOrder:
    """What one of several loaders has at the places of the combined micro-batches.

    Args:
        order: of the loader.
        batch: returns the number of its batch in a micro-batch, given epoch, step and number in the step.
    """

    def __init__(self, order: DataOrder, batch: partial[int | None]) -> None:
        self._order = order
        self._batch = batch

    def has(self, place: Place) -> bool:
        """Whether the loader has a batch in a micro-batch."""
        return self._batch(*place) is not None

    def indices(self, epoch: int, step: int, micro_batch: int) -> list[int]:
        """Return the data set indices; empty if the loader has no batch there."""
        batch = self._batch(epoch, step, micro_batch)
        return [] if batch is None else self._order.indices(*self._order.place(epoch, batch))
