"""Which agents' connections are silent for too long: beats are answered, and judged, beside the state machine.

An agent that is gone closes its connection at once. What this is for are cuts that close none: packets dropped, a
machine without power. The verdict ends the connection; what follows from that is the machine's business, as for any.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator.session import frame_of
from unicron_lightning.detection.silence import Lateness, Silence, SilenceLimits, ended

logger = logging.getLogger(__name__)

_LOOKS_PER_BEAT: Final = 4
_LATE_SECONDS: Final = 0.1
ANSWER: Final = frame_of(wire.encode(wire.Beat()))
"""To a beat: with it the agent knows that the coordinator hears it."""


class Liveness:
    """Of all agents' connections, in the coordinator's loop.

    Args:
        limits: of silence.
        cut: ends a connection, given its number.
    """

    def __init__(self, limits: SilenceLimits, cut: Callable[[int], None]) -> None:
        self._limits = limits
        self._cut = cut
        self._peers: dict[int, Silence] = {}
        self._given_up: dict[int, float] = {}
        self._lateness: Lateness | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look."""
        self._lateness = Lateness(self._limits.beat / _LOOKS_PER_BEAT, time.monotonic())
        self._again()

    def close(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def beat(self, conn: int) -> None:
        """A beat came; who has sent one is expected to go on."""
        now = time.monotonic()
        if conn not in self._peers:
            self._peers[conn] = Silence(self._limits.shared_by(len(self._peers)), now)
        self._peers[conn].beat(now)

    def heard(self, conn: int) -> None:
        """Anything else came."""
        if (peer := self._peers.get(conn)) is not None:
            peer.heard(time.monotonic())

    def forget(self, conn: int) -> float | None:
        """The connection has ended; returns the seconds of silence for which it was cut, None if it was not."""
        self._peers.pop(conn, None)
        return self._given_up.pop(conn, None)

    def _again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limits.beat / _LOOKS_PER_BEAT, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        assert self._lateness is not None
        late = self._lateness.fired(now)
        if late > _LATE_SECONDS:
            # All agents look late to a loop that could not run; what they sent meanwhile may be unread still.
            for peer in self._peers.values():
                peer.excuse(late, now)
        else:
            for conn in ended(self._peers, self._limits, now):
                seconds = self._peers.pop(conn).seconds(now)
                logger.warning("agent_silent conn=%d seconds=%.2f", conn, seconds)
                self._given_up[conn] = seconds
                self._cut(conn)
        self._again()
