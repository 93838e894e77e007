"""Membership: epochs, which select the workers that train together, and reactions to workers that die, join or finish.

`review_members` compares the newest epoch with the live workers and takes the next step that is due, if any:

* no epoch in this life: form one as soon as ``min_nodes`` slots are complete;
* a member of the epoch is dead: publish a new one with the remaining members. A planned one that was not settled falls
  back to the established members; its joiners become candidates for the next one;
* all members reported: settle the epoch with `wire.Go`; members that leave with it are stopped;
* it is settled, and the task pauses or ends with a checkpoint: publish a ``pause`` with the same members, which write a
  checkpoint, wait, and are stopped;
* it is settled, and another layout is ordered: publish a ``relayout`` with the same members (see `relayout`);
* it is settled, and members depart or are on draining nodes: publish a ``leave`` without them; the latter stay if
  too few would remain;
* it is settled and there are candidates: publish a ``join``;
* no member is left: a new life begins; the task is over if a member has finished, even if that is known only later.

**Departures**: agents that were asked to end (SIGTERM). Their workers leave at a step boundary, or the task is saved
first.

An epoch of kind ``leave`` follows (`slots.leaving`). If fewer than ``min_nodes`` agents remain, their workers
keep the state at that boundary until others join. If all members with the task's state are to leave, e.g. for
maintenance of all nodes, they write a checkpoint first, as for a pause. Workers that have not begun to train, and those
of a plain script with too few other agents, are stopped at once.

**Holds**: a task ends that holds below its minimum of nodes for too long, or that nothing can lead out of its hold.

A task holds while it has fewer nodes than its minimum: its members wait at a step boundary for another one. The time
counts until `soon_steps` steps are finished in a row, since a worker that fails at its start does not end the hold. A
task that trains when the time is over, as one with long steps, ends only if it holds again without a further step.

**Rebuilding**: a task whose record was lost with the coordinator's store resumes with the workers that hold its state.

Agents register with what their workers have reported, and are given `restart_grace` for it. A member that has not
stopped yet for the newest epoch, e.g. in a long micro-batch, is waited for as in any epoch, for `recovery_time` since
the first registration. Work of an epoch is lost only with its `wire.Go`: before, its members have computed nothing in
it, and one that is still in the epoch before it can stay.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator import lifecycle
from unicron_lightning.coordinator.actions import Part, Turn, on
from unicron_lightning.coordinator.incidents.facts import EpochPublished, EpochSettled, LifeBegun
from unicron_lightning.coordinator.membership import memory
from unicron_lightning.coordinator.membership.slots import awaited, bearable, fewest, leaving, revoke, undrained, whole
from unicron_lightning.coordinator.orders import jobs, relayout
from unicron_lightning.coordinator.orders.jobs import CANCELLED, finish, saved
from unicron_lightning.coordinator.severity.record import EQUAL_FAILURES
from unicron_lightning.coordinator.state import Agent, PauseReason, Task, Worker
from unicron_lightning.wire.epoch_changes import change_of
from unicron_lightning.wire.report_sums import summed


def review_members(task: Task, turn: Turn) -> None:
    """Take the step that is due now. Idempotent; called once after each input."""
    if task.over is not None or task.rebuilding or not task.elastic:
        return
    if task.epoch is None:
        if task.finishing and task.life > 1:
            _nobody_left(task, turn)  # a member of an earlier life had finished, as its agent has reported since
        else:
            _form(task, turn)
        return
    live, wanted = task.live_members(), needed(task)
    missing = [worker for worker in wanted if worker not in task.workers]
    died = [worker for worker in missing if worker not in task.finished]
    if not live and len(missing) == len(wanted):
        _nobody_left(task, turn)
    elif died or not live or (missing and not task.settled):
        # If no other member survives, the members that were to leave continue themselves.
        _repair(task, turn, live, deaths=bool(died) or not live)
    elif not task.settled and all(task.workers[m.worker].ready == task.number for m in live):
        _settle(task, turn)
        _resize(task, turn)
    elif task.settled:
        _resize(task, turn)


def agents_to_notify(task: Task) -> list[str]:
    """List the agents that the newest epoch is sent to."""
    return list(dict.fromkeys(task.workers[w].agent for w in needed(task) if w in task.workers))


def needed(task: Task) -> list[str]:
    """List workers that the newest epoch depends on: its members and, until a planned one settles, those that leave."""
    pending = task.epoch is not None and not task.settled and task.epoch.kind in wire.PLANNED
    before = [worker for worker in task.established if worker not in task.finished] if pending else []
    return list(dict.fromkeys([*(member.worker for member in task.members()), *before]))


def open_incident(task: Task) -> None:
    """Give the failure an id, unless it belongs to an incident that is still being recovered from."""
    if task.incident is None and task.over is None:
        task.incidents += 1
        task.incident = f"i{task.incidents}"


def remove_worker(task: Task, worker: Worker) -> None:
    """Remove a worker that died, was fenced or finished from the task, permanently."""
    del task.workers[worker.id]
    agent = task.agents.get(worker.agent)
    if agent is not None and worker.id not in agent.gone:
        agent.gone.append(worker.id)


def expel(task: Task, turn: Turn, worker: Worker, reason: str) -> None:
    """Remove a live worker and have its process killed."""
    agent = task.agents.get(worker.agent)
    remove_worker(task, worker)
    if agent is not None:
        turn.send(agent, wire.Fence(worker=worker.id, reason=reason))


def stop(task: Task, turn: Turn, *, rule: str, reason: str, **facts: object) -> None:
    """End a task as failed, and have the processes of all its workers killed."""
    turn.emit(task, "task_stopped", rule=rule, reason=reason, **facts)
    for worker in list(task.workers.values()):
        expel(task, turn, worker, "the task is stopped")
    finish(task, turn, succeeded=False, reason=reason)


def comm_error_due(task: Task, turn: Turn) -> None:
    """Retry with the same members: no death explained the communication error in time (SEV3, in place)."""
    number, task.comm_error_epoch = task.comm_error_epoch, 0
    if task.over is not None or number != task.number or task.rebuilding or task.epoch is None:
        return
    if task.settled:
        publish(task, turn, "fail", task.live_members())
    elif task.epoch.kind in wire.PLANNED:
        publish(task, turn, "fail", _state_holders(task))


def _join_due(task: Task, _turn: Turn) -> None:
    """Admit candidates now, without siblings that are not ready."""
    if task.lifecycle.join == "waiting":
        lifecycle.move(task, join="due")


def holds_state(worker: Worker) -> bool:
    """Whether the worker has the task's state: it reported so, or has stepped since it reported that it had none."""
    told = worker.state.get("step")
    return bool(worker.state.get("has_state", True)) or worker.step > (told if isinstance(told, int) else 0)


