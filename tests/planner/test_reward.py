"""F and G are the paper's; a curve is fixed when it is made."""

from __future__ import annotations

import dataclasses
import math

import pytest
from planner.situations import Given, cluster, task

from unicron_lightning.planner.performance.model import SublinearModel
from unicron_lightning.planner.reward import Curve, PlanTask
from unicron_lightning.planner.solver import Plan, solve
from unicron_lightning.planner.state import ClusterState


@pytest.mark.parametrize(
    ("lost", "workers", "value"),
    [
        ({}, 3, 2 * 9 * 10.0),  # unchanged: costs nothing
        ({}, 2, 2 * 6 * 10.0 - 2 * 9 * 4),  # changed
        ({}, 0, -2 * 9 * 4.0),  # paused
        ({"a": 1}, 2, 2 * 6 * 10.0 - 2 * 9 * 4),  # F(t,x) refers to the workers before the failure
        ({"a": 1}, 3, 2 * 9 * 10.0 - 2 * 9 * 4),  # gets a worker for the lost one: also a transition
        ({"a": 0}, 3, 2 * 9 * 10.0 - 2 * 9 * 4),  # affected without a loss
    ],
)
def test_a_plan_is_worth_what_the_formula_says(lost: dict, workers: int, value: float) -> None:
    tasks = [task("a", [0, 3, 6, 9], weight=2.0, transition_seconds=4.0)]
    state = cluster(tasks, 3, allocation={"a": 3}, lost=lost)
    plan = Plan(state=state, names=("a",), workers=(workers,))
    assert plan.value == value
    assert plan.waf == 2 * 3 * workers


def test_a_curve_has_the_sizes_that_run() -> None:
    curve = Curve.of(task("a", [0, 0, 2, 0, 5], weight=3.0), 1, 5)
    assert curve.workers.tolist() == [2, 4, 5]
    assert curve.waf.tolist() == [6.0, 15.0, 15.0]
    assert (curve.waf_peak, curve.waf_per_unit) == (15.0, 15.0 / 4)


def test_below_the_minimum_nothing_is_achieved() -> None:
    curve = Curve.of(task("a", range(9), min_workers=3, granularity=2), 1, 8)
    assert [curve.waf_at(x) for x in (0, 1, 2, 3, 4, 7)] == [0, 0, 0, 3, 4, 7]


class Learning(Given):
    """A model that has learned something in the meantime."""

    def throughput(self, num_workers: int) -> float:
        return 2 * super().throughput(num_workers)


def test_a_curve_is_named_by_what_plans_follow_from() -> None:
    known = task("a", [0, 1, 2])
    digest = Curve.of(known, 1, 2).digest
    assert Curve.of(task("a", [0, 1, 2]), 1, 2).digest == digest
    for change in (
        {"name": "b"},
        {"weight": 2.0},
        {"transition_seconds": 2.0},
        {"min_workers": 2},
        {"max_workers": 1},
        {"may_pause": False},
        {"performance": Learning((0, 1, 2))},
    ):
        assert Curve.of(task(**{"name": "a", "flops": [0, 1, 2], **change}), 1, 2).digest != digest, change
    assert Curve.of(known, 2, 2).digest != digest
    assert Curve.of(known, 1, 3).digest != digest


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_model_that_answers_nonsense_is_named(value: float) -> None:
    with pytest.raises(ValueError, match=r"task 'a': throughput\(2\) is .*: expected FLOP/s"):
        Curve.of(task("a", [0.0, 1.0, value, 1.0]), 1, 3)
    with pytest.raises(ValueError, match=r"task 'a': throughput\(3\) is"):
        Curve.of(task("a", [0.0, 1.0, 1.0, value], max_workers=2), 1, 2).waf_at(3)


@dataclasses.dataclass(frozen=True)
class Guessed:
    """Proportional to x; the larger x, the less certain."""

    def throughput(self, num_workers: int) -> float:
        return 1e12 * num_workers

    def configuration(self, num_workers: int) -> None:
        return None

    def uncertainty(self, num_workers: int) -> float:
        return math.inf if num_workers > 8 else 0.1 * num_workers


def test_a_cautious_plan_takes_uncertain_speeds_to_be_lower() -> None:
    bold = PlanTask(name="a", performance=Guessed(), transition_seconds=0.0)
    wary = dataclasses.replace(bold, caution=1.0)
    curve = Curve.of(wary, 1, 10)
    assert [curve.waf_at(x) for x in (1, 4)] == pytest.approx([1e12 * math.exp(-0.1), 4e12 * math.exp(-0.4)])
    assert curve.waf_at(10) == pytest.approx(10e12 * math.exp(-1.0)), "unknown errors count as 1"
    assert Curve.of(bold, 1, 10).waf_at(10) == 10e12
    assert curve.digest != Curve.of(bold, 1, 10).digest


def test_caution_prefers_the_task_whose_speed_is_known() -> None:
    known = PlanTask(
        name="known", performance=SublinearModel(rate=0.9e12, exponent=1.0, relative_error=0.0), transition_seconds=0.0
    )
    guess = PlanTask(
        name="guess", performance=SublinearModel(rate=1e12, exponent=1.0, relative_error=0.3), transition_seconds=0.0
    )
    chosen = {}
    for caution in (0.0, 1.0):
        tasks = [dataclasses.replace(task, caution=caution) for task in (known, guess)]
        plan = solve(
            ClusterState(tasks=tuple(Curve.of(task, 1, 4) for task in tasks), num_workers=4, running_seconds=1.0)
        )
        chosen[caution] = {name for name, workers in plan.allocation.items() if workers}
    assert chosen == {0.0: {"guess"}, 1.0: {"known"}}


def test_a_caution_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"caution=-1.0: expected standard errors, 0 or more"):
        PlanTask(name="a", performance=Guessed(), transition_seconds=0.0, caution=-1.0)
