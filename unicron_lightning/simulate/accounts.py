"""Accounts of a simulation: progress of tasks, use of workers' time, costs of failures, and the ideal without any.

The ideal is the progress without failures: the best allocation, changed instantly and at no cost. `Books` has a meter
for each task, the nodes that are down, and the result made of both.

A task makes steps at a rate that depends on its workers. Steps done before and repeated, because it returned to a
checkpoint or lost part of a step, do not count: WAF is 0 until the task is as far as it ever was. The time between two
calls of `_TaskMeter.set` is settled at the second one, in whole microseconds of workers, so that nothing is lost.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from unicron_lightning.coordinator.incidents.facts import PHASES, IncidentPhase, left_to
from unicron_lightning.simulate.costs import Costs
from unicron_lightning.simulate.result import (
    LOSSES,
    MICRO,
    REPAIR,
    STATES,
    Clock,
    LossKind,
    SimIncident,
    SimulationResult,
    TaskResult,
    WorkerState,
    micros,
)
from unicron_lightning.simulate.trace import PlaceSpeed, SimCluster, SimTask, Trace, TraceFault, place_terms


@dataclass(frozen=True, kw_only=True)
class _StepFunction:
    """A step function of time: ``values[i]`` from ``moments[i]`` (microseconds) on, 0 before."""

    moments: Sequence[int]
    values: Sequence[float]

    def at(self, moment: int) -> float:
        """Return its value."""
        place = bisect.bisect_right(self.moments, moment) - 1
        return self.values[place] if place >= 0 else 0.0

    def between(self, start: int, end: int) -> float:
        """Return its integral [value x seconds]."""
        total, place = 0.0, max(0, bisect.bisect_right(self.moments, start) - 1)
        while place < len(self.moments) and self.moments[place] < end:
            until = self.moments[place + 1] if place + 1 < len(self.moments) else end
            span = min(until, end) - max(self.moments[place], start)
            total += self.values[place] * max(0, span) / MICRO
            place += 1
        return total


@dataclass(frozen=True, kw_only=True)
class _Ideal:
    """The ideal progress of a cluster's tasks.

    Attributes:
        waf: weighted FLOP/s of each task.
        places: number of places of each task.
    """

    waf: Mapping[str, _StepFunction]
    places: Mapping[str, _StepFunction]

    @classmethod
    def of(cls, cluster: SimCluster, tasks: Sequence[SimTask], seconds: float) -> _Ideal:
        """Compute the ideal of tasks that arrive and depart within a time; those with a number of steps end
        after them.
        """
        left = {task.name: task.steps for task in tasks}
        histories: dict[str, tuple[list[int], list[float], list[float]]] = {t.name: ([], [], []) for t in tasks}
        now, end = 0.0, seconds
        while now < end:
            present = [task for task in tasks if _is_present(task, now, left[task.name])]
            shares = optimum(present, cluster.num_places, cluster.place_workers)
            rates = {task.name: task.throughput(shares[task.name] * cluster.place_workers) for task in present}
            for task in tasks:
                moments, values, places = histories[task.name]
                moments.append(round(now * MICRO))
                values.append(task.terms.weight * rates.get(task.name, 0.0))
                places.append(float(shares.get(task.name, 0)))
            until = min([end, *_changes(tasks, now), *_ends(present, rates, left, now)])
            for task in present:
                steps = left[task.name]
                if steps is not None:
                    steps -= (until - now) * rates[task.name] / task.flops_per_step
                    left[task.name] = 0.0 if steps < 1e-6 else steps
            now = until
        return cls(
            waf={
                name: _StepFunction(moments=moments, values=values) for name, (moments, values, _) in histories.items()
            },
            places={
                name: _StepFunction(moments=moments, values=places) for name, (moments, _, places) in histories.items()
            },
        )

    def total(self, seconds: float) -> float:
        """Return the accumulated WAF of all tasks up to a time, weighted FLOP."""
        return sum(steps.between(0, round(seconds * MICRO)) for steps in self.waf.values())


def optimum(tasks: Sequence[SimTask], num_places: int, place_workers: int) -> dict[str, int]:
    """Return the places by task with the largest WAF, by the planner."""
    from unicron_lightning.planner.reward import Curve, PlanTask
    from unicron_lightning.planner.solver import solve
    from unicron_lightning.planner.state import ClusterState

    if not tasks:
        return {}
    alone = [
        PlanTask(
            name=task.name,
            performance=PlaceSpeed(task, place_workers),
            transition_seconds=0.0,
            terms=place_terms(task, place_workers, num_places),
        )
        for task in tasks
    ]
    curves = tuple(Curve.of(each, 1, num_places) for each in alone)
    plan = solve(ClusterState(tasks=curves, num_workers=num_places, running_seconds=1.0))
    return {task.name: plan.allocation[task.name] for task in tasks}


def _is_present(task: SimTask, now: float, left: float | None) -> bool:
    return task.arrival <= now and (task.departure is None or now < task.departure) and left != 0.0


def _changes(tasks: Sequence[SimTask], now: float) -> list[float]:
    moments = [moment for task in tasks for moment in (task.arrival, task.departure) if moment is not None]
    return [moment for moment in moments if moment > now]


def _ends(
    tasks: Sequence[SimTask], rates: Mapping[str, float], left: Mapping[str, float | None], now: float
) -> list[float]:
    ends = []
    for task in tasks:
        steps, rate = left[task.name], rates[task.name]
        if steps is not None and rate > 0:
            ends.append(now + steps * task.flops_per_step / rate)
    return ends


_PHASE: dict[WorkerState, IncidentPhase] = {"detecting": "detection", "useful": "sub_healthy"}
"""Phases by state; all other states belong to the transition."""


class _Open:
    """An incident that is not over."""

    def __init__(self, kind: str, at: int, due: float) -> None:
        self.kind = kind
        self.at = at
        self.due = due
        self.known_at: int | None = None
        self.running_at: int | None = None
        self.micros: dict[IncidentPhase, int] = dict.fromkeys(PHASES, 0)
        self.waf: dict[IncidentPhase, float] = dict.fromkeys(PHASES, 0.0)


class _Bills:
    """The cost of each failure of a task: detection, transition, sub-healthy.

    The rules are the coordinator's (docs/monitoring.md): a failure before the task makes steps again belongs to the
    same incident; of overlapping incidents, each accounts only for the capacity that the next one found.
    """

    def __init__(self) -> None:
        self._open: list[_Open] = []
        self._closed: list[_Open] = []

    def strikes(self, now: int, kind: str, waf: float) -> None:
        """Record a failure, with the task's WAF before it."""
        if not self.is_struck:
            self._open.append(_Open(kind, now, waf))

    @property
    def is_struck(self) -> bool:
        """Whether a failure is not recovered from yet."""
        return bool(self._open) and self._open[-1].running_at is None

    def known(self, now: int) -> None:
        """Record that the system has detected the newest failure."""
        if self._open and self._open[-1].known_at is None:
            self._open[-1].known_at = now

    def runs(self, now: int) -> None:
        """Record that the task makes steps again."""
        if self.is_struck:
            self.known(now)
            self._open[-1].running_at = now

    def forgive(self) -> None:
        """Close running incidents: the cluster's tasks have changed, so their due WAF is no longer defined."""
        kept = [incident for incident in self._open if incident.running_at is None]
        self._closed.extend(incident for incident in self._open if incident not in kept)
        self._open = kept

    def settle(self, start: int, end: int, state: WorkerState, waf: float) -> None:
        """Account for a period; incidents whose WAF is restored are closed."""
        while state == "useful" and self._open and waf >= self._open[-1].due * (1.0 - 1e-12):
            self._closed.append(self._open.pop())
        for place, incident in enumerate(self._open):
            newest = place + 1 == len(self._open)
            phase: IncidentPhase = "sub_healthy" if incident.running_at is not None else _PHASE.get(state, "transition")
            if newest and state == "recomputing":
                phase = "transition"
            had = left_to([each.due for each in self._open], place, waf)
            incident.micros[phase] += end - start
            incident.waf[phase] += max(0.0, incident.due - had) * ((end - start) / MICRO)

    def all(self, task: str) -> list[SimIncident]:
        """Return all incidents by start; open ones are reported with their costs so far."""
        ordered = sorted([*self._closed, *self._open], key=lambda incident: incident.at)
        return [_told(task, incident) for incident in ordered]


