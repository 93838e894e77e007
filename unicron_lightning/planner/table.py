"""Plans for all foreseen next events, made ahead.

Foreseen are: the loss of a node by each task that has workers, and of an idle one; a node that joins; the end of each
task. Cases with the same number of healthy workers differ in one task only, so they are variants of one problem and
share its prefix and suffix tables (`search.exact`). Each plan equals the one that
`unicron_lightning.planner.solver.solve` makes for the state after the event, ties included.

A table is valid only for the state it was made for. The state's fingerprint covers everything that plans depend on
(tasks, weights, F(t,x), transition times, allocation, losses, n', D_running at n' and at n' with a node more or less).
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from unicron_lightning.errors import UnicronError
from unicron_lightning.planner.events import Event, NodesJoined, TaskFinished
from unicron_lightning.planner.plan import Plan
from unicron_lightning.planner.quantum import move_price
from unicron_lightning.planner.search.exact import SearchProblem, Variant, best_choices
from unicron_lightning.planner.search.minimums import must_pause
from unicron_lightning.planner.search.options import NOTHING, Column, column
from unicron_lightning.planner.state import ClusterState


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
        for case in [_Case.of(state, event) for event in foreseen(state)]:
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
class _Case:
    """An event and its consequences."""

    event: Event
    state: ClusterState
    paused: tuple[str, ...]

    @classmethod
    def of(cls, state: ClusterState, event: Event) -> _Case:
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


def _solve_together(state: ClusterState, cases: list[_Case]) -> list[tuple[Event, Plan]]:
    """The plan for each case of a group."""
    columns = _shared_columns(state, cases, cases[0].price)
    variants = [case.variant(state.names) for case in cases]
    choices = best_choices(SearchProblem.of(columns, cases[0].state.num_workers // state.unit, variants))
    return [
        (case.event, case.plan(units.tolist(), variant))
        for case, variant, (_, units) in zip(cases, variants, choices, strict=True)
    ]


def _shared_columns(state: ClusterState, cases: list[_Case], price: int) -> list[Column]:
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
