"""Random histories with workers that hang, and limits so low that everything escalates: each recovery still ends.

The checks of the driver and `test_random` apply here too. In addition, no node that a task needs for its minimum is
cordoned, and a task is stopped only without progress.
"""

from __future__ import annotations

from typing import Any

from coordinator.driver import FakeAgent, World
from coordinator.test_random import HISTORY, Histories
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev

LOW = {
    "recovery_time": 2.0,
    "reattempt_limit": 1,
    "soon_steps": 2,
    "cordon_failures": 2,
    "crash_attempts": 3,
    "crash_lives": 3,
}


class Watched(World):
    """Records the effects of escalations, and checks each as it happens."""

    def __init__(self, **limits: Any) -> None:
        self.finished_steps = False
        super().__init__(**limits)

    def do(self, event: ev.Input) -> None:
        before = set(self.machine.lasting.cordoned)
        seen = len(self.events)
        super().do(event)
        if set(self.machine.lasting.cordoned) - before:
            for task in self.machine.tasks.values():
                left = [agent for agent in task.agents.values() if agent.node not in self.machine.drained]
                assert task.over is not None or len(left) >= task.min_nodes, task
        for emitted in self.events[seen:]:
            if emitted.name == "task_stopped":
                assert not self.finished_steps, "given up though it had just finished a step"


class Severe(Histories):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.hung: set[str] = set()

    def make_world(self, **limits: Any) -> World:
        return Watched(**LOW, **limits)

    @precondition(lambda self: self.agents)
    @rule(pick=st.integers(0, 7))
    def a_worker_hangs(self, pick: int) -> None:
        """It is silent but alive."""
        self.hung.add(self.pick(pick).worker())

    @rule(steps=st.integers(1, 3))
    def steps_are_finished(self, steps: int) -> None:
        task = self.world.machine.tasks.get("t")
        if task is None or not task.settled or self.hung & {member.worker for member in task.members()}:
            return
        self.step += steps
        for agent in self.agents:
            for worker in list(agent.workers):
                if agent.conn is not None and worker in task.established:
                    agent.say(wire.Progress(worker=worker, step=self.step, metrics={}))
        self.world.finished_steps = True
        self.world.advance(0.01)
        self.world.finished_steps = False

    def worker_goes_on(self, agent: FakeAgent, local_rank: int) -> None:
        if agent.worker(local_rank) not in self.hung or not self.hangs_in_recovery(agent.worker(local_rank)):
            super().worker_goes_on(agent, local_rank)

    def hangs_in_recovery(self, worker: str) -> bool:
        """Not in its start, and not in training: a member that never reaches a step boundary is a hung task."""
        task = self.world.machine.tasks.get("t")
        if task is None or task.epoch is None or worker not in task.workers or not task.workers[worker].built:
            return False
        others = (task.workers[other] for other in task.established if other != worker and other in task.workers)
        planned = task.epoch.kind in wire.PLANNED and worker in task.established
        return not planned or any(other.ready == task.number for other in others)

    def check_drained(self) -> None:
        super().check_drained()
        task = self.world.machine.tasks.get("t")
        if task is not None and task.over is None and task.epoch is not None and not task.finishing:
            assert task.settled, "a recovery did not end"
        self.hung.clear()


Severe.TestCase.settings = settings(HISTORY, max_examples=150)
TestSevere = Severe.TestCase