def _form(task: Task, turn: Turn) -> None:
    built = Counter(worker.agent for worker in task.workers.values() if worker.built)
    complete = [agent_id for agent_id in task.slots if built[agent_id] == task.agents[agent_id].local_world]
    if len(complete) < fewest(task) or memory.waits(task, turn, complete):
        return
    founders = [worker for agent_id in complete for worker in task.workers_of(agent_id) if worker.built]
    members = [task.as_member(worker) for worker in founders[: task.capacity()]]
    for worker in founders if memory.offer(task, turn) else ():
        welcome(task, turn, task.agents[worker.agent], worker)
    publish(task, turn, "init" if task.life == 1 else "restart", members)
    _turn_into_joiners(task, turn, {member.worker for member in members})


def welcome(task: Task, turn: Turn, agent: Agent, worker: Worker) -> None:
    """Send a worker its role, possibly again."""
    word = wire.Welcome(
        worker=worker.id,
        founder=worker.founder,
        life=task.life,
        resume=tuple(task.checkpoints) if worker.founder and task.life > 1 else (),
        watch=turn.limits.watch,
        layout=task.layouts.in_force,
        memory=memory.offered(task) if worker.founder else (),
        run=hashlib.sha256(f"{task.id} {task.created_at!r}".encode()).hexdigest()[:16],
    )
    turn.send(agent, word)
    if not worker.built:
        turn.timer("start", turn.limits.watch.start_time, task=task.id, agent=agent.id)


