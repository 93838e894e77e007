"""Keys are rounded as little and as regularly as promised; hulls, prices and bounds are exact."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.situations import every_plan, merit, shape, states

from unicron_lightning.planner.quantum import move_price
from unicron_lightning.planner.search import kernels
from unicron_lightning.planner.search.exact import EVERYTHING, _bounds, _mark
from unicron_lightning.planner.search.options import Columns
from unicron_lightning.planner.search.variants import SearchProblem, Variant
from unicron_lightning.planner.solver import columns_of
from unicron_lightning.planner.state import ClusterState

NO_LAYOUTS = np.zeros(0, dtype=np.int64)
numbers = st.integers(-(2**61), 2**61)
widths = st.integers(1, 2**17)


@given(numbers, widths, numbers, widths)
@settings(max_examples=500, deadline=None)
def test_slopes_are_compared_exactly(gain: int, width: int, other: int, other_width: int) -> None:
    assert kernels.steeper(gain, width, other, other_width) == (Fraction(gain, width) > Fraction(other, other_width))


@given(st.integers(2**50, 2**60), widths, st.sampled_from([-1, 0, 1]))
@settings(deadline=None)
def test_slopes_that_floating_point_takes_for_equal_are_told_apart(gain: int, width: int, more: int) -> None:
    expected = Fraction(gain, width) > Fraction(gain + more, width)
    assert kernels.steeper(gain, width, gain + more, width) == expected


def values_of(waf: np.ndarray, scale: float) -> np.ndarray:
    """F * D in quanta, as used in the keys."""
    workers = np.arange(1, len(waf) + 1)
    units, keys = kernels.keys_of(workers, waf, NO_LAYOUTS, scale, 0, 0, 0, 1, 2, False, 0, 0)
    assert np.array_equal(units, workers)
    return keys + 2 * workers  # all workers are moved


@pytest.mark.parametrize("kind", ["concave", "linear", "stairs", "rising", "wild"])
@pytest.mark.parametrize("bits", [10, 24, 40])
def test_rounding_is_at_most_three_quarters_of_a_quantum_per_size(kind: str, bits: int) -> None:
    waf = shape(kind, 5000, np.random.default_rng(bits))[1:]
    scale = 2.0**bits / waf.max()
    error = np.abs(values_of(waf, scale) - waf * scale)
    assert np.all(error <= kernels.STICKY * np.arange(1, len(waf) + 1) + 1e-3)
    assert error.max() > 0.1, "nothing was rounded"


@pytest.mark.parametrize("kind", ["concave", "linear"])
@pytest.mark.parametrize("bits", [12, 30, 40])
def test_rounding_keeps_concave_curves_concave(kind: str, bits: int) -> None:
    waf = shape(kind, 12_500, np.random.default_rng(bits))[1:]
    scale = 2.0**bits / waf.max()
    assert np.diff(values_of(waf, scale), 2).max() <= 0
    if kind == "linear" or bits == 12:  # rounding each value separately turns a nearly straight line into a staircase
        assert np.diff(np.rint(waf * scale), 2).max() > 0


def test_moving_has_a_price_and_staying_costs_nothing() -> None:
    price = 64
    units, keys = kernels.keys_of(
        np.array([2, 4, 6]), np.array([2.0, 4.0, 5.0]), NO_LAYOUTS, 1.0, 3, 4, 4, 2, price, True, 0, 0
    )
    assert units.tolist() == [0, 1, 2, 3]
    assert keys.tolist() == [-3 - 2 * price, 2 - 3 - price, 4, 5 - 3 - price]


def test_part_of_a_unit_that_moves_counts_as_a_whole_one() -> None:
    """The task still has 3 workers: having 2, 4 or 8 moves 1, 1 or 5 of them, and having none moves 3."""
    _, keys = kernels.keys_of(
        np.array([2, 4, 8]), np.array([1.0, 1.0, 1.0]), NO_LAYOUTS, 1.0, 0, 4, 3, 2, 64, True, 0, 0
    )
    assert keys.tolist() == [-2 * 64, 1 - 64, 1 - 64, 1 - 3 * 64]


def test_an_affected_task_pays_at_every_size() -> None:
    _, keys = kernels.keys_of(np.array([1, 2]), np.array([5.0, 9.0]), NO_LAYOUTS, 1.0, 3, -1, 1, 1, 64, True, 0, 0)
    assert keys.tolist() == [-3 - 64, 5 - 3, 9 - 3 - 64]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-20, 20)), min_size=1, max_size=12))
@settings(deadline=None)
def test_the_hull_is_above_all_options_and_bends_down(pairs: list[tuple[int, int]]) -> None:
    units = np.cumsum([width for width, _ in pairs])
    keys = np.array([key for _, key in pairs])
    starts = np.array([0, len(units)])
    hull_starts, vertices = kernels.hulls(starts, units, keys)
    assert hull_starts.tolist() == [0, len(vertices)]
    assert vertices[0] == 0 and vertices[-1] == len(units) - 1
    x, y = units[vertices], keys[vertices]
    slopes = [Fraction(int(b), int(a)) for a, b in zip(np.diff(x), np.diff(y), strict=True)]
    assert all(b < a for a, b in itertools.pairwise(slopes))
    assert np.all(np.interp(units, x, y) >= keys - 1e-9)
    for price in range(25):
        best = kernels.best_vertex(0, len(vertices), vertices, units, keys, price)
        worth = keys - price * units
        assert vertices[best] == int(np.argmax(worth)), "the first of the best"


def single(state: ClusterState) -> SearchProblem:
    """The problem of a state, with nothing changed."""
    columns = columns_of(state, (), move_price(state))
    whole = Variant(position=len(columns) - 1, replaces=True, column=columns[-1])
    return SearchProblem.of(columns, state.num_workers // state.unit, [whole])


@given(states())
@settings(max_examples=200, deadline=None)
def test_no_option_of_a_best_plan_is_ruled_out(state: ClusterState) -> None:
    """The bound holds for every plan, and the reduced cost of each of its options fits between bound and plan."""
    plans = list(every_plan(state))
    if not plans:
        return
    problem = single(state)
    ((price, bound),), (distance,) = prices, _ = _bounds(problem)
    mask = _mark(problem, prices, [distance], EVERYTHING)
    columns: Columns = problem.columns
    top = max(merit(plan) for plan in plans)
    for plan in plans:
        if merit(plan) != top:
            continue
        key = 0
        for index, workers in enumerate(plan.workers):
            column = len(plan.workers) if index == len(plan.workers) - 1 else index
            first, end = columns.starts[column], columns.starts[column + 1]
            at = first + int(np.searchsorted(columns.units[first:end], workers // state.unit))
            assert columns.units[at] == workers // state.unit and mask[at]
            key += int(columns.keys[at])
        assert bound - distance <= key <= bound
    assert price >= 0
