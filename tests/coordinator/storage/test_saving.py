"""A store that is temporarily not writable: decisions are kept and written later, orders are not confirmed."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from coordinator.shell import access, ask, connected, get, train
from hydra import compose, initialize_config_module

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.__main__ import from_composed, register_schema
from unicron_lightning.coordinator.config import CoordinatorConfig
from unicron_lightning.coordinator.machine import Machine
from unicron_lightning.coordinator.server.batch import MOST_LOGGED_CHARACTERS, MOST_UNWRITTEN_EVENTS, Batch, Saving
from unicron_lightning.coordinator.server.server import Server
from unicron_lightning.coordinator.storage import Store
from unicron_lightning.credentials import token_for
from unicron_lightning.link import open_socket
from unicron_lightning.wire.daemon import Launch, NodeHello, NodeReport, NodeTask, decode_to_node

FULL = "database or disk is full"


class Disk:
    """A store's writes, which fail while the disk is full."""

    def __init__(self, store: Store) -> None:
        self.full = False
        self.tries = 0
        self._write = store.write
        store.write = self.write  # type: ignore[method-assign]

    def write(self, **what: Any) -> None:
        self.tries += 1
        if self.full:
            raise sqlite3.OperationalError(FULL)
        self._write(**what)


def configured(*overrides: str) -> CoordinatorConfig:
    register_schema()
    with initialize_config_module(config_module="unicron_lightning.conf", version_base="1.3"):
        return from_composed(compose(config_name="coordinator", overrides=list(overrides)))


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[str, Disk]]:
    """Run a coordinator in this process."""
    server = Server(configured(f"store.state_dir={folder}", "coordinator.port=0"), token_for("127.0.0.1", None))
    disk = Disk(server.store)
    running = asyncio.create_task(server.run())
    try:
        yield f"http://127.0.0.1:{server.port}", disk
    finally:
        server._stop.set()
        await running


async def post(url: str, body: Any = None) -> tuple[int, Any]:
    place, _, target = url.removeprefix("http://").partition("/")
    return await ask(place, "POST", f"/{target}", b"" if body is None else json.dumps(body).encode())


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(2000):
        if await condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("not within 100 s")


async def error(url: str) -> str | None:
    found: str | None = (await get(f"{url}/v1/status"))["coordinator"]["store_error"]
    return found


async def test_orders_are_confirmed_once_they_are_durable(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, disk), connected(url, "a", "b", nodes=(2, 2)) as agents:
        await train(agents)
        disk.full = True
        for path in ("nodes/a/drain", "tasks/t/cancel"):
            status, answer = await post(f"{url}/v1/{path}")
            assert (status, FULL in answer["error"]) == (503, True)
        about = await get(f"{url}/v1/status")
        assert about["coordinator"]["store_error"] == FULL
        assert about["tasks"]["t"]["state"] != "over", "orders after the first failure were not carried out"
        disk.full = False
        status, answer = await post(f"{url}/v1/nodes/b/drain")
        assert (status, answer["drained"], sorted(answer["staying"])) == (200, ["a", "b"], ["a", "b"])
        assert await error(url) is None
    async with serving(tmp_path) as (url, _):
        assert (await get(f"{url}/v1/status"))["drained"] == ["a", "b"]


async def test_a_job_is_not_confirmed_either(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, disk):
        disk.full = True
        job = {"name": "j", "command": ["train.py"], "min_nodes": 1, "max_nodes": 1}
        status, answer = await post(f"{url}/v1/jobs", job)
        assert (status, FULL in answer.get("error", "")) == (503, True), answer


async def test_recovery_goes_on_and_is_written_later(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, disk), connected(url, "a", "b", nodes=(2, 2)) as (a, b):
        await train([a, b])
        disk.full = True
        await b.say(wire.WorkerDied(worker=b.worker, cause="signal", code=9, at=time.time()))
        assert (await a.hear(wire.Epoch)).number == 2
        await a.ready(2)
        assert (await a.hear(wire.Go)).epoch == 2
        assert await error(url) == FULL
        tried = disk.tries

        async def tried_again() -> bool:
            return disk.tries >= tried + 2

        await until(tried_again)
        assert await error(url) == FULL
        disk.full = False

        async def saved() -> bool:
            return await error(url) is None

        await until(saved)
        names = [event["name"] for event in await get(f"{url}/v1/events?task=t")]
        assert names.count("worker_died") == 1 and names.count("epoch_published") == 2
        assert names.index("worker_died") < len(names) - 1 - names[::-1].index("epoch_settled")
    async with serving(tmp_path) as (url, _):
        assert (await get(f"{url}/v1/status"))["tasks"]["t"]["epoch"] == 2


async def test_a_task_that_ended_while_nothing_was_written_is_not_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, disk), connected(url, "a") as (a,):
        await train([a])
        disk.full = True
        await a.say(wire.WorkerDied(worker=a.worker, cause="exit", code=0, at=time.time()))
        assert (await a.hear(wire.TaskOver)).succeeded
        await a.say(wire.Bye(succeeded=True))

        async def forgotten() -> bool:
            return not (await get(f"{url}/v1/status"))["tasks"]

        await until(forgotten)
        disk.full = False  # the end of the coordinator is the last try
    async with serving(tmp_path) as (url, _):
        assert (await get(f"{url}/v1/status"))["tasks"] == {}


