"""Registration, disconnection and return of agents, and restarts of the coordinator.

An agent's `wire.Register` leads to one of four cases:

* *new*: it waits for a grant like any other;
* *back in time*: it is sent again everything it may have missed (grant, ranks, welcome, epoch, go), and a worker that
  it no longer lists is declared dead unless the agent's report on it follows shortly;
* *back too late*, or unknown though it has a grant: its workers are fenced and it must rendezvous again. Workers that
  are only warm are not fenced, since they had no part in training;
* *unknown, granted, and its task unknown too*: the coordinator has lost its store. The task is rebuilt from the agents'
  registrations: for ``restart_grace`` seconds nothing is published while training continues, then one ``fail`` epoch
  is, over the workers that hold state (those whose last report was for an epoch >= 1). Lost with the store are:
  records, the checkpoint's path, the count of lives, and agents that do not return in time.

**Warm stand-bys**: agents without a slot whose workers are started in advance, as far as possible without a slot.

A warm worker has imported everything, run its script up to the strategy's start, and sent its hello. There it waits: it
is neither member nor candidate, counts nowhere, and uses no accelerator memory. When its agent gets a slot the worker
is welcomed, and is as far as other workers are seconds after their start.

Rules:

* Agents are warm when they stand by for a task known to recover in process, also where the plan has given their place
  to another task, which they do not disturb. Agents on drained nodes are not warm, and never those of a plain script,
  whose workers would start to train.
* Warm workers are recorded at the agent (`Agent.hellos`), not in `Task.workers`. So no rule of membership considers
  them, and their death is not a failure of the task.
* A free slot goes to a warm agent first. The agent gets the grant, and its workers their welcome, in one turn.
* A slot whose workers have died is passed on to a warm agent immediately, not only when the slot's own agent is lost:
  that agent has to start new workers in any case. It becomes the stand-by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator import lifecycle
from unicron_lightning.coordinator.actions import Part, Turn, on
from unicron_lightning.coordinator.incidents.facts import AgentLoss
from unicron_lightning.coordinator.membership import slots, workers
from unicron_lightning.coordinator.membership.epochs import (
    agents_to_notify,
    open_incident,
    send_epoch,
    send_go,
    welcome,
)
from unicron_lightning.coordinator.membership.slots import leave_slot, next_in_line, review_slots
from unicron_lightning.coordinator.orders.jobs import finish, is_job, saved
from unicron_lightning.coordinator.severity import apply as severity
from unicron_lightning.coordinator.state import Agent, Task
from unicron_lightning.detection.silence import report_seconds
from unicron_lightning.wire.fields import shortened


def _review_standbys(task: Task, turn: Turn) -> None:
    """Welcome warm workers of agents that have a slot now; have stand-by agents start theirs. Idempotent.

    Call it after the consequences of deaths are decided: in a new life, the welcomed workers are its founders.
    """
    if task.over is not None:
        return
    if _pass_on(task, turn):
        review_slots(task, turn)
    granted = [task.agents[agent_id] for agent_id in task.slots]
    for agent in [agent for agent in granted if agent.hellos]:
        hellos, agent.hellos = agent.hellos, {}
        for hello in hellos.values():
            workers.hello(task, turn, agent, hello)
    for agent in [agent for agent in task.agents.values() if agent.warm or agent.waiting]:
        if agent.warm and not _may_be_warm(task, turn, agent):
            _cool(task, turn, agent)
        elif agent.waiting and task.formed and not task.finishing and _may_be_warm(task, turn, agent):
            _warm(task, turn, agent)


def _send_warm_grant(task: Task, turn: Turn, agent: Agent) -> None:
    """Send an agent a warm grant, possibly again."""
    assert agent.store is not None
    rank = len(task.slots)
    grant = wire.Grant(round=agent.round, group_rank=rank, group_world=rank + 1, master=agent.store, warm=True)
    turn.send(agent, grant)


def _resume_standby(task: Task, turn: Turn, agent: Agent, message: wire.Register) -> None:
    """Handle the new registration of a warm agent: warm workers that it does not list are dead."""
    if agent.local_world is None:
        agent.local_world = message.local_world
    named = {info.worker for info in message.workers}
    for worker in [worker for worker in agent.hellos if worker not in named]:
        del agent.hellos[worker]
        agent.gone.append(worker)
    turn.save(task)


def _pass_on(task: Task, turn: Turn) -> bool:
    """Free slots of dead workers, as many as there are warm agents to take them; return whether any were freed.

    A slot whose agent is away is kept: the agent is either declared lost shortly, or has more to report.
    """
    if task.finishing or task.rebuilding or not any(agent.warm for agent in task.agents.values()):
        return False
    spare = [agent for agent in next_in_line(task, turn) if agent.all_warm]
    if not spare:
        return False
    held = [task.agents[agent_id] for agent_id in task.slots if not turn.drains(task.agents[agent_id])]
    dead = [agent for agent in held if agent.gone and agent.conn is not None and not task.workers_of(agent.id)]
    room = max(0, task.limit - len(held))
    given = dead[: max(0, len(spare) - room)]
    for agent in given:
        leave_slot(task, agent)
        turn.emit(task, "slot_passed_on", agent=agent.id, node=agent.node)
    return bool(given)


def _may_be_warm(task: Task, turn: Turn, agent: Agent) -> bool:
    """Whether an agent without a slot may have workers. In a task that is being rebuilt the script is not known yet."""
    may = turn.limits.warm_standby and (task.elastic or task.rebuilding)
    return may and not (agent.departing or turn.lasting.excludes(agent))


def _warm(task: Task, turn: Turn, agent: Agent) -> None:
    if agent.conn is None or task.rebuilding:
        return
    agent.waiting = False
    agent.warm = True
    _send_warm_grant(task, turn, agent)
    turn.emit_apart(task, "standby_warms", agent=agent.id, node=agent.node, round=agent.round)


def _cool(task: Task, turn: Turn, agent: Agent) -> None:
    """Have the agent stop its warm workers and stand by without workers."""
    leave_slot(task, agent)
    agent.stopping = True
    turn.send(agent, wire.Stop(reason="its workers are no longer kept warm"))
    turn.emit_apart(task, "standby_cools", agent=agent.id, node=agent.node)


STANDBY: Final = Part(review=_review_standbys)


_LOST_REMEMBERED = 1000
_FINISHED: Final = "its workers have finished"
"""Reason of a success."""


def refusal(task: Task | None, message: wire.Register) -> str | None:
    """Return why the agent is refused, for its user; None if it is accepted."""
    if message.protocol != wire.PROTOCOL_VERSION:
        return f"the agent speaks protocol {message.protocol}, the coordinator {wire.PROTOCOL_VERSION}: use one version"
    low, high = message.min_nodes, message.max_nodes
    if not (message.task and message.agent) or not 1 <= low <= high:
        return f"expected a task, an agent and 1 <= min_nodes <= max_nodes, got {low}:{high} for {message.task!r}"
    if (reason := _contradiction(message)) is not None:
        return reason
    known = None if task is None else task.agents.get(message.agent)
    if known is not None and known.secret and known.secret != message.secret:
        return f"agent {message.agent!r} has registered before, with another secret: expected the agent that did"
    if task is not None and task.agents and (task.min_nodes, task.max_nodes) != (low, high):
        theirs = f"{task.min_nodes}:{task.max_nodes}"
        return f"--nnodes {low}:{high} of {message.agent} differs from {theirs} of task {task.id!r}'s first agent"
    return None


def _contradiction(message: wire.Register) -> str | None:
    """Return the contradiction in a registration, in one sentence; None if there is none."""
    started = message.granted or message.warm
    if message.granted and message.warm:
        return "granted=true, warm=true: expected at most one of them"
    if started and message.store is None:
        return f"{'granted' if message.granted else 'warm'}=true, store=null: expected the store of the granted round"
    names = [info.worker for info in message.workers]
    if len(set(names)) < len(names):
        return f"workers={shortened(names)}: expected different ones"
    return None


def register(
    task: Task, turn: Turn, conn: int, message: wire.Register, *, created: bool, excused: bool = False
) -> None:
    """Accept an agent's (new) connection. The caller has checked `refusal`.

    Args:
        task: its task.
        turn: where actions go.
        conn: number of the connection.
        message: the registration.
        created: whether the task is new.
        excused: whether the coordinator stood still shortly before, so the agent's link is not to blame.
    """
    agent = task.agents.get(message.agent)
    resumed = agent is not None
    if agent is None:
        agent = _new_agent(task, message)
        if not task.agents:
            task.min_nodes, task.max_nodes = message.min_nodes, message.max_nodes
            if task.target is not None and not task.min_nodes <= task.target <= task.max_nodes:
                task.target = None
        task.agents[agent.id] = agent
        if task.absent:
            lifecycle.move(task, agents="present")
            turn.cancel("empty", task=task.id)
    else:
        if not task.restoring and not excused:
            _was_cut(task, turn, agent)
        turn.cancel("lost", task=task.id, agent=agent.id)
    agent.conn, agent.told, agent.went, agent.copies = conn, message.epoch, message.went, message.copies
    turn.send(agent, registered(turn.limits, turn.connections))
    if message.reading is not None:
        severity.handle_reading(task, turn, agent, message.reading)
    about = {"agent": agent.id, "node": agent.node, "host": agent.host, "pid": agent.pid, "resumed": resumed}
    turn.emit_apart(task, "agent_registered", **about)
    if task.over is not None:
        turn.send(agent, wire.TaskOver(succeeded=task.over))
    elif resumed:
        _resume(task, turn, agent, message)
    elif message.granted and not _place_is_free(turn, agent):
        _take_new(task, turn, agent, message)
    elif (created and (message.granted or message.warm)) or _was_running(task, message):
        _has_room(task, turn)
        if not task.rebuilding:
            lifecycle.move(task, rebuilding=True)
            turn.timer("rebuild", turn.limits.restart_grace, task=task.id)
        (_adopt if message.granted else _adopt_warm)(task, turn, agent, message)
    elif task.rebuilding and message.granted and _has_room(task, turn):
        _adopt(task, turn, agent, message)
    elif message.warm:
        _adopt_warm(task, turn, agent, message)
    else:
        _take_new(task, turn, agent, message)
    _review_restoring(task, turn)


def _new_agent(task: Task, message: wire.Register) -> Agent:
    return Agent(
        id=message.agent,
        task=task.id,
        node=message.node,
        host=message.host,
        pid=message.pid,
        secret=message.secret,
        slot=message.slot,
        rack=message.rack or "",
        conn=None,
    )


def registered(limits: ev.Limits, connections: int) -> wire.Registered:
    """Return the answer to a registration; it is repeated when the number of agents' connections has changed much."""
    silence = limits.silence.shared_by(connections)
    return wire.Registered(
        coordinator="unicron",
        worker_timeout=limits.worker_timeout,
        beat=silence.beat,
        least_silence=silence.least,
        most_silence=silence.most,
        progress=report_seconds(connections),
        started_by_agent=limits.started_by_agent,
    )


