"""A connection that is cut without a word, as by a switch that stops forwarding: on purpose, see docs/faults.md.

The socket of the connection is put aside, open, and the transport gets one in its place that leads nowhere: nothing is
read, nothing is sent, and neither end sees anything close. When it is over the socket is put back, and what was written
meanwhile is sent, as TCP would have sent it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from typing import Final

_SEND_SECONDS: Final = 1.0
_CHUNK_BYTES: Final = 1 << 16


class Cut:
    """One cut of one connection, from now on. Of asyncio's own event loop on a system with ``dup2``.

    Args:
        transport: of a TCP connection.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._place: int = transport.get_extra_info("socket").fileno()
        self._real: int | None = os.dup(self._place)
        nowhere, self._written = socket.socketpair()
        nowhere.setblocking(False)
        self._written.setblocking(False)
        self._put(nowhere.fileno())
        nowhere.close()

    def heal(self) -> None:
        """The connection carries again; one that an end has given up meanwhile closes now."""
        if self._real is None:
            return
        if not self._transport.is_closing():
            with contextlib.suppress(OSError):
                self._send_late(self._real)
            self._put(self._real)
        self.forget()

    def forget(self) -> None:
        """Close what was put aside."""
        if self._real is not None:
            os.close(self._real)
            self._real = None
            self._written.close()

    def _put(self, source: int) -> None:
        self._transport.pause_reading()  # the loop must not watch the old socket under the new one's number
        os.dup2(source, self._place, inheritable=False)
        self._transport.resume_reading()

    def _send_late(self, real: int) -> None:
        while data := self._read_written():
            while data:
                _, writable, _ = select.select([], [real], [], _SEND_SECONDS)
                if not writable:
                    return
                data = data[os.write(real, data) :]

    def _read_written(self) -> bytes:
        try:
            return self._written.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return b""
