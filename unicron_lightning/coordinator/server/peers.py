"""Connections of peers: their messages as they arrive, malformed ones, and the meaning of a connection's end.

A WebSocket whose messages are handled as they arrive.

aiohttp passes each message through a queue and a future to a coroutine, which costs more than most messages do. Here
the coroutine reads the first messages, and everything that is unusual: control frames, fragments, large or malformed
messages. Once `DirectWebSocket.hand_over` is called, whole text frames go to a function instead.

Uses private names of aiohttp, see `DirectWebSocket._post_start`; without them all messages take aiohttp's way.

**Malformed input**: messages are refused in one sentence that quotes the value; invalid HTTP gets one line in the log.
Any process that reaches the port can send requests that are no valid HTTP. aiohttp logs them with a traceback each; an
error in a handler keeps its traceback.

**Presence** distinguishes an agent's death from a broken link: a dead agent's machine refuses connections to its port.
Each agent's process has an open TCPStore. When the agent's connection ends, the coordinator tries to connect to the
store. A refusal is sufficient evidence to act immediately. Any other result (an answer, or silence) leaves the agent
its grace period to return (`detection.reconnect_grace`). Since a firewall may refuse as well, a refusal counts only
where an earlier connection succeeded.

**Full runs of Python's garbage collector** take place at times that suit the coordinator. A full run visits every
object: 0.3 s with ten thousand agents, in the middle of whatever allocates. Left alone, it also runs each time the heap
has grown by a quarter, a fifth of the time in which ten thousand agents register. Only connections that have ended
leave cycles behind, so that their number decides.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import struct
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec
from aiohttp import WSCloseCode, web
from aiohttp.http_exceptions import HttpProcessingError
from typing_extensions import override

from unicron_lightning import wire
from unicron_lightning.link import end_tasks
from unicron_lightning.wire.fields import shortened

logger = logging.getLogger(__name__)


_MOST_WAITING_BYTES: Final = 64 << 20
_TEXT: Final = 0x81
"""First byte of a text frame that is a whole message without extensions."""


def frame_of(payload: bytes) -> bytes:
    """Encode a WebSocket text frame (RFC 6455, unmasked as a server's); recipients of the same message share it."""
    size = len(payload)
    if size < 126:
        return struct.pack("!BB", _TEXT, size) + payload
    if size < 1 << 16:
        return struct.pack("!BBH", _TEXT, 126, size) + payload
    return struct.pack("!BBQ", _TEXT, 127, size) + payload


class PeerConnection:
    """Sends messages in order, without making the machine wait for a slow peer.

    Frames go straight to the transport, whole ones at a time, so that aiohttp's own (pings, closing) can be sent in
    between. Through aiohttp's coroutines, a thousand agents would need a thousand tasks and as many copies of a
    message.
    """

    def __init__(self, socket: web.WebSocketResponse, transport: asyncio.Transport) -> None:
        self._socket = socket
        self._transport = transport
        self._closing: asyncio.Task[bool] | None = None
        self._held: list[bytes] = []

    @property
    def finishing(self) -> bool:
        """Whether the connection is being closed: nothing more is received."""
        return self._closing is not None

    def hold(self, frame: bytes) -> None:
        """Send a frame with the next `release`: a write costs more than a frame."""
        self._held.append(frame)

    def release(self) -> None:
        """Send the frames that are held."""
        held, self._held = self._held, []
        if held:
            self.send(b"".join(held))

    def send(self, frame: bytes) -> None:
        """Send frames of `frame_of`. A peer that reads nothing for too long is disconnected and registers again."""
        if self._closing is not None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > _MOST_WAITING_BYTES:
            self._transport.abort()
            return
        self._transport.write(frame)

    def abort(self) -> None:
        """End the connection without a closing handshake: the peer does not respond."""
        self._transport.abort()

    def finish(self, reason: str) -> None:
        """Close the connection once all pending frames have been sent."""
        self.release()
        if self._closing is None:
            closing = self._socket.close(code=WSCloseCode.OK, message=reason.encode()[:120])
            self._closing = asyncio.create_task(closing)

    async def close(self, code: WSCloseCode, reason: str) -> None:
        """Close the connection now."""
        await self.stop()
        await self._socket.close(code=code, message=reason.encode()[:120])

    async def stop(self) -> None:
        """Stop waiting for the closing handshake; the reading side closes the socket."""
        if self._closing is not None:
            await end_tasks([self._closing])


FIRST_LOOK_SECONDS: Final = 1.0
"""Seconds between the report of a store's address and the first test connection."""
_SECONDS: Final = 2.0
_AGAIN_SECONDS: Final = 0.002
_HERE: Final = frozenset({"127.0.0.1", "::1", "localhost"})


async def refuses(address: wire.Address, seconds: float = _SECONDS) -> bool:
    """Whether connections to the address are refused; asks again while a successful one is being closed."""

    async def ask() -> bool:
        while True:
            try:
                reader, writer = await asyncio.open_connection(address.host, address.port)
            except ConnectionRefusedError:
                return True
            except OSError:
                return False
            try:
                await reader.read(1)  # a dying process keeps its port for a short time
            except OSError:
                pass
            finally:
                writer.close()
            await asyncio.sleep(_AGAIN_SECONDS)

    try:
        return await asyncio.wait_for(ask(), seconds)
    except asyncio.TimeoutError:
        return False


async def _answers(address: wire.Address) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address.host, address.port), _SECONDS)
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True


