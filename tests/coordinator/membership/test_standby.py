"""Warm stand-bys: workers started without a slot do not count, and continue at once when they get one."""

from __future__ import annotations

import io

import pytest
from coordinator.driver import FakeAgent, World, members, restart, running, settle, started
from rich.console import Console

from unicron_lightning import wire
from unicron_lightning.cli.inspection import _task_table
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.api.status import task_status


def spared(count: int = 1, **limits: float) -> tuple[World, FakeAgent, FakeAgent, list[FakeAgent]]:
    """Two agents train, the maximum; this many others are warm."""
    world, (a, b) = started(2, nodes=(1, 2), warm_standby=True, **limits)
    if not world.task().settled:
        settle(world)
    assert members(world) == ["a/0#1", "b/0#1"]
    return world, a, b, [world.agent(name).start().warm_up() for name in "stuv"[:count]]


def test_a_stand_by_starts_its_workers_but_they_are_not_welcomed():
    world, _, _, (s,) = spared()
    assert s.last(wire.Grant).warm and not s.granted and not s.all(wire.Welcome)
    assert world.task().slots == ["a", "b"] and set(world.task().workers) == {"a/0#1", "b/0#1"}
    assert world.task().number == world.task().epoch.number
    assert {key.agent for key in world.timers if key.kind != "enter"} <= {"a", "b"}, "nothing runs for the stand-by"
    assert [agent.id for agent in world.task().queue()] == ["s"]


def test_what_a_warm_worker_can_do_does_not_count():
    world, a, _, _ = spared(0)
    s = world.agent("s").start().launch()
    s.hello(capacity=1)
    assert world.task().capacity() == 8
    a.die()
    settle(world)
    assert not world.task().epoch.hold


def test_an_agents_loss_gives_its_slot_to_the_warm_one_and_its_worker_joins():
    world, _, b, (s,) = spared()
    b.drop()
    world.advance(1)
    assert s.granted and not s.last(wire.Grant).warm
    assert not s.last(wire.Welcome).founder and s.last(wire.Welcome).worker == "s/0#1", "no new round"
    settle(world)
    s.ready(0)
    assert (world.task().epoch.kind, members(world)) == ("join", ["a/0#1", "s/0#1"])


def test_a_workers_death_gives_the_slot_away_at_once_and_its_agent_stands_by():
    world, _, b, (s,) = spared()
    b.die()
    assert s.granted and world.task().slots == ["a", "s"] and s.all(wire.Welcome)
    assert world.event("slot_passed_on").fields == {"agent": "b", "node": "node-b"}
    assert (world.task().epoch.kind, members(world)) == ("fail", ["a/0#1"])
    assert not b.all(wire.Stop), "torchrun starts its workers anew by itself"
    b.rendezvous().warm_up()
    assert b.warm and not b.all(wire.Welcome)[1:] and [agent.id for agent in world.task().queue()] == ["b"]
    s.die()
    assert b.granted, "and back"


def test_a_slot_is_kept_while_nobody_is_warm():
    world, _, b, _ = spared(0)
    s = world.agent("s").start()
    b.die()
    assert world.task().slots == ["a", "b"] and s.warm
    s.drain()
    b.rendezvous()
    assert b.granted and not b.warm, "its own slot again"


def test_one_that_starts_its_workers_already_is_ahead_of_one_that_has_to():
    world, _, b, _ = spared(0)
    world.agent("s").start()
    b.die()
    b.rendezvous()
    assert world.task().slots == ["a", "s"] and b.warm


def test_only_as_many_slots_are_given_away_as_there_are_warm_agents():
    world, a, b, (s,) = spared()
    a.die()
    b.die()
    assert s.granted and len(world.task().slots) == 2
    assert sum(name == "slot_passed_on" for name in world.names()) == 1


def test_the_warm_go_before_those_who_came_earlier():
    world, _, b, _ = spared(0)
    early, late = world.agent("e").start(), world.agent("l").start().warm_up()
    b.drop()
    world.advance(1)
    assert late.granted and not early.granted


def test_a_free_slot_found_while_the_warm_worker_starts_is_its_own():
    world, _, b, _ = spared(0)
    s = world.agent("s").start()
    b.drop()
    world.advance(1)
    assert s.granted and not s.all(wire.Welcome)
    s.launch().hello()
    assert s.all(wire.Welcome)
    s.ready(0)
    settle(world)
    assert world.task().epoch.kind == "join"


