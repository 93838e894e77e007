"""Measured WAF: the value of the tasks' finished steps per second."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Work:
    """A task's finished steps.

    Attributes:
        ends: time.time() at the end of each step, rising.
        worth: weight x FLOPs of one step.
    """

    ends: Sequence[float]
    worth: float


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of the act: from ``start`` to ``end``, time.time()."""

    name: str
    start: float
    end: float


def mean_waf(works: Mapping[str, Work], phase: Phase) -> float:
    """Weighted FLOP/s over a phase."""
    done = sum(work.worth * sum(1 for end in work.ends if phase.start < end <= phase.end) for work in works.values())
    return done / (phase.end - phase.start)


def waf_over_time(
    works: Mapping[str, Work], start: float, end: float, window: float = 2.0, every: float = 0.1
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Moments [s], and the weighted FLOP/s of the ``window`` seconds before each."""
    moments = np.arange(start, end, every)
    total = np.zeros_like(moments)
    for work in works.values():
        ends = np.asarray(work.ends, dtype=np.float64)
        counts = np.searchsorted(ends, moments, side="right") - np.searchsorted(ends, moments - window, side="right")
        total += work.worth * counts / window
    return moments, total


def longest_stand(work: Work, start: float, end: float) -> float:
    """Longest time without a finished step between two moments, in seconds."""
    inside = [start, *(at for at in work.ends if start < at <= end), end]
    return max(later - earlier for earlier, later in itertools.pairwise(inside))