class Presence:
    """Addresses of agents' stores, by connection."""

    def __init__(self) -> None:
        self._told: dict[int, wire.Address] = {}
        self._reached: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def record_store(self, conn: int, address: wire.Address | None) -> None:
        """Record the address of an agent's store."""
        self._forget(conn)
        if address is None:
            return
        self._told[conn] = address
        self._start(self._reach(conn, address))

    def ended(self, conn: int, gone: Callable[[], None]) -> None:
        """Handle the end of the connection; ``gone`` is called if the process is found to have exited, too."""
        address = self._told.get(conn)
        if address is not None and conn in self._reached:
            self._start(self._look(address, gone))
        self._forget(conn)

    def _forget(self, conn: int) -> None:
        self._told.pop(conn, None)
        self._reached.discard(conn)

    async def close(self) -> None:
        """Stop all checks."""
        await end_tasks(list(self._tasks))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reach(self, conn: int, address: wire.Address) -> None:
        if address.host not in _HERE:  # a thousand agents start at a time
            await asyncio.sleep(FIRST_LOOK_SECONDS)
        if self._told.get(conn) is address and await _answers(address) and self._told.get(conn) is address:
            self._reached.add(conn)

    async def _look(self, address: wire.Address, gone: Callable[[], None]) -> None:
        if await refuses(address):
            logger.info("agent_process_ended host=%s port=%d", address.host, address.port)
            gone()


class Misplaced(Exception):
    """A message names a place that its sender may not name."""


UNREADABLE: Final = (msgspec.DecodeError, UnicodeError, RecursionError, Misplaced)
"""Raised by decoders for messages that they cannot decode."""
_PLACE: Final = re.compile(r" - at `\$([^`]*)`\Z")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_FIRST: Final = ("register", "node_hello")


def described(data: str, error: Exception) -> str:
    """Describe the error in a message, quoting the wrong value, shortened.

    Args:
        data: the message.
        error: one of `UNREADABLE`, raised for the message.
    """
    text = str(error)
    if isinstance(error, Misplaced):
        return text
    found = _PLACE.search(text)
    if found is None:
        return f"{text}, got {shortened(data)}"
    name = f"{found.group(1).removeprefix('.')}"
    try:
        value = _at(msgspec.json.decode(data), found.group(1))
    except (*UNREADABLE, LookupError, TypeError):
        return f"{name}: {_lower(text[: found.start()])}"
    return f"{name}={shortened(value)}: {_lower(text[: found.start()])}"


def is_first(data: str) -> bool:
    """Whether a message was meant as a connection's first; its sender is then notified that it can't take part."""
    try:
        message = msgspec.json.decode(data)
    except UNREADABLE:
        return False
    return isinstance(message, dict) and message.get("type") in _FIRST


def _at(value: Any, path: str) -> Any:
    for key, index in _STEP.findall(path):
        value = value[key] if key else value[int(index)]
    return value


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


_LOG_SECONDS: Final = 1.0


class Malformed(logging.Filter):
    """Reduces records of malformed requests to one line, at most one a second."""

    def __init__(self) -> None:
        super().__init__()
        self._last = float("-inf")
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if not isinstance(error, HttpProcessingError):
            return True
        now = time.monotonic()
        if now - self._last < _LOG_SECONDS:
            self._left_out += 1
            return False
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg, record.exc_info, record.exc_text = "request_malformed error=%s left_out=%d", None, None
        record.args = (shortened(error.message), self._left_out)
        self._last, self._left_out = now, 0
        return True


def request_logger() -> logging.Logger:
    """Return the logger for aiohttp's server, with the filter."""
    if not any(isinstance(each, Malformed) for each in logger.filters):
        logger.addFilter(Malformed())
    return logger


_FINAL: Final = 0x80
_MASKED: Final = 0x80
_TWO_BYTES: Final = 126
_EIGHT_BYTES: Final = 127


