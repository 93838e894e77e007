"""The agent's persistent connection to the coordinator.

It is opened at the first rendezvous and reopened whenever it breaks, with delays that double from 50 ms to 2 s, each
shortened at random so that the agents of a restarted coordinator do not return together (`link.retry_delay`). Each
connection begins with a new `wire.Register`. Only these end a session: an answered goodbye, a refusal, and, before it
was first open, the coordinator's absence for the time allowed or a coordinator that cannot be started. Once the session
was open, the agent retries for as long as it lives: its workers train without a coordinator.

The coordinator answers a `wire.Bye` by closing the connection after it has stored the goodbye. What was only written
may be lost, even to a coordinator that lives: a socket that is closed with unread input discards what the other side
has not read yet.

**The outbox** has messages of the agent to the coordinator, kept until their delivery is sufficiently certain.
While the coordinator is away, messages that `wire.Register` repeats or that become stale are dropped; the rest is kept
in order. Messages written shortly before the coordinator was last heard, or later, may be lost: those that can safely
be repeated are sent again, and an unanswered goodbye in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from socket import SHUT_RDWR
from typing import Any, Final

import aiohttp
import msgspec

from unicron_lightning import wire
from unicron_lightning.agent.injection import Cut
from unicron_lightning.detection.silence import Lateness, Silence, SilenceLimits
from unicron_lightning.errors import CoordinatorUnavailable, CoordinatorUnproven
from unicron_lightning.link import (
    ATTEMPT_SECONDS,
    FIRST_RETRY_SECONDS,
    SESSION,
    end_tasks,
    longest_retry,
    open_socket,
    retry_delay,
)
from unicron_lightning.tls import Access

logger = logging.getLogger(__name__)


RESEND_SECONDS: Final = 5.0
"""Age of messages, when the coordinator is last heard, that may be lost with it: it may be one that waits for its lease
to be renewed, and has written nothing since.
"""

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
        heard_at: time of the coordinator's newest message in this connection.
    """

    def __init__(self) -> None:
        self.progress_seconds = 0.0
        self.heard_at = math.inf
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
        while self._recent and self._recent[0][0] < min(now, self.heard_at) - RESEND_SECONDS:
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
        since, self.heard_at = min(now, self.heard_at) - RESEND_SECONDS, math.inf
        again = [message for at, message in self._recent if at >= since or isinstance(message, wire.Bye)]
        kept = [message for message in self._queue if not isinstance(message, _CARRIED_OTHERWISE + _STALE)]
        self._recent.clear()
        self._held.clear()
        self._queue = deque(again + kept)


_LOOKS_PER_BEAT: Final = 4
_LATE_SECONDS: Final = 0.1


class Pulse:
    """Beats of one connection: sends signs of life, and detects a silent coordinator.

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


QUIET_SECONDS: Final = 1.2
"""Seconds without an answer to an attempt after which the coordinator may be stopped."""
_CLOSE_SECONDS: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class SessionHooks:
    """Callbacks of a session's owner; all are called in the event loop."""

    register: Callable[[], wire.Register]
    """Builds the first message of a connection."""
    received: Callable[[wire.ToAgent], None]
    """Receives a message."""
    nothing_listens: Callable[[], Awaitable[None]]
    """Called when the endpoint refuses connections."""
    not_answering: Callable[[], None]
    """Called when an attempt has had no answer for `QUIET_SECONDS`, or until it timed out, repeatedly while the open
    session is silent, and after each loss of the session.
    """


