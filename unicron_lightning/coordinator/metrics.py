"""Figures of the coordinator for Prometheus: what is counted, time by kind, and their exposition.

**The catalogue** has name, type, labels and meaning of each metric, as in docs/monitoring.md. Rules and dashboards use
no other. Values of labels are bounded: tasks and nodes of the cluster, and words of closed sets. Ids of workers and
agents, incidents and texts of errors are never labels; they are in the event log.

**Counts** are derived from the machine's inputs, from the facts that it logs, and from its state. Pure. `Meters` only
observes. Counts begin at the coordinator's start, as Prometheus expects of a counter.

**The time of a task by kind** is productive, or lost, and by what. Pure. The kinds are those of the field's accounts of
goodput: productive time, and badput by type. Time is attributed once, when its kind is known, so that every sum only
rises. While a task trains, the time since its last reported step is not attributed yet; steps are reported once a
second.

**Exposition.** The coordinator's state and counts as families of prometheus_client, which encodes them.

The library is imported with the first request, not at the coordinator's start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation import answers
from unicron_lightning.coordinator.api.status import TASK_STATES, agent_standing, node_standings, state_of_task
from unicron_lightning.coordinator.incidents.facts import (
    PHASES,
    REPORTED,
    AgentLoss,
    BrokenConnection,
    EpochSettled,
    ErrorFact,
    FirstStep,
    IncidentClosed,
    IncidentPhase,
    WorkerDeath,
    is_failure,
)
from unicron_lightning.coordinator.severity.record import Severity, known
from unicron_lightning.coordinator.state import Cluster, Task

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family


_TimeKind = Literal[
    "productive",
    "start_up",
    "detection",
    "transition",
    "sub_healthy",
    "recomputed",
    "checkpoint",
    "other",
    "idle",
    "unknown",
]
TIME_KINDS: Final[tuple[_TimeKind, ...]] = get_args(_TimeKind)
_Occupation = Literal["training", "start_up", "transition", "sub_healthy", "idle", "unknown"]

_HANG: Final = 3.0
"""Multiple of the usual step time after which an unfinished step is attributed to the detection of its failure."""
_PAUSE: Final = 1.5
"""Multiple of the usual step time from which the rest of an interval was no training: validation, a stalled loader."""


def _occupation_of(task: Task, *, steps: bool) -> _Occupation:
    """Return how the task spends its time now.

    Args:
        task: a task that is not over.
        steps: whether it has finished a step in its present life.
    """
    if any(incident.stepped_at is None for incident in task.accounts.open):
        return "transition"
    if not task.slots:
        return "idle"
    if task.settled and task.epoch is not None and task.epoch.hold:
        return "sub_healthy" if task.accounts.open else "idle"  # too few nodes to train at all
    if task.plain:
        return "unknown"
    return "training" if steps else "start_up"


class TaskTime:
    """Seconds of one task by kind.

    Args:
        now: time.time() from which on time is attributed.

    Attributes:
        seconds: sums by kind.
        occupation: how the task spends its time at present.
    """

    def __init__(self, now: float) -> None:
        self.seconds: dict[_TimeKind, float] = dict.fromkeys(TIME_KINDS, 0.0)
        self.occupation: _Occupation = "idle"
        self._until = now

    def change(
        self, occupation: _Occupation, now: float, *, fault_at: float | None = None, usual: float | None
    ) -> None:
        """Record that the task spends its time differently from now on.

        Args:
            occupation: the new one.
            now: time.time().
            fault_at: time of the failure that has ended the training; None if none has.
            usual: usual seconds of a step; None if unknown.
        """
        if self.occupation == "training":
            at = now if fault_at is None else min(fault_at, now)
            if fault_at is not None and usual is not None:
                at = min(at, self._until + _HANG * usual)
            self._attribute("productive", at)
            self._attribute("detection" if fault_at is not None else "productive", now)
        self.advance(now)
        self.occupation = occupation

    def advance(self, now: float) -> None:
        """Attribute the time until now, unless the task trains: a step attributes that."""
        if self.occupation != "training":
            self._attribute(self.occupation, now)

    def step(self, at: float, *, steps: int, repeated: int, usual: float | None, present: float, saved: bool) -> None:
        """Attribute the time up to a finished step.

        Args:
            at: time.time() of its end.
            steps: steps finished since the previous report.
            repeated: those of them that had been finished before the loss of all workers.
            usual: usual seconds of a step at the present size; None if unknown.
            present: share of the intended workers that is at work.
            saved: whether a checkpoint was completed since the previous report.
        """
        if self.occupation != "training":
            self.advance(at)
            return
        seconds = max(0.0, at - self._until)
        expected = seconds if usual is None else steps * usual
        pause = max(0.0, seconds - expected) if saved or seconds > _PAUSE * expected else 0.0
        missing = (seconds - pause) * (1.0 - min(1.0, max(0.0, present)))
        again = (seconds - pause - missing) * repeated / max(1, steps)
        self.seconds["checkpoint" if saved else "other"] += pause
        self.seconds["sub_healthy"] += missing
        self.seconds["recomputed"] += again
        self.seconds["productive"] += seconds - pause - missing - again
        self._until = max(at, self._until)

    @property
    def goodput(self) -> float | None:
        """Productive share of the attributed time; None if there is none."""
        total = sum(self.seconds.values())
        return self.seconds["productive"] / total if total else None

    def _attribute(self, kind: _TimeKind, until: float) -> None:
        self.seconds[kind] += max(0.0, until - self._until)
        self._until = max(until, self._until)


AGENT_STATES: Final = ("granted", "warm", "waiting", "none", "away")
NODE_STATES: Final = ("ready", "drained", "away", "lost")


class Metric(NamedTuple):
    """A metric.

    Attributes:
        name: its name as queried; counters end with ``_total``.
        words: names of its labels, in one text.
        meaning: one sentence.
    """

    type: Literal["counter", "gauge", "histogram"]
    name: str
    words: str
    meaning: str

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of its labels."""
        return tuple(self.words.split())