def _turn_into_joiners(task: Task, turn: Turn, members: set[str]) -> None:
    """Turn founders that were not ready in time into joiners: members do not wait for their set-up."""
    for worker in task.workers.values():
        if worker.founder and worker.id not in members:
            worker.founder = worker.built = False
            welcome(task, turn, task.agents[worker.agent], worker)


def _repair(task: Task, turn: Turn, live: list[wire.Member], *, deaths: bool) -> None:
    """Publish the epoch that follows the loss of members."""
    assert task.epoch is not None
    kind = task.epoch.kind
    core = _state_holders(task)
    if task.settled:
        publish(task, turn, "fail", live)
    elif kind not in wire.PLANNED:
        # No worker has state before a life's first epoch is settled: the kind stays, with fewer members.
        publish(task, turn, kind, live)
    elif not core:
        _nobody_left(task, turn)
    elif deaths:
        publish(task, turn, "fail", core)
    else:
        publish(task, turn, kind, live)


def _state_holders(task: Task) -> list[wire.Member]:
    """Return the live members that have the task's state, in their order."""
    return [task.as_member(task.workers[worker]) for worker in task.established if worker in task.workers]


def _settle(task: Task, turn: Turn) -> None:
    assert task.epoch is not None
    # A member that finished while the epoch was pending has led to a new epoch: all members are alive here.
    states = {member.worker: task.workers[member.worker].state for member in task.epoch.members}
    if not any(state.get("has_state", True) for state in states.values()):
        _nobody_left(task, turn)  # joiners whose donors died before sending the state
        return
    left = [worker for worker in task.established if worker in task.workers and worker not in states]
    task.comm_error_epoch = 0  # the worker that reported one is here
    task.go, task.earlier = summed(task.number, list(states.values())), None
    task.established = list(states)
    task.broken = {}
    send_go(task, turn)
    for agent_id in dict.fromkeys(task.workers[worker].agent for worker in left):
        _dismiss(task, turn, agent_id)
    turn.log(task, EpochSettled(number=task.number, kind=task.epoch.kind))
    if task.epoch.kind in ("init", "restart"):
        task.incident = None


def send_go(task: Task, turn: Turn, only: str | None = None) -> None:
    """Notify the members' agents, or one of them, that the newest epoch is settled."""
    assert task.go is not None
    for agent_id in dict.fromkeys(member.agent for member in task.members()):
        if agent_id in task.agents and only in (None, agent_id):
            turn.send(task.agents[agent_id], task.go)


def _dismiss(task: Task, turn: Turn, agent_id: str, reason: str | None = None) -> None:
    """Continue without the workers of an agent: they wait, or have not started, and are stopped."""
    agent = task.agents[agent_id]
    for worker in task.workers_of(agent_id):
        remove_worker(task, worker)
    # Only if all members depart is a task stopped with them.
    needed = agent.departing and task.pause_reason == "departure"
    revoke(task, turn, agent, reason or turn.why_without_workers(agent), needed=needed)


def save_and_stop(task: Task, turn: Turn, reason: PauseReason) -> None:
    """Stop the task once its members have written a checkpoint; now, if no worker has a state to save."""
    task.pause_reason = reason
    turn.to_review[task.id] = task
    if task.pausing:  # for another reason; this one decides about what follows
        turn.save(task)
        return
    if task.epoch is None or task.rebuilding or not _state_holders(task):
        _stop(task, turn)
        return
    assert task.formed, f"task {task.id!r}: {task.lifecycle} has nothing to pause"
    lifecycle.move(task, pausing=True)
    turn.save(task)
    turn.emit(task, "task_pauses", epoch=task.number, reason=reason)
    _await_pause(task, turn)