class CoordinatorSession:
    """Session of one agent.

    Args:
        url: ``http://host:port/v1/agent``.
        access: to the coordinator.
        connect_timeout: seconds that the first connection may take.
        hooks: callbacks of the owner.
    """

    def __init__(self, url: str, access: Access, connect_timeout: float, hooks: SessionHooks) -> None:
        self._url = url
        self._access = access
        self._unproven_told = False
        self._connect_timeout = connect_timeout
        self._hooks = hooks
        self._outbox = Outbox()
        self._over = asyncio.Event()
        self._more = asyncio.Event()
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._away_since: float | None = time.monotonic()
        self._ever_stood = False
        self._said_bye = False
        self._transport: asyncio.Transport | None = None
        self._unanswered: asyncio.TimerHandle | None = None
        """Asks whether the coordinator is stopped, unless it answers the present attempt before."""
        self._cut: Cut | None = None
        self._passable = asyncio.Event()
        self._passable.set()

    @property
    def away_seconds(self) -> float:
        """Seconds since the session was last open; 0 if it is."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    def send(self, message: wire.Message) -> None:
        """Queue a message; `Outbox` defines its handling while the coordinator is away."""
        self._outbox.put(message)
        self._more.set()

    def cut(self, seconds: float | None) -> None:
        """Inject a fault: make the connection carry nothing for a time (None: permanently), unnoticed by both ends."""
        if self._cut is None:
            self._passable.clear()
            if self._transport is not None and not self._transport.is_closing():
                self._cut = Cut(self._transport)
            if seconds is not None:
                asyncio.get_running_loop().call_later(seconds, self._heal)

    def _heal(self) -> None:
        self._passable.set()
        if self._cut is not None:
            self._cut.heal()
            self._cut = None

    async def ended(self, seconds: float) -> bool:
        """Wait until the session has ended, at most ``seconds``; return whether it has."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
        return self._over.is_set()

    async def run(self) -> None:
        """Keep the session up until cancelled, or until the coordinator has answered a goodbye.

        Raises:
            SessionRefused: the coordinator refuses this agent.
            CoordinatorUnavailable: the coordinator did not answer in time at the start.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ATTEMPT_SECONDS)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as http:
                await self._keep(http)
        finally:
            self._over.set()
            if self._cut is not None:
                self._cut.forget()

    async def _keep(self, http: aiohttp.ClientSession) -> None:
        while True:
            await self._passable.wait()
            answered = False
            self._unanswered = asyncio.get_running_loop().call_later(QUIET_SECONDS, self._hooks.not_answering)
            try:
                answered = await self._one_connection(http)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError, CoordinatorUnproven) as error:
                self._unanswered.cancel()
                await self._not_reached(error)
            finally:
                self._unanswered.cancel()
            if answered:
                return
            self._lost()
            await asyncio.sleep(retry_delay(self._retry_seconds))
            self._retry_seconds = min(2 * self._retry_seconds, longest_retry(self._url))

    async def _one_connection(self, http: aiohttp.ClientSession) -> bool:
        """Carry messages until the connection ends; return whether the coordinator closed it after a goodbye."""
        closing = aiohttp.ClientWSTimeout(ws_close=_CLOSE_SECONDS)
        async with await open_socket(http, self._url, self._access, timeout=closing, **SESSION) as socket:
            self._transport = _transport_of(socket)
            self._outbox.opened()
            await socket.send_str(wire.encode(self._hooks.register()).decode())
            tasks: list[asyncio.Task[None]] = []
            pulse: Pulse | None = None
            try:
                while not socket.closed:
                    frame = await socket.receive()
                    if frame.type is aiohttp.WSMsgType.CLOSE:
                        return self._said_bye and frame.data == aiohttp.WSCloseCode.OK
                    self._outbox.heard_at = time.monotonic()
                    message = _decode(frame)
                    if message is None:
                        continue
                    if pulse is not None:
                        pulse.heard(message)
                    if isinstance(message, wire.Registered) and not tasks:
                        self._stands(message)
                        tasks.append(asyncio.create_task(self._write(socket)))
                        if (pulse := _pulse(socket, message, self._hooks.not_answering)) is not None:
                            tasks.append(asyncio.create_task(pulse.run()))
                    elif isinstance(message, wire.Registered):
                        self._outbox.progress_seconds = message.progress
                        if pulse is not None and (limits := _limits(message)) is not None:
                            pulse.retime(limits)
                    if not isinstance(message, wire.Beat):
                        self._hooks.received(message)
            finally:
                await end_tasks(tasks)
        return False

    async def _write(self, socket: aiohttp.ClientWebSocketResponse[Any]) -> None:
        while True:
            self._more.clear()
            while (message := self._outbox.take(time.monotonic())) is not None:
                await socket.send_str(wire.encode(message).decode())
                self._said_bye |= isinstance(message, wire.Bye)
            await self._more.wait()

    def _stands(self, message: wire.Registered) -> None:
        logger.info("session_stands coordinator=%s url=%s", message.coordinator, self._url)
        self._ever_stood = True
        self._away_since = None
        self._outbox.progress_seconds = message.progress
        if self._unanswered is not None:
            self._unanswered.cancel()
        self._unproven_told = False
        self._retry_seconds = FIRST_RETRY_SECONDS

    def _lost(self) -> bool:
        """Record that no connection is open; return whether the session has been lost by that."""
        lost = self._away_since is None
        if lost:
            logger.warning("session_lost url=%s", self._url)
            self._away_since = time.monotonic()
            self._hooks.not_answering()  # maybe it was silent for too long: no need for an attempt that shows it again
        self._outbox.closed(time.monotonic())
        return lost

    async def _have_one_started(self) -> None:
        try:
            await self._hooks.nothing_listens()
        except (CoordinatorUnavailable, OSError) as error:
            if not self._ever_stood:
                raise CoordinatorUnavailable(f"no coordinator for {self._url} could be started: {error}") from error
            logger.error("coordinator_not_started url=%s error=%s", self._url, error)

    async def _not_reached(self, error: BaseException) -> None:
        lost = self._lost()
        logger.debug("coordinator_not_reached url=%s error=%r", self._url, error)
        if isinstance(error, CoordinatorUnproven) and not self._unproven_told:
            self._unproven_told = True
            logger.warning("coordinator_unproven %s; nothing was sent to it; retrying", error)
        if isinstance(getattr(error, "os_error", error), ConnectionRefusedError):
            await self._have_one_started()
        elif isinstance(error, asyncio.TimeoutError) and not lost:
            self._hooks.not_answering()
        if not self._ever_stood and self.away_seconds > self._connect_timeout:
            raise CoordinatorUnavailable(
                f"no coordinator answered at {self._url} within {self._connect_timeout:g} s "
                f"(--rdzv-endpoint, --rdzv-conf connect_timeout): {error}"
            ) from None


def _transport_of(socket: aiohttp.ClientWebSocketResponse[Any]) -> asyncio.Transport | None:
    """Return aiohttp's private transport; used for `CoordinatorSession.cut` only."""
    connection = getattr(getattr(socket, "_response", None), "connection", None)
    transport = getattr(connection, "transport", None)
    # An encrypted one is a layer around that of the socket.
    return getattr(getattr(transport, "_ssl_protocol", None), "_transport", transport)


def _pulse(
    socket: aiohttp.ClientWebSocketResponse[Any], word: wire.Registered, quiet: Callable[[], None]
) -> Pulse | None:
    """Create the beats of a connection, if the coordinator wants them."""
    limits = _limits(word)
    if limits is None:
        return None

    async def send(message: wire.Message) -> None:
        await socket.send_str(wire.encode(message).decode())

    def cut() -> None:
        with contextlib.suppress(OSError):
            socket.get_extra_info("socket").shutdown(SHUT_RDWR)

    return Pulse(limits, send, quiet, cut)


def _limits(word: wire.Registered) -> SilenceLimits | None:
    if word.beat is None:
        return None
    return SilenceLimits(beat=word.beat, least=word.least_silence, most=word.most_silence)


def _decode(frame: Any) -> Any:
    if frame.type is not aiohttp.WSMsgType.TEXT:
        return None
    try:
        return wire.decode_to_agent(frame.data)
    except msgspec.DecodeError as error:
        logger.error("coordinator_message_unreadable error=%s", error)
        return None
