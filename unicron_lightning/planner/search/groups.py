"""Several tasks as one: the column of a group whose tasks share a least and a most number of units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from unicron_lightning.planner.search import dynamic_program
from unicron_lightning.planner.search.exact import Column, Columns, Table

if TYPE_CHECKING:
    from unicron_lightning.planner.arrays import IntArray

_INTERPRETED_STEPS = 32
"""Steps of a group's table that take as long interpreted as planning one unit of one task."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Group:
    """The best sum of the members' keys with at most j units (a max-plus convolution of their columns), for every j.

    Attributes:
        members: their options.
        table: row i covers the members before i.
    """

    members: Columns
    table: Table = field(repr=False)

    @classmethod
    def of(cls, columns: Sequence[Column], most: int) -> Group:
        """Combine columns up to ``most`` units, at least the sum of their least."""
        members, zero = Columns.join(list(columns)), np.zeros(1, dtype=np.int64)
        dynamic_program.prepare(len(members.units) * most // _INTERPRETED_STEPS)
        least = np.concatenate([zero, np.cumsum(members.units[members.starts[:-1]])])
        highest = np.concatenate([zero, np.cumsum(members.units[members.starts[1:] - 1])])
        windows = least, np.maximum(least, np.minimum(highest, most))
        return cls(members=members, table=Table.fill(members, windows, 0, len(members)))

    @property
    def least(self) -> int:
        """The sum of the members' least units."""
        return self.table.row(len(self.members))[1]

    def usable(self, budget: int) -> int:
        """The fewest units with which the members reach the best that they can with at most ``budget``."""
        values, low = self.table.row(len(self.members))
        best = values[min(max(budget - low, 0), len(values) - 1)]
        return low + int(np.searchsorted(values, best))

    def column(self, fewest: int) -> Column:
        """The group's options from ``fewest`` units on: each number of units that is better than all below it."""
        values, low = self.table.row(len(self.members))
        better = np.flatnonzero(np.diff(values) > 0) + 1
        at = np.concatenate([np.array([fewest - low], dtype=np.int64), better[better > fewest - low]])
        return Column(units=at + low, keys=values[at])

    def units(self, budget: int) -> IntArray:
        """The units of each member, ``budget`` in all."""
        chosen = np.zeros(len(self.members), dtype=np.int64)
        self.table.trace(self.members, len(self.members), 0, budget, chosen)
        return chosen
