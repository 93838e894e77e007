"""Medians of sorted values are those of the standard library."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from unicron_lightning.planner import transitions

values = st.lists(st.floats(-50, 50) | st.integers(-3, 3).map(float), min_size=1, max_size=30).map(sorted)


@given(values, st.floats(-60, 60))
def test_as_the_standard_library(values: list[float], middle: float) -> None:
    assert transitions.sorted_median(values) == statistics.median(values)
    for center in (middle, statistics.median(values)):
        assert transitions.median_deviation(values, center) == statistics.median(abs(v - center) for v in values)
