"""Detection of silent agents' connections: beats are answered and checked beside the state machine.

An agent that exits closes its connection immediately. This module detects cuts that close none: dropped packets, a
machine without power. The verdict closes the connection, and the machine handles that as any other disconnection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator.server.session import frame_of
from unicron_lightning.coordinator.server.timers import LATE_SECONDS
from unicron_lightning.detection.silence import Lateness, Silence, SilenceLimits, ended, outdated

logger = logging.getLogger(__name__)

_LOOKS_PER_BEAT: Final = 4
_LATE_SECONDS: Final = 0.1
ANSWER: Final = frame_of(wire.encode(wire.Beat()))
"""Answer to a beat: confirms to the agent that the coordinator receives its messages."""


class Liveness:
    """Silence of all agents' connections, watched in the coordinator's event loop.

    Args:
        limits: limits of silence.
        cut: ends a connection, given its number.
        stalled: called when the loop runs again after it could not.
    """

    def __init__(self, limits: SilenceLimits, cut: Callable[[int], None], stalled: Callable[[], None]) -> None:
        self._limits = limits
        self._stalled = stalled
        self._cut = cut
        self._peers: dict[int, Silence] = {}
        self._given_up: dict[int, float] = {}
        self._lateness: Lateness | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start watching."""
        self._again()

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def connections(self) -> int:
        """Number of watched connections."""
        return len(self._peers)

    def beat(self, conn: int) -> bool:
        """Record a beat; a connection that has sent one is expected to continue.

        Returns:
            Whether the agent has to be sent other limits, since the number of agents has changed: those that registered
            first would beat most often.
        """
        now = time.monotonic()
        peer, shared = self._peers.get(conn), self._limits.shared_by(len(self._peers))
        renewed = peer is not None and outdated(peer.limits, shared)
        if peer is None or renewed:
            peer = self._peers[conn] = Silence(shared, now)
        peer.beat(now)
        return renewed

    def heard(self, conn: int) -> None:
        """Record any other message."""
        if (peer := self._peers.get(conn)) is not None:
            peer.heard(time.monotonic())

    def forget(self, conn: int) -> float | None:
        """Handle the end of a connection; return the seconds of silence for which it was cut, or None."""
        self._peers.pop(conn, None)
        return self._given_up.pop(conn, None)

    def _again(self) -> None:
        seconds = self._limits.shared_by(len(self._peers)).beat / _LOOKS_PER_BEAT
        self._lateness = Lateness(seconds, time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        assert self._lateness is not None
        late = self._lateness.fired(now)
        if late > LATE_SECONDS:
            self._stalled()
        if late > _LATE_SECONDS:
            # Every agent looks late to a loop that could not run; their messages may still be unread.
            for peer in self._peers.values():
                peer.excuse(late, now)
        else:
            for conn in ended(self._peers, self._limits, now):
                seconds = self._peers.pop(conn).seconds(now)
                logger.warning("agent_silent conn=%d seconds=%.2f", conn, seconds)
                self._given_up[conn] = seconds
                self._cut(conn)
        self._again()
