"""Timers of the coordinator's state machine, which make allowance for a loop that could not run.

While the coordinator cannot run (stopped, swapped out, a slow disk), agents take it for silent and connect again.
When it runs again it sees the ends of the old connections first, with the new ones still waiting in the socket. A
grace period that is over by then, or begins then, is no evidence about the agents, so it is prolonged.

If many connections break at once, the coordinator needs time to take the agents in again, one after the other: their
grace periods are longer. Those that expire together are one input, and so lead to one new epoch.

**Liveness.** Silent agents' connections are detected: beats are answered and checked beside the state machine.
An agent that exits closes its connection immediately. This module detects cuts that close none: dropped packets, a
machine without power. The verdict closes the connection, and the machine handles that as any other disconnection.

**Isolation.** If no agent at all is heard, this side is cut off: workers train on, and to declare them lost would throw
their work away as soon as they are heard again. Nobody is lost then before `ISOLATION_SECONDS`; where all agents have
really died, nothing could be done earlier either. A process that has restored tasks is isolated until it hears anyone.
A leader that has heard agents before gives way after `GIVES_WAY_SECONDS`: a stand-by may hear them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection
from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.server.peers import frame_of
from unicron_lightning.detection.silence import (
    ISOLATION_SECONDS,
    NOT_ISOLATED,
    Lateness,
    Silence,
    SilenceLimits,
    ended,
    outdated,
)

logger = logging.getLogger(__name__)


LATE_SECONDS: Final = 0.5
"""Lateness from which the loop counts as stalled. Agents do not notice shorter stalls."""
_OF_ABSENCE: Final = frozenset({"lost", "missing", "node_lost", "restore"})
"""Kinds of timers whose expiry declares agents or daemons absent."""
LOST: Final = "lost"
"""Kind of the timers of agents whose connection has ended."""
_CROWD_SECONDS: Final = 0.01
"""Additional grace for each other agent that is away: to take one in costs 2 to 3 ms, more on a loaded machine."""
AGAIN_SECONDS: Final = 0.1
_TOGETHER_SECONDS: Final = 0.02
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
        self._allowed_until = self._excusing_until = 0.0
        """Loop times until which nobody is declared absent, and until which no link is to blame."""

    def allow(self) -> None:
        """Give all agents that are away time to connect again from now on."""
        self._allowed_until = asyncio.get_running_loop().time() + ev.RETURN_SECONDS

    def stalled(self) -> None:
        """Record that the loop could not run until now."""
        self.allow()
        self._excusing_until = self._allowed_until

    def excusing(self) -> bool:
        """Whether the loop stood still so shortly before that agents connect again for this reason."""
        return asyncio.get_running_loop().time() < self._excusing_until

    def set(self, key: ev.TimerKey, seconds: float) -> None:
        """Start or restart a timer."""
        self.cancel(key)
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        if key.kind in _OF_ABSENCE:
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
        if key.kind in _OF_ABSENCE and loop.time() < self._allowed_until:
            self._handles[key] = loop.call_at(self._allowed_until, self._expire, key, self._allowed_until)
            return
        if key.kind == LOST:
            self._expire_lost(key, loop.time())
            return
        self._handles.pop(key, None)
        self._fired(ev.TimerFired(key=key))

    def _expire_lost(self, key: ev.TimerKey, now: float) -> None:
        crowd = _CROWD_SECONDS * (len(self._away) - 1)
        if now < self._away[key] + crowd:
            due = min(self._away[key] + crowd, now + AGAIN_SECONDS)  # others may return
            self._handles[key] = asyncio.get_running_loop().call_at(due, self._expire, key, due)
            return
        gone = [other for other, due in self._away.items() if due + crowd <= now + _TOGETHER_SECONDS]
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


_LOOKS_PER_BEAT: Final = 4
_LATE_SECONDS: Final = 0.1
GIVES_WAY_SECONDS: Final = 3.0
"""Silence of all agents from which an isolated leader gives way to a stand-by."""
ANSWER: Final = frame_of(wire.encode(wire.Beat()))
"""Answer to a beat: confirms to the agent that the coordinator receives its messages."""


class Liveness:
    """Silence of all agents' connections, watched in the coordinator's event loop.

    Args:
        limits: limits of silence.
        cut: ends a connection, given its number.
        timers: prolonged when the loop runs again after it could not, and while no agent is heard.
        give_way: called while no agent is heard for more than `GIVES_WAY_SECONDS`, unless none ever was: then an
            earlier leader has heard none either.
    """

    def __init__(
        self,
        limits: SilenceLimits,
        cut: Callable[[int], None],
        timers: Timers,
        give_way: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = limits
        self._timers = timers
        self._cut, self._give_way = cut, give_way
        self._peers: dict[int, Silence] = {}
        self._given_up: dict[int, float] = {}
        self._heard = -math.inf
        """Time of the newest message of anyone."""
        self._isolated_until = NOT_ISOLATED
        self._seconds = 0.0
        """Between two looks."""
        self._lateness: Lateness | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, *, awaited: bool = False) -> None:
        """Start watching; ``awaited``: agents of an earlier process have to come again."""
        if awaited:
            self._isolated_until = time.monotonic() + ISOLATION_SECONDS
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
        now = self._heard = time.monotonic()
        peer, shared = self._peers.get(conn), self._limits.shared_by(len(self._peers))
        renewed = peer is not None and outdated(peer.limits, shared)
        if peer is None or renewed:
            peer = self._peers[conn] = Silence(shared, now)
        peer.beat(now)
        return renewed

    def heard(self, conn: int) -> None:
        """Record any other message, also of a connection without beats."""
        self._heard = time.monotonic()
        if (peer := self._peers.get(conn)) is not None:
            peer.heard(self._heard)

    def forget(self, conn: int) -> float | None:
        """Handle the end of a connection; return the seconds of silence for which it was cut, or None."""
        self._peers.pop(conn, None)
        return self._given_up.pop(conn, None)

    def _again(self) -> None:
        self._seconds = self._limits.shared_by(len(self._peers)).beat / _LOOKS_PER_BEAT
        self._lateness = Lateness(self._seconds, time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        assert self._lateness is not None
        late = self._lateness.fired(now)
        if late > LATE_SECONDS:
            self._timers.stalled()
        if late > _LATE_SECONDS:
            # Every agent looks late to a loop that could not run; their messages may still be unread.
            for peer in self._peers.values():
                peer.excuse(late, now)
        else:
            self._judge(now)
        self._again()

    def _judge(self, now: float) -> None:
        """End the connections of dead agents, or prolong all grace periods while no agent is heard."""
        before = self._isolated_until
        dead, self._isolated_until = ended(
            self._peers, self._limits, now, heard=self._heard, isolated_until=self._isolated_until
        )
        if before == NOT_ISOLATED < self._isolated_until:
            logger.warning("coordinator_isolated agents=%d seconds=%g", len(self._peers), ISOLATION_SECONDS)
        if now < self._isolated_until:
            for peer in self._peers.values():
                peer.excuse(self._seconds, now)
            if self._heard == -math.inf:
                self._timers.allow()  # links of a process that has just started may be to blame when they break
            else:
                self._timers.stalled()
                if now - self._heard > GIVES_WAY_SECONDS:
                    self._give_way()
        for conn in dead:
            seconds = self._peers.pop(conn).seconds(now)
            logger.warning("agent_silent conn=%d seconds=%.2f", conn, seconds)
            self._given_up[conn] = seconds
            self._cut(conn)
