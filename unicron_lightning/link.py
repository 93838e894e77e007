"""Opens WebSockets to a coordinator after mutual proof of the token, as described in `proof`.

The host name of the coordinator is resolved here, so that the address of each connection is known.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import aiohttp

from unicron_lightning.address import address_of
from unicron_lightning.credentials import Token
from unicron_lightning.errors import CoordinatorUnproven
from unicron_lightning.proof import (
    ANSWER_HEADER,
    MOST_CHALLENGE_BYTES,
    answer_proof,
    authorization,
    check_coordinator,
    new_nonce,
    same,
    unproven,
)

_ATTEMPT_SECONDS: Final = 5.0


async def open_socket(
    http: aiohttp.ClientSession, url: str, token: Token, *, forwarded: bool = False, **options: Any
) -> aiohttp.ClientWebSocketResponse[Any]:
    """Open a WebSocket after mutual proof.

    Args:
        http: makes the connections.
        url: ``http://HOST:PORT/PATH``.
        token: the shared secret.
        forwarded: whether a proxy at this address forwards to the coordinator.
        options: of `aiohttp.ClientSession.ws_connect`.

    Raises:
        CoordinatorUnproven: the process at the endpoint does not know the token.
        aiohttp.ClientError: no process answers, or it is no coordinator.
        asyncio.TimeoutError: no answer in time.
    """
    # `wait_for` could lose the caller's cancellation before Python 3.12.
    opening = asyncio.create_task(_open_any(http, urlsplit(url), token, forwarded, options))
    try:
        await asyncio.wait({opening}, timeout=_ATTEMPT_SECONDS)
    finally:
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
    if opening.cancelled():
        raise asyncio.TimeoutError(f"no answer within {_ATTEMPT_SECONDS:g} s")
    return opening.result()


async def _open_any(
    http: aiohttp.ClientSession, url: SplitResult, token: Token, forwarded: bool, options: dict[str, Any]
) -> aiohttp.ClientWebSocketResponse[Any]:
    assert url.hostname is not None
    assert url.port is not None
    failed: Exception | None = None
    for host in await _addresses(url.hostname, url.port):
        try:
            return await _open(http, url, host, token, forwarded, options)
        except (aiohttp.ClientError, OSError, CoordinatorUnproven) as error:
            if not isinstance(failed, CoordinatorUnproven):
                failed = error
    assert failed is not None
    raise failed


async def _open(
    http: aiohttp.ClientSession,
    url: SplitResult,
    host: str,
    token: Token,
    forwarded: bool,
    options: dict[str, Any],
) -> aiohttp.ClientWebSocketResponse[Any]:
    endpoint = url.netloc
    there = f"http://{f'[{host}]' if ':' in host else host}:{url.port}"
    client = new_nonce()
    async with http.get(f"{there}/v1/challenge?nonce={client}", allow_redirects=False) as answer:
        body = await answer.content.read(MOST_CHALLENGE_BYTES) if answer.status == 200 else b""
    meeting = check_coordinator(endpoint, token, client, body, address_of((host, url.port)), forwarded=forwarded)
    shown = authorization(token.secret, meeting, "GET", url.path)
    opened = await http.ws_connect(there + url.path, headers={"Authorization": shown}, **options)
    response = opened._response  # aiohttp offers no other access to the answer's headers
    if not same(response.headers.get(ANSWER_HEADER, ""), answer_proof(token.secret, meeting, 101, b"")):
        response.close()
        raise unproven(endpoint, token)
    return opened


async def _addresses(host: str, port: int) -> list[str]:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(each[4][0]) for each in found))
    return [host]