def _await_pause(task: Task, turn: Turn) -> None:
    """Limit the time until the members have written the checkpoint."""
    if task.pausing:
        turn.timer("pause", turn.limits.pause_grace, task=task.id)


def keep_running(task: Task, turn: Turn) -> None:
    """The plan gives a pausing task places again: it continues, unless its members have the order to save."""
    if task.pausing and task.pause_reason == "plan" and (task.epoch is None or task.epoch.kind != "pause"):
        lifecycle.move(task, pausing=False)
        turn.cancel("pause", task=task.id)
        turn.to_review[task.id] = task


def _pause_due(task: Task, turn: Turn) -> None:
    """Pause without a new checkpoint, since the members have not written it in time."""
    if task.pausing and task.over is None:
        _stop(task, turn)


def _stop(task: Task, turn: Turn) -> None:
    """Stop all workers. Unless it is cancelled, the task later resumes from its newest checkpoint."""
    if task.pausing:
        lifecycle.move(task, pausing=False)
        turn.cancel("pause", task=task.id)
    if task.pause_reason == "cancel":
        finish(task, turn, succeeded=False, reason=f"{CANCELLED}{saved(task)}")
        return
    for agent_id in list(task.slots):
        _dismiss(task, turn, agent_id)
    if task.formed:
        lifecycle.move(task, slots="none")
    turn.emit(task, "task_paused", step=task.checkpoint.step if task.checkpoint else None)
    if task.epoch is not None:
        _new_life(task, turn)


def start_new_life(task: Task, turn: Turn) -> None:
    """Begin the next life from the checkpoint that all waiting members have written, maybe in another layout."""
    if task.pausing:
        _stop(task, turn)
        return
    relayout.put_in_force(task, turn)
    _begin_in_another_layout(task, turn)


def go_back(task: Task, turn: Turn, reason: str) -> None:
    """Return to the previous layout if the workers fail in the one that was ordered."""
    if task.layouts.untried:  # and no worker was left meanwhile
        relayout.abandon(task, turn, reason)
        _begin_in_another_layout(task, turn)


def _begin_in_another_layout(task: Task, turn: Turn) -> None:
    """Stop all workers; their replacements build the model in the layout that is in force now."""
    for agent_id in list(task.slots):
        _dismiss(task, turn, agent_id, "the task restarts in another layout")
    _new_life(task, turn)


def _resize(task: Task, turn: Turn) -> None:
    """Plan the change for the next step boundary, if one is due: a pause, another layout, a leave or a join."""
    if task.finishing:
        return
    if task.pausing or relayout.due(task):
        kind: wire.EpochKind = "pause" if task.pausing else "relayout"
        if task.epoch is not None and task.epoch.kind != kind:
            task.incident = None
            publish(task, turn, kind, task.members())
        return  # or they are writing the checkpoint
    members, away = task.members(), bearable(task, leaving(task, turn))
    staying = members
    if away:
        staying = [member for member in members if member.agent not in away]
        for agent_id in sorted(away - {member.agent for member in members}):
            _dismiss(task, turn, agent_id)
    usable = min([task.workers[member.worker].capacity for member in task.live_members()], default=0)
    if not usable:
        return
    staying = staying if awaited(task) else _within(usable, staying)
    remaining = staying
    if len(staying) < usable and len({member.agent for member in staying}) < task.min_nodes:
        # Too few: only those leave that cannot stay.
        remaining = [m for m in members if m.agent not in away or not task.agents[m.agent].departing]
    if 0 < len(remaining) < len(members):
        task.incident = None
        publish(task, turn, "leave", remaining)
    elif len(task.workers) > len(members):  # all members live, so candidates exist
        _admit(task, turn, away, task.capacity() - len(staying))


