"""Hangs, from the first report of an overdue worker to the report of the rank that hangs.

The coordinator asks the members for their activity, and `judge` determines the ranks that hang. The agent of
such a rank records its stacks and reports an error (`wire.ErrorReport`), which the severity workflow handles: of kind
`task_hang`, or `unnamed_software_error` if no rank waits for it. This state does not outlive the coordinator: an
overdue worker repeats its report every second.

**The verdict** is pure: from the reported activities of an epoch's members. When one rank hangs, all ranks are overdue:
the others wait for it in a collective. So a rank blocked in a collective is waiting, and a rank that is overdue
elsewhere is the one that hangs. A rank that does not even report has no running thread left. If all ranks wait in a
collective, none of them hangs: the connections do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator import connectivity
from unicron_lightning.coordinator.actions import Part, Turn, on
from unicron_lightning.coordinator.incidents.facts import ErrorFact
from unicron_lightning.coordinator.membership import epochs
from unicron_lightning.coordinator.severity import apply
from unicron_lightning.coordinator.severity.record import SEVERITY, Failure
from unicron_lightning.coordinator.severity.workflow import Error
from unicron_lightning.coordinator.state import Agent, Task, WatchRecord, Worker

_LONG_WAIT: Final = 1.0
"""Seconds in one collective after which a member may not reach the others. A probe clarifies it at a low cost."""
_ENDED_WAIT: Final = 4.0
"""Seconds after which nothing more arrives from a worker whose program has ended."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The conclusion of `judge`.

    Attributes:
        culprits: members that hang.
        collective: whether the communicator hangs.
        unnamed: whether no member waits for the culprits, so that they may be slow.
    """

    culprits: tuple[str, ...] = ()
    collective: bool = False
    unnamed: bool = False


NOTHING = Verdict()


def hopeless(members: Sequence[str], said: Mapping[str, wire.ActivityReport], *, finished: bool) -> str:
    """Return why the collectives in which all members wait can't be completed; "" if they can.

    A collective that not all ranks have entered is never completed. The members of an epoch run the same operations in
    the same order, so one that waits in another operation has a script on another path.

    Args:
        members: live members of the training epoch.
        said: newest activity of each member that has reported in this epoch.
        finished: whether the programs of other members have ended.
    """
    reports = [said[member] for member in members if member in said]
    waits = min((report.waits for report in reports), default=0.0)
    if len(reports) < len(members) or waits < _LONG_WAIT:
        return ""
    places = {(report.epoch, report.position) for report in reports}
    names = sorted({report.operation for report in reports})
    if len(places) == 1 and len(names) > 1 and "" not in names:
        return f"the members wait in different operations: {' and '.join(map(repr, names))}"
    if finished and waits >= _ENDED_WAIT:
        return f"the members wait in {' and '.join(map(repr, names))} for workers whose program has ended"
    return ""


def judge(
    members: Sequence[str],
    said: Mapping[str, wire.ActivityReport],
    *,
    reachable: frozenset[str],
    asked: float,
    mute_time: float,
    collective_time: float,
    stall_time: float,
    witness: bool = True,
) -> Verdict:
    """Judge a task with an overdue member.

    Args:
        members: members of the training epoch.
        said: activity of each member that has reported since one was overdue.
        reachable: members whose agents are connected.
        asked: seconds since all members were first asked.
        mute_time: seconds after which a reachable member without an answer is silent: its agent inspects it.
        collective_time: seconds that all members may wait in a collective.
        stall_time: seconds that an overdue member may take while no other waits for it.
        witness: whether it may; else it has failed in a phase of `STEP` when all have answered, or could have. The
            limits of other phases are no multiples of an average, and all ranks may run a long hook.
    """
    answers = [said[member] for member in members if member in said]
    waiting = [doing for doing in answers if doing.waiting]
    elsewhere = [doing for doing in answers if not doing.waiting]
    late = [doing for doing in elsewhere if doing.overdue]
    if waiting and late:
        return Verdict(culprits=tuple(doing.worker for doing in late))
    # No member waits for them: everything may be slow at the same time, or there is no other member.
    answered = not witness and (len(answers) == len(members) or asked >= mute_time)
    failed = tuple(doing.worker for doing in late if answered and doing.phase in STEP)
    stalled = failed or tuple(doing.worker for doing in late if doing.seconds > stall_time)
    if stalled:
        return Verdict(culprits=stalled, unnamed=bool(failed))
    if elsewhere or not any(doing.overdue for doing in answers):
        return NOTHING
    mute = [member for member in members if member not in said]
    if not mute:
        return Verdict(collective=True) if asked >= collective_time else NOTHING
    if asked >= mute_time and reachable.issuperset(mute):
        return Verdict(culprits=tuple(mute))
    return NOTHING


STEP: Final = ("compute", "reduce", "commit", "optimizer")
"""Phases of a step whose time is compared with an average; the same as the workers' `activity.CORE`."""
BETWEEN: Final = ("validation", "checkpoint", "epoch_end")
"""Phases between steps that end with a wait for all ranks; the same as the workers' `activity.BETWEEN`."""
_FIRST_PAUSE: Final = 0.15
ANSWER_SECONDS: Final = 0.1
"""Seconds after which the agent of a member that has not answered inspects it."""
PATIENCE: Final = 3.0
"""A silent member that computes may take this multiple of the limit of the members that wait for it."""
_LAST_PAUSE: Final = 2.0
_STACKS_SECONDS: Final = 2.0
"""Seconds after which an agent that has not reported stacks is assumed to have none."""


