"""Shares by speed: a rank with slower micro-batches gets fewer of them. The global batch is unchanged.

Every rank has to plan the same step, so the decision uses data that is equal on all ranks: each rank's time per
micro-batch since the epoch began, as gathered after the commits. Nothing is carried over to another epoch: joiners and
recovered workers have the same data as the others, and every epoch begins with equal shares.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from unicron_lightning.copying import OfProcess

OBSERVED: Final = 8
"""Steps with one division, whose median decides on the next one."""
WORTH: Final = 0.1
"""Relative reduction of the step's longest share that justifies another division; smaller ones may be noise."""


def fit(times: Sequence[float], total: int) -> list[int]:
    """The counts with the shortest longest share, with at least one micro-batch for each rank.

    Args:
        times: of one micro-batch, by rank; > 0.
        total: number of micro-batches, at least one for each rank.
    """
    counts = [1] * len(times)
    for _ in range(total - len(times)):
        rank = min(range(len(times)), key=lambda r: ((counts[r] + 1) * times[r], r))
        counts[rank] += 1
    return counts


def equal(total: int, world: int) -> list[int]:
    """The counts of a round-robin division."""
    return [len(range(rank, total, world)) for rank in range(world)]


class Balance(OfProcess):
    """The shares of the present epoch.

    Args:
        total: returns the micro-batches of a whole step, the same on all ranks.
        epoch: returns the present epoch of membership.
        changed: called with the new counts and each rank's seconds per micro-batch.
    """

    def __init__(
        self, total: Callable[[], int], epoch: Callable[[], int], changed: Callable[[list[int], list[float]], None]
    ) -> None:
        self._whole = total
        self._now = epoch
        self._changed = changed
        self._epoch, self._total = -1, 0
        self._counts: list[int] | None = None
        self._seen: deque[list[float]] = deque(maxlen=OBSERVED)
        self._skips = True

    def counts(self, total: int) -> list[int] | None:
        """Number of a step's micro-batches for each rank; None for shares as equal as possible."""
        return self._counts if self._now() == self._epoch and total == self._total else None

    def take(self, times: Sequence[float]) -> None:
        """Record a committed step.

        Args:
            times: seconds per micro-batch of each rank; 0 for a rank without one.
        """
        if (epoch := self._now()) != self._epoch or self._whole() != self._total:
            self._epoch, self._total, self._counts, self._skips = epoch, self._whole(), None, True
            self._seen.clear()
        if self._skips or min(times) <= 0.0 or self._total < len(times):
            self._skips = False  # the first step of a division is slow because caches are cold
            return
        self._seen.append(list(times))
        if len(self._seen) == OBSERVED:
            self._review()

    def _review(self) -> None:
        usual = [statistics.median(values) for values in zip(*self._seen, strict=True)]
        counts = self._counts or equal(self._total, len(usual))
        better = fit(usual, self._total)
        now, then = (max(n * t for n, t in zip(part, usual, strict=True)) for part in (counts, better))
        if then > (1.0 - WORTH) * now:
            return
        self._counts, self._skips = better, True
        self._seen.clear()
        self._changed(better, usual)
