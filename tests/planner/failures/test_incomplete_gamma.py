"""The incomplete gamma function against an independent library."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from unicron_lightning.planner.failures import log_upper_fraction

shapes = st.floats(0.05, 5000)
ratios = st.floats(1e-4, 50)


@given(shapes, ratios)
def test_the_upper_fraction_is_scipys_where_that_is_a_normal_number(shape: float, ratio: float) -> None:
    expected = special.gammaincc(shape, ratio * shape)
    if expected > 1e-290:
        assert log_upper_fraction(shape, ratio * shape) == pytest.approx(math.log(expected), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("x", [1e3, 1e5, 1e8])
def test_the_upper_fraction_goes_on_where_it_underflows(x: float) -> None:
    # Q(1, x) = exp(-x)
    assert log_upper_fraction(1.0, x) == pytest.approx(-x, rel=1e-12)


def test_the_end() -> None:
    assert log_upper_fraction(2.0, 0.0) == 0.0
