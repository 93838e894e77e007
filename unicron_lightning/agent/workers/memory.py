"""States of training in the agent's memory, staged by its workers, which they outlive.

Workers hand over the memory itself over a UNIX socket, by descriptors, before they begin the step that follows: one
message a version. What a worker has sent is received even if it has died, and whenever that is: `MemorySocket.drain`
receives all of it, and is called before the worker's end is reported. The agent computes the digests in a thread. It
keeps the newest version that the coordinator has reported as held in all its parts, and the two newest ones
beside it; their sum is the memory's bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from unicron_lightning import environ, wire
from unicron_lightning.shared_memory import check, digest_of

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


_NEWER: Final = 2
"""Versions that are kept beside the complete one: one may be staged while the other is reported."""


class AgentMemory:
    """Copies in the memory of one agent; lives in its event loop.

    Args:
        folder: private folder for the socket.
        send: sends a message to the coordinator.
    """

    def __init__(self, folder: Path, send: Callable[[wire.Message], None]) -> None:
        self._send = send
        self._socket = MemorySocket(folder / environ.MEMORY_SOCKET, self._take)
        self._complete: wire.StateVersion | None = None
        self._held: dict[wire.StateVersion, dict[int, wire.OpenCopy]] = {}
        self._reported: tuple[wire.StateCopy, ...] = ()
        self._digests = ThreadPoolExecutor(1, thread_name_prefix="unicron-digests")

    def start(self) -> None:
        """Start receiving from workers, in the running event loop."""
        self._socket.start()

    @property
    def copies(self) -> tuple[wire.StateCopy, ...]:
        """All copies that workers have handed over, oldest version first."""
        self._socket.drain()
        return tuple(each.copy for version in sorted(self._held) for each in self._held[version].values())

    def report(self) -> None:
        """Report the copies to the coordinator, unless it knows them, whether or not their digests are computed."""
        if (copies := self.copies) != self._reported:
            self._reported = copies
            self._send(wire.StateHeld(copies=copies))

    def complete(self, version: wire.StateVersion) -> None:
        """Drop versions older than one that is held in all its parts."""
        if self._complete is None or self._complete < version:
            self._complete = version
            before = len(self._held)
            self._review()
            if len(self._held) < before:
                self.report()

    def given(self) -> wire.StateGiven:
        """Return all copies, for a worker that begins."""
        held = tuple(each for version in sorted(self._held) for each in self._held[version].values())
        return wire.StateGiven(pid=os.getpid(), copies=held)

    def close(self) -> None:
        """Release everything."""
        self._socket.close()
        self._drop(list(self._held))
        self._digests.shutdown()

    def _take(self, message: wire.StateStaged, descriptors: list[int]) -> None:
        """Keep what a worker has handed over, and have the digests computed; other descriptors are closed."""
        for copy, descriptor in zip(message.staged, descriptors, strict=True):
            try:
                check("self", descriptor, copy.size)
            except OSError as error:
                logger.warning("state_not_kept worker=%s part=%d error=%s", message.worker, copy.part, error)
                os.close(descriptor)
                continue
            parts = self._held.setdefault(copy.version, {})
            if (before := parts.get(copy.part)) is not None:
                os.close(before.descriptor)
            kept = wire.OpenCopy(copy=msgspec.structs.replace(copy, digest=None), descriptor=descriptor)
            parts[copy.part] = kept
            # A second descriptor keeps the memory, and its lock, for the thread.
            work = asyncio.get_running_loop().run_in_executor(self._digests, self._digest, kept, os.dup(descriptor))
            work.add_done_callback(partial(self._digested, kept))
        self._review()

    def _digest(self, kept: wire.OpenCopy, descriptor: int) -> str | None:
        """[the thread] Return the digest of a copy; None if it has been dropped meanwhile."""
        try:
            if kept.copy.version not in self._held:
                return None
            with mmap.mmap(descriptor, kept.copy.size, prot=mmap.PROT_READ) as content:
                return digest_of(content)
        finally:
            os.close(descriptor)

    def _digested(self, kept: wire.OpenCopy, work: asyncio.Future[str | None]) -> None:
        """Record a digest; report the copies once that of the last one is known."""
        copy, parts = kept.copy, self._held.get(kept.copy.version, {})
        if work.cancelled() or parts.get(copy.part) is not kept:
            return
        if (error := work.exception()) is not None:
            logger.error("state_not_kept part=%d error=%s", copy.part, error)
            os.close(parts.pop(copy.part).descriptor)
        else:
            digested = msgspec.structs.replace(copy, digest=work.result())
            parts[copy.part] = msgspec.structs.replace(kept, copy=digested)
        if all(each.copy.digest is not None for each in parts.values()):
            self.report()

    def _review(self) -> None:
        complete = self._complete if self._complete in self._held else None
        newest = [version for version in sorted(self._held) if version != complete][-_NEWER:]
        kept = [version for version in newest if complete is None or version > complete]
        self._drop([version for version in self._held if version not in kept and version != complete])

    def _drop(self, versions: list[wire.StateVersion]) -> None:
        for version in versions:
            for each in self._held.pop(version).values():
                os.close(each.descriptor)
