"""State in etcd, against a fake of its gateway: who leads, what is written, and what is confirmed."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from coordinator.fake_etcd import FakeEtcd, fake_etcd

from unicron_lightning.coordinator import etcd, replicated, state
from unicron_lightning.coordinator.events import Emit
from unicron_lightning.coordinator.lifecycle import Lifecycle
from unicron_lightning.coordinator.replicated import Deposed, LeaderStore


def candidate(fake: FakeEtcd, **options: Any) -> LeaderStore:
    return LeaderStore(etcd.Etcd([fake.url]), "test/", "here:1", **options)


@asynccontextmanager
async def leading(fake: FakeEtcd, **options: Any) -> AsyncIterator[LeaderStore]:
    store = candidate(fake, **options)
    try:
        await store.lead()
        yield store
    finally:
        await store.release()


def task(name: str, **values: Any) -> state.Task:
    return state.Task(id=name, min_nodes=1, max_nodes=1, created_at=1.0, lifecycle=Lifecycle(), **values)


def event(name: str, **fields: Any) -> tuple[float, Emit]:
    return 1.0, Emit(name=name, task=None, incident=None, fields=fields)


def save(store: LeaderStore, *tasks: state.Task, forget: tuple[str, ...] = (), events: Any = ()) -> None:
    store.write(save=tasks, forget=forget, events=events)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within 10 s")


def names(store: LeaderStore) -> list[str]:
    return list(store.load().tasks)


async def test_the_next_leader_reads_what_was_written() -> None:
    async with fake_etcd() as fake:
        async with leading(fake) as store:
            save(store, task("b"))
            assert await store.durable() is None
            save(store, task("a/x"), task("gone"), events=[event("one", at=1), event("two")])
            store.write(save=[], forget=["gone"], events=[event("three")], lasting=state.Lasting(drained=["n1"]))
            assert await store.durable() is None
        async with leading(fake) as store:
            assert names(store) == ["b", "a/x"], "in the order in which they were made"
            assert store.load().lasting.drained == ["n1"]
            found = store.events()
            assert [(each["seq"], each["name"]) for each in found] == [(1, "one"), (2, "two"), (3, "three")]
            assert found[0]["fields"] == {"at": 1}
            save(store, events=[event("four")])
            assert await store.durable() is None
            assert store.events()[-1]["seq"] == 4


async def test_nothing_follows_a_write_before_it_is_stored() -> None:
    async with fake_etcd() as fake, leading(fake) as store:
        fake.hold.clear()
        done: list[str] = []
        save(store, task("a"))
        store.when_durable(lambda: done.append("a"))
        save(store, task("b"))
        store.when_durable(lambda: done.append("b"))
        await asyncio.sleep(0.05)
        assert done == []
        fake.hold.set()
        assert await store.durable() is None
        assert done == ["a", "b"]


async def test_a_leader_that_was_replaced_writes_nothing_and_confirms_nothing() -> None:
    async with fake_etcd() as fake, leading(fake) as old:
        save(old, task("before"))
        assert await old.durable() is None
        fake.expire()
        async with leading(fake) as new:
            assert names(new) == ["before"]
            done: list[str] = []
            reasons: list[str] = []
            old.watch(reasons.append)
            save(old, task("late"))
            old.when_durable(lambda: done.append("late"))
            assert "another coordinator has taken over" in (await old.durable() or "")
            save(new, task("new"))
            assert await new.durable() is None
            assert done == []
            assert len(reasons) == 1
            assert sorted(key for key in fake.keys if "tasks/" in key) == ["test/tasks/before", "test/tasks/new"]


async def test_an_answer_without_a_write_is_fenced_too() -> None:
    async with fake_etcd() as fake, leading(fake) as old:
        fake.expire()
        done: list[str] = []
        old.when_durable(lambda: done.append("answered"))
        assert await old.durable() is not None
        assert done == []


async def test_a_leader_whose_lease_is_not_renewed_stops_by_its_own_clock() -> None:
    async with fake_etcd() as fake, leading(fake, lease_seconds=2) as store:
        lost = asyncio.Event()
        store.watch(lambda _: lost.set())
        fake.available = False
        save(store, task("a"))
        assert "not renewed" in (await store.durable() or "")
        assert lost.is_set()
        assert not store.failed, "it may lead again"


async def test_a_leader_writes_once_etcd_is_back() -> None:
    async with fake_etcd() as fake, leading(fake) as store:
        fake.available = False
        save(store, task("a"))
        await until(lambda: store.error is not None)
        fake.available = True
        assert await store.durable() is None
        assert store.error is None
        assert "test/tasks/a" in fake.keys


async def test_a_write_that_is_carried_out_late_changes_nothing() -> None:
    async with fake_etcd() as fake, leading(fake) as store:
        for weight in (1.0, 2.0):
            save(store, task("a", weight=weight))
            assert await store.durable() is None
        first, second = fake.transactions[-2:]
        assert "test/tasks/a" in fake.keys
        before = dict(fake.keys["test/tasks/a"])
        for late in (first, second):
            assert "succeeded" not in fake._kv_txn(late)
        assert fake.keys["test/tasks/a"] == before


async def test_a_write_whose_answer_is_lost_counts_once() -> None:
    async with fake_etcd() as fake, leading(fake) as store:
        fake.lost_answers = 1
        save(store, task("a"))
        assert await store.durable() is None
        save(store, task("b"))
        assert await store.durable() is None
        assert [key for key in sorted(fake.keys) if "tasks" in key] == ["test/tasks/a", "test/tasks/b"]


async def test_one_of_two_candidates_leads_and_the_other_follows_it() -> None:
    async with fake_etcd() as fake:
        stores = [candidate(fake), candidate(fake)]
        turns = [asyncio.create_task(store.lead()) for store in stores]
        await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.6)
        assert sorted(turn.done() for turn in turns) == [False, True]
        first = next(number for number, turn in enumerate(turns) if turn.done())
        await stores[first].release()
        await asyncio.wait_for(turns[1 - first], 2)
        await stores[1 - first].release()


async def test_a_large_write_is_divided_and_is_whole_or_not_at_all() -> None:
    async with fake_etcd() as fake:
        async with leading(fake) as store:
            before = len(fake.transactions)
            save(store, *(task(f"t{number}") for number in range(250)))
            assert await store.durable() is None
            parts = fake.transactions[before:]
            assert len(parts) == 3 + 1 + 3 + 1
        assert not [key for key in fake.keys if "staged" in key or "whole" in key]
        # The leader ends after some of the parts, then after the mark that all are there.
        staged = [each["request_put"] for part in parts[:4] for each in part["success"][:1]]
        for count, expected in ((2, 0), (4, 250)):
            fake.keys.clear()
            for each in staged[:count]:
                key = base64.b64decode(each["key"]).decode()
                fake.keys[key] = {"value": each["value"], "created": 1, "lease": 0}
            async with leading(fake) as store:
                assert len(names(store)) == expected
            assert not [key for key in fake.keys if "staged" in key or "whole" in key]


async def test_a_value_that_etcd_does_not_take_ends_the_leader_with_one_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicated, "MOST_VALUE_BYTES", 100)
    async with fake_etcd() as fake, leading(fake) as store:
        save(store, task("a"))
        assert "expected at most 100 for store=etcd" in (await store.durable() or "")
        assert store.failed


async def test_old_events_leave_etcd() -> None:
    async with fake_etcd() as fake, leading(fake, events_kept=5) as store:
        for number in range(12):
            save(store, events=[event(f"e{number}")])
            assert await store.durable() is None
        kept = sorted(key for key in fake.keys if "events/" in key)
        assert kept == [f"test/events/{number:016d}" for number in range(8, 13)]
    async with fake_etcd() as fake, leading(fake) as store:
        save(store, events=[event("large", text="x" * 5000)] * 200)
        assert await store.durable() is None
        assert len([key for key in fake.keys if "events/" in key]) > 1, "divided"


async def test_unreadable_state_is_set_aside() -> None:
    async with fake_etcd() as fake:
        value = base64.b64encode(b'{"id": 3}').decode()
        fake.keys["test/tasks/broken"] = {"value": value, "created": 1, "lease": 0}
        async with leading(fake) as store:
            assert names(store) == []
            assert await store.durable() is None
            kept = json.loads(base64.b64decode(fake.keys["test/unreadable/broken"]["value"]))
            assert base64.b64decode(kept["state"]) == b'{"id": 3}'
            assert "test/tasks/broken" not in fake.keys


async def test_etcds_refusal_is_an_error_and_not_repeated() -> None:
    async with fake_etcd() as fake:
        fake.refusal = {"error": "etcdserver: permission denied", "code": 7, "message": "etcdserver: permission denied"}
        store = candidate(fake)
        with pytest.raises(etcd.EtcdRefused, match="permission denied"):
            await store.lead()
        await store.release()


async def test_a_leader_that_loses_while_it_loads_does_not_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_etcd() as fake:
        store = candidate(fake)

        async def slow() -> None:
            fake.expire()
            await asyncio.sleep(10)

        monkeypatch.setattr(store, "_read", slow)
        with pytest.raises(Deposed):
            await asyncio.wait_for(store.lead(), 5)
        await store.release()


async def test_a_call_goes_to_the_next_member() -> None:
    async with fake_etcd() as fake:
        client = etcd.Etcd(["http://127.0.0.1:1", fake.url])
        assert await client.get("x") is None
        fake.available = False
        with pytest.raises(etcd.EtcdUnavailable, match="no leader"):
            await client.get("x")
        await client.close()
