"""Agents and coordinators that leave and return; refusals; the end of an idle coordinator."""

from __future__ import annotations

import pytest
from coordinator.driver import World, members, restart, settle, started

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.events import TimerKey


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": 99}, "protocol 99"),
        ({"min_nodes": 1, "max_nodes": 2}, "1:2 of b differs from 2:4"),
        ({"min_nodes": 3, "max_nodes": 2}, "1 <= min_nodes <= max_nodes, got 3:2"),
        ({"task": ""}, "expected a task"),
    ],
)
def test_refusals_quote_what_was_given(changes, words):
    world, _ = started(2)
    b = world.agent("b").register(**changes)
    assert words in b.last(wire.Refused).reason
    assert b.conn is None
    assert sorted(world.machine.tasks) == ["t"]


def test_the_first_message_must_be_register():
    world = World()
    agent = world.agent("a")
    world.conns, agent.conn = 1, 1
    world.agents[1] = agent
    agent.say(wire.Bye(succeeded=True))
    assert agent.conn is None


def test_a_connection_cannot_change_its_agent():
    _, (a, _) = started(2)
    a.say(wire.Register(**{**_fields(a), "agent": "z"}))
    assert "another agent" in a.last(wire.Refused).reason


def test_an_agents_id_cannot_be_taken_over():
    world, (a, b) = started(2)
    false = world.agent("a").register(secret="0" * 32, round=1, granted=True, store=a.store)
    assert "agent 'a' has registered before, with another secret" in false.last(wire.Refused).reason
    assert false.conn is None
    assert a.conn is not None, "the true one stays"
    world.start()
    assert "with another secret" in world.agent("a").register(secret="").last(wire.Refused).reason, (
        "after a restart, too"
    )
    a.register()
    b.register()
    assert (world.task().settled, members(world)) == (True, ["a/0#1", "b/0#1"])


def test_the_secret_of_an_agent_is_kept_as_a_digest():
    world = World()
    message = world.agent("a").registration()
    kept = wire.sealed(message)
    assert message.secret not in repr(kept)
    assert (len(kept.secret), kept) == (64, wire.sealed(message))


def test_only_workers_that_train_tell_of_checkpoints():
    world, (a, _) = started(2)
    c = world.agent("c").start().launch()
    c.hello()
    a.saved("/theirs", 3)
    c.saved("/other", 4, parting=True)
    assert world.task().checkpoint.path == "/theirs"
    assert world.task().life == 1


def test_back_in_time_nothing_has_happened():
    world, (a, b) = started(2)
    before = list(world.events)
    b.drop()
    b.register()
    world.advance(60)
    assert [event.name for event in world.events[len(before) :]] == ["agent_registered"]
    assert world.event("agent_registered").fields["resumed"] is True
    assert world.task().number == 1
    assert not a.all(wire.Fence)


def test_a_newer_connection_replaces_the_older_one():
    world, (_, b) = started(2)
    old = b.conn
    b.register()
    assert old not in world.agents
    world.do(ev.Disconnected(conn=old))
    world.advance(60)
    assert world.task().number == 1


def test_messages_missed_while_away_are_sent_again():
    world, (a, b) = started(2)
    b.drop()
    a.say(wire.CommError(worker=a.worker(), epoch=1, error="x"))
    world.timers.pop(TimerKey("lost", "t", "b"))
    world.advance(1)
    assert b.last(wire.Epoch).number == 1
    b.register()
    assert b.last(wire.Epoch).number == 2
    a.ready(2)
    b.drop()
    world.timers.pop(TimerKey("lost", "t", "b"))
    b.ready(2)
    assert world.task().go is None
    b.register()
    assert b.last(wire.Go).epoch == 2, "the ready state came with the registration"
    count = len(b.all(wire.Go))
    b.drop()
    b.register()
    assert len(b.all(wire.Go)) == count + 1


def test_a_grant_and_ranks_missed_while_away_are_sent_again():
    world = World()
    a = world.agent("a", nodes=(2, 2)).start()
    a.drop()
    world.agent("b", nodes=(2, 2)).start().launch()
    assert not a.all(wire.Grant)
    a.register()
    assert a.last(wire.Grant).group_world == 2
    a.launch()
    assert a.last(wire.Ranks).world == 2
    a.drop()
    a.register()
    assert len(a.all(wire.Ranks)) == 2


def test_a_welcome_missed_while_away_is_sent_again():
    world = World()
    a = world.agent("a").start().launch()
    a.hello()
    a.drop()
    a.register()
    assert len(a.all(wire.Welcome)) == 2