def _told(task: str, incident: _Open) -> SimIncident:
    return SimIncident(
        task=task,
        kind=incident.kind,
        at=incident.at / MICRO,
        known_at=None if incident.known_at is None else incident.known_at / MICRO,
        running_at=None if incident.running_at is None else incident.running_at / MICRO,
        seconds={phase: micros / MICRO for phase, micros in incident.micros.items()},
        waf_seconds=dict(incident.waf),
    )


_WHY: dict[WorkerState, LossKind] = {"detecting": "detection", "transition": "transition", "idle": "sub_healthy"}


class _Position:
    """Steps done, the furthest step ever done, and the step of each kind of checkpoint."""

    def __init__(self, costs: Costs) -> None:
        self.steps = 0.0
        self.frontier = 0.0
        self._intervals = {"disk": costs.checkpoint_interval, "memory": costs.memory_checkpoint_interval}
        self._saved = {"disk": 0.0, "memory": 0.0}
        self._sound: float | None = None
        """Step of the newest persistent checkpoint from before the state was corrupted; None: it is not."""
        self._since = {"disk": 0.0, "memory": 0.0}
        """Seconds of training since the last checkpoint of each kind."""

    def advance(self, seconds: float, rate: float) -> None:
        """Train for a number of seconds, at ``rate`` steps per second."""
        self.steps += seconds * rate
        self.frontier = max(self.frontier, self.steps)
        for kind, interval in self._intervals.items():
            if interval is not None:
                since = self._since[kind] + seconds
                if since >= interval:
                    since %= interval
                    self._saved[kind] = self.steps - since * rate
                self._since[kind] = since

    def save(self) -> None:
        """Write a persistent checkpoint between two steps."""
        self._saved["disk"], self._since["disk"] = self.steps, 0.0

    def corrupt(self) -> None:
        """Mark the state as corrupted from now on, and all checkpoints written after this."""
        if self._sound is None:
            self._sound = self._saved["disk"]

    @property
    def is_corrupted(self) -> bool:
        """Whether the present state is corrupted."""
        return self._sound is not None

    def back_to_sound(self) -> None:
        """Return to the newest persistent checkpoint from before the state was corrupted."""
        self.back_to_checkpoint(memory=False)
        if self._sound is not None:
            self.steps = min(self.steps, self._sound)
            self._saved = dict.fromkeys(self._saved, self.steps)
        self._sound = None

    def lose(self, steps: float) -> None:
        """Mark a part of the present step as to be repeated."""
        self.steps -= steps

    def back_to_checkpoint(self, *, memory: bool) -> None:
        """Return to the newest checkpoint; checkpoints in memory are lost if ``memory`` is not set."""
        kinds = ["disk", "memory"] if memory and self._intervals["memory"] is not None else ["disk"]
        self.steps = max(self._saved[kind] for kind in kinds)
        for kind in self._since:
            self._saved[kind] = min(self._saved[kind], self.steps)
            self._since[kind] = 0.0

    @property
    def fraction(self) -> float:
        """The finished part of the present step."""
        return self.steps - int(self.steps)


