"""A change of TP x PP costs more than one of the size alone, and the plan counts it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.situations import Given, cluster, every_plan, merit, task
from planner.test_table import assert_fresh

from unicron_lightning.planner.performance.model import ParallelConfiguration
from unicron_lightning.planner.reward import PlanTask
from unicron_lightning.planner.search import dynamic_program
from unicron_lightning.planner.solver import PlanTable, solve


@dataclass(frozen=True)
class Laid(Given):
    """T(t,x) with TP by number of workers; 0: unknown."""

    tensor: tuple[int, ...] = ()

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        tensor = self.tensor[min(num_workers, len(self.tensor) - 1)]
        if not tensor:
            return None
        return ParallelConfiguration(tensor_parallel=tensor, pipeline_parallel=1, data_parallel=1, micro_batch_size=1)


def laid(name: str, flops: list[int], tensor: list[int], seconds: float) -> PlanTask:
    return task(name, (), performance=Laid(tuple(map(float, flops)), tuple(tensor)), relayout_seconds=seconds)


sizes = st.lists(st.integers(0, 16), min_size=8, max_size=8)
degrees = st.lists(st.sampled_from([0, 1, 1, 2, 4]), min_size=8, max_size=8)


@given(st.lists(st.tuples(sizes, degrees, st.integers(0, 7)), min_size=1, max_size=3), st.sampled_from([0.0, 2.0, 8.0]))
@settings(max_examples=150, deadline=None)
def test_the_plan_is_the_best_of_all(given_tasks: list, seconds: float) -> None:
    tasks = [laid(name, each[0], each[1], seconds) for name, each in zip("abc", given_tasks, strict=False)]
    has = {each.name: x for each, (_, _, x) in zip(tasks, given_tasks, strict=True)}
    state = cluster(tasks, 7 * len(tasks), 8, allocation=has, running_seconds=8.0)
    plan = solve(state)
    assert merit(plan) == max(merit(each) for each in every_plan(state))
    assert_fresh(PlanTable.of(state), state)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_small_gain_is_not_worth_a_relayout(compiled: bool) -> None:
    """With a free worker 10 % are gained for 8 s: as much as a step's loss of 0.8 s, less than a restart."""
    if compiled:
        dynamic_program.compile_all()
    flops, tensor = [0, 10, 20, 22], [1, 1, 1, 2]
    quick, slow = (laid("a", flops, tensor, seconds) for seconds in (0.1, 1.0))
    for each, expected in ((quick, 3), (slow, 2)):
        state = cluster([each], 3, 1, allocation={"a": 2}, running_seconds=12.0)
        plan = solve(state)
        assert plan.allocation == {"a": expected}
        assert plan.tasks[0].relayout == (expected == 3)
    state = cluster([slow], 3, 1, allocation={"a": 2}, running_seconds=120.0)
    assert solve(state).allocation == {"a": 3}, "it pays until the next failure"


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_seconds_are_checked(seconds: float) -> None:
    with pytest.raises(ValueError, match="relayout_seconds"):
        laid("a", [1], [1], seconds)


def test_layouts_are_part_of_the_state() -> None:
    one, other = (cluster([laid("a", [0, 1, 2], [1, 1, t], 1.0)], 2, 1) for t in (1, 2))
    assert one.fingerprint != other.fingerprint
    assert np.array_equal(one.tasks[0].waf, other.tasks[0].waf)
