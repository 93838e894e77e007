"""Random histories of several tasks at the same places, under hypothesis.

After every input: no place has workers of two tasks; the driver's checks hold (replay from JSON, epochs, slots). When
faults have ended: every started recovery ends, and no task is below its minimum unless the places do not suffice.
"""

from __future__ import annotations

import itertools

import pytest
from coordinator.driver import FakeAgent, World
from coordinator.test_random import HISTORY
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation.places import usable_places
from unicron_lightning.coordinator.state import Task

pytestmark = pytest.mark.timeout(300)
TASKS = ("a", "b", "c")
FAULTS = ("agent_dies", "cut", "worker_fails", "worker_fails", "finishes")


class SharedPlaces(RuleBasedStateMachine):
    """A node has one agent of each task; all of a node fail together, or one agent alone."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.agents: list[FakeAgent] = []
        self.ids = itertools.count()
        self.limits: dict[str, tuple[int, int]] = {}

    @initialize(places=st.integers(2, 5), limits=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=2))
    def begin(self, places: int, limits: list[tuple[int, int]]) -> None:
        self.limits = {task: (low, low + spare) for task, (low, spare) in zip(TASKS, limits, strict=False)}
        for number in range(places):
            self.start_node(number)

    # ---- regular events

    def start_node(self, number: int) -> None:
        for task, nodes in self.limits.items():
            if not any(agent.node == f"n{number}" and agent.task == task for agent in self.agents):
                name = f"{task}{number}.{next(self.ids)}"
                agent = self.world.agent(name, task=task, nodes=nodes, place=f"n{number}/0")
                self.agents.append(agent.start())

    @rule(number=st.integers(0, 4))
    def node_comes(self, number: int) -> None:
        self.start_node(number)

    @precondition(lambda self: self.agents)
    @rule(pick=st.integers(0, 14))
    def one_goes_on(self, pick: int) -> None:
        agent = self.agents[pick % len(self.agents)]
        go_on(agent)
        agent.worker_goes_on()

    @rule()
    def everybody_goes_on(self) -> None:
        for agent in self.agents:
            go_on(agent)
            agent.worker_goes_on()

    @rule(seconds=st.sampled_from([0.1, 0.3, 0.6, 3.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def planner_is_slow(self) -> None:
        self.world.answers_at_once = False

    @rule()
    def planner_answers(self) -> None:
        self.world.answers_at_once = True
        self.world.answer()

    @precondition(lambda self: any(agent.conn is None for agent in self.agents))
    @rule()
    def come_back(self) -> None:
        next(agent for agent in self.agents if agent.conn is None).register()

    # ---- faults

    @rule(number=st.integers(0, 4))
    def node_dies(self, number: int) -> None:
        for agent in [agent for agent in self.agents if agent.node == f"n{number}"]:
            if agent.conn is not None:
                agent.drop()
            self.agents.remove(agent)

    @precondition(lambda self: self.agents)
    @rule(
        fault=st.sampled_from(["agent_dies", "cut", "worker_fails", "worker_fails", "finishes"]),
        pick=st.integers(0, 14),
    )
    def one_fails(self, fault: str, pick: int) -> None:
        agent = self.agents[pick % len(self.agents)]
        if fault in ("agent_dies", "cut") and agent.conn is not None:
            agent.drop()
            if fault == "agent_dies":
                self.agents.remove(agent)
        elif fault in ("worker_fails", "finishes") and agent.worker() in agent.workers:
            agent.die(cause="exit", code=int(fault == "worker_fails"))

    @rule()
    def coordinator_restarts(self) -> None:
        self.world.start()

    @rule(number=st.integers(0, 4), drained=st.booleans())
    def drain(self, number: int, drained: bool) -> None:
        self.world.do(ev.Drain(node=f"n{number}", drained=drained))

    @rule(task=st.sampled_from(TASKS), nodes=st.integers(0, 6))
    def resize(self, task: str, nodes: int) -> None:
        state = self.world.machine.tasks.get(task)
        if state is not None and state.over is None:
            fits = state.min_nodes <= nodes <= state.max_nodes
            self.world.do(ev.Resize(task=task, nodes=nodes if fits else None))

    # ---- invariants

    @invariant()
    def no_place_is_granted_twice(self) -> None:
        holders: dict[str, str] = {}
        for task in self.world.machine.tasks.values():
            for agent in task.agents.values():
                had_workers = agent.stopping and agent.gone
                if agent.place is not None and (agent.id in task.slots or had_workers):
                    assert holders.setdefault(agent.place, agent.id) == agent.id, "two agents of one place"
        running: dict[str, str] = {}
        for fake in self.agents:
            if fake.workers and not fake.stopped and fake.conn is not None and fake.name in _known(self.world, fake):
                assert running.setdefault(fake.node, fake.task) == fake.task, "workers of two tasks at one place"

    def teardown(self) -> None:
        self.planner_answers()
        for _ in range(14):
            for agent in self.agents:
                if agent.conn is None:
                    agent.register()
            for _ in range(5):
                self.everybody_goes_on()
            self.world.advance(3)
            self.no_place_is_granted_twice()
        self.world.check_replay()
        tasks = [task for task in self.world.machine.tasks.values() if task.over is None and not task.finishing]
        for task in tasks:
            self.check_ended(task)
        usable = [place for place in usable_places(self.world.machine.cluster) if place.tasks]
        if all(set(place.tasks) >= {task.id for task in tasks} for place in usable):
            fits = sum(task.min_nodes for task in tasks) <= len(usable)
            for task in tasks:
                assert not fits or len(task.slots) >= task.min_nodes, f"{task.id} is below its minimum without need"

    def check_ended(self, task: Task) -> None:
        """Check that no recovery hangs: the newest epoch is settled, or does not exist because the task has no
        place.
        """
        if task.epoch is not None:
            assert task.settled, f"epoch {task.number} of {task.id} hangs"
        else:
            assert not task.slots or len(task.slots) < task.min_nodes, f"{task.id} does not start"


def go_on(agent: FakeAgent) -> None:
    """Take torchrun's next step that is due."""
    if agent.granted and agent.local_world is None and agent.conn is not None and not agent.stopped:
        agent.launch()
    elif agent.granted and (len(agent.workers) < agent.size or agent.stopped):
        agent.rendezvous()


def _known(world: World, fake: FakeAgent) -> dict[str, object]:
    """The agents of a task; none of one that is over: its workers end by themselves, before others pass the lock."""
    task = world.machine.tasks.get(fake.task)
    return {} if task is None or task.over is not None else dict(task.agents)


SharedPlaces.TestCase.settings = settings(HISTORY, max_examples=300, phases=[Phase.generate, Phase.shrink])
TestSharedPlaces = SharedPlaces.TestCase


def test_a_task_that_the_plan_stops_at_once_is_reviewed_in_the_same_turn() -> None:
    state = SharedPlaces()
    state.begin(places=2, limits=[(1, 0), (1, 0)])
    state.coordinator_restarts()
    for _ in range(4):
        state.come_back()
    state.everybody_goes_on()
    state.everybody_goes_on()
    state.drain(drained=True, number=1)  # of the same minimum, one has a place; the other's workers have no state yet
    assert "task_paused" in state.world.names("b")
    assert ("recovery", "b") not in {(key.kind, key.task) for key in state.world.timers}
    state.teardown()
