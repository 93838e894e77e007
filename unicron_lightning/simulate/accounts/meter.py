"""A task's progress, and the use of its workers' time.

A task makes steps at a rate that depends on its workers. Steps done before and repeated, because it returned to a
checkpoint or lost part of a step, do not count: WAF is 0 until the task is as far as it ever was. The time between two
calls of `TaskMeter.set` is settled at the second one, in whole microseconds of workers, so that nothing is lost.
"""

from __future__ import annotations

from collections import Counter

from unicron_lightning.coordinator.incidents.record import PHASES, IncidentPhase, left_to
from unicron_lightning.simulate.accounts.ideal import StepFunction
from unicron_lightning.simulate.costs import Costs
from unicron_lightning.simulate.result import LOSSES, MICRO, LossKind, SimIncident, WorkerState
from unicron_lightning.simulate.workload import SimTask

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


class Bills:
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


class Position:
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


class TaskMeter:
    """Meter of one task, from its arrival on. Times are microseconds of the clock.

    Args:
        task: the task.
        costs: costs of the system that runs it.
        place_workers: workers of a place.
        ideal: its WAF without failures.
    """

    def __init__(self, task: SimTask, costs: Costs, place_workers: int, ideal: StepFunction) -> None:
        self.task = task
        self.lost: dict[LossKind, float] = dict.fromkeys(LOSSES, 0.0)
        """Weighted FLOP missing relative to the ideal, by reason."""
        self.position = Position(costs)
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
        self.bills = Bills()
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
