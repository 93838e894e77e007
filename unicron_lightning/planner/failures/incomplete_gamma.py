"""The regularised incomplete gamma function and its inverse, used for credible intervals of failure rates.

    P(a, x) = (1 / Gamma(a)) * integral from 0 to x of u^(a-1) exp(-u) du          lower fraction
    Q(a, x) = 1 - P(a, x)                                                          upper fraction

The power series and the continued fraction are textbook ones (NIST Digital Library of Mathematical Functions, sections
8.7 and 8.9, https://dlmf.nist.gov/8). scipy has both functions but is no dependency of this package; the tests compare
with it.
"""

from __future__ import annotations

import math
from typing import Final

_RELATIVE_ERROR: Final = 1e-15
_TINY: Final = 1e-300
_BISECTIONS: Final = 200


def lower_fraction(shape: float, x: float) -> float:
    """P(shape, x), the distribution function of a Gamma variable of this shape and rate 1.

    Args:
        shape: > 0.
        x: >= 0.
    """
    if x <= 0:
        return 0.0
    if x < shape + 1:
        return math.exp(_log_series(shape, x))
    return -math.expm1(_log_continued_fraction(shape, x))


def log_upper_fraction(shape: float, x: float) -> float:
    """The logarithm of Q(shape, x), accurate where Q itself would underflow or be near 1."""
    if x <= 0:
        return 0.0
    if x < shape + 1:
        return math.log1p(-min(math.exp(_log_series(shape, x)), 1 - _RELATIVE_ERROR))
    return _log_continued_fraction(shape, x)


def quantile(shape: float, probability: float) -> float:
    """The x with P(shape, x) = probability, for 0 < probability < 1, by bisection in log x."""
    if not 0 < probability < 1:
        raise ValueError(f"probability={probability}: expected a number between 0 and 1, both excluded")
    low = high = math.log(shape)
    width = 1.0
    while lower_fraction(shape, math.exp(low)) > probability and low > -700:
        low, width = low - width, 2 * width
    width = 1.0
    while lower_fraction(shape, math.exp(high)) < probability:
        high, width = high + width, 2 * width
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if lower_fraction(shape, math.exp(middle)) < probability:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def _log_series(shape: float, x: float) -> float:
    """The logarithm of P by its power series, which converges fast for x < shape + 1."""
    term = total = 1.0
    denominator = shape
    while term > total * _RELATIVE_ERROR:
        denominator += 1
        term *= x / denominator
        total += term
    return math.log(total) + shape * math.log(x) - x - math.lgamma(shape + 1)


def _log_continued_fraction(shape: float, x: float) -> float:
    """The logarithm of Q by its continued fraction (from the front, after Lentz), which converges fast for larger x."""
    b = x + 1 - shape
    c = 1 / _TINY
    d = 1 / b
    fraction = d
    change, n = 0.0, 0
    while abs(change - 1) > _RELATIVE_ERROR and n < 1_000_000:
        n += 1
        a = -n * (n - shape)
        b += 2
        d = a * d + b
        d = 1 / (d if abs(d) > _TINY else _TINY)
        c = b + a / c
        c = c if abs(c) > _TINY else _TINY
        change = c * d
        fraction *= change
    return math.log(fraction) + shape * math.log(x) - x - math.lgamma(shape)
