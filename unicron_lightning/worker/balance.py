"""Shares by speed: a rank whose micro-batches take longer gets fewer of them. The global batch stays what it is.

Every rank has to plan the same step, so what this is decided from is the same on all of them: each rank's time per
micro-batch, which comes with the commit, since the epoch began. Nothing is carried over to another epoch: whoever joins
or recovers knows as much as the others, and all begin with equal shares.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

OBSERVED: Final = 8
"""Steps with one division, whose median decides on the next."""
WORTH: Final = 0.1
"""Another division must make the step's longest share shorter by this part; else shares would follow the noise."""


def deal(micro_batches: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Divides micro-batches among ranks, so many to each, with few changes of hands when the counts change a little.

    Raises:
        ValueError: the counts do not add up to their number.
    """
    if sum(counts) != len(micro_batches):
        raise ValueError(f"shares {list(counts)} of {len(micro_batches)} micro-batches: expected as many in all")
    dealt = [list(micro_batches[rank :: len(counts)]) for rank in range(len(counts))]
    over = [item for share, count in zip(dealt, counts, strict=True) for item in share[count:]]
    shares = [share[:count] for share, count in zip(dealt, counts, strict=True)]
    for share, count in zip(shares, counts, strict=True):
        while len(share) < count:
            share.append(over.pop(0))
        share.sort()
    return shares


def fit(times: Sequence[float], total: int) -> list[int]:
    """The counts with the shortest longest share, at least one for each rank.

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
    """The counts of a round-robin."""
    return [len(range(rank, total, world)) for rank in range(world)]


class Balance:
    """The shares of the present epoch.

    Args:
        total: micro-batches of a whole step.
        epoch: tells the present one.
        changed: told the new counts and each rank's seconds for a micro-batch.
    """

    def __init__(self, total: int, epoch: Callable[[], int], changed: Callable[[list[int], list[float]], None]) -> None:
        self._total = total
        self._now = epoch
        self._changed = changed
        self._epoch = -1
        self._counts: list[int] | None = None
        self._seen: deque[list[float]] = deque(maxlen=OBSERVED)
        self._skips = True

    def counts(self, total: int) -> list[int] | None:
        """How many of a step's micro-batches each rank gets; None: as equally as possible."""
        return self._counts if self._now() == self._epoch and total == self._total else None

    def take(self, times: Sequence[float]) -> None:
        """A step was committed, in which one micro-batch took each rank so many seconds (0: it had none)."""
        if (epoch := self._now()) != self._epoch:
            self._epoch, self._counts, self._skips = epoch, None, True
            self._seen.clear()
        if self._skips or min(times) <= 0.0 or self._total < len(times):
            self._skips = False  # the first step of a division: caches are cold
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
