"""An agent whose workers start without a slot: its reports, and the moment at which it releases the workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent.fake_coordinator import FakeCoordinator
from agent.test_handler import Bench, LocalWorker

from unicron_lightning import environ, wire
from unicron_lightning.agent.workers.slot_lock import SlotLock
from unicron_lightning.local_cluster.processes import until


class Sparing(FakeCoordinator):
    """Grant only warm starts, and welcome no worker until the test does."""

    async def _rendezvous(self, agent: str, number: int, store: wire.Address) -> None:
        await self._to(agent, grant(number, store, warm=True))

    async def _answer(self, agent: str, message: Any) -> None:
        if not isinstance(message, wire.WorkerHello):
            await super()._answer(agent, message)


def grant(number: int, store: wire.Address, *, warm: bool) -> wire.Grant:
    return wire.Grant(round=number, group_rank=3, group_world=4, master=store, warm=warm)


@pytest.fixture
def fake() -> Iterator[Sparing]:
    with Sparing().serving() as served:
        yield served


@pytest.fixture
def bench(fake: Sparing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = dict(os.environ)
    made = Bench(fake)
    yield made
    made.close()
    os.environ.clear()
    os.environ.update(before)


def promote(bench: Bench) -> None:
    """Give the agent the slot."""
    view = bench.handler._agent.view  # type: ignore[union-attr]
    assert view.store is not None
    bench.fake.send(grant(view.number, view.store, warm=False))


def test_warm_workers_are_started_without_waiting_for_ranks(bench: Bench) -> None:
    assert bench.rendezvous(size=2) == [6, 8], "numbers that mean nothing, but local ranks are right"
    assert bench.fake.wait_for(wire.LocalWorld).size == 2
    name = bench.spawn(1)
    assert name.endswith("/1#1") and bench.handler.num_nodes_waiting() == 0


def test_a_registration_tells_what_has_arrived(bench: Bench) -> None:
    bench.rendezvous()
    with LocalWorker(bench.spawn(0)):
        bench.fake.wait_for(wire.WorkerHello)
        bench.fake.drop()
        first = until("it is back", lambda: next((r for r in bench.fake.registers if r.warm), None))
        assert (first.waiting, first.granted, len(first.workers)) == (False, False, 1)
        assert first.workers[0].hello is not None
        promote(bench)
        until("it has the slot", lambda: bench.handler._agent.view.grant.warm is False)
        bench.fake.drop()
        until("it is back", lambda: any(r.granted for r in bench.fake.registers))
        assert not bench.fake.registers[-1].warm


def test_a_warm_worker_is_welcomed_when_the_slot_is_free_on_the_machine(bench: Bench) -> None:
    bench.make(slot="0")
    held = SlotLock("n", "0")
    assert held.acquire()
    bench.rendezvous()
    with LocalWorker(bench.spawn(0)) as worker:
        hello = bench.fake.wait_for(wire.WorkerHello)
        promote(bench)
        bench.fake.send(wire.Welcome(worker=hello.worker, founder=True, life=1, resume=()))
        bench.fake.send(wire.Welcome(worker=hello.worker, founder=False, life=1, resume=()))
        gate: Any = bench.handler._agent._gate  # type: ignore[union-attr]
        until("the welcome is held", lambda: gate._held and not gate._held[hello.worker].founder)
        held.release()
        assert worker.hear() == wire.Welcome(worker=hello.worker, founder=False, life=1, resume=())
        assert not SlotLock("n", "0").acquire(), "it is taken"
    bench.children[0].kill()
    bench.children[0].wait()
    bench.rendezvous()
    assert held.acquire(), "given back when the workers have ended, and not taken for warm ones"
    held.release()


def test_warm_workers_are_stopped_as_others_are(bench: Bench) -> None:
    bench.rendezvous()
    bench.spawn(0)
    bench.fake.send(wire.Stop(reason="test"))
    until("torchelastic is told", lambda: bench.handler.num_nodes_waiting() == 1)
    assert os.environ[environ.ROUND] == "1"
