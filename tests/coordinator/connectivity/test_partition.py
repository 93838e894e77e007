"""Nodes that do not reach each other: the task continues without one side and takes it back."""

from __future__ import annotations

from typing import Any

from coordinator.driver import World, members, restart, settle, started
from coordinator.fake_agent import FakeAgent

from unicron_lightning import wire
from unicron_lightning.coordinator.connectivity import wait_of


def cut(world: World, *pairs: str) -> None:
    """Cut pairs of agents: the first of each cannot connect to the second."""
    world.unreached = {(pair[0], pair[1]) for pair in pairs}


def stall(world: World, agents: list[FakeAgent]) -> None:
    """Let all members wait in a collective for longer than usual."""
    number = world.task().number
    for agent in agents:
        about = {"worker": agent.worker(), "epoch": number, "step": 7, "phase": "reduce"}
        agent.say(wire.ActivityReport(**about, waiting=True, overdue=True, seconds=1.0, limit=0.5))  # type: ignore[arg-type]


def names(world: World) -> list[str]:
    return [worker[0] for worker in members(world)]


def trained(count: int, **limits: Any) -> tuple[World, list[FakeAgent]]:
    """``count`` members of a settled epoch; one is enough to train."""
    world, agents = started(count, nodes=(1, 4), **limits)
    while world.task().go is None:
        settle(world)
    assert names(world) == [agent.name for agent in agents]
    return world, agents


def start_again(agent: FakeAgent) -> None:
    """Start warm workers after torchrun has stopped the agent's workers."""
    agent.rendezvous().warm_up()


def test_a_cut_between_two_nodes_leaves_one_training_and_takes_the_other_back() -> None:
    world, (first, second) = trained(2, warm_standby=True)
    cut(world, "ab", "ba")
    stall(world, [first, second])
    assert names(world) == ["a"], "of two equal sides that of rank 0"
    assert second.last(wire.Stop).seconds is not None and not second.all(wire.Fence)
    assert world.event("nodes_left_out").fields["unreached"] == [["node-a", "node-b"]]
    settle(world)
    start_again(second)
    world.advance(30)
    assert world.task().slots == ["a"], "it waits as long as it is cut off"
    assert second.last(wire.Barred).reason
    cut(world)
    world.advance(5)
    assert second.last(wire.Barred).reason == ""
    second.ready(0)
    assert names(world) == ["a", "b"] and world.task().epoch.kind == "join"  # type: ignore[union-attr]
    assert world.names().count("nodes_left_out") == world.names().count("node_readmitted") == 1


def test_a_cut_in_one_direction_is_a_cut() -> None:
    world, agents = trained(3)
    cut(world, "bc")
    stall(world, agents)
    assert names(world) == ["a", "b"]
    world.advance(30)
    assert world.task().probing.nodes["node-c"].reason
    cut(world, "cb")
    world.advance(30)
    assert world.task().probing.nodes["node-c"].reason, "both directions must be well"


def test_the_larger_side_continues_even_without_rank_0() -> None:
    world, agents = trained(4)
    cut(world, "ac", "bc", "cd", "ab")
    stall(world, agents)
    assert names(world) in (["a", "d"], ["b", "d"])
    world, agents = trained(3)
    cut(world, "ab", "ac")
    stall(world, agents)
    assert names(world) == ["b", "c"]


def test_all_reach_each_other_and_nothing_changes() -> None:
    world, agents = trained(3)
    number = world.task().number
    stall(world, agents)
    assert all(agent.all(wire.Probe) for agent in agents)
    stall(world, agents)
    assert all(len(agent.all(wire.Probe)) == 1 for agent in agents), "not again at once"
    assert world.task().number == number and "nodes_left_out" not in world.names()


def test_a_long_wait_is_a_reason_to_probe_and_less_and_less_often() -> None:
    world, agents = trained(3)

    def wait(seconds: float) -> None:
        about = {"worker": agents[0].worker(), "epoch": world.task().number, "step": 1, "phase": "validation"}
        agents[0].say(
            wire.ActivityReport(**about, waiting=True, overdue=False, seconds=1.0, limit=None, waits=seconds)  # type: ignore[arg-type]
        )

    wait(0.9)
    assert not agents[1].all(wire.Probe), "a healthy step may take as long"
    for _ in range(300):
        wait(1.0)
        world.advance(1)
    assert 5 <= len(agents[1].all(wire.Probe)) <= 10
    cut(world, "ab")
    world.advance(60)
    wait(2.0)
    assert names(world) == ["a", "c"]


