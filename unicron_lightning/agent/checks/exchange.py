"""Exchanges data with another agent, on the coordinator's order, to check the connection between the two.

The exchange uses a TCP connection between the addresses of the workers' collectives: some round trips, then a given
number of bytes to the serving side, then as many back. Both sides move at most `CHUNK` bytes before their event loop
continues with other work, and both end in time whatever the other side does.

The connecting side first sends 32 bytes: an HMAC, under the cluster's token, of the key that the serving agent has made
for this exchange and that came by the coordinator. A peer without them receives nothing. Nothing is decoded.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import logging
import os
import secrets
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from unicron_lightning import wire
from unicron_lightning.agent.options import names_this_machine
from unicron_lightning.agent.round_store import listen
from unicron_lightning.wire.peers import Amount

logger = logging.getLogger(__name__)

CHUNK: Final = 1 << 16
LINGER_SECONDS: Final = 5.0
"""Seconds beyond the exchange's limit that it is served: the other agent must first receive the address."""
_ROUND_TRIPS: Final = 8
_MIB: Final = 1 << 20


class Way:
    """Progress of an exchange, for messages."""

    def __init__(self, amount: Amount, doing: str) -> None:
        self._amount = amount
        self._doing = doing
        self._moved: int | None = None

    def at(self, doing: str) -> None:
        """Record the present wait."""
        self._doing, self._moved = doing, None

    def moves(self, what: str, moved: int) -> None:
        """Record a number of bytes ``sent`` or ``received``."""
        self._doing, self._moved = what, moved

    def __str__(self) -> str:
        if self._moved is None:
            return self._doing
        return f"{self._moved / _MIB:.1f} of {self._amount.size / _MIB:g} MiB {self._doing}"