def test_a_hello_said_while_away_counts():
    world = World()
    a = world.agent("a").start().launch()
    a.drop()
    name = a.worker()
    hello = wire.WorkerHello(worker=name, local_rank=0, pid=1, capacity=4)
    ready = wire.WorkerReady(worker=name, epoch=0, state={})
    world.oracles["t"].capacity[name] = 4
    a.workers[name] = wire.WorkerInfo(worker=name, local_rank=0, hello=hello, ready=ready)
    a.register()
    assert a.last(wire.Welcome).founder
    assert a.last(wire.Epoch).number == 1


def test_a_worker_no_longer_named_is_dead_unless_the_agent_explains():
    world, (_, b) = started(2)
    b.drop()
    b.workers.clear()
    b.register()
    assert world.task().number == 1
    b.say(wire.WorkerDone(worker="b/0#1"))
    world.advance(1)
    assert world.task().number == 1
    assert world.task().finished == ["b/0#1"]


def test_a_worker_no_longer_named_and_not_explained_is_dead():
    world, _ = started(2)
    _, b = world.agents.values()
    b.drop()
    b.workers.clear()
    b.register()
    world.advance(1)
    assert members(world) == ["a/0#1"]
    assert world.event("worker_died").fields["cause"] == "lost"


def test_a_rendezvous_begun_while_away_counts():
    world, (_, b) = started(2)
    b.drop()
    b.rendezvous()
    b.register()
    assert members(world) == ["a/0#1"]
    assert b.last(wire.Grant).round == 2


def test_back_too_late_old_workers_are_fenced_and_the_slot_is_asked_for_again():
    world, (_, b) = started(2)
    b.drop()
    world.advance(1)
    assert members(world) == ["a/0#1"]
    settle(world)
    b.register()
    assert b.last(wire.Fence).worker == "b/0#1"
    assert b.all(wire.Stop)
    b.rendezvous().boot()
    assert members(world) == ["a/0#1", "b/0#2"]


def test_all_agents_lost_are_waited_for_and_start_a_new_life():
    world, (a, b) = started(2, restart_grace=10)
    a.saved("/c", 3)
    a.drop()
    b.drop()
    world.advance(5)
    for agent in (a, b):
        agent.register()
    for agent in (a, b):
        agent.rendezvous()
    for agent in (a, b):
        agent.boot()
    assert (a.last(wire.Welcome).life, a.resumes()) == (2, ["/c"])
    assert world.task().epoch.kind == "restart"
    world.advance(60)
    assert "t" in world.machine.tasks


def test_all_agents_lost_for_good_end_the_task():
    world, agents = started(2, restart_grace=10)
    agents[0].saved("/c", 4)
    for agent in agents:
        agent.drop()
    world.advance(11)
    assert not world.machine.tasks
    assert not world.disk
    assert world.event("task_over").fields["succeeded"] is False
    assert world.event("task_over").fields["reason"].startswith("no agent is left; step 4 is saved in /c; ")


def test_a_restarted_coordinator_goes_on():
    world, (a, b) = started(2)
    world.start()
    assert world.event("coordinator_restored").fields == {"tasks": ["t"]}
    world.advance(1)
    a.register()
    b.register()
    world.advance(60)
    assert (world.task().number, world.task().settled, members(world)) == (1, True, ["a/0#1", "b/0#1"])
    a.die()
    assert members(world) == ["b/0#1"]
    settle(world)
    assert b.last(wire.Go).epoch == 2


def test_a_restarted_coordinator_settles_the_pending_epoch():
    world, (a, b, c) = started(3)
    c.die()
    a.ready(2)
    world.start()
    b.ready(2)
    a.register()
    assert not world.task().settled
    b.register()
    assert a.last(wire.Go).epoch == b.last(wire.Go).epoch == 2


def test_a_restarted_coordinator_hears_of_deaths_meanwhile():
    world, (a, b) = started(2)
    world.start()
    b.workers.clear()
    a.register()
    b.register()
    b.say(wire.WorkerDied(worker="b/0#1", cause="signal", code=9, at=1.0))
    assert members(world) == ["a/0#1"]
    assert world.event("worker_died").fields["died_at"] == 1.0


def test_agents_that_do_not_return_to_a_restarted_coordinator_are_lost():
    """After half the time for all, from the last one that has returned."""
    world, (a, b, _) = started(3, restart_grace=10)
    world.start()
    world.advance(9)
    a.register()
    world.advance(4)
    b.register()
    world.advance(4.5)
    assert world.task().number == 1
    world.advance(1)
    assert members(world) == ["a/0#1", "b/0#1"]
    assert world.event("agent_lost").fields["agent"] == "c"


