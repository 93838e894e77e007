"""Timers of the coordinator's state machine, which make allowance for a loop that could not run.

While the coordinator stands still (stopped, swapped out, a slow disk), agents take it for silent and connect again.
When it runs again it sees the ends of the old connections first, with the new ones still waiting in the socket. A
grace period that is over by then, or begins then, says nothing about the agents, so it is prolonged.

If many connections break at once, the coordinator needs time to take the agents in again, one after the other: their
grace periods are longer. Those that expire together are one input, and so lead to one new epoch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Final

from unicron_lightning.coordinator import events as ev

LATE_SECONDS: Final = 0.5
"""Lateness from which the loop counts as stalled. Agents do not notice shorter stalls."""
ALLOWANCE_SECONDS: Final = 3.0
"""Time after a stall in which agents may connect again and register."""
OF_ABSENCE: Final = frozenset({"lost", "missing", "node_lost"})
"""Kinds of timers whose expiry declares agents or daemons absent."""
LOST: Final = "lost"
"""Kind of the timers of agents whose connection has ended."""
CROWD_SECONDS: Final = 0.01
"""Additional grace for each other agent that is away: to take one in costs 2 to 3 ms, more on a loaded machine."""
AGAIN_SECONDS: Final = 0.1
TOGETHER_SECONDS: Final = 0.02
"""Agents whose grace ends within this time are declared lost together."""


class Timers:
    """The running timers, in the coordinator's loop.

    Args:
        fired: called with the input for the machine when timers have expired.
    """

    def __init__(self, fired: Callable[[ev.TimerFired | ev.AbsencesDue], None]) -> None:
        self._fired = fired
        self._handles: dict[ev.TimerKey, asyncio.TimerHandle] = {}
        self._away: dict[ev.TimerKey, float] = {}
        """Running timers of kind `LOST`, with the loop time at which the grace of a single agent ends."""
        self._allowed_until = 0.0
        """Loop time until which the allowance for the last stall holds."""

    def stalled(self) -> None:
        """Record that the loop could not run until now."""
        self._allowed_until = asyncio.get_running_loop().time() + ALLOWANCE_SECONDS

    def excusing(self) -> bool:
        """Whether the loop stood still so shortly before that agents connect again for this reason."""
        return asyncio.get_running_loop().time() < self._allowed_until

    def set(self, key: ev.TimerKey, seconds: float) -> None:
        """Start or restart a timer."""
        self.cancel(key)
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        if key.kind in OF_ABSENCE:
            due = max(due, self._allowed_until)
        if key.kind == LOST:
            self._away[key] = due
        self._handles[key] = loop.call_at(due, self._expire, key, due)

    def cancel(self, key: ev.TimerKey) -> None:
        """Stop a timer if it runs."""
        handle = self._handles.pop(key, None)
        self._away.pop(key, None)
        if handle is not None:
            handle.cancel()

    def cancel_tasks(self, tasks: Collection[str]) -> None:
        """Stop all timers of some tasks."""
        for key in [key for key in self._handles if key.task in tasks]:
            self.cancel(key)

    def expire_now(self, kind: str, task: str, agent: str) -> None:
        """End a running timer at once, as if it had expired."""
        key = ev.TimerKey(kind, task, agent)
        if key in self._handles:
            self.cancel(key)
            self._fired(ev.TimerFired(key=key))

    def close(self) -> None:
        """Stop all timers."""
        for key in list(self._handles):
            self.cancel(key)

    def _expire(self, key: ev.TimerKey, due: float) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - due > LATE_SECONDS:
            self.stalled()
        if key.kind in OF_ABSENCE and loop.time() < self._allowed_until:
            self._handles[key] = loop.call_at(self._allowed_until, self._expire, key, self._allowed_until)
            return
        if key.kind == LOST:
            self._expire_lost(key, loop.time())
            return
        self._handles.pop(key, None)
        self._fired(ev.TimerFired(key=key))

    def _expire_lost(self, key: ev.TimerKey, now: float) -> None:
        crowd = CROWD_SECONDS * (len(self._away) - 1)
        if now < self._away[key] + crowd:
            due = min(self._away[key] + crowd, now + AGAIN_SECONDS)  # others may return
            self._handles[key] = asyncio.get_running_loop().call_at(due, self._expire, key, due)
            return
        gone = [other for other, due in self._away.items() if due + crowd <= now + TOGETHER_SECONDS]
        for other in gone:
            self.cancel(other)
        self._fired(ev.AbsencesDue(keys=tuple(gone)))


class SteadyClock:
    """Seconds since 1970, anchored at the creation of the clock.

    Args:
        wall: time.time(), or a stand-in.
        monotonic: time.monotonic(), or a stand-in.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def now(self) -> float:
        """Return the time."""
        return self._offset + self._monotonic()
