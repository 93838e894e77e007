"""Life of a task that recovers in process, through the machine's public inputs."""

from __future__ import annotations

from coordinator.driver import World, members, settle, started

from unicron_lightning import wire


def test_nothing_is_granted_before_min_nodes_wait():
    world = World()
    a = world.agent("a", nodes=(2, 3)).start()
    assert not a.all(wire.Grant)
    b = world.agent("b", nodes=(2, 3)).start()
    grants = [a.last(wire.Grant), b.last(wire.Grant)]
    assert [(grant.group_rank, grant.group_world) for grant in grants] == [(0, 2), (1, 2)]
    assert {grant.master for grant in grants} == {a.store}


def test_a_later_agent_is_granted_at_once_and_a_surplus_one_stands_by_until_one_leaves():
    world = World()
    a, b, c = (world.agent(name, nodes=(1, 2)).start() for name in "abc")
    assert (a.last(wire.Grant).group_world, b.last(wire.Grant).group_world) == (1, 2)
    assert not c.all(wire.Grant)
    b.bye(succeeded=False)
    assert c.last(wire.Grant).group_rank == 1


def test_a_restarting_agent_keeps_its_slot_before_one_that_stands_by_and_moves_to_the_end():
    world, (a, b) = started(2, nodes=(2, 2))
    standby = world.agent("s").start()
    a.die()
    a.rendezvous()
    assert a.last(wire.Grant).group_rank == 1
    assert world.task().slots == ["b", "a"]
    assert not standby.all(wire.Grant)
    assert b.all(wire.Grant)[1:] == []


def test_ranks_are_told_when_all_of_a_batch_have_told_their_size():
    world = World()
    a, b = world.agent("a", nodes=(2, 3), size=2).start(), world.agent("b", nodes=(2, 3), size=3).start()
    a.launch()
    assert not a.all(wire.Ranks)
    b.launch()
    assert a.last(wire.Ranks) == wire.Ranks(round=1, base=0, world=5)
    assert b.last(wire.Ranks) == wire.Ranks(round=1, base=2, world=5)
    c = world.agent("c", nodes=(2, 3), size=1).start().launch()
    assert c.last(wire.Ranks) == wire.Ranks(round=1, base=5, world=6)
    assert len(a.all(wire.Ranks)) == 1


def test_a_batch_does_not_wait_for_the_size_of_an_agent_that_left():
    world = World()
    a, b = (world.agent(name, nodes=(2, 2)).start() for name in "ab")
    a.launch()
    b.bye(succeeded=False)
    assert a.last(wire.Ranks).world == 1


def test_first_epoch_waits_for_min_nodes_complete_slots_and_orders_by_slot_and_local_rank():
    world = World()
    a, b = world.agent("a", nodes=(2, 2), size=2).start(), world.agent("b", nodes=(2, 2), size=2).start()
    for agent in (b, a):
        agent.launch()
        for local_rank in (1, 0):
            welcome = agent.hello(local_rank)
            assert (welcome.founder, welcome.life, welcome.resume) == (True, 1, ())
    b.ready(0, 0)
    b.ready(0, 1)
    a.ready(0, 1)
    assert not a.all(wire.Epoch)
    a.ready(0, 0)
    epoch = a.last(wire.Epoch)
    assert epoch == b.last(wire.Epoch)
    assert (epoch.number, epoch.kind, epoch.hold, epoch.incident) == (1, "init", False, None)
    assert members(world) == ["a/0#1", "a/1#1", "b/0#1", "b/1#1"]
    assert epoch.store == a.store
    assert not a.all(wire.Go)
    go = settle(world)
    assert [(standing.position, standing.first, standing.count) for standing in go.standings] == [(0, 0, 4)]
    assert (a.all(wire.Go), b.all(wire.Go)) == ([go], [go])


def test_members_are_no_more_than_the_task_can_use_and_that_is_no_reason_to_hold():
    world = World()
    agents = [world.agent(name, nodes=(3, 3)).start() for name in "abc"]
    for agent in agents:
        agent.boot(capacity=2)
    assert members(world) == ["a/0#1", "b/0#1"]
    assert not agents[0].last(wire.Epoch).hold
    settle(world)
    assert world.task().number == 1
    agents[2].ready(0)  # it knows that it is no founder and has set itself up
    assert world.task().number == 1
    agents[0].die()
    settle(world)
    assert members(world) == ["b/0#1", "c/0#1"]