def test_one_that_gets_a_slot_before_it_has_seen_that_it_is_to_be_warm_is_told_its_ranks():
    """Its torchrun takes the newest grant, and does not start the workers of a real one without ranks."""
    world, _, b, (s,) = spared()
    t = world.agent("t").start()
    b.drop()
    s.die()
    world.advance(1)
    assert t.granted and not t.all(wire.Ranks)
    t.launch()
    assert [message.world for message in t.all(wire.Ranks)] == [2]
    assert not s.all(wire.Ranks), "it was warm before"


def test_all_workers_of_the_agent_must_be_warm_for_a_slot_to_be_passed_on():
    world, _ = started(1, nodes=(1, 1), size=2, warm_standby=True)
    s = world.agent("s", size=2).start().launch()
    s.hello(0)
    world.agents[1].die()
    assert world.task().slots == ["a"]
    s.hello(1)
    assert world.task().slots == ["s"], "as soon as they are"
    assert {message.worker for message in s.all(wire.Welcome)} == {"s/0#1", "s/1#1"}


def test_a_plain_script_is_never_started_warm():
    world = World(nodes=(1, 1), warm_standby=True)
    a = world.agent("a").start().launch()
    s = world.agent("s").start()
    a.say(wire.StoreUsed(round=1))
    assert s.waiting and not s.all(wire.Grant)


def test_stand_bys_become_warm_when_the_first_worker_says_hello():
    world = World(nodes=(1, 1), warm_standby=True)
    a = world.agent("a").start().launch()
    s = world.agent("s").start()
    assert not s.warm
    a.hello()
    assert s.warm


def test_not_unless_it_is_wanted():
    world, _ = started(1, nodes=(1, 1))
    assert not world.agent("s").start().all(wire.Grant)


def test_a_drained_node_cools_down_and_warms_again():
    world, a, b, (s,) = spared()
    s.drain()
    assert s.stopped and "worker_died" not in world.names()
    s.workers.clear()
    s.say(wire.WorkerDied(worker="s/0#1", cause="signal", code=15, at=1.0))
    s.rendezvous()
    assert s.waiting and not s.warm and not {"worker_died", "warm_worker_died"} & set(world.names())
    s.drain(False)
    assert s.warm
    assert not world.task().incidents and members(world) == ["a/0#1", "b/0#1"]
    assert not a.all(wire.Stop) and not b.all(wire.Stop)


def test_who_is_not_needed_any_more_becomes_warm_and_is_back_at_once():
    world, _, b, _ = spared(0)
    world.do(ev.Resize(task="t", nodes=1))
    settle(world)
    b.rendezvous().warm_up()
    assert members(world) == ["a/0#1"] and not b.all(wire.Welcome)[1:]
    world.do(ev.Resize(task="t", nodes=None))
    assert b.last(wire.Welcome).worker == "b/0#2" and b.granted


def test_at_a_place_that_another_task_has_the_workers_are_warm():
    world = World(warm_standby=True)
    agents = {
        (task, n): world.agent(f"{task}{n}", task=task, nodes=(1, 2), place=f"n{n}/0") for task in "xy" for n in (0, 1)
    }
    for agent in agents.values():
        agent.start()
    for _ in range(10):
        world.advance(1)
        for agent in agents.values():
            if agent.stopped:
                agent.rendezvous()
            elif agent.granted and agent.local_world is None:
                agent.boot()
            elif agent.warm and agent.local_world is None:
                agent.warm_up()
        for task in "xy":
            if task in world.machine.tasks and world.task(task).epoch is not None and not world.task(task).settled:
                settle(world, task)
    granted = {key for key, agent in agents.items() if agent.granted}
    assert len(granted) == 2 and {n for _, n in granted} == {0, 1}, "one task at a place"
    assert {key for key, agent in agents.items() if agent.warm} == set(agents) - granted


def test_a_warm_workers_death_is_nobodys_failure():
    world, _, b, (s,) = spared()
    number = world.task().number
    s.die()
    assert "warm_worker_died" in world.names() and "worker_died" not in world.names()
    assert (world.task().number, world.task().incidents) == (number, 0)
    b.die()
    assert world.task().slots == ["a", "b"], "there is nobody to take it over"
    s.rendezvous()
    assert s.warm and s.last(wire.Grant).round == 2


@pytest.mark.parametrize("succeeded", [False, True])
def test_a_warm_agents_end_ends_nothing(succeeded):
    world, _, _, (s,) = spared()
    s.exit()
    s.bye(succeeded=succeeded)
    assert not world.task().finishing and world.task().over is None and "s" not in world.task().agents