class _TaskMeter:
    """Meter of one task, from its arrival on. Times are microseconds of the clock.

    Args:
        task: the task.
        costs: costs of the system that runs it.
        place_workers: workers of a place.
        ideal: its WAF without failures.
    """

    def __init__(self, task: SimTask, costs: Costs, place_workers: int, ideal: _StepFunction) -> None:
        self.task = task
        self.lost: dict[LossKind, float] = dict.fromkeys(LOSSES, 0.0)
        """Weighted FLOP missing relative to the ideal, by reason."""
        self.position = _Position(costs)
        self.state: WorkerState = "idle"
        self.places = 0
        """Places with workers in ``state``."""
        self.slowdown = 0.0
        """Fraction by which its steps take longer, because a place is slow."""
        self.starting = 0
        """Places whose workers are being started while the others continue."""
        self.worker_micros: Counter[WorkerState] = Counter()
        self.changes: list[tuple[int, float]] = []
        """Pairs of a time and the WAF from then on."""
        self.counted_flops = 0.0
        self.counted_micros = 0
        """Microseconds in which counted steps were made."""
        self.bills = _Bills()
        self._ideal = ideal
        self._place_workers = place_workers
        stall = costs.checkpoint_seconds / (costs.memory_checkpoint_interval or costs.checkpoint_interval)
        stall += costs.persistent_seconds / costs.checkpoint_interval
        self._efficiency = (1.0 - min(stall, 1.0)) * (1.0 - costs.redundancy) / (1.0 + costs.step_overhead)
        self._since = 0
        self._rates: dict[int, float] = {}

    def rate(self, places: int) -> float:
        """Return steps per second with a number of places, less the system's own overhead and the present slowdown."""
        known = self._rates.get(places)
        if known is None:
            flops = self.task.throughput(places * self._place_workers)
            known = self._rates[places] = flops * self._efficiency / self.task.flops_per_step
        return known / (1.0 + self.slowdown)

    def waf(self, places: int) -> float:
        """Return F, weighted FLOP/s, as achieved."""
        return self.task.terms.weight * self.task.flops_per_step * self.rate(places)

    def used(self, places: int) -> int:
        """Return the workers of a number of places that have work."""
        return self.task.terms.usable(places * self._place_workers)

    def begin(self, now: int) -> None:
        """Record the task's arrival."""
        self._since = now

    def set(self, now: int, state: WorkerState, places: int, starting: int = 0, slowdown: float = 0.0) -> None:
        """Set the state from now on: ``useful`` makes steps (maybe repeated ones); all other states make no steps."""
        self.settle(now)
        self.state, self.places, self.starting, self.slowdown = state, places, starting, slowdown
        if state == "useful":
            self.bills.runs(now)

    def settle(self, now: int) -> None:
        """Account for everything up to now."""
        span = now - self._since
        if span <= 0:
            return
        start, self._since = self._since, now
        due = self._ideal.between(start, now)
        self.worker_micros["transition"] += span * self.starting * self._place_workers
        used, held = self.used(self.places), self.places * self._place_workers
        if self.state != "useful":
            self.worker_micros[self.state] += span * held
            self._note(start, 0.0)
            self.bills.settle(start, now, self.state, 0.0)
            self.lost[_WHY[self.state]] += due
            return
        self.worker_micros["idle"] += span * (held - used)
        again = self._advance(span)
        full = self.waf(self.places)
        done_again = full / self._efficiency * again / MICRO
        overhead_waf = (full / self._efficiency - full) * (span - again) / MICRO
        self.lost["transition"] += done_again
        self.lost["overhead"] += overhead_waf
        self.lost["sub_healthy"] += due - full * (span - again) / MICRO - done_again - overhead_waf
        if again:
            self.worker_micros["recomputing"] += again * used
            self._note(start, 0.0)
            self.bills.settle(start, start + again, "recomputing", 0.0)
        if again < span:
            counted = span - again
            overhead = round(counted * used * (1.0 - self._efficiency))
            self.worker_micros["overhead"] += overhead
            self.worker_micros["useful"] += counted * used - overhead
            self.counted_micros += counted
            self.counted_flops += full / self.task.terms.weight * counted / MICRO
            self._note(start + again, full)
            self.bills.settle(start + again, now, "useful", full)

    def _advance(self, span: int) -> int:
        """Make steps for a time; return the part of it in which steps were repeated."""
        position, rate = self.position, self.rate(self.places)
        behind = position.frontier - position.steps
        position.advance(span / MICRO, rate)
        if behind <= 1e-9 or not rate:
            return 0 if rate else span
        return min(span, round(behind / rate * MICRO))

    def _note(self, at: int, waf: float) -> None:
        if not self.changes or self.changes[-1][1] != waf:
            self.changes.append((at, waf))


