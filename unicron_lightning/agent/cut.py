"""An injected silent cut of a connection, as by a switch that stops forwarding; see docs/faults.md.

The socket of the connection is set aside, open, and the transport gets one in its place that leads nowhere: nothing is
read or sent, and neither end sees the connection close. When the cut ends, the socket is put back, and everything
written meanwhile is sent, as TCP would have retransmitted it.
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
    """A cut of one connection, from its creation on. Requires asyncio's own event loop and ``dup2``.

    Args:
        transport: transport of a TCP connection.
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
        """Restore the connection; if either end has closed it meanwhile, it ends now."""
        if self._real is None:
            return
        if not self._transport.is_closing():
            with contextlib.suppress(OSError):
                self._send_late(self._real)
            self._put(self._real)
        self.forget()

    def forget(self) -> None:
        """Close the socket that was set aside."""
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
