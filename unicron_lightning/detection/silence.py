"""Silence limits of connections: a threshold for each, learned from the regularity of its beats.

The method follows the phi-accrual failure detector (Hayashibara et al. 2004): a silence counts by how unlikely it is,
given the earlier beats. Gaps are assumed to be normally distributed; `_DEVIATIONS` of them are phi = 12.

Two rules are added. A stall is remembered for minutes, as a machine that stalled once does so again, and it would be
lost among a hundred regular beats. And a connection with few beats is not considered regular yet.

Pure: times are arguments, of a monotonic clock, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

_WEIGHT: Final = 0.05
"""Weight of the newest gap in mean and variance, which so cover about the last forty."""
_DEVIATIONS: Final = 7.0
_STALLS: Final = 1.5
"""Factor on the worst remembered stall that a silence may reach."""
_HALF_LIFE_SECONDS: Final = 300.0
"""Seconds in which a stall's weight halves."""
_LEARNING_BEATS: Final = 60
_BEATS_PER_SECOND: Final = 2000
_REPORTS_PER_SECOND: Final = 1000
ISOLATION_SECONDS: Final = 300.0
"""Time without a message of any peer until they count as dead nevertheless."""
NOT_ISOLATED: Final = -math.inf

KeyT = TypeVar("KeyT")


@dataclass(frozen=True, kw_only=True)
class SilenceLimits:
    """Seconds between beats, and the bounds of a threshold."""

    beat: float
    least: float
    most: float

    def shared_by(self, peers: int) -> SilenceLimits:
        """Return the limits for one of many peers: a beat costs the receiver some 50 us, which must stay a
        small load.
        """
        beat = max(self.beat, peers / _BEATS_PER_SECOND)
        return SilenceLimits(beat=beat, least=max(self.least, 2 * beat), most=max(self.most, 3 * beat))


def outdated(held: SilenceLimits, shared: SilenceLimits) -> bool:
    """Whether a peer's limits have to be renewed since the number of peers has changed: each renewal is a message."""
    return not 0.5 < held.beat / shared.beat < 2.0


def report_seconds(peers: int) -> float:
    """Return the least seconds between two progress reports of one of many peers; workers make one each second."""
    return peers / _REPORTS_PER_SECOND if peers > _REPORTS_PER_SECOND else 0.0


class Silence:
    """Regularity of one side's messages, as observed by the other.

    Args:
        limits: bounds of the threshold.
        now: time of the connection's start.
    """

    def __init__(self, limits: SilenceLimits, now: float) -> None:
        self._limits = limits
        self._mean, self._variance, self._worst = limits.beat, 0.0, 0.0
        self._beats = 0
        self._last_beat: float | None = None
        self._heard = now
        self.threshold = limits.most
        """Seconds of silence after which the connection is dead."""

    @property
    def limits(self) -> SilenceLimits:
        """Bounds of the threshold."""
        return self._limits

    def heard(self, now: float) -> None:
        """Record any message."""
        self._heard = now

    def beat(self, now: float) -> None:
        """Record a beat."""
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
        """Excuse silence while this side could not receive."""
        self._heard = min(now, self._heard + seconds)
        if self._last_beat is not None:
            self._last_beat = min(now, self._last_beat + seconds)

    def seconds(self, now: float) -> float:
        """Return the seconds since the last message."""
        return now - self._heard

    def is_end(self, now: float) -> bool:
        """Whether the other side counts as dead."""
        return now - self._heard > self.threshold


def ended(
    peers: Mapping[KeyT, Silence], limits: SilenceLimits, now: float, *, heard: float, isolated_until: float
) -> tuple[list[KeyT], float]:
    """Return dead peers, and the time until which this side counts as isolated.

    If most peers are silent together, this side is the likely cause, and they get more time. If no peer is heard at
    all, this side is isolated, and none counts as dead before `ISOLATION_SECONDS`.

    Args:
        peers: all connections.
        limits: bounds of all thresholds.
        now: the time.
        heard: time of the newest message of anyone.
        isolated_until: returned by the last call, `NOT_ISOLATED` at first.
    """
    silent = [key for key, peer in peers.items() if peer.is_end(now)]
    if len(silent) > 1 and 2 * len(silent) > len(peers):
        silent = [key for key in silent if peers[key].seconds(now) > limits.most]
    if now - heard < limits.shared_by(len(peers)).least:
        isolated_until = NOT_ISOLATED
    elif silent and isolated_until == NOT_ISOLATED:
        isolated_until = now + ISOLATION_SECONDS
    return ([] if now < isolated_until else silent), isolated_until


class Lateness:
    """Lateness of this process' own timer, which excuses messages that it could not receive meanwhile."""

    def __init__(self, interval: float, now: float) -> None:
        self._interval = interval
        self._due = now + interval

    def fired(self, now: float) -> float:
        """Record the timer's expiry; return the seconds by which it was late."""
        late = max(0.0, now - self._due)
        self._due = now + self._interval
        return late
