"""Calibration: chosen sizes are measured one after the other, and nothing stays behind, whatever happens meanwhile."""

from __future__ import annotations

import pytest
from coordinator.allocation.test_plans import crowd, exclusive, settle
from coordinator.driver import FakeAgent, World, restart
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation.plans import terms_of
from unicron_lightning.coordinator.orders.calibration import plain, refusal, shown, sizes_of
from unicron_lightning.coordinator.state import decode_task, encode

Agents = dict[str, dict[int, FakeAgent]]
LIMIT = 200.0
"""Seconds after which a size is skipped."""


def calibrate(world: World, *sizes: int, task: str = "a", steps: int = 5) -> None:
    assert not sizes or refusal(world.machine.cluster, world.task(task), sizes) is None
    world.do(ev.Calibrate(task=task, sizes=sizes, steps=steps, seconds=LIMIT))


def train(world: World, agents: Agents, task: str = "a", number: int = 6, seconds: float = 1.0) -> None:
    """Have a member report some steps, if the task trains."""
    state = world.machine.tasks.get(task)
    if state is None or not state.settled or not state.live_members():
        return
    first = state.live_members()[0]
    agent = next(each for each in agents[task].values() if each.name == first.agent)
    if agent.conn is None or first.worker not in agent.workers:
        return
    begin = state.workers[first.worker].step
    for step in range(begin + 1, begin + 1 + number):
        agent.say(wire.Progress(worker=first.worker, step=step, metrics={}, at=world.now))
        world.advance(seconds)


def is_free(world: World, task: str = "a") -> bool:
    """Whether nothing of a calibration is in force."""
    state = world.task(task)
    terms = terms_of(world.machine.cluster, state)
    return (
        not shown(state)
        and terms.min_workers == state.min_nodes
        and ev.TimerKey("calibration", task) not in world.timers
    )


def test_each_size_is_measured_and_then_the_plan_is_free_again() -> None:
    world, agents = crowd(4, a=(1, 4), b=(1, 4))
    assert dict(world.machine.lasting.allocation) == {"a": 2, "b": 2}
    calibrate(world, 3, 1)
    for nodes, seconds in ((3, 1.0), (1, 2.0)):
        settle(world, agents)
        exclusive(world)
        assert shown(world.task("a")).startswith(f"calibration at {nodes} node")
        assert dict(world.machine.lasting.allocation) == {"a": nodes, "b": 4 - nodes}
        assert terms_of(world.machine.cluster, world.task("a")).may_pause is False
        train(world, agents, seconds=seconds)
    assert is_free(world)
    settle(world, agents)
    assert dict(world.machine.lasting.allocation) == {"a": 2, "b": 2}
    found = plain(world.task("a"))
    assert found is not None and (found["size"], found["ended"], found["skipped"]) == (None, "", {})
    assert [(each["nodes"], each["step_seconds"]) for each in found["measured"]] == [(1, 2.0), (3, 1.0)]
    assert [world.event(f"calibration_{name}").fields for name in ("begins", "ends")] == [
        {"nodes": [3, 1], "steps": 5},
        {"reason": "", "skipped": []},
    ]


def test_an_earlier_measurement_of_a_size_is_replaced() -> None:
    world, agents = crowd(2, a=(1, 2))
    train(world, agents, number=30)
    assert world.task("a").measured.speeds[2].seconds == 1.0
    calibrate(world, 1)
    settle(world, agents)
    train(world, agents)
    calibrate(world, 2)
    settle(world, agents)
    train(world, agents, seconds=1.5)
    speeds = world.task("a").measured.speeds
    assert (speeds[2].seconds, speeds[2].intervals) == (1.5, 5)


def test_a_size_that_is_not_reached_is_skipped_with_its_reason() -> None:
    world, agents = crowd(3, a=(1, 3), b=(1, 3))
    calibrate(world, 2, 1)
    agents["b"][2].die()
    agents["a"][2].drop()
    agents["b"][2].drop()
    world.advance(1.0)
    task = world.task("a")
    assert task.calibration is not None
    assert (task.calibration.size, task.calibration.skipped) == (1, {2: "usable: 2 nodes, other tasks need 1"})
    world.advance(LIMIT + 1)
    assert is_free(world)
    assert task.calibration.skipped[1] == f"not measured within {LIMIT:g} s"


