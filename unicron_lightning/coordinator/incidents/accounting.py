"""The cost of each incident: its phases in seconds, and the loss of the task in each phase.

An incident's life, derived from its task's events as they are emitted:

    fault --- detection ---> known --- transition ---> first step --- sub-healthy ---> restored, replanned or ended

* *detection* ends when the coordinator learns of the fault: a worker's death is dated by its agent, an agent's death
  by the end of its connection;
* *transition* ends when the new world finishes its first step (plain script: when it is restarted);
* *sub-healthy* ends when the task has as many slots as before (restored), or as many as it is due by an operator's
  order or by a plan that allocates as many places as before (replanned), or when the task is over (ended).

During detection and transition the task is interrupted and all its capacity is lost; while sub-healthy, the missing
part is lost. Of overlapping incidents, each accounts only for the capacity that the next one found, so nothing is
counted twice. A second failure before the first step belongs to the same incident. All records are in `state.Task`, so
a restarted coordinator continues with them; the time it was away counts.

Two units: worker-seconds, and WAF-seconds (weight x FLOP/s x seconds) where FLOPs and step times are known;
docs/monitoring.md defines each number.

**Measurements** of running tasks: step times by size, transitions, and run times until failure.

Step times come from `wire.Progress`, which every worker sends once a second. Members step together, so the reports of
one worker are enough: the first to finish a step in the epoch. An interval is the time between two of its reports,
divided by the steps between them. The median of the newest intervals counts, so validation, checkpoints and stalls do
not distort it.

The measurement restarts with each settled epoch, after its first step, which contains the transition.
Everything else comes from the events of the task's log, as they are emitted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.actions import Part, Turn
from unicron_lightning.coordinator.allocation import answers
from unicron_lightning.coordinator.incidents.facts import (
    PHASES,
    Accounts,
    AgentLoss,
    Bill,
    BrokenConnection,
    EpochPublished,
    EpochSettled,
    FirstStep,
    Incident,
    IncidentClosed,
    IncidentPhase,
    Level,
    LifeBegun,
    Loss,
    Measured,
    MeasuredTransition,
    PhaseCost,
    SlotGrant,
    Speed,
    SpeedMeasurement,
    TaskEnd,
    TransitionName,
    WorkerDeath,
    cause_of,
    explains,
    is_failure,
    left_to,
    occurred_at,
)
from unicron_lightning.coordinator.state import Cluster, Lasting, Task
from unicron_lightning.jobs import Job

_WINDOW: Final = 32
"""Number of intervals whose median is taken."""
_LEAST: Final = 3
_FIRM: Final = 8
"""Number of intervals that outweigh an earlier measurement of a size."""
_NOISE: Final = 0.03
"""Relative change below which a measurement is ignored, so that plans made ahead stay valid."""
_TO_DEVIATION: Final = 1.4826
"""Ratio of the standard deviation to the median absolute deviation of a normal distribution."""
_SIZES_KEPT: Final = 64
_TRANSITIONS_KEPT: Final = 64


def progressed(task: Task, turn: Turn, message: wire.Progress) -> bool:
    """Record a worker's newest step; return whether it is the first one reported in the epoch."""
    measured = task.measured
    if message.flops_per_step is not None and message.flops_per_step != measured.flops_per_step:
        measured.flops_per_step = message.flops_per_step
        turn.save(task)
    if (message.samples_per_step or 0) > measured.samples_per_step:
        measured.samples_per_step = message.samples_per_step or 0
        turn.save(task)
    pace = measured.pace
    others = pace.worker not in ("", message.worker)
    if pace.stands or not pace.epoch or others or message.step <= pace.step:
        return False
    at = turn.now if message.at is None else message.at
    seconds = (at - pace.at) / (message.step - pace.step)
    first = not pace.worker
    pace.worker, pace.step, pace.at = message.worker, message.step, at
    if not first and seconds > 0:  # clocks may be set back
        pace.seconds = [*pace.seconds, seconds][-_WINDOW:]
        _conclude(task, turn, pace)
    return first


