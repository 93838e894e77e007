"""The page's routes over real sockets: who gets in, what a session may do, and the stream of changes."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
from coordinator.dashboard.serving import serving
from coordinator.driver import started
from coordinator.shell import Coordinator, ask, connected, train

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.access import KEY_HEADER


def browser() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))  # cookies of addresses, too


async def log_in(http: aiohttp.ClientSession, url: str, code: str) -> dict[str, str]:
    """Log in; return the headers of an order."""
    async with http.post(f"{url}/dashboard/login", json={"code": code}, headers={"Origin": url}) as answer:
        assert answer.status == 200, await answer.text()
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        return {"Origin": url, KEY_HEADER: (await answer.json())["key"]}


async def status(http: aiohttp.ClientSession, method: str, url: str, headers: dict[str, str] | None = None) -> int:
    async with http.request(method, url, headers=headers or {}) as answer:
        return answer.status


async def news(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the next message of a stream; None: skip keep-alives."""
    async for line in answer.content:
        if line.startswith(b"data: "):
            return json.loads(line[6:])
    raise AssertionError("the stream has ended")


async def test_what_a_session_may_do(tmp_path):
    world, agents = started(3)
    node = agents[2].node
    async with serving(world, tmp_path) as shell, browser() as http:
        drain, here = f"{shell.url}/v1/nodes/{node}/drain", {"Origin": shell.url}
        for path in (
            "/dashboard",
            "/dashboard/app.js",
            "/dashboard/view.js",
            "/dashboard/style.css",
            "/dashboard/icon.svg",
        ):
            async with http.get(shell.url + path) as answer:
                assert answer.status == 200
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
        for path in ("/v1/status", "/dashboard/stream", "/v1/incidents"):
            assert await status(http, "GET", shell.url + path) == 401
        assert await status(http, "POST", drain, here) == 403
        assert await status(http, "POST", f"{shell.url}/v1/dashboard/code") == 401
        async with http.post(f"{shell.url}/dashboard/login", json={"code": "x"}, headers=here) as answer:
            assert answer.status == 403 and "unicron dashboard" in (await answer.json())["error"]
        evil = {"Origin": "http://evil.example"}
        assert await status(http, "POST", f"{shell.url}/dashboard/login", evil) == 403

        order = await log_in(http, shell.url, shell.code())
        assert await status(http, "GET", f"{shell.url}/v1/status") == 200
        assert await status(http, "GET", f"{shell.url}/v1/status", evil) == 403
        assert await status(http, "GET", f"{shell.url}/v1/status", {"Sec-Fetch-Site": "cross-site"}) == 401
        assert await status(http, "GET", f"{shell.url}/v1/status", {"Host": "evil.example"}) == 421
        assert await status(http, "POST", drain, here) == 403  # a cookie alone orders nothing
        assert await status(http, "POST", drain, {**order, **evil}) == 403
        assert await status(http, "POST", f"{shell.url}/v1/jobs", order) == 403
        assert shell.orders == []
        assert await status(http, "POST", drain, order) == 200
        assert await status(http, "POST", f"{shell.url}/v1/tasks/t/resize?nodes=3", order) == 200
        assert await status(http, "POST", f"{shell.url}/v1/tasks/t/inject", order) == 403  # not permitted here
        assert shell.orders == [ev.Drain(node=node, drained=True), ev.Resize(task="t", nodes=3)]
        assert await status(http, "POST", f"{shell.url}/dashboard/logout", order) == 200
        assert await status(http, "GET", f"{shell.url}/v1/status") == 401


async def test_a_kill_is_in_the_stream_within_a_second(tmp_path):
    with Coordinator(tmp_path / "state") as coordinator:
        url = coordinator.url
        async with connected(url, "a", "b", nodes=(2, 2)) as (a, b), browser() as http:
            await train([a, b])
            _, answer = await ask(url.removeprefix("http://"), "POST", "/v1/dashboard/code")
            order = await log_in(http, url, answer["code"])
            async with http.get(f"{url}/dashboard/stream") as stream:
                first = await news(stream)
                assert first["full"] and first["set"]["task/t"]["workers"] == 2
                began = time.monotonic()
                await b.say(wire.WorkerDied(worker=b.worker, cause="signal", code=9, at=time.time()))
                while "task/t" not in (found := (await news(stream))["set"]) or found["task/t"]["workers"] == 2:
                    pass
                assert time.monotonic() - began < 1
                assert found["task/t"]["open"][0]["incident"] == "i1"
            await a.hear(wire.Epoch)
            async with http.get(f"{url}/v1/events?task=t&incident=i1&newest=2") as found_events:
                names = [event["name"] for event in await found_events.json()]
            assert names == ["worker_died", "epoch_published"]
            async with http.get(f"{url}/v1/incidents?limit=10") as bills:
                assert [each["incident"] for each in (await bills.json())["incidents"]] == ["i1"]
            async with http.get(f"{url}/v1/incidents?limit=x") as wrong:
                assert wrong.status == 400
            # A stream outlives the time limit of connections without a proof, and ends with the coordinator.
            async with http.get(f"{url}/dashboard/stream") as stream:
                await news(stream)
                stopping = asyncio.to_thread(coordinator.stop)
                code, _ = await stopping
                assert code == 0
            assert order


async def test_a_stream_ends_with_its_session(tmp_path):
    world, _ = started(2)
    async with serving(world, tmp_path) as shell, browser() as http:
        order = await log_in(http, shell.url, shell.code())
        async with http.get(f"{shell.url}/dashboard/stream") as stream:
            await news(stream)
            assert await status(http, "POST", f"{shell.url}/dashboard/logout", order) == 200
            world.do(ev.Drain(node="node-a", drained=True))  # wakes the stream
            async for line in stream.content:
                assert not line.startswith(b"data")
