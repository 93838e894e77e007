"""The options of each task as columns of integers: numbers of units, and the key of each.

Option (i, k) gives task i k units. All options of all tasks are in one array, task by task, k rising; ``starts`` holds
the index of each task's first option.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from unicron_lightning.planner.reward import Curve
from unicron_lightning.planner.search import compiler, kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from unicron_lightning.planner.state import ClusterState


@dataclass(frozen=True, eq=False, kw_only=True)
class Column:
    """One task's options.

    Attributes:
        units: int64, rising: k of each option.
        keys: int64, the key of each.
        contents: all that the options were computed from, in parts; empty if they were not made by `column`.
    """

    units: NDArray[np.int64] = field(repr=False)
    keys: NDArray[np.int64] = field(repr=False)
    contents: tuple[object, ...] = field(default=(), repr=False)

    @cached_property
    def digest(self) -> bytes:
        """Digest of the contents, computed only where plans for many events are compared; b"" without contents."""
        if not self.contents:
            return b""
        parts = [part.digest if isinstance(part, Curve) else repr(part).encode() for part in self.contents]
        return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


NOTHING = Column(units=np.zeros(1, dtype=np.int64), keys=np.zeros(1, dtype=np.int64), contents=("nothing",))
"""The column of an absent task."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The options of several tasks, one after another.

    Attributes:
        starts: int64 [num_tasks + 1].
        units: int64 [num_options].
        keys: int64 [num_options].
    """

    starts: NDArray[np.int64] = field(repr=False)
    units: NDArray[np.int64] = field(repr=False)
    keys: NDArray[np.int64] = field(repr=False)

    @classmethod
    def join(cls, columns: list[Column]) -> Columns:
        """Concatenate columns."""
        starts = np.cumsum([0, *(len(column.units) for column in columns)], dtype=np.int64)
        none = [NOTHING.units[:0]]
        return cls(
            starts=starts,
            units=np.concatenate([column.units for column in columns] or none),
            keys=np.concatenate([column.keys for column in columns] or none),
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    def chosen(self, mask: NDArray[np.bool_]) -> Columns:
        """The options selected by ``mask``."""
        counts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(mask)])
        return Columns(starts=counts[self.starts], units=self.units[mask], keys=self.keys[mask])


def column(state: ClusterState, curve: Curve, *, price: int, paused: bool) -> Column:
    """The options of one task in ``state``.

    Args:
        state: the situation.
        curve: the task's curve.
        price: c, see `unicron_lightning.planner.quantum`.
        paused: whether the task has to be paused, so that zero workers are its only option.
    """
    compiler.prepare(len(state.tasks) * (state.num_workers // state.unit))
    name = curve.task.name
    before, lost = state.allocation.get(name, 0), state.lost.get(name, 0)
    task, waf = curve.task, curve.waf_at(before)
    cost = round(waf * task.transition_seconds / state.quantum_flop)
    cost_elsewhere = round(waf * task.longest_seconds / state.quantum_flop)
    count = 0 if paused else int(np.searchsorted(curve.workers, state.num_workers, side="right"))
    numbers = (
        state.duration_seconds / state.quantum_flop,
        cost,
        -1 if name in state.lost else before,
        before - lost,
        state.unit,
        price,
        task.terms.may_pause or paused,
        task.layout(before),
        cost_elsewhere,
    )
    units, keys = kernels.keys_of(curve.workers[:count], curve.waf[:count], curve.layouts[:count], *numbers)
    return Column(units=units, keys=keys, contents=(count, numbers, curve))
