"""Input and output of the search: columns, units, and variants that differ in one column."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from unicron_lightning.planner.search import kernels
from unicron_lightning.planner.search.options import Column, Columns

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Variant:
    """One changed column.

    Attributes:
        position: the tasks before it are the columns [0, position).
        replaces: whether it replaces the column at ``position`` or is inserted before it.
        column: its options.
    """

    position: int
    replaces: bool
    column: Column = field(repr=False)

    @property
    def after(self) -> int:
        """The tasks after it are the columns from here on."""
        return self.position + self.replaces


@dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
    """The best plan of a variant.

    Attributes:
        key: the sum of keys.
        units: int64 [num_tasks]: units of every column, where a replaced one has the variant's.
        own_units: units of the variant's column.
    """

    key: int
    units: NDArray[np.int64] = field(repr=False)
    own_units: int


@dataclass(frozen=True, eq=False, kw_only=True)
class SearchProblem:
    """Columns and units, with the columns of all variants after those of the tasks.

    Attributes:
        columns: one for each task, then one for each variant.
        num_tasks: number of the tasks' columns.
        num_units: N.
        variants: each with its own column.
        hull_starts: see `kernels.hulls`.
        vertices: see `kernels.hulls`.
    """

    columns: Columns
    num_tasks: int
    num_units: int
    variants: tuple[Variant, ...] = field(repr=False)
    hull_starts: NDArray[np.int64] = field(repr=False)
    vertices: NDArray[np.int64] = field(repr=False)
    free_units: int

    @classmethod
    def of(cls, columns: Sequence[Column], num_units: int, variants: Sequence[Variant]) -> SearchProblem:
        """Build the problem without options that leave too little for the minimums of the others."""
        everything = [*columns, *(variant.column for variant in variants)]
        least = sum(int(column.units[0]) for column in columns)
        needs = [
            least - (int(columns[v.position].units[0]) if v.replaces else 0) + int(v.column.units[0]) for v in variants
        ]
        if max(needs) > num_units:
            raise AssertionError(f"minimums of {max(needs)} units on {num_units}: a task should have been paused")
        free = num_units - min(needs)
        joined = Columns.join([_up_to(column, int(column.units[0]) + free) for column in everything])
        hull_starts, vertices = kernels.hulls(joined.starts, joined.units, joined.keys)
        return cls(
            columns=joined,
            num_tasks=len(columns),
            num_units=num_units,
            variants=tuple(variants),
            hull_starts=hull_starts,
            vertices=vertices,
            free_units=free,
        )

    def chosen(self, mask: NDArray[np.bool_]) -> SearchProblem:
        """The problem with the options selected by ``mask`` alone."""
        columns = self.columns.chosen(mask)
        hull_starts, vertices = kernels.hulls(columns.starts, columns.units, columns.keys)
        return dataclasses.replace(self, columns=columns, hull_starts=hull_starts, vertices=vertices)

    def skipped(self, index: int) -> int:
        """The column that variant ``index`` replaces, -1 if none."""
        variant = self.variants[index]
        return variant.position if variant.replaces else -1


def _up_to(column: Column, most_units: int) -> Column:
    if column.units[-1] <= most_units:
        return column
    count = int(np.searchsorted(column.units, most_units, side="right"))
    return Column(units=column.units[:count], keys=column.keys[:count])
