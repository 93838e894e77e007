"""The agent's session with the coordinator."""

from __future__ import annotations

import asyncio
import os
import socket
import time

from agent.fake_coordinator import FakeCoordinator

from unicron_lightning import wire
from unicron_lightning.agent.coordinator_session import QUIET_SECONDS, CoordinatorSession, Pulse, SessionHooks
from unicron_lightning.credentials import token_for
from unicron_lightning.detection.silence import SilenceLimits
from unicron_lightning.tls import Access


def register() -> wire.Register:
    return wire.Register(
        protocol=wire.PROTOCOL_VERSION,
        task="t",
        agent="a",
        node="n",
        host="127.0.0.1",
        pid=os.getpid(),
        min_nodes=1,
        max_nodes=1,
        round=0,
        waiting=False,
        granted=False,
        store=None,
        local_world=None,
        workers=[],
        epoch=0,
    )


async def test_at_the_loss_of_a_session_it_is_checked_whether_the_coordinator_is_stopped() -> None:
    """A further attempt, which a stopped coordinator would leave without an answer, is not awaited first."""
    stands, order, refused = asyncio.Event(), [], asyncio.Event()

    async def nothing_listens() -> None:
        order.append("nothing listens")
        refused.set()

    hooks = SessionHooks(
        register=register,
        received=lambda _: stands.set(),
        nothing_listens=nothing_listens,
        not_answering=lambda: order.append("not answering"),
    )
    with FakeCoordinator().serving() as coordinator:
        url = f"http://127.0.0.1:{coordinator.port}/v1/agent"
        running = asyncio.create_task(
            CoordinatorSession(url, Access(token=token_for("127.0.0.1", None)), 60.0, hooks).run()
        )
        await asyncio.wait_for(stands.wait(), 60)
        assert order == []
    await asyncio.wait_for(refused.wait(), 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert order[:2] == ["not answering", "nothing listens"]


async def test_an_attempt_without_an_answer_asks_soon_whether_the_coordinator_is_stopped() -> None:
    """As a process that was stopped while an agent connected to it again: the attempt itself times out much later."""
    asked: list[float] = []
    first = asyncio.Event()

    def not_answering() -> None:
        asked.append(time.monotonic())
        first.set()

    async def nothing_listens() -> None:
        raise AssertionError("a socket listens")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        hooks = SessionHooks(
            register=register,
            received=lambda _: None,
            nothing_listens=nothing_listens,
            not_answering=not_answering,
        )
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/agent"
        began = time.monotonic()
        running = asyncio.create_task(
            CoordinatorSession(url, Access(token=token_for("127.0.0.1", None)), 60.0, hooks).run()
        )
        await asyncio.wait_for(first.wait(), 60)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert QUIET_SECONDS <= asked[0] - began < 2 * QUIET_SECONDS
    await asyncio.sleep(QUIET_SECONDS)
    assert len(asked) == 1, "the timer ends with the attempt"


async def test_a_new_connection_that_is_silent_is_asked_about_long_before_it_is_cut() -> None:
    order: list[str] = []
    asked = asyncio.Event()

    def quiet() -> None:
        order.append("quiet")
        asked.set()

    async def send(message: wire.Message) -> None:
        assert isinstance(message, wire.Beat)

    limits = SilenceLimits(beat=0.1, least=0.3, most=2.0)
    pulse = Pulse(limits, send, quiet, lambda: order.append("cut"))
    for _ in range(3):
        pulse.heard(wire.Beat())
    began = time.monotonic()
    running = asyncio.create_task(pulse.run())
    await asyncio.wait_for(asked.wait(), 60)
    waited = time.monotonic() - began
    await asyncio.wait_for(running, 60)
    assert waited < 1.8, "at the least limit, though a new connection may stay silent for the most"
    assert order[-1] == "cut" and order.count("cut") == 1 and time.monotonic() - began > 1.5


async def test_beats_follow_the_coordinators_interval() -> None:
    sent: list[float] = []
    counted = {2: asyncio.Event(), 12: asyncio.Event()}

    async def send(message: wire.Message) -> None:
        assert isinstance(message, wire.Beat)
        sent.append(time.monotonic())
        pulse.heard(message)
        if len(sent) in counted:
            counted[len(sent)].set()

    pulse = Pulse(SilenceLimits(beat=1.0, least=60.0, most=60.0), send, lambda: None, lambda: None)
    running = asyncio.create_task(pulse.run())
    await asyncio.wait_for(counted[2].wait(), 60)
    began = time.monotonic()
    pulse.retime(SilenceLimits(beat=0.01, least=60.0, most=60.0))
    await asyncio.wait_for(counted[12].wait(), 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert sent[2] - began < 0.9, "the shorter interval begins within the longer one"
    assert sent[11] - sent[2] < 9 * 1.0
