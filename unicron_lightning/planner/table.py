"""Plans for all foreseen next events, made ahead.

Foreseen are: the loss of a node by each task that has workers, and of an idle one; a node that joins; the end of each
task; the launch of each queued task. Cases with the same number of healthy workers differ in one task only, so they are
variants of one problem and share its prefix and suffix tables (`search.exact`). Each plan equals
the one that `unicron_lightning.planner.solver.solve` makes for the state after the event, ties included.

A table is valid only for the state it was made for. The state's fingerprint covers everything that plans depend on
(tasks, weights, F(t,x), transition times, allocation, losses, queue, n', D_running at n' and at n' with a node more or
less).
"""

from __future__ import annotations

import bisect
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from unicron_lightning.errors import UnicronError
from unicron_lightning.planner.events import Event, NodesJoined, TaskFinished, TaskLaunched
from unicron_lightning.planner.plan import Plan
from unicron_lightning.planner.quantum import move_price
from unicron_lightning.planner.search.exact import Choice, SearchProblem, Variant, best_choices
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
        num_reused: number of plans taken from the previous table.
    """

    fingerprint: str
    plans: Mapping[Event, Plan] = field(repr=False)
    num_reused: int = 0
    solved: Mapping[bytes, tuple[int, ...]] = field(default_factory=dict, repr=False)
    """Workers of each task, by a digest of everything that the plan depends on."""

    @classmethod
    def of(cls, state: ClusterState, before: PlanTable | None = None) -> PlanTable:
        """Make the plans for all foreseen events in ``state``.

        Args:
            state: the situation.
            before: a table made earlier, for any state; unchanged cases are taken from it, e.g. all but one when a task
                has joined the queue.
        """
        cases = [_Case.of(state, event) for event in foreseen(state)]
        groups = defaultdict(list)
        for case in cases:
            groups[case.key].append(case)
        known = before.solved if before is not None else {}
        plans: dict[Event, Plan] = {}
        solved: dict[bytes, tuple[int, ...]] = {}
        num_reused = 0
        for group in groups.values():
            for case, digest, workers in _solve_together(state, group, known):
                solved[digest] = workers
                num_reused += digest in known
                names, paused = case.state.names, case.paused
                plans[case.event] = Plan(state=case.state, names=names, workers=workers, infeasible=paused)
        return cls(
            fingerprint=state.fingerprint,
            plans=MappingProxyType(plans),
            num_reused=num_reused,
            solved=solved,
        )

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
    ends = [TaskFinished(task=name) for name in state.names]
    return [*losses, *joins, *ends, *(TaskLaunched(task=curve.task.name) for curve in state.queued)]


def _knows(state: ClusterState, num_workers: int) -> bool:
    """Whether all curves cover the sizes that tasks could have with ``num_workers`` workers."""
    limits = ((curve.num_workers, curve.task.terms.max_workers) for curve in (*state.tasks, *state.queued))
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

    def own_column(self, price: int) -> Column:
        """The options of the event's task; `NOTHING` if the task is gone."""
        names = self.state.names
        at = bisect.bisect_left(names, self.task) if self.task is not None else len(names)
        if at == len(names) or names[at] != self.task:
            return NOTHING
        return _column(self.state, at, self.paused, price)

    def variant(self, names: Sequence[str], price: int) -> Variant:
        """The case as a variant of the problem of the tasks ``names``."""
        if self.task is None:
            return Variant(position=len(names), replaces=False, column=NOTHING)
        position = bisect.bisect_left(names, self.task)
        replaces = position < len(names) and names[position] == self.task
        return Variant(position=position, replaces=replaces, column=self.own_column(price))

    def workers(self, choice: Choice, variant: Variant) -> tuple[int, ...]:
        """The plan in workers."""
        units = choice.units.tolist()
        if isinstance(self.event, TaskFinished):
            del units[variant.position]
        elif isinstance(self.event, TaskLaunched):
            units.insert(variant.position, choice.own_units)
        return tuple(k * self.state.unit for k in units)


def _column(state: ClusterState, index: int, paused: tuple[str, ...], price: int) -> Column:
    curve = state.tasks[index]
    made = column(state, curve, price=price, paused=curve.task.name in paused)
    # A task without options can neither run nor be paused: it ends, which is the event of all cases of the group.
    return made if len(made.units) else NOTHING


def _solve_together(
    state: ClusterState, cases: list[_Case], known: Mapping[bytes, tuple[int, ...]]
) -> Iterable[tuple[_Case, bytes, tuple[int, ...]]]:
    """Each case of a group with a digest of its inputs, and its plan in workers."""
    price = cases[0].price
    columns = _shared_columns(state, cases, price)
    num_units = cases[0].state.num_workers // state.unit
    variants = [case.variant(state.names, price) for case in cases]
    contents = [each.digest for each in columns]
    found: dict[int, tuple[int, ...]] = {}
    digests = []
    for index, (case, variant) in enumerate(zip(cases, variants, strict=True)):
        others = contents[: variant.position] + contents[variant.after :]
        terms = (num_units, price, state.unit, type(case.event).__name__, variant.position, variant.replaces)
        digests.append(hashlib.blake2b(repr(terms).encode() + b"".join([*others, variant.column.digest])).digest())
        if (workers := known.get(digests[-1])) is not None:
            found[index] = workers
    missing = [index for index in range(len(cases)) if index not in found]
    if missing:
        problem = SearchProblem.of(columns, num_units, [variants[index] for index in missing])
        for index, choice in zip(missing, best_choices(problem), strict=True):
            found[index] = cases[index].workers(choice, variants[index])
    return [(case, digests[index], found[index]) for index, case in enumerate(cases)]


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
