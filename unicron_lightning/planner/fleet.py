"""The best plan where workers are of several kinds.

A task runs on one kind at a time, and has a curve F(t,x) for each kind on which it can run. Each kind is a
`unicron_lightning.planner.state.ClusterState` of its own. Together they share D_running(n'), n' being all healthy
workers, the quantum of rewards and the price of a move.

    maximise  sum_t G(t, k_t, x_t)   subject to   sum of x_t on kind k <= n'_k,  for every kind k

    G(t,k',x') = F_k'(t,x') D_running(n')  -  [t is affected, or (k',x') != (k,x)] F_k(t,x) D_transition(t)
                 -  [k' != k, or TP x PP changes] F_k(t,x) D_relayout(t)

So a change of kind is a restart of all workers. With one kind the plan is that of `unicron_lightning.planner.solver`,
ties included. With several `unicron_lightning.planner.search.kinds` finds it: of plans of equal reward one that moves
fewest workers; which of several such plans depends on the fleet's contents only. Tasks may share a `Quota`, and then
take part in the search as one task (`unicron_lightning.planner.search.groups`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from unicron_lightning.planner.search.exact import VALUE_BITS, Column, column
from unicron_lightning.planner.search.groups import Group
from unicron_lightning.planner.search.kinds import KindProblem, best_kinds
from unicron_lightning.planner.solver import Plan, TaskPlan, explain, solve
from unicron_lightning.planner.state import ClusterState, Event, TaskLaunched, WorkersLost, move_price

if TYPE_CHECKING:
    from unicron_lightning.planner.reward import Curve


class QuotaTooSmall(ValueError):
    """Raised if the tasks of a quota that may not be paused need more workers than it has."""


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A number of workers for several tasks together, which can run on the same single kind.

    Attributes:
        name: of the quota.
        tasks: their names; a task may be unknown, e.g. have ended.
        guaranteed: fewest workers that they have together, or the fewest with which they reach the best of that number.
        most: most workers that they have together; None for no limit.

    Raises:
        ValueError: the numbers contradict each other.
    """

    name: str
    tasks: tuple[str, ...]
    guaranteed: int = 0
    most: int | None = None

    def __post_init__(self) -> None:
        if self.guaranteed < 0:
            raise ValueError(f"quota {self.name!r}: guaranteed={self.guaranteed}: expected 0 or more workers")
        if self.most is not None and self.most < self.guaranteed:
            given = f"quota {self.name!r}: most={self.most}"
            raise ValueError(f"{given}: expected at least its guaranteed={self.guaranteed}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Fleet:
    """Healthy workers of every kind, and the tasks that compete for them.

    Attributes:
        kinds: by name, the workers of a kind, the tasks that can run on it, and the allocation of those that do.
        running_seconds: D_running(n') of all workers together, in place of that of each kind.
        quotas: of groups of tasks; each task is in one at most.
        quantum_flop: that of several kinds, see `unicron_lightning.planner.state`; default: the least that suffices.

    Raises:
        ValueError: a task runs on two kinds, is in two quotas, or in one with tasks of other kinds; or kinds have
            different units.
    """

    kinds: Mapping[str, ClusterState]
    running_seconds: Callable[[int], float] | float
    quotas: tuple[Quota, ...] = ()
    quantum_flop: float = 0.0

    def __post_init__(self) -> None:
        if len({state.unit for state in self.kinds.values()}) != 1:
            raise ValueError(f"units of {[state.unit for state in self.kinds.values()]} workers: expected one for all")
        given = self.running_seconds
        seconds = float(given(max(1, self.num_workers)) if callable(given) else given)
        # With one kind a state keeps D_running as a function of n', which the plans made ahead need.
        each = given if len(self.kinds) == 1 else seconds
        kinds = {kind: dataclasses.replace(state, running_seconds=each) for kind, state in sorted(self.kinds.items())}
        if len(kinds) > 1:
            curves = {kind: (*state.tasks, *state.queued) for kind, state in kinds.items()}
            earning = [state for kind, state in kinds.items() if any(curve.waf_peak for curve in curves[kind])]
            needed = max((state.quantum_flop for state in earning), default=1.0)
            if needed > self.quantum_flop:
                object.__setattr__(self, "quantum_flop", needed * (1 << (len(kinds) - 1).bit_length()))
            kinds = {kind: dataclasses.replace(state, quantum_flop=self.quantum_flop) for kind, state in kinds.items()}
        object.__setattr__(self, "kinds", MappingProxyType(kinds))
        homes = [name for state in kinds.values() for name in state.allocation]
        if twice := sorted({name for name in homes if homes.count(name) > 1}):
            raise ValueError(f"{twice[0]!r} runs on several kinds: expected one")
        shared = [name for quota in self.quotas for name in quota.tasks]
        if twice := sorted({name for name in shared if shared.count(name) > 1}):
            raise ValueError(f"task {twice[0]!r} is in quotas {shared.count(twice[0])} times: expected it once")
        for quota in self.quotas:
            able = {name: (*self.tasks.get(name, {}), *self.queued.get(name, {})) for name in quota.tasks}
            if len({kind for own in able.values() for kind in own}) > 1:
                listed = ", ".join(f"{name} on {' and '.join(own)}" for name, own in able.items())
                raise ValueError(f"quota {quota.name!r}: tasks can run on several kinds ({listed}): expected one kind")

    @property
    def num_workers(self) -> int:
        """n', the number of all healthy workers."""
        return sum(state.num_workers for state in self.kinds.values())

    @property
    def quantum(self) -> float:
        """The quantum of rewards [FLOP]."""
        return next(iter(self.kinds.values())).quantum_flop

    @property
    def duration_seconds(self) -> float:
        """D_running(n')."""
        return next(iter(self.kinds.values())).duration_seconds

    @cached_property
    def homes(self) -> dict[str, str]:
        """The kind on which each task with workers runs."""
        return {name: kind for kind, state in self.kinds.items() for name in state.allocation}

    @cached_property
    def tasks(self) -> dict[str, dict[str, Curve]]:
        """The curves of each task by kind; sorted by name."""
        return self._curves("tasks")

    @cached_property
    def queued(self) -> dict[str, dict[str, Curve]]:
        """The curves of each queued task by kind; sorted by name."""
        return self._curves("queued")

    def _curves(self, which: str) -> dict[str, dict[str, Curve]]:
        found: dict[str, dict[str, Curve]] = {}
        for kind, state in self.kinds.items():
            for curve in getattr(state, which):
                found.setdefault(curve.task.name, {})[kind] = curve
        return dict(sorted(found.items()))

    def after(self, event: Event, kind: str = "") -> Fleet:
        """The fleet in which the next plan is made if ``event`` happens now, to workers of ``kind`` if to any.

        Raises:
            ValueError: the event cannot happen.
        """
        kinds = dict(self.kinds)
        if isinstance(event, WorkersLost) or not hasattr(event, "task"):
            kinds[kind] = kinds[kind].after(event)
        else:
            known = self.queued if isinstance(event, TaskLaunched) else self.tasks
            kinds.update({each: kinds[each].after(event) for each in known[event.task]})
        return dataclasses.replace(self, kinds=kinds)

    def adopt(self, plan: FleetPlan) -> Fleet:
        """The fleet after a plan has been put into force."""
        kinds = {
            kind: state.adopt(plan.plans[kind].allocation if kind in plan.plans else {})
            for kind, state in self.kinds.items()
        }
        return dataclasses.replace(self, kinds=kinds)


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """The best allocation.

    Attributes:
        fleet: the planned situation.
        plans: of each kind, with the tasks that the plan puts on it; a paused task is with the kind on which it ran.
        gap_flop: no plan has a greater reward by more than this [FLOP]; 0 if the search came to its end.
    """

    fleet: Fleet = field(compare=False, repr=False)
    plans: Mapping[str, Plan]
    infeasible: tuple[str, ...] = ()
    gap_flop: float = 0.0

    @cached_property
    def allocation(self) -> dict[str, int]:
        """Workers by task, 0 for paused tasks."""
        return {part.name: part.num_workers for part in self.tasks}

    @property
    def paused(self) -> tuple[str, ...]:
        """Tasks without workers."""
        return tuple(name for name, num in self.allocation.items() if not num)

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Of each task, on the kind that it gets."""
        return {curve.task.name: curve for plan in self.plans.values() for curve in plan.state.tasks}

    @cached_property
    def value(self) -> float:
        """The maximised quantity: the sum of G [FLOP]."""
        return math.fsum(part.reward for part in self.tasks)

    @cached_property
    def waf(self) -> float:
        """The sum of F(t,x') [FLOP/s]."""
        return math.fsum(part.waf for part in self.tasks)

    def num_workers_of(self, quota: Quota) -> int:
        """Workers of the tasks of a quota."""
        return sum(self.allocation.get(name, 0) for name in quota.tasks)

    @property
    def num_spare_workers(self) -> int:
        """Healthy workers without a task."""
        return self.fleet.num_workers - sum(self.allocation.values())

    @cached_property
    def num_moved_workers(self) -> int:
        """Workers that tasks get or release."""
        left = (part.num_workers_before - part.num_workers_lost for part in self.tasks if part.kind != part.kind_before)
        return sum(plan.num_moved_workers for plan in self.plans.values()) + sum(left)

    @cached_property
    def tasks(self) -> tuple[TaskPlan, ...]:
        """Details of each task, sorted by name."""
        parts = [self._task(kind, part) for kind, plan in self.plans.items() for part in plan.tasks]
        return tuple(sorted(parts, key=lambda part: part.name))

    def _task(self, kind: str, part: TaskPlan) -> TaskPlan:
        home = self.fleet.homes.get(part.name, kind)
        if home == kind:
            return dataclasses.replace(part, kind=kind, kind_before=kind)
        there, curve = self.fleet.kinds[home], self.fleet.tasks[part.name][home]
        before = there.allocation[part.name]
        return dataclasses.replace(
            part,
            kind=kind,
            kind_before=home,
            num_workers_before=before,
            num_workers_lost=there.lost.get(part.name, 0),
            changed=True,
            relayout=True,
            reward=part.reward - curve.waf_at(before) * curve.task.longest_seconds,
        )

    def explain(self, name: str) -> FleetPlan | None:
        """The best plan in which a paused task has workers, the least if there is one kind; None if none fits."""
        if len(self.plans) == 1 and not self.fleet.quotas:
            ((kind, plan),) = self.plans.items()
            found = explain(plan).get(name)
            return None if found is None else dataclasses.replace(self, plans={kind: found.plan})
        kinds = {kind: _kept(state, name) for kind, state in self.fleet.kinds.items()}
        try:
            other = solve_fleet(dataclasses.replace(self.fleet, kinds=kinds))
        except QuotaTooSmall:
            return None
        return other if other.infeasible == self.infeasible else None


def _kept(state: ClusterState, name: str) -> ClusterState:
    """The state with a task that may not be paused."""

    def kept(curve: Curve) -> Curve:
        terms = dataclasses.replace(curve.task.terms, may_pause=False)
        return dataclasses.replace(curve, task=dataclasses.replace(curve.task, terms=terms))

    return dataclasses.replace(
        state, tasks=tuple(kept(curve) if curve.task.name == name else curve for curve in state.tasks)
    )


def solve_fleet(fleet: Fleet) -> FleetPlan:
    """The best plan of a fleet."""
    if len(fleet.kinds) == 1 and not fleet.quotas:
        ((kind, state),) = fleet.kinds.items()
        plan = solve(state)
        return FleetPlan(fleet=fleet, plans={kind: plan}, infeasible=plan.infeasible)
    paused, known = _minimums(fleet)
    search = _Search(fleet=fleet, price=_price(fleet), paused=paused)
    columns = {name: search.columns(name) for name in fleet.tasks}
    groups = [search.group(quota, columns) for quota in fleet.quotas]
    kinds = {name: known.get(name, min(own)) for name, own in columns.items()}
    single = [name for name in columns if not any(name in group.names for group in groups)]
    least = search.guaranteed(groups, [(kinds[name], columns[name]) for name in single])
    joined = [{group.kind: group.tasks.column(fewest)} for group, fewest in zip(groups, least, strict=True)]
    problem = KindProblem(columns=[*(columns[name] for name in single), *joined], num_units=search.num_units)
    found = best_kinds(problem, [*(kinds[name] for name in single), *(group.kind for group in groups)])
    units = dict(zip(single, found.units, strict=False))
    names = list(fleet.kinds)
    placed = {name: names[kind] for name, kind in zip(single, found.kinds, strict=False)}
    for group, budget in zip(groups, found.units[len(single) :], strict=True):
        units.update(zip(group.names, group.tasks.units(budget).tolist(), strict=True))
        placed.update(dict.fromkeys(group.names, names[group.kind]))
    # A paused task stays with the kind on which it ran.
    homes = {
        name: kind if units[name] else fleet.homes.get(name, next(iter(fleet.tasks[name])))
        for name, kind in placed.items()
    }
    plans = {kind: _part(state, kind, homes, units, paused) for kind, state in fleet.kinds.items()}
    gap = (found.bound - found.total) * fleet.quantum
    return FleetPlan(fleet=fleet, plans=plans, infeasible=paused, gap_flop=gap)


def _part(
    state: ClusterState, kind: str, homes: Mapping[str, str], units: Mapping[str, int], paused: tuple[str, ...]
) -> Plan:
    """The plan of one kind, with the tasks on it."""
    own = tuple(curve for curve in state.tasks if homes[curve.task.name] == kind)
    names = tuple(curve.task.name for curve in own)
    part = dataclasses.replace(
        state,
        tasks=own,
        allocation={name: state.allocation.get(name, 0) for name in names},
        lost={name: num for name, num in state.lost.items() if name in names},
    )
    return Plan(
        state=part,
        names=names,
        workers=tuple(units[name] * state.unit for name in names),
        infeasible=tuple(name for name in paused if name in names),
    )


def _price(fleet: Fleet) -> int:
    """The price of a moved unit, above the rounding of all kinds together."""
    return max(map(move_price, fleet.kinds.values())) << (len(fleet.kinds) - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class _Search:
    """A fleet in integers.

    Attributes:
        fleet: the fleet.
        price: of a moved unit.
        paused: tasks that have to be paused.
    """

    fleet: Fleet
    price: int
    paused: tuple[str, ...]

    @property
    def num_units(self) -> list[int]:
        """N_k."""
        return [state.num_workers // state.unit for state in self.fleet.kinds.values()]

    def columns(self, name: str) -> dict[int, Column]:
        """A task's options on each kind on which it has any."""
        found = {
            index: self._column(kind, self.fleet.tasks[name][kind])
            for index, kind in enumerate(self.fleet.kinds)
            if kind in self.fleet.tasks[name]
        }
        return {index: column for index, column in found.items() if len(column.units)}

    def group(self, quota: Quota, columns: Mapping[str, Mapping[int, Column]]) -> _QuotaTasks:
        """The tasks of a quota as one.

        Raises:
            QuotaTooSmall: their minimums do not fit.
        """
        names = tuple(name for name in columns if name in quota.tasks)
        kind = min((kind for name in names for kind in columns[name]), default=0)
        unit = next(iter(self.fleet.kinds.values())).unit
        most = self.num_units[kind] if quota.most is None else min(self.num_units[kind], quota.most // unit)
        tasks = Group.of([columns[name][kind] for name in names], most)
        if tasks.least > most:
            given = f"quota {quota.name!r}: at most {most * unit} workers"
            raise QuotaTooSmall(f"{given}: expected {tasks.least * unit}, which its tasks need that may not be paused")
        return _QuotaTasks(names=names, kind=kind, tasks=tasks, guaranteed=-(-quota.guaranteed // unit))

    def guaranteed(self, groups: list[_QuotaTasks], others: list[tuple[int, Mapping[int, Column]]]) -> list[int]:
        """The fewest units of each group: those of its guarantee, which shrink in proportion if not all fit.

        Args:
            groups: of tasks.
            others: kind and columns of all other tasks, whose minimums have priority.
        """
        fewest = [group.tasks.usable(group.guaranteed) for group in groups]
        for kind, free in enumerate(self.num_units):
            own = [place for place, group in enumerate(groups) if group.kind == kind]
            free -= sum(int(columns[kind].units[0]) for at, columns in others if at == kind)
            free -= sum(groups[place].tasks.least for place in own)
            extra = {place: fewest[place] - groups[place].tasks.least for place in own}
            for place in own if sum(extra.values()) > free else ():
                left = extra[place] * free // sum(extra.values())
                fewest[place] = groups[place].tasks.usable(groups[place].tasks.least + left)
        return fewest

    def _column(self, kind: str, curve: Curve) -> Column:
        name, state = curve.task.name, self.fleet.kinds[kind]
        here = column(state, curve, price=self.price, paused=name in self.paused)
        home = self.fleet.homes.get(name, kind)
        if home == kind:
            return here
        there, task = self.fleet.kinds[home], self.fleet.tasks[name][home]
        before = there.allocation[name]
        costs = (
            round(task.waf_at(before) * seconds / state.quantum_flop)
            for seconds in (task.task.longest_seconds, task.task.transition_seconds)
        )
        move = self.price * -(-(before - there.lost.get(name, 0)) // state.unit)
        return Column(units=here.units, keys=here.keys - move - np.where(here.units > 0, *costs))


@dataclass(frozen=True, kw_only=True)
class _QuotaTasks:
    """The tasks of a quota, the kind on which they can run, and the units that they are guaranteed."""

    names: tuple[str, ...]
    kind: int
    tasks: Group
    guaranteed: int


def _minimums(fleet: Fleet) -> tuple[tuple[str, ...], dict[str, int]]:
    """The tasks that have to be paused although they may not be, and kinds with which the minimums of the others fit.

    Of all sets of tasks whose minimums fit that with the largest sum of F(t, minimum) runs, each on its best kind, and
    of equal ones that with more running tasks.
    """
    able, values = dict(_least(fleet)), {}
    for name, least in able.items():
        values[name] = max(waf for _, waf in least.values())
    _, exponent = math.frexp(math.fsum(values.values()))
    columns = []
    for name, least in able.items():
        value = round(math.ldexp(values[name], VALUE_BITS - exponent)) * (len(able) + 1) + (name in fleet.homes)
        keys = np.array([0, value], dtype=np.int64)
        columns.append(
            {kind: Column(units=np.array([0, k], dtype=np.int64), keys=keys) for kind, (k, _) in least.items()}
        )
    num_units = [state.num_workers // state.unit for state in fleet.kinds.values()]
    known = [min(column) for column in columns]
    found = best_kinds(KindProblem(columns=columns, num_units=num_units), known)
    kept = {name: kind for name, kind, k in zip(able, found.kinds, found.units, strict=True) if k}
    bound = (name for name, curves in fleet.tasks.items() if not next(iter(curves.values())).task.terms.may_pause)
    return tuple(name for name in bound if name not in kept), kept


def _least(fleet: Fleet) -> Iterator[tuple[str, dict[int, tuple[int, float]]]]:
    """The tasks that may not be paused and can run: units and F of the minimum on each kind."""
    for name, curves in fleet.tasks.items():
        least = {}
        for index, (kind, state) in enumerate(fleet.kinds.items()):
            curve = curves.get(kind)
            if curve is not None and len(curve.workers) and curve.workers[0] <= state.num_workers:
                least[index] = int(curve.workers[0]) // state.unit, float(curve.waf[0])
        if least and not next(iter(curves.values())).task.terms.may_pause:
            yield name, least
