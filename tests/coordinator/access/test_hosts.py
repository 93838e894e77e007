"""Requests meant for another host, stores of other machines, unbounded numbers, and a clock that is set."""

from __future__ import annotations

import aiohttp
import pytest
from coordinator.driver import World, running
from coordinator.fake_daemon import FakeDaemon, job
from coordinator.shell import Coordinator, ask, connected, get, train

from unicron_lightning import wire
from unicron_lightning.coordinator.access import misdirected, misplaced
from unicron_lightning.coordinator.incidents.accounting import book
from unicron_lightning.coordinator.server.timers import SteadyClock
from unicron_lightning.jobs import Job
from unicron_lightning.wire.daemon import NodeTask


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("127.0.0.1:29461", None),
        ("127.0.0.1", None),
        ("LOCALHOST:1", None),
        ("[::1]:29461", None),
        ("here.example:29461", None),
        ("evil.example:29461", "Host: 'evil.example:29461': expected a loopback address, localhost or here.example"),
        ("127.0.0.1.evil.example", "expected a loopback address"),
        ("10.0.0.1:29461", "expected a loopback address"),
        ("", "expected a loopback address"),
    ],
)
def test_only_requests_for_this_machine_are_served(header, expected):
    reason = misdirected(header, "here.example")
    assert reason is None if expected is None else expected in reason


@pytest.mark.parametrize(
    ("store", "host", "peer", "well"),
    [
        ("10.0.0.7", "10.0.0.7", "192.168.0.1", True),
        ("10.0.0.7", "node7", "10.0.0.7", True),
        ("localhost", "node7", "127.0.0.1", True),
        ("10.0.0.7", "node7", "::ffff:10.0.0.7", True),
        ("169.254.169.254", "10.0.0.7", "10.0.0.7", False),
        ("127.0.0.1", "10.0.0.7", "10.0.0.7", False),
    ],
)
def test_a_store_is_on_its_agents_machine(store, host, peer, well):
    reason = misplaced(store, host, peer)
    assert (reason is None) == well
    assert well or f"store.host='{store}'" in str(reason)


async def test_a_coordinator_on_loopback_refuses_what_is_not_meant_for_it(tmp_path):
    with Coordinator(tmp_path / "state") as coordinator:
        async with connected(coordinator.url, "a", nodes=(1, 1)) as (a,):
            await train([a])
            async with aiohttp.ClientSession() as http:
                for path in ("/v1/status", "/healthz", "/v1/agent"):
                    url = f"{coordinator.url}{path}"
                    async with http.get(url, headers={"Host": "evil.example"}) as answer:
                        assert answer.status == 421
                        assert "Host: 'evil.example'" in (await answer.json())["error"]
            nines = "9" * 5000
            for method, target in (
                *(("GET", f"/v1/events?{query}") for query in (f"since={nines}", "since=-1", "since=x")),
                ("POST", f"/v1/tasks/t/resize?nodes={nines}"),
                ("POST", f"/v1/tasks/t/relayout?tp=1&pp={nines}"),
                ("POST", "/v1/tasks/t/relayout?tp=0&pp=1"),
            ):
                status, error = await ask(coordinator.url, method, target)
                assert status == 400, target
                assert len(str(error)) < 300
            async with connected(coordinator.url, "b", nodes=(1, 1)) as (b,):
                b.store = wire.Address(host="192.0.2.1", port=80)
                await b.register(task="u")
                refused = await b.hear(wire.Refused)
                assert "store.host='192.0.2.1'" in refused.reason
            tasks = (await get(f"{coordinator.url}/v1/status"))["tasks"]
            assert list(tasks) == ["t"]


def test_a_job_that_could_not_be_submitted_is_not_adopted():
    world = World()
    bad = Job(name="../../trav", command=["x"])
    daemon = FakeDaemon(world, "n", "0", "1")
    daemon.runs = {
        ("../../trav", "0"): NodeTask(job=bad, slot="0", pid=1, starts=1),
        ("good", "1"): NodeTask(job=job("good"), slot="1", pid=2, starts=1),
    }
    daemon.connect()
    assert list(world.machine.lasting.jobs) == ["good"]
    assert {name for name, _ in daemon.wanted} == {"good"}
    assert "name='../../trav'" in world.event("job_not_adopted").fields["reason"]


def test_a_clock_that_is_set_changes_no_duration():
    wall, even = [1000.0], [5.0]
    clock = SteadyClock(lambda: wall[0], lambda: even[0])
    assert clock.now() == 1000.0
    wall[0], even[0] = 87_400.0, 7.5
    assert clock.now() == 1002.5
    wall[0] = 0.0
    assert clock.now() == 1002.5


def test_a_fault_that_another_clock_dates_a_day_back_is_not_billed_for_a_day():
    world = World()
    world.now = 1_000_000.0
    _, b = running(world, 2, nodes=(1, 2))
    b.say(wire.WorkerDied(worker=b.worker(), cause="signal", code=9, at=world.now - 86_400.0))
    world.advance(1.0)
    (bill,) = book([], world.machine.cluster, world.now)["incidents"]
    assert bill["phases"]["detection"] == {"seconds": 0.0, "worker_seconds": 0.0, "waf_seconds": None}
