"""A node whose data does not arrive is excluded, with the reason in the event log, until it does; real processes."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from types import TracebackType

import aiohttp
import msgspec
import pytest
from aiohttp import web
from system.cluster import Cluster

from unicron_lightning import wire
from unicron_lightning.local_cluster.processes import until
from unicron_lightning.local_cluster.proxy import Proxy
from unicron_lightning.proof import ANSWER_HEADER

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]

TOY = Path(__file__).parents[1] / "agent" / "toy_worker.py"
OPTIONS = (
    *("health.pair_check=true", "health.pair_time=1", "health.pair_retry=1", "health.pair_size=0.5"),
    "coordinator.exit_when_idle=true",
)


class Detour:
    """Sits between an agent and the coordinator and redirects the agent's exchanges through a proxy."""

    def __init__(self, target: int, proxy: Proxy) -> None:
        self._url = f"http://127.0.0.1:{target}/v1/agent"
        self._proxy = proxy
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()), name="detour")
        self.exchanges = 0
        self._opened = asyncio.Event()
        self.port = 0

    def __enter__(self) -> Detour:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def open(self) -> None:
        """Let agents through from now on; those that have connected wait until then."""
        self._loop.call_soon_threadsafe(self._opened.set)

    async def _run(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/agent", self._serve)
        app.router.add_get("/v1/challenge", self._challenge)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _challenge(self, request: web.Request) -> web.Response:
        await self._opened.wait()
        url = self._url.removesuffix("/v1/agent") + request.raw_path
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            return web.Response(body=await answer.read(), status=answer.status)

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        await self._opened.wait()
        near = web.WebSocketResponse(compress=False)
        headers = {"Authorization": request.headers["Authorization"]}
        async with aiohttp.ClientSession(headers=headers) as http, http.ws_connect(self._url) as far:
            near.headers[ANSWER_HEADER] = far._response.headers[ANSWER_HEADER]
            await near.prepare(request)
            there = asyncio.create_task(self._pass(near, far))
            await self._pass(far, near)
            await near.close()
            await there
        return near

    async def _pass(self, source: object, sink: object) -> None:
        async for frame in source:  # type: ignore[attr-defined]
            text = frame.data
            if '"pair_connect"' in text:
                order = wire.decode_to_agent(text)
                assert isinstance(order, wire.PairConnect)
                self.exchanges += 1
                self._proxy.retarget(order.port)
                text = wire.encode(msgspec.structs.replace(order, port=self._proxy.port)).decode()
            await sink.send_str(text)  # type: ignore[attr-defined]
        await sink.close()  # type: ignore[attr-defined]


def test_a_node_is_kept_out_while_its_data_do_not_get_through(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path, agents=1, nodes="1:2", script=TOY, coordinator=OPTIONS) as cluster,
        Proxy(1) as proxy,
        Detour(cluster.port, proxy) as detour,
    ):
        cluster.start_node("n1", port=detour.port)
        until("the first node's slot", lambda: cluster.events("slot_granted"))
        proxy.cut()
        detour.open()
        (told,) = until("the report", lambda: cluster.events("error_reported"))
        assert (told["kind"], told["severity"], told["node"]) == ("link_degraded", "SEV3", "n1")
        assert re.match("the exchange of data failed with n0: .*connected.* within 1 s", told["cause"])
        (partner,) = told["details"]["partners"]
        assert partner["partner_cause"] == "no agent has connected"
        until("two more tries", lambda: detour.exchanges >= 3)
        assert [event["node"] for event in cluster.events("slot_granted")] == ["n0"]
        assert "node_barred" in (tmp_path / "agent-n1.log").read_text()
        proxy.heal()
        until("its slot", lambda: len(cluster.events("slot_granted")) == 2)
        (checked,) = cluster.events("pair_checked")
        assert (checked["node"], checked["partner_node"]) == ("n1", "n0")
        assert checked["sent"] > 12.5e6 and checked["received"] > 12.5e6
        assert len(cluster.events("error_reported")) == 1
        assert cluster.events("node_healthy")[0]["checks"] == ["exchange"]
        assert not cluster.events("worker_died"), "who trained was left alone"
        until("a world of two", lambda: [e for e in cluster.events("epoch_published") if len(e["members"]) == 2])
        cluster.finish()
