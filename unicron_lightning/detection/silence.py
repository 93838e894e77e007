"""When is silence the end? A threshold for each connection, learned from how regularly its beats have come.

The idea is that of the phi-accrual failure detector (Hayashibara et al. 2004): not the time since the last beat counts
but how unlikely it is, given those before. Gaps are taken as normally distributed; `_DEVIATIONS` of them is phi = 12.
Two things are added. A stall is remembered for minutes, as a machine that stood still once does so again, and it would
be lost among a hundred good beats. And a connection that has not been heard of for long is not taken for a regular one.

Pure: times are arguments, of a monotonic clock, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

_WEIGHT: Final = 0.05
"""Of the newest gap in mean and variance: they are those of about the last forty."""
_DEVIATIONS: Final = 7.0
_STALLS: Final = 1.5
"""How much longer than the worst stall remembered a silence may be."""
_HALF_LIFE_SECONDS: Final = 300.0
"""In which a stall is half forgotten."""
_LEARNING_BEATS: Final = 60
_BEATS_PER_SECOND: Final = 2000

Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True)
class SilenceLimits:
    """Seconds: between beats, and the least and most that a threshold can be."""

    beat: float
    least: float
    most: float

    def shared_by(self, peers: int) -> SilenceLimits:
        """For one of so many: a beat costs the listener some 50 us, and it must not be busy with that."""
        beat = max(self.beat, peers / _BEATS_PER_SECOND)
        return SilenceLimits(beat=beat, least=max(self.least, 2 * beat), most=max(self.most, 3 * beat))


class Silence:
    """What one side knows of how regularly the other is heard of.

    Args:
        limits: see there.
        now: when the connection began.
    """

    def __init__(self, limits: SilenceLimits, now: float) -> None:
        self._limits = limits
        self._mean, self._variance, self._worst = limits.beat, 0.0, 0.0
        self._beats = 0
        self._last_beat: float | None = None
        self._heard = now
        self.threshold = limits.most
        """Seconds of silence that are the end."""

    def heard(self, now: float) -> None:
        """Anything came: it lives."""
        self._heard = now

    def beat(self, now: float) -> None:
        """A beat came."""
        gap = None if self._last_beat is None else max(0.0, now - self._last_beat)
        self._last_beat = self._heard = now
        if gap is None:
            return
        self._beats += 1
        deviation = gap - self._mean
        self._mean += _WEIGHT * deviation
        self._variance = (1 - _WEIGHT) * (self._variance + _WEIGHT * deviation * deviation)
        self._worst = max(gap, self._worst * 0.5 ** (gap / _HALF_LIFE_SECONDS))
        limits = self._limits
        expected = max(self._mean + _DEVIATIONS * math.sqrt(self._variance), _STALLS * self._worst, limits.least)
        unknown = max(0.0, 1 - self._beats / _LEARNING_BEATS)
        self.threshold = min(limits.most, expected + unknown * (limits.most - limits.least))

    def excuse(self, seconds: float, now: float) -> None:
        """For so long this side could not listen."""
        self._heard = min(now, self._heard + seconds)
        if self._last_beat is not None:
            self._last_beat = min(now, self._last_beat + seconds)

    def seconds(self, now: float) -> float:
        """For how long nothing was heard."""
        return now - self._heard

    def is_end(self, now: float) -> bool:
        """Whether the other side counts as gone."""
        return now - self._heard > self.threshold


def ended(peers: Mapping[Key, Silence], limits: SilenceLimits, now: float) -> list[Key]:
    """Those that count as gone. If most fall silent together it is rather this side's fault: they get more time."""
    silent = [key for key, peer in peers.items() if peer.is_end(now)]
    if len(silent) > 1 and 2 * len(silent) > len(peers):
        return [key for key in silent if peers[key].seconds(now) > limits.most]
    return silent


class Lateness:
    """How late this process' own timer fires: what it could not hear meanwhile is nobody else's fault."""

    def __init__(self, interval: float, now: float) -> None:
        self._interval = interval
        self._due = now + interval

    def fired(self, now: float) -> float:
        """The timer has fired; seconds by which it was late."""
        late = max(0.0, now - self._due)
        self._due = now + self._interval
        return late