def _was_cut(task: Task, turn: Turn, agent: Agent) -> None:
    """Record that the agent returned in time from a broken connection; report frequent breaks as an error."""
    limits = turn.limits
    agent.cuts = [*(at for at in agent.cuts if turn.now - at < limits.flapping_window), turn.now]
    if len(agent.cuts) >= limits.flapping_cuts:
        cause = f"the connection broke {len(agent.cuts)} times within {turn.now - agent.cuts[0]:.0f} s, and was renewed"
        agent.cuts = []
        severity.handle_node_error(task, turn, agent, "link_degraded", cause)


def _place_is_free(turn: Turn, agent: Agent) -> bool:
    """Whether no other agent has workers at the place of an unknown agent that comes with a grant.

    A newer grant of the place is taken back if its agent has started no workers: the machine's lock prevents it from
    that.
    """
    occupied = turn.occupant(agent)
    if occupied is None:
        return True
    task, other = occupied
    if other.local_world is not None or other.gone:
        return False
    if not other.stopping:
        slots.revoke(task, turn, other, f"{agent.id} of task {agent.task} has its workers at {agent.place}")
    return True


def _was_running(task: Task, message: wire.Register) -> bool:
    """Whether the agent's workers are in an epoch of a task that was mistaken for a new one.

    A stand-by agent, which knows no epoch, was the first to register with a coordinator that has lost its store.
    """
    unknown = task.life == 1 and task.number == 0 and message.agent not in task.lost
    return unknown and message.granted and message.epoch > 0


