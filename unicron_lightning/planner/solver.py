"""The best plan: exact, for curves of any shape.

    maximise  sum_i G(t_i, x'_i)   subject to   sum_i x'_i <= n'              "Unicron", arXiv 2401.00134

Among plans of equal reward the one that moves fewest workers is chosen: the sum of abs(x' - x) where x counts the
workers that a task still has, in units, rounded up for each task. `unicron_lightning.planner.state` states the
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

Workers that would add no reward stay spare. If minimums do not fit, see `unicron_lightning.planner.search.exact`.

**Plans made ahead** (`PlanTable`) for all foreseen next events. Foreseen are: the loss of a node by each task that has
workers, and of an idle one; a node that joins; the end of each task. Cases with the same number of healthy workers
differ in one task only, so they are variants of one problem and share its prefix and suffix tables (`search.exact`).
Each plan equals the one that `unicron_lightning.planner.solver.solve` makes for the state after the event, ties
included.

A table is valid only for the state it was made for. The state's fingerprint covers everything that plans depend on
(tasks, weights, F(t,x), transition times, allocation, losses, n', D_running at n' and at n' with a node more or less).
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from unicron_lightning.errors import UnicronError
from unicron_lightning.planner.search.exact import (
    NOTHING,
    Column,
    SearchProblem,
    Variant,
    best_choices,
    column,
    must_pause,
)
from unicron_lightning.planner.state import ClusterState, Event, NodesJoined, TaskFinished, move_price

if TYPE_CHECKING:
    from unicron_lightning.planner.performance.model import ParallelConfiguration
    from unicron_lightning.planner.reward import Curve


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """One task's part of a plan.

    Attributes:
        name: of the task.
        num_workers: x', planned workers; 0 if the task is paused.
        num_workers_before: x, workers before, including lost ones.
        num_workers_lost: number of failed workers among them.
        changed: whether the task goes through a transition: it is affected, or x' differs from x.
        relayout: whether the change is to another TP x PP.
        waf: F(t,x') [FLOP/s].
        reward: G(t,x') [FLOP].
        configuration: distribution over its workers; None if the performance model does not know it.
        gain_of_last: G less that of the next smaller size [FLOP]; None if no smaller size exists.
        gain_of_next: G of the next larger size, for this task alone, less G [FLOP]; None if no larger size exists.
        kind: of its workers, see `unicron_lightning.planner.fleet`.
        kind_before: of its workers before.
    """

    name: str
    num_workers: int
    num_workers_before: int
    num_workers_lost: int
    changed: bool
    relayout: bool
    waf: float
    reward: float
    configuration: ParallelConfiguration | None
    gain_of_last: float | None
    gain_of_next: float | None
    kind: str = ""
    kind_before: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best allocation in a state.

    Attributes:
        state: the planned situation; ignored when plans are compared.
        names: the tasks, sorted.
        workers: x' of each.
        infeasible: tasks that are paused although they may not be, because the minimums of all such tasks do not fit.
    """

    state: ClusterState = field(compare=False, repr=False)
    names: tuple[str, ...]
    workers: tuple[int, ...]
    infeasible: tuple[str, ...] = ()

    @cached_property
    def allocation(self) -> Mapping[str, int]:
        """Workers by task, x', 0 for paused tasks."""
        return MappingProxyType(dict(zip(self.names, self.workers, strict=True)))

    @property
    def paused(self) -> tuple[str, ...]:
        """Tasks without workers."""
        return tuple(name for name, x in zip(self.names, self.workers, strict=True) if not x)

    @cached_property
    def value(self) -> float:
        """The maximised quantity: the sum of G(t,x') [FLOP]."""
        return math.fsum(reward_of(self.state, *pair) for pair in zip(self.state.tasks, self.workers, strict=True))

    @cached_property
    def waf(self) -> float:
        """The sum of F(t,x') [FLOP/s]."""
        return math.fsum(curve.waf_at(x) for curve, x in zip(self.state.tasks, self.workers, strict=True))

    @property
    def num_spare_workers(self) -> int:
        """Healthy workers without a task."""
        return self.state.num_workers - sum(self.workers)

    @cached_property
    def num_moved_workers(self) -> int:
        """Workers that tasks get or release: the sum of abs(x' - workers that the task still has)."""
        allocation, lost = self.state.allocation, self.state.lost
        left = (allocation.get(name, 0) - lost.get(name, 0) for name in self.names)
        return sum(abs(x - has) for x, has in zip(self.workers, left, strict=True))

    @cached_property
    def tasks(self) -> tuple[TaskPlan, ...]:
        """Details of each task."""
        return tuple(self._task(curve, x) for curve, x in zip(self.state.tasks, self.workers, strict=True))

    def _task(self, curve: Curve, num_workers: int) -> TaskPlan:
        state, name = self.state, curve.task.name
        here = reward_of(state, curve, num_workers)
        smaller, larger = neighbours(state, curve, num_workers)
        return TaskPlan(
            name=name,
            num_workers=num_workers,
            num_workers_before=state.allocation.get(name, 0),
            num_workers_lost=state.lost.get(name, 0),
            changed=_is_changed(state, curve, num_workers),
            relayout=curve.is_relayout(state.allocation.get(name, 0), num_workers),
            waf=curve.waf_at(num_workers),
            reward=here,
            configuration=curve.task.performance.configuration(num_workers) if num_workers else None,
            gain_of_last=None if smaller is None else here - reward_of(state, curve, smaller),
            gain_of_next=None if larger is None else reward_of(state, curve, larger) - here,
        )


def _is_changed(state: ClusterState, curve: Curve, num_workers: int) -> bool:
    """Whether a task with ``num_workers`` goes through a transition: [t is affected, or x' != x]."""
    name = curve.task.name
    return name in state.lost or num_workers != state.allocation.get(name, 0)


def reward_of(state: ClusterState, curve: Curve, num_workers: int) -> float:
    """G(t,x') [FLOP] in a state, see `unicron_lightning.planner.reward`."""
    before, task = state.allocation.get(curve.task.name, 0), curve.task
    seconds = task.longest_seconds if curve.is_relayout(before, num_workers) else task.transition_seconds
    lost = curve.waf_at(before) * seconds if _is_changed(state, curve, num_workers) else 0.0
    return curve.waf_at(num_workers) * state.duration_seconds - lost


def neighbours(state: ClusterState, curve: Curve, num_workers: int) -> tuple[int | None, int | None]:
    """The next smaller and the next larger possible number of workers of the task, None where none exists.

    A task that may be paused has 0 as its smallest size.
    """
    below = int(np.searchsorted(curve.workers, num_workers))
    above = int(np.searchsorted(curve.workers, num_workers, side="right"))
    smaller = int(curve.workers[below - 1]) if below else None
    if smaller is None and num_workers and curve.task.terms.may_pause:
        smaller = 0
    larger = int(curve.workers[above]) if above < len(curve.workers) else None
    return smaller, larger if larger is not None and larger <= state.num_workers else None


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
        price: c, see `unicron_lightning.planner.state`.
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
class _Alternative:
    """The best plan in which one task has a larger size.

    Attributes:
        num_workers: the larger size.
        cost: difference of its value below the best plan's [FLOP]; never negative.
        plan: the plan.
    """

    num_workers: int
    cost: float
    plan: Plan


def explain(plan: Plan) -> dict[str, _Alternative]:
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
        # Rounding (`unicron_lightning.planner.state`) may place an equally good plan minimally above the best.
        found[name] = _Alternative(num_workers=size, cost=max(0.0, plan.value - other.value), plan=other)
    return found


class StaleTable(UnicronError):
    """Raised if plans made for one state are looked up in another state."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanTable:
    """The plan for each foreseen event. Make it with `PlanTable.of`.

    Attributes:
        fingerprint: of the state that the table was made for.
        plans: by event.
    """

    fingerprint: str
    plans: Mapping[Event, Plan] = field(repr=False)

    @classmethod
    def of(cls, state: ClusterState) -> PlanTable:
        """Make the plans for all foreseen events in ``state``."""
        groups = defaultdict(list)
        for case in [_EventCase.of(state, event) for event in foreseen(state)]:
            groups[case.key].append(case)
        plans = dict(pair for group in groups.values() for pair in _solve_together(state, group))
        return cls(fingerprint=state.fingerprint, plans=MappingProxyType(plans))

    def look_up(self, state: ClusterState, event: Event) -> Plan | None:
        """The plan for ``event`` in ``state``; None if the event was not foreseen.

        The look-up takes constant time: a state computes its fingerprint once.

        Raises:
            StaleTable: the table was made for another state.
        """
        if state.fingerprint != self.fingerprint:
            raise StaleTable(f"plans of state {self.fingerprint} were looked up in state {state.fingerprint}")
        return self.plans.get(event)


def foreseen(state: ClusterState) -> list[Event]:
    """Foreseen events: those that a table has plans for."""
    losses = [loss for name in (None, *state.names) if (loss := state.loss_of(name)) is not None]
    joins = (
        [NodesJoined(num_workers=state.node_workers)] if _knows(state, state.num_workers + state.node_workers) else []
    )
    return [*losses, *joins, *(TaskFinished(task=name) for name in state.names)]


def _knows(state: ClusterState, num_workers: int) -> bool:
    """Whether all curves cover the sizes that tasks could have with ``num_workers`` workers."""
    limits = ((curve.num_workers, curve.task.terms.max_workers) for curve in state.tasks)
    return all(known >= num_workers or (most is not None and known >= most) for known, most in limits)


@dataclass(frozen=True, eq=False, kw_only=True)
class _EventCase:
    """An event and its consequences."""

    event: Event
    state: ClusterState
    paused: tuple[str, ...]

    @classmethod
    def of(cls, state: ClusterState, event: Event) -> _EventCase:
        after = state.after(event)
        return cls(event=event, state=after, paused=must_pause(after))

    @property
    def task(self) -> str | None:
        """Task of the event: only its column differs from those of other cases of the group."""
        return self.state.pivot

    @property
    def key(self) -> tuple[object, ...]:
        """Cases with equal keys are variants of one problem."""
        paused = tuple(name for name in self.paused if name != self.task)
        return self.state.num_workers, self.state.quantum_flop, self.price, paused

    @property
    def price(self) -> int:
        """The price of a moved unit."""
        return move_price(self.state)

    def variant(self, names: tuple[str, ...]) -> Variant:
        """The case as a variant of the problem of the tasks ``names``: the event's task has other options, or none."""
        if self.task is None:
            return Variant(position=len(names), replaces=False, column=NOTHING)
        position = bisect.bisect_left(names, self.task)
        gone = isinstance(self.event, TaskFinished)
        own = NOTHING if gone else _column(self.state, position, self.paused, self.price)
        return Variant(position=position, replaces=True, column=own)

    def plan(self, units: list[int], variant: Variant) -> Plan:
        """The plan, from the units of each task in the state before the event."""
        if isinstance(self.event, TaskFinished):
            del units[variant.position]
        workers = tuple(k * self.state.unit for k in units)
        return Plan(state=self.state, names=self.state.names, workers=workers, infeasible=self.paused)


def _column(state: ClusterState, index: int, paused: tuple[str, ...], price: int) -> Column:
    curve = state.tasks[index]
    made = column(state, curve, price=price, paused=curve.task.name in paused)
    # A task without options can neither run nor be paused: it ends, which is the event of all cases of the group.
    return made if len(made.units) else NOTHING


def _solve_together(state: ClusterState, cases: list[_EventCase]) -> list[tuple[Event, Plan]]:
    """The plan for each case of a group."""
    columns = _shared_columns(state, cases, cases[0].price)
    variants = [case.variant(state.names) for case in cases]
    choices = best_choices(SearchProblem.of(columns, cases[0].state.num_workers // state.unit, variants))
    return [
        (case.event, case.plan(units.tolist(), variant))
        for case, variant, (_, units) in zip(cases, variants, choices, strict=True)
    ]


def _shared_columns(state: ClusterState, cases: list[_EventCase], price: int) -> list[Column]:
    """The columns shared by the cases of a group: each task's options without an event of its own."""
    if cases[0].state.num_workers == state.num_workers:
        return [_column(state, index, cases[0].paused, price) for index in range(len(state.names))]
    # The number of workers differs from the state's, but the tasks are the same.
    return [
        _column(
            next((case.state for case in cases if case.task != name), cases[0].state), index, cases[0].paused, price
        )
        for index, name in enumerate(state.names)
    ]