async def test_a_job_that_ended_while_nothing_was_written_is_not_run_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, disk), daemon(url, []) as node:
        await post(f"{url}/v1/jobs", {"name": "j", "command": ["train.py"]})
        (launch,) = await orders(node, 1)
        running = NodeTask(job=launch.job, slot="0", pid=os.getpid(), starts=1)
        await node.send_str(wire.encode(NodeReport(tasks=[running])).decode())
        async with connected(url, "a", nodes=(1, 1)) as (agent,):
            await agent.register(task="j", node="n", slot="0")
            await agent.boot()
            disk.full = True
            await agent.say(wire.WorkerDied(worker=agent.worker, cause="exit", code=0, at=time.time()))
            await agent.say(wire.Bye(succeeded=True))
        ended = NodeTask(job=launch.job, slot="0", starts=1, code=0)
        await node.send_str(wire.encode(NodeReport(tasks=[ended])).decode())
        tried = disk.tries
        with pytest.raises(asyncio.TimeoutError):
            await orders(node, 0, seconds=2)
        assert disk.tries > tried
        disk.full = False
        assert await orders(node, 0) == [], "now it is written"


async def test_a_daemon_that_returns_before_that_is_written_keeps_the_end(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, disk):
        async with daemon(url, []) as node:
            await post(f"{url}/v1/jobs", {"name": "j", "command": ["train.py"]})
            (launch,) = await orders(node, 1)
            disk.full = True
            ended = NodeTask(job=launch.job, slot="0", starts=1, code=0)
            await node.send_str(wire.encode(NodeReport(tasks=[ended])).decode())

            async def over() -> bool:
                return [job["state"] for job in await get(f"{url}/v1/jobs")] == ["succeeded"]

            await until(over)
        async with daemon(url, [ended]) as node:
            first = decode_to_node(await node.receive_str(timeout=20))
            assert [(each.job.name, each.ending) for each in first.launches] == [("j", True)]
            disk.full = False
            assert await orders(node, 0) == [], "now it is written"


async def test_the_next_coordinator_learns_how_the_job_ended(tmp_path: Path) -> None:
    """The one before was killed before it could write that."""
    async with serving(tmp_path) as (url, disk), daemon(url, []) as node:
        await post(f"{url}/v1/jobs", {"name": "j", "command": ["train.py"]})
        (launch,) = await orders(node, 1)
        disk.full = True
        ended = NodeTask(job=launch.job, slot="0", starts=1, code=0)
        await node.send_str(wire.encode(NodeReport(tasks=[ended])).decode())
    async with serving(tmp_path) as (url, _), daemon(url, [ended]) as node:

        async def over() -> bool:
            return [job["state"] for job in await get(f"{url}/v1/jobs")] == ["succeeded"]

        await until(over)


@asynccontextmanager
async def daemon(url: str, tasks: list[NodeTask]) -> AsyncIterator[aiohttp.ClientWebSocketResponse[Any]]:
    """A daemon with one slot."""
    hello = NodeHello(
        protocol=wire.PROTOCOL_VERSION, node="n", host="h", pid=1, started_at=1.0, slots=["0"], tasks=tasks
    )
    async with aiohttp.ClientSession() as http, await open_socket(http, f"{url}/v1/node", access(None)) as socket:
        await socket.send_str(wire.encode(hello).decode())
        yield socket


async def orders(node: aiohttp.ClientWebSocketResponse[Any], number: int, seconds: float = 20) -> list[Launch]:
    """Wait for an order of so many agents."""
    while len((run := decode_to_node(await node.receive_str(timeout=seconds))).launches) != number:
        pass
    return list(run.launches)


@pytest.mark.parametrize("failures", [1, 3])
async def test_a_batch_is_kept_with_what_comes_after(failures: int, tmp_path: Path) -> None:
    machine, store = Machine(ev.Limits()), Store(tmp_path)
    disk, saving = Disk(store), Saving(store, lambda: machine)
    try:
        disk.full = True
        for number in range(3):
            saving.write(emitting(f"e{number}"))
        assert disk.tries == 1, "later batches wait for the next try"
        for _ in range(failures - 1):
            assert not saving.retry()
        assert saving.error == FULL and store.events() == []
        disk.full = False
        assert saving.retry() and saving.error is None
        assert [event["name"] for event in store.events()] == ["e0", "e1", "e2"]
    finally:
        saving.close(last_try=False)
        store.close()


def test_what_is_kept_is_bounded() -> None:
    batch = emitting("first")
    for number in range(MOST_UNWRITTEN_EVENTS):
        batch.follow(emitting(f"e{number}"))
    assert (len(batch._news), batch._news[0][1].name) == (MOST_UNWRITTEN_EVENTS, "e0")


def test_a_large_event_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fields = {"text": "x" * 100_000, "number": 7}
    Batch().add(1.0, [ev.Emit(name="big", task="t", incident=None, fields=fields)])
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("big task=t incident=None {'text': 'xxx") and len(line) < 2 * MOST_LOGGED_CHARACTERS
    assert line.endswith("... (cut, 100025 characters)")


def emitting(name: str) -> Batch:
    batch = Batch()
    batch.add(1.0, [ev.Emit(name=name, task=None, incident=None)])
    return batch
