"""Reads a peer's messages and passes them on, until the connection ends or a message is malformed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohttp import WSCloseCode, WSMsgType

from unicron_lightning import wire
from unicron_lightning.coordinator.server import malformed
from unicron_lightning.coordinator.server.direct import DirectWebSocket
from unicron_lightning.coordinator.server.session import PeerConnection

logger = logging.getLogger(__name__)

Take = Callable[[int, "str | bytes"], None]
"""Decodes a message of a connection, given its number, and passes it to the machine."""


async def read(
    conn: int, socket: DirectWebSocket, take: Take, session: PeerConnection, register_timeout: float
) -> None:
    """Read until the connection ends or its peer sends a malformed message.

    Args:
        conn: number of the connection.
        socket: the connection; later messages are handled as they arrive, without this coroutine.
        take: raises one of `malformed.UNREADABLE`.
        session: the sending side.
        register_timeout: seconds for the first message.
    """

    def direct(payload: bytes) -> bool:
        if session.finishing:
            return True
        try:
            take(conn, payload)
        except malformed.UNREADABLE:
            return False  # received below, which finds the same
        return True

    timeout: float | None = register_timeout
    handed_over = False
    while True:
        try:
            frame = await socket.receive(timeout=timeout)
        except asyncio.TimeoutError:
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"no register message in time")
            return
        if frame.type is not WSMsgType.TEXT:
            if frame.type is WSMsgType.BINARY:
                await socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"expected text frames")
            return
        try:
            take(conn, frame.data)
        except malformed.UNREADABLE as error:
            reason = malformed.described(frame.data, error)
            logger.warning("message_malformed conn=%d error=%s", conn, reason)
            if timeout is not None and malformed.is_first(frame.data):
                await socket.send_str(wire.encode(wire.Refused(reason=reason)).decode())
            reason = f"malformed message: {reason}"
            await socket.close(code=WSCloseCode.INVALID_TEXT, message=reason.encode()[:120])
            return
        timeout = None
        handed_over = handed_over or socket.hand_over(direct)
