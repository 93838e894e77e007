"""Random histories with the pair check: temporarily bad links exclude or delay no agent for ever.

The checks of the driver and `test_random` apply here too, so at the end every agent with a free slot is admitted.
In addition, no agent gets a slot without having passed.
"""

from __future__ import annotations

from typing import Any

from coordinator.driver import FakeAgent, World
from coordinator.test_random import Histories
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.detection.pairs import PairLimits

LIMITS = PairLimits(check=True, seconds=0.1, retry=1.0)


class Gated(World):
    """Records agents that are granted a slot without having passed."""

    def do(self, event: ev.Input) -> None:
        seen = len(self.events)
        super().do(event)
        for emitted in self.events[seen:]:
            if emitted.name == "slot_granted" and (task := self.machine.tasks.get("t")) is not None:
                agent = task.agents.get(emitted.fields["agent"])
                assert agent is None or agent.paired.passed


class Checked(Histories):
    def __init__(self) -> None:
        super().__init__()
        self.bad: set[str] = set()
        """Names of agents that no partner can reach."""
        self.answered: dict[str, int] = {}

    def make_world(self, **limits: Any) -> World:
        return Gated(pairs=LIMITS, **limits)

    @rule(pick=st.integers(0, 7))
    def a_link_breaks_or_is_mended(self, pick: int) -> None:
        self.bad ^= {f"n{pick}"}

    @precondition(lambda self: self.agents)
    @rule(pick=st.integers(0, 7))
    def one_does_not_answer(self, pick: int) -> None:
        agent = self.pick(pick)
        self.answered[agent.name] = len(agent.inbox)

    def go_on(self, agent: FakeAgent) -> None:
        super().go_on(agent)
        since = self.answered.get(agent.name, 0)
        self.answered[agent.name] = len(agent.inbox)
        for order in agent.inbox[since:]:
            match order:
                case wire.PairServe():
                    agent.say(wire.PairServing(check=order.check, host=agent.name, port=1, key="k"))
                case wire.PairConnect():
                    broken = self.bad & {agent.name, order.agent}
                    agent.say(
                        wire.PairResult(check=order.check, cause="no answer" if broken else "", sent=1e9, received=1e9)
                    )
                case wire.PairEnd():
                    agent.say(wire.PairResult(check=order.check, cause="the other one has given up"))

    def teardown(self) -> None:
        self.bad = set()
        super().teardown()


Checked.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestChecked = Checked.TestCase
