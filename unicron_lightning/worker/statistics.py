"""Running statistics of a worker's steps: what is usual, what is slow, and after how long a step has failed.

Pure: no clock, no thread. `StepStatistics.take` is given finished steps; a step in which something else was done than
a step (validation, a checkpoint, a recovery), and the first of an epoch, does not count. Averages are of what is left
when outliers are left out, so that one stall of the loader changes nothing.

From the paper (section on online statistical monitoring): an iteration over 1.1x the running average is degraded, over
3x it has failed. Here the first is asked of the median of the last `RECENT` steps against those before, which do not
move while it holds; the second is `StepStatistics.limit`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from unicron_lightning import wire
from unicron_lightning.worker.activity import StepTimes

WARM_UP: Final = 5
"""Steps after which the average counts."""
WINDOW: Final = 100
"""Steps of the running average."""
RECENT: Final = 20
"""Steps of which the median is compared with those before: "for a sustained while"."""
REFERENCE: Final = 200
"""Steps that it is compared with."""
OUTLIER: Final = 3.0
"""Steps longer than so many medians are left out of the average."""
NOISE: Final = 2.0
"""A step may take so many times what one in twenty takes: where steps vary that much, 3x the average is no failure."""
CHANGED: Final = 10.0
"""The first steps after a change may take so many times the average from before it."""
_SIGMA: Final = 1.4826
"""Standard deviation of a normal distribution in units of its median absolute deviation."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A worker's steps, in seconds.

    Attributes:
        steps: how many the average is of.
        mean: of a step, outliers left out; None before `WARM_UP` steps.
        median: of the last `RECENT` steps.
        usual: of the `REFERENCE` steps before those; None if they are too few.
        spread: robust standard deviation of the latter.
        busy: what one micro-batch takes this rank, waiting left out: median of the last `RECENT` steps.
        micro_batches: of this rank, in the last step.
        phases: means of the last `RECENT` steps, by phase.
        limit: core time after which a step has failed; None if that is not known.
    """

    steps: int
    mean: float | None
    median: float | None
    usual: float | None
    spread: float
    busy: float | None
    micro_batches: int
    phases: dict[str, float] = field(default_factory=dict)
    limit: float | None = None

    @property
    def slowdown(self) -> float:
        """How many times longer than usual the last steps took; 1 if that is within the noise, or not known."""
        if self.median is None or not self.usual or self.median - self.usual <= self.spread:
            return 1.0
        return self.median / self.usual


class StepStatistics:
    """What is usual for one worker in the present world.

    Args:
        limits: factors and times.
    """

    def __init__(self, limits: wire.WatchLimits | None = None) -> None:
        self.limits = limits or wire.WatchLimits()
        self._epoch: int | None = None
        self._before: float | None = None
        """The average in the epoch before."""
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._recent: deque[StepTimes] = deque(maxlen=RECENT)
        self._reference: deque[float] = deque(maxlen=REFERENCE)
        self._share = 0
        self._mean: float | None = None
        self._limit: float | None = None

    def take(self, steps: Iterable[StepTimes]) -> None:
        """More steps are finished."""
        counted = False
        for step in steps:
            if step.epoch != self._epoch:
                self._change(step)
            elif step.ordinary and step.micro_batches == self._share:
                self._count(step)
                counted = True
            self._share = step.micro_batches  # the first step with another share does not count
        if counted:
            self._average()

    @property
    def mean(self) -> float | None:
        """Of a step in this epoch; None before `WARM_UP` steps."""
        return self._mean

    def limit(self, *, steady: bool) -> float | None:
        """Seconds in core phases after which the step in progress has failed; None if nothing is known to judge by.

        Args:
            steady: whether the world has not changed in it.
        """
        if self._limit is not None and steady:
            return self._limit
        known = max([self._mean or self._before or 0.0, *([] if self._mean else self._window)]) or None
        return None if known is None else CHANGED * known + self.limits.change_time

    def summary(self) -> Summary:
        """All that is known."""
        recent = [step.seconds for step in self._recent]
        busy = [step.busy for step in self._recent if step.busy is not None]
        usual, spread = None, 0.0
        if len(self._reference) >= RECENT:
            usual = statistics.median(self._reference)
            spread = _SIGMA * statistics.median(abs(value - usual) for value in self._reference)
        names = sorted({name for step in self._recent for name in step.phases})
        return Summary(
            steps=len(self._window),
            mean=self._mean,
            median=statistics.median(recent) if len(recent) >= WARM_UP else None,
            usual=usual,
            spread=spread,
            busy=statistics.median(busy) if len(busy) >= WARM_UP else None,
            micro_batches=self._share,
            phases={n: sum(step.phases.get(n, 0.0) for step in self._recent) / len(recent) for n in names},
            limit=self._limit,
        )

    def _change(self, step: StepTimes) -> None:
        """Another world: what was usual is so no more. Its first step has the change in it."""
        self._epoch = step.epoch
        self._before = self._mean or self._before
        self._mean = self._limit = None
        self._window.clear()
        self._recent.clear()
        self._reference.clear()

    def _count(self, step: StepTimes) -> None:
        self._window.append(step.seconds)
        if len(self._recent) == RECENT and not self._is_slow():
            self._reference.append(self._recent[0].seconds)
        self._recent.append(step)

    def _is_slow(self) -> bool:
        """Whether the last steps are degraded: then they do not become what is usual."""
        if len(self._reference) < RECENT:
            return False
        usual = statistics.median(self._reference)
        return statistics.median(s.seconds for s in self._recent) > self.limits.degraded_factor * usual

    def _average(self) -> None:
        ordered = sorted(self._window)
        if len(ordered) < WARM_UP:
            return
        middle = ordered[len(ordered) // 2]
        usual = [value for value in ordered if value <= OUTLIER * middle]
        self._mean = sum(usual) / len(usual)
        often = usual[max(0, int(0.95 * len(usual)) - 1)]
        self._limit = max(self.limits.factor * self._mean, NOISE * often) + self.limits.slack