def test_a_founder_that_comes_too_late_for_the_first_epoch_joins_when_it_says_so_anew():
    world = World()
    a, b = world.agent("a").start(), world.agent("b").start()
    a.launch()
    b.launch()
    assert a.hello().founder and b.hello().founder
    a.ready(0)
    assert members(world) == ["a/0#1"]
    assert not b.last(wire.Welcome).founder
    a.ready(1)
    worker = "b/0#1"
    b.say(wire.WorkerReady(worker=worker, epoch=0, state={"step": 0, "has_state": True, "founder": True}))
    assert world.task().number == 1, "what it said as a founder makes it no candidate"
    b.say(wire.WorkerReady(worker=worker, epoch=0, state={"step": 0, "has_state": False}))
    assert members(world) == ["a/0#1", "b/0#1"]


def test_a_joiner_is_admitted_when_the_current_epoch_is_settled():
    world = World()
    a = world.agent("a").start().boot()
    b = world.agent("b").start()
    b.launch()
    assert not b.hello().founder
    b.ready(0)
    assert world.task().number == 1
    a.ready(1)
    epoch = b.last(wire.Epoch)
    assert (epoch.number, epoch.kind) == (2, "join")
    assert members(world) == ["a/0#1", "b/0#1"]
    assert a.last(wire.Epoch) == epoch
    assert [go.epoch for go in a.all(wire.Go)] == [1]
    settle(world)
    assert b.last(wire.Go).epoch == 2


def test_workers_of_one_agent_join_together():
    world, _ = started(1, join_grace=0.5)
    b = world.agent("b", size=2).start().launch()
    b.hello(0)
    b.hello(1)
    b.ready(0, 0)
    world.advance(0.4)
    assert world.task().number == 1
    b.ready(0, 1)
    assert members(world) == ["a/0#1", "b/0#1", "b/1#1"]


def test_a_worker_does_not_wait_for_its_sibling_for_ever():
    world, _ = started(1, join_grace=0.5)
    b = world.agent("b", size=2).start().launch()
    b.hello(0)
    b.ready(0, 0)
    world.advance(0.6)
    assert members(world) == ["a/0#1", "b/0#1"]
    settle(world)
    b.hello(1)
    b.ready(0, 1)
    assert members(world) == ["a/0#1", "b/0#1", "b/1#1"]


def test_a_death_leads_to_one_epoch_of_the_survivors_under_one_incident():
    world, (a, b, c) = started(3, nodes=(3, 3))
    a.die(code=9)
    epoch = b.last(wire.Epoch)
    assert (epoch.number, epoch.kind, epoch.incident, epoch.hold) == (2, "fail", "i1", True)
    assert members(world) == ["b/0#1", "c/0#1"]
    assert epoch.store == b.store
    assert [message.number for message in a.all(wire.Epoch)] == [1]
    died = world.event("worker_died")
    assert died.incident == "i1"
    assert died.fields == {
        "worker": "a/0#1",
        "cause": "signal",
        "code": 9,
        "died_at": 1000.0,
        "received_at": 1000.0,
    }
    c.die()
    assert b.last(wire.Epoch).incident == "i1", "a second failure before recovery belongs to the first"
    settle(world)
    b.say(wire.WorkerEvent(worker="b/0#1", name="recovered", at=1001.0, fields={"step": 3}))
    event = world.event("worker.recovered")
    assert event.incident == "i1"
    assert event.fields == {"step": 3, "worker": "b/0#1", "at": 1001.0}
    a.rendezvous().boot()
    assert a.last(wire.Epoch).incident is None
    settle(world)
    b.die()
    assert a.last(wire.Epoch).incident == "i2"


def test_hold_is_lifted_by_the_join_that_brings_the_nodes_back():
    world, (a, b) = started(2, nodes=(2, 2))
    a.die()
    settle(world)
    assert b.last(wire.Epoch).hold
    a.rendezvous().boot()
    assert (a.last(wire.Epoch).kind, a.last(wire.Epoch).hold) == ("join", False)
    assert members(world) == ["b/0#1", "a/0#2"]


def test_a_lost_agent_takes_all_its_workers_in_one_epoch():
    world, (_, b) = started(2, size=2, reconnect_grace=0.25)
    b.drop()
    world.advance(0.2)
    assert world.task().number == 1
    world.advance(0.1)
    assert world.task().number == 2
    assert members(world) == ["a/0#1", "a/1#1"]
    assert world.event("agent_lost").incident == "i1"
    assert world.event("worker_died").fields["cause"] == "node lost"


def test_one_dead_worker_takes_its_siblings_with_it():
    world, (a, b) = started(2, size=2)
    b.die(0)
    assert world.task().number == 2
    assert members(world) == ["a/0#1", "a/1#1"]
    assert [fence.worker for fence in b.all(wire.Fence)] == ["b/1#1"]
    b.say(wire.WorkerDied(worker="b/1#1", cause="signal", code=9, at=1.0))
    assert world.task().number == 2
    assert world.names().count("worker_died") == 2
    assert a.last(wire.Epoch).number == 2
