"""The event log is bounded: one event, all events, and one answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from coordinator.shell import get
from coordinator.storage.test_saving import post, serving

from unicron_lightning.coordinator.events import Emit
from unicron_lightning.coordinator.storage import MOST_FIELD_BYTES, PAGE_BYTES, EventLog, Store, encoded


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path, events_kept=100)) as opened:
        yield opened


def events(number: int, **fields: object) -> list[tuple[float, Emit]]:
    return [(1.0, Emit(name="e", task=None, incident=None, fields=dict(fields))) for _ in range(number)]


def test_large_fields_are_cut_with_a_mark() -> None:
    fields = {"worker": "a/0#1", "text": "x" * 200_000, "list": list(range(50_000)), "step": 7}
    cut = json.loads(encoded(fields))
    assert (cut["worker"], cut["step"]) == ("a/0#1", 7)
    assert cut["text"].endswith("... (cut, 200002 bytes)") and "cut" in cut["list"]
    assert cut["cut_from_bytes"] > 200_000
    assert len(encoded({str(number): "x" * 900 for number in range(1000)})) < MOST_FIELD_BYTES
    small = {"text": "x" * 10_000}
    assert json.loads(encoded(small)) == small


def test_the_number_of_events_is_bounded_while_the_log_grows(store: Store) -> None:
    for _ in range(30):
        store.write(save=(), forget=(), events=events(10))
        assert len(store.events()) <= 100
    assert [event["seq"] for event in store.events()] == list(range(201, 301))


def test_their_bytes_are_bounded(store: Store) -> None:
    store._log = EventLog(store._db, 100, 50_000)
    for _ in range(100):
        store.write(save=(), forget=(), events=events(1, text="x" * 2000))
    kept = store.events()
    assert len(kept) == 24 and kept[-1]["seq"] == 100


async def test_answers_are_pages(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, disk):
        disk.write(save=(), forget=(), events=events(1500, text="x" * 15_000))
        since, seen, pages = 0, 0, 0
        while page := await get(f"{url}/v1/events?since={since}"):
            assert sum(len(json.dumps(event["fields"])) for event in page) < PAGE_BYTES + MOST_FIELD_BYTES
            since, seen, pages = page[-1]["seq"], seen + len(page), pages + 1
        assert seen == 1501 and pages > 4
        assert len(await get(f"{url}/v1/events?limit=3")) == 3
        for word in ("x", "-1", "9" * 19):
            with pytest.raises(AssertionError, match="up to 18 digits"):
                await get(f"{url}/v1/events?since={word}")
        assert (await post(f"{url}/v1/nodes/x/drain"))[0] == 404
