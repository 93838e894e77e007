"""The agent's side of the beats: sends signs of life, and detects a silent coordinator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from unicron_lightning import wire
from unicron_lightning.detection.silence import Lateness, Silence, SilenceLimits

logger = logging.getLogger(__name__)

_LOOKS_PER_BEAT: Final = 4
_LATE_SECONDS: Final = 0.1


class Pulse:
    """Beats of one connection.

    Args:
        limits: limits of silence, as set by the coordinator.
        send: writes a message.
        quiet: called at each look while the coordinator has been silent for the least limit. An irregular or new
            connection may stay silent for longer, but whether the process is stopped can be read at once.
        cut: ends the connection.
    """

    def __init__(
        self,
        limits: SilenceLimits,
        send: Callable[[wire.Message], Awaitable[None]],
        quiet: Callable[[], None],
        cut: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._send = send
        self._quiet = quiet
        self._cut = cut
        self._silence = Silence(limits, time.monotonic())

    def heard(self, message: wire.ToAgent) -> None:
        """Record a message of the coordinator."""
        if isinstance(message, wire.Beat):
            self._silence.beat(time.monotonic())
        else:
            self._silence.heard(time.monotonic())

    def retime(self, limits: SilenceLimits) -> None:
        """Continue with other limits, since the coordinator has more agents now, or fewer."""
        if limits != self._limits:
            self._limits, self._silence = limits, Silence(limits, time.monotonic())

    async def run(self) -> None:
        """Send beats and check for silence until cancelled, or until the connection is cut."""
        while True:
            await self._send(wire.Beat())
            limits = self._limits
            interval = limits.beat / _LOOKS_PER_BEAT
            lateness = Lateness(interval, time.monotonic())
            for _ in range(_LOOKS_PER_BEAT):
                await asyncio.sleep(interval)
                now = time.monotonic()
                late = lateness.fired(now)
                if late > _LATE_SECONDS:
                    self._silence.excuse(late, now)
                elif self._silence.is_end(now):
                    logger.warning("coordinator_silent seconds=%.2f", self._silence.seconds(now))
                    self._cut()
                    return
                elif self._silence.seconds(now) > self._limits.least:
                    self._quiet()
                if self._limits.beat < limits.beat:
                    break
