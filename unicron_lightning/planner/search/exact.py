"""The exact search: the best choice of one option per task, for several variants of one problem at once.

A *variant* changes one column: it replaces a task's options, removes a task or inserts one. All variants share the
prefix and the suffix table of the other columns; each then needs one combination of a prefix row, its own column and a
suffix row instead of a solution of its own.

Only options that can be in a best plan of some variant enter the tables. With any price p >= 0 per unit, a plan with
keys g_i and units k_i, at most N, has

    sum g_i  <=  p N + sum max_k (g_i(k) - p k)  -  sum r_i(k_i),    r_i(k) = max_k' (g_i(k') - p k') - (g_i(k) - p k)

An option whose reduced cost r_i(k) exceeds the distance between the bound and a known plan is in no plan that is as
good (Lagrangian relaxation; Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", European Journal
of Operational Research 83, 1995, removes options in this way). All variants share one price, that at which the tasks
take about N units. The first tables use a guess of the distance. The resulting plans bound it; if the guess was too
small, the tables are made again with the bound. Ties are never removed. Everything is exact in 64-bit integers.

**Options** of each task are columns of integers: numbers of units, and the key of each. Option (i, k) gives task i k
units. All options of all tasks are in one array, task by task, k rising; ``starts`` holds the index of each task's
first option.

**Minimums** of tasks that may not be paused need not fit together. Tasks that may not be paused then have priority, by
weighted value: among all subsets whose minimums fit, the one with the largest sum of F(t, minimum) runs, and among
equal ones the one with more running tasks. The remaining tasks of this kind are paused. All other workers are allocated
by reward to the tasks that run or may be paused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from unicron_lightning.planner.search import dynamic_program
from unicron_lightning.planner.search.dynamic_program import compilable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from unicron_lightning.planner.arrays import FloatArray, IntArray
    from unicron_lightning.planner.reward import Curve
    from unicron_lightning.planner.state import ClusterState


STICKY = 0.75
"""Largest difference, in quanta, between successive increments of F * D that are rounded to the same number."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Column:
    """One task's options.

    Attributes:
        units: int64, rising: k of each option.
        keys: int64, the key of each.
    """

    units: IntArray = field(repr=False)
    keys: IntArray = field(repr=False)


NOTHING = Column(units=np.zeros(1, dtype=np.int64), keys=np.zeros(1, dtype=np.int64))
"""The column of an absent task."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The options of several tasks, one after another.

    Attributes:
        starts: int64 [num_tasks + 1].
        units: int64 [num_options].
        keys: int64 [num_options].
    """

    starts: IntArray = field(repr=False)
    units: IntArray = field(repr=False)
    keys: IntArray = field(repr=False)

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

    def column(self, index: int) -> Column:
        """One task's options."""
        options = slice(self.starts[index], self.starts[index + 1])
        return Column(units=self.units[options], keys=self.keys[options])

    def chosen(self, mask: NDArray[np.bool_]) -> Columns:
        """The options selected by ``mask``."""
        counts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(mask)])
        return Columns(starts=counts[self.starts], units=self.units[mask], keys=self.keys[mask])