def test_orders_are_refused_in_words() -> None:
    world, agents = crowd(4, a=(1, 4), b=(2, 4))
    cluster, task = world.machine.cluster, world.task("a")
    assert sizes_of(cluster, task) == [1, 2], "two places are left to the other task"
    for sizes, words in (
        ((3,), "sizes=3: usable: 4 nodes, other tasks need 2"),
        ((5,), "sizes=5: expected 1 to 4 nodes"),
        ((1, 1), "sizes=1,1: expected different numbers of nodes"),
        ((), "sizes=: expected different numbers of nodes"),
    ):
        assert refusal(cluster, task, sizes) == words
    calibrate(world, 1, 2)
    assert refusal(world.machine.cluster, world.task("a"), (1,)) == (
        "task 'a' is calibrated already: calibration at 1 node, then 2"
    )
    settle(world, agents)
    calibrate(world)
    assert is_free(world) and world.task("a").calibration.ended == "stopped by order"
    fresh = World()
    fresh.agent("x", task="a").start()
    assert "has not begun to train" in (refusal(fresh.machine.cluster, fresh.task("a"), (1,)) or "")


def test_a_task_of_an_earlier_version_has_no_calibration() -> None:
    world, _ = crowd(1, a=(1, 1))
    stored = encode(world.task("a"))
    assert b'"calibration":null' in stored
    assert decode_task(stored.replace(b'"calibration":null,', b"")) == world.task("a")


@pytest.mark.parametrize("target", [None, 2])
def test_the_operators_size_is_in_force_again(target: int | None) -> None:
    world, agents = crowd(3, a=(1, 3))
    world.do(ev.Resize(task="a", nodes=target))
    calibrate(world, 1, 3)
    settle(world, agents)
    train(world, agents)
    peers = list(agents["a"].values())
    restart(world, *peers)
    assert shown(world.task("a")) == "calibration at 3 nodes", "the coordinator remembers"
    settle(world, agents)
    train(world, agents)
    assert is_free(world) and world.task("a").target == target


OPS = st.sampled_from(["train", "train", "settle", "dies", "restart", "resize", "free", "stop", "order", "time"])


@given(st.lists(OPS, max_size=12), st.lists(st.integers(1, 3), min_size=1, max_size=3, unique=True))
@examples(max_examples=60, deadline=None)
def test_nothing_stays_behind(history: list[str], sizes: list[int]) -> None:
    """After any history the calibration ends by itself, and the operator's last size is in force."""
    world, agents = crowd(4, a=(1, 3), b=(1, 4))
    target: int | None = None
    calibrate(world, *sizes)
    for op in history:
        match op:
            case "train":
                train(world, agents)
            case "settle":
                settle(world, agents)
            case "dies":
                alive = [each for each in agents["a"].values() if each.conn is not None and each.workers]
                if alive:
                    alive[0].die()
            case "restart":
                peers = [each for of in agents.values() for each in of.values() if each.conn is not None]
                restart(world, *peers)
            case "resize" | "free":
                target = 2 if op == "resize" else None
                world.do(ev.Resize(task="a", nodes=target))
                assert is_free(world)
            case "stop":
                calibrate(world)
                assert is_free(world)
            case "order" if refusal(world.machine.cluster, world.task("a"), sizes) is None:
                calibrate(world, *sizes)
            case _:
                world.advance(LIMIT / 2)
        assert is_free(world) or world.task("a").target in sizes
    world.advance(len(sizes) * LIMIT + 1)
    state = world.task("a")
    assert is_free(world) and state.target == target
    assert state.calibration is not None
    if not state.calibration.ended:
        assert set(state.calibration.skipped) | set(state.measured.speeds) >= set(sizes)
    world.check_replay()
