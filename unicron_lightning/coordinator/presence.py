"""Tells an agent that has died from a link that broke: its machine refuses connections to where it listened.

Each agent's process has a TCPStore open. When the agent's own connection ends, the coordinator tries to connect there;
a refusal is evidence enough to act at once, anything else (it answers, nothing comes back) leaves the agent its moment
to come back (`detection.reconnect_grace`). As a firewall may refuse as well, a refusal counts only where a connection
has succeeded before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from unicron_lightning import wire

logger = logging.getLogger(__name__)

FIRST_LOOK_SECONDS: Final = 1.0
"""After the word of where an agent listens, a connection there is tried."""
_SECONDS: Final = 2.0
_AGAIN_SECONDS: Final = 0.002
_HERE: Final = frozenset({"127.0.0.1", "::1", "localhost"})


async def refuses(address: wire.Address, seconds: float = _SECONDS) -> bool:
    """Whether connections there are refused; for as long as one that succeeds is being closed, it is asked again."""

    async def ask() -> bool:
        while True:
            try:
                reader, writer = await asyncio.open_connection(address.host, address.port)
            except ConnectionRefusedError:
                return True
            except OSError:
                return False
            try:
                await reader.read(1)  # a process in the middle of its death still has its port, but not for long
            except OSError:
                pass
            finally:
                writer.close()
            await asyncio.sleep(_AGAIN_SECONDS)

    try:
        return await asyncio.wait_for(ask(), seconds)
    except asyncio.TimeoutError:
        return False


async def _answers(address: wire.Address) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address.host, address.port), _SECONDS)
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True


class Presence:
    """Where agents listen, by connection."""

    def __init__(self) -> None:
        self._told: dict[int, wire.Address] = {}
        self._reached: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def told(self, conn: int, address: wire.Address | None) -> None:
        """An agent has said where its store listens."""
        self._forget(conn)
        if address is None:
            return
        self._told[conn] = address
        self._start(self._reach(conn, address))

    def ended(self, conn: int, gone: Callable[[], None]) -> None:
        """The connection has ended; ``gone`` is called if the process is found to have, too."""
        address = self._told.get(conn)
        if address is not None and conn in self._reached:
            self._start(self._look(address, gone))
        self._forget(conn)

    def _forget(self, conn: int) -> None:
        self._told.pop(conn, None)
        self._reached.discard(conn)

    async def close(self) -> None:
        """Stop looking."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reach(self, conn: int, address: wire.Address) -> None:
        if address.host not in _HERE:  # a thousand agents start at a time
            await asyncio.sleep(FIRST_LOOK_SECONDS)
        if self._told.get(conn) is address and await _answers(address) and self._told.get(conn) is address:
            self._reached.add(conn)

    async def _look(self, address: wire.Address, gone: Callable[[], None]) -> None:
        if await refuses(address):
            logger.info("agent_process_ended host=%s port=%d", address.host, address.port)
            gone()
