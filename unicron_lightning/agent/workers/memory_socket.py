"""The UNIX socket over which workers hand shared memory to their agent, by descriptors: one message a version.

What a worker has sent is received even if it has died, and whenever that is: `drain` receives all of it, and is called
before the worker's end is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from unicron_lightning import wire

logger = logging.getLogger(__name__)

_MESSAGE_BYTES: Final = 1 << 20
_DESCRIPTORS: Final = 253
"""Most descriptors in a message, by the kernel's limit."""
_WAITING: Final = 128
"""Workers that may connect while the agent is busy."""


class MemorySocket:
    """Receives from the workers of one agent.

    Args:
        path: path of the socket; its folder must be private.
        received: called with each message and its descriptors, which it owns from then on.
    """

    def __init__(self, path: Path, received: Callable[[wire.StateStaged, list[int]], None]) -> None:
        self._path = path
        self._received = received
        self._listener: socket.socket | None = None
        self._workers: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start listening, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(self._path))
        self._listener.listen(_WAITING)
        self._loop.add_reader(self._listener, self.drain)

    def drain(self) -> None:
        """Receive all that workers have sent so far."""
        if self._listener is None or self._loop is None:
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                worker, _ = self._listener.accept()
                worker.setblocking(False)
                self._workers.append(worker)
                self._loop.add_reader(worker, self._receive, worker)
        for worker in list(self._workers):
            self._receive(worker)

    def close(self) -> None:
        """Stop listening and close all connections."""
        for worker in list(self._workers):
            self._drop(worker)
        if self._listener is not None and self._loop is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)

    def _receive(self, worker: socket.socket) -> None:
        """Receive what one worker has sent; drop its connection at the end, or if it sends anything else."""
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data, descriptors, flags, _ = socket.recv_fds(worker, _MESSAGE_BYTES, _DESCRIPTORS)
                    message = _decoded(data, descriptors, flags) if data else None
                except BlockingIOError:
                    raise
                except OSError as error:
                    logger.debug("memory_link_broke error=%s", error)
                    message = None
                if message is None:
                    self._drop(worker)
                    return
                self._received(message, descriptors)

    def _drop(self, worker: socket.socket) -> None:
        assert self._loop is not None
        self._loop.remove_reader(worker)
        self._workers.remove(worker)
        worker.close()


def _decoded(data: bytes, descriptors: list[int], flags: int) -> wire.StateStaged | None:
    """Return a message; None, with its descriptors closed, if it is not what workers send."""
    try:
        message = wire.decode_staged(data)
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(message.staged) != len(descriptors):
            raise ValueError(f"{len(message.staged)} copies came with {len(descriptors)} descriptors")
    except (msgspec.DecodeError, ValueError) as error:
        logger.error("staged_message_refused error=%s", error)
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return message
