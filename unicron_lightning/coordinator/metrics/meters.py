"""Counts for `/metrics`, derived from the machine's inputs, from the facts that it logs, and from its state. Pure.

`Meters` only observes. Counts begin at the coordinator's start, as Prometheus expects of a counter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.incidents.facts import (
    REPORTED,
    AgentLoss,
    BrokenConnection,
    EpochSettled,
    ErrorFact,
    FirstStep,
    IncidentClosed,
    WorkerDeath,
    is_failure,
)
from unicron_lightning.coordinator.incidents.record import PHASES, IncidentPhase
from unicron_lightning.coordinator.metrics.task_time import TaskTime, occupation_of
from unicron_lightning.coordinator.severity.errors import Severity, known
from unicron_lightning.coordinator.state import Cluster, Task

SHORT: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds of buckets for the coordinator's own times, in seconds."""
LONG: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
"""Upper bounds of buckets for steps and incidents, in seconds."""
ENDED_KEPT_SECONDS: Final = 900.0
"""Time in which the series of an ended task stay, so that its last counts are scraped."""
_MOST_ENDED: Final = 200


class Histogram:
    """Numbers of observations below bounds.

    Args:
        bounds: upper bounds of the buckets, ascending; one without a bound is added.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, number: int = 1) -> None:
        """Count a value this many times."""
        self.counts[bisect_left(self.bounds, value)] += number
        self.sum += value * number


class TaskCounts:
    """Counts of one task.

    Args:
        now: time.time() at which the task was first observed.
    """

    def __init__(self, now: float) -> None:
        self.time = TaskTime(now)
        self.step_seconds = Histogram(LONG)
        self.steps = self.repeated = self.recomputed = self.checkpoints = 0
        self.micro_batches: int | None = None
        """None as long as the number of a step is unknown, as for a model of replicas that has not reported it."""
        self.samples: int | None = None
        """None for workers that do not report samples, e.g. those of a script without a data loader."""
        self.incidents: Counter[Severity] = Counter()
        self.failures: Counter[str] = Counter()
        self.lost_worker_seconds: dict[IncidentPhase, float] = dict.fromkeys(PHASES, 0.0)
        self.lost_flops: dict[IncidentPhase, float] = dict.fromkeys(PHASES, 0.0)
        self.ended_at: float | None = None
        self._life, self._stepped_life = 0, 0
        self._step: int | None = None
        """Newest step that is counted; None until one is known."""
        self._furthest = 0
        self._saved = False
        self._opened: set[str] = set()
        self._first_steps = 0
        """Newest epoch whose first step is counted: all its members report it."""
        self._anchor: tuple[int, str, int, float] = (0, "", 0, 0.0)
        """Epoch, worker, step and time of the report with which the next interval begins."""

    def log(self, task: Task, event: ev.Emit, now: float) -> None:
        """Count an event of the task's log."""
        fact = event.fact
        if event.incident is not None and event.incident not in self._opened and fact is not None:
            self._open(event.incident, fact)
        match fact:
            case IncidentClosed(bill=bill):
                self._opened.discard(event.incident or "")
                for phase, cost in bill.phases.items():
                    self.lost_worker_seconds[phase] += cost.worker_seconds
                    self.lost_flops[phase] += cost.waf_seconds or 0.0
            case EpochSettled() if self._life != task.life:
                self._life, self._step = task.life, task.measured.pace.step
            case FirstStep(epoch=int(epoch), at=at, recomputed=again) if epoch > self._first_steps:
                self._first_steps, self._stepped_life = epoch, task.life
                self.recomputed += len(again)
                self.time.step(min(at, now), steps=1, repeated=0, usual=None, present=1.0, saved=False)
            case ErrorFact(kind=kind):
                self.failures[known(kind)] += 1
            case AgentLoss():
                self.failures["node_lost"] += 1
            case WorkerDeath(cause=cause) if is_failure(fact) and cause != REPORTED:
                self.failures[cause] += 1
        self.review(task, now)

    def _open(self, incident: str, fact: object) -> None:
        self._opened = set(sorted(self._opened)[-64:]) | {incident}
        match fact:
            case ErrorFact(severity=severity):
                self.incidents[severity] += 1
            case AgentLoss():
                self.incidents["SEV1"] += 1
            case WorkerDeath():
                self.incidents["SEV2"] += 1
            case BrokenConnection():
                self.incidents["SEV3"] += 1

    def progress(self, task: Task, message: wire.Progress, now: float) -> None:
        """Count the steps of a worker's report; members step together, so the furthest one's count."""
        at = now if message.at is None else min(message.at, now)
        self._interval(task, message, at)
        if self._step is None:
            self._step, self._life = message.step, task.life
        steps = message.step - self._step
        if steps <= 0:
            return
        repeated = min(steps, max(0, min(message.step, self._furthest) - self._step))
        self.steps += steps
        self.repeated += repeated
        if (number := micro_batches_of(task)) is not None:
            self.micro_batches = (self.micro_batches or 0) + steps * number
        if message.samples_per_step is not None:
            self.samples = (self.samples or 0) + steps * message.samples_per_step
        self._step, self._furthest = message.step, max(message.step, self._furthest)
        self._stepped_life = task.life
        due = max([incident.started_with.workers for incident in task.accounts.open], default=0)
        present = task.accounts.level.workers / due if due else 1.0
        usual = usual_seconds(task)
        self.time.step(at, steps=steps, repeated=repeated, usual=usual, present=present, saved=self._saved)
        self._saved = False
        self.review(task, now)

    def _interval(self, task: Task, message: wire.Progress, at: float) -> None:
        pace = task.measured.pace
        if message.worker != pace.worker or pace.stands:
            return
        epoch, worker, step, since = self._anchor
        if (epoch, worker) == (pace.epoch, message.worker) and message.step > step and at > since:
            self.step_seconds.observe((at - since) / (message.step - step), message.step - step)
        self._anchor = (pace.epoch, message.worker, message.step, at)

    def checkpoint(self) -> None:
        """Count a complete checkpoint."""
        self.checkpoints += 1
        self._saved = True

    def review(self, task: Task, now: float) -> None:
        """Update how the task spends its time."""
        if task.over is not None:
            if self.ended_at is None:
                self.time.change("idle", now, usual=usual_seconds(task))
                self.ended_at = now
            return
        occupation = occupation_of(task, steps=self._stepped_life == task.life)
        if occupation != self.time.occupation:
            faults = [each.fault_at for each in task.accounts.open if each.stepped_at is None]
            fault_at = max(faults) if occupation == "transition" and faults else None
            self.time.change(occupation, now, fault_at=fault_at, usual=usual_seconds(task))
        self.time.advance(now)


