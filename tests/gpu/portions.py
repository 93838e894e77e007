"""Which tests of the kit run in a limited time, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpu.report import Row

MARGIN: Final = 1.2
"""Factor of the last cost of a test."""


@dataclass(frozen=True, kw_only=True)
class Portion:
    """One test of the kit.

    Attributes:
        test: its name.
        worth: how much a result shows, in comparison with others.
        seconds: estimated cost, until a GPU has run it.
    """

    test: str
    worth: float
    seconds: float


def cost_of(portion: Portion, rows: Mapping[str, Row]) -> float:
    """Return the seconds to reserve: what the test cost last on a GPU, or the estimate."""
    row = rows.get(portion.test)
    return portion.seconds if row is None or "rehearsal" in row[2] else MARGIN * float(row[3])


def order_of(portions: Sequence[Portion], rows: Mapping[str, Row]) -> list[str]:
    """Return the tests that have not passed on a GPU, those first that are worth most per second.

    Args:
        portions: all tests.
        rows: results so far, by test.
    """
    left = [portion for portion in portions if portion.test not in rows or rows[portion.test][2] != "passed"]
    left.sort(key=lambda portion: -portion.worth / cost_of(portion, rows))
    return [portion.test for portion in left]
