"""Clients that know several coordinators: the one that leads answers, and no order is sent twice."""

from __future__ import annotations

import asyncio
import http.client
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from coordinator.shell import access, known
from coordinator.storage.test_saving import configured, serving, until

from unicron_lightning.agent.options import parse_endpoints
from unicron_lightning.cli.client import answering_endpoint, fetch
from unicron_lightning.coordinator import __main__ as command
from unicron_lightning.coordinator.server.server import Server
from unicron_lightning.errors import ConfigError, CoordinatorUnavailable
from unicron_lightning.link import longest_retry, open_socket
from unicron_lightning.local_cluster.processes import free_port


@pytest.fixture
def silent() -> Iterator[str]:
    """The endpoint of a coordinator that is stopped: its system takes connections in, and it does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_several_endpoints_are_read() -> None:
    assert parse_endpoints("a:1, b , [::2]:3,a:1") == [("a", 1), ("b", 29461), ("::2", 3)]
    assert parse_endpoints("") == [("127.0.0.1", 29461)]
    for wrong in ("a:1,", ",", "a:1,,b", "a:1,b:x", "a:1;b:2"):
        with pytest.raises(ConfigError, match="expected HOST"):
            parse_endpoints(wrong)
    with pytest.raises(ConfigError, match="all of them on the loopback interface, or none"):
        parse_endpoints("127.0.0.1:1,a:2")


def test_the_port_of_several_endpoints_is_a_coordinators_own_if_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_ENDPOINT", "a:7,b:7")
    assert command._endpoint_port(29461) == 7
    monkeypatch.setenv("UNICRON_ENDPOINT", "a:7,b:8")
    with pytest.raises(ConfigError, match="its ports differ"):
        command._endpoint_port(29461)


async def test_the_coordinator_that_listens_answers(tmp_path: Path, silent: str) -> None:
    async with serving(tmp_path) as (url, _), aiohttp.ClientSession() as client:
        place = url.removeprefix("http://")
        both = f"127.0.0.1:1,{place}"
        assert (await asyncio.to_thread(fetch, both, "/v1/status"))["tasks"] == {}
        assert await asyncio.to_thread(answering_endpoint, both, access()) == place
        for endpoints in (both, f"{silent},{place}", f"{place},{silent}"):
            opened = await open_socket(client, f"http://{endpoints}/v1/agent", access())  # within its 5 s
            await opened.close()
        with pytest.raises(OSError, match=r"127\.0\.0\.1"):
            await open_socket(client, "http://127.0.0.1:1,127.0.0.1:2/v1/agent", access())
    with pytest.raises(CoordinatorUnavailable, match=r"127\.0\.0\.1:1: .*127\.0\.0\.1:2: "):
        await asyncio.to_thread(fetch, "127.0.0.1:1,127.0.0.1:2", "/v1/status")


async def test_an_order_is_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = http.client.HTTPConnection.request
    ordered: list[http.client.HTTPConnection] = []

    def order(self: http.client.HTTPConnection, method: str, *words: Any, **options: Any) -> None:
        request(self, method, *words, **options)
        if method == "POST":
            ordered.append(self)

    def answer(self: http.client.HTTPConnection) -> http.client.HTTPResponse:
        if self in ordered:
            raise ConnectionResetError("the answer is lost")
        return receive(self)

    receive = http.client.HTTPConnection.getresponse
    monkeypatch.setattr(http.client.HTTPConnection, "request", order)
    monkeypatch.setattr(http.client.HTTPConnection, "getresponse", answer)
    async with serving(tmp_path / "a") as (first, _), serving(tmp_path / "b") as (second, _):
        places = [url.removeprefix("http://") for url in (first, second)]
        job = {"name": "j", "command": ["true"], "min_nodes": 1, "max_nodes": 1}
        with pytest.raises(CoordinatorUnavailable, match=places[0]):
            await asyncio.to_thread(fetch, ",".join(places), "/v1/jobs", method="POST", body=job)

        async def arrived() -> bool:
            return len(await asyncio.to_thread(fetch, places[0], "/v1/jobs")) == 1

        await until(arrived)
        assert await asyncio.to_thread(fetch, places[1], "/v1/jobs") == []


async def test_a_stand_by_that_leads_is_found_beside_a_stopped_leader(tmp_path: Path, silent: str) -> None:
    port = free_port()
    async with aiohttp.ClientSession() as client:
        url = f"http://{silent},127.0.0.1:{port}/v1/agent"
        opening = asyncio.create_task(open_socket(client, url, access()))
        await asyncio.sleep(0.5)  # the second has refused
        server = Server(configured(f"store.state_dir={tmp_path}", f"coordinator.port={port}"), known())
        running = asyncio.create_task(server.run())
        await (await opening).close()  # in one attempt, of 5 s
        server._stop.set()
        await running


def test_agents_of_several_coordinators_try_more_often() -> None:
    assert longest_retry("http://a:1,b:2/v1/agent") < longest_retry("http://a:1/v1/agent")
