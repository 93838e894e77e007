"""The solver finds the best plan for curves of any shape, compared with three independent methods."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.situations import (
    SHAPES,
    cluster,
    every_plan,
    merit,
    options,
    plain_best,
    scaled,
    shaped,
    states,
    task,
    tied,
)
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from unicron_lightning.planner.solver import Plan, foreseen, neighbours, reward_of, solve
from unicron_lightning.planner.state import ClusterState, TaskLaunched


@st.composite
def shocked(draw: st.DrawFn) -> ClusterState:
    """A small state, or its successor by some event."""
    state = draw(states(queued=1))
    launches = [TaskLaunched(task=curve.task.name) for curve in state.queued]
    event = draw(st.sampled_from([None, *foreseen(state), *launches]))
    return state if event is None else state.after(event)


@given(shocked())
@settings(max_examples=400, deadline=None)
def test_equals_brute_force(state: ClusterState) -> None:
    plan = solve(state)
    if plan.infeasible:
        assert next(every_plan(state), None) is None
        return
    assert merit(plan) == max(merit(other) for other in every_plan(state))
    assert all(x in options(state, curve) for curve, x in zip(state.tasks, plan.workers, strict=True))


@given(tied(), st.sampled_from([1.1, 0.7, 1 / 3, 0.1, 1.7e14]))
@settings(max_examples=400, deadline=None)
def test_ties_in_real_numbers_go_to_the_fewest_moves(state: ClusterState, factor: float) -> None:
    plan = solve(scaled(state, factor))
    if not plan.infeasible:
        assert merit(dataclasses.replace(plan, state=state)) == max(merit(other) for other in every_plan(state))


@given(shocked())
@settings(deadline=None)
def test_never_gives_more_than_there_is(state: ClusterState) -> None:
    plan = solve(state)
    assert sum(plan.workers) + plan.num_spare_workers == state.num_workers
    assert plan.num_spare_workers >= 0
    assert all(x % state.unit == 0 for x in plan.workers)


@given(states(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_tasks_changes_nothing(state: ClusterState, random: object) -> None:
    curves, names = list(state.tasks), list(state.allocation)
    random.shuffle(curves)
    random.shuffle(names)
    shuffled = dataclasses.replace(
        state, tasks=tuple(curves), allocation={name: state.allocation[name] for name in names}
    )
    assert shuffled.fingerprint == state.fingerprint
    assert solve(shuffled) == solve(state)


@pytest.mark.parametrize("kind", SHAPES)
def test_more_workers_are_never_worse(kind: str) -> None:
    """Holds for a given D_running; one that falls with n' may make more workers worse."""
    state = shaped(kind, 5, 60, seed=1, reach=0)
    values = []
    for num_workers in range(10, 61):
        values.append(solve(dataclasses.replace(state, num_workers=num_workers, running_seconds=3600.0)).value)
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(values))
    assert values[-1] > values[0]


@pytest.mark.parametrize("kind", SHAPES)
def test_no_neighbour_is_better(kind: str) -> None:
    state = shaped(kind, 8, 120, seed=2)
    state = state.adopt(solve(state).allocation)
    state = state.after(state.loss_of(next(iter(state.allocation))))
    plan = solve(state)
    for giver, taker in itertools.permutations(range(8), 2):
        smaller = neighbours(state, state.tasks[giver], plan.workers[giver])[0]
        larger = neighbours(state, state.tasks[taker], plan.workers[taker])[1]
        for give, take in itertools.product((plan.workers[giver], smaller), (plan.workers[taker], larger)):
            if give is None or take is None:
                continue
            workers = list(plan.workers)
            workers[giver], workers[taker] = give, take
            other = Plan(state=state, names=plan.names, workers=tuple(workers))
            assert sum(workers) > state.num_workers or other.value <= plan.value * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", SHAPES)
def test_equals_the_plain_dynamic_program(kind: str, seed: int) -> None:
    """Curves of any shape, long enough for concave stretches to be used, cold and with lost workers."""
    state = shaped(kind, 12, 400, seed)
    plan = solve(state)
    assert plan.value == pytest.approx(plain_best(state), rel=1e-12)
    moved = state.adopt(plan.allocation)
    moved = moved.after(moved.loss_of(max(plan.allocation, key=plan.allocation.__getitem__)))
    assert solve(moved).value == pytest.approx(plain_best(moved), rel=1e-12)


def integer_program(state: ClusterState) -> float:
    """The best value, by HiGHS: one binary variable for each task and size."""
    rows, costs, sizes = [], [], []
    for index, curve in enumerate(state.tasks):
        for x in options(state, curve):
            rows.append(index)
            costs.append(reward_of(state, curve, x))
            sizes.append(x)
    scale = max(abs(cost) for cost in costs)
    one_each = csr_array((np.ones(len(rows)), (rows, np.arange(len(rows)))))
    result = milp(
        -np.array(costs) / scale,
        integrality=np.ones(len(rows)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(csr_array(np.array([sizes])), -np.inf, state.num_workers),
        ],
        options={"mip_rel_gap": 0.0},
    )
    assert result.success, result.message
    return -result.fun * scale


@pytest.mark.parametrize("kind", ["concave", "stairs", "rising", "wild"])
def test_equals_an_integer_program(kind: str) -> None:
    """An independent library on medium cases; its own tolerance is 1e-6."""
    for seed in range(3):
        state = shaped(kind, 8, 48, seed)
        state = state.adopt(solve(state).allocation)
        state = state.after(state.loss_of(next(iter(state.allocation))))
        assert solve(state).value == pytest.approx(integer_program(state), rel=1e-6)


