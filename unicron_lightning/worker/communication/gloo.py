"""gloo as a communicator.

gloo has no abort: a rank whose ring neighbours are alive waits for a dead rank until the time-out, and a partly written
send may never detect its peer's death. Therefore waits are in Python, and an abort shuts down the group's own sockets,
which also releases the peers. A group with unfinished collectives is buried: a thread drops it when the last of them
has ended, at the latest after the operation time-out.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Protocol

import torch.distributed as dist
from torch import Tensor

from unicron_lightning.worker.communication import sockets
from unicron_lightning.worker.communication.communicator import Gate, Handle
from unicron_lightning.worker.communication.gloo_addresses import AddressStore, Exchange

OPERATION_TIMEOUT: Final = timedelta(seconds=300)
"""Bound on the life of a buried group. A longer wait (for a very slow peer) costs a new communicator, but no work."""
BURIED_POLL_SECONDS: Final = 0.05


class Ending(Protocol):
    """An operation that gloo may not have finished yet, such as a `Handle`."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        ...


class GlooGroup:
    """One gloo process group whose connections can be cut.

    The constructor blocks until all peers are connected; run it in a thread if a peer may be dead.

    Args:
        store: a client without other users, with a prefix fresh to this group, by which all peers are connected at
            once; or an exchange of addresses, after which a collective connects the peers that it needs.
        rank: this worker's place.
        world: number of members.
        host: address of this machine that peers can reach.
        timeout: of gloo's own operations.
    """

    def __init__(
        self,
        store: dist.Store | Exchange,
        rank: int,
        world: int,
        host: str,
        timeout: timedelta = OPERATION_TIMEOUT,
    ) -> None:
        self.backend: dist.ProcessGroupGloo | None = None
        with sockets.descriptors_for(f"connections to {world - 1} peers"):
            before = sockets.all_sockets()
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            lazily = not isinstance(store, dist.Store)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=lazily)]
            options._timeout = timeout
            options._threads = 2
            self._store = store if isinstance(store, dist.Store) else AddressStore()
            self.backend = dist.ProcessGroupGloo(self._store, rank, world, options)
            new = sockets.all_sockets() - before
            own = sockets.ends(new).listening
            self._found: list[sockets.OpenSocket] | None = None
            if isinstance(self._store, AddressStore):
                assert not isinstance(store, dist.Store)
                self._listening = self._store.exchange(own, store)
            else:
                self._listening = _stored(own, self._store, rank, world)
                self._found = _of_members(new, self._listening)
        self.used = not lazily
        self.was_cut = False

    def cut(self) -> None:
        """Shut the connections down, so that waits in them fail, here and at the peers. Callable from any thread."""
        self.was_cut = True
        for connection in self._connections:
            connection.shut_down()

    def disconnected(self) -> bool:
        """Whether gloo has closed all its connections, as it does soon after a cut, and writes to no tensor."""
        return not any(connection.is_open() for connection in self._connections)

    def broken(self) -> bool:
        """Whether gloo has closed any of its connections, because of a cut here or at the other end."""
        return not all(connection.is_open() for connection in self._connections)

    @property
    def _connections(self) -> list[sockets.OpenSocket]:
        if self._found is not None:
            return self._found
        return _of_members(sockets.all_sockets(), self._listening) if self.used else []

    def close(self, handles: Sequence[Ending] = ()) -> None:
        """Cut, and release the group when ``handles`` have ended."""
        backend, self.backend = self.backend, None
        if backend is None:
            return
        self.cut()  # again, for connections that a cut in another thread has not reached yet
        # The destructor joins gloo's threads, which may be stuck, so it must never run on the training thread.
        _GRAVEYARD.bury(backend, self._store, list(handles))


