"""A library's TCP sockets within this process: found among its descriptors, looked at and shut down.

The library may close a descriptor at any moment, and the system may reuse the number at once. So a socket is known by
descriptor and inode, and reached through a spare descriptor of this module's own: it is made to refer to the same
socket first, and compared then. No socket is kept open by that, and no descriptor is needed that might not be left.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from unicron_lightning.errors import UnicronError

NO_DESCRIPTOR: Final = "Too many open files"
"""The system's message for EMFILE, as libraries quote it."""


class OutOfDescriptors(UnicronError):
    """The process may open no more files; the message names its limit."""

    def __init__(self, purpose: str) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        super().__init__(f"{purpose}: {NO_DESCRIPTOR}: the limit of this process is {limit}; raise it (ulimit -n)")


@contextlib.contextmanager
def descriptors_for(purpose: str) -> Iterator[None]:
    """Name the limit where a library reports that no descriptor is left.

    Raises:
        OutOfDescriptors: in place of the library's error.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        if NO_DESCRIPTOR in str(error):
            raise OutOfDescriptors(purpose) from error
        raise


class OpenSocket(NamedTuple):
    """A socket of this process."""

    descriptor: int
    target: str
    """What /proc states for the descriptor: the socket's inode."""

    def is_open(self) -> bool:
        """Whether the descriptor still is this socket's."""
        return _target(self.descriptor) == self.target

    def shut_down(self) -> None:
        """End the connection in both directions; nothing if it is closed."""
        with reached(self) as connection, contextlib.suppress(OSError):  # the peer was faster
            if connection is not None:
                connection.shutdown(socket.SHUT_RDWR)


SocketAddress = tuple[str, int]
"""IP address and port."""


class Ends(NamedTuple):
    """The addresses of some sockets."""

    listening: list[SocketAddress]
    connected: dict[OpenSocket, set[SocketAddress]]
    """For each connection both ends."""


def all_sockets() -> set[OpenSocket]:
    """Find the sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        target = _target(int(name))
        if target.startswith("socket:["):
            found.add(OpenSocket(int(name), target))
    return found


def ends(sockets: Iterable[OpenSocket]) -> Ends:
    """Read the addresses of those sockets that are TCP's."""
    listening: list[SocketAddress] = []
    connected: dict[OpenSocket, set[SocketAddress]] = {}
    for found in sorted(sockets):
        with reached(found) as connection, contextlib.suppress(OSError):  # closed meanwhile
            if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.append(connection.getsockname()[:2])
            else:
                connected[found] = {connection.getsockname()[:2], connection.getpeername()[:2]}
    return Ends(listening, connected)


@contextlib.contextmanager
def reached(found: OpenSocket) -> Iterator[socket.socket | None]:
    """Refer to a socket for a moment; None if it is closed."""
    with _lock:
        null, spare = _spare()
        try:
            os.dup2(found.descriptor, spare, inheritable=False)
        except OSError:
            yield None
            return
        try:
            if _target(spare) != found.target:
                yield None
                return
            connection = socket.socket(fileno=spare)
            try:
                yield connection
            finally:
                connection.detach()
        finally:
            os.dup2(null, spare, inheritable=False)


_lock = threading.Lock()
_opened: list[int] = []


def _spare() -> tuple[int, int]:
    """Open this module's two descriptors, once: /dev/null, and one that refers to it between uses."""
    try:
        while len(_opened) < 2:
            _opened.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise OutOfDescriptors("sockets of the data plane") from error
    return _opened[0], _opened[1]


def _target(descriptor: int) -> str:
    """What a file descriptor of this process refers to; empty if it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
