"""A cluster without sockets: fake agents, a fake clock and a fake store around the real `Machine`.

After every input the driver also checks that the machine is replayable from its JSON and that its messages obey the
protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coordinator.fake_agent import FakeAgent

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator import state
from unicron_lightning.coordinator.events import Question
from unicron_lightning.coordinator.machine import Machine
from unicron_lightning.coordinator.severity.record import SeverityLimits
from unicron_lightning.wire.epoch_changes import EpochMissed, changed


@dataclass
class Oracle:
    """Record of the messages sent for one task; asserts that no later message contradicts them."""

    epochs: dict[int, wire.Epoch] = field(default_factory=dict)
    goes: dict[int, wire.Go] = field(default_factory=dict)
    blank: bool = False
    """Whether epochs before the first checked one are unknown."""
    settled: set[int] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    capacity: dict[str, int] = field(default_factory=dict)

    def check_epoch(self, epoch: wire.Epoch, *, exceeds: bool = False) -> None:
        """Check an epoch.

        Args:
            epoch: the newest.
            exceeds: whether it may have more members than work: joiners come before those that leave have gone.
        """
        if epoch.number in self.epochs:
            assert epoch == self.epochs[epoch.number], "one number, two epochs"
            return
        assert epoch.number == max(self.epochs, default=0) + 1 or (self.blank and not self.epochs)
        names = [member.worker for member in epoch.members]
        assert names
        assert len(set(names)) == len(names)
        assert not set(names) & self.dead, "a dead or fenced worker is a member"
        assert len(names) <= min(self.capacity[name] for name in names) or exceeds
        previous = self.epochs.get(epoch.number - 1)
        if epoch.kind in wire.PLANNED:
            assert previous is not None
            before = {m.worker for m in previous.members}
            finished_only = previous.kind == epoch.kind and set(names) < before
            assert previous.number in self.settled or finished_only, "a change before the previous epoch was settled"
            assert epoch.kind == "join" or set(names) < before or (epoch.kind in wire.PARTING and set(names) == before)
        self.epochs[epoch.number] = epoch

    def check_go(self, go: wire.Go) -> None:
        newest = self.epochs[max(self.epochs)]
        if go.epoch != newest.number:  # sent again: its members train in it until the newest one is settled
            assert newest.kind in wire.PLANNED and newest.number not in self.settled, "go for an old epoch"
            assert go == self.goes[go.epoch]
            return
        assert sum(standing.count for standing in go.standings) == len(self.epochs[go.epoch].members)
        assert self.goes.setdefault(go.epoch, go) == go, "settled twice, differently"


def limits_of(given: dict[str, Any]) -> ev.Limits:
    """Make the machine's limits from their names, with those of the severity workflow among them."""
    severity = {name: given.pop(name) for name in [*given] if name in SeverityLimits.__dataclass_fields__}
    return ev.Limits(severity=SeverityLimits(**severity), **given)


