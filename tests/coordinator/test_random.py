"""Random histories: the invariants hold for any order of events, and when faults stop the task recovers.

The invariants are checked by the driver after every input: replay from JSON, one membership per epoch number, `Go` for
exactly the members, no dead or fenced member, joins only after a settled epoch, capacity, slots.
"""

from __future__ import annotations

import itertools
from collections import Counter

from coordinator.driver import FakeAgent, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev

FAULTS = (
    "kill_agent",
    "end_agent",
    "leave",
    "cut",
    "worker_fails",
    "worker_fails",
    "worker_finishes",
    "comm_error",
    "restart_coordinator",
    "depart",
    "drain",
    "drain",
    "undrain",
    "resize",
    "relayout",
)


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.agents: list[FakeAgent] = []
        self.departing: set[str] = set()
        self.ids = itertools.count()

    @initialize(
        low=st.integers(1, 3),
        spare=st.integers(0, 2),
        capacity=st.integers(2, 8),
        size=st.integers(1, 2),
        warm=st.booleans(),
        extra=st.data(),
    )
    def begin(self, low, spare, capacity, size, warm, extra):
        self.world = self.make_world(warm_standby=warm)
        self.world.nodes = (low, low + spare)
        self.capacity = capacity
        self.size = size
        for _ in range(low):
            self.start_agent()
        if extra.draw(st.booleans(), "running"):
            for _ in range(5):
                self.everybody_goes_on()

    def make_world(self, **limits):
        return World(**limits)

    # ---- regular events

    @precondition(lambda self: len(self.agents) < 6)
    @rule()
    def start_agent(self):
        self.agents.append(self.world.agent(f"n{next(self.ids)}", size=self.size).start())

    @precondition(lambda self: self.agents)
    @rule(pick=st.integers(0, 7))
    def one_goes_on(self, pick):
        self.go_on(self.pick(pick))

    @precondition(lambda self: self.agents)
    @rule(pick=st.integers(0, 7), local_rank=st.integers(0, 1))
    def one_worker_goes_on(self, pick, local_rank):
        self.worker_goes_on(self.pick(pick), local_rank)

    @rule()
    def everybody_goes_on(self):
        for agent in list(self.agents):
            self.go_on(agent)
            for local_rank in range(agent.size):
                self.worker_goes_on(agent, local_rank)

    @precondition(lambda self: any(agent.conn is None for agent in self.agents))
    @rule()
    def come_back(self):
        next(agent for agent in self.agents if agent.conn is None).register()

    @rule(seconds=st.sampled_from([0.1, 0.3, 0.6, 3.0, 11.0]))
    def time_passes(self, seconds):
        self.world.advance(seconds)

    # ---- faults

    @precondition(lambda self: self.agents)
    @rule(fault=st.sampled_from(FAULTS), pick=st.integers(0, 7), local_rank=st.integers(0, 1))
    def fault(self, fault, pick, local_rank):
        agent = self.pick(pick)
        worker = agent.worker(local_rank)
        match fault:
            case "restart_coordinator":
                if pick == 7:
                    self.world.lose_disk()
                self.world.start()
            case "kill_agent" | "end_agent" | "cut":
                if agent.conn is not None:
                    agent.drop()
                if fault in ("kill_agent", "end_agent"):
                    self.agents.remove(agent)
                if fault == "end_agent":
                    self.world.do(ev.AgentsEnded(agents=(agent.name,)))
            case "depart" if agent.conn is not None:
                self.departing.add(agent.name)
                agent.say(wire.Departing())
            case "drain" | "undrain":
                agent.drain(fault == "drain")
            case "resize" if (task := self.world.machine.tasks.get("t")) is not None and task.over is None:
                nodes = task.min_nodes + pick
                self.world.do(ev.Resize(task="t", nodes=nodes if nodes <= task.max_nodes else None))
            case "relayout" if (task := self.world.machine.tasks.get("t")) is not None and task.layouts.ordered is None:
                if task.epoch is not None and task.over is None and not task.finishing:
                    self.world.do(ev.Relayout(task="t", layout=wire.Layout(tensor=1, pipeline=1)))
            case "leave" if agent.conn is not None and len(agent.workers) < agent.size:
                # A success requires that torchrun saw all its workers succeed.
                self.agents.remove(agent)
                agent.bye(succeeded=agent.granted and not agent.workers and worker in self.world.task().finished)
            case "worker_fails" | "worker_finishes" if worker in agent.workers:
                agent.die(local_rank, cause="exit", code=int(fault == "worker_fails"))
            case "comm_error" if agent.conn is not None and worker in agent.workers:
                agent.say(wire.CommError(worker=worker, epoch=agent.epoch, error="reset"))

    # ---- helpers

    def pick(self, number: int) -> FakeAgent:
        return self.agents[number % len(self.agents)]

    def go_on(self, agent: FakeAgent) -> None:
        """Take torchrun's next step that is due on this node."""
        started = agent.granted or agent.warm
        running = started and not agent.stopped and (agent.local_world is None or len(agent.workers) == agent.size)
        if agent.name in self.departing and agent.conn is not None and not running:
            self.agents.remove(agent)
            agent.bye(succeeded=False)
        elif started and agent.local_world is None and agent.conn is not None:
            agent.launch()
        elif started and (len(agent.workers) < agent.size or agent.stopped) and agent.local_world is not None:
            agent.rendezvous()

    def worker_goes_on(self, agent: FakeAgent, local_rank: int) -> None:
        """Have the worker send its next message, e.g. the answer to the newest epoch if it is a member."""
        agent.worker_goes_on(local_rank, capacity=self.capacity)

    def teardown(self) -> None:
        """Stop all faults: from here on the task must recover."""
        self.heal()
        self.check_drained()
        for node in list(self.world.machine.drained):
            self.world.do(ev.Drain(node=node, drained=False))
        if (task := self.world.machine.tasks.get("t")) is not None and task.over is None:
            self.world.do(ev.Resize(task="t", nodes=None))
        self.heal()
        self.check_healed()

    def heal(self) -> None:
        for _ in range(8):
            for agent in self.agents:
                if agent.conn is None:
                    agent.register()
            for _ in range(5):
                self.everybody_goes_on()
            self.world.advance(3)

    def check_drained(self) -> None:
        """No worker stays on a drained node if enough others exist."""
        task, drained = self.world.machine.tasks.get("t"), self.world.machine.drained
        if task is None or task.over is not None or task.finishing or task.epoch is None:
            return
        others = [agent for agent in task.agents.values() if agent.node not in drained]
        if len(others) >= task.min_nodes:
            assert task.settled, task
            assert not [member for member in task.members() if member.node in drained]
            assert {task.agents[agent_id].node for agent_id in task.slots}.isdisjoint(drained)

    def check_healed(self) -> None:
        task = self.world.machine.tasks.get("t")
        if task is None or task.over is not None:
            return
        assert set(task.agents) == {agent.name for agent in self.agents}
        if task.finishing or len(self.agents) < task.min_nodes:
            return
        assert len(task.slots) == min(len(self.agents), task.max_nodes)
        warm = [agent for agent in task.agents.values() if agent.all_warm]
        assert len(warm) == (len(self.agents) - len(task.slots) if self.world.limits.warm_standby else 0)
        assert task.settled
        assert task.layouts.ordered is None
        assert not task.epoch.hold
        # A drained agent that stays after all, beside the one that was admitted in its place, may leave members without
        # work: agents leave as a whole, and none can leave without leaving work undone.
        least = min(len(task.slots) * self.size, self.capacity)
        of_agents = Counter(member.agent for member in task.members())
        assert least <= len(task.members()) < least + min(of_agents.values())
        for member in task.members():
            agent = next(agent for agent in self.agents if agent.name == member.agent)
            assert member.worker in agent.workers
            assert agent.last(wire.Go) == task.go


HISTORY = settings(
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
"""Settings of all random histories."""

Histories.TestCase.settings = settings(HISTORY, max_examples=200)
TestHistories = Histories.TestCase
