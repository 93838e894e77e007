"""Hands shared memory to the agent, by descriptors over a UNIX socket beside the one for messages.

From the end of `hand_over` on, the memory is kept whatever happens to this process, and whatever the agent is doing:
descriptors under way hold it as open ones do.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from unicron_lightning import environ, wire
from unicron_lightning.shared_memory import opened


class MemoryLink:
    """A worker's link to the agent's memory; opened with the first hand-over, and again after an error.

    Args:
        worker: this worker's identity.
        agent_socket: path of the agent's socket for messages.
    """

    def __init__(self, worker: str, agent_socket: str) -> None:
        self._worker = worker
        self._path = str(Path(agent_socket).with_name(environ.MEMORY_SOCKET))
        self._socket: socket.socket | None = None

    def hand_over(self, copies: Sequence[wire.StateCopy], descriptors: Mapping[int, int]) -> None:
        """Give the agent copies; never waits.

        Args:
            copies: what is in the memory.
            descriptors: this process's, by the number of the part.

        Raises:
            OSError: the agent is not there, or has not taken many earlier ones.
        """
        message = wire.encode(wire.StateStaged(worker=self._worker, staged=tuple(copies)))
        with contextlib.ExitStack() as stack:
            lent = []
            for copy in copies:
                lent.append(opened("self", descriptors[copy.part], copy.size))
                stack.callback(os.close, lent[-1])
            try:
                socket.send_fds(self._connected(), [message], lent)
            except OSError:
                self.close()
                raise

    def close(self) -> None:
        """Close the link; the agent still receives what has been handed over."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.setblocking(False)
            self._socket.connect(self._path)
        return self._socket
