"""One turn of the machine: collects the actions that answer one input.

**Parts.** `Part` declares the rules of one package about a task. A rule is a function that gets the task and the turn,
changes the task's state, and adds actions to the turn. The machine calls these rules only through the parts listed in
`parts`, in their order there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation.places import (
    DaemonPlaces,
    is_assigned,
    is_elsewhere,
    occupants,
)
from unicron_lightning.coordinator.incidents.facts import Fact
from unicron_lightning.coordinator.severity.rules import Decision
from unicron_lightning.coordinator.state import Agent, Cluster, Task
from unicron_lightning.wire.fields import counted


class Turn:
    """The output of the rules.

    Args:
        now: time.time() of the shell.
        limits: parameters of the machine.
        cluster: state shared by all tasks.
        daemons: cached places of daemons.

    Attributes:
        places_changed: set when inputs of the plan may have changed, or a place may have become free.
    """

    def __init__(self, *, now: float, limits: ev.Limits, cluster: Cluster, daemons: DaemonPlaces) -> None:
        self.now = now
        self.daemons = daemons
        self.limits = limits
        self.lasting = cluster.lasting
        self.tasks = cluster.tasks
        self.places_changed = False
        self.connections = len(cluster.conns)
        """Number of agents' connections when the turn began."""
        self._cluster = cluster
        self.decisions: dict[str, list[Decision]] = {}
        """Decisions of the severity workflow that are still to be carried out, by task."""
        self.cordoned = False
        """Whether a node was cordoned, so that all tasks have to be reviewed."""
        self.to_review: dict[str, Task] = {}
        """Tasks, by id, to review in this order once the input is processed."""
        self.actions: list[ev.Action] = []
        self._lasting_saved = False
        self._saved: set[str] = set()
        self.news: list[tuple[Task, ev.Emit]] = []
        """Events of tasks logged in this turn, for measurements and accounting."""

    def drains(self, agent: Agent) -> bool:
        """Whether the agent must not have workers: it departs, its node is drained, or another task has its place."""
        lasting = self.lasting
        if agent.departing or ((lasting.drained or lasting.cordoned) and lasting.excludes(agent)):
            return True
        return agent.slot is not None and is_elsewhere(self._cluster, agent)

    def others_wait(self, task: Task) -> bool:
        """Whether agents wait to learn if they belong to this run of the task."""
        return bool(self._cluster.pending.get(task.id))

    def undrained(self, agents: Iterable[Agent]) -> list[Agent]:
        """Select agents that may have workers according to drains and the plan."""
        lasting = self.lasting
        if lasting.drained or lasting.cordoned:
            return [agent for agent in agents if not self.drains(agent)]
        assigned = lasting.assigned
        return [
            agent
            for agent in agents
            if not agent.departing
            and (agent.slot is None or assigned.get(f"{agent.node}/{agent.slot}", agent.task) == agent.task)
        ]

    def spared(self, task: Task, nodes: Collection[str]) -> frozenset[str]:
        """Select nodes without which the task, and every task with agents there, still has its minimum of agents."""
        needed: set[str] = set()
        out = self.lasting.out
        for other in self._cluster.tasks.values():
            if other.over is None:
                concerned = nodes
                if other is not task:
                    concerned = set(nodes).intersection(map(attrgetter("node"), other.agents.values()))
                if not concerned:
                    continue
                usable = Counter([agent.node for agent in other.agents.values()])
                if out:
                    usable = Counter(a.node for a in other.agents.values() if a.node not in out and a.id not in out)
                enough = usable.total() - other.min_nodes
                needed.update(node for node in concerned if usable[node] > enough)
        return frozenset(nodes) - needed

    def cordon(self, node: str, reason: str) -> None:
        """Cordon a node: it gets no workers until an operator undrains it."""
        self.lasting.cordoned[node] = reason
        self.cordoned = self.places_changed = True
        self.save_lasting()

    def startable(self, waiting: Iterable[Agent]) -> list[Agent]:
        """Select waiting agents that may have workers: no other agent has any at their places, or will."""
        free = (agent for agent in waiting if not (agent.held or agent.unhealthy or agent.parted))
        well = (agent for agent in free if not self.drains(agent))
        ready = [agent for agent in well if is_assigned(self._cluster, agent)]
        nodes = {agent.node for agent in ready if agent.place is not None}
        taken = occupants(self._cluster, nodes) if nodes else {}
        return [agent for agent in ready if agent.place not in taken]

    def occupant(self, agent: Agent) -> tuple[Task, Agent] | None:
        """Return the other agent that has workers at the place of this one, or may have, with its task."""
        return None if agent.place is None else occupants(self._cluster, (agent.node,)).get(agent.place)

    def why_without_workers(self, agent: Agent) -> str:
        """Explain, for messages, why the agent must not have workers any more."""
        if not self.drains(agent):
            return self._resized(agent) or "the task has nodes enough"
        if agent.departing:
            return "the agent was asked to end"
        if agent.place is None or not is_elsewhere(self._cluster, agent):
            return f"node {agent.node} {'is cordoned' if agent.node in self.lasting.cordoned else 'drains'}"
        other = self.lasting.assigned.get(agent.place)
        return self._resized(agent) or f"the plan gives {agent.place} to {f'task {other}' if other else 'nobody'}"

    def _resized(self, agent: Agent) -> str | None:
        """Name an operator's order by which the agent's task has more slots than it may; None without one."""
        task = self.tasks[agent.task]
        if task.target is None or len(task.slots) <= task.target:
            return None
        return f"task {task.id} was resized to {counted(task.target, 'node')} by order"

    def save_lasting(self) -> None:
        """Have `state.Lasting` written before any message of this turn is sent."""
        if not self._lasting_saved:
            self._lasting_saved = True
            self.actions.append(ev.SaveLasting())

    def send(self, agent: Agent, message: wire.ToAgent) -> None:
        """Send to an agent; do nothing if it is away (it gets the newest state when it registers again)."""
        if agent.conn is not None:
            self.actions.append(ev.Send(conn=agent.conn, message=message))

    def close(self, conn: int, reason: str) -> None:
        """Close a connection."""
        self.actions.append(ev.Close(conn=conn, reason=reason))

    def hang_up(self, agent: Agent, reason: str) -> None:
        """Close an agent's connection, if it has one; nothing more is received on it."""
        if agent.conn is not None:
            del self._cluster.conns[agent.conn]
            self.close(agent.conn, reason)

    def refuse(self, conn: int, reason: str) -> None:
        """Notify an agent that it can't take part, and close its connection."""
        self.actions.append(ev.Send(conn=conn, message=wire.Refused(reason=reason)))
        self.close(conn, "refused")

    def timer(self, kind: str, seconds: float, *, task: str = "", agent: str = "") -> None:
        """Start or restart a timer."""
        self.actions.append(ev.SetTimer(key=ev.TimerKey(kind, task, agent), seconds=seconds))

    def cancel(self, kind: str, *, task: str = "", agent: str = "") -> None:
        """Stop a timer if it runs."""
        self.actions.append(ev.CancelTimer(key=ev.TimerKey(kind, task, agent)))

    def save(self, task: Task) -> None:
        """Have the task's state written before any message of this turn is sent."""
        if task.id not in self._saved:
            self._saved.add(task.id)
            self.actions.append(ev.Save(task=task.id))

    def log(self, task: Task, fact: Fact) -> None:
        """Log a fact under the task's open incident, and save the task."""
        self.log_for(task, task.incident, fact)

    def log_for(self, task: Task, incident: str | None, fact: Fact) -> None:
        """Log a fact under a given incident."""
        self.emit_for(task, incident, fact.event, fact.entry, fact)

    def emit(self, task: Task, name: str, **fields: Any) -> None:
        """Log an event of the task under its open incident, and save the task."""
        self.emit_for(task, task.incident, name, fields)

    def emit_apart(self, task: Task, name: str, **fields: Any) -> None:
        """Log an event of the task that belongs to no incident, and save the task."""
        self.emit_for(task, None, name, fields)

    def emit_of_cluster(self, name: str, *, of: str | None = None, **fields: Any) -> None:
        """Log an event of the cluster, or of the task with the id ``of``, that changes no task's state."""
        self.actions.append(ev.Emit(name=name, task=of, incident=None, fields=fields))

    def emit_for(
        self, task: Task, incident: str | None, name: str, fields: dict[str, Any], fact: Fact | None = None
    ) -> None:
        """Log an event of the task under a given incident; with a fact if accounts depend on it."""
        event = ev.Emit(name=name, task=task.id, incident=incident, fields=fields, fact=fact)
        self.news.append((task, event))
        self.actions.append(event)
        self.save(task)