class Exchanges:
    """Exchanges of one agent; lives in its event loop.

    Args:
        host: this agent's address for others.
        token: the cluster's token.
        send: sends a message to the coordinator.
    """

    def __init__(self, host: str, token: str, send: Callable[[wire.Message], None]) -> None:
        self._host = host
        self._token = token
        self._send = send
        self._served: dict[str, tuple[Way, asyncio.Future[str]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, order: wire.PairServe | wire.PairConnect | wire.PairEnd) -> None:
        """Carry out an order of the coordinator."""
        match order:
            case wire.PairServe():
                self._begin(self._serve(order))
            case wire.PairConnect():
                self._begin(self._connect(order))
            case wire.PairEnd():
                way, outcome = self._served.get(order.check, (None, None))
                if outcome is None:
                    self._send(wire.PairResult(check=order.check, cause="the exchange was no longer served"))
                elif not outcome.done():
                    outcome.set_result(str(way))

    async def close(self) -> None:
        """End all exchanges."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- serving

    async def _serve(self, order: wire.PairServe) -> None:
        try:
            listener = await asyncio.to_thread(listen, self._host)
        except OSError as error:
            self._send(wire.PairResult(check=order.check, cause=f"cannot listen on {self._host}: {error}"))
            return
        key = secrets.token_hex(32)
        way = Way(order.amount, "no agent has connected")
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._served[order.check] = way, outcome
        visitors: set[asyncio.Task[None]] = set()
        visit = functools.partial(self._visited, order, self._proof(key), way, outcome, visitors)
        server = await asyncio.start_server(visit, sock=listener, limit=CHUNK)
        try:
            port = listener.getsockname()[1]
            self._send(wire.PairServing(check=order.check, host=self._host, port=port, key=key))
            cause = await asyncio.wait_for(outcome, order.amount.seconds + LINGER_SECONDS)
        except asyncio.TimeoutError:
            cause = str(way)
        finally:
            del self._served[order.check]
            server.close()
            for visitor in list(visitors):
                visitor.cancel()
            await asyncio.gather(*visitors, return_exceptions=True)
        self._send(wire.PairResult(check=order.check, cause=cause))

    async def _visited(
        self,
        order: wire.PairServe,
        proof: bytes,
        way: Way,
        outcome: asyncio.Future[str],
        visitors: set[asyncio.Task[None]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        visitors.add(task)
        try:
            if outcome.done():
                return  # the connection came too late
            said = await reader.readexactly(len(proof))
            if not hmac.compare_digest(said, proof):
                logger.warning("pair_stranger check=%s address=%s", order.check, writer.get_extra_info("peername"))
                return
            try:
                await _answer(reader, writer, order.amount, way)
                cause = ""
            except (OSError, EOFError) as error:
                cause = f"{way}, then {_words(error)}"
            if not outcome.done():
                outcome.set_result(cause)
        except (OSError, EOFError):
            logger.debug("pair_stranger_left check=%s", order.check)
        finally:
            visitors.discard(task)
            writer.transport.abort()

    def _proof(self, key: str) -> bytes:
        return hmac.digest(self._token.encode(), key.encode(), hashlib.sha256)

    # ---- connecting

    async def _connect(self, order: wire.PairConnect) -> None:
        way = Way(order.amount, "not connected")
        seconds = order.amount.seconds
        try:
            result = await asyncio.wait_for(self._measure(order, way), seconds)
        except asyncio.TimeoutError:
            result = wire.PairResult(check=order.check, cause=f"{way} within {seconds:g} s")
        except (OSError, EOFError) as error:
            result = wire.PairResult(check=order.check, cause=f"{way}: {_words(error)}")
        if result.cause:
            logger.warning("pair_failed check=%s partner=%s cause=%s", order.check, order.agent, result.cause)
        self._send(result)

    async def _measure(self, order: wire.PairConnect, way: Way) -> wire.PairResult:
        local = (self._host, 0) if await asyncio.to_thread(names_this_machine, self._host) else None
        reader, writer = await asyncio.open_connection(order.host, order.port, local_addr=local, limit=CHUNK)
        try:
            way.at("connected, but not answered")
            writer.write(self._proof(order.key))
            round_trips = []
            for _ in range(_ROUND_TRIPS):
                began = time.monotonic()
                writer.write(b"?")
                await reader.readexactly(1)
                round_trips.append(time.monotonic() - began)
            began = time.monotonic()
            await _give(writer, order.amount, way)
            await reader.readexactly(1)
            there = time.monotonic()
            await _take(reader, order.amount, way)
            back = time.monotonic()
        finally:
            writer.transport.abort()
        return wire.PairResult(
            check=order.check,
            round_trip=statistics.median(round_trips[1:]),
            sent=order.amount.size / max(there - began, 1e-9),
            received=order.amount.size / max(back - there, 1e-9),
        )


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, amount: Amount, way: Way) -> None:
    """Serve an exchange: the other side of `Exchanges._measure`."""
    way.at("connected, but received nothing")
    for _ in range(_ROUND_TRIPS):
        writer.write(await reader.readexactly(1))
    await _take(reader, amount, way)
    writer.write(b"!")
    await _give(writer, amount, way)
    await reader.read(1)  # end of stream: all data has arrived


async def _give(writer: asyncio.StreamWriter, amount: Amount, way: Way) -> None:
    chunk = memoryview(os.urandom(CHUNK))  # random, because some links compress
    given = 0
    while given < amount.size:
        part = chunk[: amount.size - given]
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0)  # yield: drain() does not wait while the kernel accepts data
        given += len(part)
        way.moves("sent", given)


async def _take(reader: asyncio.StreamReader, amount: Amount, way: Way) -> None:
    taken = 0
    while taken < amount.size:
        data = await reader.read(min(CHUNK, amount.size - taken))
        if not data:
            raise EOFError("the connection ended")
        taken += len(data)
        way.moves("received", taken)
        await asyncio.sleep(0)


def _words(error: BaseException) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection ended"
    number = error.errno if isinstance(error, OSError) else None
    return (os.strerror(number) if number else str(error) or type(error).__name__).lower()
