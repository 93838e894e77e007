"""The severity workflow applied to a task: its inputs, and the effects of its decisions.

`worker_died`, `agent_lost` and `receive` process messages before they change the task. `review`, after each input,
determines by itself which epochs were published and settled, and when a new life began.

**Errors that workers and agents report** are logged once, with place and cause, and handled by their severity.

Consequences of a reported error are not reported again. A worker whose process ends by the error is removed from the
task at once, so its exit a second later is no new failure; connections that break meanwhile belong to the same
incident.

An agent's readings of its node's health are judged here, too. A problem is reported once, when it appears, and handled
by the severity of its kind. An agent with a barring problem gets no slot, logs the reason, and becomes eligible again
after a healthy reading. Workers that already run are left alone: they report errors of their own.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator import connectivity
from unicron_lightning.coordinator.actions import Part, Turn, on
from unicron_lightning.coordinator.incidents.facts import FIRST_STEPS, REPORTED, ErrorFact
from unicron_lightning.coordinator.membership import epochs, workers
from unicron_lightning.coordinator.severity import workflow
from unicron_lightning.coordinator.severity.record import (
    REPEATABLE,
    REPORTED_ONLY,
    SEVERITY,
    STOPPING,
    Awaited,
    Failure,
    UnattributedError,
    known,
    was_sent,
)
from unicron_lightning.coordinator.severity.rules import Case, Decision, FailureContext
from unicron_lightning.coordinator.severity.workflow import Error
from unicron_lightning.coordinator.state import Agent, Task, Worker, round_of
from unicron_lightning.detection.health import Pattern, problems

_FIRST_HOLD_SECONDS, LAST_HOLD_SECONDS = 1.0, 30.0
"""Delay of an agent's grant after its workers have failed at their first start, and its limit: it doubles each time."""


def worker_died(task: Task, turn: Turn, agent: Agent, message: wire.WorkerDied) -> None:
    """Handle the end of a worker's process, before the worker is removed."""
    ended_well = message.cause == "exit" and message.code == 0
    worker = task.workers.get(message.worker)
    registered = worker is not None and worker.agent == agent.id
    # Workers in `gone` were stopped or killed on order, or died with a sibling that was reported.
    starting = round_of(message.worker) == agent.round and message.worker not in agent.gone
    starting = starting and agent.id in task.slots and not agent.stopping
    if not _decides_starts(task) or task.finishing or ended_well or not (registered or starting):
        return
    kind = known(message.kind or ("silent" if message.cause == "silent" else "exited_abnormally"))
    told = task.severity.unattributed.get(message.worker) or UnattributedError(
        kind=kind, cause=message.meaning or _cause(message), output=message.output
    )
    failure = _failure_of(task, turn, agent, told, message.worker)
    sent = was_sent(message)
    error = Error(
        failure=failure, round=agent.round, training=bool(task.established), sent=sent, registered=task.elastic
    )
    occurred(task, turn, error)
    if (exits := task.severity.exits.get(agent.id, 0)) and not task.elastic:
        agent.held = True
        seconds = min(LAST_HOLD_SECONDS, _FIRST_HOLD_SECONDS * 2 ** (exits - 1))
        turn.timer("held", seconds, task=task.id, agent=agent.id)


def agent_lost(task: Task, turn: Turn, agent: Agent) -> None:
    """Handle the loss of an agent with its workers, before they are removed."""
    members = [worker for worker in task.workers_of(agent.id) if worker.id in task.severity.joined]
    if decides_errors(task) and not task.finishing and members:
        lost = UnattributedError(kind="lost_connection", cause="the agent was lost")
        failure = _failure_of(task, turn, agent, lost, members[0].id)
        occurred(task, turn, Error(failure=failure))


def receive(
    task: Task,
    turn: Turn,
    agent: Agent,
    message: wire.Progress | wire.CheckpointSaved | wire.WorkerEvent | wire.CommError,
) -> None:
    """Handle a worker's report of its progress, or of a failed connection."""
    record, worker = task.severity, task.workers.get(message.worker)
    fit, step = 0 if worker is None else worker.fit, None
    match message:
        case wire.Progress():
            fit, step = message.fit, message.step if message.worker in record.joined else None
        case wire.CheckpointSaved():
            step = message.step if message.worker in record.joined else None
        case wire.WorkerEvent() if message.worker in record.joined:
            if message.name in FIRST_STEPS:
                step = message.fields.get("step")
            elif message.name == "entered_epoch" and message.fields.get("epoch") == task.number:
                record.reports_entry = True
                if worker is not None:
                    worker.entered = task.number
        case wire.CommError() if message.worker in record.joined and message.epoch in (record.epoch, task.number):
            named(task, turn, agent)
    if isinstance(step, int) and (step := record.steps(fit, step)) > record.step:
        weighs = bool(record.attempts or record.lives or record.starts or record.series or record.reattempts)
        workflow.progressed(record, step, turn.limits)
        feed(task, turn, [])
        if weighs:
            turn.save(task)