def test_the_tasks_end_is_told_to_them():
    _, a, b, (s,) = spared()
    for agent in (a, b):
        agent.exit()
    assert s.last(wire.TaskOver).succeeded


def test_if_nobody_survives_the_warm_begin_the_new_life():
    world = World(warm_standby=True)
    (a,) = running(world, 1, nodes=(1, 1))
    s = world.agent("s").start().warm_up()
    a.saved("/x", 3)
    a.die()
    assert world.task().life == 2 and world.task().slots == ["s"] and not s.all(wire.Fence)
    assert (s.last(wire.Welcome).founder, s.resumes()) == (True, ["/x"])
    s.ready(0)
    assert world.task().epoch.kind == "restart" and members(world) == ["s/0#1"]


def test_of_those_welcomed_as_joiners_none_can_begin_a_life():
    world, a, b, (s, t) = spared(2)
    a.die()
    assert s.granted
    b.die()
    assert world.task().life == 2 and s.all(wire.Fence), "it was to join, and starts anew"
    assert t.last(wire.Welcome).founder and set(world.task().slots) == {"s", "t"}


def test_the_status_tells_who_is_warm():
    world, _, _, _ = spared()
    status = task_status(world.task())
    assert [(agent["agent"], agent["slot"]) for agent in status["agents"]][-1] == ("s", "warm")
    output = io.StringIO()
    Console(file=output, width=200).print(_task_table("t", status))
    assert "agent stands by, warm" in output.getvalue()


# ---- restarted coordinators and broken connections


def test_a_restarted_coordinator_knows_who_is_warm():
    world, a, b, (s,) = spared()
    restart(world, a, b, s)
    assert s.warm and world.task().agents["s"].all_warm
    b.die()
    assert s.granted and s.all(wire.Welcome)


def test_it_gives_a_slot_to_one_that_is_away_and_tells_it_later():
    world, _, b, (s,) = spared(reconnect_grace=30)
    s.drop()
    b.bye(succeeded=False)
    assert "s" in world.task().slots and s.warm
    s.register()
    assert s.granted and s.last(wire.Welcome).worker == "s/0#1"


def test_a_slot_is_not_passed_on_to_one_that_is_away():
    world, _, b, (s,) = spared(reconnect_grace=30)
    s.drop()
    b.die()
    assert world.task().slots == ["a", "b"]
    s.register()
    assert s.granted, "but when it is back"


def test_a_warm_worker_that_died_meanwhile_is_not_counted_on():
    world, _, b, (s,) = spared(reconnect_grace=30)
    s.drop()
    s.workers.clear()
    s.register()
    b.die()
    assert world.task().slots == ["a", "b"]


def test_a_warm_grant_that_was_lost_is_said_again():
    world, _, _, _ = spared(0, reconnect_grace=30)
    s = world.agent("s").start()
    s.drop()
    s.warm, s.waiting = False, True
    s.register()
    assert s.warm and len(s.all(wire.Grant)) == 2


def test_one_given_up_while_it_was_away_is_warm_as_before():
    world, _, b, (s,) = spared()
    s.drop()
    world.advance(1)
    assert "s" not in world.task().agents
    s.register()
    assert not s.all(wire.Stop) and not s.all(wire.Fence)
    b.die()
    assert s.granted and s.last(wire.Welcome).worker == "s/0#1"


def test_a_coordinator_without_memory_learns_of_it():
    world, a, b, (s,) = spared()
    a.ready(world.task().number)
    b.ready(world.task().number)
    world.lose_disk()
    restart(world, s, a, b)
    assert world.task().rebuilding and world.task().agents["s"].all_warm
    world.advance(11)
    assert (world.task().epoch.kind, members(world)) == ("fail", ["a/0#1", "b/0#1"])
    assert s.warm and not s.stopped and not s.all(wire.Welcome)


def test_nor_is_one_forgotten_that_waits_for_its_ranks():
    world = World()
    a, b = world.agent("a", nodes=(2, 2)).start(), world.agent("b", nodes=(2, 2)).start()
    a.launch()
    assert a.without_ranks, "b has not told of its workers"
    world.lose_disk()
    restart(world, a, b)
    assert a.without_ranks
    b.launch()
    world.advance(11)
    assert not a.without_ranks and not b.without_ranks
    assert [agent.last(wire.Ranks).base for agent in (a, b)] == [0, 1]


def test_one_cooled_while_it_was_away_hears_of_it():
    _, _, _, (s,) = spared(reconnect_grace=30)
    s.drop()
    s.drain()
    s.register()
    assert s.stopped and not s.all(wire.Fence)
