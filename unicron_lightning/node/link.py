"""The daemon's connection to the coordinator, reopened whenever it breaks.

Delays double from 50 ms to 2 s. Nothing is queued while the coordinator is away: the first message of each connection
has the whole state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import aiohttp
import msgspec

from unicron_lightning import wire
from unicron_lightning.credentials import Token
from unicron_lightning.errors import CoordinatorUnproven, SessionRefused
from unicron_lightning.link import end_tasks, open_socket, retry_delay
from unicron_lightning.tls import PLAIN, Trust
from unicron_lightning.wire.daemon import NodeHello, NodeReport, NodeRun, decode_to_node

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS: Final = 0.05
_LAST_RETRY_SECONDS: Final = 2.0
_ATTEMPT_SECONDS: Final = 5.0
_PING_SECONDS: Final = 10.0
_MESSAGE_BYTES: Final = 64 << 20


class NodeLink:
    """Session of one daemon.

    Args:
        url: ``http://host:port/v1/node``.
        token: the shared secret.
        hello: builds the first message of a connection.
        received: called with each message of the coordinator.
        forwarded: whether a process forwards from ``url`` to the coordinator.
        trust: whether the link is encrypted, and which certificate is accepted.
    """

    def __init__(
        self,
        url: str,
        token: Token,
        hello: Callable[[], NodeHello],
        received: Callable[[NodeRun], None],
        *,
        forwarded: bool = False,
        trust: Trust = PLAIN,
    ) -> None:
        self._url = url
        self._token, self._forwarded, self._trust = token, forwarded, trust
        self._hello = hello
        self._received = received
        self._unsent: asyncio.Queue[NodeReport] = asyncio.Queue()
        self._stands = False
        self._away_told = False

    def tell(self, report: NodeReport) -> None:
        """Send a report if there is a connection; otherwise the next one's first message includes it."""
        if self._stands:
            self._unsent.put_nowait(report)

    async def run(self) -> None:
        """Keep the session up until cancelled.

        Raises:
            SessionRefused: the coordinator refuses this daemon.
        """
        retry = _FIRST_RETRY_SECONDS
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_ATTEMPT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while True:
                try:
                    await self._one_connection(http)
                    retry = _FIRST_RETRY_SECONDS
                except (aiohttp.ClientError, OSError, asyncio.TimeoutError, CoordinatorUnproven) as error:
                    if not self._away_told:
                        self._away_told = True
                        logger.warning("coordinator_not_reached url=%s error=%s; retrying", self._url, error)
                self._stands = False
                await asyncio.sleep(retry_delay(retry))
                retry = min(2 * retry, _LAST_RETRY_SECONDS)

    async def _one_connection(self, http: aiohttp.ClientSession) -> None:
        options: dict[str, Any] = {"heartbeat": _PING_SECONDS, "max_msg_size": _MESSAGE_BYTES}
        socket = await open_socket(
            http, self._url, self._token, forwarded=self._forwarded, trust=self._trust, **options
        )
        async with socket:
            self._unsent = asyncio.Queue()
            self._stands, self._away_told = True, False
            await socket.send_str(wire.encode(self._hello()).decode())
            logger.info("session_stands url=%s", self._url)
            writer = asyncio.create_task(self._write(socket))
            try:
                async for frame in socket:
                    self._take(frame)
            finally:
                await end_tasks([writer])

    async def _write(self, socket: aiohttp.ClientWebSocketResponse[Any]) -> None:
        while True:
            await socket.send_str(wire.encode(await self._unsent.get()).decode())

    def _take(self, frame: Any) -> None:
        if frame.type is not aiohttp.WSMsgType.TEXT:
            return
        try:
            message = decode_to_node(frame.data)
        except msgspec.DecodeError as error:
            logger.error("coordinator_message_unreadable error=%s", error)
            return
        if isinstance(message, wire.Refused):
            raise SessionRefused(f"the coordinator refuses this daemon: {message.reason}")
        self._received(message)