def comm_error_due(task: Task, turn: Turn) -> None:
    """Handle a communication error that no death has explained in time."""
    if not task.comm_error_epoch:
        return
    if connectivity.delays(task, turn):
        return
    pending = task.epoch is not None and not task.settled and task.epoch.kind not in wire.PLANNED
    if not decides_errors(task) or task.comm_error_epoch != task.number or task.epoch is None or pending:
        epochs.comm_error_due(task, turn)
        return
    # The first to report it need not be the cause: see `workflow.suspect`.
    kind = "link_flapping" if _flaps(task, turn) else "connection_failed"
    failure = Failure(kind=kind, node="", agent="", step=task.severity.step, at=turn.now)
    occurred(task, turn, Error(failure=failure))
    task.comm_error_epoch = 0


def _flaps(task: Task, turn: Turn) -> bool:
    """Count a renewal of the connections between workers; report links that break often, once for each such series."""
    record, limits = task.severity, turn.limits
    record.renewals = [*(at for at in record.renewals if turn.now - at < limits.flapping_window), turn.now]
    number, since = len(record.renewals), record.renewals[0]
    if number < limits.flapping_cuts:
        return False
    record.renewals = []
    error = ErrorFact(
        step=record.step,
        kind="link_flapping",
        severity=SEVERITY["link_flapping"],
        cause=f"connections between workers broke {number} times within {turn.now - since:.0f} s, and were renewed",
        happened_at=since,
        received_at=turn.now,
        details={"times": number},
    )
    turn.log(task, error)
    return True


def overdue(task: Task, turn: Turn) -> None:
    """Handle the timeout of the newest epoch."""
    record, late = task.severity, []
    if decides_errors(task) and task.epoch is not None:
        live = [task.workers[member.worker] for member in task.live_members()]
        late = [w.agent for w in live if (w.entered != task.number if task.settled else w.ready != task.number)]
    record.awaited = ""
    agents = [(agent_id, task.agents[agent_id].node) for agent_id in dict.fromkeys(late)]
    feed(task, turn, workflow.overdue(_case(task, turn), agents))
    turn.save(task)


def restore(task: Task, _turn: Turn) -> None:
    """Reset after a restart of the coordinator, which has no timers."""
    record = task.severity
    record.awaited = ""
    # Of an older version it is not known which members have entered.
    record.reports_entry = record.reports_entry and any(w.entered == task.number for w in task.workers.values())


def lift(task: Task, turn: Turn, node: str) -> None:
    """Forget the failures of a node that an operator has undrained."""
    if task.severity.series.pop(node, None) is not None:
        turn.save(task)


def review(task: Task, turn: Turn) -> bool:
    """Process the epochs since the last input, and carry out decisions.

    Returns:
        Whether the task has changed, and has to be reviewed again.
    """
    if not _decides_starts(task):
        return False
    record = task.severity
    if task.life != record.life:
        record.life = task.life
        feed(task, turn, workflow.new_life(_case(task, turn)))
    planned = task.epoch is not None and task.epoch.kind in wire.PLANNED
    renewed = False
    if task.number != record.epoch:
        if planned and not record.settled:
            _settled(task, turn)  # and another change followed at once
        record.epoch, record.settled, renewed = task.number, False, True
        record.rounds = {agent: number for agent, number in record.rounds.items() if agent in task.agents}
        record.places = {agent: place for agent, place in record.places.items() if agent in task.agents}
    if task.settled and not record.settled:
        record.settled = renewed = True
        _settled(task, turn)
    _set_timer(task, turn, planned=planned, renewed=renewed)
    decisions = turn.decisions.pop(task.id, [])
    if task.finishing:  # a recovery has to end here as well, but the task is no longer stopped
        decisions = [decision for decision in decisions if decision.action != "stop"]
    changed = [_carry_out(task, turn, decision) for decision in decisions if task.over is None]
    return any(changed)


def decides_errors(task: Task) -> bool:
    """Whether errors of the task are decided on."""
    return task.elastic and _decides_starts(task)


def _decides_starts(task: Task) -> bool:
    """Whether failures of starting workers are decided on; those of a plain script are torchrun's concern."""
    return task.over is None and not task.rebuilding and not task.plain


def feed(task: Task, turn: Turn, decisions: list[Decision]) -> None:
    """Have decisions carried out at the end of the turn, which reviews the task even if there are none."""
    turn.decisions.setdefault(task.id, []).extend(decisions)


