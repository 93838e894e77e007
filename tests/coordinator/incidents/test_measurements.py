"""Step times, transitions and lifetimes as measured while tasks run."""

from __future__ import annotations

import pytest
from coordinator.driver import FakeAgent, World, settle, started

from unicron_lightning import wire
from unicron_lightning.coordinator.state import Task


def progress(world: World, agent: FakeAgent, step: int, *, at: float | None = None, **fields: object) -> None:
    at = world.now if at is None else at
    agent.say(wire.Progress(worker=agent.worker(), step=step, metrics={}, at=at, **fields))


def steps(world: World, agent: FakeAgent, first: int, number: int, seconds: float) -> int:
    """Have the agent's worker report this many steps one after the other; return the next step's number."""
    for step in range(first, first + number):
        progress(world, agent, step)
        world.advance(seconds)
    return first + number


def tell(agent: FakeAgent, name: str, world: World, **fields: object) -> None:
    about = {"epoch": world.task().number, "step": 9, "world": 1, **fields}
    agent.say(wire.WorkerEvent(worker=agent.worker(), name=name, at=world.now, fields=about))


def measured(task: Task) -> dict[int, float]:
    return {slots: round(speed.seconds, 3) for slots, speed in task.measured.speeds.items()}


def test_step_time_is_the_median_of_intervals_after_the_first_step():
    world, (a, b) = started(2)
    world.advance(30)  # the transition belongs to the first step
    following = steps(world, a, 2, 6, 0.5)
    world.advance(20)  # a validation
    following = steps(world, a, following, 6, 0.5)
    steps(world, b, following, 5, 9.0)  # another worker's clock is not comparable
    assert measured(world.task()) == {2: 0.5}
    assert world.task().measured.speeds[2].workers == 2


def test_steps_between_two_reports_are_counted_and_clocks_are_the_workers_own():
    world, (a, _) = started(2)
    for number in range(6):
        world.advance(0.9 + 0.1 * (number % 3))  # arrives late or early
        progress(world, a, 10 + 4 * number, at=50_000.0 + 2 * number)
    assert measured(world.task()) == {2: 0.5}


def test_each_size_has_its_own_and_a_recovery_is_not_measured():
    world, (a, b, _) = started(3, nodes=(1, 4))
    settle(world)  # the two others join
    following = steps(world, a, 5, 8, 1.0)
    b.die()
    progress(world, a, following)  # of the broken epoch
    world.advance(40)
    progress(world, a, following + 1)
    settle(world)
    steps(world, a, following + 2, 6, 1.5)
    assert measured(world.task()) == {3: 1.0, 2: 1.5}


def test_small_changes_are_no_news_and_nothing_is_saved_for_them():
    world, (a, _) = started(2)
    following = steps(world, a, 2, 40, 1.0)
    before, saved = world.task().measured.speeds[2], world.disk["t"]
    following = steps(world, a, following, 40, 1.01)
    assert world.task().measured.speeds[2] is before or world.task().measured.speeds[2] == before
    assert world.disk["t"] == saved
    steps(world, a, following, 40, 1.3)
    assert measured(world.task()) == {2: 1.3}


def test_a_restarted_coordinator_knows_what_was_measured():
    world, (a, b) = started(2)
    progress(world, a, 2, flops_per_step=5e9)
    steps(world, a, 3, 8, 0.25)
    world.start()
    a.register(), b.register()
    assert measured(world.task()) == {2: 0.25}
    assert world.task().measured.flops_per_step == 5e9
    steps(world, a, 20, 20, 0.5)
    assert measured(world.task()) == {2: 0.5}, "and goes on"


def test_transitions_last_from_their_beginning_to_the_first_step_after():
    world, (a, b) = started(2, nodes=(1, 4), join_grace=0.0)
    settle(world)
    tell(a, "grown", world)
    world.advance(100)
    b.die()
    world.advance(0.2)
    settle(world)
    world.advance(0.3)
    tell(a, "recovered", world)
    world.advance(1)
    tell(a, "recovered", world)  # another of its members would report the same
    b.rendezvous().boot()
    world.advance(3)  # until the members' step boundary
    settle(world)
    world.advance(0.7)
    tell(a, "grown", world)
    seen = [(each.kind, round(each.seconds, 3)) for each in world.task().measured.transitions]
    assert seen[-2:] == [("shrink_in_place", 0.5), ("grow_in_place", 0.7)]


def test_a_broken_connection_with_nobody_gone_is_no_transition():
    world, (a, _) = started(2)
    tell(a, "started", world)
    a.say(wire.CommError(worker=a.worker(), epoch=1, error="reset"))
    world.advance(1)
    settle(world)
    tell(a, "recovered", world)
    assert world.task().measured.transitions == []


def test_a_new_life_is_a_restart_from_its_first_grant_on():
    world, (a, b) = started(2)
    a.die(), b.die()
    world.advance(5)
    a.rendezvous(), b.rendezvous()
    world.advance(4)
    a.boot(), b.boot()
    settle(world)
    world.advance(1)
    tell(b, "started", world)
    (seen,) = world.task().measured.transitions
    assert (seen.kind, seen.seconds) == ("restart", pytest.approx(5.0, abs=1.1))


def test_lifetimes_and_failures_are_counted_and_outlive_the_task():
    world, (a, b) = started(2, nodes=(1, 4))
    settle(world)
    world.advance(100)
    a.die()
    settle(world)
    world.advance(50)
    a.drop()
    world.advance(1)
    b.exit()
    b.bye(succeeded=True)
    assert not world.machine.tasks
    past = world.machine.lasting.lifetimes
    assert (past.workers_lost, past.slots_lost) == (1, 0), "a stood by when it was lost"
    assert past.slot_seconds == pytest.approx(2 * 100 + 51) == past.worker_seconds