def tie_break(state: ClusterState, plan: Plan) -> tuple:
    """Documented criteria of the solver, in order; the smallest is chosen."""
    pivot = state.pivot if state.pivot is not None else chr(0x10FFFF)
    before = [name for name in plan.names if name < pivot]
    after = [name for name in plan.names if name > pivot]
    part = dataclasses.replace(
        state,
        tasks=tuple(curve for curve in state.tasks if curve.task.name in before),
        allocation={name: x for name, x in state.allocation.items() if name in before},
        lost={name: x for name, x in state.lost.items() if name in before},
    )
    value, moved = merit(Plan(state=part, names=tuple(before), workers=tuple(plan.allocation[name] for name in before)))
    return (
        *(-each for each in merit(plan)),
        plan.allocation.get(pivot, 0),
        (-value, -moved),
        [plan.allocation[name] for name in reversed(before)],
        [-plan.allocation[name] for name in after],
    )


@given(shocked())
@settings(max_examples=300, deadline=None)
def test_ties_are_broken_as_documented(state: ClusterState) -> None:
    plans = list(every_plan(state))
    if plans:
        assert solve(state) == min(plans, key=lambda plan: tie_break(state, plan))


@pytest.mark.parametrize("pivot", [None, "a", "b", "bb", "c", "d", "z"])
@pytest.mark.parametrize("steps", [(0, 1, 2, 3), (0, 1, 1, 2), (0, 2, 2, 3)])
def test_where_everything_is_a_tie_the_rule_decides(pivot: str | None, steps: tuple[float, ...]) -> None:
    """Four equal tasks, also beside a task that has ended, for every number of workers."""
    for num_workers in range(1, 9):
        state = cluster([task(name, steps, max_workers=3) for name in "abcd"], num_workers, pivot=pivot)
        plans = list(every_plan(state))
        assert len({merit(plan) for plan in plans}) < len(plans)
        assert solve(state) == min(plans, key=lambda plan: tie_break(state, plan))


def test_a_tie_goes_to_the_pivot_last() -> None:
    tasks = [task(name, [0, 1, 2]) for name in ("a", "b", "c")]
    for pivot, winner in ((None, "a"), ("a", "b"), ("b", "a"), ("c", "a"), ("aa", "a")):
        plan = solve(cluster(tasks, 2, pivot=pivot))
        assert plan.allocation[winner] == 2, pivot


def test_of_equal_plans_the_one_that_moves_fewest() -> None:
    tasks = [task(name, range(9), transition_seconds=0.0) for name in ("a", "b", "c")]
    state = cluster(tasks, 8, allocation={"a": 1, "b": 5, "c": 2})
    assert solve(state).workers == (1, 5, 2)
    assert solve(state.after(state.loss_of("b"))).workers == (1, 4, 2)


def test_without_need_no_workers_are_used() -> None:
    """A second worker adds nothing: it stays spare."""
    plan = solve(cluster([task("a", [0.0, 5.0, 5.0])], 2))
    assert (plan.workers, plan.num_spare_workers) == ((1,), 1)


def test_equal_tasks_share_by_name() -> None:
    """All plans are equally good and move equally many workers: the last name takes the fewest, and so on."""
    tasks = [task(name, range(9)) for name in ("a", "b", "c")]
    assert solve(cluster(tasks, 8)).workers == (8, 0, 0)


def test_a_transition_that_costs_more_than_it_brings_is_not_made() -> None:
    steady, quick = task("a", [0, 10, 20]), task("b", [0, 11, 22])
    state = cluster([steady, quick], 2, allocation={"a": 2}, running_seconds=9.0)
    assert solve(state).workers == (2, 0)  # 2 * 9 more for b, 20 for the change
    assert solve(dataclasses.replace(state, running_seconds=11.0)).workers == (0, 2)


def test_an_affected_task_pays_for_a_transition_whatever_it_gets() -> None:
    """Changing it is thus free, whereas the others would have to pay."""
    tasks = [task("a", [0, 10, 19, 27]), task("b", [0, 10, 19, 27])]
    state = cluster(tasks, 6, allocation={"a": 3, "b": 3}, running_seconds=1.5)
    plan = solve(state.after(state.loss_of("b")))
    assert plan.workers == (3, 2)
    assert plan.value == (27 + 19) * 1.5 - 27 * 1.0
    assert plan.tasks[1].changed and not plan.tasks[0].changed


def test_granularity_unit_and_limits_are_kept() -> None:
    linear = [float(x) for x in range(65)]
    tasks = [
        task("wide", linear, granularity=16, weight=3.0, max_workers=40),
        task("small", linear, min_workers=9, max_workers=20),
        task("rest", linear, weight=0.5),
    ]
    plan = solve(cluster(tasks, 64, unit=4))
    assert plan.allocation == {"rest": 12, "small": 20, "wide": 32}


def test_no_tasks_and_no_workers() -> None:
    assert solve(cluster([], 4)).workers == ()
    assert solve(cluster([task("a", [0, 1])], 0)).paused == ("a",)


def test_curves_that_are_all_zero() -> None:
    plan = solve(cluster([task("a", [0.0]), task("b", [0.0], may_pause=False)], 4, allocation={"a": 2}))
    assert (plan.workers, plan.infeasible, plan.value) == ((0, 0), ("b",), 0.0)


def test_the_last_unit_may_be_worth_nearly_everything() -> None:
    """Minimums leave one of many units, and its price is far above that of any other."""
    huge = task("huge", [0.0, 1.0, 1e15], may_pause=False)
    rest = [task(name, [1e-3] * 201, min_workers=100, may_pause=False) for name in ("a", "b")]
    state = cluster([huge, *rest], 202)
    assert solve(state).allocation == {"a": 100, "b": 100, "huge": 2}
