"""Frames on one connection, without blocking.

A frame is a header and a payload. Small payloads are copied when they are queued; large ones are sent from the tensor's
own memory and written to it. A link whose large frame is cut short by an abort cannot be used again: the rest of the
frame would come from memory that has been overwritten.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

COPIED_BYTES: Final = 1 << 16
"""Payloads up to this size are copied."""
MOST_PAYLOAD: Final = 1 << 26
"""Largest payload that is accepted: more than the rows of 16,384 ranks."""
READS: Final = 32
"""Most reads from one link before the others have their turn."""
_HEADER: Final = struct.Struct("!BQIIIQI")
RESUME: Final = 0
"""Kind of a frame without payload: its sender uses the link in this epoch."""
GOODBYE: Final = 255
"""Kind of a frame without payload: its sender has finished and closes the link."""


class LinkBroken(OSError):
    """The connection of ``link`` has ended, or carries no frames."""

    def __init__(self, link: Link, reason: str) -> None:
        super().__init__(reason)
        self.link = link


@dataclass(frozen=True)
class Header:
    """Name of a frame's payload; ``size`` is that of the whole exchange, ``length`` that of this payload."""

    kind: int
    epoch: int
    sequence: int = 0
    part: int = 0
    segment: int = 0
    size: int = 0
    length: int = 0

    def packed(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(self.kind, self.epoch, self.sequence, self.part, self.segment, self.size, self.length)


class FrameReceiver(Protocol):
    """Places and takes the payloads of a link."""

    def place(self, link: Link, header: Header) -> memoryview | None:
        """Return memory for a payload; None to stop reading until `Link.resume`. After an error it is dropped."""
        ...

    def arrived(self, link: Link, header: Header) -> None:
        """Process a payload that is complete at its place."""
        ...


@dataclass
class _Outgoing:
    epoch: int
    pieces: list[memoryview]
    begun: bool = False
    volatile: bool = False


class Link:
    """One connection to a worker.

    Args:
        sock: connected; becomes non-blocking.
        worker: at the other end.
        receiver: of payloads.

    Attributes:
        resumed: newest epoch in which the other end uses the link.
        parting: whether the other end has finished and will close the link.
        waits: whether the reading has stopped for want of a place.
        watched: events that the owner waits for.
    """

    def __init__(self, sock: socket.socket, worker: str, receiver: FrameReceiver) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.worker = sock, worker
        self.resumed = 0
        self.parting = False
        self.waits = False
        self.watched = 0
        self._receiver = receiver
        self._out: deque[_Outgoing] = deque()
        self._head = memoryview(bytearray(_HEADER.size))
        self._target: memoryview | None = self._head
        self._filled = 0
        self._header: Header | None = None

    @property
    def unsent(self) -> bool:
        """Whether frames wait until the connection takes more."""
        return bool(self._out)

    def send(self, header: Header, payload: memoryview | None = None) -> None:
        """Queue a frame, and send what the connection takes.

        Raises:
            LinkBroken: the connection has ended.
        """
        head = header.packed()
        if payload is None or len(payload) <= COPIED_BYTES:
            frame = _Outgoing(header.epoch, [memoryview(head + bytes(payload or b""))])
        else:
            frame = _Outgoing(header.epoch, [memoryview(head), payload], volatile=True)
        self._out.append(frame)
        if len(self._out) == 1:
            self.flush()

    def flush(self) -> None:
        """Outbound what the connection takes.

        Raises:
            LinkBroken: the connection has ended.
        """
        while self._out:
            frame = self._out[0]
            try:
                count = self.sock.sendmsg(frame.pieces)
            except BlockingIOError:
                return
            except OSError as error:
                raise LinkBroken(self, str(error)) from None
            frame.begun = True
            while frame.pieces and count >= len(frame.pieces[0]):
                count -= len(frame.pieces.pop(0))
            if frame.pieces:
                frame.pieces[0] = frame.pieces[0][count:]
                continue
            self._out.popleft()

    def read(self) -> None:
        """Read what has arrived, as far as there are places for it.

        Raises:
            LinkBroken: the connection has ended, or carries no frames.
        """
        for _ in range(READS):
            if self._target is None:
                return
            if self._filled < len(self._target):
                try:
                    count = self.sock.recv_into(self._target[self._filled :])
                except BlockingIOError:
                    return
                except OSError as error:
                    raise LinkBroken(self, str(error)) from None
                if count == 0:
                    raise LinkBroken(self, "closed by the other end")
                self._filled += count
            if self._filled == len(self._target):
                self._complete()

    def resume(self) -> None:
        """Ask again for the place of the payload that waits for one."""
        if self.waits:
            self._place()

    def forget(self, epoch: int) -> bool:
        """After an abort: drop the frames of epochs up to this one, and write to none of its tensors.

        Returns:
            False if a frame was cut short, so that the link must be closed.
        """
        first = self._out[0] if self._out else None
        kept = [frame for frame in self._out if frame.epoch > epoch or (frame.begun and not frame.volatile)]
        self._out = deque(kept)
        if self._header is not None and self._header.epoch <= epoch and self._target is not None:
            rest = len(self._target) - self._filled
            self._target, self._filled = memoryview(bytearray(rest)), 0
        return first is None or not (first.begun and first.volatile and first.epoch <= epoch)

    def close(self) -> None:
        """End the connection."""
        end(self.sock)
        self._out.clear()
        self._target = None

    def _complete(self) -> None:
        if self._header is None:
            header = Header(*_HEADER.unpack(self._head))
            if header.length > MOST_PAYLOAD:
                raise LinkBroken(self, f"a payload of {header.length} bytes: expected at most {MOST_PAYLOAD}")
            self._header = header
            self._place()
            return
        header, self._header = self._header, None
        self._target, self._filled = self._head, 0
        self._receiver.arrived(self, header)

    def _place(self) -> None:
        header = self._header
        assert header is not None
        # A receiver that raises gets no payload: its bytes are read and dropped, and the next frame begins after them.
        self._target, self._filled = memoryview(bytearray(header.length)), 0
        self._target = self._receiver.place(self, header)
        self.waits = self._target is None
        if self._target is not None and len(self._target) == 0:
            self._complete()


def end(sock: socket.socket) -> None:
    """Close a socket; a process forked meanwhile may hold it too, so it is shut down first."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    sock.close()
