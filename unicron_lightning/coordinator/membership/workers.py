"""Messages and deaths of workers: updates of a task's record of its workers.

No epochs are decided here: `epochs.review_members` reads the record after each input. A worker that is not on
record (dead, fenced, of an earlier round or life) and still sends messages is fenced.

Tasks that have become slower than before are detected, and ranks that delay the others. Both use statistics that
members report with their progress (`wire.Pace`): the median of the last steps, so that a change takes a while to show.
A verdict requires that it persists for `degraded_time`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator import connectivity, lifecycle
from unicron_lightning.coordinator.actions import Part, Turn, on
from unicron_lightning.coordinator.incidents import accounting
from unicron_lightning.coordinator.incidents.facts import REPORTED, BrokenConnection, FirstStep, WorkerDeath
from unicron_lightning.coordinator.membership import slots
from unicron_lightning.coordinator.membership.epochs import (
    agents_to_notify,
    expel,
    needed,
    open_incident,
    remove_worker,
    start_new_life,
    welcome,
)
from unicron_lightning.coordinator.orders import injection, relayout
from unicron_lightning.coordinator.severity.record import was_sent
from unicron_lightning.coordinator.state import Agent, Task, Worker, round_of


def _watch_pace(task: Task, turn: Turn, worker: str) -> None:
    """Handle a member's report of its pace. The first member's report triggers the review of all."""
    if task.settled and task.established and task.established[0] == worker:
        _look_at_steps(task, turn, worker)
        _look_at_ranks(task, turn)


def behind(busy: Mapping[str, float], factor: float) -> dict[str, float]:
    """Select members whose micro-batches take more than ``factor`` times their peers' median, with that ratio."""
    found = {}
    for name, seconds in busy.items():
        peers = [other for peer, other in busy.items() if peer != name]
        if peers and (usual := statistics.median_low(peers)) > 0 and seconds > factor * usual:
            found[name] = round(seconds / usual, 2)
    return found


def _look_at_steps(task: Task, turn: Turn, worker: str) -> None:
    watch, pace, limits = task.watch, task.workers[worker].pace, turn.limits
    slow = pace is not None and pace.slowdown > limits.watch.degraded_factor
    if not slow:
        watch.slow_since = 0.0
        if watch.degraded:
            watch.degraded = False
            turn.emit_apart(task, "task_normal", step=task.workers[worker].step)
        return
    assert pace is not None
    watch.slow_since = watch.slow_since or turn.now
    if not watch.degraded and turn.now - watch.slow_since >= limits.degraded_time:
        watch.degraded = True
        turn.emit_apart(
            task,
            "task_degraded",
            step=task.workers[worker].step,
            times=round(pace.slowdown, 2),
            step_seconds=pace.median,
            usual_seconds=pace.usual,
            since=watch.slow_since,
        )


def _look_at_ranks(task: Task, turn: Turn) -> None:
    watch, limits = task.watch, turn.limits
    paces = {name: task.workers[name].pace for name in task.established if name in task.workers}
    busy = {name: pace.busy for name, pace in paces.items() if pace is not None and pace.busy is not None}
    late = behind(busy, limits.straggler_factor)
    watch.behind = {name: watch.behind.get(name, turn.now) for name in late}
    measured = busy.keys() | (watch.stragglers.keys() - paces.keys())  # not members in first steps
    for name in [name for name in watch.stragglers if name not in late and name in measured]:
        del watch.stragglers[name]
        turn.emit_apart(task, "straggler_over", worker=name)
    for name, since in watch.behind.items():
        if turn.now - since < limits.degraded_time:
            continue
        if name not in watch.stragglers:
            node = task.agents[task.workers[name].agent].node
            about = {"micro_batch_seconds": busy[name], "times": late[name], "since": since}
            turn.emit_apart(task, "straggler", worker=name, rank=task.rank_of(name), node=node, **about)
        watch.stragglers[name] = late[name]


_Handled = (
    wire.WorkerReady
    | wire.CommError
    | wire.Progress
    | wire.WorkerEvent
    | wire.Lookup
    | wire.CheckpointSaved
    | wire.WorkerDone
    | wire.FaultDue
    | wire.Replicas
)

CHECKPOINTS_KEPT: Final = 8
"""Checkpoints on record: older ones matter only if newer ones were changed or are gone."""


