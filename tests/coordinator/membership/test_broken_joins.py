"""Sockets break between live workers while a join is pending: the step boundary at which the join would be entered will
not come, so the members need an epoch of their own first.
"""

from __future__ import annotations

import pytest
from coordinator.driver import FakeAgent, World, members, restart, settle, started

from unicron_lightning import wire

GRACE = 0.5


def pending_join() -> tuple[World, FakeAgent, FakeAgent, FakeAgent]:
    """Create two members in the middle of a step of epoch 1, and a joiner that waits for them in epoch 2."""
    world, (a, b) = started(2, comm_error_grace=GRACE)
    c = world.agent("c").start().boot()
    c.ready(2)
    assert (world.task().number, world.task().epoch.kind, world.task().settled) == (2, "join", False)
    return world, a, b, c


def breaks(agent: FakeAgent, epoch: int) -> None:
    agent.say(wire.CommError(worker=agent.worker(), epoch=epoch, error="reset"))


def test_the_members_go_on_without_the_joiner_which_then_joins() -> None:
    world, a, b, c = pending_join()
    for agent in (a, b):
        breaks(agent, 1)
    assert world.names().count("comm_error") == 1
    world.advance(0.8 * GRACE)
    assert world.task().number == 2, "a death may still explain it"
    world.advance(0.4 * GRACE)
    assert (world.task().number, world.task().epoch.kind, members(world)) == (3, "fail", ["a/0#1", "b/0#1"])
    assert a.last(wire.Epoch) == b.last(wire.Epoch) and a.last(wire.Epoch).incident == "i1"
    assert c.last(wire.Epoch).number == 2 and not c.all(wire.Fence)
    settle(world)
    assert (world.task().number, world.task().epoch.kind) == (4, "join")
    assert members(world) == ["a/0#1", "b/0#1", "c/0#1"]
    settle(world)
    assert c.last(wire.Go).epoch == 4
    world.advance(10 * GRACE)
    assert world.task().number == 4


def test_a_death_in_time_explains_it() -> None:
    world, a, b, _ = pending_join()
    breaks(a, 1)
    b.die()
    assert (world.task().number, world.task().epoch.kind, members(world)) == (3, "fail", ["a/0#1"])
    settle(world)
    assert (world.task().number, members(world)) == (4, ["a/0#1", "c/0#1"])
    settle(world)
    world.advance(10 * GRACE)
    assert world.task().number == 4, "the broken sockets are long mended"


@pytest.mark.parametrize(("who", "epoch"), [("a", 2), ("c", 1), ("c", 2)])
def test_only_members_can_tell_and_only_of_the_epoch_they_are_in(who: str, epoch: int) -> None:
    """No member is in the pending epoch yet, and the joiner is in none."""
    world, *agents = pending_join()
    breaks(next(agent for agent in agents if agent.name == who), epoch)
    world.advance(10 * GRACE)
    assert world.task().number == 2 and "comm_error" not in world.names()


def test_a_restarted_coordinator_hears_of_it_again() -> None:
    """Its timers are lost with it; the members wait in the step for its message."""
    world, a, b, c = pending_join()
    breaks(a, 1)
    restart(world, a, b, c)
    breaks(b, 1)
    world.advance(1.2 * GRACE)
    assert (world.task().number, world.task().epoch.kind, members(world)) == (3, "fail", ["a/0#1", "b/0#1"])


def test_a_join_that_is_published_meanwhile_does_not_hide_the_error() -> None:
    """The members of the broken epoch would wait for ever: they do not reach the boundary at which the join begins."""
    world, (a, _) = started(2, comm_error_grace=GRACE)
    breaks(a, 1)
    c = world.agent("c").start().boot()
    assert (world.task().number, world.task().epoch.kind) == (2, "join")
    world.advance(1.2 * GRACE)
    assert (world.task().number, world.task().epoch.kind, members(world)) == (3, "fail", ["a/0#1", "b/0#1"])
    settle(world)
    assert (world.task().epoch.kind, members(world)) == ("join", ["a/0#1", "b/0#1", "c/0#1"])
    settle(world)
    world.advance(10 * GRACE)
    assert world.task().number == 4 and not c.all(wire.Fence)


def test_a_member_that_finishes_meanwhile_does_not_hide_the_error() -> None:
    world, a, b, _ = pending_join()
    breaks(a, 1)
    b.exit()
    assert (world.task().number, members(world)) == (3, ["a/0#1", "c/0#1"])
    world.advance(1.2 * GRACE)
    assert (world.task().number, world.task().epoch.kind, members(world)) == (4, "fail", ["a/0#1"])


@pytest.mark.parametrize("restarts", [False, True])
def test_a_go_that_was_lost_with_its_connection_is_sent_again_before_the_next_join(restarts: bool) -> None:
    """Without it the worker would wait for the next epoch, while the others wait for it in the one before."""
    world, a, b, c = pending_join()
    d = world.agent("d").start().boot()
    for agent in (a, b):
        agent.ready(2)
    assert (world.task().number, world.task().epoch.kind, world.task().settled) == (3, "join", False)
    missed = c.last(wire.Go)
    c.inbox.clear()  # the connection broke before it came
    c.epoch = 2
    if restarts:
        world.start()
    else:
        c.drop()
    for agent in (a, b, c, d):
        if agent.conn is None:
            agent.register()
    assert [m for m in c.inbox if isinstance(m, wire.Go | wire.Epoch)] == [missed, world.task().epoch]
    assert missed.epoch == 2
    settle(world)
    assert world.task().go.epoch == 3 and world.task().earlier is None