def _has_room(task: Task, turn: Turn) -> bool:
    """Whether a slot is free for an agent that has workers; a slot whose agent has none yet is taken back."""
    if len(task.slots) >= task.max_nodes:
        idle = [task.agents[agent_id] for agent_id in task.slots if not task.workers_of(agent_id)]
        if idle:
            slots.revoke(task, turn, idle[-1], "another agent has the task's workers")
    return len(task.slots) < task.max_nodes


def _review_restoring(task: Task, turn: Turn) -> None:
    if not task.restoring:
        return
    present = [agent.conn is not None for agent in task.agents.values()]
    if all(present):
        lifecycle.move(task, agents="present")
        turn.cancel("restore", task=task.id)
    elif any(present):
        # Half of it is longer than any agent takes to notice that a coordinator is silent (`most_silence`).
        grace = turn.limits.restart_grace
        turn.timer("restore", min(grace, max(grace / 2, ev.RETURN_SECONDS)), task=task.id)


def disconnected(task: Task, turn: Turn, agent: Agent, silent: float | None) -> None:
    """Handle the end of the agent's connection: a grace period to return begins."""
    agent.conn = None
    agent.silent = silent
    agent.away_since = turn.now
    turn.timer("lost", turn.limits.reconnect_grace, task=task.id, agent=agent.id)


