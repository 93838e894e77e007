"""The cost of a larger or smaller size equals the difference of the best plan with it from the best plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from planner.situations import SHAPES, cluster, every_plan, merit, shaped, states, task

from unicron_lightning.planner.plan import neighbours
from unicron_lightning.planner.solver import explain, solve
from unicron_lightning.planner.state import ClusterState


@given(states())
@settings(max_examples=150, deadline=None)
def test_alternatives_equal_brute_force(state: ClusterState) -> None:
    plan = solve(state)
    if plan.infeasible:
        return
    every = list(every_plan(state))
    for index, said in enumerate(explain(plan)):
        assert (said.name, said.num_workers) == (plan.names[index], plan.workers[index])
        for size, found in zip(
            neighbours(state, state.tasks[index], plan.workers[index]), (said.fewer, said.more), strict=True
        ):
            others = [merit(other) for other in every if other.workers[index] == size]
            assert (found is None) == (not others)
            if found is not None:
                assert found.num_workers == found.plan.workers[index] == size
                assert merit(found.plan) == max(others)
                assert found.cost == plan.value - max(others)[0]


@pytest.mark.parametrize("kind", SHAPES)
def test_nothing_else_is_better(kind: str) -> None:
    state = shaped(kind, 8, 200, seed=6)
    said = explain(solve(state))
    costs = [other.cost for each in said for other in (each.fewer, each.more) if other is not None]
    assert len(costs) >= 8 and min(costs) >= 0.0
    assert kind in ("linear", "holes") or min(costs) > 0.0


def test_a_plan_that_had_to_pause_tasks_is_explained_as_well() -> None:
    tasks = [task(name, [0.0, 0.0, 5.0, 7.0], may_pause=False) for name in ("a", "b")]
    a, b = explain(solve(cluster(tasks, 3)))
    assert (a.num_workers, a.fewer.num_workers, a.fewer.cost, a.more) == (3, 2, 20.0, None)
    assert (b.num_workers, b.fewer, b.more) == (0, None, None)