class World:
    """The machine, its clock, timers, store and agents.

    Args:
        nodes: fewest and most nodes of its tasks.
        limits: of the machine, by name.
    """

    def __init__(self, *, nodes: tuple[int, int] = (1, 4), **limits: Any) -> None:
        self.limits = limits_of(limits)
        self.now = 1000.0
        self.disk: dict[str, bytes] = {}
        self.lasting: bytes | None = None
        """`state.Lasting` as stored; None if it never was."""
        self.events: list[ev.Emit] = []
        self.oracles: dict[str, Oracle] = {}
        self.agents: dict[int, FakeAgent] = {}
        self.daemons: dict[int, Any] = {}
        """Nodes' daemons by connection, see `coordinator.fake_daemon`."""
        self.conns = 0
        self.nodes = nodes
        self.answers_at_once = True
        self.unreached: set[tuple[str, str]] = set()
        """Agents and others to which they cannot connect."""
        self.silent: set[str] = set()
        """Agents that do not answer probes."""
        self.probes: list[tuple[FakeAgent, wire.Probe]] = []
        """Not answered yet."""
        self.changes = 0
        """Number of epochs sent as differences."""
        self.missed: list[FakeAgent] = []
        """Agents that could not apply one and have not requested the whole yet."""
        self.start()

    def start(self) -> None:
        """(Re)start the coordinator from its stored state; all connections are closed."""
        tasks = {task_id: state.decode_task(blob) for task_id, blob in self.disk.items()}
        self.machine = Machine(self.limits, state.Cluster(tasks=tasks, lasting=self._stored()))
        self._origin = self.machine.snapshot()
        self._history: list[tuple[ev.Input, float]] = []
        self.timers: dict[ev.TimerKey, float] = {}
        self.stopped = False
        self.questions: list[Question] = []
        """Questions that are not answered yet."""
        for peer in (*self.agents.values(), *self.daemons.values()):
            peer.conn = None
        self.agents, self.daemons = {}, {}
        self.do(ev.Started())

    def lose_disk(self) -> None:
        """Lose all stored state; epoch numbers may be reused if no agent that knows them returns."""
        self.disk.clear()
        self.lasting = None if self.lasting is None else state.encode(state.Lasting())
        for task, old in self.oracles.items():
            self.oracles[task] = Oracle(dead=old.dead, capacity=old.capacity, blank=True)

    def check_replay(self) -> None:
        """Check that all inputs since the coordinator's start lead another machine to the same state."""
        other = Machine(self.limits, state.decode_cluster(self._origin))
        for event, at in self._history:
            other.handle(event, at)
        assert other.snapshot() == self.machine.snapshot()

    def _stored(self) -> state.Lasting:
        return state.Lasting() if self.lasting is None else state.decode_lasting(self.lasting)

    def agent(
        self,
        name: str,
        *,
        task: str = "t",
        nodes: tuple[int, int] | None = None,
        size: int = 1,
        place: str | None = None,
    ) -> FakeAgent:
        agent = FakeAgent(self, name, task, nodes or self.nodes, size)
        if place is not None:
            agent.node, _, agent.slot = place.partition("/")
        return agent

    def answer(self) -> None:
        """Answer the newest question."""
        while self.questions:
            question = self.questions.pop()
            self.do(ev.Planned(key=question.key, allocation=share(question)))

    def answer_probes(self) -> None:
        """Have all agents that were asked report whom they do not reach."""
        while self.probes:
            agent, order = self.probes.pop(0)
            if agent.conn is not None and agent.name not in self.silent:
                missed = {p.agent: "timed out" for p in order.peers if (agent.name, p.agent) in self.unreached}
                agent.say(wire.Probed(number=order.number, missed=missed))

    def names(self, task: str | None = "t") -> list[str]:
        return [event.name for event in self.events if event.task == task]

    def event(self, name: str) -> ev.Emit:
        """Return the newest event of that name."""
        return next(event for event in reversed(self.events) if event.name == name)

    def task(self, name: str = "t") -> state.Task:
        return self.machine.tasks[name]

    def advance(self, seconds: float) -> None:
        """Let time pass; timers fire in order."""
        end = self.now + seconds
        while due := sorted((at, key) for key, at in self.timers.items() if at <= end):
            self.now, key = due[0]
            lost = tuple(other for at, other in due if at == self.now and key.kind == other.kind == "lost")
            for each in lost or (key,):
                del self.timers[each]
            self.do(ev.AbsencesDue(keys=lost) if lost else ev.TimerFired(key=key))
        self.now = end

    def do(self, event: ev.Input) -> None:
        """Process one input, carry out its actions, and check everything."""
        self._observe(event)
        self._history.append((event, self.now))
        before = self.machine.snapshot()
        twin = Machine(self.limits, state.decode_cluster(before))
        actions = self.machine.handle(event, self.now)
        assert twin.handle(event, self.now) == actions
        self._check_lives(before, actions)
        assert twin.snapshot() == self.machine.snapshot()
        for gone in [action.task for action in actions if isinstance(action, ev.Forget)]:
            old = self.oracles.pop(gone, Oracle())
            self.oracles[gone] = Oracle(dead=old.dead, capacity=old.capacity, blank=True)
        for action in actions:
            self._carry_out(action)
        while self.missed:
            agent = self.missed.pop()
            agent.say(wire.EpochWanted(epoch=agent.epoch))
        if self.answers_at_once:
            self.answer()
        self.answer_probes()
        for task in self.machine.tasks.values():
            if task.epoch is not None:  # also an epoch that no agent was connected to receive
                oracle = self.oracles.setdefault(task.id, Oracle())
                oracle.check_epoch(task.epoch, exceeds=self._exceeds(task))
        for task in self.machine.tasks.values():
            staying = [agent_id for agent_id in task.slots if not task.agents[agent_id].departing]
            assert len(staying) <= task.max_nodes or self.lasting is not None
            assert set(task.slots) <= set(task.agents)
            assert {worker.agent for worker in task.workers.values()} <= set(task.agents)
            self._check_warm(task)
            self._check_lifecycle(task)

    def _exceeds(self, task: state.Task) -> bool:
        return self.lasting is not None or any(agent.departing for agent in task.agents.values())

    def _check_lifecycle(self, task: state.Task) -> None:
        """Parts of the lifecycle are consistent with each other and with the rest of the state."""
        now = task.lifecycle
        assert now.slots != "regrouping" or now.script in ("plain", "elastic"), now
        assert now.join == "none" or now.script == "elastic", now
        assert task.epoch is None or now.script == "elastic", now
        assert now.agents != "absent" or not task.agents, now
        assert now.slots != "none" or not task.slots, now

    def _check_warm(self, task: state.Task) -> None:
        """Warm agents have no slot and no counted worker; none is on a drained node, or in a plain task."""
        for agent in task.agents.values():
            assert agent.warm + agent.waiting + (agent.id in task.slots) <= 1, agent
            assert agent.warm or not agent.hellos, agent
            if agent.warm and task.over is None:
                assert not task.workers_of(agent.id)
                assert agent.node not in self.machine.drained
                assert task.elastic or task.rebuilding

    def _check_lives(self, before: bytes, actions: list[ev.Action]) -> None:
        """A new life begins only if no worker with the task's state survives."""
        established = {w for task in state.decode_cluster(before).tasks.values() for w in task.established}
        for action in actions:
            if isinstance(action, ev.Send) and isinstance(action.message, wire.Fence):
                new_life = action.message.reason == "the task starts a new life"
                assert not (new_life and action.message.worker in established), "one that has the state is given up"

    def _observe(self, event: ev.Input) -> None:
        if not isinstance(event, ev.AgentMessage) or event.conn not in self.agents:
            return
        oracle = self.oracles.setdefault(self.agents[event.conn].task, Oracle())
        if isinstance(event.message, wire.WorkerDied):
            oracle.dead.add(event.message.worker)
        if isinstance(event.message, wire.WorkerHello):
            oracle.capacity[event.message.worker] = event.message.capacity

    def _carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.Send(conn=conn, message=message) if conn in self.daemons:
                self.daemons[conn].receive(message)
            case ev.Close(conn=conn) if conn in self.daemons:
                self.daemons.pop(conn).conn = None
            case ev.Send(conn=conn, message=message):
                agent = self.agents.get(conn)
                assert agent is not None, f"sent over a connection that is gone: {message}"
                self._deliver(agent, message)
            case ev.Close(conn=conn):
                agent = self.agents.pop(conn, None)
                if agent is not None and agent.conn == conn:
                    agent.conn = None
            case ev.SetTimer(key=key, seconds=seconds):
                self.timers[key] = self.now + seconds
            case ev.CancelTimer(key=key):
                self.timers.pop(key, None)
            case ev.Emit():
                self.events.append(action)
                if action.name == "epoch_settled" and action.task is not None:
                    self.oracles[action.task].settled.add(action.fields["number"])
            case ev.Save(task=task_id):
                if task_id in self.machine.tasks:
                    self.disk[task_id] = state.encode(self.machine.tasks[task_id])
            case ev.SaveLasting():
                self.lasting = state.encode(self.machine.lasting)
            case ev.Forget(task=task_id):
                if task_id not in self.machine.tasks:
                    self.disk.pop(task_id, None)
            case ev.RequestPlan(question=question):
                self.questions = [question]
            case ev.StopServer():
                self.stopped = True

    def _deliver(self, agent: FakeAgent, message: wire.ToAgent) -> None:
        if isinstance(message, wire.EpochChange):
            assert wire.decode_to_agent(wire.encode(message)) == message
            self.changes += 1
            try:
                message = changed(agent.newest, message)
            except EpochMissed:
                self.missed.append(agent)
                return
        self._check(agent, message)
        agent.receive(message)

    def _check(self, agent: FakeAgent, message: wire.ToAgent) -> None:
        wire.decode_to_agent(wire.encode(message))
        oracle = self.oracles.setdefault(agent.task, Oracle())
        match message:
            case wire.Epoch():
                oracle.check_epoch(message, exceeds=self._exceeds(self.task(agent.task)))
            case wire.Go():
                oracle.check_go(message)
            case wire.Welcome():
                assert agent.granted, "a worker is welcomed that has no slot"
            case wire.Fence():
                oracle.dead.add(message.worker)


