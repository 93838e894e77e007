"""One step of the recursion is the documented maximum, on both ways through concave stretches, with any window."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lightning.planner.search import dynamic_program


def plain(row: np.ndarray, low: int, units: np.ndarray, keys: np.ndarray, out_low: int, size: int) -> np.ndarray:
    """The definition: at most j units in all; beyond the row's end its last value holds."""
    at = np.arange(out_low, out_low + size)[:, None] - units - low
    sums = row[np.clip(at, 0, len(row) - 1)] + keys
    return np.where(at >= 0, sums, dynamic_program.NEVER).max(axis=1)


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, int, np.ndarray, np.ndarray, int, int]:
    """A row, a task's options, and the window to fill. Options form stretches: concave, or arbitrary."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = np.maximum.accumulate(random.integers(-50, 50, draw(st.integers(1, 300))))
    low = draw(st.integers(0, 40))
    units, keys = [draw(st.integers(0, 5))], [0]
    for _ in range(draw(st.integers(1, 4))):
        count, step = draw(st.integers(1, 250)), draw(st.sampled_from([1, 1, 2, 3, 7]))
        rises = random.integers(-3, 9, count)
        if draw(st.booleans()):
            rises = np.sort(rises)[::-1]
        units += (units[-1] + step * np.arange(1, count + 1)).tolist()
        keys += (keys[-1] + np.cumsum(rises)).tolist()
    out_low = low + units[0] + draw(st.integers(0, 400))
    return row, low, np.array(units), np.array(keys), out_low, draw(st.integers(1, 500))


@given(steps())
@settings(max_examples=200, deadline=None)
def test_a_step_is_the_maximum_over_all_options(step: tuple) -> None:
    row, low, units, keys, out_low, size = step
    out = np.empty(size, dtype=np.int64)
    dynamic_program.extend(row, low, units, keys, out, out_low)
    assert np.array_equal(out, plain(row, low, units, keys, out_low, size))


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("window", [(0, 700), (300, 200), (450, 1), (900, 30)])
def test_concave_stretches_give_what_single_options_give(step: int, window: tuple[int, int]) -> None:
    random = np.random.default_rng(step)
    row = np.maximum.accumulate(random.integers(0, 1000, 400))
    units = 3 + step * np.arange(120)
    keys = np.cumsum(np.sort(random.integers(0, 30, 120))[::-1])
    out_low, size = window
    slow = np.full(size, dynamic_program.NEVER)
    fast = slow.copy()
    dynamic_program.add_options(row, 7, units, keys, slow, out_low)
    dynamic_program.add_concave(row, 7, units, keys, step, fast, out_low)
    assert np.array_equal(fast, slow)
    assert step == 1 or out_low > 400 or (slow == dynamic_program.NEVER).sum() < size


@pytest.mark.parametrize("equal_sums", [True, False])
@pytest.mark.parametrize("slope", [-4, 0, 7])
@pytest.mark.parametrize("window", [(100, 700), (300, 200), (450, 1), (900, 30)])
def test_options_on_a_line_give_what_single_options_give(slope: int, window: tuple[int, int], equal_sums: bool) -> None:
    random = np.random.default_rng(slope + window[0])
    at = np.flatnonzero(random.random(400) < 0.5)
    # With falling levels the last possible option is the best one, so that looking for it is ended.
    row = slope * np.arange(400) + (random.integers(0, 2, 400) if equal_sums else -3 * np.arange(400))
    keys = 11 + slope * at
    keys[[4, 40, 41]] += [500, -30, 2]
    out_low, size = window
    slow = np.full(size, dynamic_program.NEVER)
    fast = slow.copy()
    dynamic_program.add_options(row, 7, at, keys, slow, out_low)
    dynamic_program.add_rest(row, 7, at, keys, fast, out_low)
    assert np.array_equal(fast, slow)
