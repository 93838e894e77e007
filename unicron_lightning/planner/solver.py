"""The best plan: exact, for curves of any shape.

    maximise  sum_i G(t_i, x'_i)   subject to   sum_i x'_i <= n'              "Unicron", arXiv 2401.00134

Among plans of equal reward the one that moves fewest workers is chosen: the sum of abs(x' - x) where x counts the
workers that a task still has, in units, rounded up for each task. `unicron_lightning.planner.quantum` states the
differences of rewards that count as none.
Remaining ties are broken by names only, never by the order in which tasks are given:

1. the task of the last event (the state's ``pivot``) takes the fewest workers;
2. the tasks whose names come before the pivot's have the most reward and the fewest moved workers, as for all tasks;
3. each of these in turn, by descending name, takes the fewest workers;
4. each task after the pivot in turn, by ascending name, takes the most workers.

Without a pivot all tasks belong to 2.

`explain` gives the cost of a little more or less for any task. The best plan in which a task has its next larger or
next smaller size is a variant of the problem, with one option for that task; all of them share one pair of tables
(`unicron_lightning.planner.search.exact`).

Workers that would add no reward stay spare. If minimums do not fit, see `unicron_lightning.planner.search.minimums`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unicron_lightning.planner.plan import Plan, neighbours
from unicron_lightning.planner.quantum import move_price
from unicron_lightning.planner.search.exact import SearchProblem, Variant, best_choices
from unicron_lightning.planner.search.minimums import must_pause
from unicron_lightning.planner.search.options import NOTHING, Column, column

if TYPE_CHECKING:
    from unicron_lightning.planner.state import ClusterState


def solve(state: ClusterState) -> Plan:
    """The best plan in ``state``."""
    paused = must_pause(state)
    columns = columns_of(state, paused, move_price(state))
    problem = SearchProblem.of(columns, state.num_workers // state.unit, [_around_pivot(state, columns)])
    ((_, units),) = best_choices(problem)
    workers = tuple((units * state.unit).tolist())
    return Plan(state=state, names=state.names, workers=workers, infeasible=paused)


def columns_of(state: ClusterState, paused: tuple[str, ...], price: int) -> list[Column]:
    """The options of each task of ``state``.

    Args:
        state: the situation.
        paused: tasks that have to be paused.
        price: c, see `unicron_lightning.planner.quantum`.
    """
    return [column(state, curve, price=price, paused=curve.task.name in paused) for curve in state.tasks]


def _around_pivot(state: ClusterState, columns: list[Column]) -> Variant:
    """The problem itself as a variant, with its tables meeting at the pivot."""
    if state.pivot is None:
        return Variant(position=len(columns), replaces=False, column=NOTHING)
    position = bisect.bisect_left(state.names, state.pivot)
    if position < len(columns) and state.names[position] == state.pivot:
        return Variant(position=position, replaces=True, column=columns[position])
    return Variant(position=position, replaces=False, column=NOTHING)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The best plan in which one task has another size.

    Attributes:
        num_workers: the other size.
        cost: difference of its value below the best plan's [FLOP]; never negative.
        plan: the plan.
    """

    num_workers: int
    cost: float
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The reason for a task's size.

    Attributes:
        name: of the task.
        num_workers: its size in the best plan.
        fewer: the best plan with the task's next smaller size; None if no such size exists or no plan fits with it.
        more: the best plan with the task's next larger size; None in the same cases.
    """

    name: str
    num_workers: int
    fewer: Alternative | None
    more: Alternative | None


def explain(plan: Plan) -> tuple[Explanation, ...]:
    """Explain a plan made by the solver, task by task.

    `Plan.tasks` holds the marginal gains of each task by itself; here the other tasks make room or take freed workers.
    """
    state = plan.state
    columns = columns_of(state, plan.infeasible, move_price(state))
    sizes = [
        (index, size)
        for index, (curve, x) in enumerate(zip(state.tasks, plan.workers, strict=True))
        for size in neighbours(state, curve, x)
        if size is not None
    ]
    least = sum(int(column.units[0]) for column in columns)
    num_units = state.num_workers // state.unit
    wanted: list[tuple[int, int]] = []
    variants: list[Variant] = []
    for index, size in sizes:
        own = _only(columns[index], size // state.unit)
        if own is not None and least - int(columns[index].units[0]) + size // state.unit <= num_units:
            wanted.append((index, size))
            variants.append(Variant(position=index, replaces=True, column=own))
    choices = best_choices(SearchProblem.of(columns, num_units, variants)) if variants else []
    found = {pair: units for pair, (_, units) in zip(wanted, choices, strict=True)}
    return tuple(_explanation(plan, index, found) for index in range(len(plan.names)))


def _only(column: Column, units: int) -> Column | None:
    """The column with this option alone; None if the task does not have the option."""
    at = np.flatnonzero(column.units == units)
    return Column(units=column.units[at], keys=column.keys[at]) if at.size else None


def _explanation(plan: Plan, index: int, found: dict[tuple[int, int], np.typing.NDArray[np.int64]]) -> Explanation:
    state, x = plan.state, plan.workers[index]

    def alternative(size: int | None) -> Alternative | None:
        if size is None or (index, size) not in found:
            return None
        workers: Sequence[int] = (found[index, size] * state.unit).tolist()
        other = Plan(state=state, names=plan.names, workers=tuple(workers), infeasible=plan.infeasible)
        # Rounding (`unicron_lightning.planner.quantum`) may place an equally good plan minimally above the best.
        return Alternative(num_workers=size, cost=max(0.0, plan.value - other.value), plan=other)

    smaller, larger = neighbours(state, state.tasks[index], x)
    return Explanation(name=plan.names[index], num_workers=x, fewer=alternative(smaller), more=alternative(larger))