def _measure_event(task: Task, turn: Turn, event: ev.Emit) -> None:
    """Measure by an event of the task's log."""
    measured = task.measured
    match event.fact:
        case EpochPublished(kind=kind) if kind not in wire.PLANNED:
            measured.pace.stands = True
            measured.begun = measured.begun or turn.now  # otherwise a failure during a transition
        case EpochSettled() as settled:
            _settled(task, turn, settled)
        case LifeBegun():
            measured.begun = 0.0
            _resize(measured, turn, Level(slots=0, workers=0))
        case SlotGrant() if task.life > 1 and task.epoch is None:
            measured.begun = measured.begun or turn.now
        case WorkerDeath() as death if is_failure(death):
            measured.lifetimes.workers_lost += 1
        case AgentLoss(agent=agent) if any(worker.startswith(f"{agent}/") for worker in task.established):
            measured.lifetimes.slots_lost += 1
        case TaskEnd():
            _resize(measured, turn, Level(slots=0, workers=0))
            _keep_lifetimes(measured, turn)
        case FirstStep(epoch=epoch, transition=transition) if epoch == measured.pace.epoch:
            _stepped(task, turn, transition)


def _settled(task: Task, turn: Turn, epoch: EpochSettled) -> None:
    measured = task.measured
    slots = {worker.rpartition("/")[0] for worker in task.established}
    level = Level(slots=len(slots), workers=len(task.established))
    steps = [task.workers[worker].step for worker in task.established if worker in task.workers]
    before = measured.level
    _resize(measured, turn, level)
    if epoch.kind in wire.PLANNED:
        measured.begun = turn.now
    measured.pace = SpeedMeasurement(epoch=epoch.number, level=level, before=before, step=max(steps, default=0))


def _stepped(task: Task, turn: Turn, kind: TransitionName) -> None:
    """Record the first finished step of the newest settled epoch; all its members report it."""
    measured = task.measured
    begun, measured.begun = measured.begun, 0.0
    pace = measured.pace
    in_place = kind == "shrink_in_place" and pace.level.workers >= pace.before.workers
    if not begun or in_place or (kind == "restart" and task.life == 1):
        return  # reported already; or no worker was lost, as after a broken connection; or the task's start
    seen = MeasuredTransition(kind=kind, seconds=max(turn.now - begun, 1e-3), at=turn.now)
    measured.transitions = [*measured.transitions, seen][-_TRANSITIONS_KEPT:]
    turn.save(task)


def _resize(measured: Measured, turn: Turn, level: Level) -> None:
    """Record the size that runs from now on."""
    seconds = max(0.0, turn.now - measured.since) if measured.since else 0.0
    measured.lifetimes.slot_seconds += measured.level.slots * seconds
    measured.lifetimes.worker_seconds += measured.level.workers * seconds
    measured.level, measured.since = level, turn.now


def _keep_lifetimes(measured: Measured, turn: Turn) -> None:
    """Keep the ended task's run times and failures for the cluster's statistics."""
    own, past = measured.lifetimes, turn.lasting.lifetimes
    for name in own.__struct_fields__:
        setattr(past, name, getattr(past, name) + getattr(own, name))
    measured.lifetimes = type(own)()
    turn.save_lasting()


def _conclude(task: Task, turn: Turn, pace: SpeedMeasurement) -> None:
    """Record the step time of this size, if there are enough measurements and it has changed."""
    number, known = len(pace.seconds), task.measured.speeds.get(pace.level.slots)
    if known is not None and known.workers != pace.level.workers:
        known = None
    if not is_enough(pace) or (known is not None and number < min(_FIRM, known.intervals)):
        return
    if known is not None and abs(pace.median / known.seconds - 1) <= _NOISE and number < 2 * known.intervals:
        return
    record_speed(task, turn, pace)