def test_a_restarted_coordinator_renews_the_epoch_of_a_communication_error():
    world, (a, b) = started(2)
    a.say(wire.CommError(worker=a.worker(), epoch=1, error="x"))
    restart(world, a, b)
    world.advance(1)
    assert world.task().number == 2


def test_new_agents_continue_a_task_to_which_nobody_returns():
    world, (a, _) = started(2, restart_grace=10)
    a.saved("/c", 4)
    world.start()
    x, y = (world.agent(name, nodes=(1, 2)).register() for name in "xy")
    x.rendezvous()
    assert not x.all(wire.Registered)
    y.drop()
    world.advance(11)
    assert [name for name in world.names() if name in ("task_created", "task_over")] == ["task_created"]
    assert (world.task().life, x.last(wire.Grant).group_world) == (2, 1)
    assert x.boot().resumes() == ["/c"]
    assert x.last(wire.Welcome).run == a.last(wire.Welcome).run != ""


def test_without_agents_a_task_to_which_nobody_returns_is_over():
    world, _ = started(2, restart_grace=10)
    world.start()
    x = world.agent("x", nodes=(1, 2)).register()
    x.drop()
    world.advance(11)
    assert not world.machine.tasks


def test_new_agents_of_a_restored_task_are_taken_in_when_an_old_one_returns():
    world, (a, _) = started(2, restart_grace=10)
    world.start()
    x = world.agent("x").start()
    assert not x.all(wire.Registered)
    a.register()
    assert x.last(wire.Grant).group_rank == 2


def test_ended_tasks_do_not_come_back():
    world, (a, b) = started(2)
    a.exit()
    b.exit()
    assert world.task().over is True
    world.start()
    assert not world.machine.tasks
    assert not world.disk
    assert world.names(None)[-1] == "coordinator_started"


def test_agents_of_the_next_run_wait_until_the_ended_task_is_left():
    world, (a, b) = started(2)
    a.exit()
    b.exit()
    x = world.agent("x", nodes=(1, 1)).start()
    assert not x.inbox
    a.bye(succeeded=True)
    b.bye(succeeded=True)
    assert x.last(wire.Grant).group_world == 1
    assert world.task().created_at == world.now


def test_a_coordinator_without_its_store_rebuilds_the_task_from_the_agents():
    world, (a, b) = started(2, restart_grace=10)
    joiner = world.agent("c").start().launch()
    joiner.hello()
    world.disk.clear()
    world.oracles["t"].goes.clear()
    restart(world, b, a, joiner)
    joiner.ready(0)
    new = world.agent("n").start()
    assert not new.all(wire.Grant), "who has not told yet may hold the slot"
    world.advance(9)
    assert [epoch.number for epoch in a.all(wire.Epoch)] == [1]
    world.advance(2)
    epoch = a.last(wire.Epoch)
    assert (epoch.number, epoch.kind) == (2, "fail")
    assert members(world) == ["b/0#1", "a/0#1"]
    assert new.all(wire.Grant)
    settle(world)
    assert (world.task().epoch.kind, members(world)) == ("join", ["b/0#1", "a/0#1", "c/0#1"])


def test_an_idle_coordinator_ends_only_if_told_to():
    for exit_when_idle in (False, True):
        world = World(exit_when_idle=exit_when_idle, idle_linger=3, startup_linger=30)
        a = world.agent("a").start()
        world.advance(100)
        assert not world.stopped
        a.bye(succeeded=True)
        world.advance(2)
        assert not world.stopped
        b = world.agent("b").start()
        world.advance(5)
        b.bye(succeeded=True)
        world.advance(4)
        assert world.stopped is exit_when_idle


def test_a_coordinator_that_nobody_ever_visits_ends_after_the_startup_linger():
    world = World(exit_when_idle=True, startup_linger=30)
    world.advance(29)
    assert not world.stopped
    world.advance(2)
    assert world.stopped


def _fields(agent):
    message = agent.registration()
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_agents_that_are_lost_together_lead_to_one_epoch():
    world, (a, b, c, d) = started(4)
    for agent in (b, d):
        agent.drop()
    world.advance(world.limits.reconnect_grace)
    assert [epoch.kind for epoch in a.all(wire.Epoch)].count("fail") == 1
    assert members(world) == ["a/0#1", "c/0#1"]
    assert settle(world) == c.last(wire.Go)
    assert [event.fields["agent"] for event in world.events if event.name == "agent_lost"] == ["b", "d"]