class Meters:
    """All counts of one coordinator.

    Attributes:
        tasks: by id, ended ones included for `ENDED_KEPT_SECONDS`.
        readings: newest reading of each node's health.
    """

    def __init__(self) -> None:
        self.tasks: dict[str, TaskCounts] = {}
        self.readings: dict[str, wire.NodeReading] = {}
        self.inputs = self.plans = 0
        self.plan_seconds = Histogram(SHORT)
        self.plan_waf: float | None = None
        self.store_seconds, self.loop_lag = Histogram(SHORT), Histogram(SHORT)
        self.phases: dict[IncidentPhase, Histogram] = {phase: Histogram(LONG) for phase in PHASES}

    def observe(self, event: ev.Input, actions: Iterable[ev.Action], cluster: Cluster, now: float) -> None:
        """Count an input and the machine's answer to it.

        Args:
            event: the input.
            actions: the answer.
            cluster: the machine's state after it.
            now: time.time().
        """
        self.inputs += 1
        for action in actions:
            if isinstance(action, ev.Emit) and (task := cluster.tasks.get(action.task or "")) is not None:
                if isinstance(action.fact, IncidentClosed):
                    for phase, cost in action.fact.bill.phases.items():
                        self.phases[phase].observe(cost.seconds)
                self._of(task, now).log(task, action, now)
        match event:
            case ev.AgentMessage(conn=conn, message=message):
                self._received(cluster, conn, message, now)
            case ev.Planned():
                self.plans += 1
                self.plan_seconds.observe(event.milliseconds / 1e3)
                self.plan_waf = event.waf or self.plan_waf

    def _received(self, cluster: Cluster, conn: int, message: wire.FromAgent, now: float) -> None:
        name, agent = cluster.conns.get(conn, ("", ""))
        task = cluster.tasks.get(name)
        if task is None or agent not in task.agents:
            return
        match message:
            case wire.Progress():
                self._of(task, now).progress(task, message, now)
            case wire.CheckpointSaved():
                self._of(task, now).checkpoint()
            case wire.NodeReading():
                self.readings[task.agents[agent].node] = message

    def review(self, cluster: Cluster, now: float) -> None:
        """Attribute the time of all tasks until now, and forget tasks and nodes that have been gone for a while."""
        for task in cluster.tasks.values():
            self._of(task, now).review(task, now)
        for name, meter in self.tasks.items():
            if name not in cluster.tasks and meter.ended_at is None:
                meter.ended_at = now
        ended = sorted((m.ended_at, name) for name, m in self.tasks.items() if m.ended_at is not None)
        late = [name for at, name in ended if now - at > ENDED_KEPT_SECONDS]
        for name in {*late, *(name for _, name in ended[: max(0, len(ended) - _MOST_ENDED)])} - cluster.tasks.keys():
            del self.tasks[name]
        nodes = {agent.node for task in cluster.tasks.values() for agent in task.agents.values()}
        self.readings = {node: reading for node, reading in self.readings.items() if node in nodes}

    def _of(self, task: Task, now: float) -> TaskCounts:
        meter = self.tasks.get(task.id)
        if meter is None or (meter.ended_at is not None and task.over is None):  # a new task of this name
            meter = self.tasks[task.id] = TaskCounts(now)
        return meter


def usual_seconds(task: Task) -> float | None:
    """Return the measured seconds of a step at the task's present size; None if unknown."""
    speed = task.measured.speeds.get(task.measured.pace.level.slots)
    return None if speed is None else speed.seconds


def micro_batches_of(task: Task) -> int | None:
    """Return the micro-batches of one step; None if the model is spread over workers that have not reported it.

    It is the capacity of a worker that holds the whole model.
    """
    if (spread := task.layouts.spread) is not None:
        return spread.micro_batches
    return None if task.replicas else task.capacity()
