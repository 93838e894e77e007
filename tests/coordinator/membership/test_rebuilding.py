"""A coordinator without its store: who holds the task's state, and what becomes of the others."""

from __future__ import annotations

import msgspec
import pytest
from coordinator.driver import FakeAgent, World, members, settle, started

from unicron_lightning import wire
from unicron_lightning.coordinator.membership import epochs
from unicron_lightning.worker import engine


def told(agent: FakeAgent, epoch: int, *, has_state: bool, operation: str = "join") -> None:
    """Set what the agent's worker reported last."""
    name = agent.worker()
    report = wire.WorkerReady(
        worker=name, epoch=epoch, state={"step": 0, "has_state": has_state, "operation": operation}
    )
    agent.workers[name] = msgspec.structs.replace(agent.workers[name], ready=report)
    agent.epoch = max(agent.epoch, epoch)


def forgotten(world: World) -> None:
    """Start a coordinator that has nothing but what agents report."""
    world.lose_disk()
    world.start()


def fences(agent: FakeAgent) -> list[str]:
    return [fence.reason for fence in agent.all(wire.Fence)]


@pytest.mark.parametrize(
    ("operation", "stepped", "stays"),
    [("join", False, True), ("join", True, True), ("step", True, True), ("agree on model", False, False)],
)
def test_a_joiner_in_the_holders_epoch_stays_in_it(operation: str, stepped: bool, stays: bool) -> None:
    """It may have been given the state since it reported that it had none, and have finished micro-batches."""
    world, (a, b) = started(2, restart_grace=10)
    forgotten(world)
    told(a, 1, has_state=True, operation=operation)
    told(b, 1, has_state=False)
    for agent in (a, b):
        agent.register()
    if stepped:
        b.say(wire.Progress(worker=b.worker(), step=7, metrics={}))
    world.advance(11)
    assert (world.task().epoch.kind, members(world)) == ("fail", ["a/0#1", "b/0#1"] if stays else ["a/0#1"])
    assert world.task().established == members(world)
    assert not fences(b), "it joins if it has not stayed"


def test_a_holder_counts_though_joiners_have_seen_a_newer_epoch() -> None:
    """The members train in epoch 1; a joiner waits for them in epoch 2, which their agents have not received."""
    world, (a, b) = started(2, restart_grace=10)
    forgotten(world)
    told(b, 2, has_state=False)
    for agent in (b, a):
        agent.register()
    world.advance(11)
    assert (world.task().epoch.kind, members(world)) == ("fail", ["a/0#1"])
    assert not fences(b), "it joins again"
    settle(world)
    assert (world.task().epoch.kind, members(world)) == ("join", ["a/0#1", "b/0#1"])


def test_a_worker_of_an_older_epoch_is_fenced() -> None:
    """The others have continued without it, and may have computed its micro-batches again."""
    world, (a, b) = started(2, restart_grace=10)
    forgotten(world)
    told(a, 2, has_state=True)
    for agent in (a, b):
        agent.register()
    world.advance(11)
    assert members(world) == ["a/0#1"]
    assert fences(b) == ["it was in epoch 1, others are in 2"]


def test_a_worker_that_reports_too_late_is_fenced() -> None:
    """It was in a long micro-batch, which the others have computed again."""
    world, (a, b) = started(2, restart_grace=10)
    report = b.workers[b.worker()].ready
    forgotten(world)
    b.workers[b.worker()] = msgspec.structs.replace(b.workers[b.worker()], ready=None)
    for agent in (a, b):
        agent.register()
    world.advance(11)
    assert members(world) == ["a/0#1"] and not fences(b)
    assert report is not None
    state = {**report.state, "has_state": True}
    b.say(wire.WorkerReady(worker=b.worker(), epoch=2, state=state))
    assert fences(b) == ["it reported for epoch 2 after the others had resumed without it"]
    settle(world)
    assert members(world) == ["a/0#1"]


@pytest.mark.parametrize("late", [False, True])
def test_members_of_an_epoch_that_was_open_stay(late: bool) -> None:
    """A third member has died; one has stopped for the next epoch, and one still computes when it registers."""
    world, (a, b, c) = started(3, nodes=(1, 4), restart_grace=10, recovery_time=300)
    c.die()
    a.ready(2, step=5)
    forgotten(world)
    if late:  # its agent has seen the epoch, so that its report of the one before is outdated
        b.workers[b.worker()] = msgspec.structs.replace(b.workers[b.worker()], ready=None, member=True)
    else:
        told(b, 1, has_state=True, operation="step")
    for agent in (a, b):
        agent.register(went=1, epoch=2 if late or agent is a else 1)
    world.advance(60)
    if late:
        assert world.task().epoch is None, "as without the loss, the others wait for it"
        b.ready(2, step=5)
        world.advance(1)
    assert (world.task().epoch.kind, members(world)) == ("fail", ["a/0#1", "b/0#1"])
    assert not fences(a) and not fences(b)


def test_a_member_that_never_stops_is_left_behind() -> None:
    world, (a, b) = started(2, restart_grace=10, recovery_time=100)
    a.ready(2, step=5)
    forgotten(world)
    b.workers[b.worker()] = msgspec.structs.replace(b.workers[b.worker()], ready=None, member=True)
    for agent in (a, b):
        agent.register(went=1, epoch=2)
    world.advance(101)
    assert members(world) == ["a/0#1"]


def test_workers_that_were_to_join_a_task_of_which_nobody_is_left_start_anew() -> None:
    world = World(restart_grace=10)
    a = world.agent("a", nodes=(1, 4)).start().launch()
    a.hello()
    forgotten(world)
    a.register()
    assert not a.last(wire.Welcome).founder, "another might come that trains"
    world.advance(11)
    assert fences(a) == ["no member is left that it could join"]
    b = world.agent("b", nodes=(1, 4)).start().boot()
    assert members(world) == [b.worker()]


def test_coordinator_and_workers_mean_the_same_operation() -> None:
    assert epochs._JOIN == engine.JOIN
