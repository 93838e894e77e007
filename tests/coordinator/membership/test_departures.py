"""Agents that get SIGTERM: some leave, all are saved first, and those that cannot be spared are stopped."""

from __future__ import annotations

import pytest
from coordinator.driver import FakeAgent, World, members, settle, started

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev


def test_all_members_write_a_checkpoint_and_are_stopped_with_the_status_of_a_signal() -> None:
    world, (a, b) = started(2, nodes=(2, 2))
    a.say(wire.Departing())
    assert not a.all(wire.Stop), "the others may follow"
    b.say(wire.Departing())
    (pauses,) = [event for event in world.events if event.name == "task_pauses"]
    assert pauses.fields["reason"] == "departure"
    assert a.last(wire.Epoch).kind == "leave"
    for agent in (a, b):
        agent.ready(world.task("t").number)
    assert b.last(wire.Epoch).kind == "pause" and not b.all(wire.Stop)
    b.ready(world.task("t").number)
    b.saved("/pause", 7, parting=True)
    assert a.last(wire.Stop).needed and b.last(wire.Stop).needed
    assert world.task("t").checkpoint.path == "/pause"
    world.advance(10.0)
    assert len(a.all(wire.Stop)) == 1


def trains(count: int, nodes: tuple[int, int]) -> tuple[World, list[FakeAgent]]:
    """All agents of a task as members of a settled epoch."""
    world, agents = started(count, nodes=nodes)
    while len(members(world)) < count or not world.task().settled:
        settle(world)
    return world, agents


def test_workers_leave_at_a_step_boundary() -> None:
    world, (a, b, c) = trains(3, nodes=(2, 4))
    b.say(wire.Departing())
    epoch = world.task().epoch
    assert (epoch.kind, epoch.hold) == ("leave", False)
    assert members(world) == [a.worker(), c.worker()]
    assert not b.all(wire.Stop), "it takes part in the step"
    for agent in (a, b, c):
        agent.ready(epoch.number, 0, step=1)
    assert [stop.needed for stop in b.all(wire.Stop)] == [False]


def test_members_that_stay_hold_their_state_below_the_minimum() -> None:
    world, (a, b) = trains(2, nodes=(2, 4))
    b.say(wire.Departing())
    world.start()  # the coordinator restarts meanwhile
    for agent in (a, b):
        agent.register()
        agent.ready(1, 0, step=1)
    world.advance(3.0)
    for _ in range(2):
        for agent in (a, b):
            agent.ready(world.task().number, 0, step=1)
    epoch = world.task().epoch
    assert (epoch.kind, epoch.hold, members(world)) == ("leave", True, [a.worker()])
    assert [stop.needed for stop in b.all(wire.Stop)] == [False]
    assert not a.all(wire.Stop) and "task_pauses" not in world.names()
    c = world.agent("c", nodes=(2, 4)).start()
    c.boot()
    settle(world)
    assert (members(world), world.task().epoch.hold) == ([a.worker(), c.worker()], False)


def test_a_drain_below_the_minimum_does_not_leave_with_it() -> None:
    world, (a, b, c) = trains(3, nodes=(2, 4))
    b.say(wire.Departing())
    b.drop()
    for agent in (a, c):
        agent.ready(world.task().number, 0, step=1)
    c.drain(True)
    assert members(world) == [a.worker(), c.worker()]


def test_a_held_one_saves() -> None:
    world, (a, b) = trains(2, nodes=(2, 4))
    a.say(wire.Departing())
    for agent in (a, b):
        agent.ready(world.task().number, 0, step=1)
    assert world.task().epoch.hold
    b.say(wire.Departing())
    assert (world.task().epoch.kind, world.task().epoch.hold) == ("pause", False)
    b.ready(world.task().number, 0, step=1)
    b.saved("/pause", 1, parting=True)
    assert [stop.needed for stop in b.all(wire.Stop)] == [True]
    assert [stop.needed for stop in a.all(wire.Stop)] == [False]


def test_a_script_that_has_not_begun_is_stopped_at_once() -> None:
    world = World()
    a, _ = (world.agent(name, nodes=(2, 2)).start() for name in "ab")
    a.say(wire.Departing())
    assert [stop.needed for stop in a.all(wire.Stop)] == [True]


@pytest.mark.parametrize("written", [True, False])
def test_a_cancelled_task_ends_once_it_is_saved_or_the_time_is_over(written: bool) -> None:
    world, (a, b) = started(2)
    world.do(ev.Cancel(task="t", save=True))
    for agent in (a, b):
        agent.ready(world.task("t").number)
    assert not a.all(wire.TaskOver)
    world.do(ev.Cancel(task="t", save=True))
    assert world.names().count("task_pauses") == 1
    if written:
        b.saved("/x", 7, parting=True)
    else:
        world.advance(world.limits.pause_grace)
    resumes = "; step 7 is saved in /x; to resume, give this path to trainer.fit(ckpt_path=...)" if written else ""
    assert a.last(wire.TaskOver).reason == b.last(wire.TaskOver).reason == f"cancelled{resumes}"
    assert world.machine.lasting.results[-1].state == "cancelled"


def test_a_task_whose_agents_were_all_asked_to_end_is_cancelled() -> None:
    world, (a, b) = started(2)
    for agent in (a, b):
        agent.say(wire.Departing())
    for agent in (a, b):
        agent.ready(world.task().number, 0, step=7)  # a leaves
    b.ready(world.task().number, 0, step=7)
    b.saved("/x", 7, parting=True)
    for agent in (a, b):
        agent.bye(succeeded=False)
    end = world.machine.lasting.results[-1]
    assert end.state == "cancelled"
    why = "all agents were asked to end, by SIGTERM or Ctrl-C"
    assert end.reason == f"{why}; step 7 is saved in /x; to resume, give this path to trainer.fit(ckpt_path=...)"


def test_a_cancel_meanwhile_ends_the_task_at_once() -> None:
    world, (a, _) = started(2)
    world.do(ev.Cancel(task="t", save=True))
    world.do(ev.Cancel(task="t"))
    assert a.last(wire.TaskOver).reason == "cancelled"
