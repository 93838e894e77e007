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

Workers that would add no reward stay spare. If minimums do not fit, see `unicron_lightning.planner.search.minimums`.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from unicron_lightning.planner.plan import Plan
from unicron_lightning.planner.quantum import move_price
from unicron_lightning.planner.search.exact import best_choices
from unicron_lightning.planner.search.minimums import must_pause
from unicron_lightning.planner.search.options import NOTHING, Column, column
from unicron_lightning.planner.search.variants import SearchProblem, Variant

if TYPE_CHECKING:
    from unicron_lightning.planner.state import ClusterState


def solve(state: ClusterState) -> Plan:
    """The best plan in ``state``."""
    paused = must_pause(state)
    columns = columns_of(state, paused, move_price(state))
    problem = SearchProblem.of(columns, state.num_workers // state.unit, [_around_pivot(state, columns)])
    (choice,) = best_choices(problem)
    workers = tuple((choice.units * state.unit).tolist())
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