def _within(capacity: int, members: list[wire.Member]) -> list[wire.Member]:
    """Drop the newest agents beyond the task's capacity, which arise when departing members may stay.

    Agents leave as a whole, so fewer members than any agent has may remain beyond it. They have no work, as candidates
    beyond the capacity have none: without them the world would be too small until their agent's workers have restarted.
    """
    if len(members) <= capacity:
        return members
    left = len(members)
    gone: set[str] = set()
    for agent_id, number in Counter(member.agent for member in reversed(members)).items():
        if left - number >= capacity:
            left -= number
            gone.add(agent_id)
    return [member for member in members if member.agent not in gone]


def _admit(task: Task, turn: Turn, away: set[str], room: int) -> None:
    """Publish a join if there are candidates and room; workers of the agents ``away`` are not candidates.

    Members that leave after the join do not count against the room: for one step, some may have no work.
    """
    members = task.members()
    present = {member.worker for member in members}
    built = (w for w in task.workers.values() if w.built and w.id not in present and w.agent not in away)
    candidates = sorted(built, key=task.place)
    if not candidates or room <= 0:
        return
    ready = [worker for worker in candidates if task.lifecycle.join == "due" or _siblings_ready(task, worker)]
    if not ready:
        if task.lifecycle.join == "none":
            lifecycle.move(task, join="waiting")
            turn.timer("join", turn.limits.join_grace, task=task.id)
        return
    task.incident = None
    publish(task, turn, "join", [*members, *(task.as_member(worker) for worker in ready[:room])])


def _siblings_ready(task: Task, worker: Worker) -> bool:
    """Whether all workers of the agent's round can join, or are gone: one join is cheaper than two."""
    agent = task.agents[worker.agent]
    built = sum(1 for sibling in task.workers_of(agent.id) if sibling.built)
    return agent.local_world is not None and built + len(agent.gone) >= agent.local_world


def publish(task: Task, turn: Turn, kind: wire.EpochKind, members: list[wire.Member]) -> None:
    """Publish an epoch of these members."""
    assert members
    store = task.agents[members[0].agent].store
    assert store is not None
    nodes = len({member.agent for member in members})
    task.number += 1
    task.earlier = (task.go or task.earlier) if kind in wire.PLANNED else None
    task.go = None
    # A planned epoch is entered at a step boundary, which the members of a broken one do not reach.
    task.comm_error_epoch = task.number if kind in wire.PLANNED and task.comm_error_epoch else 0
    if lifecycle.end_waiting_for_siblings(task):
        turn.cancel("join", task=task.id)
    before = task.epoch
    task.epoch = wire.Epoch(
        number=task.number,
        kind=kind,
        members=members,
        store=store,
        # A world below the minimum, because the task can't use more workers, does not wait.
        hold=nodes < task.min_nodes and len(members) < task.capacity() and kind != "pause",
        incident=task.incident,
        published_at=turn.now,
        key=_key(turn.limits.secret, f"{task.id}/{task.number}/{turn.now}"),
    )
    change = None if before is None else change_of(before, task.epoch)
    for agent_id in agents_to_notify(task):
        agent = task.agents[agent_id]
        if change is None or agent.told != change.base:
            send_epoch(task, turn, agent)
        elif agent.conn is not None:
            agent.told = change.number
            turn.send(agent, change)
    names = [member.worker for member in members]
    turn.log(task, EpochPublished(number=task.number, kind=kind, hold=task.epoch.hold, members=names))


def send_epoch(task: Task, turn: Turn, agent: Agent) -> None:
    """Send an agent the whole newest epoch."""
    assert task.epoch is not None
    if agent.conn is not None:
        agent.told = task.epoch.number
        turn.send(agent, task.epoch)


def _key(secret: bytes, epoch: str) -> str:
    """Derive the epoch's 128-bit key from the coordinator's secret."""
    return hmac.new(secret, epoch.encode(), "sha256").hexdigest()[:32]


