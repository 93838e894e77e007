"""If minimums do not fit, the best subset by weighted value runs, and the paused tasks are named."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from planner.situations import cluster, merit, states, task

from unicron_lightning.planner.search.exact import must_pause
from unicron_lightning.planner.solver import Plan, solve
from unicron_lightning.planner.state import ClusterState


def value_and_running(state: ClusterState, names: tuple[str, ...]) -> tuple[float, int]:
    """Criteria between subsets: their F at the minimum, then the number of tasks running already."""
    curves = [curve for curve in state.tasks if curve.task.name in names]
    return sum(float(curve.waf[0]) for curve in curves), sum(state.allocation.get(name, 0) > 0 for name in names)


@given(states(most_tasks=6))
@settings(max_examples=300, deadline=None)
def test_the_best_subset_that_fits_runs(state: ClusterState) -> None:
    bound = {
        curve.task.name: int(curve.workers[0]) if curve.workers.size else 10**9
        for curve in state.tasks
        if not curve.task.terms.may_pause
    }
    fitting = [
        names
        for count in range(len(bound) + 1)
        for names in itertools.combinations(bound, count)
        if sum(bound[name] for name in names) <= state.num_workers // state.unit * state.unit
    ]
    kept = tuple(name for name in bound if name not in must_pause(state))
    assert kept in fitting
    assert value_and_running(state, kept) == max(value_and_running(state, names) for names in fitting)


@given(states(), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_given_that_subset_the_plan_is_the_best(state: ClusterState, num_workers: int) -> None:
    """All but a few workers are gone: brute force over the plans that the subset allows."""
    gone = dict(state.allocation)
    short = cluster(
        [curve.task for curve in state.tasks], num_workers * state.unit, allocation=gone, lost=gone, unit=state.unit
    )
    plan = solve(short)
    paused = must_pause(short)
    assert plan.infeasible == paused
    sizes = []
    for curve in short.tasks:
        runs = [int(x) for x in curve.workers if x <= short.num_workers]
        forced = curve.task.name in paused
        sizes.append([0] if forced else [0, *runs] if curve.task.terms.may_pause else runs)
    every = [
        Plan(state=short, names=short.names, workers=workers)
        for workers in itertools.product(*sizes)
        if sum(workers) <= short.num_workers
    ]
    assert merit(plan) == max(merit(other) for other in every)


def test_a_task_that_may_be_paused_makes_room() -> None:
    tasks = [task("free", [0, 100, 200, 300]), task("bound", [0, 0, 0, 1], may_pause=False)]
    plan = solve(cluster(tasks, 3))
    assert (plan.allocation, plan.infeasible) == ({"bound": 3, "free": 0}, ())


def test_the_paused_ones_are_named() -> None:
    tasks = [
        task("large", [0.0] * 6 + [7.0] * 3, may_pause=False),
        task("one", [0.0] * 3 + [4.0] * 6, may_pause=False),
        task("two", [0.0] * 3 + [4.0] * 6, may_pause=False),
        task("idle", [0.0, 9.0]),
    ]
    plan = solve(cluster(tasks, 7))
    assert plan.allocation == {"idle": 1, "large": 0, "one": 3, "two": 3}
    assert (plan.infeasible, plan.paused) == (("large",), ("large",))


def test_a_task_too_large_for_the_cluster_is_named() -> None:
    tasks = [task("huge", [0.0] * 9 + [1.0], may_pause=False), task("never", [0.0, 0.0], may_pause=False)]
    assert solve(cluster(tasks, 5)).infeasible == ("huge", "never")


def test_of_equal_subsets_the_one_that_runs() -> None:
    tasks = [task(name, [0.0, 0.0, 5.0], may_pause=False) for name in ("a", "b", "c")]
    assert solve(cluster(tasks, 2, allocation={"b": 2})).infeasible == ("a", "c")


def test_subsets_of_equal_sums_are_equal() -> None:
    values = {"a": (1, 5.0), "b": (3, 4.0), "c": (2, 0.5), "d": (2, 1.5), "e": (2, 2.5)}
    tasks = [task(name, [0.0] * size + [flops] * 9, may_pause=False) for name, (size, flops) in values.items()]
    assert solve(cluster(tasks, 5, allocation={"e": 2})).infeasible == ("b", "c")
