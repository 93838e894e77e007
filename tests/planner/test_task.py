"""Valid tasks, and their possible sizes."""

from __future__ import annotations

import math

import pytest
from planner.situations import task


def test_sizes_are_multiples_of_granularity_and_unit_between_the_limits() -> None:
    both = task("a", [0.0, 1.0], min_workers=10, max_workers=50, granularity=6)
    assert list(both.sizes(4, 100)) == [12, 24, 36, 48]
    assert list(both.sizes(4, 40)) == [12, 24, 36]
    assert list(both.sizes(1, 20)) == [12, 18]


def test_there_may_be_no_size() -> None:
    assert list(task("a", [0.0, 1.0], min_workers=10, max_workers=11, granularity=8).sizes(1, 100)) == []
    assert list(task("a", [0.0, 1.0], min_workers=10).sizes(1, 9)) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": ""}, "name=''"),
        ({"weight": 0.0}, "weight=0.0: expected a positive number"),
        ({"weight": math.nan}, "weight=nan"),
        ({"transition_seconds": -1.0}, "transition_seconds=-1.0: expected seconds, 0 or more"),
        ({"transition_seconds": math.inf}, "transition_seconds=inf"),
        ({"min_workers": 0}, "min_workers=0, granularity=1: expected whole numbers"),
        ({"granularity": 0}, "min_workers=1, granularity=0"),
        ({"min_workers": 4, "max_workers": 3}, "max_workers=3: expected at least min_workers=4"),
    ],
)
def test_wrong_values_are_quoted(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task(**{"name": "a", "flops": [0.0, 1.0]} | wrong)