def is_enough(pace: SpeedMeasurement) -> bool:
    """Whether there are intervals enough for a measurement."""
    return len(pace.seconds) >= _LEAST


def record_speed(task: Task, turn: Turn, pace: SpeedMeasurement) -> None:
    """Record the step time of the measured size, in place of an earlier one."""
    median, number = pace.median, len(pace.seconds)
    spread = _TO_DEVIATION * statistics.median(abs(seconds / median - 1) for seconds in pace.seconds)
    speed = Speed(workers=pace.level.workers, seconds=median, spread=spread, intervals=number, at=turn.now)
    speeds = {**task.measured.speeds, pace.level.slots: speed}
    if len(speeds) > _SIZES_KEPT:
        del speeds[min(speeds, key=lambda slots: speeds[slots].at)]
    task.measured.speeds = speeds
    turn.save(task)


_NOTHING: Final = Level(slots=0, workers=0)
_MOST_DETECTION_SECONDS: Final = 3600.0
"""Longer than any detection limit: a fault dated earlier was dated by a different clock."""


def record_event(task: Task, turn: Turn, event: ev.Emit) -> None:
    """Process an event of the task's log: measurements first, then the accounts."""
    _measure_event(task, turn, event)
    accounts = task.accounts
    if event.incident is not None and _number(event.incident) > accounts.opened:
        _open(task, turn, event)
    fact = event.fact
    if explains(fact) and accounts.open and event.incident == accounts.open[-1].id:
        accounts.open[-1].failures += is_failure(fact)
        if accounts.open[-1].cause == BrokenConnection.event:  # reported first; the death explains it
            accounts.open[-1].cause = _cause(event)
    match fact:
        case FirstStep(epoch=epoch, at=at) if epoch == task.measured.pace.epoch:
            stepped(task, turn, at)
        case EpochSettled(kind="leave"):
            _taken_by_plan(task, turn)
        case TaskEnd():
            for incident in list(accounts.open):
                _close(task, turn, incident, "ended")


def stepped(task: Task, turn: Turn, at: float) -> None:
    """Record a finished step of the newest settled world: the first one that is known."""
    accounts, epoch = task.accounts, task.measured.pace.epoch
    waiting = [incident for incident in accounts.open if incident.stepped_at is None and incident.number < epoch]
    at = min(turn.now, max([at, *(incident.known_at for incident in waiting)])) if waiting else turn.now
    _advance(accounts, at)
    for incident in waiting:
        incident.stepped_at = at
        turn.save(task)
    accounts.level = task.measured.pace.level


def review(tasks: Iterable[Task], turn: Turn) -> None:
    """Close incidents that have healed, at the end of a turn, and record changes that no event reports."""
    given_out = sum(turn.lasting.allocation.values())
    for task in tasks:
        if task.plain:
            _review_plain(task, turn)
        if task.accounts.open:
            _close_healed(task, turn)
        else:
            task.accounts.places = given_out


def _close_healed(task: Task, turn: Turn) -> None:
    accounts, lasting = task.accounts, turn.lasting
    # Slots of a settled world count from its first step; slots about to leave no longer count.
    slots = min(accounts.level.slots, task.measured.pace.level.slots if task.elastic else accounts.level.slots)
    for incident in list(accounts.open):
        if incident.stepped_at is not None and slots >= _due_slots(task, incident, lasting):
            restored = slots >= incident.started_with.slots
            _close(task, turn, incident, "restored" if restored else "replanned")


