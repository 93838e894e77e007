"""gloo as a communicator.

gloo has no abort: a rank whose ring neighbours are alive waits for a dead rank until the time-out, and a partly written
send may never detect its peer's death. Therefore waits are in Python, and an abort shuts down the group's own sockets,
which also releases the peers. A group with unfinished collectives is buried: a thread drops it when the last of them
has ended, at the latest after the operation time-out.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unicron_lightning import wire
from unicron_lightning.worker.communication import sockets
from unicron_lightning.worker.communication.background_connect import abandoned
from unicron_lightning.worker.communication.communicator import (
    CommunicatorAborted,
    Gate,
    Handle,
    Route,
    gather_bytes,
)
from unicron_lightning.worker.communication.gloo_addresses import (
    AddressStore,
    AllGather,
    GatheredAddresses,
    StoredAddresses,
)
from unicron_lightning.worker.communication.links.communicator import LinkCommunicator
from unicron_lightning.worker.communication.links.hub import Hub
from unicron_lightning.worker.communication.links.session import LinkHandle

OPERATION_TIMEOUT: Final = timedelta(seconds=300)
"""Bound on the life of a buried group. A longer wait (for a very slow peer) costs a new communicator, but no work."""
LOOK_UP: Final = timedelta(seconds=0.1)
"""Interval at which a wait checks whether the group has been cut; a wait that gloo ends itself ends at once."""
BURIED_POLL_SECONDS: Final = 0.05
CONNECTING_SECONDS: Final = 1.0
"""Time after a cut in which a connection that is being made may appear. Later ones are shut down at once."""
_CONSTRUCTION: Final = threading.Lock()
"""Held while a group opens the socket on which it listens, so that no other group's is taken for it."""


class Ending(Protocol):
    """An operation that gloo may not have finished yet, such as a `Handle`."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        ...


class Unfinished:
    """A collective that may be stuck in gloo."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    @property
    def done(self) -> bool:
        return self._work.is_completed()


class GlooGroup:
    """One gloo process group whose connections can be cut. A pair of members is connected when it is first needed.

    Args:
        store: several groups may use it, with a prefix fresh to each; or an exchange of addresses.
        rank: this worker's place.
        world: number of members.
        host: address of this machine that peers can reach.
        timeout: of gloo's own operations.
    """

    def __init__(
        self,
        store: dist.Store | AllGather,
        rank: int,
        world: int,
        host: str,
        timeout: timedelta = OPERATION_TIMEOUT,
    ) -> None:
        self.world = world
        self.backend: dist.ProcessGroupGloo | None = None
        self.was_cut = False
        self._cut_at = 0.0
        self._found: set[sockets.OpenSocket] = set()
        self._searched: set[str] | None = None
        self._store: AddressStore = (
            StoredAddresses(store, rank) if isinstance(store, dist.Store) else GatheredAddresses(store)
        )
        with sockets.descriptors_for("a group of gloo"), _CONSTRUCTION:
            before = sockets.all_sockets()
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=True)]
            options._timeout = timeout
            options._threads = 2
            self.backend = dist.ProcessGroupGloo(self._store, rank, world, options)
            listening = sockets.ends(sockets.all_sockets() - before).listening
        self._store.publish(listening)

    def cut(self) -> None:
        """Shut the connections down, so that waits in them fail, here and at the peers. Callable from any thread."""
        if not self.was_cut:
            self._cut_at = time.monotonic()
            self.was_cut = True
        self._store.end()
        for connection in self._connections:
            connection.shut_down()

    def disconnected(self) -> bool:
        """Whether gloo has closed all its connections, as it does soon after a cut, and writes to no tensor."""
        connections = self._connections
        if any(connection.is_open() for connection in connections):
            return False
        waits = not self.was_cut or time.monotonic() < self._cut_at + CONNECTING_SECONDS
        return not (waits and (self.connecting or not connections))

    @property
    def connecting(self) -> bool:
        """Whether gloo tries to connect a peer, or has lost the connection at once."""
        return len(self._connections) < len(self._store.peers)

    def broken(self) -> bool:
        """Whether gloo has closed any of its connections, because of a cut here or at the other end."""
        return not all(connection.is_open() for connection in self._connections)

    def connect(self, *, all_pairs: bool) -> None:
        """Connect peers, so that a cut releases all waits for them.

        Other pairs are connected when they are first needed; a message for such a peer may block the calling thread.

        Args:
            all_pairs: connect all peers; otherwise those at distance 1, 2, 4, ... in both directions: the ones of sums,
                gathers on all ranks, broadcasts and barriers.

        Raises:
            CommunicatorAborted: the thread's attempt was abandoned.
            RuntimeError: a peer was lost.
        """
        backend: Any = self.backend
        one = torch.zeros(self.world, dtype=torch.uint8)
        work = backend.alltoall_base(torch.empty_like(one), one, [], []) if all_pairs else backend.barrier()
        try:
            while not _ended(work):
                if abandoned():
                    raise CommunicatorAborted("the epoch was superseded while connecting")
            work.wait()
        except BaseException:
            self.close([Unfinished(work)])
            raise
        peers = set(self._store.peers)
        self._found, self._searched = self._connections, peers  # searched again only if there are further peers

    @property
    def _connections(self) -> set[sockets.OpenSocket]:
        if self._searched != self._store.peers:
            self._found = self._found | _of_members(sockets.all_sockets(), self._store.listening)
        return self._found

    def take_holders(self) -> list[object]:
        """Take the objects that refer to the back-end from those that use them."""
        return []

    def close(self, handles: Sequence[Ending] = ()) -> None:
        """Cut, and release the group when ``handles`` have ended."""
        backend, self.backend = self.backend, None
        if backend is None:
            return
        self.cut()  # again, for connections that a cut in another thread has not reached yet
        # The destructor joins gloo's threads, which may be stuck, so it must never run on the training thread.
        _GRAVEYARD.bury(_Buried(self, [*self.take_holders(), backend], self._store, list(handles)))


