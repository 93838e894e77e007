"""Drained nodes and resized tasks: workers leave at a step boundary, and nothing is lost if that is impossible."""

from __future__ import annotations

import pytest
from coordinator.driver import FakeAgent, World, members, restart, settle, started

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev


def three(**limits: float) -> tuple[World, list[FakeAgent]]:
    """Create three members in epoch 2; one node would suffice."""
    world = World(nodes=(1, 3), **limits)
    agents = [world.agent(name).start().launch() for name in "abc"]
    for agent in agents:
        agent.hello()
    for agent in agents:
        agent.ready(0)
    settle(world)
    assert len(agents) == 3
    settle(world)
    assert members(world) == ["a/0#1", "b/0#1", "c/0#1"] and world.task().number == 2
    return world, agents


def test_the_members_of_a_drained_node_leave_at_a_step_boundary():
    world, (a, b, c) = three()
    b.drain()
    epoch = b.last(wire.Epoch)
    assert (epoch.kind, epoch.number, members(world)) == ("leave", 3, ["a/0#1", "c/0#1"])
    assert not b.all(wire.Stop), "not before the others are at the boundary"
    settle(world)
    assert a.last(wire.Go).epoch == c.last(wire.Go).epoch == 3
    assert b.last(wire.Stop).reason == "node node-b drains"
    assert world.task().slots == ["a", "c"] and "b/0#1" not in world.task().workers
    assert "worker_died" not in world.names() and not world.task().incidents


def test_a_drained_agent_stands_by_until_its_node_is_undrained():
    world, (_, b, _) = three()
    b.drain()
    settle(world)
    b.rendezvous()
    world.advance(60)
    assert b.waiting and not world.task().agents["b"].holder
    b.drain(False)
    assert b.granted
    b.boot()
    assert (world.task().epoch.kind, members(world)) == ("join", ["a/0#1", "c/0#1", "b/0#2"])


def test_nobody_leaves_below_the_minimum_until_others_have_joined():
    world, (a, b) = started(2, nodes=(2, 2))
    b.drain()
    assert world.task().number == 1
    c = world.agent("c").start()
    assert c.granted, "drained nodes do not count against the maximum"
    c.boot()
    assert (world.task().epoch.kind, world.task().number) == ("join", 2)
    settle(world)
    assert (world.task().epoch.kind, members(world)) == ("leave", ["a/0#1", "c/0#1"])
    settle(world)
    assert b.all(wire.Stop) and not a.all(wire.Stop)


def test_a_death_meanwhile_comes_first_and_the_leave_after_it():
    world, (a, b, c) = three()
    b.drain()
    c.die()
    assert (world.task().epoch.kind, members(world)) == ("fail", ["a/0#1", "b/0#1"])
    settle(world)
    assert (world.task().epoch.kind, members(world)) == ("leave", ["a/0#1"])
    settle(world)
    assert b.all(wire.Stop) and a.last(wire.Go).epoch == 5


def test_one_that_dies_before_it_has_left_is_a_failure():
    world, (_, b, _) = three()
    b.drain()
    b.die()
    assert (world.task().epoch.kind, members(world)) == ("fail", ["a/0#1", "c/0#1"])
    assert world.task().incident is not None


def test_a_communication_error_meanwhile_renews_the_old_world_first():
    world, (a, b, _) = three()
    b.drain()
    a.say(wire.CommError(worker=a.worker(), epoch=2, error="x"))
    world.advance(1)
    assert (world.task().epoch.kind, len(members(world))) == ("fail", 3)


def test_what_a_worker_says_while_it_is_stopped_does_not_get_it_killed():
    world, (_, b, _) = three()
    b.drain()
    b.ready(3)
    settle(world)
    b.say(wire.Progress(worker="b/0#1", step=9, metrics={}))
    assert not b.all(wire.Fence)
    b.say(wire.WorkerDied(worker="b/0#1", cause="signal", code=15, at=1.0))
    assert "worker_died" not in world.names(), "its end is no failure"


def test_workers_that_start_on_a_drained_node_are_stopped_at_once():
    world, (_, b, _) = three()
    b.die()
    settle(world)
    b.rendezvous().launch()
    b.hello()
    b.drain()
    assert b.all(wire.Stop) and world.task().slots == ["a", "c"]
    assert world.task().epoch.kind == "fail"


def test_an_agent_that_was_away_hears_of_it_when_it_is_back():
    world, (_, b, _) = three(reconnect_grace=30)
    b.drain()
    b.drop()
    settle(world)
    assert not b.all(wire.Stop)
    b.register()
    assert b.all(wire.Stop) and not b.all(wire.Fence)


def test_a_restarted_coordinator_knows_what_is_drained():
    world, agents = three()
    agents[1].drain()
    restart(world, *agents)
    assert world.machine.drained == ["node-b"]
    assert world.task().epoch.kind == "leave"
    settle(world)
    assert agents[1].all(wire.Stop)


