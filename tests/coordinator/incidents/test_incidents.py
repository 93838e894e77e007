"""Incidents as a user queries them, of a real coordinator and after its restart."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import subprocess
import sys
import time
from pathlib import Path

from coordinator.shell import Coordinator, SocketAgent, connected, get, train

from unicron_lightning import wire


def unicron(port: int, *arguments: str) -> str:
    code = "from unicron_lightning.cli import main; main()"
    command = [sys.executable, "-c", code, "incidents", *arguments, "--endpoint", f"127.0.0.1:{port}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


async def stepped(agent: SocketAgent, name: str, epoch: int) -> None:
    fields = {"epoch": epoch, "step": epoch, "world": 1, "recomputed": 0}
    await agent.say(wire.WorkerEvent(worker=agent.worker, name=name, at=time.time(), fields=fields))


async def open_incident(coordinator: Coordinator, phase: str) -> dict:
    """Return the only incident, once it is in a phase."""
    while True:
        (bill,) = (await get(f"{coordinator.url}/v1/incidents"))["incidents"]
        if bill["outcome"] is None and bill["phases"][phase]["seconds"] > 0:
            return bill
        await asyncio.sleep(0.01)


async def test_incidents_are_asked_for_while_they_are_open_and_after(tmp_path: Path):
    with Coordinator(tmp_path / "state") as coordinator:
        async with connected(coordinator.url, "a", "b", nodes=(1, 2)) as (a, b):
            # One node would suffice: b is present from the beginning, or joins.
            await b.register(min_nodes=1)
            await b.boot()
            assert (await b.hear(wire.Epoch)).number == 1
            await b.ready(1)
            await a.register(min_nodes=1)
            await a.boot()
            assert (await a.hear(wire.Epoch)).number == 2
            await asyncio.gather(a.ready(2), b.ready(2))
            assert (await a.hear(wire.Go)).epoch == 2
            await stepped(a, "grown", 2)
            await b.say(wire.WorkerDied(worker=b.worker, cause="signal", code=9, at=time.time() - 0.5))
            assert (await a.hear(wire.Epoch)).number == 3
            bill = await open_incident(coordinator, "transition")
            assert 0.5 <= bill["phases"]["detection"]["seconds"] < 10
            assert (bill["task"], bill["incident"], bill["workers_before"], bill["closed_at"]) == ("t", "i1", 2, None)
            await a.ready(3)
            assert (await a.hear(wire.Go)).epoch == 3
            await stepped(a, "recovered", 3)
            bill = await open_incident(coordinator, "sub_healthy")
            assert bill["phases"]["transition"]["worker_seconds"] > bill["phases"]["transition"]["seconds"]
            assert "open" in await asyncio.to_thread(unicron, coordinator.port)
            await a.say(wire.WorkerDone(worker=a.worker))
            for agent in (a, b):
                await agent.say(wire.Bye(succeeded=agent is a))
            assert (await a.hear(wire.TaskOver)).succeeded
        coordinator.kill()
        coordinator.start()
        await closed_incident_is_told_in_all_forms(coordinator)


async def closed_incident_is_told_in_all_forms(coordinator: Coordinator) -> None:
    answer = await get(f"{coordinator.url}/v1/incidents?task=t")
    (bill,) = answer["incidents"]
    assert bill["outcome"] == "ended" and bill["phases"]["sub_healthy"]["waf_seconds"] is None
    assert answer["totals"]["incidents"] == answer["totals"]["unknown_waf"] == 1
    assert (await get(f"{coordinator.url}/v1/incidents?task=other"))["incidents"] == []
    printed = await asyncio.to_thread(unicron, coordinator.port, "--json", "--task", "t")
    assert json.loads(printed) == answer
    (row,) = csv.DictReader(io.StringIO(await asyncio.to_thread(unicron, coordinator.port, "--csv", "--all")))
    assert (row["task"], row["incident"], row["cause"], row["outcome"]) == ("t", "i1", "signal", "ended")
    assert float(row["transition_seconds"]) == bill["phases"]["transition"]["seconds"]
    assert row["transition_waf_seconds"] == ""
    table = await asyncio.to_thread(unicron, coordinator.port, "--all")
    assert "ended" in table and "without WAF-seconds" in table


async def test_a_task_without_failures_has_no_incidents(tmp_path: Path):
    with Coordinator(tmp_path / "state") as coordinator:
        async with connected(coordinator.url, "a", "b", nodes=(2, 2)) as agents:
            await train(agents)
            assert (await get(f"{coordinator.url}/v1/incidents"))["incidents"] == []
