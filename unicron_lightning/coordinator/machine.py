"""The coordinator as a pure state machine: `Machine.handle` takes an input and returns the actions that answer it.

No clock, no I/O, no randomness: the same inputs from the same snapshot give the same state and actions. This module
handles connections and finds the task of each input. The rules about one task are in the packages beside it, and are
called through `parts`.

**Isolation**: a failure to process an input affects only the task that the input belongs to.

An exception in the middle of a turn leaves the turn's tasks half changed, but nothing has been written or sent yet.
Each of these tasks is *set back* to its state in the store, and its agents' connections are closed: the agents register
again, as after a restart of the coordinator, while training continues. An agent whose messages fail twice is refused.
A task that had to be set back too often is *stopped*: its agents are notified that it has failed, and why.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator import parts, state
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.allocation.places import AssignmentChanges, DaemonPlaces, competing_tasks, has_places
from unicron_lightning.coordinator.allocation.plans import gather, gathered, review_allocation, take_plan
from unicron_lightning.coordinator.config import CoordinatorConfig
from unicron_lightning.coordinator.incidents import accounting
from unicron_lightning.coordinator.lifecycle import Lifecycle
from unicron_lightning.coordinator.membership import daemons, epochs, registration, workers
from unicron_lightning.coordinator.orders import calibration, injection, jobs, relayout
from unicron_lightning.coordinator.orders.jobs import refusal, result_of
from unicron_lightning.coordinator.severity import apply as severity
from unicron_lightning.coordinator.state import Agent, Cluster, Lasting, Pending, Task
from unicron_lightning.jobs import Job
from unicron_lightning.wire.daemon import NodeHello
from unicron_lightning.wire.fields import shortened


def drained(lasting: Lasting) -> list[str]:
    """Return the nodes, or agents, that get no workers: drained by an operator, or cordoned."""
    return [*lasting.drained, *(node for node in lasting.cordoned if node not in lasting.drained)]


def drain(cluster: Cluster, turn: Turn, event: ev.Drain) -> bool:
    """Record that a node is drained, or no longer is; return whether that is a change."""
    lasting = cluster.lasting
    if event.drained and event.node not in lasting.drained:
        lasting.drained.append(event.node)
    elif not event.drained and event.node in drained(lasting):
        lasting.drained = [node for node in lasting.drained if node != event.node]
        lasting.cordoned.pop(event.node, None)
        for task in cluster.tasks.values():
            severity.lift(task, turn, event.node)
    else:
        return False
    name = "node_drains" if event.drained else "node_undrained"
    turn.emit_of_cluster(name, node=event.node)
    turn.save_lasting()
    turn.places_changed = True
    return True


def inputs_at_start(config: CoordinatorConfig, cluster: Cluster) -> list[ev.Input]:
    """Return inputs for the machine, to follow `events.Started`.

    A task that already runs, or has ended according to the restored state, is left out: a restart repeats nothing.
    So is one that comes after a task that has not succeeded.
    """
    inputs: list[ev.Input] = [ev.Drain(node=node, drained=True) for node in config.cluster.drained]
    due: list[Job] = []
    for job in config.jobs():
        if refusal(cluster, [*due, job]) is None and result_of(cluster.lasting, job.name) is None:
            due.append(job)
    return [*inputs, *([ev.Submit(jobs=tuple(due))] if due else [])]


WINDOW: Final = 60.0
"""Seconds for which failures count."""
_MOST_OF_AN_AGENT: Final = 2
MOST_OF_A_TASK: Final = 5

_FindStored = Callable[[str], Task | None]
"""Returns a task as stored; None if it is not stored, or not readable."""


class Failures:
    """Failures of the last minute, of tasks or of agents.

    Args:
        most: number of failures of one that are too many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: dict[str, list[float]] = {}

    def are_too_many(self, of: str, now: float) -> bool:
        """Count a failure; return whether there are too many."""
        late = {name: [at for at in times if 0 <= now - at < WINDOW] for name, times in self._times.items()}
        self._times = {name: times for name, times in late.items() if times}
        self._times.setdefault(of, []).append(now)
        return len(self._times[of]) >= self._most