def hello(task: Task, turn: Turn, agent: Agent, message: wire.WorkerHello) -> None:
    """Handle a new worker with the strategy. A repeated hello is only answered again; a warm one is not
    answered yet.
    """
    worker = task.workers.get(message.worker)
    if worker is None:
        present = agent.id in task.slots or agent.warm
        if not present or round_of(message.worker) != agent.round or message.worker in agent.gone:
            fence_stranger(task, turn, agent, message.worker)
            return
        lifecycle.found_elastic(task)
        slots.hello(task, turn, agent, message)
        if agent.warm:
            if message.worker not in agent.hellos:
                agent.hellos[message.worker] = message
                turn.emit_apart(task, "warm_worker_hello", worker=message.worker, pid=message.pid)
            return
        worker = Worker(
            id=message.worker,
            agent=agent.id,
            local_rank=message.local_rank,
            pid=message.pid,
            capacity=message.capacity,
            port=message.port,
            founder=task.epoch is None and not task.rebuilding,
        )
        task.workers[worker.id] = worker
        if worker.founder:  # all founders get the same checkpoints
            task.ending = []
        turn.emit_apart(task, "worker_hello", worker=worker.id, pid=worker.pid, founder=worker.founder)
    welcome(task, turn, agent, worker)


def receive(task: Task, turn: Turn, agent: Agent, message: _Handled) -> None:
    """Handle any later message of a worker that has sent its hello."""
    worker = task.workers.get(message.worker)
    if worker is None or worker.agent != agent.id:
        if isinstance(message, wire.CheckpointSaved) and message.worker in task.ending and message.worker in agent.gone:
            _checkpoint_saved(task, turn, message)  # one that was being written when its error ended the worker
        else:
            fence_stranger(task, turn, agent, message.worker)
        return
    match message:
        case wire.WorkerReady():
            ready(task, turn, worker, message)
        case wire.CommError():
            _comm_error(task, turn, worker, message)
        case wire.Progress():
            # not saved: sent every second and only displayed
            worker.step, worker.fit = message.step, message.fit
            task.committed = max(task.committed, message.step)
            worker.metrics = message.metrics
            worker.pace = message.pace
            _watch_pace(task, turn, worker.id)
            if accounting.progressed(task, turn, message):
                accounting.stepped(task, turn, turn.now if message.at is None else message.at)
        case wire.WorkerEvent():
            _event(task, turn, worker, message)
        case wire.Lookup():
            value = task.records.get(message.key, task.lasting.get(message.key))
            turn.send(agent, wire.LookupReply(worker=worker.id, key=message.key, value=value))
        case wire.CheckpointSaved() if worker.ready or any(worker.id == member.worker for member in task.members()):
            # Only a training worker reports a valid checkpoint: a new life loads it.
            _checkpoint_saved(task, turn, message)
            if message.parting:
                start_new_life(task, turn)
        case wire.FaultDue():
            injection.due(task, turn, agent, message)
        case wire.Replicas():
            slots.record_replicas(task, turn, message)
        case wire.WorkerDone():
            finished(task, turn, worker, how="done")


def record(task: Task, turn: Turn, agent: Agent, message: wire.Record) -> None:
    """Keep a value for workers that join later."""
    old = message.epoch and message.epoch < task.recorded.get(message.key, task.records_after + 1)
    if task.workers_of(agent.id) and not old:  # otherwise it comes from a worker of an earlier epoch or life
        (task.lasting if message.lasting else task.records)[message.key] = message.value
        task.recorded[message.key] = message.epoch
        turn.save(task)


def ready(task: Task, turn: Turn, worker: Worker, message: wire.WorkerReady) -> None:
    """Handle a worker's report that it can become a member, or has stopped for an epoch.

    A report for an epoch is not saved: agents repeat it to a restarted coordinator.
    """
    if task.rebuilding:
        task.number = max(task.number, message.epoch)
    if message.epoch == 0 and message.state.get("idle", False):
        worker.idle = True
        return
    if message.epoch == 0 and message.state.get("founder", False) and not worker.founder:
        return  # sent before it learned that the first epoch was formed without it; repeated once it is built
    late = message.epoch > 0 and not worker.built and not task.rebuilding and worker.id not in needed(task)
    if late and message.state.get("has_state", False):
        # A coordinator without its store has resumed with the others: it must not join with a state of its own.
        expel(task, turn, worker, f"it reported for epoch {message.epoch} after the others had resumed without it")
        return
    if not worker.built:
        worker.built = True
        turn.emit_apart(task, "worker_ready_to_join", worker=worker.id, epoch=message.epoch)
    if message.epoch > 0 and (message.epoch == task.number or task.rebuilding) and not task.settled:
        worker.ready = message.epoch
        worker.state = message.state
        step = message.state.get("step")
        worker.step = step if isinstance(step, int) else worker.step
        task.committed = max(task.committed, worker.step)