_counter, _gauge, _histogram = partial(Metric, "counter"), partial(Metric, "gauge"), partial(Metric, "histogram")


METRICS: Final = (
    # tasks
    _counter("unicron_steps_total", "task", "Finished optimizer steps, repeated ones included."),
    _counter("unicron_steps_repeated_total", "task", "Steps finished before and repeated since, from a checkpoint."),
    _counter("unicron_micro_batches_total", "task", "Micro-batches of the finished steps."),
    _counter("unicron_samples_total", "task", "Data set items in the global batches of the finished steps."),
    _counter("unicron_micro_batches_recomputed_total", "task", "Micro-batches computed again for lost workers."),
    _counter("unicron_checkpoints_total", "task", "Complete checkpoints that workers have reported."),
    _histogram("unicron_step_seconds", "task", "Duration of a step; steps between two reports count with their mean."),
    _counter("unicron_task_time_seconds_total", "task kind", f"Time of the task by kind: {', '.join(TIME_KINDS)}."),
    _gauge("unicron_task_goodput_ratio", "task", "Productive share of the task's time so far."),
    _gauge("unicron_task_step", "task", "Newest finished step."),
    _gauge("unicron_task_workers", "task", "Members of the task's world that are alive."),
    _gauge("unicron_task_slots", "task", "Granted slots."),
    _gauge("unicron_task_slots_limit", "task", "Largest number of slots that the task may have now."),
    _gauge("unicron_task_state", "task state", "1 for the task's state, 0 for the others."),
    _gauge("unicron_task_degraded", "task", "1 if steps have taken 1.1 times as long as usual for a while."),
    _gauge("unicron_task_stragglers", "task", "Ranks whose own work takes longer than that of their peers."),
    _gauge("unicron_task_waf_flops", "task", "Weighted achieved FLOP/s at the present size, where FLOPs are known."),
    _gauge("unicron_task_agents", "task state", f"Agents by state: {', '.join(AGENT_STATES)}."),
    _gauge("unicron_task_checkpoint_step", "task", "Step of the newest checkpoint."),
    _gauge("unicron_task_memory_step", "task", "Step of the newest complete state in the memory of agents."),
    _gauge("unicron_task_memory_bytes", "task", "Bytes of all states in the memory of agents."),
    # incidents
    _counter("unicron_incidents_total", "task severity", "Incidents opened, by severity of the first event."),
    _counter("unicron_failures_total", "task kind", "Failures by kind: of docs/detection.md, exit, signal, node_lost."),
    _gauge("unicron_incidents_open", "task phase", "Open incidents by their present phase."),
    _histogram("unicron_incident_phase_seconds", "phase", "Duration of a phase of a closed incident."),
    _counter("unicron_incident_lost_worker_seconds_total", "task phase", "Worker-seconds lost by closed incidents."),
    _counter("unicron_incident_lost_flops_total", "task phase", "Weighted FLOP lost by closed incidents, where known."),
    # plans
    _counter("unicron_plans_total", "", "Plans computed."),
    _histogram("unicron_plan_seconds", "", "Time to compute a plan."),
    _gauge("unicron_plan_waf_flops", "", "Expected weighted FLOP/s of the newest plan."),
    _gauge("unicron_plan_places", "task", "Places of each task in the plan in force."),
    # nodes
    _gauge("unicron_nodes", "state", f"Nodes by state: {', '.join(NODE_STATES)}."),
    _gauge("unicron_node_up", "node", "1 if the node's daemon or one of its agents is connected."),
    _gauge("unicron_node_drained", "node", "1 if the node is drained, or cordoned by the coordinator."),
    _gauge("unicron_node_problems", "node", "Present problems of the node's health."),
    _gauge("unicron_node_memory_free_ratio", "node", "Free share of the node's memory."),
    _gauge("unicron_node_disk_free_bytes", "node", "Free bytes of the fullest watched folder."),
    _gauge("unicron_node_gpu_temperature_celsius", "node", "Temperature of the node's hottest GPU."),
    _gauge("unicron_node_gpu_errors", "node kind", "GPU errors since the agent's start: ecc, nvlink, xid."),
    # the coordinator itself
    _gauge("unicron_coordinator_info", "version", "1; the label is the coordinator's version."),
    _gauge("unicron_coordinator_start_time_seconds", "", "Start of the coordinator's process, since 1970."),
    _gauge("unicron_coordinator_connections", "", "Connections of registered agents."),
    _counter("unicron_coordinator_inputs_total", "", "Inputs that the coordinator's state machine has processed."),
    _histogram("unicron_coordinator_loop_lag_seconds", "", "Delay of a timer of the event loop, 4 samples a second."),
    _histogram("unicron_store_write_seconds", "", "Duration of a write to the store."),
    _gauge("unicron_store_failing", "", "1 if some state is not written, e.g. on a full disk."),
)
_BY_NAME: Final = {metric.name: metric for metric in METRICS}


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


