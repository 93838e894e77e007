"""Explains why a plan is the best one, by the cost of giving any task a little more or less.

The best plan in which a task has its next larger or next smaller size is a variant of the problem, with one option for
that task; all of them share one pair of tables (`unicron_lightning.planner.search.exact`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unicron_lightning.planner.plan import Plan, neighbours
from unicron_lightning.planner.quantum import move_price
from unicron_lightning.planner.search.exact import best_choices
from unicron_lightning.planner.search.options import Column
from unicron_lightning.planner.search.variants import SearchProblem, Variant
from unicron_lightning.planner.solver import columns_of


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
    found = {pair: choice.units for pair, choice in zip(wanted, choices, strict=True)}
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
