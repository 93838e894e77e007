"""Failures of a task that recovers in process, through the machine's public inputs."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator.driver import World, members, running, settle, started
from coordinator.fake_agent import FakeAgent

from unicron_lightning import wire
from unicron_lightning.coordinator.api.status import task_status


def test_joiners_of_an_unsettled_join_become_candidates_again_when_a_member_dies():
    world, (_, b) = started(2)
    c = world.agent("c").start().boot()
    assert members(world) == ["a/0#1", "b/0#1", "c/0#1"]
    c.ready(2)
    b.die()
    assert members(world) == ["a/0#1"]
    assert world.task().epoch.kind == "fail"
    settle(world)
    assert (world.task().epoch.kind, members(world)) == ("join", ["a/0#1", "c/0#1"])
    assert c.last(wire.Epoch).number == 4
    settle(world)
    assert c.last(wire.Go).epoch == 4


def test_a_joiner_that_dies_while_joining_is_dropped():
    world, _ = started(2)
    c = world.agent("c").start().boot()
    c.die()
    assert (world.task().epoch.kind, members(world)) == ("fail", ["a/0#1", "b/0#1"])
    settle(world)
    assert world.task().number == 3


def test_a_candidate_that_dies_changes_nothing():
    world, _ = started(1)
    b = world.agent("b").start().launch()
    b.hello()
    b.die()
    assert world.task().number == 1
    assert world.event("worker_died").incident is None


def test_a_founder_that_dies_before_the_first_go_leaves_an_init_epoch_of_the_others():
    world = World()
    a, b = (world.agent(name, nodes=(2, 2)).start() for name in "ab")
    a.boot()
    b.boot()
    b.die()
    assert (world.task().number, world.task().epoch.kind, members(world)) == (2, "init", ["a/0#1"])
    assert a.last(wire.Epoch).hold


def test_a_communication_error_without_a_death_renews_the_epoch_in_place():
    world, (a, b) = started(2, comm_error_grace=0.5)
    for agent in (a, b):
        agent.say(wire.CommError(worker=agent.worker(), epoch=1, error="reset"))
    assert world.names().count("comm_error") == 1
    world.advance(0.4)
    assert world.task().number == 1
    world.advance(0.2)
    assert (world.task().number, world.task().epoch.kind, members(world)) == (2, "fail", ["a/0#1", "b/0#1"])
    assert a.last(wire.Epoch).incident == "i1"
    settle(world)
    b.say(wire.CommError(worker=b.worker(), epoch=1, error="late"))
    world.advance(5)
    assert world.task().number == 2


def test_a_communication_error_is_explained_by_a_death():
    world, (a, b) = started(2, comm_error_grace=0.5)
    a.say(wire.CommError(worker=a.worker(), epoch=1, error="reset"))
    world.advance(0.1)
    b.die()
    settle(world)
    world.advance(5)
    assert world.task().number == 2
    assert world.event("epoch_published").incident == "i1"


@pytest.mark.parametrize("how", ["done", "exit", "bye"])
def test_finished_members_do_not_change_the_epoch_and_the_last_one_ends_the_task(how):
    world, (a, b) = started(2)
    standby = world.agent("s").start()

    def finish(agent):
        if how == "done":
            agent.say(wire.WorkerDone(worker=agent.worker()))
        if how != "bye":
            agent.exit()
        agent.bye(succeeded=True)

    finish(a)
    assert world.task().number == 1
    assert not standby.all(wire.TaskOver)
    finish(b)
    assert standby.last(wire.TaskOver).succeeded
    standby.bye(succeeded=True)
    assert "t" not in world.machine.tasks
    assert "t" not in world.disk
    assert world.names()[-1] == "agent_left"
    assert world.names().count("worker_finished") == 2
    assert world.event("task_over").fields["succeeded"] is True


def test_a_record_that_an_agent_repeats_does_not_replace_one_of_a_later_epoch_or_life():
    a, b = running(world := World(), 2)
    old = wire.Record(key="k", value="of epoch 1", epoch=1)
    a.say(old)
    a.die()
    b.ready(world.task().number, step=3)
    a.rendezvous().boot()
    settle(world)
    for value in ("first", "second"):
        b.say(wire.Record(key="k", value=value, epoch=world.task().number))
    a.say(old)  # its connection broke, and is there again
    assert world.task().records == {"k": "second"}
    for agent in (a, b):
        agent.die()
    for agent in (a, b):
        agent.rendezvous().boot()
    assert world.task().life == 2
    a.say(old)
    assert world.task().records == {}
    a.say(wire.Record(key="k", value="new", epoch=world.task().number))
    assert world.task().records == {"k": "new"}


@pytest.mark.parametrize("first", ["failure", "success"])
@pytest.mark.parametrize(
    ("reported", "how"), [(True, {}), (False, {"cause": "exit", "code": 1}), (False, {"code": 11})]
)
def test_a_program_that_fails_after_the_training_fails_the_task(first: str, reported: bool, how: Any) -> None:
    a, b = running(world := World(), 2)
    if first == "success":
        b.exit()
        b.bye(succeeded=True)
    if reported:
        about = {"phase": "script", "step": 9, "at": world.now, "details": {}, "ends": True}
        a.say(wire.ErrorReport(worker=a.worker(), kind="other_software_error", cause="OSError: no space", **about))
        a.workers.clear()
    else:
        a.die(**how)
    if first == "failure":
        b.exit()
        b.bye(succeeded=True)
    assert a.last(wire.TaskOver).succeeded is False
    reason = world.event("task_over").fields["reason"]
    assert "a worker's program has failed after those of others had finished" in reason
    assert a.worker() in reason and (not reported or "OSError: no space" in reason)


@pytest.mark.parametrize("lost", [False, True])
def test_a_member_that_is_killed_after_the_training_does_not_fail_the_task(lost: bool) -> None:
    a, b = running(world := World(), 2)
    b.exit()
    b.bye(succeeded=True)
    if lost:
        a.drop()
        world.advance(60)
    else:
        a.die()
    assert world.event("task_over").fields["succeeded"] is True


def test_a_failure_before_the_last_epoch_is_not_the_tasks() -> None:
    """The others have trained on without the worker, and no end of a program was lost."""
    a, b, c = running(world := World(), 3)
    a.die(cause="exit", code=1)
    for agent in (b, c):
        agent.ready(world.task().number, step=5)
    for agent in (b, c):
        agent.exit()
        agent.bye(succeeded=True)
    a.bye(succeeded=False)
    assert world.event("task_over").fields["succeeded"] is True


def test_a_pending_epoch_goes_on_without_a_member_that_finished():
    world, (a, b, c) = started(3)
    c.die()
    a.say(wire.WorkerDone(worker=a.worker()))
    assert (world.task().number, members(world)) == (3, ["b/0#1"])
    b.ready(3)
    assert b.last(wire.Go).epoch == 3
    assert not a.all(wire.Fence)


def test_nobody_joins_a_task_whose_end_has_begun():
    world, (a, b) = started(2)
    a.say(wire.WorkerDone(worker=a.worker()))
    c = world.agent("c").start()
    assert not c.all(wire.Grant)
    b.say(wire.WorkerDone(worker=b.worker()))
    assert c.last(wire.TaskOver).succeeded


def test_when_no_member_survives_a_new_life_begins_from_the_newest_checkpoint():
    world, (a, b) = started(2, nodes=(1, 4))
    settle(world)
    candidate = world.agent("c").start().launch()
    candidate.hello()
    a.say(wire.Record(key="k", value="1"))
    a.saved("/ckpt/5", 5)
    b.saved("/ckpt/4", 4)
    a.say(wire.Progress(worker=a.worker(), step=7, metrics={}))
    b.say(wire.Progress(worker=b.worker(), step=6, metrics={}))
    a.drop()
    world.advance(1)
    assert task_status(world.task())["progress"]["step"] == 7, "the death of its reporter changes nothing"
    b.drop()
    world.advance(1)
    assert world.event("task_restarts").fields == {"life": 2, "path": "/ckpt/5", "step": 5, "memory": None}
    assert world.task().committed == 0
    assert candidate.last(wire.Fence).worker == "c/0#1"
    candidate.die()
    candidate.rendezvous().launch()
    welcome = candidate.hello()
    assert (welcome.founder, welcome.life, candidate.resumes()) == (True, 2, ["/ckpt/5", "/ckpt/4"])
    candidate.say(wire.Lookup(worker=candidate.worker(), key="k"))
    assert candidate.last(wire.LookupReply).value is None
    candidate.ready(0)
    epoch = candidate.last(wire.Epoch)
    assert (epoch.kind, epoch.number, epoch.incident) == ("restart", 4, "i1")
    settle(world)
    assert world.task().incident is None


def test_a_new_life_also_waits_for_min_nodes():
    world, (a, b) = started(2, nodes=(2, 2))
    a.die()
    b.die()
    a.rendezvous().boot()
    assert world.task().epoch is None
    b.rendezvous().boot()
    assert (world.task().epoch.kind, members(world)) == ("restart", ["a/0#2", "b/0#2"])


def test_records_can_be_looked_up_by_others():
    _, (a, b) = started(2)
    a.say(wire.Record(key="k", value='{"x": 1}'))
    b.say(wire.Lookup(worker=b.worker(), key="k"))
    assert b.last(wire.LookupReply) == wire.LookupReply(worker="b/0#1", key="k", value='{"x": 1}')
    b.say(wire.Lookup(worker=b.worker(), key="other"))
    assert b.last(wire.LookupReply).value is None


def test_progress_is_shown_but_not_stored():
    world, (a, _) = started(2)
    disk = dict(world.disk)
    a.say(wire.Progress(worker=a.worker(), step=17, metrics={"loss": 2.0}))
    assert world.task().workers["a/0#1"].step == 17
    assert world.disk == disk


def test_strangers_are_fenced_but_not_those_that_end_well():
    _, (a, b) = started(2)
    old = b.worker()
    b.die()
    b.rendezvous().launch()
    b.say(wire.WorkerReady(worker=old, epoch=2, state={}))
    b.say(wire.WorkerHello(worker=old, local_rank=0, pid=1, capacity=4))
    b.say(wire.WorkerReady(worker="b/7#2", epoch=0, state={}))
    b.say(wire.Progress(worker=a.worker(), step=1, metrics={}))
    assert [fence.worker for fence in b.all(wire.Fence)] == [old, old, "b/7#2", a.worker()]
    a.say(wire.WorkerDone(worker=a.worker()))
    a.say(wire.Progress(worker=a.worker(), step=9, metrics={}))
    assert not a.all(wire.Fence)


def test_tasks_do_not_touch_each_other():
    world = World()
    a = world.agent("a", task="one").start().boot()
    b = world.agent("b", task="two").start().boot()
    settle(world, "one")
    settle(world, "two")
    seen = len(b.inbox)
    a.die()
    a.bye(succeeded=False)
    assert "one" not in world.machine.tasks
    assert len(b.inbox) == seen
    assert world.names("one")[-2:] == ["task_over", "incident_closed"]


def replace_at_the_end(world: World, agent: FakeAgent) -> None:
    """Let the agent's worker die; its successor comes to the end of its script without the task's state."""
    agent.die()
    settle(world)
    agent.rendezvous()
    agent.launch().hello()
    agent.say(wire.WorkerReady(worker=agent.worker(), epoch=0, state={"idle": True}))


def test_a_worker_at_the_end_of_its_script_without_the_tasks_state_is_no_end_of_the_task():
    """It waits for the end of the task, and starts again with the others if no member survives."""
    world, (a, b) = started(2, hold_timeout=1e6)
    replace_at_the_end(world, b)
    world.advance(2 * world.limits.watch.start_time)
    assert not b.all(wire.Inspect) and members(world) == ["a/0#1"]
    a.die()
    assert world.task().over is None and world.task().life == 2
    assert b.last(wire.Fence).worker == "b/0#2"
    for agent in (a, b):
        agent.rendezvous()
        agent.boot()
    settle(world)
    assert members(world) == ["a/0#2", "b/0#3"]


def test_a_worker_that_waits_at_the_end_of_its_script_learns_of_the_tasks_end():
    world, (a, b) = started(2)
    replace_at_the_end(world, b)
    a.exit()
    assert b.last(wire.TaskOver).succeeded