def diagnosis(error: Exception) -> str:
    """Describe the error and where it was raised, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {shortened(str(error))}{where}"


def _agent_of(event: ev.Input, cluster: Cluster) -> str | None:
    """Return the agent that sent the input; None if none did."""
    if not isinstance(event, ev.AgentMessage):
        return None
    if isinstance(event.message, wire.Register):
        return event.message.agent
    return cluster.conns.get(event.conn, ("", None))[1]


def set_back(cluster: Cluster, turn: Turn, task_id: str, stored: Task | None, why: str) -> None:
    """Discard changes of a task since it was written; its agents register again."""
    _disconnect(cluster, turn, task_id)
    cluster.tasks.pop(task_id, None)
    if stored is not None:
        cluster.tasks[task_id] = stored
        turn.emit_of_cluster("task_set_back", of=task_id, reason=why)
        parts.restore(stored, turn)
        turn.to_review[task_id] = stored
        return
    turn.actions.append(ev.Forget(task=task_id))
    turn.emit_of_cluster("task_set_back", of=task_id, reason=why)
    if (job := cluster.lasting.jobs.get(task_id)) is not None:
        jobs.adopt(cluster, turn, job, created_at=job.submitted_at)


def stop(cluster: Cluster, turn: Turn, task_id: str, why: str) -> None:
    """End a task as failed without relying on its state; agents that return are notified, too."""
    old = cluster.tasks.get(task_id)
    reason = f"the coordinator cannot handle this task: {why}"
    if old is None:
        _disconnect(cluster, turn, task_id)
        turn.actions.append(ev.Forget(task=task_id))
        turn.emit_of_cluster("task_stopped", of=task_id, reason=reason)
        return
    task = Task(
        id=task_id,
        min_nodes=old.min_nodes,
        max_nodes=old.max_nodes,
        created_at=old.created_at,
        lifecycle=Lifecycle(over=False),
    )
    by_agent = {agent: conn for conn, (of, agent) in cluster.conns.items() if of == task_id}
    for each in old.agents.values():
        conn = by_agent.get(each.id)
        task.agents[each.id] = Agent(
            id=each.id, task=task_id, node=each.node, host=each.host, pid=each.pid, slot=each.slot, conn=conn
        )
        turn.send(task.agents[each.id], wire.TaskOver(succeeded=False, reason=reason))
        if conn is None:
            turn.timer("lost", turn.limits.reconnect_grace, task=task_id, agent=each.id)
    cluster.tasks[task_id] = task
    jobs.ended(task, turn, state="failed", reason=reason)
    turn.emit_of_cluster("task_stopped", of=task_id, reason=reason)
    turn.save(task)
    turn.to_review[task_id] = task


def _disconnect(cluster: Cluster, turn: Turn, task_id: str) -> None:
    conns = [conn for conn, (of, _) in cluster.conns.items() if of == task_id]
    conns += [item.conn for item in cluster.pending.pop(task_id, [])]
    for conn in conns:
        cluster.conns.pop(conn, None)
        turn.close(conn, "the task was set back: register again")


class Machine:
    """All tasks of the coordinator.

    Args:
        limits: time limits and switches.
        cluster: the state to continue from; None for an empty one.
    """

    def __init__(self, limits: ev.Limits, cluster: Cluster | None = None) -> None:
        self.limits = limits
        self._cluster = Cluster() if cluster is None else cluster
        self._told, self._daemons = daemons.SentOrders(), DaemonPlaces()
        self._changes = AssignmentChanges()
        self._failing_tasks = Failures(MOST_OF_A_TASK)
        self._failing_agents = Failures(_MOST_OF_AN_AGENT)
        self._touched: dict[str, None] = {}
        self._has_places = has_places(self._cluster)

    @property
    def tasks(self) -> dict[str, Task]:
        """The tasks by id, read-only."""
        return self._cluster.tasks

    @property
    def cluster(self) -> Cluster:
        """The whole state, read-only."""
        return self._cluster

    @property
    def drained(self) -> list[str]:
        """The nodes, or agents, that get no workers: drained by an operator, or cordoned."""
        return drained(self._cluster.lasting)

    @property
    def lasting(self) -> Lasting:
        """The state beside the tasks that outlives the process, read-only."""
        return self._cluster.lasting

    def snapshot(self) -> bytes:
        """Return the whole state as JSON; `Machine(limits, state.decode_cluster(...))` continues from it."""
        return state.encode(self._cluster)

    def handle(self, event: ev.Input, now: float) -> list[ev.Action]:
        """Process one input.

        Args:
            event: the input.
            now: time.time() of the shell; only used in messages and events.

        Returns:
            Actions to carry out in order. `ev.Save`, `ev.Forget` and `ev.Emit` must be made durable before any other.
        """
        turn = self._begin(now)
        self._take_in(turn, event)
        self._follow(turn)
        return turn.actions

    def contain(self, event: ev.Input, error: Exception, stored: _FindStored, now: float) -> list[ev.Action]:
        """Continue after `handle` has raised: set back the tasks of that turn, or stop them.

        Args:
            event: the input that failed.
            error: the exception.
            stored: reads a task from the store.
            now: time.time().

        Returns:
            Actions as by `handle`. Decisions on tasks in `touched` that are not written yet must not be carried out.
        """
        why, touched = diagnosis(error), self.touched
        self._changes.forget()
        self._daemons.inside.clear()
        sender = _agent_of(event, self._cluster)
        conn = event.conn if isinstance(event, ev.AgentMessage | ev.DaemonMessage) else None
        turn = self._begin(now)
        if conn is not None and sender is not None and self._failing_agents.are_too_many(sender, now):
            turn.refuse(conn, f"the coordinator cannot handle the messages of {sender}: {why}")
        elif conn is not None:
            turn.close(conn, f"the coordinator cannot handle this message: {why}")
        if conn is not None:
            self._cluster.conns.pop(conn, None)
        for task in touched:
            if self._failing_tasks.are_too_many(task, now):
                stop(self._cluster, turn, task, why)
            else:
                set_back(self._cluster, turn, task, stored(task), why)
        turn.save_lasting()
        self._follow(turn)
        return turn.actions

    @property
    def touched(self) -> list[str]:
        """Tasks that the newest turn has used."""
        return list(self._touched)

    def _begin(self, now: float) -> Turn:
        self._touched = {}
        return Turn(now=now, limits=self.limits, cluster=self._cluster, daemons=self._daemons)

    def _take_in(self, turn: Turn, event: ev.Input) -> None:
        match event:
            case ev.Started():
                self._start(turn, event)
            case ev.AgentMessage() | ev.DaemonMessage() | ev.MessageBatch():
                for each in event.received if isinstance(event, ev.MessageBatch) else (event,):
                    self._said(turn, each)
            case ev.Disconnected():
                self._disconnected(turn, event)
            case ev.AgentsEnded():
                self._ended(turn, event.agents)
            case ev.Drain():
                self._drain(turn, event)
            case ev.Resize():
                self._resize(turn, event)
            case ev.Calibrate():
                calibration.order(self._cluster.tasks[event.task], turn, event)
            case ev.Relayout():
                relayout.order(self._cluster.tasks[event.task], turn, event.layout)
            case ev.Submit():
                self._has_places = True
                jobs.submit(self._cluster, turn, event.jobs)
            case ev.Cancel():
                self._cancel(turn, event)
            case ev.InjectFault():
                injection.order(self._cluster.tasks[event.task], turn, event)
            case ev.Planned():
                take_plan(self._cluster, turn, event)
            case ev.TimerFired():
                self._timer(turn, event.key)
            case ev.AbsencesDue():
                for key in event.keys:
                    if (task := self._cluster.tasks.get(key.task)) is not None:
                        self._touched[task.id] = None
                        if parts.timer_fired(task, turn, key):
                            turn.to_review[task.id] = task

    def _follow(self, turn: Turn) -> None:
        """Carry out the consequences of an input."""
        self._replay_pending(turn)
        self._review_due(turn)
        while turn.cordoned:
            turn.cordoned = False
            for task in list(self._cluster.tasks.values()):
                self._review(turn, task)
        if turn.places_changed and self._has_places:
            self._review_places(turn)
            self._review_due(turn)
        self._review_idle(turn)
        self._keep_books(turn)

    def _review_due(self, turn: Turn) -> None:
        while turn.to_review:
            self._review(turn, turn.to_review.pop(next(iter(turn.to_review))))
            self._replay_pending(turn)  # of a task that ended in the review

    # ---- inputs ----------------------------------------------------------------------------------------------------

    def _start(self, turn: Turn, event: ev.Started) -> None:
        cluster = self._cluster
        cluster.conns, cluster.pending, cluster.idle = {}, {}, True
        cluster.asked, turn.places_changed = None, True
        gathered(cluster, turn)
        turn.emit_of_cluster("coordinator_started", **event.about)
        ended = [task.id for task in cluster.tasks.values() if task.over is not None]
        for task_id in ended:
            del cluster.tasks[task_id]
            turn.actions.append(ev.Forget(task=task_id))
        if cluster.tasks:
            turn.emit_of_cluster("coordinator_restored", tasks=sorted(cluster.tasks))
        for task in list(cluster.tasks.values()):
            self._touched = {task.id: None}
            parts.restore(task, turn)
            self._review(turn, task)
        daemons.restore(cluster, turn)
        if self.limits.exit_when_idle:
            turn.timer("idle", self.limits.startup_linger)

    def _said(self, turn: Turn, event: ev.AgentMessage | ev.DaemonMessage) -> None:
        if isinstance(event, ev.AgentMessage):
            self._received(turn, event.conn, event.message, excused=event.excused)
        else:
            self._node_said(turn, event)

    def _received(self, turn: Turn, conn: int, message: wire.FromAgent, *, excused: bool = False) -> None:
        waiting = self._cluster.pending_of(conn) if self._cluster.pending else None
        if waiting is not None:
            waiting.messages.append(message)
        elif isinstance(message, wire.Register):
            self._register(turn, conn, message, excused=excused)
        elif conn not in self._cluster.conns:
            turn.close(conn, "the first message must be register")
        else:
            task_id, agent_id = self._cluster.conns[conn]
            self._touched[task_id] = None
            task = self._cluster.tasks.get(task_id)
            agent = task.agents.get(agent_id) if task else None
            if task is not None and agent is not None:
                step = task.severity.step
                parts.receive(task, turn, agent, message)
                if turn.decisions or task.severity.step != step or not workers.changes_nothing(task, message):
                    turn.to_review[task.id] = task

    def _register(self, turn: Turn, conn: int, message: wire.Register, *, excused: bool) -> None:
        task = self._cluster.tasks.get(message.task)
        self._touched[message.task] = None
        known = task is not None and (message.agent in task.agents or message.agent in task.lost)
        if task is not None and not known and _undecided(task):
            self._cluster.pending.setdefault(task.id, []).append(Pending(conn=conn, messages=[message]))
            return
        reason = registration.refusal(task, message) or (None if known else daemons.outdated(self._cluster, message))
        if reason is None and self._cluster.conns.get(conn, (message.task, message.agent)) != (
            message.task,
            message.agent,
        ):
            reason = "this connection is registered for another agent"
        if reason is not None:
            turn.refuse(conn, reason)
            return
        created = task is None
        if task is None:
            task = Task(
                id=message.task,
                min_nodes=message.min_nodes,
                max_nodes=message.max_nodes,
                created_at=turn.now,
                weight=message.weight,
                lifecycle=Lifecycle(),
            )
            self._cluster.tasks[task.id] = task
            turn.emit(task, "task_created", min_nodes=task.min_nodes, max_nodes=task.max_nodes)
        self._has_places |= message.slot is not None
        old = task.agents.get(message.agent)
        if old is not None and old.conn != conn:
            turn.hang_up(old, "the agent has a newer connection")
        self._cluster.conns[conn] = (task.id, message.agent)
        registration.register(task, turn, conn, message, created=created, excused=excused)
        gather(self._cluster, turn, task.agents[message.agent], old is None)
        turn.to_review[task.id] = task

    def _node_said(self, turn: Turn, event: ev.DaemonMessage) -> None:
        self._has_places = True
        if isinstance(event.message, NodeHello):
            daemons.hello(self._cluster, turn, event.conn, event.message)
        elif (node := daemons.of_conn(self._cluster, event.conn)) is not None:
            daemons.report(turn, node, event.message)
        else:
            turn.close(event.conn, "the first message must be node_hello")

    def _disconnected(self, turn: Turn, event: ev.Disconnected) -> None:
        conn = event.conn
        node = daemons.of_conn(self._cluster, conn)
        if node is not None:
            daemons.disconnected(turn, node)
        for task_id, pending in list(self._cluster.pending.items()):
            self._cluster.pending[task_id] = [item for item in pending if item.conn != conn]
        task_id, agent_id = self._cluster.conns.pop(conn, ("", ""))
        task = self._cluster.tasks.get(task_id)
        if task is not None:
            self._touched[task_id] = None
        agent = task.agents.get(agent_id) if task else None
        if task is not None and agent is not None and agent.conn == conn:
            registration.disconnected(task, turn, agent, event.silent)

    def _ended(self, turn: Turn, agents: tuple[str, ...]) -> None:
        for task in list(self._cluster.tasks.values()):
            ended = [a for a in task.agents.values() if a.conn is None and a.id in agents]
            if ended:
                registration.ended(task, turn, ended)
                self._review(turn, task)

    def _drain(self, turn: Turn, event: ev.Drain) -> None:
        if drain(self._cluster, turn, event):
            for task in list(self._cluster.tasks.values()):
                self._review(turn, task)

    def _resize(self, turn: Turn, event: ev.Resize) -> None:
        task = self._cluster.tasks[event.task]
        assert event.nodes is None or task.min_nodes <= event.nodes <= task.max_nodes
        calibration.stop(task, turn, "resized by order")
        task.target = event.nodes
        turn.places_changed = True
        turn.emit_apart(task, "task_resized", nodes=event.nodes)
        self._review(turn, task)

    def _cancel(self, turn: Turn, event: ev.Cancel) -> None:
        task = self._cluster.tasks[event.task]
        if event.save:
            epochs.save_and_stop(task, turn, "cancel")
        else:
            jobs.finish(task, turn, succeeded=False, reason=jobs.CANCELLED)
        self._review(turn, task)

    def _timer(self, turn: Turn, key: ev.TimerKey) -> None:
        if key.kind == "idle":
            if self._cluster.idle:
                turn.actions.append(ev.StopServer(reason="idle"))
            return
        if key.kind == "node_lost":
            daemons.lost_due(self._cluster, turn, key.agent)
            return
        if key.kind == "plan":
            gathered(self._cluster, turn)
        task = self._cluster.tasks.get(key.task)
        if task is not None:
            self._touched[task.id] = None
            if parts.timer_fired(task, turn, key):
                self._review(turn, task)

    # ---- after each input ------------------------------------------------------------------------------------------

    def _review(self, turn: Turn, task: Task) -> None:
        """Carry out the steps that are due for the task now."""
        self._touched[task.id] = None
        parts.review(task, turn)
        if task.over is not None and not task.agents:
            self._cluster.tasks.pop(task.id, None)
            turn.actions.append(ev.Forget(task=task.id))

    def _review_places(self, turn: Turn) -> None:
        """Plan tasks that share places again, and review them: a place may have become free for another task."""
        for task in daemons.review_ended(self._cluster, turn):
            self._review(turn, task)
        review_allocation(self._cluster, turn)
        nodes, concerned = self._changes.take(self._cluster, competing_tasks(self._cluster))
        for task in concerned:
            self._review(turn, task)
        daemons.review(self._cluster, turn, self._told, nodes)

    def _keep_books(self, turn: Turn) -> None:
        """Update measurements and accounts. They decide nothing."""
        for task, logged in list(turn.news):
            self._touched[task.id] = None
            parts.record(task, turn, logged)
        if turn.actions:
            accounting.review(self._cluster.tasks.values(), turn)
        workers.send_notices(turn)

    def _replay_pending(self, turn: Turn) -> None:
        """Process the messages of agents that waited for a task's fate, once it is known."""
        for task_id in list(self._cluster.pending):
            task = self._cluster.tasks.get(task_id)
            if task is None or not _undecided(task):
                for item in self._cluster.pending.pop(task_id):
                    for message in item.messages:
                        self._received(turn, item.conn, message)

    def _review_idle(self, turn: Turn) -> None:
        cluster = self._cluster
        busy = bool(cluster.tasks or cluster.conns or cluster.nodes or any(cluster.pending.values()))
        if busy and self._cluster.idle:
            self._cluster.idle = False
            turn.cancel("idle")
        elif not busy and not self._cluster.idle:
            self._cluster.idle = True
            if self.limits.exit_when_idle:
                turn.timer("idle", self.limits.idle_linger)


def _undecided(task: Task) -> bool:
    """Whether it is open if unknown agents belong to this run of the task or to a new one.

    It is open while an ended task's agents leave, and while no agent of a restored task has reconnected.
    """
    if task.over is not None:
        return True
    return task.restoring and all(agent.conn is None for agent in task.agents.values())
