"""The sending side of one peer's connection."""

from __future__ import annotations

import asyncio
import struct
from typing import Final

from aiohttp import WSCloseCode, web

from unicron_lightning.link import end_tasks

_MOST_WAITING_BYTES: Final = 64 << 20
_TEXT: Final = 0x81


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
