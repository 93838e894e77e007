"""Scripts without the strategy: a change of agents restarts all of them together."""

from __future__ import annotations

from typing import Any

from coordinator.driver import FakeAgent, World

from unicron_lightning import wire


def plain(count: int, most: int = 4, **limits: Any) -> tuple[World, list[FakeAgent]]:
    """Create agents with (plain) workers started, and evidence that the script is plain."""
    world = World(nodes=(count, most), **limits)
    agents = [world.agent(name).start() for name in "abcdefgh"[:count]]
    for agent in agents:
        agent.launch()
    agents[0].say(wire.StoreUsed(round=agents[0].round))
    return world, agents


def test_a_join_restarts_all_with_fresh_ranks_and_the_store_of_rank_0():
    world, (a, b) = plain(2)
    c = world.agent("c").start()
    assert not c.all(wire.Grant)
    assert [len(agent.all(wire.Stop)) for agent in (a, b, c)] == [1, 1, 0]
    b.die(code=15)
    b.rendezvous()
    assert len(b.all(wire.Grant)) == 1
    a.rendezvous()
    assert "worker_died" not in world.names(), "it was stopped on order"
    assert world.task().incidents == 0
    grants = {agent.name: agent.last(wire.Grant) for agent in (a, b, c)}
    assert {name: grant.group_rank for name, grant in grants.items()} == {"b": 0, "a": 1, "c": 2}
    assert {grant.group_world for grant in grants.values()} == {3}
    assert {grant.master for grant in grants.values()} == {b.store}
    for agent in (a, b, c):
        agent.launch()
    assert (c.last(wire.Ranks).base, c.last(wire.Ranks).world) == (2, 3)


def test_a_failed_worker_restarts_all():
    world, (a, b) = plain(2)
    a.die(code=1)
    assert world.event("worker_died").incident == "i1"
    assert not b.all(wire.Stop)
    a.rendezvous()
    assert len(b.all(wire.Stop)) == 1
    assert len(a.all(wire.Grant)) == 1
    b.rendezvous()
    assert (a.last(wire.Grant).round, b.last(wire.Grant).round) == (2, 2)
    a.launch()
    a.say(wire.StoreUsed(round=2))
    assert len(b.all(wire.Stop)) == 1


def test_a_lost_agent_restarts_the_others_once_min_nodes_are_there():
    world, (a, b) = plain(2)
    b.drop()
    world.advance(1)
    assert len(a.all(wire.Stop)) == 1
    a.rendezvous()
    assert len(a.all(wire.Grant)) == 1
    c = world.agent("c").start()
    assert (a.last(wire.Grant).group_rank, c.last(wire.Grant).group_rank) == (0, 1)
    assert world.event("slot_granted").incident == "i1"
    assert world.task().incident is None


def test_a_change_before_the_evidence_is_granted_and_made_up_for_later():
    world = World()
    a = world.agent("a").start().launch()
    b = world.agent("b").start().launch()
    assert b.last(wire.Grant).group_rank == 1
    assert not a.all(wire.Stop)
    a.say(wire.StoreUsed(round=1))
    assert [len(agent.all(wire.Stop)) for agent in (a, b)] == [1, 1]
    a.rendezvous()
    b.rendezvous()
    assert b.last(wire.Grant) == wire.Grant(round=2, group_rank=1, group_world=2, master=a.store)
    a.launch()
    a.say(wire.StoreUsed(round=2))
    assert [len(agent.all(wire.Stop)) for agent in (a, b)] == [1, 1]


def test_a_surplus_agent_stands_by_without_disturbing_and_replaces_a_lost_one():
    world, (a, b) = plain(2, most=2)
    standby = world.agent("s").start()
    assert not a.all(wire.Stop)
    b.drop()
    world.advance(1)
    a.rendezvous()
    assert (a.last(wire.Grant).group_rank, standby.last(wire.Grant).group_rank) == (0, 1)


def test_the_task_ends_when_all_agents_succeeded():
    world, (a, b) = plain(2, most=2)
    standby = world.agent("s").start()
    a.exit()
    a.bye(succeeded=True)
    assert not standby.all(wire.TaskOver)
    assert not b.all(wire.Stop)
    assert not standby.all(wire.Grant)
    b.exit()
    b.bye(succeeded=True)
    assert standby.last(wire.TaskOver).succeeded
    standby.bye(succeeded=True)
    assert "t" not in world.machine.tasks
    assert world.event("task_over").fields["succeeded"]
    assert world.event("task_over").fields["reason"] == "its workers have finished"


def test_a_failure_after_others_have_finished_is_a_failure():
    _, (a, b) = plain(2)
    a.exit()
    a.bye(succeeded=True)
    b.die(code=1)
    b.rendezvous()
    assert b.last(wire.TaskOver).succeeded is False


def test_the_task_ends_when_all_agents_have_left():
    world, agents = plain(2)
    for agent in agents:
        agent.bye(succeeded=False)
    assert "t" not in world.machine.tasks
    assert world.event("task_over").fields["succeeded"] is False


def test_a_stop_missed_during_a_short_disconnection_is_said_again():
    world, (a, b) = plain(2)
    b.drop()
    world.agent("c").start()
    assert not b.all(wire.Stop)
    b.register()
    assert len(b.all(wire.Stop)) == 1
    a.rendezvous()
    b.rendezvous()
    assert b.last(wire.Grant).group_world == 3


def test_a_hello_makes_the_task_elastic_whatever_was_seen_before():
    world, (a, _) = plain(2)
    a.hello()
    c = world.agent("c").start()
    assert c.all(wire.Grant)
    assert not a.all(wire.Stop)
