"""Agents that get SIGTERM: some leave, all are saved first, and those that cannot be spared are stopped."""

from __future__ import annotations

import pytest
from coordinator.driver import World, running

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev


def test_all_members_write_a_checkpoint_and_are_stopped_with_the_status_of_a_signal() -> None:
    world = World()
    a, b = running(world, 2, nodes=(2, 2))
    a.say(wire.Departing())
    assert not a.all(wire.Stop), "the others may follow"
    b.say(wire.Departing())
    (pauses,) = [event for event in world.events if event.name == "task_pauses"]
    assert pauses.fields["reason"] == "departure"
    assert a.last(wire.Epoch).kind == "pause"
    for agent in (a, b):
        agent.ready(world.task("t").number)
    assert not a.all(wire.Stop)
    a.saved("/pause", 7, parting=True)
    assert a.last(wire.Stop).needed and b.last(wire.Stop).needed
    assert world.task("t").checkpoint.path == "/pause"
    world.advance(10.0)
    assert len(a.all(wire.Stop)) == 1


def test_one_that_cannot_be_spared_is_stopped_a_moment_later_and_the_others_wait() -> None:
    world = World()
    a, b = running(world, 2, nodes=(2, 2))
    a.say(wire.Departing())
    world.start()  # the coordinator restarts meanwhile
    for agent in (a, b):
        agent.register()
    world.advance(3.0)
    assert a.last(wire.Stop).needed and not b.all(wire.Stop)
    assert "task_pauses" not in world.names()


@pytest.mark.parametrize("written", [True, False])
def test_a_cancelled_task_ends_once_it_is_saved_or_the_time_is_over(written: bool) -> None:
    world = World()
    a, b = running(world, 2)
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
    assert a.last(wire.TaskOver).reason == b.last(wire.TaskOver).reason == "cancelled"


def test_a_cancel_meanwhile_ends_the_task_at_once() -> None:
    world = World()
    a, _ = running(world, 2)
    world.do(ev.Cancel(task="t", save=True))
    world.do(ev.Cancel(task="t"))
    assert a.last(wire.TaskOver).reason == "cancelled"
