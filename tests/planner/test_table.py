"""Plans made ahead equal newly made ones, for every foreseen event; and are never used for another state."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from planner.situations import SHAPES, cluster, shaped, states, task

from unicron_lightning.planner.reward import Curve
from unicron_lightning.planner.search import dynamic_program
from unicron_lightning.planner.solver import PlanTable, StaleTable, foreseen, solve
from unicron_lightning.planner.state import ClusterState, NodesJoined, TaskFinished, WorkersLost


def assert_fresh(table: PlanTable, state: ClusterState) -> None:
    """Every entry equals the newly made plan, ties included."""
    assert list(table.plans) and set(table.plans) == set(foreseen(state))
    for event, plan in table.plans.items():
        after = state.after(event)
        fresh = solve(after)
        assert plan == fresh, event
        assert (plan.value, plan.waf, plan.state.fingerprint) == (fresh.value, fresh.waf, after.fingerprint)


@given(states(most_tasks=5, most_workers=12))
@settings(max_examples=150, deadline=None)
def test_every_entry_is_a_fresh_solution(state: ClusterState) -> None:
    assert_fresh(PlanTable.of(state), state)


@pytest.mark.parametrize("kind", SHAPES)
def test_every_entry_is_a_fresh_solution_on_long_curves(kind: str) -> None:
    """Long enough for concave stretches; with "linear" and "holes" nearly everything is a tie."""
    state = shaped(kind, 9, 240, seed=5, reach=8, node_workers=8)
    state = state.adopt(solve(state).allocation)
    assert_fresh(PlanTable.of(state), state)


def test_what_is_foreseen() -> None:
    tasks = [task(name, range(20)) for name in ("a", "b", "c")]
    state = cluster(tasks, 9, 4, allocation={"a": 6, "b": 2}, node_workers=4)
    assert foreseen(state) == [
        WorkersLost(num_workers=1),  # the idle worker
        WorkersLost(num_workers=4, by_task={"a": 4}),
        WorkersLost(num_workers=3, by_task={"b": 2}),  # all workers of b, and the idle one; c has none to lose
        NodesJoined(num_workers=4),
        *(TaskFinished(task=name) for name in ("a", "b", "c")),
    ]


def test_workers_beyond_the_curves_are_not_foreseen() -> None:
    state = cluster([task("a", range(9))], 8, allocation={"a": 8})
    assert not any(isinstance(event, NodesJoined) for event in foreseen(state))


def test_minimums_that_stop_to_fit_are_planned_for() -> None:
    bound = [
        task(name, [0.0] * 3 + [weight] * 9, min_workers=3, may_pause=False)
        for name, weight in (("a", 1.0), ("b", 3.0), ("c", 2.0))
    ]
    state = cluster(bound, 9, 1, allocation=dict.fromkeys("abc", 3))
    table = PlanTable.of(state)
    assert_fresh(table, state)
    plan = table.look_up(state, state.loss_of("b"))
    assert (plan.allocation, plan.infeasible) == ({"a": 0, "b": 3, "c": 3}, ("a",))
    assert table.look_up(state, TaskFinished(task="b")).infeasible == ()


@pytest.fixture
def running() -> ClusterState:
    """A state of four tasks, and one that is queued."""
    state = shaped("concave", 5, 40, seed=3)
    state = dataclasses.replace(state, tasks=state.tasks[:4], queued=state.tasks[4:])
    return state.adopt(solve(state).allocation)


def changes(state: ClusterState) -> dict[str, ClusterState]:
    """The state with one change each time."""
    replace = dataclasses.replace
    first, *others = state.tasks
    shifted = dict(state.allocation)
    giver = next(iter(shifted))
    shifted[giver] -= 1
    terms = replace(first.task.terms, weight=first.task.terms.weight * 1.01)
    heavier = Curve.of(replace(first.task, terms=terms), 1, first.num_workers)
    slower = Curve.of(replace(first.task, transition_seconds=1e3), 1, first.num_workers)
    return {
        "workers": replace(state, num_workers=41),
        "allocation": replace(state, allocation=shifted),
        "weight": replace(state, tasks=(heavier, *others)),
        "transition": replace(state, tasks=(slower, *others)),
        "a task less": state.after(TaskFinished(task=first.task.name)),
        "queue": replace(state, queued=()),
        "affected": replace(state, lost={giver: 0}),
        "failure rate": replace(state, running_seconds=lambda n: 3.7e6 / n),
        "failure rate with a node less": replace(
            state, running_seconds=lambda n: state.running_seconds(n) * (1 if n != 39 else 1.01)
        ),
        "node": replace(state, node_workers=2),
    }


CHANGES = (
    "workers",
    "allocation",
    "weight",
    "transition",
    "a task less",
    "queue",
    "affected",
    "failure rate",
    "failure rate with a node less",
    "node",
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_table_is_never_used_for_another_state(running: ClusterState, change: str) -> None:
    table = PlanTable.of(running)
    event = TaskFinished(task=running.names[1])
    assert table.look_up(running, event) is not None
    with pytest.raises(StaleTable, match=running.fingerprint):
        table.look_up(changes(running)[change], event)


def test_every_change_is_tried(running: ClusterState) -> None:
    assert tuple(changes(running)) == CHANGES


def test_the_same_state_made_again_is_the_same(running: ClusterState) -> None:
    again = dataclasses.replace(running, tasks=running.tasks[::-1])
    assert again is not running
    assert PlanTable.of(running).look_up(again, TaskFinished(task="t003")) is not None


def test_what_was_not_foreseen_has_no_plan(running: ClusterState) -> None:
    assert PlanTable.of(running).look_up(running, NodesJoined(num_workers=7)) is None


def test_tables_are_filled_once_per_group_of_cases_not_once_per_case(
    running: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    original = dynamic_program.fill

    def counted(*arguments: object) -> None:
        steps.append(abs(arguments[4] - arguments[3]))
        original(*arguments)

    monkeypatch.setattr(dynamic_program, "fill", counted)
    table = PlanTable.of(running)
    groups = len({plan.state.num_workers for plan in table.plans.values()})
    # Two sweeps over the tasks for each number of workers, and another one if the first guess was insufficient.
    assert sum(steps) <= 2 * 2 * groups * len(running.names) < len(table.plans) * len(running.names) * 2
