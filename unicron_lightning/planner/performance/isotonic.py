"""Isotonic regression: the rising curve that is nearest to scattered points (pool adjacent violators).

Implemented here because `scipy.optimize.isotonic_regression` and scikit-learn's would require a large dependency; the
tests compare the results with scipy's.
"""

from __future__ import annotations

from collections.abc import Sequence


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[tuple[int, float]]:
    """The non-decreasing sequence with the least weighted sum of squared distances to ``values``.

    Args:
        values: in the order in which they should rise.
        weights: of each value, above 0.

    Returns:
        Blocks of equal fitted values, in order: the number of values in each, and their weighted mean.

    Raises:
        ValueError: lengths differ, or a weight is not above 0.
    """
    if len(values) != len(weights):
        raise ValueError(f"{len(values)} values with {len(weights)} weights: expected equal numbers")
    blocks: list[tuple[int, float, float]] = []
    for value, weight in zip(values, weights, strict=True):
        if not weight > 0:
            raise ValueError(f"weight={weight!r}: expected more than 0")
        count, mean, total = 1, float(value), float(weight)
        while blocks and blocks[-1][1] >= mean:
            before, its_mean, its_total = blocks.pop()
            mean = (its_mean * its_total + mean * total) / (its_total + total)
            count, total = count + before, total + its_total
        blocks.append((count, mean, total))
    return [(count, mean) for count, mean, _ in blocks]