class Books:
    """Books of one cluster.

    Args:
        cluster: the nodes.
        tasks: all tasks of the simulation.
        trace: the faults.
        costs: costs of the system that runs the tasks.
        clock: the virtual clock.
    """

    def __init__(self, cluster: SimCluster, tasks: Sequence[SimTask], trace: Trace, costs: Costs, clock: Clock) -> None:
        self.cluster = cluster
        self.trace = trace
        self.clock = clock
        self.ideal = _Ideal.of(cluster, tasks, trace.seconds)
        self.costs = {task.name: costs.sized(*cluster.transfer_seconds(task)) for task in tasks}
        """Costs by task: those that depend on the size of its state differ."""
        self.meters = {
            task.name: _TaskMeter(task, self.costs[task.name], cluster.place_workers, self.ideal.waf[task.name])
            for task in tasks
        }
        self.down: dict[int, int] = {}
        """Nodes under repair, with the time of their return, in microseconds."""
        self.degraded: dict[int, list[float]] = {}
        """Slowdowns of nodes that are slower than others."""
        self.counts: Counter[str] = Counter()
        self._down_micros = 0
        self._down_since = 0
        self._gone: dict[str, int] = {}
        self._layouts: dict[str, tuple[int, int]] = {}
        for meter in self.meters.values():
            meter.begin(micros(meter.task.arrival))

    def takes_down(self, fault: TraceFault, repaired: Callable[[int], None]) -> None:
        """Record that a node's repair begins, or lasts longer; ``repaired`` is called with the node at its end.

        A fault that takes no node changes nothing.
        """
        if not fault.takes_node:
            return
        self._settle_down()
        node, until = fault.node, micros(fault.at + fault.repair)
        if until <= self.down.get(node, -1):
            return
        if node in self.down:
            self.counts["repairs_prolonged"] += 1
        self.down[node] = until
        self.clock.at(until, partial(repaired, node), REPAIR)

    def node_up(self, node: int) -> bool:
        """Record that a node can be used again, unless its repair was prolonged; return whether it can."""
        self._settle_down()
        if self.down.get(node, 0) > self.clock.now:
            return False
        self.down.pop(node, None)
        return True

    def slows(self, fault: TraceFault, changed: Callable[[int], None]) -> None:
        """Record that a node has become slower than others; ``changed`` is called with it now and when that ends."""
        self.degraded.setdefault(fault.node, []).append(fault.slowdown)
        changed(fault.node)
        if fault.repair:
            self.clock.at(micros(fault.at + fault.repair), partial(self._recovers, fault, changed), REPAIR)

    def _recovers(self, fault: TraceFault, changed: Callable[[int], None]) -> None:
        left = self.degraded[fault.node]
        left.remove(fault.slowdown)
        if not left:
            del self.degraded[fault.node]
        changed(fault.node)

    def slowdown(self, places: Collection[int]) -> float:
        """Return the fraction by which a task's steps take longer with these places: all wait for the slowest."""
        if not self.degraded:
            return 0.0
        cell = self.cluster.cell
        return max((max(found) for node, found in self.degraded.items() if node // cell in places), default=0.0)

    def place_is_up(self, place: int) -> bool:
        """Whether all nodes of a place can be used."""
        first = place * self.cluster.cell
        return not any(node in self.down for node in range(first, first + self.cluster.cell))

    def laid_out(self, task: str, places: int, seconds: float) -> float:
        """Record that a task takes the best TP and PP for a number of places; return the seconds of that change.

        The rule is the same for all systems: `Costs.laid_out`.

        Args:
            task: its name.
            places: places that it has after the change.
            seconds: seconds of the change if TP and PP stay the same.
        """
        before = self._layouts.get(task)
        best = self.meters[task].task.layout(places * self.cluster.place_workers)
        if best is None:  # unknown, or it waits for workers
            return seconds
        self._layouts[task] = best
        if before in (None, best):
            return seconds
        self.counts["relayouts"] += 1
        return self.costs[task].laid_out(seconds)

    def set(self, task: str, state: WorkerState, places: int, starting: int = 0, slowdown: float = 0.0) -> None:
        """Set a task's state from now on, its places, the number of places being started for it, and its slowdown."""
        self.meters[task].set(self.clock.now, state, places, starting, slowdown)
        assert self._held() + len(self.down) * self.cluster.workers_per_node <= self.cluster.num_workers

    def ends(self, task: str) -> None:
        """Record the end of a task."""
        self.meters[task].set(self.clock.now, "idle", 0)
        self._gone[task] = self.clock.now

    def result(self, policy: str) -> SimulationResult:
        """Return the result up to now."""
        end = self.clock.now
        self._settle_down()
        spent: Counter[WorkerState] = Counter(dict.fromkeys(STATES, 0))
        lost: dict[LossKind, float] = dict.fromkeys(LOSSES, 0.0)
        for name, meter in self.meters.items():
            if name not in self._gone:
                meter.settle(end)
            spent.update(meter.worker_micros)
            for why in LOSSES:
                lost[why] += meter.lost[why]
            lost["sub_healthy"] += self.ideal.waf[name].between(self._gone.get(name, end), end)
        spent["repairing"] = self._down_micros
        spent["idle"] += end * self.cluster.num_workers - spent.total()
        times, values = self._curve()
        incidents = [incident for name, meter in self.meters.items() for incident in meter.bills.all(name)]
        return SimulationResult(
            policy=policy,
            trace=self.trace.name,
            seconds=end / MICRO,
            times=times,
            values=values,
            ideal=self.ideal.total(end / MICRO),
            worker_micros=dict(spent),
            lost=dict(lost),
            tasks={name: self._task(name, meter, end) for name, meter in self.meters.items()},
            incidents=tuple(sorted(incidents, key=lambda incident: (incident.at, incident.task))),
            counts=dict(sorted(self.counts.items())),
        )

    def _task(self, name: str, meter: _TaskMeter, end: int) -> TaskResult:
        begin, until = min(end, micros(meter.task.arrival)), self._gone.get(name, end)
        present, due = max(0, until - begin), self.ideal.waf[name].between(begin, until)
        return TaskResult(
            name=name,
            flops=meter.counted_flops,
            weight=meter.task.terms.weight,
            present=present / MICRO,
            steps=meter.position.frontier,
            samples=None if (each := meter.task.step_samples) is None else each * meter.position.frontier,
            worker_micros=dict(meter.worker_micros),
            goodput=meter.counted_flops * meter.task.terms.weight / due if due else 1.0,
            ettr=meter.counted_micros / present if present else 1.0,
        )

    def _curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum of the tasks' WAF over time."""
        changes_at = (at for meter in self.meters.values() for at, _ in meter.changes)
        moments = np.unique(np.array([0, *changes_at, *self._gone.values()], dtype=np.int64))
        moments = moments[moments < max(1, self.clock.now)]
        values = np.zeros(len(moments))
        for name, meter in self.meters.items():
            changes = [(-1, 0.0), *meter.changes]
            if name in self._gone:
                changes.append((self._gone[name], 0.0))
            at = np.array([moment for moment, _ in changes], dtype=np.int64)
            waf = np.array([value for _, value in changes])
            values += waf[np.searchsorted(at, moments, side="right") - 1]
        keep = np.append(True, np.diff(values) != 0)
        return moments[keep] / MICRO, values[keep]

    def _held(self) -> int:
        return sum(meter.places + meter.starting for meter in self.meters.values()) * self.cluster.place_workers

    def _settle_down(self) -> None:
        now = max(0, self.clock.now)
        self._down_micros += (now - self._down_since) * len(self.down) * self.cluster.workers_per_node
        self._down_since = now
