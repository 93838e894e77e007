"""The UNIX socket for all messages between this agent and its workers: one JSON message per line.

A connection belongs to the worker named by its first message, a `wire.WorkerHello`. A worker that ends before it can
send one may report its error in a `wire.ErrorReport` and nothing else. Messages that name another worker, or cannot be
decoded, end the connection. Writing never waits: a worker that does not read is disconnected at `_BACKLOG_BYTES`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from unicron_lightning import wire

logger = logging.getLogger(__name__)

_LINE_BYTES: Final = 16 << 20
_BACKLOG_BYTES: Final = 64 << 20


@dataclass(frozen=True, kw_only=True)
class LocalHooks:
    """Callbacks for workers' messages; all are called in the event loop."""

    accept: Callable[[wire.WorkerHello | wire.ErrorReport], bool]
    """Returns whether a worker belongs to this agent's present round."""
    received: Callable[[str, wire.FromWorker], None]
    """Receives a worker's message, its hello included."""
    left: Callable[[str], None]
    """Called when a worker's connection has ended."""


class LocalServer:
    """Serves the workers of one agent.

    Args:
        path: path of the socket; its folder must be private.
        hooks: callbacks for messages and disconnections.
    """

    def __init__(self, path: Path, hooks: LocalHooks) -> None:
        self._path = path
        self._hooks = hooks
        self._server: asyncio.AbstractServer | None = None
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start listening."""
        self._server = await asyncio.start_unix_server(self._serve, str(self._path), limit=_LINE_BYTES)

    async def close(self) -> None:
        """Stop listening and drop all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    def send(self, worker: str, message: wire.ToWorker) -> bool:
        """Send to one worker; return whether it is connected."""
        writer = self._writers.get(worker)
        if writer is None or writer.is_closing():
            return False
        if writer.transport.get_write_buffer_size() > _BACKLOG_BYTES:
            logger.error("worker_does_not_read worker=%s", worker)
            writer.transport.abort()
            return False
        writer.write(wire.encode(message) + b"\n")
        return True

    def broadcast(self, message: wire.ToWorker, without: Container[str] = ()) -> None:
        """Send to all connected workers but some."""
        for worker in [worker for worker in self._writers if worker not in without]:
            self.send(worker, message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        worker: str | None = None
        try:
            worker = await self._greet(reader, writer)
            while worker is not None:
                line = await reader.readline()
                if not line:
                    break
                self._hooks.received(worker, _decode(line, worker))
        except (msgspec.DecodeError, ValueError) as error:  # ValueError: the line is longer than the limit
            logger.error("worker_message_refused worker=%s error=%s", worker, error)
        except OSError as error:
            logger.debug("worker_connection_broke worker=%s error=%s", worker, error)
        except asyncio.CancelledError:
            pass  # only `close` cancels; the stream's own callback would log it as an error
        finally:
            writer.close()
            self._tasks.discard(task)
            if worker is not None and self._writers.get(worker) is writer:
                del self._writers[worker]
                self._hooks.left(worker)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
        """Read the hello and register the connection; None if the worker is refused."""
        while line := await reader.readline():
            hello = wire.decode_from_worker(line)
            if isinstance(hello, wire.Heartbeat):  # the worker's control thread may be faster than its hello
                continue
            if isinstance(hello, wire.ErrorReport) and hello.worker is not None and self._hooks.accept(hello):
                self._hooks.received(hello.worker, hello)
                return None
            if not isinstance(hello, wire.WorkerHello) or not self._hooks.accept(hello):
                logger.warning("worker_refused message=%s", line[:200])
                return None
            self._writers[hello.worker] = writer
            self._hooks.received(hello.worker, hello)
            return hello.worker
        return None


def _decode(line: bytes, worker: str) -> wire.FromWorker:
    message: wire.FromWorker = wire.decode_from_worker(line)
    if getattr(message, "worker", worker) != worker:
        raise ValueError(f"a message of {worker} names {message.worker!r}")  # type: ignore[union-attr]
    return message