def column(state: ClusterState, curve: Curve, *, price: int, paused: bool) -> Column:
    """The options of one task in ``state``.

    Args:
        state: the situation.
        curve: the task's curve.
        price: c, see `unicron_lightning.planner.state`.
        paused: whether the task has to be paused, so that zero workers are its only option.
    """
    dynamic_program.prepare(len(state.tasks) * (state.num_workers // state.unit))
    name = curve.task.name
    before, lost = state.allocation.get(name, 0), state.lost.get(name, 0)
    task, waf = curve.task, curve.waf_at(before)
    cost = round(waf * task.transition_seconds / state.quantum_flop)
    cost_elsewhere = round(waf * task.longest_seconds / state.quantum_flop)
    count = 0 if paused else int(np.searchsorted(curve.workers, state.num_workers, side="right"))
    units, keys = keys_of(
        curve.workers[:count],
        curve.waf[:count],
        curve.layouts[:count],
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
    return Column(units=units, keys=keys)


@compilable
def keys_of(
    workers: IntArray,
    waf: FloatArray,
    layouts: IntArray,
    scale: float,
    cost: int,
    before: int,
    left: int,
    unit: int,
    price: int,
    may_pause: bool,
    layout: int,
    cost_elsewhere: int,
) -> tuple[IntArray, IntArray]:
    """Units and key of each option of a task.

    Args:
        workers: int64 [n], rising.
        waf: float64 [n], F at each number of workers.
        layouts: int64 [n], a number for TP x PP of each, 0 if unknown; or empty if it is of no concern.
        scale: D_running / quantum.
        cost: F(t,x) * D_transition in quanta.
        before: x, the number of workers that is kept without cost; -1 if the task is affected.
        left: number of workers that the task still has.
        unit: workers per unit.
        price: quanta that a moved unit costs.
        may_pause: whether zero workers are an option.
        layout: a number for TP x PP of the task's x workers; 0 if unknown.
        cost_elsewhere: ``cost`` of a change into another TP x PP.
    """
    first = 1 if may_pause else 0
    units = np.zeros(first + len(workers), dtype=np.int64)
    keys = np.zeros(first + len(workers), dtype=np.int64)
    if may_pause:
        keys[0] = -price * ((left + unit - 1) // unit) - (cost if before != 0 else 0)
    value = 0
    increment = 0
    reached = 0.0
    for n in range(len(workers)):
        exact = waf[n] * scale
        step = exact - reached
        # Repeating the increment keeps a straight line straight and a concave curve concave.
        if n == 0 or abs(step - increment) > STICKY:
            increment = int(np.rint(step))
        reached = exact
        value += increment
        moved = abs(workers[n] - left)
        units[first + n] = workers[n] // unit
        gain = value - (cost if workers[n] != before else 0)
        if layout != 0 and len(layouts) > 0 and layouts[n] != 0 and layouts[n] != layout:
            gain = value - cost_elsewhere
        keys[first + n] = gain - price * ((moved + unit - 1) // unit)
    return units, keys


_FEW_OPTIONS = 24
"""Options per task in the first tables, which use a guessed limit."""

MANY_OPTIONS = 4 * _FEW_OPTIONS
"""Options per task in the second tables beyond which the variants that need them are solved alone."""

_MOST_PRICES = 64
"""Number of prices that are tried; about ten are usual."""


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
class SearchProblem:
    """Columns and units, with the columns of all variants after those of the tasks.

    Attributes:
        columns: one for each task, then one for each variant.
        num_tasks: number of the tasks' columns.
        num_units: N.
        variants: each with its own column.
        free_units: units beyond the minimums, in the variant that leaves most.
    """

    columns: Columns
    num_tasks: int
    num_units: int
    variants: tuple[Variant, ...] = field(repr=False)
    free_units: int

    @classmethod
    def of(cls, columns: Sequence[Column], num_units: int, variants: Sequence[Variant]) -> SearchProblem:
        """Build the problem without options that leave too little for the minimums of the others."""
        everything = [*columns, *(variant.column for variant in variants)]
        needs = _totals(np.array([column.units[0] for column in everything]), len(columns), variants)
        if max(needs) > num_units:
            raise AssertionError(f"minimums of {max(needs)} units on {num_units}: a task should have been paused")
        free = num_units - min(needs)
        joined = Columns.join([_up_to(column, int(column.units[0]) + free) for column in everything])
        return cls(
            columns=joined,
            num_tasks=len(columns),
            num_units=num_units,
            variants=tuple(variants),
            free_units=free,
        )

    def alone(self, index: int) -> SearchProblem:
        """The problem of one variant, which is priced with its own column if that replaces another."""
        variant, columns = self.variants[index], [self.columns.column(at) for at in range(self.num_tasks)]
        if variant.replaces:
            columns[variant.position] = variant.column
        return SearchProblem.of(columns, self.num_units, [variant])

    def totals(self, each: IntArray) -> list[int]:
        """For each variant the sum of a number of each column, over the tasks' columns that it keeps and its own."""
        return _totals(each, self.num_tasks, self.variants)


def best_choices(problem: SearchProblem) -> list[tuple[int, IntArray]]:
    """The best plan of each variant; ties are broken as described in `unicron_lightning.planner.solver`.

    Returns:
        The sum of keys, and the units of each of the problem's tasks, int64 [num_tasks]; a replaced one has the
        variant's.
    """
    reduced, bounds = reduced_costs(problem)
    limit = _guess(problem, reduced)
    while True:
        rows = Rows.fill(_core(problem, reduced, limit), problem)
        found = [rows.best(index) for index in range(len(problem.variants))]
        distance = max(bound - top for bound, (top, _, _) in zip(bounds, found, strict=True))
        if limit >= distance:
            return [(best[0], rows.units(index, *best[1:])) for index, best in enumerate(found)]
        if len(problem.variants) > 1 and np.count_nonzero(reduced <= distance) > MANY_OPTIONS * len(problem.columns):
            # The price is a bad one for some variants: these have their own.
            far = [bound - top > limit for bound, (top, _, _) in zip(bounds, found, strict=True)]
            return [
                best_choices(problem.alone(index))[0] if own else (best[0], rows.units(index, *best[1:]))
                for index, (own, best) in enumerate(zip(far, found, strict=True))
            ]
        limit = distance


def reduced_costs(problem: SearchProblem) -> tuple[IntArray, list[int]]:
    """The reduced cost of each option, and each variant's upper bound on the sum of keys."""
    columns = problem.columns
    first, counts = columns.starts[:-1], np.diff(columns.starts)
    # Units beyond the column's minimum, so that products with the price stay within 64 bits.
    units = columns.units - np.repeat(columns.units[first], counts)
    least, num = columns.units[first], columns.starts[problem.num_tasks]
    tasks = Columns(starts=columns.starts[: problem.num_tasks + 1], units=units[:num], keys=columns.keys[:num])
    price = _price(tasks, problem.num_units - int(least[: problem.num_tasks].sum()), problem.free_units)
    worth = columns.keys - price * units
    best = np.maximum.reduceat(worth, first)
    free = [problem.num_units - taken for taken in problem.totals(least)]
    bounds = [price * left + top for left, top in zip(free, problem.totals(best), strict=True)]
    return np.repeat(best, counts) - worth, bounds


def price_of(columns: Sequence[Column], num_units: int) -> int:
    """The price at which the tasks of some columns take about a number of units; 0 if there are enough for all."""
    least = [int(column.units[0]) for column in columns]
    joined = Columns.join([Column(units=c.units - k, keys=c.keys) for c, k in zip(columns, least, strict=True)])
    return _price(joined, num_units - sum(least), int(joined.units.max(initial=0)))


def _price(tasks: Columns, num_units: int, most_units: int) -> int:
    """The price at which some tasks take about a number of units; 0 if there are enough for all.

    Any price gives valid bounds; a good one gives close bounds. Two choices of all tasks bracket the number. The next
    price is the slope between them: either a choice between the two is better at it, or both are best. A column's best
    option at a price in between is between those of the two choices, so that most columns are soon settled.

    Args:
        tasks: their options, with units beyond each task's least.
        num_units: units to share.
        most_units: the largest number of units of an option.
    """
    price = 0
    fewer, more = (0, sum(tasks.keys[tasks.starts[:-1]].tolist())), None
    for _ in range(_MOST_PRICES if len(tasks) else 0):
        at = _best_options(tasks, price)
        found = int(tasks.units[at].sum()), sum(tasks.keys[at].tolist())
        too_many = found[0] > max(0, num_units)
        if found[0] in (fewer[0], more and more[0]) or not (more or too_many):
            break
        fewer, more = (fewer, found) if too_many else (found, more)
        assert more is not None
        price = min((1 << 61) // (most_units + 1), (more[1] - fewer[1]) // (more[0] - fewer[0]))
        ends, options = np.repeat(at, np.diff(tasks.starts)), np.arange(len(tasks.units))
        tasks = tasks.chosen(options <= ends if too_many else options >= ends)
    return price


def _best_options(columns: Columns, price: int) -> IntArray:
    """Each column's option that is worth most at a price; of equal ones that with fewest units."""
    worth = columns.keys - price * columns.units
    best = np.repeat(np.maximum.reduceat(worth, columns.starts[:-1]), np.diff(columns.starts))
    found = np.flatnonzero(worth == best)
    return found[np.searchsorted(found, columns.starts[:-1])]


def _guess(problem: SearchProblem, reduced: IntArray) -> int:
    """A limit on reduced costs that leaves few options, unless more are equally good."""
    few = _FEW_OPTIONS * len(problem.columns) + 64
    return int(np.partition(reduced, few)[few]) if few < len(reduced) else int(reduced.max(initial=0))


def _core(problem: SearchProblem, reduced: IntArray, limit: int) -> Columns:
    """The options within the limit; and each column's least, so that every variant has a plan."""
    mask = reduced <= limit
    mask[problem.columns.starts[:-1]] = True
    return problem.columns.chosen(mask)


def _totals(each: IntArray, num_tasks: int, variants: Sequence[Variant]) -> list[int]:
    numbers: list[int] = each.tolist()
    everyone, own = sum(numbers[:num_tasks]), numbers[num_tasks:]
    return [everyone - (numbers[v.position] if v.replaces else 0) + mine for v, mine in zip(variants, own, strict=True)]


def _up_to(column: Column, most_units: int) -> Column:
    if column.units[-1] <= most_units:
        return column
    count = int(np.searchsorted(column.units, most_units, side="right"))
    return Column(units=column.units[:count], keys=column.keys[:count])


@dataclass(frozen=True, eq=False, kw_only=True)
class Table:
    """Rows, one after another: row i of the prefix table covers the tasks before i, of the suffix table those from i.

    Attributes:
        lows: int64 [num_rows]: the first budget of each row's window.
        row_starts: int64 [num_rows + 1]: index of each row's first entry in ``values``.
        values: int64, the best sums of keys.
        found: int32, see `dynamic_program.trace`; pages of it that no plan touches take no memory.
    """

    lows: IntArray = field(repr=False)
    row_starts: IntArray = field(repr=False)
    values: IntArray = field(repr=False)
    found: NDArray[np.int32] = field(repr=False)

    @classmethod
    def fill(cls, core: Columns, windows: tuple[IntArray, IntArray], first: int, last: int) -> Table:
        """Compute the rows from ``first``, the one without tasks, to ``last``.

        Args:
            core: the options.
            windows: lowest and highest budget of each row; rows that are not computed have one entry.
            first: the first row.
            last: the last row.
        """
        lows, highs = windows[0], windows[1].copy()
        highs[: min(first, last)] = lows[: min(first, last)]
        highs[max(first, last) + 1 :] = lows[max(first, last) + 1 :]
        row_starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(highs - lows + 1)])
        values = np.empty(int(row_starts[-1]), dtype=np.int64)
        values[row_starts[first] : row_starts[first + 1]] = 0
        dynamic_program.fill(core.starts, core.units, core.keys, first, last, lows, row_starts, values)
        return cls(lows=lows, row_starts=row_starts, values=values, found=np.zeros(len(values), dtype=np.int32))

    def row(self, index: int) -> tuple[IntArray, int]:
        """A row and its first budget."""
        return self.values[self.row_starts[index] : self.row_starts[index + 1]], int(self.lows[index])

    def trace(self, core: Columns, row: int, last: int, budget: int, chosen: IntArray) -> int:
        """Write the units of the tasks between ``row`` and ``last`` behind a value to ``chosen``; return their sum."""
        arrays = (core.starts, core.units, core.keys)
        rows = (self.lows, self.row_starts, self.values)
        used = dynamic_program.trace(*arrays, row, last, budget, *rows, self.found, chosen)
        assert used >= 0, "the table does not contain its own plan"
        return used


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
        count, zero = problem.num_tasks, np.zeros(1, dtype=np.int64)
        least, most = core.units[core.starts[:-1]], core.units[core.starts[1:] - 1]
        fewest, most_of_all = min(problem.totals(least)), max(problem.totals(most))
        before = np.concatenate([zero, np.cumsum(least[:count])]), np.concatenate([zero, np.cumsum(most[:count])])
        after = before[0][-1] - before[0], before[1][-1] - before[1]

        def windows(tasks: tuple[IntArray, ...]) -> tuple[IntArray, IntArray]:
            """Budgets that matter if the tasks of a row take their least to their most units, all others the rest."""
            highs = np.minimum(tasks[1], problem.num_units - (fewest - tasks[0]))
            return np.minimum(np.maximum(tasks[0], problem.num_units - (most_of_all - tasks[1])), highs), highs

        last = max(variant.position for variant in problem.variants)
        first = min(variant.after for variant in problem.variants)
        return cls(
            problem=problem,
            core=core,
            prefix=Table.fill(core, windows(before), 0, last),
            suffix=Table.fill(core, windows(after), count, first),
        )

    def best(self, index: int) -> tuple[int, int, int]:
        """For variant ``index``: the best sum of keys, its own option, and the budget of the tasks before it."""
        variant = self.problem.variants[index]
        units, keys = self._own(index)
        found: tuple[int, int, int] = dynamic_program.combine(
            *self.prefix.row(variant.position), *self.suffix.row(variant.after), units, keys, self.problem.num_units
        )
        assert found[1] >= 0, "no plan is feasible"
        return found

    def units(self, index: int, option: int, budget: int) -> IntArray:
        """The units of each task behind a result of `best`."""
        variant, count = self.problem.variants[index], self.problem.num_tasks
        own = int(self._own(index)[0][option])
        chosen = np.zeros(count, dtype=np.int64)
        used = self.prefix.trace(self.core, variant.position, 0, budget, chosen)
        self.suffix.trace(self.core, variant.after, count, self.problem.num_units - own - used, chosen)
        if variant.replaces:
            chosen[variant.position] = own
        return chosen

    def _own(self, index: int) -> tuple[IntArray, IntArray]:
        """Units and keys of a variant's own options."""
        column = self.problem.num_tasks + index
        options = slice(self.core.starts[column], self.core.starts[column + 1])
        return self.core.units[options], self.core.keys[options]


VALUE_BITS = 44
"""Number of bits to which F is rounded, relative to the power of two above the sum of all."""


def must_pause(state: ClusterState) -> tuple[str, ...]:
    """Names of the tasks that have to be paused although they may not be, in order; empty if the minimums fit."""
    bound = [curve for curve in state.tasks if not curve.task.terms.may_pause]
    able = [curve for curve in bound if len(curve.workers) and curve.workers[0] <= state.num_workers]
    num_units = state.num_workers // state.unit
    if sum(int(curve.workers[0]) // state.unit for curve in able) > num_units:
        able = _best_subset(state, able, num_units)
    kept = {curve.task.name for curve in able}
    return tuple(curve.task.name for curve in bound if curve.task.name not in kept)


def _best_subset(state: ClusterState, curves: list[Curve], num_units: int) -> list[Curve]:
    """Solve a knapsack: the curves with the largest sum of F at their minimums."""
    # A power of two, so that rounding keeps equal sums of short values equal.
    _, exponent = math.frexp(math.fsum(float(curve.waf[0]) for curve in curves))
    columns = []
    for curve in curves:
        value = round(math.ldexp(float(curve.waf[0]), VALUE_BITS - exponent)) * (len(curves) + 1)
        key = value + (state.allocation.get(curve.task.name, 0) > 0)
        units = np.array([0, int(curve.workers[0]) // state.unit], dtype=np.int64)
        columns.append(Column(units=units, keys=np.array([0, key], dtype=np.int64)))
    end = Variant(position=len(columns), replaces=False, column=NOTHING)
    ((_, chosen),) = best_choices(SearchProblem.of(columns, num_units, [end]))
    return [curve for curve, units in zip(curves, chosen, strict=True) if units]