class GlooCommunicator:
    """Collectives of one epoch over gloo; CPU tensors.

    Args:
        store, rank, world, host, timeout: as for `GlooGroup`, which is connected here if it has a store.
        gate: on which the training thread waits, if it is shared with another communicator.
    """

    tells_success = True

    def __init__(
        self,
        store: dist.Store | AllGather,
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
        if isinstance(store, dist.Store):
            self._group.connect(all_pairs=True)

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
        try:
            handle = self._gate.watch(begin(group))
        except RuntimeError as error:  # a dead peer may be detected when the collective is started
            self.abort(str(error).splitlines()[0][:200])
            self._gate.check()
            raise
        self._handles = [h for h in self._handles if not h.done]
        self._handles.append(handle)
        return handle


def _ended(work: dist.Work) -> bool:
    """Wait for a collective, for a limited time; return whether it has ended, successfully or not."""
    with contextlib.suppress(RuntimeError):
        work.wait(LOOK_UP)
    return work.is_completed()


def _of_members(candidates: set[sockets.OpenSocket], listening: set[sockets.SocketAddress]) -> set[sockets.OpenSocket]:
    """Pick a group's own connections: one end of each is an address on which a member listens.

    Another thread may have opened sockets meanwhile, so a new socket is not always the group's.
    """
    return {connection for connection, ends in sockets.ends(candidates).connected.items() if ends & listening}


class _Buried(NamedTuple):
    """A closed group."""

    group: GlooGroup
    backends: Sequence[object]
    """The back-end, and the objects that refer to it."""
    store: dist.Store
    """gloo may still read a store of Python's."""
    handles: Sequence[Ending]

    def free(self) -> bool:
        """Whether gloo has ended all its operations; if not, a connection that appeared meanwhile is shut down."""
        if all(handle.done for handle in self.handles):
            return True
        if self.group.connecting:
            self.group.cut()
        return False


class _Graveyard:
    """Drops aborted groups when gloo has finished their operations. Its thread lives only while a group is buried."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._buried: list[_Buried] = []
        self._thread: threading.Thread | None = None

    def bury(self, buried: _Buried) -> None:
        with self._lock:
            self._buried.append(buried)
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
            for buried in self._buried:
                for each in (*buried.backends, buried.store):
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))

    def _run(self) -> None:
        while True:
            with self._lock:
                ended = [buried.free() for buried in self._buried]
                free = [buried for buried, over in zip(self._buried, ended, strict=True) if over]
                self._buried = [buried for buried, over in zip(self._buried, ended, strict=True) if not over]
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


LARGE_BYTES: Final = 1 << 20
"""Least size of a tensor that is sent by gloo."""


class CpuCommunicator:
    """Collectives of one epoch on host memory: small tensors use the process's links, large ones gloo, faster then.
    Bytes from rank to rank use links.

    gloo connects a worker to its neighbours in the ring when the first large tensor is summed.

    Args:
        hub: the links of this process.
        epoch: its members, their hosts and its key.
        rank: this worker's place.
        host: this machine's address for data-plane sockets.
        timeout: for all links together.

    Raises:
        CommunicatorAborted: a peer was not reached, or the epoch was superseded.
    """

    tells_success = True
    device: torch.device | None = None

    def __init__(self, hub: Hub, epoch: wire.Epoch, rank: int, host: str, timeout: timedelta) -> None:
        self.rank = rank
        self.world = len(epoch.members)
        self._links = LinkCommunicator(hub, epoch, rank, timeout)
        self._used_gloo = False
        try:
            self._gloo = GlooCommunicator(
                partial(gather_bytes, self._links), rank, self.world, host, gate=self._links.gate
            )
        except BaseException:
            self._links.close()
            raise

    def all_reduce(self, tensor: Tensor) -> Handle:
        return self._by_size(tensor).all_reduce(tensor)

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        return self._links.all_gather(received, sent)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        return self._by_size(tensor).broadcast(tensor, root)

    def transfer(self, routes: Sequence[Route]) -> Handle:
        return self._links.transfer(routes)

    def wait(self, handle: Handle) -> None:
        (self._links if isinstance(handle, LinkHandle) else self._gloo).wait(handle)

    def abort(self, reason: str) -> None:
        self._links.abort(reason)
        self._gloo.abort(reason)

    def close(self) -> None:
        self._links.close()
        self._gloo.close()

    def released(self, seconds: float) -> bool:
        return not self._used_gloo  # gloo may write to the tensors of an aborted collective until its own time-out

    def _by_size(self, tensor: Tensor) -> LinkCommunicator | GlooCommunicator:
        if tensor.numel() * tensor.element_size() < LARGE_BYTES:
            return self._links
        self._used_gloo = True
        return self._gloo
