"""Prefix and suffix tables of a problem, and the plans in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from unicron_lightning.planner.search import dynamic_program
from unicron_lightning.planner.search.options import Columns
from unicron_lightning.planner.search.variants import Choice, SearchProblem

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Table:
    """Rows, one after another: row i of the prefix table covers the tasks before i, of the suffix table those from i.

    Attributes:
        lows: int64 [num_rows]: the first budget of each row's window.
        row_starts: int64 [num_rows + 1]: index of each row's first entry in ``values``.
        values: int64, the best sums of keys.
        found: int32, see `dynamic_program.trace`; pages of it that no plan touches take no memory.
    """

    lows: NDArray[np.int64] = field(repr=False)
    row_starts: NDArray[np.int64] = field(repr=False)
    values: NDArray[np.int64] = field(repr=False)
    found: NDArray[np.int32] = field(repr=False)

    def row(self, index: int) -> tuple[NDArray[np.int64], int]:
        """A row and its first budget."""
        return self.values[self.row_starts[index] : self.row_starts[index + 1]], int(self.lows[index])


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows:
    """Tables of the options that were chosen to enter them."""

    problem: SearchProblem = field(repr=False)
    core: Columns
    prefix: Table = field(repr=False)
    suffix: Table = field(repr=False)

    @classmethod
    def fill(cls, core: Columns, problem: SearchProblem) -> Rows:
        """Compute the rows that the variants need.

        Args:
            core: some options of each of the problem's columns, including those of at least one plan of each variant.
            problem: the problem.
        """
        count = problem.num_tasks
        least = core.units[core.starts[:-1]]
        most = core.units[core.starts[1:] - 1]
        last = max(variant.position for variant in problem.variants)
        first = min(variant.after for variant in problem.variants)
        windows = _Windows.of(problem, least, most)
        arrays = (core.starts, core.units, core.keys)
        prefix = _table(*windows.prefix(last), row=0)
        dynamic_program.fill(*arrays, 0, last, prefix.lows, prefix.row_starts, prefix.values)
        suffix = _table(*windows.suffix(first), row=count)
        dynamic_program.fill(*arrays, count, first, suffix.lows, suffix.row_starts, suffix.values)
        return cls(problem=problem, core=core, prefix=prefix, suffix=suffix)

    def best(self, index: int) -> tuple[int, int, int]:
        """For variant ``index``: the best sum of keys, its own option, and the budget of the tasks before it."""
        variant = self.problem.variants[index]
        units, keys = self._own(index)
        found: tuple[int, int, int] = dynamic_program.combine(
            *self.prefix.row(variant.position), *self.suffix.row(variant.after), units, keys, self.problem.num_units
        )
        assert found[1] >= 0, "no plan is feasible"
        return found

    def choice(self, index: int, key: int, option: int, budget: int) -> Choice:
        """The plan behind a result of `best`."""
        variant, count = self.problem.variants[index], self.problem.num_tasks
        own = int(self._own(index)[0][option])
        chosen = np.zeros(count, dtype=np.int64)
        arrays = (self.core.starts, self.core.units, self.core.keys)
        table = self.prefix
        rows = (table.lows, table.row_starts, table.values)
        used = dynamic_program.trace(*arrays, variant.position, 0, budget, *rows, table.found, chosen)
        assert used >= 0, "the prefix table does not contain its own plan"
        left = self.problem.num_units - own - used
        table = self.suffix
        rows = (table.lows, table.row_starts, table.values)
        rest = dynamic_program.trace(*arrays, variant.after, count, left, *rows, table.found, chosen)
        assert rest >= 0, "the suffix table does not contain its own plan"
        if variant.replaces:
            chosen[variant.position] = own
        return Choice(key=key, units=chosen, own_units=own)

    def _own(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Units and keys of a variant's own options."""
        column = self.problem.num_tasks + index
        options = slice(self.core.starts[column], self.core.starts[column + 1])
        return self.core.units[options], self.core.keys[options]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Windows:
    """Relevant budgets of each row, from the fewest and most units of each task."""

    num_units: int
    least: NDArray[np.int64]
    """int64 [num_tasks + 1]: fewest units of all tasks before i, by options in the core."""
    most: NDArray[np.int64]
    positions: NDArray[np.int64]
    """int64 [num_variants]."""
    afters: NDArray[np.int64]
    own_least: NDArray[np.int64]
    """int64 [num_variants]: fewest units of the variant's own column."""
    own_most: NDArray[np.int64]

    @classmethod
    def of(cls, problem: SearchProblem, least: NDArray[np.int64], most: NDArray[np.int64]) -> _Windows:
        count = problem.num_tasks
        zero = np.zeros(1, dtype=np.int64)
        return cls(
            num_units=problem.num_units,
            least=np.concatenate([zero, np.cumsum(least[:count])]),
            most=np.concatenate([zero, np.cumsum(most[:count])]),
            positions=np.array([variant.position for variant in problem.variants]),
            afters=np.array([variant.after for variant in problem.variants]),
            own_least=least[count:],
            own_most=most[count:],
        )

    def prefix(self, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lowest and highest budget of the rows 0 to ``last``."""
        # The units of all tasks after row i are the total less those before it; a variant's own column replaces
        # another.
        extra_least = self.own_least - (self.least[self.afters] - self.least[self.positions])
        extra_most = self.own_most - (self.most[self.afters] - self.most[self.positions])
        order = np.argsort(self.positions, kind="stable")
        where = np.searchsorted(self.positions[order], np.arange(last + 1))
        smallest = np.minimum.accumulate(extra_least[order][::-1])[::-1][where]
        largest = np.maximum.accumulate(extra_most[order][::-1])[::-1][where]
        before_least, before_most = self.least[: last + 1], self.most[: last + 1]
        rest_least = self.least[-1] - before_least + smallest
        rest_most = self.most[-1] - before_most + largest
        return self._clipped(before_least, before_most, rest_least, rest_most)

    def suffix(self, first: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lowest and highest budget of all rows; those before ``first`` are not used."""
        extra_least = self.own_least - (self.least[self.afters] - self.least[self.positions])
        extra_most = self.own_most - (self.most[self.afters] - self.most[self.positions])
        order = np.argsort(self.afters, kind="stable")
        where = np.searchsorted(self.afters[order], np.arange(len(self.least)), side="right") - 1
        where = np.maximum(where, 0)
        smallest = np.minimum.accumulate(extra_least[order])[where]
        largest = np.maximum.accumulate(extra_most[order])[where]
        after_least, after_most = self.least[-1] - self.least, self.most[-1] - self.most
        lows, highs = self._clipped(after_least, after_most, self.least + smallest, self.most + largest)
        highs[:first] = lows[:first]
        return lows, highs

    def _clipped(
        self,
        least: NDArray[np.int64],
        most: NDArray[np.int64],
        rest_least: NDArray[np.int64],
        rest_most: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The window of rows whose tasks take ``least`` to ``most`` units, and all other tasks the rest."""
        highs = np.minimum(most, self.num_units - rest_least)
        return np.minimum(np.maximum(least, self.num_units - rest_most), highs), highs


def _table(lows: NDArray[np.int64], highs: NDArray[np.int64], row: int) -> Table:
    """An empty table with these windows, except for ``row``, the one without tasks, whose value is 0."""
    row_starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(highs - lows + 1)])
    values = np.empty(int(row_starts[-1]), dtype=np.int64)
    values[row_starts[row] : row_starts[row + 1]] = 0
    found = np.zeros(len(values), dtype=np.int32)
    return Table(lows=lows, row_starts=row_starts, values=values, found=found)
