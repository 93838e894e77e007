"""A barrier before the abort of NCCL groups, among the ranks of one host.

An abort frees buffers that kernels of other ranks on the host may read and write. Each rank therefore announces its
abort and waits until the others have announced theirs or have died; their kernels are stopped within milliseconds then.

A rank listens on an abstract UNIX socket that the others connect to. The kernel reports its close to them, also at
the death of the process, so nothing is sent or stored, and no file is left.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
import time
from typing import Final

import torch.distributed as dist

BARRIER_SECONDS: Final = 1.0
"""Longest wait for the other ranks: one that stands still announces nothing."""
_KEY: Final = "abort_barrier"


class AbortBarrier:
    """This rank's end of the barrier of one group, or of several that are aborted together. Thread-safe.

    Args:
        store: of the group's ranks; must not be shared with other barriers.
        rank, world: place in the group, and size.

    Raises:
        OSError: no socket could be opened.
        RuntimeError: the store failed.
    """

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        # Local users can list the names of abstract sockets, so that the name is no secret of the epoch.
        key = store.compare_set(_KEY, "", secrets.token_hex(16)).decode()
        self._names = [f"\0unicron-abort-{key}-{other}" for other in range(world) if other != rank]
        self._announcing, self._waiting = threading.Lock(), threading.Lock()
        self._peers: list[socket.socket] = []
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(f"\0unicron-abort-{key}-{rank}")
            self._listener.listen(world)
            self._listener.setblocking(False)
        except OSError:
            self.announce()
            raise

    def meet(self) -> int:
        """Connect to the ranks of this host, all of which must have their barrier; return their number."""
        peers = []
        for name in self._names:
            peer = socket.socket(socket.AF_UNIX)
            peer.setblocking(False)
            try:
                peer.connect(name)
            except OSError:  # on another host, or it aborts already
                peer.close()
            else:
                peers.append(peer)
        with self._waiting:
            self._peers = peers
        return len(peers)

    def announce(self) -> None:
        """Tell the other ranks that this one aborts; return at once."""
        with self._announcing:
            listener, self._listener = self._listener, None
            if listener is None:
                return
            # A child of this process may hold the listener, too, so that closing it is not enough.
            with contextlib.suppress(OSError):
                while True:
                    accepted, _ = listener.accept()
                    with accepted:
                        accepted.shutdown(socket.SHUT_RDWR)
            listener.close()

    def wait(self, seconds: float = BARRIER_SECONDS) -> bool:
        """Announce the abort, and wait until the other ranks of this host have announced theirs or died.

        Args:
            seconds: longest wait, also for another thread that waits here already; 0 releases the connections.

        Returns:
            False after ``seconds``.
        """
        self.announce()
        deadline = time.monotonic() + seconds
        if not self._waiting.acquire(timeout=seconds):
            return False
        try:
            return self._wait_until(deadline)
        finally:
            self._waiting.release()

    def _wait_until(self, deadline: float) -> bool:
        waiting = {peer.fileno(): peer for peer in self._peers}
        self._peers = []
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, 0)
        while waiting and (left := deadline - time.monotonic()) > 0.0:
            for descriptor, _ in poll.poll(1e3 * left):
                poll.unregister(descriptor)
                waiting.pop(descriptor).close()
        for peer in waiting.values():
            peer.close()
        return not waiting