def lost_due(task: Task, turn: Turn, agent: Agent) -> None:
    """Declare the agent lost: it did not return in time."""
    if agent.conn is not None:
        return
    _declare_lost(task, turn, agent)
    _await_others(task, turn)


def _await_others(task: Task, turn: Turn) -> None:
    """Let agents that come soon continue a task that has lost all of its own."""
    if not task.agents and not task.finishing and task.over is None and not is_job(task, turn):
        lifecycle.move(task, agents="absent")
        turn.timer("empty", turn.limits.restart_grace, task=task.id)


def _restore_due(task: Task, turn: Turn) -> None:
    """Declare absent agents of a restored task lost: they have not returned in time. Others that wait continue it."""
    if not task.restoring:
        return
    lifecycle.move(task, agents="present")
    for agent in [agent for agent in task.agents.values() if agent.conn is None]:
        _declare_lost(task, turn, agent)
    if turn.others_wait(task):
        _await_others(task, turn)
    turn.save(task)


def _empty_due(task: Task, _turn: Turn) -> None:
    """Stop waiting for lost agents."""
    if task.absent:
        lifecycle.move(task, agents="present")


def ended(task: Task, turn: Turn, agents: Sequence[Agent]) -> None:
    """Declare these agents lost: their processes have ended."""
    for agent in agents:
        turn.cancel("lost", task=task.id, agent=agent.id)
        _declare_lost(task, turn, agent)
    _review_restoring(task, turn)
    turn.save(task)


def _missing_due(task: Task, turn: Turn, agent: Agent) -> None:
    """Declare the workers dead that the agent no longer lists and has not explained."""
    gone, agent.missing = agent.missing, []
    workers.died(task, turn, [task.workers[worker] for worker in gone if worker in task.workers], "lost")


def restore(task: Task, turn: Turn) -> None:
    """Restore a task of an earlier coordinator process: no agent is connected, timers are gone."""
    lifecycle.restore(task, waits=is_job(task, turn))
    for agent in list(task.agents.values()):
        agent.away_since = agent.away_since if agent.conn is None and agent.away_since else turn.now
        agent.conn = None
        agent.missing = []
        agent.held = False
    turn.timer("restore", turn.limits.restart_grace, task=task.id)
    if task.rebuilding:
        turn.timer("rebuild", turn.limits.restart_grace, task=task.id)
    if task.comm_error_epoch:
        turn.timer("comm_error", turn.limits.comm_error_grace, task=task.id)
    turn.save(task)


def bye(task: Task, turn: Turn, agent: Agent, message: wire.Bye) -> None:
    """Handle the exit of an agent that has stopped its workers."""
    turn.hang_up(agent, "bye")
    if task.id not in turn.lasting.jobs:  # else its daemon decides: it may be lost, which ends its agents
        turn.lasting.lost.pop(agent.node, None)
    if message.succeeded and not agent.warm:
        task.agents_succeeded += 1
        for worker in task.workers_of(agent.id):
            workers.finished(task, turn, worker, how="exit")
    had_slot = agent.id in task.slots
    workers.died(task, turn, task.workers_of(agent.id), "agent left")
    _remove(task, turn, agent)
    turn.emit(task, "agent_left", agent=agent.id, node=agent.node, succeeded=message.succeeded)
    slots.agent_gone(task, turn, had_slot=had_slot, succeeded=message.succeeded)