class _TaskCounts:
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
        if (number := _micro_batches_of(task)) is not None:
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
        occupation = _occupation_of(task, steps=self._stepped_life == task.life)
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
        self.tasks: dict[str, _TaskCounts] = {}
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

    def _of(self, task: Task, now: float) -> _TaskCounts:
        meter = self.tasks.get(task.id)
        if meter is None or (meter.ended_at is not None and task.over is None):  # a new task of this name
            meter = self.tasks[task.id] = _TaskCounts(now)
        return meter


def usual_seconds(task: Task) -> float | None:
    """Return the measured seconds of a step at the task's present size; None if unknown."""
    speed = task.measured.speeds.get(task.measured.pace.level.slots)
    return None if speed is None else speed.seconds


def _micro_batches_of(task: Task) -> int | None:
    """Return the micro-batches of one step; None if the model is spread over workers that have not reported it.

    It is the capacity of a worker that holds the whole model.
    """
    if (spread := task.layouts.spread) is not None:
        return spread.micro_batches
    return None if task.replicas else task.capacity()


_UNITS = ("seconds", "bytes", "ratio", "celsius")


class _Families:
    """Families by the names of the catalogue; a name that it lacks is a KeyError."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample of a counter or a gauge, unless its value is None."""
        if value is not None:
            self._family(name).add_metric(labels, value)

    def histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        """Add a histogram."""
        bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
        self._family(name).add_metric(labels, buckets=buckets, sum_value=histogram.sum)

    def _family(self, name: str) -> Any:
        from prometheus_client import metrics_core

        family = self.made.get(name)
        if family is None:
            metric = _BY_NAME[name]
            kinds = {
                "counter": metrics_core.CounterMetricFamily,
                "gauge": metrics_core.GaugeMetricFamily,
                "histogram": metrics_core.HistogramMetricFamily,
            }
            plain = name.removesuffix("_total")
            unit = next((unit for unit in _UNITS if plain.endswith(f"_{unit}")), "")
            family = kinds[metric.type](plain, metric.meaning, labels=metric.labels, unit=unit)
            self.made[name] = family
        return family


