"""Keys are rounded as little and as regularly as promised."""

from __future__ import annotations

import numpy as np
import pytest
from planner.situations import shape

from unicron_lightning.planner.search import exact

NO_LAYOUTS = np.zeros(0, dtype=np.int64)


def values_of(waf: np.ndarray, scale: float) -> np.ndarray:
    """F * D in quanta, as used in the keys."""
    workers = np.arange(1, len(waf) + 1)
    units, keys = exact.keys_of(workers, waf, NO_LAYOUTS, scale, 0, 0, 0, 1, 2, False, 0, 0)
    assert np.array_equal(units, workers)
    return keys + 2 * workers  # all workers are moved


@pytest.mark.parametrize("kind", ["concave", "linear", "stairs", "rising", "wild"])
@pytest.mark.parametrize("bits", [10, 24, 40])
def test_rounding_is_at_most_three_quarters_of_a_quantum_per_size(kind: str, bits: int) -> None:
    waf = shape(kind, 5000, np.random.default_rng(bits))[1:]
    scale = 2.0**bits / waf.max()
    error = np.abs(values_of(waf, scale) - waf * scale)
    assert np.all(error <= exact.STICKY * np.arange(1, len(waf) + 1) + 1e-3)
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
    units, keys = exact.keys_of(
        np.array([2, 4, 6]), np.array([2.0, 4.0, 5.0]), NO_LAYOUTS, 1.0, 3, 4, 4, 2, price, True, 0, 0
    )
    assert units.tolist() == [0, 1, 2, 3]
    assert keys.tolist() == [-3 - 2 * price, 2 - 3 - price, 4, 5 - 3 - price]


def test_part_of_a_unit_that_moves_counts_as_a_whole_one() -> None:
    """The task still has 3 workers: having 2, 4 or 8 moves 1, 1 or 5 of them, and having none moves 3."""
    _, keys = exact.keys_of(np.array([2, 4, 8]), np.array([1.0, 1.0, 1.0]), NO_LAYOUTS, 1.0, 0, 4, 3, 2, 64, True, 0, 0)
    assert keys.tolist() == [-2 * 64, 1 - 64, 1 - 64, 1 - 3 * 64]


def test_an_affected_task_pays_at_every_size() -> None:
    _, keys = exact.keys_of(np.array([1, 2]), np.array([5.0, 9.0]), NO_LAYOUTS, 1.0, 3, -1, 1, 1, 64, True, 0, 0)
    assert keys.tolist() == [-3 - 64, 5 - 3, 9 - 3 - 64]