def _begin_rendezvous(task: Task, turn: Turn, agent: Agent, message: wire.RendezvousBegin) -> None:
    """Handle an agent's request for a grant: its workers of earlier rounds have ended."""
    if message.round > agent.round:
        workers.died(task, turn, task.workers_of(agent.id), "stopped")
    slots.begin_rendezvous(task, turn, agent, message)


def _review_end(task: Task, turn: Turn) -> None:
    """End the task when no agent is left to run it."""
    if task.over is not None or task.absent:
        return
    failed = task.failed_end
    if not task.agents:
        done = task.finishing and not failed
        departed = not (done or failed) and task.epoch is None and task.pause_reason == "departure"
        finish(task, turn, succeeded=done, reason=failed or _end_of(task, departed), interrupted=departed)
    elif task.finishing and not task.slots:
        # The remaining agents wait: stand-bys, which are not needed, or agents whose workers failed at the end.
        stopped = any(agent.holder for agent in task.agents.values())
        succeeded = not failed if task.elastic else not stopped
        finish(task, turn, succeeded=succeeded, reason=_FINISHED if succeeded else failed or "no agent runs any more")


def _end_of(task: Task, departed: bool) -> str:
    """Return why a task without agents is over, with its newest checkpoint if it has not finished."""
    if task.finishing:
        return _FINISHED
    why = "all agents were asked to end, by SIGTERM or Ctrl-C" if departed else "no agent is left"
    return f"{why}{saved(task)}"


def _declare_lost(task: Task, turn: Turn, agent: Agent) -> None:
    if agent.id in agents_to_notify(task) or not task.elastic:
        open_incident(task)
    severity.agent_lost(task, turn, agent)
    had_slot = agent.id in task.slots
    turn.log(task, AgentLoss(agent=agent.id, node=agent.node, away_since=agent.away_since, silent=agent.silent))
    workers.died(task, turn, task.workers_of(agent.id), "node lost")
    _remove(task, turn, agent)
    turn.lasting.record_lost(agent.node, turn.now)
    task.lost = [*task.lost, agent.id][-_LOST_REMEMBERED:]
    slots.agent_gone(task, turn, had_slot=had_slot, succeeded=False)


def _remove(task: Task, turn: Turn, agent: Agent) -> None:
    turn.places_changed = True
    slots.leave_slot(task, agent)
    del task.agents[agent.id]
    if not task.agents and not task.finishing and task.over is None and is_job(task, turn):
        lifecycle.move(task, agents="absent")  # queued again; `daemons` ends it if torchrun has failed


def _take_new(task: Task, turn: Turn, agent: Agent, message: wire.Register) -> None:
    agent.round = message.round - 1 if message.waiting else message.round
    for info in message.workers:
        agent.gone.append(info.worker)
        turn.send(agent, wire.Fence(worker=info.worker, reason="its node was lost to the task"))
    if message.waiting and message.store is not None:
        slots.begin_rendezvous(task, turn, agent, wire.RendezvousBegin(round=message.round, store=message.store))
    elif message.granted:
        turn.send(agent, wire.Stop(reason="the node was lost to the task: rendezvous again"))


def _adopt(task: Task, turn: Turn, agent: Agent, message: wire.Register) -> None:
    """Accept the agent's claim that it has a slot."""
    agent.round = message.round
    agent.store = message.store
    agent.waiting = False
    agent.holder = True
    agent.local_world = message.local_world
    agent.ranked = False  # it may still wait for its ranks; sending them twice does no harm
    if agent.id not in task.slots:
        task.slots.append(agent.id)
    if agent.place is not None and turn.lasting.assigned.get(agent.place) != task.id:
        turn.lasting.assigned[agent.place] = task.id
        turn.save_lasting()
    if not task.formed:
        lifecycle.move(task, slots="granted")
    task.number = max(task.number, message.epoch)
    _reconcile_workers(task, turn, agent, message)


