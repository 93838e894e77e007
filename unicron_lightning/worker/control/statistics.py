"""Running statistics of a worker's steps: the usual duration, slow steps, and the limit for a failed step.

Pure: no clock, no thread. `StepStatistics.take` receives finished steps. Steps with other activities (validation, a
checkpoint, a recovery) and the first step of an epoch do not count. Averages exclude outliers, so that a single stall
of the loader changes nothing.

From the paper (section on online statistical monitoring): an iteration over 1.1x the running average is degraded, over
3x it has failed. Here the first rule compares the median of the last `RECENT` steps with the steps before, which stay
fixed while the rule holds; the second rule is `StepStatistics.limit`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from unicron_lightning import wire
from unicron_lightning.worker.control.activity import StepTimes

WARM_UP: Final = 5
"""Number of steps from which on the average counts."""
WINDOW: Final = 100
"""Steps of the running average."""
RECENT: Final = 20
"""Steps whose median is compared with earlier ones: "for a sustained while"."""
REFERENCE: Final = 200
"""Earlier steps in this comparison."""
OUTLIER: Final = 3.0
"""Steps longer than this multiple of the median are excluded from the average."""
NOISE: Final = 2.0
"""Allowed multiple of the 95th percentile of step times: where steps vary that much, 3x the average is no failure."""
CHANGED: Final = 10.0
"""Allowed multiple of the earlier average for the first steps after a change."""
_SIGMA: Final = 1.4826
"""Standard deviation of a normal distribution in units of its median absolute deviation."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Statistics of a worker's steps, in seconds.

    Attributes:
        steps: number of steps in the average.
        mean: of a step, without outliers; None before `WARM_UP` steps.
        median: of the last `RECENT` steps.
        usual: median of the `REFERENCE` steps before those; None if they are too few.
        spread: robust standard deviation of the steps of ``usual``.
        busy: time of one micro-batch on this rank without waiting: median of the last `RECENT` steps.
        micro_batches: of this rank, in the last step.
        phases: means of the last `RECENT` steps, by phase.
        limit: core time after which a step has failed; None if unknown.
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
        """Ratio of the last steps' time to the usual one; 1 if the difference is within the noise or unknown."""
        if self.median is None or not self.usual or self.median - self.usual <= self.spread:
            return 1.0
        return self.median / self.usual


class StepStatistics:
    """The usual step times of one worker in the present world.

    Attributes:
        limits: factors and times.
    """

    def __init__(self) -> None:
        self.limits = wire.WatchLimits()
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
        """Add finished steps."""
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
        """Mean time of a step in this epoch; None before `WARM_UP` steps."""
        return self._mean

    def limit(self, *, steady: bool) -> float | None:
        """Seconds in core phases after which the step in progress has failed; None without any data.

        Args:
            steady: whether the world has not changed during the step.
        """
        if self._limit is not None and steady:
            return self._limit
        known = max([self._mean or self._before or 0.0, *([] if self._mean else self._window)]) or None
        return None if known is None else CHANGED * known + self.limits.change_time

    def summary(self) -> Summary:
        """All statistics."""
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
        """Start statistics for another world. Its first step includes the change."""
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
        """Whether the last steps are degraded, in which case they do not become the reference."""
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


def evaluation_limit(batches: Sequence[float], limits: wire.WatchLimits) -> float | None:
    """Seconds that a batch of a validation usually does not exceed; None without any batch.

    Args:
        batches: seconds of the last ones.
        limits: factor and slack, as for steps.
    """
    if not batches:
        return None
    ordered = sorted(batches)
    often = ordered[int(0.95 * (len(ordered) - 1))]
    return max(limits.factor * sum(ordered) / len(ordered), NOISE * often) + limits.slack