def occurred(task: Task, turn: Turn, error: Error) -> None:
    """Feed the workflow an error."""
    feed(task, turn, workflow.occurred(_case(task, turn), error))


def named(task: Task, turn: Turn, agent: Agent) -> None:
    """Feed the workflow an agent's report of a failed connection."""
    workflow.named(task.severity, agent.id)
    feed(task, turn, [])


def _case(task: Task, turn: Turn) -> Case:
    return Case(record=task.severity, limits=turn.limits, view=_view(task, turn), now=turn.now)


def _view(task: Task, turn: Turn) -> FailureContext:
    members = tuple((member.agent, member.node) for member in task.live_members())
    record = task.severity
    nodes = {agent.node for agent in task.agents.values()} | {failure.node for failure in record.unjudged}
    spared, agents = turn.spared(task, nodes), frozenset(task.agents)
    running = frozenset([*task.slots, *(agent.id for agent in task.agents.values() if agent.held)])
    return FailureContext(members=members, spared=spared, agents=agents, running=running, trial=task.layouts.untried)


def _failure_of(task: Task, turn: Turn, agent: Agent, told: UnattributedError, worker: str | None) -> Failure:
    """Describe an error for the workflow; with a worker if the error ended it."""
    record, reporter = task.severity, task.workers.get(worker or "")
    fit = 0 if reporter is None else reporter.fit
    place = {"node": agent.node, "agent": agent.id, "worker": worker, "at": turn.now}
    step = record.step if told.step is None else record.steps(fit, told.step)
    return Failure(**{**msgspec.structs.asdict(told), **place, "step": step})


def refused(task: Task, turn: Turn, agent: Agent, told: UnattributedError, worker: str) -> None:
    """Stop a task without registered workers, one of which ends by a wrong setting before it registers."""
    if task.over is None and not task.finishing:
        failure = _failure_of(task, turn, agent, told, worker)
        case = Case(record=task.severity, limits=turn.limits, view=FailureContext(), now=turn.now)
        for decision in workflow.occurred(case, Error(failure=failure, training=False)):
            if decision.action == "stop":
                _stop(task, turn, decision)


def _cause(message: wire.WorkerDied) -> str:
    if message.cause == "silent":
        return "silent"
    names = {int(number): f" ({number.name})" for number in signal.Signals} if message.cause == "signal" else {}
    return f"{message.cause} {message.code}{names.get(message.code, '')}"


def _settled(task: Task, turn: Turn) -> None:
    there = [task.workers[worker] for worker in task.established if worker in task.workers]
    members = {worker.id: task.agents[worker.agent].node for worker in there}
    step = max((task.severity.steps(worker.fit, worker.step) for worker in there), default=0)
    # The members matter only where an error is decided on; listing a thousand for every epoch would be slow.
    case = Case(record=task.severity, limits=turn.limits, view=FailureContext(), now=turn.now)
    feed(task, turn, workflow.settled(_case(task, turn) if task.severity.unjudged else case, step, members))
    turn.save(task)


def _set_timer(task: Task, turn: Turn, *, planned: bool, renewed: bool) -> None:
    """Set the epoch's timer. A planned epoch waits for a step boundary, so its time runs once a member has arrived."""
    record = task.severity
    awaited: Awaited = ""
    if task.epoch is not None and not task.settled:
        awaited = "reports" if not planned or any(_waits(task, worker) for worker in task.established) else ""
    elif task.epoch is not None and record.reports_entry:
        awaited = "entries" if task.awaits_entries() else ""
    if awaited == record.awaited and not (awaited and renewed):
        return
    record.awaited = awaited
    if awaited:
        turn.timer("recovery", turn.limits.recovery_time, task=task.id)
    else:
        turn.cancel("recovery", task=task.id)


def _waits(task: Task, worker: str) -> bool:
    return worker in task.workers and task.workers[worker].ready == task.number


def _carry_out(task: Task, turn: Turn, decision: Decision) -> bool:
    """Carry out a decision; return whether the task has changed."""
    error = decision.error
    fields = {"rule": decision.rule, "reason": decision.reason, **decision.facts}
    if error is None:
        if decision.action == "revert":
            epochs.go_back(task, turn, decision.reason)
        else:
            _stop(task, turn, decision)
        return True
    fields = {"agent": error.agent, "node": error.node, "kind": error.kind, **fields}
    if decision.action == "tell":
        return False
    if decision.action == "reattempt":
        task.comm_error_epoch = task.number
        epochs.comm_error_due(task, turn)
        return True
    if decision.action == "cordon":
        turn.cordon(error.node, decision.reason)
        turn.emit(task, "node_cordoned", **fields)
        if turn.limits.severity.strict and not turn.spared(task, [error.node]):
            _isolate(turn, error.node, decision.reason)
        return True
    if "withheld" in decision.facts:
        turn.emit(task, "cordon_withheld", **fields)
    if decision.action == "escalate":
        epochs.open_incident(task)
        turn.emit(task, "error_escalated", **fields)
    left = task.workers_of(error.agent) if decision.action == "restart" and error.worker is None else []
    return _restart(task, turn, left, fields)


