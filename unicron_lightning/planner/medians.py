"""Median of sorted values and of their distances from a value, without visiting all of them."""

from __future__ import annotations

from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    """Median as `statistics.median` defines it, of one or more values in ascending order."""
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


def median_deviation(values: Sequence[float], middle: float) -> float:
    """Median of ``abs(value - middle)``, of one or more values in ascending order."""
    half = len(values) // 2
    upper = _nth_deviation(values, middle, half)
    return upper if len(values) % 2 else (_nth_deviation(values, middle, half - 1) + upper) / 2


def _nth_deviation(values: Sequence[float], middle: float, n: int) -> float:
    """The n-th smallest distance, counted from 0: the distance of an outer one of the n + 1 nearest values."""
    low, high = 0, len(values) - n - 1
    while low < high:
        first = (low + high) // 2
        if middle - values[first] > values[first + n + 1] - middle:
            low = first + 1
        else:
            high = first
    return max(abs(values[low] - middle), abs(values[low + n] - middle))