def _receive_activity(task: Task, turn: Turn, agent: Agent, message: wire.ActivityReport) -> None:
    """Handle a worker's report of its activity."""
    worker = task.workers.get(message.worker)
    if worker is None or worker.agent != agent.id or not _trains(task, message.epoch):
        return
    watch = _watch(task)
    if worker.id not in task.established:
        return
    if message.waiting and message.waits >= _LONG_WAIT:
        connectivity.suspect(task, turn, weakly=True)
    known = worker.id in watch.reports
    watch.reports[worker.id] = message
    if message.waits >= _LONG_WAIT and (why := hopeless(_members(task), watch.reports, finished=task.finishing)):
        _communicator_hangs(task, turn, watch, why)
        return
    if message.overdue and not watch.since:
        watch.since, watch.pause = turn.now, _FIRST_PAUSE
        watch.reports = {worker.id: message}
        _ask(task, turn)
    # Thousands of waiting workers report every second: they are judged once all have reported, and by the timer.
    if watch.since and (not message.waiting or (not known and len(watch.reports) == len(_members(task)))):
        _judge(task, turn, watch)


def restore(task: Task, turn: Turn) -> None:
    """Reset after a restart of the coordinator: hanging workers report again."""
    task.watch = WatchRecord()
    for agent_id in dict.fromkeys(worker.agent for worker in task.workers.values() if not worker.built):
        turn.timer("start", turn.limits.watch.start_time, task=task.id, agent=agent_id)


def _watch_due(task: Task, turn: Turn) -> None:
    watch = _watch(task)
    if not watch.since:
        return
    if not any(said.overdue for said in watch.reports.values()):
        _forget(watch)
        return
    watch.inspected = {name: order for name, order in watch.inspected.items() if not order.silent}
    _judge(task, turn, watch)
    if watch.since:
        watch.pause = min(2 * watch.pause, _LAST_PAUSE)
        _ask(task, turn)


def _start_due(task: Task, turn: Turn, agent: Agent) -> bool:
    """Inspect workers that have neither started nor ended in time; return whether there are any."""
    late = [worker for worker in task.workers_of(agent.id) if not (worker.built or worker.idle)]
    for worker in late if apply.decides_errors(task) else []:
        cause = f"not ready {turn.limits.watch.start_time:g} s after it was welcomed"
        _inspect(task, turn, wire.Inspect(worker=worker.id, cause=cause, phase="start", step=None, details={}))
    return bool(late)


def _stacks_due(task: Task, turn: Turn, agent: Agent) -> None:
    for inspect in list(task.watch.inspected.values()):
        worker = task.workers.get(inspect.worker)
        if inspect.silent:
            continue  # its agent found it not frozen; it is reviewed with the next question
        if worker is not None and worker.agent == agent.id:
            report = wire.ErrorReport(
                worker=worker.id,
                kind=inspect.kind,
                cause=inspect.cause,
                phase=inspect.phase,
                step=inspect.step,
                at=turn.now,
                details={**inspect.details, "stacks": ""},
            )
            apply.handle_error(task, turn, agent, report)


def _trains(task: Task, epoch: int) -> bool:
    """Whether workers in that epoch train: a recovery has a time limit of its own, and older reports do not count."""
    if not apply.decides_errors(task) or task.epoch is None:
        return False
    return epoch == task.number if task.settled else task.epoch.kind in wire.PLANNED and epoch < task.number


def _watch(task: Task) -> WatchRecord:
    watch = task.watch
    if watch.epoch != task.number:
        _forget(watch)
        watch.epoch = task.number
        watch.inspected.clear()
    return watch


def _forget(watch: WatchRecord) -> None:
    watch.since = watch.pause = 0.0
    watch.reports.clear()


def _members(task: Task) -> list[str]:
    return [worker for worker in task.established if worker in task.workers]