def _nobody_left(task: Task, turn: Turn) -> None:
    """End the task, or begin a new life from the newest persistent checkpoint: no member with state is alive."""
    if task.finishing:
        # Members finish the same step together: one that succeeded had completed all of the task's training.
        finish(task, turn, succeeded=not task.failed_end, reason=task.failed_end or "all members finished")
        return
    relayout.abandon(task, turn)
    if task.pausing:
        _stop(task, turn)
    else:
        _new_life(task, turn)


def _new_life(task: Task, turn: Turn) -> None:
    for worker in list(task.workers.values()):
        expel(task, turn, worker, "the task starts a new life")
    task.life += 1
    task.restarts += 1
    task.epoch = task.go = task.earlier = None
    task.established, task.broken = [], {}
    task.replicas, task.replicas_of, task.layouts.spread = [], 0, None
    task.records, task.recorded, task.records_after = {}, {}, task.number
    task.comm_error_epoch = task.committed = 0
    saved = task.checkpoint
    path, step = (saved.path, saved.step) if saved else (None, None)
    turn.log(task, LifeBegun(life=task.life, path=path, step=step, memory=memory.newest(task)))


PART: Final = Part(
    restore=_await_pause,
    timers={"join": _join_due, "pause": _pause_due},
    review=review_members,
)


def _departs(task: Task, turn: Turn, agent: Agent, _: wire.Departing) -> None:
    if agent.departing or task.over is not None:
        return
    agent.departing = True
    turn.places_changed = True
    turn.save(task)
    turn.emit(task, "agent_departs", agent=agent.id, node=agent.node)
    if agent.id not in task.slots:
        return
    if not task.elastic:
        if not (task.plain and len(undrained(task, turn)) >= task.min_nodes):
            _stop_agent(task, turn, agent)
    elif task.epoch is None or task.rebuilding or not _state_holders(task):
        _stop_agent(task, turn, agent)
    elif _ends(task):
        save_and_stop(task, turn, "departure")


def _ends(task: Task) -> bool:
    """Whether the state would be lost: all members depart, or each replica of a divided model loses some."""
    going = {agent.id for agent in task.agents.values() if agent.departing}
    replicas: dict[int, set[str]] = {}
    for agent_id, number in whole(task).items():
        replicas.setdefault(number, set()).add(agent_id)
    if task.replica_nodes and replicas:
        return all(agents & going for agents in replicas.values())
    return all(member.agent in going for member in _state_holders(task))


def _stop_agent(task: Task, turn: Turn, agent: Agent) -> None:
    revoke(task, turn, agent, "the agent was asked to end before its workers could leave in order", needed=True)


DEPARTURES: Final = Part(receivers=(on(wire.Departing, _departs),))


def review(task: Task, turn: Turn) -> None:
    """Start and end the time of a hold; end a task whose only other node fails again and again. Idempotent."""
    if not _holds(task):
        if task.held is not None:
            _follow(task, turn, *task.held)
        return
    if task.held is None or (
        task.committed > task.held[1] and turn.now >= task.held[0] + turn.limits.severity.hold_timeout
    ):
        task.held = turn.now, task.committed
        turn.timer("hold", turn.limits.severity.hold_timeout, task=task.id)
        turn.save(task)
    task.held = task.held[0], task.committed
    _due(task, turn)
    if _holds(task) and not task.finishing and not jobs.is_job(task, turn):
        _end_if_alone(task, turn)


def _holds(task: Task) -> bool:
    return task.over is None and task.epoch is not None and task.epoch.hold and task.settled


def _follow(task: Task, turn: Turn, since: float, step: int) -> None:
    """End the time of a hold, if the task has trained for some steps after it, or is over."""
    if task.over is not None or task.committed - step >= turn.limits.severity.soon_steps:
        task.held = None
        turn.cancel("hold", task=task.id)
        turn.save(task)
    elif task.settled and task.committed < step:  # resumed from a checkpoint
        task.held = since, task.committed