class GlooCommunicator:
    """Collectives of one epoch over gloo; CPU tensors.

    Args:
        store, rank, world, host, timeout: as for `GlooGroup`, whose constructor is called here.
        gate: on which the training thread waits, if it is shared with another communicator.
    """

    tells_success = True

    def __init__(
        self,
        store: dist.Store | Exchange,
        rank: int,
        world: int,
        host: str,
        timeout: timedelta = OPERATION_TIMEOUT,
        *,
        gate: Gate | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self._gate = Gate() if gate is None else gate
        self._handles: list[Handle] = []
        self._group = GlooGroup(store, rank, world, host, timeout)

    def all_reduce(self, tensor: Tensor) -> Handle:
        return self._start(lambda group: group.allreduce([tensor]))

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        return self._start(lambda group: group._allgather_base(received.view(-1), sent.view(-1)))

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        return self._start(lambda group: group.broadcast(tensor, root))

    def all_to_all(self, sent: Tensor, sent_to: list[int], received: Tensor, received_from: list[int]) -> Handle:
        """Start sending each rank its part of ``sent``, and filling ``received`` with the ranks' parts.

        Args:
            sent: one dimension, contiguous.
            sent_to: number of elements for each rank, in rank order.
            received: as ``sent``, of the same type.
            received_from: number of elements from each rank, in rank order.
        """
        return self._start(lambda group: group.alltoall_base(received, sent, received_from, sent_to))

    def wait(self, handle: Handle) -> None:
        self._gate.wait(handle, self.abort)

    def abort(self, reason: str) -> None:
        self._gate.shut(reason)
        self._group.cut()

    def close(self) -> None:
        self.abort("closed")
        self._group.close(self._handles)
        self._handles = []

    def released(self, seconds: float) -> bool:
        return False  # gloo may write to the tensors of an aborted collective until its own time-out

    def broken(self) -> bool:
        """Whether a connection to a peer has been closed, by this process or the peer's."""
        return self._group.broken()

    def _start(self, begin: object) -> Handle:
        self._gate.check()
        group = self._group.backend
        assert group is not None and callable(begin)
        self._group.used = True
        try:
            handle = self._gate.watch(begin(group))
        except RuntimeError as error:  # a dead peer may be detected when the collective is started
            self.abort(str(error).splitlines()[0][:200])
            self._gate.check()
            raise
        self._handles = [h for h in self._handles if not h.done]
        self._handles.append(handle)
        return handle


def _stored(
    own: Sequence[sockets.SocketAddress], store: dist.Store, rank: int, world: int
) -> set[sockets.SocketAddress]:
    """Exchange the addresses on which members listen through the store."""
    store.set(f"ports/{rank}", json.dumps(list(own)))
    return {(ip, port) for r in range(world) for ip, port in json.loads(store.get(f"ports/{r}"))}


def _of_members(candidates: set[sockets.OpenSocket], listening: set[sockets.SocketAddress]) -> list[sockets.OpenSocket]:
    """Pick a group's own connections: one end of each is an address on which a member listens.

    Another thread may have opened sockets meanwhile, so a new socket is not always the group's.
    """
    return [connection for connection, ends in sockets.ends(candidates).connected.items() if ends & listening]


class _Graveyard:
    """Drops aborted groups when gloo has finished their operations. Its thread lives only while a group is buried."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._buried: list[tuple[dist.ProcessGroupGloo, dist.Store, Sequence[Ending]]] = []
        self._thread: threading.Thread | None = None

    def bury(self, group: dist.ProcessGroupGloo, store: dist.Store, handles: Sequence[Ending]) -> None:
        with self._lock:
            self._buried.append((group, store, handles))  # gloo may still read a store of Python's
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="unicron-graveyard", daemon=True)
                self._thread.start()

    def wait_empty(self, timeout: float) -> bool:
        """Wait until nothing is buried; return False after ``timeout`` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: self._thread is None, timeout)

    def leave(self) -> None:
        """At the end of the process: keep the interpreter from destroying stuck groups, since it would wait for
        them.
        """
        with self._lock:
            for group, store, _ in self._buried:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))

    def _run(self) -> None:
        while True:
            with self._lock:
                free = [entry for entry in self._buried if all(handle.done for handle in entry[2])]
                self._buried = [entry for entry in self._buried if not all(handle.done for handle in entry[2])]
            free.clear()  # runs the destructors in this thread
            with self._lock:
                if not self._buried:
                    self._thread = None
                    self._lock.notify_all()
                    return
                self._lock.wait(BURIED_POLL_SECONDS)


_GRAVEYARD = _Graveyard()


def leave_buried() -> None:
    """Let the process end at once, although closed communicators may still be stuck in the library."""
    _GRAVEYARD.leave()


def wait_buried(timeout: float) -> bool:
    """Wait until all closed communicators of this process have been dropped; return False after ``timeout`` seconds."""
    return _GRAVEYARD.wait_empty(timeout)