def _restart(task: Task, turn: Turn, left: list[Worker], fields: dict[str, object]) -> bool:
    if not left:
        return False
    epochs.open_incident(task)
    turn.emit(task, "workers_restarted", workers=[worker.id for worker in left], **fields)
    for worker in left:
        epochs.expel(task, turn, worker, f"{fields['kind']}: restarted")
    return True


def _isolate(turn: Turn, node: str, reason: str) -> None:
    """Kill the workers on a cordoned node that their task needs: they would not leave at a step boundary."""
    for task in filter(decides_errors, turn.tasks.values()):
        there = [agent.id for agent in task.agents.values() if agent.node == node]
        for worker in [worker for agent in there for worker in task.workers_of(agent)]:
            epochs.open_incident(task)
            epochs.expel(task, turn, worker, f"the node is isolated: {reason}")
            turn.to_review[task.id] = task


def _stop(task: Task, turn: Turn, decision: Decision) -> None:
    epochs.stop(task, turn, rule=decision.rule, reason=decision.reason, **decision.facts)


def _held_due(task: Task, turn: Turn, agent: Agent) -> None:
    """Allow the agent's next grant."""
    agent.held = False
    turn.save(task)


PART: Final = Part(
    restore=restore,
    agent_timers={"held": _held_due},
    receivers=(
        on(wire.WorkerDied, worker_died),
        on(wire.Progress, receive),
        on(wire.CheckpointSaved, receive),
        on(wire.WorkerEvent, receive),
        on(wire.CommError, receive),
    ),
    timers={"comm_error": comm_error_due, "recovery": overdue},
    review=review,
)


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
    if decides_errors(task) and not task.finishing and not symptom:
        failure = _failure_of(task, turn, agent, _told(message), worker.id)
        occurred(task, turn, Error(failure=failure, round=agent.round, training=bool(task.established)))
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
        refused(task, turn, agent, unattributed[message.worker], message.worker)


def _told(message: wire.ErrorReport) -> UnattributedError:
    """Describe an error that ends a worker for the workflow."""
    kind = known(message.kind)
    frames = _frames_of(message)[-_SHOWN:]
    place, first = _place_of(message, kind), message.details.get("first") is True
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
    acts = decides_errors(task) and not task.finishing
    if in_place and acts:
        epochs.open_incident(task)
        named(task, turn, agent)
    _log(task, turn, agent, message, task.incident if in_place or SEVERITY[kind] != "SEV3" else None)
    if acts or kind in REPORTED_ONLY:
        failure = _failure_of(task, turn, agent, UnattributedError(kind=kind, cause=message.cause), None)
        occurred(task, turn, Error(failure=failure))


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


def _frames_of(message: wire.ErrorReport) -> tuple[str, ...]:
    """The last frames of the exception, the innermost last: ``file:line function``."""
    frames = message.details.get("frames")
    return tuple(str(frame)[:300] for frame in frames[-_FRAMES:]) if isinstance(frames, list) else ()


def fault_of(message: wire.ErrorReport, kind: str) -> str:
    """Identify an exception of the program: `_place_of`, and the step."""
    place = _place_of(message, kind)
    return f"{place}, after step {message.step}" if place else ""


def _place_of(message: wire.ErrorReport, kind: str) -> str:
    """Identify an exception of the program by its type and the place that raised it.

    Machines and networks fail by other kinds than `REPEATABLE`, and may work when tried again.

    Args:
        message: the worker's report.
        kind: its kind, after the user's patterns.

    Returns:
        "" for everything that is no unclassified exception with a traceback.
    """
    frames = _frames_of(message)
    if kind not in REPEATABLE or not frames or not message.ends:
        return ""
    own = [frame for frame in frames if not any(part in frame for part in _ELSEWHERE)]
    places = dict.fromkeys([frames[-1], *own[-1:]])
    return f"{_type(message.details)} in {', called by '.join(map(_short, places))}"


def _type(details: dict[str, Any]) -> str:
    return str(details.get("type", ""))[:200]


def _short(frame: str) -> str:
    """Without the folder, which may differ between nodes."""
    return frame.rsplit("/", 1)[-1]


REPORTS: Final = Part(receivers=(on(wire.ErrorReport, handle_error), on(wire.NodeReading, handle_reading)))
