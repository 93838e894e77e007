"""Errors that workers and agents report: each is logged once, with place and cause, and handled by its severity.

Consequences of a reported error are not reported again. A worker whose process ends by the error is removed from the
task at once, so its exit a second later is no new failure; connections that break meanwhile belong to the same
incident.

An agent's readings of its node's health are judged here, too. A problem is reported once, when it appears, and handled
by the severity of its kind. An agent with a barring problem gets no slot, logs the reason, and becomes eligible again
after a healthy reading. Workers that already run are left alone: they report errors of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.incidents.facts import REPORTED, ErrorFact
from unicron_lightning.coordinator.membership import epochs, workers
from unicron_lightning.coordinator.part import Part, on
from unicron_lightning.coordinator.severity import apply
from unicron_lightning.coordinator.severity.errors import REPORTED_ONLY, SEVERITY, STOPPING, known
from unicron_lightning.coordinator.severity.record import UnattributedError
from unicron_lightning.coordinator.severity.workflow import Error
from unicron_lightning.coordinator.state import Agent, Task, Worker, round_of
from unicron_lightning.detection.health import Pattern, problems

_KEPT: Final = 50
_SHOWN: Final = 6
"""Frames of an exception that are kept for the diagnosis of a stopped task."""


def handle_error(task: Task, turn: Turn, agent: Agent, message: wire.ErrorReport) -> None:
    """Handle an error report of a worker, or of an agent."""
    message = _judged(message, turn.limits.patterns)
    kind = known(message.kind)
    worker = None if message.worker is None else task.workers.get(message.worker)
    if worker is not None and worker.agent == agent.id:
        # That of one worker ends the task, and the others report the same.
        if kind != "programs_differ" and (message.ends or SEVERITY[kind] == "SEV2"):
            _lost(task, turn, agent, worker, message)
            return
    elif message.worker is not None:
        _unknown(task, turn, agent, message)
        return
    report = (message.worker or agent.id, kind, message.at)
    if report not in task.severity.reports:
        task.severity.reports = [*task.severity.reports, report][-_KEPT:]
        _goes_on(task, turn, agent, message)


def handle_node_error(task: Task, turn: Turn, agent: Agent, kind: str, cause: str, **details: str) -> None:
    """Handle an error of an agent's node that the coordinator has found itself."""
    about: dict[str, Any] = {"kind": kind, "cause": cause, "details": details}
    handle_error(task, turn, agent, wire.ErrorReport(worker=None, phase="", step=None, at=turn.now, **about))


def _judged(message: wire.ErrorReport, patterns: Sequence[Pattern]) -> wire.ErrorReport:
    """Apply the user's own patterns: the first match sets the error's kind."""
    details = message.details
    text = f"{details.get('type', '')}: {details.get('message', message.cause)}"
    own = next((pattern for pattern in patterns if pattern.found_in(text)), None)
    return message if own is None else msgspec.structs.replace(message, kind=own.kind)


def _lost(task: Task, turn: Turn, agent: Agent, worker: Worker, message: wire.ErrorReport) -> None:
    """Handle the error of a worker on record that ends by it, or has to be killed because of it."""
    kind = known(message.kind)
    unjudged = task.severity.unjudged
    # A broken connection to a peer does not incriminate the peer if another worker has just failed.
    symptom = SEVERITY[kind] == "SEV3" and any(failure.agent != agent.id for failure in unjudged)
    if worker.id in epochs.needed(task):
        epochs.open_incident(task)
    _log(task, turn, agent, message, task.incident, symptom=symptom)
    if apply.decides_errors(task) and not task.finishing and not symptom:
        failure = apply.failure_of(task, turn, agent, _told(message), worker.id)
        apply.occurred(task, turn, Error(failure=failure, round=agent.round, training=bool(task.established)))
    workers.died(task, turn, [worker], REPORTED, at=message.at, meaning=message.cause, own=True)
    if not message.ends:
        turn.send(agent, wire.Fence(worker=worker.id, reason=f"{kind}: {message.cause}"))


def _unknown(task: Task, turn: Turn, agent: Agent, message: wire.ErrorReport) -> None:
    """Record the error of a worker without a hello (starting, or of a plain script): it counts when its process
    ends.
    """
    assert message.worker is not None
    unattributed = task.severity.unattributed
    present = round_of(message.worker) == agent.round and message.worker not in agent.gone and not agent.stopping
    if not present or message.worker in unattributed:
        return
    if message.ends:
        unattributed[message.worker] = _told(message)
        if not task.elastic and not task.regrouping:
            epochs.open_incident(task)
    _log(task, turn, agent, message, None if task.elastic else task.incident)
    if message.ends and not task.elastic and known(message.kind) == "config_error":
        apply.refused(task, turn, agent, unattributed[message.worker], message.worker)


