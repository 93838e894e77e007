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

from unicron_lightning.credentials import Token
from unicron_lightning.errors import CoordinatorUnproven
from unicron_lightning.proof import (
    ANSWER_HEADER,
    MOST_CHALLENGE_BYTES,
    Transcript,
    answer_proof,
    authorization,
    check_coordinator,
    new_nonce,
    same,
    unproven,
)
from unicron_lightning.tls import (
    PLAIN,
    Certificate,
    TlsExpected,
    Trust,
    address_of,
    client_context,
    encrypted,
    explained,
    hung_up,
    ssl_error_in,
    tls_expected,
)

_ATTEMPT_SECONDS: Final = 5.0


def retry_delay(most: float) -> float:
    """Draw a delay before the next attempt: at least half of ``most`` seconds, so that peers spread out."""
    return random.uniform(most / 2, most)


async def open_socket(
    http: aiohttp.ClientSession,
    url: str,
    token: Token,
    *,
    forwarded: bool = False,
    trust: Trust = PLAIN,
    **options: Any,
) -> aiohttp.ClientWebSocketResponse[Any]:
    """Open a WebSocket after mutual proof.

    Args:
        http: makes the connections.
        url: ``http://HOST:PORT/PATH``, or https; ``trust`` decides which of them it is.
        token: the shared secret.
        forwarded: whether a proxy at this address forwards to the coordinator.
        trust: whether the link is encrypted, and which certificate is accepted.
        options: of `aiohttp.ClientSession.ws_connect`.

    Raises:
        CoordinatorUnproven: the process at the endpoint does not know the token, or has another certificate.
        aiohttp.ClientError: no process answers, or it is no coordinator.
        asyncio.TimeoutError: no answer in time.
    """
    opener = _Opener(http=http, url=urlsplit(url), token=token, forwarded=forwarded, options=options)
    # `wait_for` could lose the caller's cancellation before Python 3.12.
    opening = asyncio.create_task(opener.open(trust))
    try:
        await asyncio.wait({opening}, timeout=_ATTEMPT_SECONDS)
    finally:
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
    if opening.cancelled():
        raise asyncio.TimeoutError(f"no answer within {_ATTEMPT_SECONDS:g} s")
    return opening.result()


@dataclass(frozen=True, kw_only=True)
class _Opener:
    """One call of `open_socket`."""

    http: aiohttp.ClientSession
    url: SplitResult
    token: Token
    forwarded: bool
    options: dict[str, Any]

    async def open(self, trust: Trust) -> aiohttp.ClientWebSocketResponse[Any]:
        """Open it at one of the host's addresses; encrypted if a port that need not be asks for that."""
        assert self.url.hostname is not None
        assert self.url.port is not None
        failed: Exception | None = None
        for host in await _addresses(self.url.hostname, self.url.port):
            try:
                return await self._open_at(host, trust)
            except TlsExpected as error:
                if trust.may_encrypt:
                    return await self.open(encrypted(trust))
                failed = error
            except (aiohttp.ClientError, OSError, CoordinatorUnproven) as error:
                if not isinstance(failed, CoordinatorUnproven):
                    failed = error
        assert failed is not None
        raise failed

    async def _open_at(self, host: str, trust: Trust) -> aiohttp.ClientWebSocketResponse[Any]:
        certificate = Certificate(trust)
        secure: dict[str, Any] = {}
        if trust.encrypted:
            secure = {"ssl": client_context(trust, certificate), "server_hostname": self.url.hostname}
        there = f"{trust.scheme}://{f'[{host}]' if ':' in host else host}:{self.url.port}"
        try:
            client = new_nonce()
            body = await self._challenge(f"{there}/v1/challenge?nonce={client}", trust, secure)
            end = certificate.name if trust.encrypted else address_of((host, self.url.port))
            meeting = check_coordinator(self.url.netloc, self.token, client, body, end, forwarded=self.forwarded)
            return await self._upgrade(there + self.url.path, meeting, secure)
        except (aiohttp.ClientError, OSError) as error:
            cause = ssl_error_in(error) if trust.encrypted else None
            if cause is None:
                raise
            raise explained(self.url.netloc, cause, trust) from None

    async def _challenge(self, url: str, trust: Trust, secure: dict[str, Any]) -> bytes:
        try:
            asking = await self.http.get(url, allow_redirects=False, **secure)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if trust.encrypted and not isinstance(error, aiohttp.ClientConnectorError):
                raise hung_up(self.url.netloc, trust) from error
            raise
        async with asking as answer:
            if answer.status == HTTPStatus.UPGRADE_REQUIRED and not trust.encrypted:
                raise tls_expected(self.url.netloc, trust)
            return await answer.content.read(MOST_CHALLENGE_BYTES) if answer.status == HTTPStatus.OK else b""

    async def _upgrade(
        self, url: str, meeting: Transcript, secure: dict[str, Any]
    ) -> aiohttp.ClientWebSocketResponse[Any]:
        headers = {"Authorization": authorization(self.token.secret, meeting, "GET", self.url.path)}
        opened = await self.http.ws_connect(url, headers=headers, **secure, **self.options)
        response = opened._response  # aiohttp offers no other access to the answer's headers
        if not same(response.headers.get(ANSWER_HEADER, ""), answer_proof(self.token.secret, meeting, 101, b"")):
            response.close()
            raise unproven(self.url.netloc, self.token)
        return opened


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