def families(meters: Meters, cluster: Cluster, *, version: str, started_at: float, store_failing: bool) -> list[Family]:
    """Return all families with their samples.

    Args:
        meters: the counts, reviewed just before.
        cluster: the machine's state.
        version: of this package.
        started_at: time.time() of the start of the coordinator's process.
        store_failing: whether some state is not written.
    """
    made = _Families()
    for name, meter in sorted(meters.tasks.items()):
        _counts(made, name, meter)
    for task in cluster.tasks.values():
        _task(made, cluster, task)
    for phase, histogram in meters.phases.items():
        made.histogram("unicron_incident_phase_seconds", histogram, phase)
    made.add("unicron_plans_total", meters.plans)
    made.histogram("unicron_plan_seconds", meters.plan_seconds)
    made.add("unicron_plan_waf_flops", meters.plan_waf)
    for name, places in cluster.lasting.allocation.items():
        made.add("unicron_plan_places", places, name)
    _nodes(made, cluster, meters)
    made.add("unicron_coordinator_info", 1, version)
    made.add("unicron_coordinator_start_time_seconds", started_at)
    made.add("unicron_coordinator_connections", len(cluster.conns))
    made.add("unicron_coordinator_inputs_total", meters.inputs)
    made.histogram("unicron_coordinator_loop_lag_seconds", meters.loop_lag)
    made.histogram("unicron_store_write_seconds", meters.store_seconds)
    made.add("unicron_store_failing", store_failing)
    return list(made.made.values())


def encoded(found: Iterable[Family], accept: str) -> tuple[bytes, str]:
    """Encode families; return the text and its content type.

    Args:
        found: the families.
        accept: the request's header Accept: OpenMetrics, or else Prometheus's text format.
    """
    from prometheus_client.exposition import choose_encoder

    kept = list(found)

    class Source:
        def collect(self) -> list[Family]:
            return kept

    encode, content_type = choose_encoder(accept)
    return encode(Source()), content_type


def _counts(made: _Families, name: str, meter: _TaskCounts) -> None:
    made.add("unicron_steps_total", meter.steps, name)
    made.add("unicron_steps_repeated_total", meter.repeated, name)
    made.add("unicron_micro_batches_total", meter.micro_batches, name)
    made.add("unicron_samples_total", meter.samples, name)
    made.add("unicron_micro_batches_recomputed_total", meter.recomputed, name)
    made.add("unicron_checkpoints_total", meter.checkpoints, name)
    made.histogram("unicron_step_seconds", meter.step_seconds, name)
    for kind, seconds in meter.time.seconds.items():
        made.add("unicron_task_time_seconds_total", seconds, name, kind)
    made.add("unicron_task_goodput_ratio", meter.time.goodput, name)
    for severity in ("SEV1", "SEV2", "SEV3"):
        made.add("unicron_incidents_total", meter.incidents[severity], name, severity)
    for failure, number in sorted(meter.failures.items()):
        made.add("unicron_failures_total", number, name, failure)
    for phase, lost in meter.lost_worker_seconds.items():
        made.add("unicron_incident_lost_worker_seconds_total", lost, name, phase)
    for phase, lost in meter.lost_flops.items():
        made.add("unicron_incident_lost_flops_total", lost, name, phase)


