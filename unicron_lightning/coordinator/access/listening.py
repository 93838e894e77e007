"""The coordinator's port: where it is, and how connections come in when they are encrypted."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

from unicron_lightning.coordinator.access.unproven import PROOF_SECONDS, most_unproven
from unicron_lightning.errors import ConfigError, PortInUse

_HANDSHAKE: Final = b"\x16"
"""First byte of a client that speaks TLS."""
_FULL_SECONDS: Final = 0.5
_GOODBYE_SECONDS: Final = 1.0
_REFUSAL: Final = json.dumps({"error": "this port speaks TLS"}).encode()
_PLAIN_ANSWER: Final = (
    b"HTTP/1.1 426 Upgrade Required\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_REFUSAL), _REFUSAL)
)


BACKLOG: Final = 1024
"""Connections that may wait to be taken in: all agents of a restarted coordinator return together, and one that finds
no room tries again a second later. A longer queue would not be served within the time that clients allow."""


def resolve(host: str, port: int) -> Any:
    """Return the first of the addresses of ``coordinator.host``, as `socket.getaddrinfo` does.

    Raises:
        ConfigError: it has none.
    """
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"coordinator.host={host}: {error.strerror}") from error


def bind(address: Any) -> socket.socket:
    """Listen at an address of `resolve`.

    Raises:
        PortInUse: another program does.
        ConfigError: it is not this machine's, or may not be used.
    """
    family, kind, protocol, _, endpoint = address
    listener = socket.socket(family, kind, protocol)
    try:
        # Lets a restarted coordinator have its port back while old connections linger in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(endpoint)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = f"can't listen on {endpoint[0]}:{endpoint[1]}: {error.strerror}"
        raise (PortInUse(reason) if error.errno == errno.EADDRINUSE else ConfigError(reason)) from error
    return listener


class TlsDoor:
    """Takes connections in and hands them on once they are encrypted.

    A plain request is answered in one line, so that its sender knows why. Connections that have not finished the
    handshake are as few, and as short, as those without a proof (`unproven`).

    Args:
        listener: closed at the end.
        context: of the server's side.
        protocol: makes what an encrypted connection is handed to.
    """

    def __init__(
        self, listener: socket.socket, context: ssl.SSLContext, protocol: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self._listener = listener
        self._context = context
        self._protocol = protocol
        self._pending: dict[asyncio.Task[None], socket.socket] = {}
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to take connections."""
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Take no more; connections that are not encrypted yet end."""
        if self._accepting is not None:
            self._accepting.cancel()
        for connection in self._pending.values():
            _end(connection)
        await asyncio.gather(*filter(None, (self._accepting, *self._pending)), return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptors are left
                loop.call_exception_handler({"message": "a connection could not be taken", "exception": error})
                await asyncio.sleep(_FULL_SECONDS)
                continue
            task = asyncio.create_task(self._admit(connection))
            self._pending[task] = connection
            task.add_done_callback(self._pending.pop)
            if len(self._pending) > most_unproven(resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
                _end(next(iter(self._pending.values())))

    async def _admit(self, connection: socket.socket) -> None:
        try:
            first = await asyncio.wait_for(_first_byte(connection), PROOF_SECONDS)
            if first == _HANDSHAKE:
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._protocol, connection, ssl=self._context, ssl_handshake_timeout=PROOF_SECONDS
                )
                return
            if first:
                await asyncio.wait_for(_refuse(connection), _GOODBYE_SECONDS)
        except (OSError, asyncio.TimeoutError):
            pass  # it has closed, said nothing, or can't be agreed with: not worth a line each
        connection.close()


async def _first_byte(connection: socket.socket) -> bytes:
    """Wait for a connection's first byte, and leave it there; empty if it has ended."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK)


async def _refuse(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, _PLAIN_ANSWER)
    connection.shutdown(socket.SHUT_WR)
    while await loop.sock_recv(connection, 1 << 16):  # to close with unread data would take the answer back
        pass


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