class WholeFrames:
    """Divides a client's stream into frames for one of two receivers.

    Args:
        parser: aiohttp's parser of this connection; has received nothing yet.
        alive: called when data arrives, at most every ``seconds``.
        seconds: see ``alive``.

    Attributes:
        handle: receives the payload of each text frame, and returns whether it has handled it; if not, or while it is
            None, the parser receives the frame.
    """

    def __init__(self, parser: Any, alive: Callable[[], None], seconds: float) -> None:
        self.handle: Callable[[bytes], bool] | None = None
        self._parser = parser
        self._alive = alive
        self._seconds, self._noted = seconds, 0.0
        self._rest = b""
        self._through = False
        """Whether the parser receives everything from now on."""

    def feed_eof(self) -> None:
        """Handle the end of the stream."""
        self._parser.feed_eof()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Handle received bytes; return whether the stream has to end, and unused bytes, as aiohttp's parsers do."""
        now = time.monotonic()
        if now - self._noted >= self._seconds:
            self._noted = now
            self._alive()
        if self._through:
            return self._pass(data)
        data = self._rest + data if self._rest else bytes(data)
        place, end = 0, len(data)
        while end - place >= 2:
            start, size = place + 2, data[place + 1] & 0x7F
            if size == _TWO_BYTES:
                size, start = int.from_bytes(data[start : start + 2], "big"), start + 2
            elif size == _EIGHT_BYTES:
                size = -1
            if size < 0 or not (data[place] & _FINAL and data[place + 1] & _MASKED):
                self._through, self._rest = True, b""
                return self._pass(data[place:])
            stop = start + 4 + size
            if stop > end:
                break
            if data[place] != _TEXT or self.handle is None or not self.handle(_unmasked(data, start, stop)):
                ended, unused = self._pass(data[place:stop])
                if ended:
                    return ended, unused
            place = stop
        self._rest = data[place:]
        return False, b""

    def _pass(self, data: bytes) -> tuple[bool, bytes]:
        ended, unused = self._parser.feed_data(data)
        return bool(ended), bytes(unused)


class DirectWebSocket(web.WebSocketResponse):
    """A server's WebSocket; see the module.

    Args:
        heartbeat: seconds without data after which the client is pinged.
        options: of `aiohttp.web.WebSocketResponse`.
    """

    def __init__(self, *, heartbeat: float, **options: Any) -> None:
        super().__init__(heartbeat=heartbeat, **options)
        self._alive_seconds = heartbeat / 4
        self._whole: WholeFrames | None = None

    @override
    def _post_start(self, request: Any, protocol: Any, writer: Any) -> None:
        http = request.protocol
        early = getattr(http, "_message_tail", b"-")  # sent before the upgrade: the parser has begun with it
        super()._post_start(request, protocol, writer)
        parser, alive = getattr(http, "_payload_parser", None), getattr(http, "_data_received_cb", None)
        if not early and parser is not None and alive is not None:
            self._whole = WholeFrames(parser, alive, self._alive_seconds)
            http._payload_parser, http._data_received_cb = self._whole, None

    def hand_over(self, handle: Callable[[bytes], bool]) -> bool:
        """Have a function handle the text frames that arrive from now on.

        Args:
            handle: receives a frame's payload, returns whether it has handled it. A frame that it has not handled, and
                all later ones, are received by the coroutine.

        Returns:
            False if earlier messages still wait for the coroutine, or if this connection cannot do so.
        """
        whole, waiting = self._whole, getattr(self._reader, "_buffer", True)
        if whole is None or waiting:
            return False

        def first(payload: bytes) -> bool:
            handled = handle(payload)
            if not handled:
                whole.handle = None
            return handled

        whole.handle = first
        return True

    def take_back(self) -> None:
        """Have the coroutine receive all frames again."""
        if self._whole is not None:
            self._whole.handle = None


def _unmasked(data: bytes, start: int, stop: int) -> bytes:
    """Return the payload of a frame whose mask begins at ``start``."""
    size = stop - start - 4
    mask = (data[start : start + 4] * (size // 4 + 1))[:size]
    number = int.from_bytes(data[start + 4 : stop], "little") ^ int.from_bytes(mask, "little")
    return number.to_bytes(size, "little")


_YOUNG: Final = 5_000
_MIDDLE: Final = 10
_NEVER: Final = 1_000_000
_FEWEST: Final = 256
_LOOK_SECONDS: Final = 5.0


def defer_full_runs() -> None:
    """Leave full runs of this process to `FullCollections`; runs over young objects take some milliseconds."""
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)


class FullCollections:
    """Runs the collector in full once enough connections have ended."""

    def __init__(self) -> None:
        self._ended = self._alive = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start looking."""
        self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def close(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def ended(self, alive: int) -> None:
        """Count the end of a connection; ``alive`` is the number of the others."""
        self._ended, self._alive = self._ended + 1, alive

    def _look(self) -> None:
        if self._ended >= max(_FEWEST, self._alive // 2):
            self._ended = 0
            gc.collect()
        self.start()