def _end_if_alone(task: Task, turn: Turn) -> None:
    """End a task that can only get a node whose new workers have all failed in one way.

    A node that has left is not waited for; another one may be repaired while it tries again. An exception of the
    program that it raises at each try is not: its script or its settings differ.
    """
    inside, last = {member.agent for member in task.members()}, task.severity.latest
    if not last or len({(failure.node, failure.cause) for failure in last}) > 1 or last[-1].kind == "lost_connection":
        return
    node = last[-1].node
    outside = {agent.node for agent in task.agents.values() if agent.id not in inside}
    where, tries = ("left", EQUAL_FAILURES) if not outside else ("there", turn.limits.severity.crash_attempts)
    series = task.severity.series.get(node)
    if series is None or len(last) < EQUAL_FAILURES or len(series.times) < tries:
        return
    if not outside or (outside == {node} and last[-1].place):
        _end(task, turn, f"no other node is {where}, and {node} fails in one way: {len(series.times)} times in a row")


def restore(task: Task, turn: Turn) -> None:
    """Set the timer again after a restart of the coordinator."""
    if task.held is not None:
        turn.timer("hold", max(0.0, task.held[0] + turn.limits.severity.hold_timeout - turn.now), task=task.id)


def _due(task: Task, turn: Turn) -> None:
    if task.held is not None and turn.now >= task.held[0] + turn.limits.severity.hold_timeout and _holds(task):
        _end(task, turn, f"for {turn.now - task.held[0]:.0f} s (severity.hold_timeout)")


def _end(task: Task, turn: Turn, why: str) -> None:
    last = f"; the {task.severity.last_words}" if task.severity.latest else ""
    reason = f"held below the minimum of {task.min_nodes} nodes: {why}{last}"
    stop(task, turn, rule="held below the minimum", reason=reason)


HOLDS: Final = Part(restore=restore, timers={"hold": _due}, review=review)


_JOIN: Final = "join"
"""Name of the operation in which members hand over the state, as in `worker.engine`."""
AGAIN_SECONDS: Final = 0.5
"""Seconds between looks for members that have not stopped yet."""


def _rebuild_due(task: Task, turn: Turn) -> None:
    """Resume with the workers that hold the task's state, after all agents had time to register."""
    if not task.rebuilding:
        return
    reported = [worker for worker in task.workers.values() if worker.ready > 0 and holds_state(worker)]
    computing = [worker for worker in task.workers.values() if worker.member and not worker.ready]
    if reported and computing and turn.now < task.created_at + turn.limits.recovery_time:
        turn.timer("rebuild", AGAIN_SECONDS, task=task.id)
        return
    lifecycle.move(task, rebuilding=False)
    turn.places_changed = True
    turn.save(task)
    if task.over is not None:
        return
    if not reported:
        for worker in [worker for worker in task.workers.values() if not worker.founder]:
            expel(task, turn, worker, "no member is left that it could join")
        return
    newest = max(worker.ready for worker in reported)
    began = _begun(task, reported, newest)
    for worker in reported:
        if worker.ready < began:  # members of the newest epoch may have recomputed its work
            expel(task, turn, worker, f"it was in epoch {worker.ready}, others are in {newest}")
    holders = [worker for worker in reported if worker.ready >= began]
    # Joiners stay in an epoch that the others have entered to hand over the state: they may have received it since.
    joining = all(worker.state.get("operation") == _JOIN for worker in holders)
    there = (worker for worker in task.workers.values() if worker in holders or (joining and worker.ready == newest))
    members = sorted(there, key=task.place)
    task.established = [worker.id for worker in members]
    open_incident(task)
    publish(task, turn, "fail", [task.as_member(worker) for worker in members])
    _turn_into_joiners(task, turn, set(task.established))


def _begun(task: Task, reported: list[Worker], newest: int) -> int:
    """Return the newest epoch in which members may have computed; ``newest`` if an agent has not reported."""
    went = [task.agents[worker.agent].went for worker in reported]
    return newest if 0 in went else min(newest, max(went))


REBUILDING: Final = Part(timers={"rebuild": _rebuild_due})