def _adopt_warm(task: Task, turn: Turn, agent: Agent, message: wire.Register) -> None:
    """Accept the agent's claim that its workers are warm. They never took part in the task, so none is fenced."""
    slots.leave_slot(task, agent)
    agent.round = message.round
    agent.store = message.store
    agent.warm = True
    agent.holder = agent.stopping = False
    agent.gone = []
    agent.local_world = message.local_world
    task.arrivals += 1
    agent.arrived = task.arrivals
    turn.save(task)
    _reconcile_workers(task, turn, agent, message)


def _resume(task: Task, turn: Turn, agent: Agent, message: wire.Register) -> None:
    if message.round > agent.round:
        workers.died(task, turn, task.workers_of(agent.id), "stopped")
    if message.waiting and message.store is not None:
        begin = wire.RendezvousBegin(round=message.round, store=message.store)
        slots.begin_rendezvous(task, turn, agent, begin)
        if agent.id in task.slots and not agent.waiting:
            slots.send_grant(task, turn, agent)
        elif agent.warm:
            _send_warm_grant(task, turn, agent)
    elif message.granted and message.round > agent.round:
        # Only a store that lost its last writes (power failure) knows less of a grant than the agent.
        _adopt(task, turn, agent, message)
        return
    elif message.warm and (message.round > agent.round or agent.waiting):
        _adopt_warm(task, turn, agent, message)  # as in the case before
        return
    if agent.warm and message.round == agent.round:
        _resume_standby(task, turn, agent, message)
    if agent.id in task.slots and message.round == agent.round:
        if message.warm:
            slots.send_grant(task, turn, agent)
        if agent.local_world is None:
            agent.local_world = message.local_world
        elif agent.ranked:
            slots.send_ranks(task, turn, agent)
        if task.regrouping:
            turn.send(agent, wire.Stop(reason="the task's nodes changed"))
    if agent.stopping and (message.granted or message.warm) and message.round == agent.round:
        turn.send(agent, wire.Stop(reason="its slot was taken back"))
    _reconcile_workers(task, turn, agent, message)
    _repeat_epoch(task, turn, agent, message.epoch)


def _reconcile_workers(task: Task, turn: Turn, agent: Agent, message: wire.Register) -> None:
    named = {info.worker for info in message.workers}
    for info in message.workers:
        if info.hello is not None:
            worker = task.workers.get(info.worker)
            if worker is None:
                if info.worker not in task.finished:
                    workers.hello(task, turn, agent, info.hello)
            elif not worker.built and info.ready is None:
                welcome(task, turn, agent, worker)
        elif info.worker in agent.gone:
            workers.fence_stranger(task, turn, agent, info.worker)
        known = task.workers.get(info.worker)
        if known is not None:
            known.member = info.member
        if info.ready is not None and known is not None:
            workers.ready(task, turn, known, info.ready)
            if not known.built and known.id in task.workers:
                welcome(task, turn, agent, known)  # it may not know that it is no founder
        if info.replicas is not None and info.worker in task.workers:
            slots.record_replicas(task, turn, info.replicas)
    agent.missing = [worker.id for worker in task.workers_of(agent.id) if worker.id not in named]
    if agent.missing:
        turn.timer("missing", turn.limits.reconnect_grace, task=task.id, agent=agent.id)


def _repeat_epoch(task: Task, turn: Turn, agent: Agent, seen: int) -> None:
    """Send the newest epoch and its go again if the agent's members may have missed them."""
    if task.epoch is None or agent.id not in agents_to_notify(task):
        return
    if task.earlier is not None:  # without it a worker would wait for the next epoch, which the others wait to leave
        turn.send(agent, task.earlier)
    if seen < task.number:
        send_epoch(task, turn, agent)
    if task.go is not None:
        send_go(task, turn, only=agent.id)


def _epoch_wanted(task: Task, turn: Turn, agent: Agent, _message: wire.EpochWanted) -> None:
    """Send the whole newest epoch to an agent that could not apply a change."""
    _repeat_epoch(task, turn, agent, 0)


PART: Final = Part(
    restore=restore,
    receivers=(
        on(wire.Bye, bye),
        on(wire.RendezvousBegin, _begin_rendezvous),
        on(wire.EpochWanted, _epoch_wanted),
    ),
    timers={"restore": _restore_due, "empty": _empty_due},
    agent_timers={"lost": lost_due, "missing": _missing_due},
    review=_review_end,
)
