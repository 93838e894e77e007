"""A TCP proxy that can stop forwarding: a cut that closes no connection, as when packets are dropped."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType


class Proxy:
    """Forwards between its own port on the loopback device and another one, in a thread, until it is cut.

    During a cut nothing is read or sent in either direction, no end is notified, and new connections wait. Afterwards
    forwarding continues where it stopped.

    Args:
        target: port to forward to.

    Attributes:
        port: listening port.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._started = threading.Event()
        self._ended = asyncio.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._started.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Stop forwarding."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def heal(self) -> None:
        """Forward again."""
        self._loop.call_soon_threadsafe(self._open.set)

    async def _serve(self) -> None:
        self._open.set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._ended.wait()
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # cancelled at the end; asyncio would log it
            await self._join(reader, writer)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._forward(reader, back), self._forward(there, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        await self._open.wait()
        writer.close()
