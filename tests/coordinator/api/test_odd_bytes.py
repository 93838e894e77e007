"""Requests with bytes that are no text: no answer is an error of the server."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp.http_exceptions import HttpProcessingError
from coordinator.dashboard.serving import FakeShell, serving
from coordinator.driver import World, running

from unicron_lightning.coordinator.access import KEY_HEADER

ODD = b"\xed\xa0\x80\xff"
"""A lone surrogate, as text would encode it, and a byte that begins nothing."""
QUERIES = {"target": ODD, "query": b"?task=" + ODD, "escaped": b"?task=%ED%A0%80&limit=%FF", "path": b"/%ED%A0%80%FF"}
PLACES = (*QUERIES, "Host", "Origin", "Sec-Fetch-Site", "Cookie", "Authorization", KEY_HEADER, "Accept", "X-Y")
PATHS = ("/v1/status", "/v1/events", "/v1/challenge", "/metrics", "/dashboard", "/v1/nodes/n/drain")
METHODS = ("GET", "POST", "HEAD", "DELETE")


async def sent(
    url: str, method: str, path: str, headers: dict[str, bytes], body: bytes = b"", query: bytes = b""
) -> int:
    """Send a request as bytes; return the status of the answer, 0 if the connection was closed without one."""
    where = urlsplit(url)
    length = str(len(body)).encode()
    headers = {"Host": where.netloc.encode(), "Content-Length": length, "Connection": b"close", **headers}
    lines = [b" ".join([method.encode(), path.encode() + query, b"HTTP/1.1"])]
    lines += [name.encode() + b": " + value for name, value in headers.items()]
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(b"\r\n".join([*lines, b"", body]))
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1]) if answer else 0


async def opened(http: aiohttp.ClientSession, shell: FakeShell) -> dict[str, bytes]:
    """Log in; return the headers of an order."""
    async with http.post(f"{shell.url}/dashboard/login", json={"code": shell.code()}) as answer:
        cookie = answer.headers["Set-Cookie"].partition(";")[0]
        return {"Cookie": cookie.encode(), KEY_HEADER: (await answer.json())["key"].encode()}


@pytest.mark.parametrize("place", PLACES)
async def test_odd_bytes_anywhere_in_a_request_are_refused(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running(world := World(), 1)
    async with serving(world, tmp_path) as shell, aiohttp.ClientSession() as http:
        session = await opened(http, shell)
        for method in METHODS:
            for path in PATHS:
                for known in ({}, session, {"Origin": shell.url.encode(), **session}):
                    odd = known.get(place, b"") + ODD
                    headers = known if place in QUERIES else {**known, place: odd}
                    assert await sent(shell.url, method, path, headers, query=QUERIES.get(place, b"")) < 500
    assert shell.orders == [], "an order without its key"
    assert not [record for record in caplog.records if not malformed(record)], caplog.text


def malformed(record: logging.LogRecord) -> bool:
    """Whether a record is one of those that the server reduces to a line."""
    return record.exc_info is not None and isinstance(record.exc_info[1], HttpProcessingError)


@pytest.mark.parametrize("code", [r'"\ud800"', r'"\udcff"', '"\u00e9"', '["x"]', "3", "null"])
async def test_a_code_that_is_no_text_is_unknown(code: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(World(), tmp_path) as shell:
        shell.code()
        for body in (b'{"code": %s}' % code.encode(), b'{"code": "%s"}' % ODD):
            assert await sent(shell.url, "POST", "/dashboard/login", {}, body) == 403
    assert not caplog.records
