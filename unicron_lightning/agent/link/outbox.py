"""Messages of the agent to the coordinator, kept until their delivery is sufficiently certain.

While the coordinator is away, messages that `wire.Register` repeats or that become stale are dropped; the rest is kept
in order. Messages written shortly before the connection broke may be lost: those that can safely be repeated are sent
again, and an unanswered goodbye in any case.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from unicron_lightning import wire

RESEND_SECONDS: Final = 2.0

# Register carries the newest of these; a lookup is repeated until it is answered.
_CARRIED_OTHERWISE: Final = (
    wire.RendezvousBegin,
    wire.WorkerHello,
    wire.WorkerReady,
    wire.Replicas,
    wire.LocalWorld,
    wire.Lookup,
    wire.EpochWanted,
    wire.StateHeld,
)
_STALE: Final = (wire.NodeReading, wire.Progress, wire.ActivityReport)
_REPEATABLE: Final = (
    wire.WorkerDied,
    wire.WorkerDone,
    wire.CheckpointSaved,
    wire.Record,
    wire.CommError,
    wire.ErrorReport,
    wire.StoreUsed,
    wire.FaultDue,
    wire.Departing,
    wire.Bye,
)


class Outbox:
    """A queue of messages that outlives connections. Not thread-safe.

    Attributes:
        progress_seconds: least time between two progress reports of a worker, of which the newest is sent; one that
            precedes another message of the worker is sent with it.
    """

    def __init__(self) -> None:
        self.progress_seconds = 0.0
        self._held: dict[str, wire.Progress] = {}
        self._held_until = 0.0
        self._open = False
        self._queue: deque[wire.Message] = deque()
        self._recent: deque[tuple[float, wire.Message]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, message: wire.Message) -> None:
        """Queue a message, or drop it if there is no connection and the next one does not need it."""
        if isinstance(message, wire.Progress):
            if self._open:
                self._held[message.worker] = message
        elif self._open or not isinstance(message, _CARRIED_OTHERWISE + _STALE):
            if (before := self._held.pop(getattr(message, "worker", ""), None)) is not None:
                self._queue.append(before)
            self._queue.append(message)

    def take(self, now: float) -> wire.Message | None:
        """Return the next message to be written, None if there is none."""
        if self._held and now >= self._held_until:
            self._held_until = now + self.progress_seconds
            self._queue.extend(self._held.values())
            self._held.clear()
        if not self._queue:
            return None
        message = self._queue.popleft()
        while self._recent and self._recent[0][0] < now - RESEND_SECONDS:
            self._recent.popleft()
        if isinstance(message, _REPEATABLE):
            self._recent.append((now, message))
        return message

    def opened(self) -> None:
        """Mark the start of a registration: it covers all earlier messages, but no later ones."""
        self._open = True

    def closed(self, now: float) -> None:
        """Handle the end of the connection: keep the messages for the next one."""
        if not self._open:
            return
        self._open = False
        again = [message for at, message in self._recent if at >= now - RESEND_SECONDS or isinstance(message, wire.Bye)]
        kept = [message for message in self._queue if not isinstance(message, _CARRIED_OTHERWISE + _STALE)]
        self._recent.clear()
        self._held.clear()
        self._queue = deque(again + kept)