def test_an_agent_that_does_not_answer_is_not_judged() -> None:
    world, agents = trained(2)
    world.silent = {"a"}
    cut(world, "ba")
    stall(world, agents)
    world.advance(4)
    assert names(world) == ["a", "b"], "a may be dead: rank 0's side must not be preferred then"


def test_a_failed_collective_is_answered_once_it_is_known_who_reaches_whom() -> None:
    world, (first, second) = trained(2)
    number, answers, world.silent = world.task().number, world.probes, {"a", "b"}
    for agent in (first, second):
        agent.say(wire.CommError(worker=agent.worker(), epoch=number, error="collective failed"))
    world.advance(1)
    assert world.task().number == number, "the probe goes on"
    order = first.last(wire.Probe)
    assert not answers
    first.say(wire.Probed(number=order.number, missed={"b": "timed out"}))
    second.say(wire.Probed(number=order.number, missed={}))
    assert names(world) == ["a"] and world.task().number == number + 1


def test_members_that_do_not_enter_an_epoch_are_probed() -> None:
    world, _ = trained(2)
    cut(world, "ab", "ba")
    world.advance(5)
    assert names(world) == ["a"], "they connect, and cannot"


def test_who_is_left_out_again_and_again_waits_longer() -> None:
    world, agents = trained(2)
    waited = []
    for _ in range(4):
        cut(world, "ab", "ba")
        world.advance(PAUSE)
        stall(world, agents)
        assert names(world) == ["a"]
        settle(world)
        healed = world.now
        agents[1].rendezvous()
        cut(world)
        world.advance(30)
        waited.append(round(when(world, "node_readmitted", healed)))
        agents[1].boot()
        assert names(world) == ["a", "b"]
        settle(world)
    assert waited == sorted(waited) and waited[0] <= 3 and waited[-1] >= 8
    assert [wait_of(times) for times in (1, 2, 3, 7, 100)] == [0.0, 2.0, 4.0, 60.0, 60.0]


PAUSE = 3.0
"""Time longer than the pause after a probe without a cut."""


def when(world: World, name: str, since: float) -> float:
    """Seconds from ``since`` to the newest event of that name, by the event's own time."""
    return float(world.event(name).fields["seconds"])


def test_a_new_agent_of_a_node_that_is_left_out_waits_too() -> None:
    world, agents = trained(2)
    cut(world, "ab", "ba")
    stall(world, agents)
    other = world.agent("c")
    other.node = agents[1].node
    cut(world, "ab", "ba", "ac", "ca")
    other.start()
    world.advance(10)
    assert world.task().slots == ["a"]
    cut(world)
    world.advance(10)
    assert "c" in world.task().slots


def test_when_nobody_else_is_left_a_node_is_not_kept_out() -> None:
    world, (first, second) = trained(2)
    cut(world, "ab", "ba")
    stall(world, [first, second])
    settle(world)
    second.rendezvous()
    first.drop()
    world.advance(30)
    assert world.task().slots == ["b"] and "node_readmitted" in world.names()


def test_a_restarted_coordinator_keeps_it_out_and_takes_it_back() -> None:
    world, (first, second) = trained(2)
    cut(world, "ab", "ba")
    stall(world, [first, second])
    settle(world)
    second.rendezvous()
    restart(world, first, second)
    world.advance(10)
    assert world.task().slots == ["a"]
    cut(world)
    world.advance(5)
    assert world.task().slots == ["a", "b"]


def test_the_most_whole_replicas_continue() -> None:
    world = World()
    agents = [world.agent(name, nodes=(2, 4)) for name in "abcd"]
    for agent in agents:
        agent.granularity = 2
        agent.start()
    for agent in agents:
        agent.boot()
    settle(world)
    replicas = [["a/0#1", "b/0#1"], ["c/0#1", "d/0#1"]]
    agents[0].say(wire.Replicas(worker="a/0#1", epoch=world.task().number, replicas=replicas, at_once=None))
    cut(world, "ab", "ba")
    stall(world, agents)
    assert names(world)[-2:] == ["c", "d"], "the other replica is whole"
