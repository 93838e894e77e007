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

`explain` gives the cost of a little more for any task. The best plan in which a task has its next larger size is a
variant of the problem, with one option for that task; all of them share one pair of tables
(`unicron_lightning.planner.search.exact`).

Workers that would add no reward stay spare. If minimums do not fit, see `unicron_lightning.planner.search.minimums`.
"""

from __future__ import annotations

import bisect
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
    """The best plan in which one task has a larger size.

    Attributes:
        num_workers: the larger size.
        cost: difference of its value below the best plan's [FLOP]; never negative.
        plan: the plan.
    """

    num_workers: int
    cost: float
    plan: Plan


def explain(plan: Plan) -> dict[str, Alternative]:
    """Explain a plan made by the solver: for each task the best plan in which it has its next larger size, if any fits.

    `Plan.tasks` holds the marginal gains of each task by itself; here the other tasks make room.
    """
    state = plan.state
    columns = columns_of(state, plan.infeasible, move_price(state))
    room = state.num_workers // state.unit - sum(int(column.units[0]) for column in columns)
    larger: dict[str, int] = {}
    variants: list[Variant] = []
    for index, (options, x) in enumerate(zip(columns, plan.workers, strict=True)):
        size = neighbours(state, state.tasks[index], x)[1] or -1
        at = np.flatnonzero(options.units * state.unit == size)
        if at.size and int(options.units[at[0]] - options.units[0]) <= room:
            larger[plan.names[index]] = size
            own = Column(units=options.units[at], keys=options.keys[at])
            variants.append(Variant(position=index, replaces=True, column=own))
    choices = best_choices(SearchProblem.of(columns, state.num_workers // state.unit, variants)) if variants else []
    found = {}
    for (name, size), (_, units) in zip(larger.items(), choices, strict=True):
        workers = tuple((units * state.unit).tolist())
        other = Plan(state=state, names=plan.names, workers=workers, infeasible=plan.infeasible)
        # Rounding (`unicron_lightning.planner.quantum`) may place an equally good plan minimally above the best.
        found[name] = Alternative(num_workers=size, cost=max(0.0, plan.value - other.value), plan=other)
    return found
