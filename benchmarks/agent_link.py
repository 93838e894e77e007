"""One connection of a simulated agent: the real handshake with its proofs, and frames of WebSockets.

All connections of a process read into one buffer. The content of the coordinator's answers is trusted.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

from unicron_lightning.credentials import token_for
from unicron_lightning.proof import Transcript, authorization, new_nonce

READ_BYTES = 1 << 18
HANDSHAKE = (
    "GET /v1/agent HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    "Authorization: {authorization}\r\n\r\n"
)
_TEXT, _PING, _PONG = 1, 9, 10
_read = memoryview(bytearray(READ_BYTES))


class Owner(Protocol):
    """Receives what a link reports."""

    def opened(self, link: Link) -> None:
        """Handle a link whose handshake has succeeded."""

    def hear(self, payload: bytes) -> None:
        """Handle a message."""

    def lost(self, link: Link) -> None:
        """Handle the end of a link."""


class Link(asyncio.BufferedProtocol):
    """One connection.

    Args:
        owner: the agent.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._rest = b""
        self._open = False
        self._nonce = new_nonce()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.write(f"GET /v1/challenge?nonce={self._nonce} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.lost(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _read

    def buffer_updated(self, nbytes: int) -> None:
        data = self._rest + bytes(_read[:nbytes])
        self._rest = b""
        if not self._open:
            data = self._shake_hands(data)
        for kind, payload in self._frames(data):
            if kind == _TEXT:
                self._owner.hear(payload)
            elif kind == _PING:
                self.write(frame_of(_PONG, payload))

    def write(self, frame: bytes) -> None:
        """Send a frame of `frame_of`, unless the connection is not open."""
        if self._open and self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        """Abort the connection without a message."""
        self._open = False
        if self._transport is not None:
            self._transport.abort()

    def _shake_hands(self, data: bytes) -> bytes:
        """Answer the challenge, then wait for the upgrade; return what follows it."""
        head, gap, body = data.partition(b"\r\n\r\n")
        if not gap or (self._nonce and not body.endswith(b"}")):
            self._rest = data
        elif self._nonce:
            self._answer(body)
        elif not head.startswith(b"HTTP/1.1 101"):
            self.close()
        else:
            self._open = True
            self._owner.opened(self)
            return body
        return b""

    def _answer(self, body: bytes) -> None:
        found = json.loads(body)
        transcript = Transcript(client=self._nonce, server=found["nonce"], address=found["address"])
        shown = authorization(_secret(), transcript, "GET", "/v1/agent")
        self._nonce = ""
        assert self._transport is not None
        self._transport.write(HANDSHAKE.format(authorization=shown).encode())

    def _frames(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        place, end = 0, len(data)
        while end - place >= 2:
            size, start = data[place + 1] & 0x7F, place + 2
            if size == 126:
                size, start = int.from_bytes(data[start : start + 2], "big"), start + 2
            elif size == 127:
                size, start = int.from_bytes(data[start : start + 8], "big"), start + 8
            if end < start + size:
                break
            yield data[place] & 0x0F, data[start : start + size]
            place = start + size
        self._rest = data[place:]


def frame_of(kind: int, payload: bytes) -> bytes:
    """Encode a client's frame: masked with zeros, which leaves the payload unchanged."""
    size = len(payload)
    length = struct.pack("!B", 0x80 | size) if size < 126 else struct.pack("!BH", 254, size)
    return bytes([0x80 | kind]) + length + bytes(4) + payload


def text_frame(payload: bytes) -> bytes:
    """Encode a message."""
    return frame_of(_TEXT, payload)


@cache
def _secret() -> str:
    return token_for("127.0.0.1", None).secret
