"""Random histories: whatever happens in whatever order, the invariants hold, and when it stops the task heals.

The invariants are checked by the driver after every input: replay from JSON, one membership per epoch number, `Go` for
exactly the members, no dead or fenced member, joins only after a settled epoch, capacity, slots.
"""

from __future__ import annotations

import itertools

from coordinator.driver import FakeAgent, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from unicron_lightning import wire

PICK = st.integers(0, 7)


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.agents: list[FakeAgent] = []
        self.ids = itertools.count()

    @initialize(low=st.integers(1, 3), spare=st.integers(0, 2), capacity=st.integers(2, 8), size=st.integers(1, 2))
    def begin(self, low, spare, capacity, size):
        self.world.nodes = (low, low + spare)
        self.capacity = capacity
        self.size = size
        for _ in range(low):
            self.start_agent()

    # ---- agents

    @precondition(lambda self: len(self.agents) < 6)
    @rule()
    def start_agent(self):
        self.agents.append(self.world.agent(f"n{next(self.ids)}", size=self.size).start())

    @precondition(lambda self: self.agents)
    @rule(pick=PICK)
    def kill_agent(self, pick):
        agent = self.agents.pop(pick % len(self.agents))
        if agent.conn is not None:
            agent.drop()

    @precondition(lambda self: self.agents)
    @rule(pick=PICK, succeeded=st.booleans())
    def leave(self, pick, succeeded):
        agent = self.pick(pick)
        # Success means that torchrun saw all its workers end well.
        if agent.conn is not None and not (succeeded and (agent.workers or not agent.granted)):
            self.agents.remove(agent)
            agent.bye(succeeded=succeeded)

    @precondition(lambda self: self.agents)
    @rule(pick=PICK)
    def cut(self, pick):
        agent = self.pick(pick)
        if agent.conn is not None:
            agent.drop()

    @precondition(lambda self: self.agents)
    @rule(pick=PICK)
    def come_back(self, pick):
        agent = self.pick(pick)
        if agent.conn is None:
            agent.register()

    @precondition(lambda self: self.agents)
    @rule(pick=PICK)
    def go_on(self, pick):
        """torchrun does the next thing that is due on this node."""
        agent = self.pick(pick)
        if agent.granted and agent.local_world is None and agent.conn is not None:
            agent.launch()
        elif agent.granted and (len(agent.workers) < agent.size or agent.stopped) and agent.local_world is not None:
            agent.rendezvous()

    # ---- workers

    @precondition(lambda self: self.agents)
    @rule(pick=PICK, local_rank=st.integers(0, 1))
    def worker_goes_on(self, pick, local_rank):
        agent = self.pick(pick)
        info = agent.workers.get(agent.worker(local_rank))
        if info is None or agent.conn is None:
            return
        if info.hello is None:
            agent.hello(local_rank, capacity=self.capacity)
        elif info.ready is None:
            agent.ready(0, local_rank)
        else:
            self.answer(agent, local_rank)

    @precondition(lambda self: self.agents)
    @rule(pick=PICK, local_rank=st.integers(0, 1), code=st.sampled_from([0, 1]))
    def worker_ends(self, pick, local_rank, code):
        agent = self.pick(pick)
        if agent.worker(local_rank) in agent.workers:
            agent.die(local_rank, cause="exit", code=code)

    @precondition(lambda self: self.agents)
    @rule(pick=PICK, epoch=st.integers(1, 5))
    def comm_error(self, pick, epoch):
        agent = self.pick(pick)
        if agent.conn is not None and agent.worker() in agent.workers:
            agent.say(wire.CommError(worker=agent.worker(), epoch=epoch, error="reset"))

    @rule()
    def everybody_answers(self):
        for agent in self.agents:
            for local_rank in range(agent.size):
                self.answer(agent, local_rank)

    # ---- time and coordinator

    @rule(seconds=st.sampled_from([0.1, 0.3, 0.6, 3.0, 11.0]))
    def time_passes(self, seconds):
        self.world.advance(seconds)

    @rule(lose_store=st.just(False))
    def restart_coordinator(self, lose_store):
        self.world.start()

    # ---- helpers

    def pick(self, number: int) -> FakeAgent:
        return self.agents[number % len(self.agents)]

    def answer(self, agent: FakeAgent, local_rank: int) -> None:
        """A worker answers the newest epoch that it is a member of."""
        info = agent.workers.get(agent.worker(local_rank))
        epochs = agent.all(wire.Epoch)
        if info is None or info.ready is None or not epochs:
            return
        member = agent.worker(local_rank) in {member.worker for member in epochs[-1].members}
        if member and info.ready.epoch < epochs[-1].number:
            agent.ready(epochs[-1].number, local_rank)

    def teardown(self) -> None:
        """From here on nothing fails any more: the task must heal."""
        for _ in range(8):
            for agent in list(self.agents):
                if agent.conn is None:
                    agent.register()
                for _ in range(2):
                    self.go_on(self.agents.index(agent))
                for local_rank in range(agent.size):
                    for _ in range(2):
                        self.worker_goes_on(self.agents.index(agent), local_rank)
            for _ in range(4):
                self.everybody_answers()
            self.world.advance(3)
        self.check_healed()

    def check_healed(self) -> None:
        task = self.world.machine.tasks.get("t")
        if task is None or task.over is not None:
            return
        assert set(task.agents) == {agent.name for agent in self.agents}
        if task.finishing or len(self.agents) < task.min_nodes:
            return
        assert len(task.slots) == min(len(self.agents), task.max_nodes)
        assert task.settled
        assert not task.epoch.hold
        assert len(task.members()) == min(len(task.slots) * self.size, self.capacity)
        for member in task.members():
            agent = next(agent for agent in self.agents if agent.name == member.agent)
            assert member.worker in agent.workers
            assert agent.last(wire.Go) == task.go


Histories.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestHistories = Histories.TestCase