def bill(task: Task, incident: Incident, job: Job | None, until: float) -> Bill:
    """Return the cost of an incident so far.

    Args:
        task: the task that the incident belongs to.
        incident: open or about to be closed.
        job: the task's definition, if it was submitted.
        until: time.time(); the incident's end if it has ended.
    """
    known, stepped_at = incident.known_at, incident.stepped_at
    seconds = {
        "detection": known - incident.fault_at,
        "transition": (until if stepped_at is None else stepped_at) - known,
        "sub_healthy": 0.0 if stepped_at is None else until - stepped_at,
    }
    flops = answers.flops_per_step(task, job)
    losses = [*incident.losses, *_since(task.accounts, incident, until)]
    return Bill(
        cause=incident.cause,
        failures=incident.failures,
        fault_at=incident.fault_at,
        known_at=known,
        stepped_at=stepped_at,
        slots_before=incident.started_with.slots,
        workers_before=incident.started_with.workers,
        weight=task.weight,
        flops_per_step=flops,
        phases={phase: _cost(task, losses, phase, max(0.0, seconds[phase]), flops) for phase in PHASES},
    )


def totals(bills: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum bills by phase; ``unknown_waf`` counts the incidents missing from the sums of WAF-seconds."""
    sums = {phase: {"seconds": 0.0, "worker_seconds": 0.0, "waf_seconds": 0.0} for phase in PHASES}
    number = unknown = 0
    for each in bills:
        number += 1
        unknown += any(each["phases"][phase]["waf_seconds"] is None for phase in PHASES)
        for phase in PHASES:
            for name, value in each["phases"][phase].items():
                sums[phase][name] = round(sums[phase][name] + (value or 0.0), 6)
    return {"incidents": number, "unknown_waf": unknown, "phases": sums}


def book(
    closed: Iterable[Mapping[str, Any]], cluster: Cluster, now: float, *, only: str | None = None
) -> dict[str, Any]:
    """Return all incidents, closed ones first, and their sums, as plain JSON.

    Args:
        closed: the log's events of the kind `IncidentClosed`.
        cluster: provides the open incidents.
        now: time.time().
        only: a task's id, or None for all tasks.
    """
    bills = [{"task": event["task"], "incident": event["incident"], **event["fields"]} for event in closed]
    for task in cluster.tasks.values():
        for incident in task.accounts.open if only in (None, task.id) else ():
            about = msgspec.to_builtins(bill(task, incident, cluster.lasting.jobs.get(task.id), now))
            bills.append({"task": task.id, "incident": incident.id, "outcome": None, "closed_at": None, **about})
    return {"incidents": bills, "totals": totals(bills)}


def _open(task: Task, turn: Turn, event: ev.Emit) -> None:
    accounts = task.accounts
    assert event.incident is not None
    accounts.opened = _number(event.incident)
    fault = occurred_at(event.fact) or turn.now
    if turn.now - fault > _MOST_DETECTION_SECONDS:
        fault = turn.now  # dated by a clock that differs: no detection takes that long
    standing = any(incident.stepped_at is None for incident in accounts.open)
    level = _NOTHING if standing else accounts.level
    incident = Incident(
        id=event.incident,
        cause=_cause(event),
        fault_at=min(float(fault), turn.now),
        known_at=turn.now,
        number=task.measured.pace.epoch,
        started_with=accounts.level,
        due=level,
    )
    _advance(accounts, turn.now)
    accounts.open = [*accounts.open, incident]
    seconds = turn.now - incident.fault_at
    incident.losses = _added(incident.losses, Loss(phase="detection", due=level, had=_NOTHING, seconds=seconds))


def _close(task: Task, turn: Turn, incident: Incident, outcome: str) -> None:
    _advance(task.accounts, turn.now)
    about = bill(task, incident, turn.lasting.jobs.get(task.id), turn.now)
    task.accounts.open = [other for other in task.accounts.open if other is not incident]
    turn.log_for(task, incident.id, IncidentClosed(outcome=outcome, closed_at=turn.now, bill=about))


def _taken_by_plan(task: Task, turn: Turn) -> None:
    """Deduct slots removed by a planned change from the due sizes of open incidents."""
    _advance(task.accounts, turn.now)
    before, after = task.measured.pace.before, task.measured.pace.level
    slots, workers = max(0, before.slots - after.slots), max(0, before.workers - after.workers)
    for incident in task.accounts.open:
        due = incident.due
        incident.due = Level(slots=max(0, due.slots - slots), workers=max(0, due.workers - workers))


def _due_slots(task: Task, incident: Incident, lasting: Lasting) -> int:
    planned = lasting.allocation.get(task.id)
    as_many = sum(lasting.allocation.values()) >= task.accounts.places
    due = min(incident.due.slots, task.limit)
    return min(due, planned) if planned is not None and as_many else due


def _review_plain(task: Task, turn: Turn) -> None:
    """Update the accounts of a plain script, for which only starts are known."""
    accounts = task.accounts
    if task.regrouping or not task.slots:
        return
    workers = sum(task.agents[agent].local_world or 1 for agent in task.slots)
    level = Level(slots=len(task.slots), workers=workers)
    if level == accounts.level and all(incident.stepped_at is not None for incident in accounts.open):
        return
    _advance(accounts, turn.now)
    if task.incident is None:
        for incident in accounts.open:
            incident.stepped_at = turn.now if incident.stepped_at is None else incident.stepped_at
        accounts.level = level


def _advance(accounts: Accounts, until: float) -> None:
    """Record the losses of all open incidents up to a time."""
    for incident in accounts.open:
        for loss in _since(accounts, incident, until):
            incident.losses = _added(incident.losses, loss)
    accounts.since = max(until, accounts.since)


def _since(accounts: Accounts, incident: Incident, until: float) -> list[Loss]:
    """Compute an incident's losses after `Accounts.since`."""
    seconds = until - max(accounts.since, incident.known_at)
    place = next((place for place, other in enumerate(accounts.open) if other is incident), None)
    if place is None or seconds <= 0:
        return []
    present = _NOTHING if incident.phase == "transition" else accounts.level
    had = left_to([other.due for other in accounts.open], place, present)
    return [Loss(phase=incident.phase, due=incident.due, had=had, seconds=seconds)]


def _added(losses: list[Loss], loss: Loss) -> list[Loss]:
    """Add `loss`, merging it with an entry of the same phase and sizes; the list is bounded by the number of sizes."""
    if loss.seconds <= 0:
        return losses
    for place, other in enumerate(losses):
        if (other.phase, other.due, other.had) == (loss.phase, loss.due, loss.had):
            more = Loss(phase=loss.phase, due=loss.due, had=loss.had, seconds=other.seconds + loss.seconds)
            return [*losses[:place], more, *losses[place + 1 :]]
    return [*losses, loss]


def _cost(task: Task, losses: Iterable[Loss], phase: IncidentPhase, seconds: float, flops: float | None) -> PhaseCost:
    """Sum a phase's losses."""
    workers, steps = 0.0, 0.0
    known = flops is not None
    for loss in losses:
        if loss.phase == phase:
            workers += max(0, loss.due.workers - loss.had.workers) * loss.seconds
            due, had = _rate(task, loss.due), _rate(task, loss.had)
            known = known and due is not None and had is not None
            steps += max(0.0, (due or 0.0) - (had or 0.0)) * loss.seconds
    waf = round(task.weight * steps * flops, 6) if known and flops is not None else None
    return PhaseCost(seconds=round(seconds, 6), worker_seconds=round(task.weight * workers, 6), waf_seconds=waf)


def _rate(task: Task, level: Level) -> float | None:
    """Return steps per second at a size: measured, or scaled in proportion from the nearest measured size."""
    if not level.slots:
        return 0.0
    speeds = task.measured.speeds
    if not speeds:
        return None
    nearest = min(speeds, key=lambda slots: abs(slots - level.slots))
    return level.slots / nearest / speeds[nearest].seconds


def _cause(event: ev.Emit) -> str:
    return cause_of(event.fact) or str(event.fields.get("cause", event.name))


def _number(incident: str) -> int:
    """Return the number in an incident's id; 0 if it has none."""
    digits = incident.removeprefix("i")
    return int(digits) if digits.isdecimal() else 0


PART: Final = Part(record=record_event)
