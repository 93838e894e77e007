"""Opens WebSockets to a coordinator after mutual proof of the token, as in `proof`; `tls` decides on encryption.

The host name of the coordinator is resolved here, so that the address of each connection is known.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import aiohttp

from unicron_lightning.errors import CoordinatorUnproven
from unicron_lightning.handshake import Handshake
from unicron_lightning.proof import ANSWER_HEADER, MOST_CHALLENGE_BYTES
from unicron_lightning.tls import Access, TlsExpected

ATTEMPT_SECONDS: Final = 5.0
FIRST_RETRY_SECONDS: Final = 0.05
LAST_RETRY_SECONDS: Final = 2.0
_LAST_OF_SEVERAL_SECONDS: Final = 0.5
_NEXT_SECONDS: Final = 0.3
"""Time after which another coordinator is tried beside one that has not answered: it may be stopped."""
SESSION: Final[dict[str, Any]] = {"heartbeat": 10.0, "max_msg_size": 64 << 20}
"""Options of a session's WebSocket: seconds between pings, and largest number of bytes of a message."""


def retry_delay(most: float) -> float:
    """Draw a delay before the next attempt: at least half of ``most`` seconds, so that peers spread out."""
    return random.uniform(most / 2, most)


def longest_retry(url: str) -> float:
    """Return the longest delay between two attempts [s]: shorter with several coordinators, as one soon leads."""
    return _LAST_OF_SEVERAL_SECONDS if "," in urlsplit(url).netloc else LAST_RETRY_SECONDS


async def open_socket(
    http: aiohttp.ClientSession, url: str, access: Access, **options: Any
) -> aiohttp.ClientWebSocketResponse[Any]:
    """Open a WebSocket after mutual proof.

    Args:
        http: makes the connections.
        url: ``http://HOST:PORT/PATH``, or https; ``access`` decides which of them it is. Of several coordinators,
            ``HOST:PORT,HOST:PORT``, the first that proves itself is taken: those that do not lead refuse connections.
        access: to the coordinator.
        options: of `aiohttp.ClientSession.ws_connect`.

    Raises:
        CoordinatorUnproven: the process at the endpoint does not know the token, or has another certificate.
        aiohttp.ClientError: no process answers, or it is no coordinator.
        asyncio.TimeoutError: no answer in time.
    """
    whole = urlsplit(url)
    openers = [
        _Opener(http=http, url=whole._replace(netloc=place), options=options) for place in whole.netloc.split(",")
    ]
    # `wait_for` could lose the caller's cancellation before Python 3.12.
    opening = asyncio.create_task(_open_one(openers, access))
    try:
        await asyncio.wait({opening}, timeout=ATTEMPT_SECONDS)
    finally:
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
    if opening.cancelled():
        raise asyncio.TimeoutError(f"no answer within {ATTEMPT_SECONDS:g} s")
    return opening.result()


@dataclass(frozen=True, kw_only=True)
class _Opener:
    """One call of `open_socket`."""

    http: aiohttp.ClientSession
    url: SplitResult
    options: dict[str, Any]

    async def open(self, access: Access) -> aiohttp.ClientWebSocketResponse[Any]:
        """Open it at one of the host's addresses; encrypted if a port that need not be asks for that."""
        assert self.url.hostname is not None
        assert self.url.port is not None
        failed: Exception | None = None
        for host in await _addresses(self.url.hostname, self.url.port):
            try:
                return await self._open_at(host, access)
            except TlsExpected as error:
                if access.trust.may_encrypt:
                    return await self.open(access.encrypted)
                failed = error
            except (aiohttp.ClientError, OSError, CoordinatorUnproven) as error:
                if not isinstance(failed, CoordinatorUnproven):
                    failed = error
        assert failed is not None
        raise failed

    async def _open_at(self, host: str, access: Access) -> aiohttp.ClientWebSocketResponse[Any]:
        handshake = Handshake(self.url.netloc, access)
        secure: dict[str, Any] = {}
        if handshake.context is not None:
            secure = {"ssl": handshake.context, "server_hostname": self.url.hostname}
        there = f"{access.trust.scheme}://{f'[{host}]' if ':' in host else host}:{self.url.port}"
        try:
            answer = await self._challenge(there, handshake, secure)
            handshake.meet(*answer, (host, self.url.port))
            return await self._upgrade(there + self.url.path, handshake, secure)
        except (aiohttp.ClientError, OSError) as error:
            reason = handshake.explained(error)
            if reason is None:
                raise
            raise reason from None

    async def _challenge(self, there: str, handshake: Handshake, secure: dict[str, Any]) -> tuple[int, bytes]:
        try:
            asking = await self.http.get(there + handshake.challenge, allow_redirects=False, **secure)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            refused = None if isinstance(error, aiohttp.ClientConnectorError) else handshake.refused()
            if refused is None:
                raise
            raise refused from error
        async with asking as answer:
            is_given = answer.status == HTTPStatus.OK
            return answer.status, await answer.content.read(MOST_CHALLENGE_BYTES) if is_given else b""

    async def _upgrade(
        self, url: str, handshake: Handshake, secure: dict[str, Any]
    ) -> aiohttp.ClientWebSocketResponse[Any]:
        headers = handshake.headers("GET", self.url.path)
        opened = await self.http.ws_connect(url, headers=headers, **secure, **self.options)
        response = opened._response  # aiohttp offers no other access to the answer's headers
        try:
            handshake.check(response.headers.get(ANSWER_HEADER), response.status, b"")
        except CoordinatorUnproven:
            response.close()
            raise
        return opened


async def _open_one(openers: list[_Opener], access: Access) -> aiohttp.ClientWebSocketResponse[Any]:
    """Return the first socket that is open; the next opener begins when one has failed, or has taken too long.

    While one has not answered, the others are tried again: a stopped leader never answers, and a stand-by that has
    refused connections leads soon.
    """
    if len(openers) == 1:
        return await openers[0].open(access)
    tries: dict[asyncio.Task[aiohttp.ClientWebSocketResponse[Any]], _Opener] = {}
    rest, again, failed = list(openers), list[_Opener](), None
    try:
        while rest or tries:
            if rest:
                opener = rest.pop(0)
                tries[asyncio.create_task(opener.open(access))] = opener
            done, _ = await asyncio.wait(tries, timeout=_NEXT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                again.append(tries.pop(each))
                if (error := each.exception()) is None:
                    return each.result()
                if not isinstance(failed, CoordinatorUnproven):
                    failed = error
            if not (done or rest):
                rest, again = again, []
    finally:
        for each in tries:
            each.cancel()
        for late in await asyncio.gather(*tries, return_exceptions=True):
            if isinstance(late, aiohttp.ClientWebSocketResponse):
                late._response.close()
    assert failed is not None
    raise failed


async def _addresses(host: str, port: int) -> list[str]:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(each[4][0]) for each in found))
    return [host]


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks of a connection and wait for their ends; errors of a connection that has ended are no errors.

    The caller's own cancellation is raised as usual. ``await task`` in ``suppress(CancelledError)`` would take it for
    the task's, and the caller would go on for ever.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OSError | aiohttp.ClientError):
            raise error
