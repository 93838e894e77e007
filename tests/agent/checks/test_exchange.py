"""Two agents' exchange of data over real sockets; the test forwards messages in place of a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from unicron_lightning import wire
from unicron_lightning.agent.checks import exchange
from unicron_lightning.agent.checks.exchange import CHUNK, Exchanges
from unicron_lightning.detection.pairs import PairLimits, fault
from unicron_lightning.local_cluster.proxy import Proxy
from unicron_lightning.wire.peers import Amount

LITTLE = Amount(size=3 << 20, seconds=20.0)
SHORT = Amount(size=1 << 20, seconds=0.3)


class Pair:
    """Two agents, and the messages of each to the coordinator."""

    def __init__(self, newcomers_token: str = "secret") -> None:
        self.newcomer_said: asyncio.Queue[Any] = asyncio.Queue()
        self.partner_said: asyncio.Queue[Any] = asyncio.Queue()
        self.newcomer = Exchanges("127.0.0.1", newcomers_token, self.newcomer_said.put_nowait)
        self.partner = Exchanges("127.0.0.1", "secret", self.partner_said.put_nowait)

    async def serve(self, amount: Amount) -> wire.PairServing:
        self.partner.take(wire.PairServe(check="c", amount=amount))
        return await asyncio.wait_for(self.partner_said.get(), 20)

    async def connect(self, word: wire.PairServing, amount: Amount, **changes: Any) -> wire.PairResult:
        order = wire.PairConnect(check="c", agent="p", host=word.host, port=word.port, key=word.key, amount=amount)
        self.newcomer.take(msgspec.structs.replace(order, **changes))
        return await asyncio.wait_for(self.newcomer_said.get(), 40)

    async def partners_word(self) -> str:
        result = await asyncio.wait_for(self.partner_said.get(), 40)
        assert isinstance(result, wire.PairResult)
        return result.cause


@contextlib.asynccontextmanager
async def paired(newcomers_token: str = "secret") -> AsyncIterator[Pair]:
    pair = Pair(newcomers_token)
    try:
        yield pair
    finally:
        await pair.newcomer.close()
        await pair.partner.close()


async def test_two_agents_measure_the_way_between_them() -> None:
    async with paired() as pair:
        word = await pair.serve(LITTLE)
        assert word.host == "127.0.0.1"
        result = await pair.connect(word, LITTLE)
        assert result.cause == ""
        assert result.round_trip is not None and 0 < result.round_trip < 5
        assert result.sent is not None and result.sent > 1e5
        assert result.received is not None and result.received > 1e5
        await pair.partners_word()
        with socket.socket() as probe:
            assert probe.connect_ex((word.host, word.port)) != 0, "the port is closed again"


async def test_without_the_token_or_the_key_nothing_is_sent() -> None:
    async with paired("guess") as pair:
        word = await pair.serve(LITTLE)
        result = await pair.connect(word, LITTLE)
        assert result.cause == "connected, but not answered: the connection ended"
        # A stranger does not spoil it: the peer that knows both secrets is served.
        reader, writer = await asyncio.open_connection(word.host, word.port)
        writer.write(b"x" * 100)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        rightful = Exchanges("127.0.0.1", "secret", pair.newcomer_said.put_nowait)
        wrong_key = await connect(rightful, pair, word, key="0" * 64)
        right = await connect(rightful, pair, word)
        await rightful.close()
        assert wrong_key.cause == "connected, but not answered: the connection ended"
        assert right.cause == ""


async def connect(who: Exchanges, pair: Pair, word: wire.PairServing, **changes: Any) -> wire.PairResult:
    pair.newcomer, before = who, pair.newcomer
    try:
        return await pair.connect(word, LITTLE, **changes)
    finally:
        pair.newcomer = before


async def test_a_partner_that_accepts_and_never_answers_costs_only_the_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        async with paired() as pair:
            word = wire.PairServing(check="c", host="127.0.0.1", port=deaf.getsockname()[1], key="0" * 64)
            result = await pair.connect(word, SHORT)
            assert result.cause == "connected, but not answered within 0.3 s"


class Throttle(Proxy):
    """Forwards at most 64 KiB every 20 ms: 26 Mbit/s."""

    def _forward(self, selector: selectors.BaseSelector, end: socket.socket) -> None:
        time.sleep(0.02)
        super()._forward(selector, end)


async def test_a_slow_way_is_measured_as_such() -> None:
    async with paired() as pair:
        amount = Amount(size=1 << 19, seconds=20.0)
        word = await pair.serve(amount)
        with Throttle(word.port) as proxy:
            result = await pair.connect(word, amount, port=proxy.port)
            assert fault(result, PairLimits(bandwidth=30.0)).endswith("Mbit/s; expected 30")
            assert result.sent is not None and result.sent < 3.3e6
            assert result.received is not None and result.received < 3.3e6
            await pair.partners_word()


async def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with paired() as pair:
            word = wire.PairServing(check="c", host="127.0.0.1", port=unused.getsockname()[1], key="0" * 64)
            assert (await pair.connect(word, SHORT)).cause == "not connected: connection refused"


async def test_who_serves_says_what_it_saw_when_the_other_one_gives_up() -> None:
    async with paired() as pair:
        await pair.serve(LITTLE)
        pair.partner.take(wire.PairEnd(check="c"))
        assert await pair.partners_word() == "no agent has connected"
        pair.partner.take(wire.PairEnd(check="c"))
        assert await pair.partners_word() == "the exchange was no longer served"


async def test_one_that_begins_and_stops_is_let_go_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LINGER_SECONDS", 0.2)
    async with paired() as pair:
        word = await pair.serve(Amount(size=1 << 20, seconds=1.5))
        reader, writer = await asyncio.open_connection(word.host, word.port)
        writer.write(pair.partner._proof(word.key) + b"?" * 8 + bytes(1 << 19))
        assert await reader.readexactly(8) == b"?" * 8
        assert await pair.partners_word() == "0.5 of 1 MiB received"
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


async def test_the_event_loop_goes_on_meanwhile() -> None:
    turns = 0

    async def watch() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with paired() as pair:
        word = await pair.serve(LITTLE)
        watching = asyncio.create_task(watch())
        result = await pair.connect(word, LITTLE)
        watching.cancel()
    assert result.cause == ""
    assert turns > 2 * LITTLE.size // CHUNK, "one for each piece that is given"
