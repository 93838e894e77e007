"""The cost of a larger size equals the difference of the best plan with it from the best plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from planner.situations import SHAPES, cluster, every_plan, merit, shaped, states, task

from unicron_lightning.planner.solver import explain, neighbours, solve
from unicron_lightning.planner.state import ClusterState


@given(states())
@settings(max_examples=150, deadline=None)
def test_alternatives_equal_brute_force(state: ClusterState) -> None:
    plan = solve(state)
    if plan.infeasible:
        return
    every, found = list(every_plan(state)), explain(plan)
    for index, name in enumerate(plan.names):
        _, size = neighbours(state, state.tasks[index], plan.workers[index])
        others = [merit(other) for other in every if other.workers[index] == size]
        assert (name in found) == bool(others)
        if others:
            assert found[name].num_workers == found[name].plan.workers[index] == size
            assert merit(found[name].plan) == max(others)
            assert found[name].cost == plan.value - max(others)[0]


@pytest.mark.parametrize("kind", SHAPES)
def test_nothing_else_is_better(kind: str) -> None:
    state = shaped(kind, 8, 200, seed=6)
    costs = [other.cost for other in explain(solve(state)).values()]
    assert len(costs) >= 4 and min(costs) >= 0.0
    assert kind in ("linear", "holes") or min(costs) > 0.0


def test_a_plan_that_had_to_pause_tasks_is_explained_as_well() -> None:
    tasks = [task(name, [0.0, 0.0, 5.0, 7.0], may_pause=False) for name in ("a", "b")]
    assert explain(solve(cluster(tasks, 3))) == {}, "a has all, and b had to be paused"
    (found,) = explain(solve(cluster([*tasks[:1], task("c", [0.0, 1.0])], 3))).items()
    assert (found[0], found[1].num_workers, found[1].cost) == ("c", 1, 10.0)
