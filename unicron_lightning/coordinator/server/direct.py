"""A WebSocket whose messages are handled as they arrive.

aiohttp passes each message through a queue and a future to a coroutine, which costs more than most messages do. Here
the coroutine reads the first messages, and everything that is unusual: control frames, fragments, large or malformed
messages. Once `DirectWebSocket.hand_over` is called, whole text frames go to a function instead.

Uses private names of aiohttp, see `DirectWebSocket._post_start`; without them all messages take aiohttp's way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web
from typing_extensions import override

_TEXT: Final = 0x81
"""First byte of a text frame that is a whole message without extensions."""
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