def worker_died(task: Task, turn: Turn, agent: Agent, message: wire.WorkerDied) -> None:
    """Handle the end of a worker's process, which its agent has reaped or declared dead."""
    worker = task.workers.get(message.worker)
    ended_well = message.cause == "exit" and message.code == 0
    if worker is not None and worker.agent == agent.id:
        if ended_well:
            finished(task, turn, worker, how="exit")
        else:
            own = message.cause in ("exit", "signal") and not was_sent(message)
            died(
                task, turn, [worker], message.cause, code=message.code, at=message.at, meaning=message.meaning, own=own
            )
    elif round_of(message.worker) == agent.round and message.worker not in agent.gone:
        # It never sent a hello: a plain script's worker, or one that died while it started.
        agent.gone.append(message.worker)
        agent.hellos.pop(message.worker, None)
        turn.save(task)
        if agent.warm:  # it was not part of the task, so nothing has failed; torchrun restarts it
            about = {"worker": message.worker, "cause": message.cause, "code": message.code}
            turn.emit_apart(task, "warm_worker_died", **about)
        elif not ended_well and not task.regrouping and not agent.stopping:  # else: stopped on our order
            if not task.elastic:
                open_incident(task)
            cause = REPORTED if message.worker in task.severity.unattributed else message.cause
            death = WorkerDeath(
                worker=message.worker,
                cause=cause,
                code=message.code,
                died_at=message.at,
                received_at=turn.now,
                meaning=message.meaning,
            )
            turn.log(task, death)
        task.severity.unattributed.pop(message.worker, None)


def died(
    task: Task,
    turn: Turn,
    workers: Iterable[Worker],
    cause: str,
    *,
    code: int | None = None,
    at: float | None = None,
    meaning: str = "",
    own: bool = False,
) -> None:
    """Declare workers of one agent dead; ``own``: the program has failed by itself.

    torchrun terminates a dead worker's siblings: they are fenced at once, so that the survivors adapt once and not
    twice.
    """
    workers = list(workers)
    lost = [sibling for worker in workers[:1] for sibling in task.workers_of(worker.agent)]
    members = needed(task)
    if any(worker.id in members for worker in lost):
        open_incident(task)
    for worker in lost:
        death = WorkerDeath(worker=worker.id, cause="sibling", received_at=turn.now)
        if worker in workers:
            if own:
                task.broken[worker.id] = meaning or f"{cause} {code}"
            if cause == REPORTED and worker.id in task.established:
                task.ending.append(worker.id)
            remove_worker(task, worker)
            death = msgspec.structs.replace(death, cause=cause, code=code, died_at=at, meaning=meaning)
        else:
            expel(task, turn, worker, f"{workers[0].id} of the same agent died")
        turn.log(task, death)


def finished(task: Task, turn: Turn, worker: Worker, *, how: str) -> None:
    """Handle a worker whose program has ended successfully, or is about to."""
    if worker.id in needed(task):
        task.finished.append(worker.id)
    remove_worker(task, worker)
    turn.emit_apart(task, "worker_finished", worker=worker.id, how=how, step=worker.step)


def changes_nothing(task: Task, message: wire.FromAgent) -> bool:
    """Whether a message cannot make anything due: thousands of workers send such messages continuously, or at once."""
    match message:
        case wire.WorkerReady():
            # The first report of a planned epoch has started its timer; the last one settles it.
            if message.epoch != task.number or task.severity.awaited != "reports":
                return False
            others = (task.workers.get(member.worker) for member in reversed(task.members()))
            return any(other is not None and other.ready != task.number for other in others)
        case wire.Progress() | wire.Lookup() | wire.FaultDue() | wire.ActivityReport() | wire.NodeReading():
            return True
        case wire.StateHeld():
            return task.epoch is not None
        case wire.WorkerEvent():
            return message.name != "entered_epoch" or (task.severity.awaited == "entries" and task.awaits_entries())
    return False


def fence_stranger(task: Task, turn: Turn, agent: Agent, worker: str) -> None:
    """Fence a worker that is not on record, unless it is known to end successfully, or is being stopped."""
    if worker not in task.finished and not (agent.stopping and round_of(worker) == agent.round):
        turn.send(agent, wire.Fence(worker=worker, reason="not, or no longer, a worker of the task"))


