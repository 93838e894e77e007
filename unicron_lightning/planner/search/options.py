"""The options of each task as columns of integers: numbers of units, and the key of each.

Option (i, k) gives task i k units. All options of all tasks are in one array, task by task, k rising; ``starts`` holds
the index of each task's first option.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from unicron_lightning.planner.search import compiler
from unicron_lightning.planner.search.compiler import compilable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from unicron_lightning.planner.reward import Curve
    from unicron_lightning.planner.state import ClusterState

    Ints = NDArray[np.int64]

STICKY = 0.75
"""Largest difference, in quanta, between successive increments of F * D that are rounded to the same number."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Column:
    """One task's options.

    Attributes:
        units: int64, rising: k of each option.
        keys: int64, the key of each.
    """

    units: NDArray[np.int64] = field(repr=False)
    keys: NDArray[np.int64] = field(repr=False)


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
    workers: Ints,
    waf: NDArray[np.float64],
    layouts: Ints,
    scale: float,
    cost: int,
    before: int,
    left: int,
    unit: int,
    price: int,
    may_pause: bool,
    layout: int,
    cost_elsewhere: int,
) -> tuple[Ints, Ints]:
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
