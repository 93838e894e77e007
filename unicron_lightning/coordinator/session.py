"""The sending side of one agent's connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from aiohttp import ClientConnectionResetError, WSCloseCode, web

logger = logging.getLogger(__name__)

_MOST_WAITING = 10_000


@dataclass(frozen=True)
class _Finish:
    """Queued behind the last message."""

    reason: str


class Session:
    """Sends messages in order, without making the machine wait for a slow agent."""

    def __init__(self, socket: web.WebSocketResponse, transport: asyncio.Transport) -> None:
        self._socket = socket
        self._transport = transport
        self._queue: asyncio.Queue[str | _Finish] = asyncio.Queue()
        self._writer = asyncio.create_task(self._write())

    def send(self, frame: str) -> None:
        """Queue a message. An agent that takes none for too long is cut off; it will register anew."""
        if self._queue.qsize() < _MOST_WAITING:
            self._queue.put_nowait(frame)
        else:
            self._transport.abort()

    def finish(self, reason: str) -> None:
        """Close the connection once all queued messages are sent."""
        self._queue.put_nowait(_Finish(reason))

    async def close(self, code: WSCloseCode, reason: str) -> None:
        """Close the connection now."""
        await self.stop()
        await self._socket.close(code=code, message=reason.encode()[:120])

    async def stop(self) -> None:
        """End the writer; the socket is closed by whoever reads from it."""
        self._writer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._writer

    async def _write(self) -> None:
        try:
            while True:
                frame = await self._queue.get()
                if isinstance(frame, _Finish):
                    await self._socket.close(code=WSCloseCode.OK, message=frame.reason.encode()[:120])
                    return
                await self._socket.send_str(frame)
        except (ClientConnectionResetError, ConnectionError):
            logger.debug("connection_lost_while_sending")  # The reader hears of it as well.