def test_a_plain_script_is_restarted_without_the_drained_node():
    world = World(nodes=(1, 3))
    agents = [world.agent(name).start() for name in "abc"]
    for agent in agents:  # b and c came after the first grant: once the script is known to be plain, all restart
        agent.launch()
    agents[0].say(wire.StoreUsed(round=1))
    for agent in agents:
        agent.rendezvous()
    for agent in agents:
        agent.launch()
    agents[1].drain()
    assert all(agent.stopped for agent in agents)
    for agent in agents:
        agent.rendezvous()
    assert [agent.granted for agent in agents] == [True, False, True]
    assert agents[0].last(wire.Grant).group_world == 2


def test_a_single_agent_can_be_drained_by_its_id():
    world, (_, b, _) = three()
    world.do(ev.Drain(node="b", drained=True))
    assert members(world) == ["a/0#1", "c/0#1"]
    assert [event.name for event in world.events if event.task is None][-1] == "node_drains"
    assert b.last(wire.Epoch).kind == "leave"


def test_a_task_shrinks_by_its_newest_nodes_and_grows_again():
    world, (a, b, c) = three()
    world.do(ev.Resize(task="t", nodes=1))
    assert (world.task().epoch.kind, members(world)) == ("leave", ["a/0#1"])
    settle(world)
    assert b.all(wire.Stop) and c.all(wire.Stop) and not a.all(wire.Stop)
    for agent in (b, c):
        agent.rendezvous()
    assert b.waiting and c.waiting
    world.do(ev.Resize(task="t", nodes=2))
    assert b.granted and c.waiting
    b.boot()
    settle(world)
    world.do(ev.Resize(task="t", nodes=None))
    assert c.granted
    c.boot()
    settle(world)
    assert members(world) == ["a/0#1", "b/0#2", "c/0#2"]


@pytest.mark.parametrize("how", ["dead", "restarting", "slow"])
def test_a_task_shrinks_by_dead_restarting_and_slow_nodes_first(how: str):
    world, (_, b, c) = three()
    if how == "slow":
        world.task().watch.stragglers = {b.worker(): 1.5}
    else:
        b.die()
        settle(world)
    if how == "restarting":
        b.rendezvous().launch()
    world.do(ev.Resize(task="t", nodes=2))
    settle(world)
    assert members(world) == ["a/0#1", "c/0#1"]
    assert world.task().slots == ["a", "c"] and not c.all(wire.Stop)


def test_a_resized_task_replaces_a_dead_node_by_one_that_stands_by():
    world, (a, b, c) = three()
    world.do(ev.Resize(task="t", nodes=2))
    settle(world)
    c.rendezvous()
    b.drop()
    world.advance(1)
    assert c.granted and world.task().slots == ["a", "c"]
    assert a.last(wire.Epoch).kind == "fail"


def test_a_wish_outlives_the_coordinator():
    world, agents = three()
    world.do(ev.Resize(task="t", nodes=2))
    settle(world)
    restart(world, *agents)
    agents[2].rendezvous()
    assert world.task().target == 2 and agents[2].waiting


def test_those_that_were_to_leave_go_on_if_all_others_die():
    world = World(nodes=(1, 2))
    a, b = (world.agent(name, size=2).start() for name in "ab")
    for agent in (a, b):
        agent.boot()
        settle(world)
    b.drain()
    assert (world.task().epoch.kind, members(world)) == ("leave", ["a/0#1", "a/1#1"])
    a.drop()
    world.advance(1)
    assert (world.task().life, world.task().epoch.kind) == (1, "fail")
    assert members(world) == ["b/0#1", "b/1#1"]


def test_the_end_waits_for_one_that_was_to_leave():
    """Drained in the last step: it may still write the model when the others have ended."""
    _, (a, b, c) = three()
    a.drain()
    for agent in (b, c):
        agent.say(wire.WorkerDone(worker=agent.worker()))
    assert not a.all(wire.TaskOver)
    a.say(wire.WorkerDone(worker=a.worker()))
    assert a.last(wire.TaskOver).succeeded


def test_a_joiner_that_can_use_less_does_not_drive_members_out():
    world, _ = started(3, nodes=(1, 4))
    while not world.task().settled or len(members(world)) < 3:
        settle(world)
    number = world.task().number
    world.agent("d").start().launch().hello(capacity=1)
    assert world.task().number == number and len(members(world)) == 3


def test_a_wish_is_dropped_with_the_range_it_was_made_for():
    world, agents = three()
    world.do(ev.Resize(task="t", nodes=1))
    settle(world)
    for agent in agents:
        agent.drop()
    world.advance(1)
    world.nodes = (2, 4)
    for name in "xyz":
        world.agent(name).start()
    assert world.task().target is None and len(world.task().slots) == 3
