"""Distinguishes an agent's death from a broken link: a dead agent's machine refuses connections to its port.

Each agent's process has an open TCPStore. When the agent's connection ends, the coordinator tries to connect to the
store. A refusal is sufficient evidence to act immediately. Any other result (an answer, or silence) leaves the agent
its grace period to return (`detection.reconnect_grace`). Since a firewall may refuse as well, a refusal counts only
where an earlier connection succeeded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from unicron_lightning import wire
from unicron_lightning.link import end_tasks

logger = logging.getLogger(__name__)

FIRST_LOOK_SECONDS: Final = 1.0
"""Seconds between the report of a store's address and the first test connection."""
_SECONDS: Final = 2.0
_AGAIN_SECONDS: Final = 0.002
_HERE: Final = frozenset({"127.0.0.1", "::1", "localhost"})


async def refuses(address: wire.Address, seconds: float = _SECONDS) -> bool:
    """Whether connections to the address are refused; asks again while a successful one is being closed."""

    async def ask() -> bool:
        while True:
            try:
                reader, writer = await asyncio.open_connection(address.host, address.port)
            except ConnectionRefusedError:
                return True
            except OSError:
                return False
            try:
                await reader.read(1)  # a dying process keeps its port for a short time
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
    """Addresses of agents' stores, by connection."""

    def __init__(self) -> None:
        self._told: dict[int, wire.Address] = {}
        self._reached: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def record_store(self, conn: int, address: wire.Address | None) -> None:
        """Record the address of an agent's store."""
        self._forget(conn)
        if address is None:
            return
        self._told[conn] = address
        self._start(self._reach(conn, address))

    def ended(self, conn: int, gone: Callable[[], None]) -> None:
        """Handle the end of the connection; ``gone`` is called if the process is found to have exited, too."""
        address = self._told.get(conn)
        if address is not None and conn in self._reached:
            self._start(self._look(address, gone))
        self._forget(conn)

    def _forget(self, conn: int) -> None:
        self._told.pop(conn, None)
        self._reached.discard(conn)

    async def close(self) -> None:
        """Stop all checks."""
        await end_tasks(list(self._tasks))

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
