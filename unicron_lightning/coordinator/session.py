"""The sending side of one peer's connection."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import Final

from aiohttp import WSCloseCode, web

_MOST_WAITING_BYTES: Final = 64 << 20
_TEXT: Final = 0x81


def frame_of(payload: bytes) -> bytes:
    """A WebSocket text frame (RFC 6455, of a server: not masked). The same for all who are told the same."""
    size = len(payload)
    if size < 126:
        return struct.pack("!BB", _TEXT, size) + payload
    if size < 1 << 16:
        return struct.pack("!BBH", _TEXT, 126, size) + payload
    return struct.pack("!BBQ", _TEXT, 127, size) + payload


class Session:
    """Sends messages in order, without making the machine wait for a slow peer.

    Frames go straight to the transport, whole ones at a time, so that aiohttp's own (pings, closing) come between them:
    through its coroutines a thousand agents would be a thousand tasks to be woken, and as many copies of a message.
    """

    def __init__(self, socket: web.WebSocketResponse, transport: asyncio.Transport) -> None:
        self._socket = socket
        self._transport = transport
        self._closing: asyncio.Task[bool] | None = None

    def send(self, frame: bytes) -> None:
        """Send what `frame_of` made. A peer that takes none for too long is cut off; it will register anew."""
        if self._closing is not None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > _MOST_WAITING_BYTES:
            self._transport.abort()
            return
        self._transport.write(frame)

    def abort(self) -> None:
        """End the connection without a word: nobody is heard at the other end."""
        self._transport.abort()

    def finish(self, reason: str) -> None:
        """Close the connection once all that was sent has left."""
        if self._closing is None:
            closing = self._socket.close(code=WSCloseCode.OK, message=reason.encode()[:120])
            self._closing = asyncio.create_task(closing)

    async def close(self, code: WSCloseCode, reason: str) -> None:
        """Close the connection now."""
        await self.stop()
        await self._socket.close(code=code, message=reason.encode()[:120])

    async def stop(self) -> None:
        """Wait for no closing any more; the socket is closed by whoever reads from it."""
        if self._closing is not None:
            self._closing.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await self._closing
