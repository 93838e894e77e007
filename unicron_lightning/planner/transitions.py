"""D_transition: the time that a task loses when its workers change, estimated from measured transitions.

The paper's reward charges a plan F(t,x) * D_transition for each task that it changes ("Unicron", arXiv 2401.00134, the
section on plan generation). Durations differ most by kind, so each kind is estimated separately. Durations of a kind
are assumed to be log-normal, with log-median m and log-deviation d:

    E[duration] = exp(m + d^2 / 2)   [s]

A few transitions fail and take hours. m is therefore based on the median of the logarithms, and d on their median
absolute deviation (times 1.4826, which makes it consistent for a normal distribution; Rousseeuw and Croux, JASA 88,
1993). Few are measured at first, so both are shrunk towards the prior, by weights in numbers of transitions:

    m = (n0 m0 + n median) / (n0 + n)            d^2 = (n0 d0^2 + n d_mad^2) / (n0 + n)

first the kind over all other tasks towards the prior, then the task towards its kind. Only a task's newest transitions
of a kind count: scripts, machines and storage change.

Limits. Up to half of a task's transitions may be outliers without moving m at all; conversely, a task for which every
third transition really takes hours is underestimated. Each kind has one duration: the effect of the world's size on a
transition is not modelled.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from unicron_lightning.errors import check_numbers


def sorted_median(values: Sequence[float]) -> float:
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


NEWEST: Final = 64
"""Transitions of a task and kind that count, by default."""
_MAD_TO_DEVIATION: Final = 1.4826


@dataclass(frozen=True, kw_only=True)
class TransitionTime:
    """A log-normal distribution of durations, also used as a prior.

    Attributes:
        median_seconds: exp(m).
        log_deviation: d; with 0.7 two thirds of all transitions take between half and twice the median.
        num_transitions: weight of the estimate in transitions (n0 of a prior), > 0.
    """

    median_seconds: float
    log_deviation: float = 0.7
    num_transitions: float = 3.0

    def __post_init__(self) -> None:
        check_numbers(self, "median_seconds", "num_transitions", above=0)
        check_numbers(self, "log_deviation", least=0, expected="a finite number >= 0")

    @property
    def expected_seconds(self) -> float:
        """D_transition: the mean duration."""
        return self.median_seconds * math.exp(self.log_deviation**2 / 2)

    def observed(self, logs: Sequence[float]) -> TransitionTime:
        """The estimate after measured durations, with this one as the prior: as fast for thousands as for a few.

        Args:
            logs: logarithms of the durations, in ascending order.
        """
        if not logs:
            return self
        median = sorted_median(logs)
        # The spread of a single value is unknown, not zero.
        spread = _MAD_TO_DEVIATION * median_deviation(logs, median)
        num_before, num = self.num_transitions, len(logs)
        log_median = (num_before * math.log(self.median_seconds) + num * median) / (num_before + num)
        variance = self.log_deviation**2
        if num > 1:
            variance = (num_before * variance + num * spread**2) / (num_before + num)
        return TransitionTime(
            median_seconds=math.exp(log_median),
            log_deviation=math.sqrt(variance),
            num_transitions=num_before + num,
        )


class TransitionTimes:
    """Durations of each task's transitions, by kind.

    Args:
        measured: task, kind and seconds of all measured transitions, oldest first; seconds count from the last step
            finished before the change to the first one after it, and are > 0.
        priors: the prior of each kind.
        newest: number of newest transitions of a task and kind that count.
    """

    def __init__(
        self,
        measured: Iterable[tuple[str, str, float]],
        priors: Mapping[str, TransitionTime],
        *,
        newest: int = NEWEST,
    ) -> None:
        if newest < 1:
            raise ValueError(f"newest={newest}: expected an integer >= 1")
        self._priors = dict(priors)
        self._seconds: dict[str, dict[str, list[float]]] = {kind: {} for kind in priors}
        for task, kind, seconds in measured:
            of_task = self._seconds[kind].setdefault(task, [])
            of_task.append(seconds)
            del of_task[:-newest]
        self._logs = {
            kind: sorted(math.log(value) for of_task in tasks.values() for value in of_task)
            for kind, tasks in self._seconds.items()
        }
        """Logarithms of all tasks' durations, in ascending order."""
        self._unmeasured: dict[str, TransitionTime] = {}
        """The estimate for tasks without a transition of a kind, which is the same for all of them."""

    def of_kind(self, task: str, kind: str) -> TransitionTime:
        """The estimate for one kind of transition of a task, measured or not."""
        own = sorted(math.log(value) for value in self._seconds[kind].get(task, []))
        if not own:
            if kind not in self._unmeasured:
                self._unmeasured[kind] = self._towards(kind, self._logs[kind])
            return self._unmeasured[kind]
        others = self._logs[kind].copy()
        for log in own:
            del others[bisect.bisect_left(others, log)]
        return self._towards(kind, others).observed(own)

    def _towards(self, kind: str, others: Sequence[float]) -> TransitionTime:
        """The prior for a task's own transitions, from those of all others."""
        prior = self._priors[kind]
        pooled = prior.observed(others)
        # However many transitions other tasks have, for this task they have only the prior's weight.
        return TransitionTime(
            median_seconds=pooled.median_seconds,
            log_deviation=pooled.log_deviation,
            num_transitions=prior.num_transitions,
        )

    def expected_seconds(self, task: str) -> float:
        """D_transition of a task as one number: the mean over its kinds, weighted by their measured numbers.

        Each kind's prior counts with its ``num_transitions``.
        """
        total = weights = 0.0
        for kind, prior in self._priors.items():
            weight = prior.num_transitions + len(self._seconds[kind].get(task, []))
            total += weight * self.of_kind(task, kind).expected_seconds
            weights += weight
        return total / weights
