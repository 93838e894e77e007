"""A TCP proxy that can stop forwarding without closing connections, or break every connection."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from types import TracebackType


class Proxy:
    """Forwards from `port` to another port of this machine, in a thread.

    While it is cut, sent data stays in the sockets, and new connections are accepted but not served: no end is
    notified. Once healed, it delivers all data. It forwards until it is closed.

    Args:
        target: port to forward to.

    Attributes:
        port: listening port.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._cut = False
        self._ends: dict[socket.socket, socket.socket] = {}
        self._unserved: list[socket.socket] = []
        self._break = self._closed = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        self._thread.join()
        for end in (*self._ends, *self._unserved, self._listener):
            end.close()

    def cut(self) -> None:
        """Stop forwarding."""
        self._cut = True

    def heal(self) -> None:
        """Forward again."""
        self._cut = False

    def retarget(self, target: int) -> None:
        """Connect to another port from now on."""
        self._target = target

    def reset(self) -> None:
        """Break all connections at once; new ones are served."""
        self._break = True

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closed:
                if self._break:
                    self._break = False
                    while self._ends:
                        end = next(iter(self._ends))
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        self._drop(selector, end)
                for key, _ in selector.select(0.02):
                    if key.fileobj is self._listener:
                        self._unserved.append(self._listener.accept()[0])
                    elif not self._cut and key.fileobj in self._ends:
                        self._forward(selector, key.fileobj)
                if not self._cut:
                    self._serve(selector)
                elif self._ends:  # unread data stays readable: avoid spinning
                    threading.Event().wait(0.01)

    def _serve(self, selector: selectors.BaseSelector) -> None:
        for near in self._unserved:
            try:
                far = socket.create_connection(("127.0.0.1", self._target), 5)
            except OSError:
                near.close()
                continue
            for one, other in ((near, far), (far, near)):
                self._ends[one] = other
                selector.register(one, selectors.EVENT_READ)
        self._unserved.clear()

    def _forward(self, selector: selectors.BaseSelector, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            if data:
                self._ends[end].sendall(data)
                return
        except OSError:
            pass
        self._drop(selector, end)

    def _drop(self, selector: selectors.BaseSelector, end: socket.socket) -> None:
        other = self._ends.pop(end, None)
        for one in (end, other):
            if one is not None:
                self._ends.pop(one, None)
                with contextlib.suppress(KeyError, ValueError):
                    selector.unregister(one)
                one.close()
