"""A plan contains all details of each task."""

from __future__ import annotations

import pytest
from planner.situations import cluster, task

from unicron_lightning.planner.solver import Plan, neighbours
from unicron_lightning.planner.state import ClusterState


@pytest.fixture
def state() -> ClusterState:
    tasks = [
        task("a", [0, 4, 0, 9, 10], weight=2.0),
        task("b", [0, 0, 5, 6, 6], may_pause=False),
        task("c", [0, 1, 2, 3, 4]),
    ]
    return cluster(tasks, 8, allocation={"a": 4, "b": 2, "c": 2}, lost={"a": 1}, running_seconds=100.0)


def test_each_task_in_full(state: ClusterState) -> None:
    plan = Plan(state=state, names=state.names, workers=(3, 3, 0))
    a, b, c = plan.tasks
    assert (a.num_workers_before, a.num_workers, a.num_workers_lost, a.changed) == (4, 3, 1, True)
    assert (a.waf, a.reward) == (18.0, 1800.0 - 20)
    assert (a.gain_of_last, a.gain_of_next) == (1000.0, 200.0)  # from 1 worker, as the task cannot run with 2; to 4
    assert (b.waf, b.reward) == (6.0, 600.0 - 5)
    assert (b.gain_of_last, b.gain_of_next) == (95.0, 0.0)  # with 2 its value would be the same
    assert (c.waf, c.reward, c.changed, c.gain_of_last, c.gain_of_next) == (0.0, -2.0, True, None, 100.0)
    assert a.configuration.data_parallel == 3
    assert c.configuration is None


def test_the_whole(state: ClusterState) -> None:
    plan = Plan(state=state, names=state.names, workers=(3, 3, 0))
    assert (plan.waf, plan.value) == (24.0, 1780.0 + 595 - 2)
    assert plan.allocation == {"a": 3, "b": 3, "c": 0}
    assert (plan.paused, plan.num_spare_workers) == (("c",), 2)
    assert plan.num_moved_workers == 0 + 1 + 2  # a keeps the 3 workers that it still has


def test_plans_that_say_the_same_are_equal(state: ClusterState) -> None:
    one, other = (Plan(state=each, names=("a", "b", "c"), workers=(3, 3, 0)) for each in (state, state.adopt({})))
    assert one == other
    assert one != Plan(state=state, names=("a", "b", "c"), workers=(3, 2, 0))


def test_neighbours_end_at_the_limits(state: ClusterState) -> None:
    a, b, _ = state.tasks
    assert [neighbours(state, a, x) for x in (0, 1, 3, 4)] == [(None, 1), (0, 3), (1, 4), (3, 5)]
    assert neighbours(state, b, 2) == (None, 3)  # the task may not be paused
    assert neighbours(state, a, 8) == (7, None)