def _comm_error(task: Task, turn: Turn, worker: Worker, message: wire.CommError) -> None:
    if task.settled:
        concerns = message.epoch == task.number and any(m.worker == worker.id for m in task.members())
    else:
        # A planned change waits for a step boundary that will not come: the epoch before it is broken.
        pending = task.epoch is not None and task.epoch.kind in wire.PLANNED
        concerns = pending and message.epoch < task.number and worker.id in task.established
    if not concerns or task.comm_error_epoch == task.number:
        return
    task.comm_error_epoch = task.number
    open_incident(task)
    turn.timer("comm_error", turn.limits.comm_error_grace, task=task.id)
    turn.log(task, BrokenConnection(worker=worker.id, epoch=message.epoch, error=message.error))
    connectivity.suspect(task, turn)


def _event(task: Task, turn: Turn, worker: Worker, message: wire.WorkerEvent) -> None:
    # All survivors report the same recovery; the first report ends the incident, the others still belong to it.
    incident = task.incident or (task.epoch.incident if task.epoch else None)
    fact = FirstStep.reported(message.name, message.at, message.fields)
    fields = {**message.fields, "worker": worker.id, "at": message.at}
    turn.emit_for(task, incident, f"worker.{message.name}", fields, fact)
    if message.name == "recovered" and task.settled:
        task.incident = None
    if fact is not None:
        relayout.stepped(task, turn)
        relayout.follow_plan(task, turn)


def _age(checkpoint: wire.Checkpoint) -> tuple[int, int]:
    """Return what orders checkpoints by age: each ``fit`` of a script counts its own steps."""
    return checkpoint.fit, checkpoint.step


def _checkpoint_saved(task: Task, turn: Turn, message: wire.CheckpointSaved) -> None:
    """Record a checkpoint, unless it is known or something newer was written at its path in this life.

    A path holds what was written there last, so a report replaces what is known of its path. Reports may come late and
    several times, as all members send them. Workers check a checkpoint before they load it, so one that was changed or
    deleted since may stay on record.
    """
    one = wire.Checkpoint(
        path=message.path,
        step=message.step,
        digest=message.digest,
        life=task.life,
        bytes=message.bytes,
        fit=message.fit,
    )
    there = [known for known in task.checkpoints if known.path == one.path]
    same = (one.life, *_age(one), one.digest)
    if any((known.life, *_age(known), known.digest) == same for known in there) or any(
        known.life == one.life and _age(known) > _age(one) for known in there
    ):
        return
    # Two of the same step may both be there: which one was written last is not known.
    replaced = [known for known in there if (known.life, *_age(known)) != (one.life, *_age(one))]
    kept = [known for known in task.checkpoints if known not in replaced]
    task.checkpoints = sorted([one, *kept], key=_age, reverse=True)[:CHECKPOINTS_KEPT]
    about = {"worker": message.worker, "path": one.path, "step": one.step, "digest": one.digest}
    turn.emit_apart(task, "checkpoint_saved", **about)


_NEVER: Final = ("epoch_published", "epoch_settled")
_ALSO: Final = ("task_degraded", "task_normal", "straggler", "straggler_over")
"""Names of events that are sent although they belong to no incident."""


def send_notices(turn: Turn) -> None:
    """Send events logged in this turn to the workers of their tasks, for callbacks that display them (`wire.Notice`).

    Every event of an incident is sent (the failure, the reaction, the cost), and events about slowness. Epochs are not,
    because workers receive them anyway, nor are reports of other workers about themselves. Notices are sent last, so
    that no recovery waits for them; an agent that is away does not receive them later.
    """
    for task, event in turn.news:
        of_incident = event.incident is not None and event.name not in _NEVER and not event.name.startswith("worker.")
        if of_incident or event.name in _ALSO:
            notice = wire.Notice(name=event.name, at=turn.now, incident=event.incident, fields=event.fields)
            for agent_id in agents_to_notify(task):
                if (agent := task.agents.get(agent_id)) is not None:
                    turn.send(agent, notice)


PART: Final = Part(
    receivers=(
        on(wire.WorkerHello, hello),
        on(wire.WorkerDied, worker_died),
        on(wire.Record, record),
        on(wire.WorkerReady, receive),
        on(wire.CommError, receive),
        on(wire.Progress, receive),
        on(wire.WorkerEvent, receive),
        on(wire.Lookup, receive),
        on(wire.CheckpointSaved, receive),
        on(wire.WorkerDone, receive),
        on(wire.FaultDue, receive),
        on(wire.Replicas, receive),
    )
)
