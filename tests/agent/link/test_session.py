"""The agent's session with the coordinator."""

from __future__ import annotations

import asyncio
import os

from agent.fake_coordinator import FakeCoordinator

from unicron_lightning import wire
from unicron_lightning.agent.link.session import CoordinatorSession, SessionHooks
from unicron_lightning.credentials import token_for


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
        running = asyncio.create_task(CoordinatorSession(url, token_for("127.0.0.1", None), 60.0, hooks).run())
        await asyncio.wait_for(stands.wait(), 60)
        assert order == []
    await asyncio.wait_for(refused.wait(), 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert order[:2] == ["not answering", "nothing listens"]