def _task(made: _Families, cluster: Cluster, task: Task) -> None:
    state, newest = state_of_task(task, cluster.lasting.assigned.values()), task.foremost
    for each in TASK_STATES:
        made.add("unicron_task_state", each == state, task.id, each)
    made.add("unicron_task_step", newest.step if newest else None, task.id)
    made.add("unicron_task_workers", len(task.live_members()), task.id)
    made.add("unicron_task_slots", len(task.slots), task.id)
    made.add("unicron_task_slots_limit", task.limit, task.id)
    made.add("unicron_task_degraded", bool(task.watch.degraded), task.id)
    made.add("unicron_task_stragglers", len(task.watch.stragglers), task.id)
    made.add("unicron_task_waf_flops", waf_of(cluster, task), task.id)
    made.add("unicron_task_checkpoint_step", task.checkpoint.step if task.checkpoint else None, task.id)
    complete = task.memory.complete
    made.add("unicron_task_memory_step", complete.step if complete else None, task.id)
    made.add("unicron_task_memory_bytes", sum(agent.memory_bytes for agent in task.agents.values()), task.id)
    standing = Counter("away" if agent.conn is None else agent_standing(task, agent) for agent in task.agents.values())
    for word in AGENT_STATES:
        made.add("unicron_task_agents", standing[word], task.id, word)
    phases = Counter(each.phase for each in task.accounts.open)
    for phase in PHASES[1:]:
        made.add("unicron_incidents_open", phases[phase], task.id, phase)


def waf_of(cluster: Cluster, task: Task) -> float | None:
    """Return the weighted FLOP/s of a task at its present size; None if FLOPs or step time are unknown."""
    flops, seconds = answers.flops_per_step(task, cluster.lasting.jobs.get(task.id)), usual_seconds(task)
    return None if flops is None or seconds is None else task.weight * flops / seconds


def _nodes(made: _Families, cluster: Cluster, meters: Meters) -> None:
    problems: Counter[str] = Counter()
    for task in cluster.tasks.values():
        for agent in task.agents.values():
            problems[agent.node] = max(problems[agent.node], len(agent.problems))
    standings = node_standings(cluster)
    states = Counter(each.state for each in standings.values())
    for state in NODE_STATES:
        made.add("unicron_nodes", states[state], state)
    for node, each in standings.items():
        made.add("unicron_node_up", each.up, node)
        made.add("unicron_node_drained", each.drained, node)
        made.add("unicron_node_problems", problems[node], node)
        if node in meters.readings:
            _health(made, node, meters.readings[node])


def _health(made: _Families, node: str, reading: wire.NodeReading) -> None:
    free = reading.memory_free_percent
    made.add("unicron_node_memory_free_ratio", None if free is None else free / 100, node)
    made.add("unicron_node_disk_free_bytes", min(reading.disk_free_bytes.values(), default=None), node)
    heat = [gpu.celsius for gpu in reading.gpus if gpu.celsius is not None]
    made.add("unicron_node_gpu_temperature_celsius", max(heat, default=None), node)
    if reading.gpus:
        made.add("unicron_node_gpu_errors", sum(gpu.ecc_errors for gpu in reading.gpus), node, "ecc")
        made.add("unicron_node_gpu_errors", sum(gpu.nvlink_errors for gpu in reading.gpus), node, "nvlink")
        made.add("unicron_node_gpu_errors", sum(len(gpu.xids) for gpu in reading.gpus), node, "xid")
