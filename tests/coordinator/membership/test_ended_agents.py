"""Agents whose process has ended while a restarted coordinator waits for them."""

from __future__ import annotations

from coordinator.driver import members, settle, started

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev


def test_agents_known_to_be_dead_are_not_waited_for():
    world, _ = started(2, restart_grace=10)
    world.start()
    world.do(ev.AgentsEnded(agents=("a", "b")))
    assert not world.machine.tasks
    assert world.event("task_over").fields["succeeded"] is False


def test_an_agent_that_dies_before_it_is_back_is_not_waited_for():
    world, (a, _) = started(2, restart_grace=10)
    world.start()
    a.register()
    world.advance(1)
    assert members(world) == ["a/0#1", "b/0#1"]
    world.do(ev.AgentsEnded(agents=("b",)))
    assert members(world) == ["a/0#1"] and not world.task().restoring
    assert not [key for key in world.timers if key.kind in ("restore", "lost")]
    settle(world)
    assert a.last(wire.Go).epoch == 2


def test_word_of_an_ended_process_does_not_concern_a_connected_agent():
    world, _ = started(2)
    world.do(ev.AgentsEnded(agents=("a", "b")))
    assert members(world) == ["a/0#1", "b/0#1"]
