"""The coordinator without its I/O: the real `Machine` on the virtual clock, in place of `server.Server`.

Messages take no time. Messages sent by agents at the same moment are processed together. Peers send their answers
through the clock, never from within a callback.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final, Protocol

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation.request import Question
from unicron_lightning.coordinator.machine import Machine
from unicron_lightning.simulate.clock import Clock
from unicron_lightning.wire.daemon import ToNode

_ORIGIN: Final = 1e9
"""time.time() at the beginning of the trace; 0 is reserved by the machine for unset times."""


class SimPeer(Protocol):
    """The owner of a connection."""

    def receive(self, message: wire.ToAgent | ToNode) -> None:
        """Receives a message."""

    def closed(self) -> None:
        """Called when the coordinator has closed the connection."""


class SimShell:
    """One coordinator.

    Args:
        clock: the virtual clock.
        limits: parameters of the machine.
        plan: answers its questions.
        seen: receives each logged event.
    """

    def __init__(
        self,
        clock: Clock,
        limits: ev.Limits,
        plan: Callable[[Question], ev.Planned],
        seen: Callable[[ev.Emit], None],
    ) -> None:
        self.machine = Machine(limits)
        self._clock = clock
        self._plan = plan
        self._seen = seen
        self._peers: dict[int, SimPeer] = {}
        self._conns = itertools.count(1)
        self._timers: dict[ev.TimerKey, int] = {}
        """Number of the valid setting of each timer."""
        self._settings = itertools.count()
        self._said: list[ev.AgentMessage | ev.DaemonMessage] = []
        self._back_at: int | None = None
        """Time at which a failed coordinator is back, in microseconds; None: it runs."""
        self._held: list[ev.Input] = []
        """Inputs of the time without a coordinator."""
        self.do(ev.Started())

    @property
    def time(self) -> float:
        """time.time()."""
        return _ORIGIN + self._clock.seconds

    def connect(self, peer: SimPeer) -> int:
        """Open a connection."""
        conn = next(self._conns)
        self._peers[conn] = peer
        return conn

    def disconnect(self, conn: int) -> None:
        """Handle the end of a connection."""
        if self._peers.pop(conn, None) is not None:
            self.do(ev.Disconnected(conn=conn))

    def say(self, said: ev.AgentMessage | ev.DaemonMessage) -> None:
        """Queue a message, to be processed with all others of this moment."""
        if not self._said:
            self._clock.after(0.0, self._take_in)
        self._said.append(said)

    def do(self, event: ev.Input) -> None:
        """Process one input, and its consequences."""
        self._take_in()
        self._handle(event)

    def fail(self, until: int) -> None:
        """Stop the coordinator until a time. Its state is stored; agents repeat what they could not report."""
        self._take_in()
        self._back_at = max(until, self._back_at or 0)
        self._clock.at(self._back_at, self._returns)

    def _returns(self) -> None:
        if self._back_at is not None and self._clock.now >= self._back_at:
            self._back_at = None
            held, self._held = self._held, []
            for event in held:
                self._handle(event)

    def _take_in(self) -> None:
        said, self._said = self._said, []
        if said:
            self._handle(ev.MessageBatch(received=tuple(said)) if len(said) > 1 else said[0])

    def _handle(self, event: ev.Input) -> None:
        if self._back_at is not None:
            self._held.append(event)
            return
        peers = self._peers
        for action in self.machine.handle(event, self.time):
            if type(action) is ev.Send:  # nearly all actions are; many send notices, which have no effect here
                peer = peers.get(action.conn)
                if peer is not None and type(action.message) is not wire.Notice:
                    peer.receive(action.message)
                continue
            match action:
                case ev.Emit():
                    self._seen(action)
                case ev.SetTimer(key=key, seconds=seconds):
                    self._set_timer(key, seconds)
                case ev.CancelTimer(key=key):
                    self._timers.pop(key, None)
                case ev.Close(conn=conn):
                    self._clock.after(0.0, lambda conn=conn: self._close(conn))  # type: ignore[misc]
                case ev.RequestPlan(question=question):
                    self._clock.after(0.0, lambda question=question: self.do(self._plan(question)))  # type: ignore[misc]

    def _close(self, conn: int) -> None:
        peer = self._peers.get(conn)
        if peer is not None:
            peer.closed()
            self.disconnect(conn)

    def _set_timer(self, key: ev.TimerKey, seconds: float) -> None:
        number = self._timers[key] = next(self._settings)
        self._clock.after(seconds, lambda: self._fire(key, number))

    def _fire(self, key: ev.TimerKey, number: int) -> None:
        if self._back_at is not None:
            self._clock.at(self._back_at, lambda: self._fire(key, number))
        elif self._timers.get(key) == number:
            del self._timers[key]
            self.do(ev.TimerFired(key=key))