def _told(message: wire.ErrorReport) -> UnattributedError:
    """Describe an error that ends a worker for the workflow."""
    kind = known(message.kind)
    frames = frames_of(message)[-_SHOWN:]
    place, first = place_of(message, kind), message.details.get("first") is True
    fault = fault_of(message, kind)
    return UnattributedError(
        kind=kind, cause=message.cause, step=message.step, fault=fault, place=place, first=first, frames=frames
    )


def _goes_on(task: Task, turn: Turn, agent: Agent, message: wire.ErrorReport) -> None:
    """Handle an error that ends no process: of the node, or of a worker that only has to reconnect."""
    kind = known(message.kind)
    if kind in STOPPING and task.over is not None:
        return  # another worker has reported it
    in_place = SEVERITY[kind] == "SEV3" and kind not in (*REPORTED_ONLY, *STOPPING)
    if in_place and task.incident is not None:
        return  # the cause of the broken connection is known
    acts = apply.decides_errors(task) and not task.finishing
    if in_place and acts:
        epochs.open_incident(task)
        apply.named(task, turn, agent)
    _log(task, turn, agent, message, task.incident if in_place or SEVERITY[kind] != "SEV3" else None)
    if acts or kind in REPORTED_ONLY:
        failure = apply.failure_of(task, turn, agent, UnattributedError(kind=kind, cause=message.cause), None)
        apply.occurred(task, turn, Error(failure=failure))


def _log(
    task: Task, turn: Turn, agent: Agent, message: wire.ErrorReport, incident: str | None, *, symptom: bool = False
) -> None:
    kind = known(message.kind)
    error = ErrorFact(
        node=agent.node,
        agent=agent.id,
        worker=message.worker,
        rank=task.rank_of(message.worker),
        phase=message.phase,
        step=message.step,
        kind=kind,
        severity=SEVERITY[kind],
        cause=message.cause,
        ends=message.ends,
        happened_at=message.at,
        received_at=turn.now,
        details=message.details,
        told_as=message.kind if kind != message.kind else "",
        symptom=symptom,
    )
    turn.log_for(task, incident, error)


def handle_reading(task: Task, turn: Turn, agent: Agent, reading: wire.NodeReading) -> None:
    """Handle an agent's reading of its node's health."""
    now = {problem.check: problem for problem in problems(reading, turn.limits.health)}
    elsewhere = {check for other in task.agents.values() if other.node == agent.node for check in other.problems}
    barred = [problem.cause for problem in now.values() if problem.bars]
    for check, problem in now.items():
        if check not in elsewhere:
            handle_node_error(task, turn, agent, problem.kind, problem.cause, check=check)
    gone = sorted(set(agent.problems) - set(now))
    agent.problems = list(now)
    if gone:
        turn.emit_apart(task, "node_healthy", agent=agent.id, node=agent.node, checks=gone)
    before, agent.unhealthy = agent.unhealthy, "; ".join(barred)
    if before != agent.unhealthy:
        turn.places_changed = True
        turn.decisions.setdefault(task.id, [])  # makes the turn review the task
        turn.send(agent, wire.Barred(reason=agent.barred))
        turn.save(task)


_ELSEWHERE: Final = ("/site-packages/", "/dist-packages/", "/lib/python3", "/unicron_lightning/")
"""Parts of the paths of libraries, Python and this package: frames outside them are the user's."""
_FRAMES: Final = 12


def frames_of(message: wire.ErrorReport) -> tuple[str, ...]:
    """The last frames of the exception, the innermost last: ``file:line function``."""
    frames = message.details.get("frames")
    return tuple(str(frame)[:300] for frame in frames[-_FRAMES:]) if isinstance(frames, list) else ()


def fault_of(message: wire.ErrorReport, kind: str) -> str:
    """Identify an exception of the program: `place_of`, and the step."""
    place = place_of(message, kind)
    return f"{place}, after step {message.step}" if place else ""


def place_of(message: wire.ErrorReport, kind: str) -> str:
    """Identify an exception of the program by its type and the place that raised it.

    Machines and networks fail by other kinds, and may work when tried again.

    Args:
        message: the worker's report.
        kind: its kind, after the user's patterns.

    Returns:
        "" for everything that is no unclassified exception with a traceback.
    """
    frames = frames_of(message)
    if kind != "other_software_error" or not frames or not message.ends:
        return ""
    own = [frame for frame in frames if not any(part in frame for part in _ELSEWHERE)]
    places = dict.fromkeys([frames[-1], *own[-1:]])
    return f"{_type(message.details)} in {', called by '.join(map(_short, places))}"


def _type(details: dict[str, Any]) -> str:
    return str(details.get("type", ""))[:200]


def _short(frame: str) -> str:
    """Without the folder, which may differ between nodes."""
    return frame.rsplit("/", 1)[-1]


PART: Final = Part(receivers=(on(wire.ErrorReport, handle_error), on(wire.NodeReading, handle_reading)))