def _ask(task: Task, turn: Turn) -> None:
    for agent_id in dict.fromkeys(task.workers[worker].agent for worker in _members(task)):
        turn.send(task.agents[agent_id], wire.ActivityQuery())
    turn.timer("watch", task.watch.pause, task=task.id)


def _judge(task: Task, turn: Turn, watch: WatchRecord) -> None:
    members, limits = _members(task), turn.limits
    connected = {agent.id for agent in task.agents.values() if agent.conn is not None}
    verdict = judge(
        members,
        watch.reports,
        reachable=frozenset(worker for worker in members if task.workers[worker].agent in connected),
        asked=turn.now - watch.since,
        mute_time=ANSWER_SECONDS,
        collective_time=limits.watch.stall_time if _between(watch) else limits.collective_time,
        stall_time=limits.watch.stall_time,
        witness=limits.witness,
    )
    if all(member in watch.reports and watch.reports[member].waiting for member in members):
        connectivity.suspect(task, turn)
    if verdict.collective:
        where, seconds = next(iter(watch.reports.values())).phase, turn.now - watch.since
        cause = f"all {len(watch.reports)} members wait in {where}, none is missing, for {seconds:.1f} s"
        _communicator_hangs(task, turn, watch, cause)
    others = sum(said.waiting for said in watch.reports.values())
    allowed = max((said.limit or 0.0 for said in watch.reports.values() if said.waiting), default=0.0)
    asked = turn.now - watch.since
    patient, gentle = asked >= min(limits.mute_time, (PATIENCE - 1) * allowed), False
    if between := _between(watch):  # a batch or a checkpoint may compute for as long as it takes
        patient, gentle = False, between != "validation" and asked < limits.mute_time
    for name in verdict.culprits:
        worker, said = task.workers[name], watch.reports.get(name)
        order = _reason(worker, said, asked, others)
        if verdict.unnamed:
            order = msgspec.structs.replace(order, kind="unnamed_software_error")
        if order.silent:
            order = msgspec.structs.replace(order, phase=between, patient=patient, gentle=gentle)
        _inspect(task, turn, order)


def _between(watch: WatchRecord) -> str:
    """Return the phase in which members wait if it is one between steps; empty if it is one of a step."""
    return next((said.phase for said in watch.reports.values() if said.waiting and said.phase in BETWEEN), "")


def _reason(worker: Worker, said: wire.ActivityReport | None, asked: float, others: int) -> wire.Inspect:
    if said is None:
        cause = f"does not answer for {asked:.2f} s; {others} others wait in a collective"
        details: dict[str, Any] = {"seconds": asked, "waiting": others}
        about: dict[str, Any] = {"worker": worker.id, "cause": cause, "phase": "", "step": worker.step}
        return wire.Inspect(**about, details=details, silent=True)
    where = said.phase if said.micro_batch is None else f"{said.phase} of micro-batch {said.micro_batch}"
    cause = f"in {where} for {said.seconds:.2f} s, which is over {said.limit or 0.0:.2f} s; {others} others wait for it"
    details = {"seconds": said.seconds, "limit": said.limit, "micro_batch": said.micro_batch, "waiting": others}
    return wire.Inspect(worker=worker.id, cause=cause, phase=said.phase, step=said.step, details=details)


def _inspect(task: Task, turn: Turn, order: wire.Inspect) -> None:
    agent = task.agents[task.workers[order.worker].agent]
    if order.worker in task.watch.inspected:
        return
    task.watch.inspected[order.worker] = order
    turn.send(agent, order)
    turn.timer("stacks", _STACKS_SECONDS, task=task.id, agent=agent.id)


def _communicator_hangs(task: Task, turn: Turn, watch: WatchRecord, cause: str) -> None:
    """Renew the communicator as if a connection had broken: all members wait in a collective and none is missing.

    If their scripts have taken different paths, they find that in the new epoch. Finished members are left out of it.
    """
    said, since = next(iter(watch.reports.values())), watch.since or turn.now
    epochs.open_incident(task)
    error = ErrorFact(
        phase=said.phase,
        step=said.step,
        kind="nccl_timeout",
        severity=SEVERITY["nccl_timeout"],
        cause=cause,
        happened_at=since,
        received_at=turn.now,
        details={"seconds": turn.now - since},
    )
    turn.log(task, error)
    failure = Failure(kind="nccl_timeout", node="", agent="", cause=cause, step=task.severity.step, at=turn.now)
    _forget(watch)
    apply.occurred(task, turn, Error(failure=failure))


PART: Final = Part(
    restore=restore,
    receivers=(on(wire.ActivityReport, _receive_activity),),
    timers={"watch": _watch_due},
    agent_timers={"start": _start_due, "stacks": _stacks_due},
)
