"""Connects to peers, ordered by the coordinator, to check whether this node reaches their nodes.

A peer is reached when the TCP connection is established: packets have gone both ways. Its kernel answers, whatever the
listening process does. Nothing is sent, and the connection is closed at once.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import Final

from unicron_lightning import wire

_AT_ONCE: Final = 256
_MOST_CHARACTERS: Final = 200


class Prober:
    """The prober of one agent; lives in its event loop.

    Args:
        send: sends messages to the coordinator.
    """

    def __init__(self, send: Callable[[wire.Message], None]) -> None:
        self._send = send
        self._task: asyncio.Task[None] | None = None

    def begin(self, order: wire.Probe) -> None:
        """Start a probe; cancel an unfinished one."""
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self._probe(order))

    async def close(self) -> None:
        """Cancel a probe in progress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _probe(self, order: wire.Probe) -> None:
        room = asyncio.Semaphore(_AT_ONCE)
        causes = await asyncio.gather(*(_reach(peer, order.seconds, room) for peer in order.peers))
        missed = {peer.agent: cause for peer, cause in zip(order.peers, causes, strict=True) if cause}
        self._send(wire.Probed(number=order.number, missed=missed))


async def _reach(peer: wire.Peer, seconds: float, room: asyncio.Semaphore) -> str:
    """Return the reason why a peer is not reached; "" if it is."""
    loop = asyncio.get_running_loop()
    async with room:
        try:
            family, _, _, _, address = (await loop.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM))[0]
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.setblocking(False)
                return await _connect(connection, address, seconds)
        except OSError as error:
            return (os.strerror(error.errno) if error.errno and error.errno > 0 else str(error))[
                :_MOST_CHARACTERS
            ] or "unknown"


async def _connect(connection: socket.socket, address: tuple[object, ...], seconds: float) -> str:
    try:
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(connection, address), seconds)
    except asyncio.TimeoutError:
        # On a busy machine the connection may have stood in time, and this loop have been late to see it.
        try:
            connection.getpeername()
        except OSError:
            return f"{os.strerror(errno.ETIMEDOUT)} after {seconds:g} s"
    return ""