def share(question: Question) -> dict[str, int]:
    """Plan for tests: minimums first (of running tasks before others), the rest to the heaviest per place."""
    result = {task.name: 0 for task in question.tasks}
    left = question.num_places
    for task in sorted(question.tasks, key=lambda task: (not task.runs, -task.terms.weight, task.name)):
        if task.terms.min_workers <= min(left, task.max_places):
            result[task.name] = task.terms.min_workers
            left -= task.terms.min_workers
    while left:
        open_to = [task for task in question.tasks if 0 < result[task.name] < task.max_places]
        if not open_to:
            break
        best = max(open_to, key=lambda task: (task.terms.weight / result[task.name], task.name))
        result[best.name] += 1
        left -= 1
    return result


def settle(world: World, task: str = "t") -> wire.Go:
    """Let all members of the newest epoch report; return its go."""
    epoch = world.task(task).epoch
    assert epoch is not None
    by_name = {agent.name: agent for agent in world.agents.values()}
    for member in epoch.members:
        by_name[member.agent].ready(epoch.number, member.local_rank, step=epoch.number)
    go = world.task(task).go
    assert go is not None or world.task(task).number > epoch.number
    return world.oracles[task].goes[epoch.number]


def running(world: World, count: int, **options: Any) -> list[FakeAgent]:
    """Create a task of this many agents in its settled first epoch; min_nodes defaults to their number."""
    world.nodes = options.pop("nodes", (count, 4))
    agents = [world.agent(name, **options).start() for name in "abcdefgh"[:count]]
    for agent in agents:
        agent.boot()
    settle(world)
    return agents


def started(count: int, **options: Any) -> tuple[World, list[FakeAgent]]:
    """Make a world in which a task is `running`; ``options`` are those of the agents, and limits of the world."""
    own = {name: options.pop(name) for name in ("nodes", "task", "size", "place") if name in options}
    world = World(**options)
    return world, running(world, count, **own)


def restart(world: World, *agents: FakeAgent) -> None:
    """Restart the coordinator; these agents register again."""
    world.start()
    for agent in agents:
        agent.register()


def members(world: World, task: str = "t") -> list[str]:
    """Return the workers of the newest epoch, in rank order."""
    return [member.worker for member in world.task(task).members()]