M = TypeVar("M", bound=wire.FromAgent)


_Receiver = tuple[type[msgspec.Struct], Callable[[Task, Turn, Agent, Any], None]]
"""A type of agents' messages and the rule for it; made by `on`, which checks that they fit."""


def on(kind: type[M], rule: Callable[[Task, Turn, Agent, M], None]) -> _Receiver:
    """Declare that a rule handles messages of this type."""
    return kind, rule


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rules about one aspect of a task; a part has those that it needs."""

    restore: Callable[[Task, Turn], None] | None = None
    """Continues with the state of an earlier coordinator process, or of the store: no timer runs, no agent is
    connected."""
    receivers: tuple[_Receiver, ...] = ()
    """Rules for messages. A message is handled by all parts that have a rule for its type."""
    timers: Mapping[str, Callable[[Task, Turn], None]] = field(default_factory=dict)
    """Rule for each kind of the part's timers, `ev.TimerKey.kind`."""
    agent_timers: Mapping[str, Callable[[Task, Turn, Agent], bool | None]] = field(default_factory=dict)
    """Rule for each kind of timer that concerns one agent. A rule that returns False has changed nothing: the task
    needs no review."""
    review: Callable[[Task, Turn], bool | None] | None = None
    """Takes the steps that are due, after each input. Idempotent. If it returns True, all parts review again."""
    record: Callable[[Task, Turn, ev.Emit], None] | None = None
    """Processes an event of the task's log, at the end of the turn. It decides nothing."""
