"""A worker's connections in a world of replicas: one group, which can be cut, for each set of workers of the grid.

Sets within a replica outlive the epoch if the replica does; sets across replicas are made again in each epoch, with
about 2 log2 n connections of a worker in a set of n.

They carry data in host memory. An accelerator, such as with NCCL, needs groups of its own beside them
(`AcceleratedGroups`), which are made again in each epoch. The previous ones are aborted and destroyed by helper threads
(`worker.communication.lazy_groups`), and no epoch begins before their kernels have ended.

**Waits.** gloo forgets a partly received message when its connection breaks: the wait for it ends with gloo's own
time-out, minutes later. Megatron waits in the library, not at a `Gate` of the communicator. Therefore
`torch.distributed` gets groups (`PeerGroup`) whose waits check the connections periodically, and end once gloo has
closed all of them, as it does soon after a cut. From then on nothing is written into the tensors. With CUDA,
collectives of tensors go to NCCL's groups instead, whose waits need no more than an abort.

Torch's reduce-scatter for gloo is a sum of copies, from which each rank takes its part. Its `Work` accepts no time
limit and never reports completion; this module implements it in the same way without these defects.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from unicron_lightning.replica.layout import Grid
from unicron_lightning.worker.communication.communicator import CommunicatorAborted, SoloCommunicator
from unicron_lightning.worker.communication.gloo import LOOK_UP, Ending, GlooCommunicator, GlooGroup, Unfinished
from unicron_lightning.worker.communication.lazy_groups import LazyGroups, Retirement, connect_apart
from unicron_lightning.worker.communication.nccl import NcclLibrary, relieve
from unicron_lightning.worker.communication.owned_group import Library, is_out_of_memory
from unicron_lightning.worker.control.activity import Activity

MESSAGES: Final = ("send", "recv", "recv_anysource")
COLLECTIVES: Final = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "barrier"),
    *("allgather", "allgather_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
)
REDUCE_SCATTERS: Final = ("_reduce_scatter_base", "reduce_scatter_single")
COALESCED_REDUCE_SCATTERS: Final = ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced")
"""Methods of torch's ProcessGroup, by their names in its versions 2.11 to 2.13."""


class PeerGroup(GlooGroup):
    """A gloo group that releases its waiters.

    The constructor blocks until the peers are connected; run it in a thread if one may be dead.

    Args:
        args: as for `GlooGroup`.
        all_pairs: see `GlooGroup.connect`.

    Attributes:
        activity: records the training thread's waits, which tell a rank that waits for a hung one from that one.

    Raises:
        CommunicatorAborted: the thread's attempt was abandoned.
        RuntimeError: a peer was lost.
    """

    def __init__(self, *args: Any, all_pairs: bool = True) -> None:
        super().__init__(*args)
        self.activity: Activity | None = None
        self._works: list[dist.Work] = []
        self._messages: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._users: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        self.connect(all_pairs=all_pairs)

    def start(self, work: dist.Work) -> Collective:
        """Register a collective and wrap its `Work`."""
        self._works = [other for other in self._works if not other.is_completed()]
        self._works.append(work)
        return Collective(work, self)

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor in host memory over the members, in place.

        Raises:
            RuntimeError: the connections are closed.
        """
        backend: Any = self.backend
        if backend is None:
            raise dist.DistNetworkError("the group's connections are closed")
        self.start(backend.allreduce([tensor])).wait()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy rank ``root``'s tensor, in host memory, to all.

        Raises:
            RuntimeError: the connections are closed.
        """
        backend: Any = self.backend
        self.start(backend.broadcast(tensor, root)).wait()

    def add_user(self, user: ProcessGroup) -> None:
        """Have a process group release the back-end when this group is closed.

        Otherwise the end of its life could be the destructor's, on the training thread.
        """
        self._users.add(user)

    @override
    def take_holders(self) -> list[object]:
        return [user.unbind(self) for user in self._users]

    def wait_aside(self, work: dist.Work) -> Future[bool]:
        """Wait for a message in a thread, since such a wait cannot be interrupted without breaking the connection."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="unicron-messages", daemon=True)
            self._thread.start()
        future: Future[bool] = Future()

        def wait() -> None:
            try:
                future.set_result(work.wait())
            except RuntimeError as error:
                future.set_exception(error)

        self._messages.put(wait)
        return future

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record a wait if the training thread is the caller."""
        activity = self.activity
        if activity is None or activity.thread != threading.get_native_id():
            yield
            return
        activity.waits(True)
        try:
            yield
        finally:
            activity.waits(False)

    def look_up(self, gone: bool) -> bool:
        """Whether gloo has closed all connections.

        Args:
            gone: result of the previous check; data that had arrived by then has been processed.

        Raises:
            DistNetworkError: nothing is left to wait for.
        """
        now = self.disconnected()
        if now and (gone or self.was_cut):
            raise dist.DistNetworkError("the group's connections are closed")
        return now

    def close(self, handles: Sequence[Ending] = ()) -> None:
        """Cut, and release the group when its collectives, too, have ended."""
        works, self._works = self._works, []
        super().close([*handles, *map(Unfinished, works)])
        if self._thread is not None:
            self._messages.put(None)
            self._thread = None

    def _serve(self) -> None:
        while (wait := self._messages.get()) is not None:
            wait()


class Released(dist.Work):
    """Replacement for a `Work` of torch, whose wait also ends when no peer is left to wait for.

    Torch's functional collectives, as of DTensor, wait for it in C++.
    """

    def __init__(self, work: dist.Work, group: PeerGroup) -> None:
        super().__init__()
        self._work = work
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as torch's `Work` does.

        Raises:
            RuntimeError: the collective or message has failed, or the connections are closed.
        """
        if timeout:  # C++ passes zero if there is none
            return self._work.wait(timeout)
        gone = False
        with self._group.recorded():
            while (result := self._look()) is None:
                gone = self._group.look_up(gone)
        return result

    def _look(self) -> bool | None:
        """Wait for a short time; return the result, or None if there is none yet."""
        raise NotImplementedError

    # Torch's class answers these for a work of its own, which never begins.

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        return list(self._work.result())

    def get_future(self) -> Any:
        return self._work.get_future()

    def get_future_result(self) -> Any:
        work: Any = self._work  # torch's stubs lack it
        return work.get_future_result()

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    def synchronize(self) -> None:
        self._work.synchronize()


class Collective(Released):
    """Replacement for a collective's `Work`."""

    def _look(self) -> bool | None:
        try:
            return bool(self._work.wait(LOOK_UP))
        except RuntimeError:
            if self._work.is_completed():
                return bool(self._work.wait())  # returns the result or raises the error
            return None


class ReduceScatter(dist.Work):
    """Replacement for a reduce-scatter's `Work`.

    Args:
        sums: in progress, of copies of the inputs.
        parts: each output, with this rank's part of the copy.
    """

    def __init__(self, sums: Sequence[Collective], parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._sums = sums
        self._parts = parts

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See `Collective.wait`."""
        for each in self._sums:
            each.wait(timeout)
        for output, part in self._parts:
            output.copy_(part.view_as(output))
        self._parts = ()
        return True

    def is_completed(self) -> bool:
        """Whether a wait would return at once."""
        return all(each.is_completed() for each in self._sums)


class PeerMessage(Released):
    """Replacement for the `Work` of a send or a receive."""

    _ended: Future[bool] | None = None

    def _look(self) -> bool | None:
        if self._ended is None:
            self._ended = self._group.wait_aside(self._work)
        try:
            return self._ended.result(LOOK_UP.total_seconds())
        except FutureTimeoutError:
            return None


class ProcessGroup(dist.ProcessGroup):
    """Interface of a `PeerGroup` for `torch.distributed`: its collectives and messages.

    Args:
        group: the connections; other process groups may share them.
        rank, size: as in the group.

    Attributes:
        accelerated: torch's process group of the same members on an accelerator, to which collectives then go.
    """

    accelerated: Any = None

    def __init__(self, group: PeerGroup, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.bind(group)

    def bind(self, group: PeerGroup) -> None:
        """Use these connections from now on."""
        assert group.backend is not None, "the connections were closed"
        self._peers = group
        self._letters: tuple[PeerGroup, Mapping[int, int]] = group, {}
        self._bound: Any = dist.ProcessGroup(dist.HashStore(), self.rank(), self.size())
        self._bound._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, group.backend)
        group.add_user(self)

    def route(self, group: PeerGroup, ranks: Mapping[int, int]) -> None:
        """Have messages, unlike collectives, go through other connections.

        Args:
            group: those connections.
            ranks: from this group's ranks to those there.
        """
        self._letters = group, ranks

    def unbind(self, group: PeerGroup) -> object:
        """Return what refers to these connections, and forget it."""
        if self._peers is not group:
            return None  # bound to later ones
        bound, self._bound = self._bound, None
        return bound

    @property
    def _inner(self) -> Any:
        if self._bound is None:
            raise dist.DistNetworkError("the group's connections are closed")
        return self._bound

    def admit(self) -> None:
        """Refuse a collective that must not begin now, by an exception."""

    def name(self) -> str:
        return "unicron"

    getBackendName = name  # noqa: N815 - the name that C++ calls on a Python group

    def _get_backend(self, device: torch.device) -> Any:
        """Return what torch, from 2.14 on, asks whether it sends messages in one batch: this does not."""
        return self

    def reduce_scatter_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any) -> ReduceScatter:
        """Start several reduce-scatters at once."""
        summing = dist.AllreduceOptions()
        summing.reduceOp = options.reduceOp
        copies = [tensor.clone() for tensor in inputs]
        sums = [self._peers.start(self._inner.allreduce([copy], summing)) for copy in copies]
        own = [copy.view(-1).chunk(self.size())[self.rank()] for copy in copies]
        return ReduceScatter(sums, list(zip(outputs, own, strict=True)))

    def reduce_scatter_one(self, output: Tensor, tensor: Tensor, options: Any) -> ReduceScatter:
        """Start one reduce-scatter."""
        return self.reduce_scatter_all([output], [tensor], options)


def exchange(
    sent: Sequence[tuple[Tensor, PeerGroup, int, int]], received: Sequence[tuple[Tensor, PeerGroup, int, int]]
) -> None:
    """Send tensors in host memory to peers, and receive theirs: each with the connections, the peer there, and a tag.

    Raises:
        RuntimeError: the connections are closed; nothing is written into the tensors any more.
    """
    works = []
    for messages, name in ((received, "recv"), (sent, "send")):
        for tensor, group, peer, tag in messages:
            if group.backend is None:
                raise dist.DistNetworkError("the group's connections are closed")
            works.append(PeerMessage(getattr(group.backend, name)([tensor], peer, tag), group))
    failure = None
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            failure = error
    if failure is not None:
        raise failure


def _collective(name: str) -> Callable[..., Collective]:
    def start(self: ProcessGroup, *args: Any, **kwargs: Any) -> Collective:
        return self._peers.start(getattr(self._inner, name)(*args, **kwargs))

    return start


def _accelerable(name: str, start: Callable[..., Any]) -> Callable[..., Any]:
    def begin(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        self.admit()
        return (
            start(self, *args, **kwargs)
            if self.accelerated is None
            else getattr(self.accelerated, name)(*args, **kwargs)
        )

    return begin


def _message(name: str) -> Callable[..., PeerMessage]:
    def start(self: ProcessGroup, tensors: Any, *where: int) -> PeerMessage:
        group, ranks = self._letters
        if not ranks:
            return PeerMessage(getattr(self._inner, name)(tensors, *where), group)
        if group.backend is None:
            raise dist.DistNetworkError("the group's connections are closed")
        peer, *tag = where
        return PeerMessage(getattr(group.backend, name)(tensors, ranks[peer], *tag), group)

    return start


for _name in COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(ProcessGroup, _name, _accelerable(_name, _collective(_name)))
for _name in MESSAGES:
    setattr(ProcessGroup, _name, _message(_name))
for _name in REDUCE_SCATTERS:
    setattr(ProcessGroup, _name, _accelerable(_name, ProcessGroup.reduce_scatter_one))
for _name in COALESCED_REDUCE_SCATTERS:
    setattr(ProcessGroup, _name, _accelerable(_name, ProcessGroup.reduce_scatter_all))


class Channels:
    """This worker's connections in one epoch.

    The constructor blocks until all peers are connected.

    Args:
        grid: its place, and the sets of workers.
        store: a client without other users, with a prefix fresh to this epoch.
        host: address of this machine that peers can reach.
        carried: connections within the replica that are kept, by shards; not closed here.
        mirrors: whether copies of optimizer shards will be exchanged.

    Attributes:
        inner: within the replica, by shards.
        outer: across replicas, by ranks.
        exchange: among the workers of `Grid.same_slice`, for tensors in host memory; None without mirrors.
        inner_accelerated, outer_accelerated: NCCL's groups of the same sets, made by the strategy.
    """

    def __init__(
        self,
        grid: Grid,
        store: dist.Store,
        host: str,
        carried: Mapping[tuple[int, ...], PeerGroup] | None,
        *,
        mirrors: bool = False,
    ) -> None:
        self.grid = grid
        self.store = store
        self.inner: dict[tuple[int, ...], PeerGroup] = dict(carried or {})
        self.outer: dict[tuple[int, ...], PeerGroup] = {}
        self.inner_accelerated = LazyGroups()
        self.outer_accelerated = LazyGroups()
        self.exchange: GlooCommunicator | SoloCommunicator | None = None
        self.adopted = carried is not None
        try:
            # All workers use the same order, and each kind of set divides the grid, so no two wait for each other.
            for shards in grid.within():
                if len(shards) > 1 and shards not in self.inner:
                    name = "inner/" + "-".join(map(str, (grid.place, *shards)))
                    self.inner[shards] = self._open(name, shards.index(grid.shard), len(shards), host)
            for ranks in grid.across():
                if grid.replicas > 1 and ranks not in self.outer:
                    name = "outer/" + "-".join(map(str, ranks))
                    self.outer[ranks] = self._open(name, ranks.index(grid.rank), len(ranks), host, all_pairs=False)
            ranks = grid.same_slice() if mirrors else ()
            if len(ranks) == 1:
                self.exchange = SoloCommunicator()
            elif mirrors:
                beside = dist.PrefixStore(f"mirrors/{ranks[0]}", store)
                self.exchange = GlooCommunicator(beside, ranks.index(grid.rank), len(ranks), host)
        except (RuntimeError, OSError):
            self.close()
            raise

    @property
    def same_shard(self) -> PeerGroup:
        """The connections of the workers of this shard, in the order of replicas, of which there are several."""
        grid = self.grid
        return self.outer[tuple(sorted(grid.number(place, grid.shard) for place in range(grid.replicas)))]

    def group(self, ranks: tuple[int, ...]) -> PeerGroup:
        """The connections of a set of ranks that includes this worker.

        Raises:
            KeyError: the grid lacks the set.
        """
        shards = self.shards(ranks)
        return self.outer[ranks] if shards is None else self.inner[shards]

    def shards(self, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shards of a set of ranks of this replica; None if the set has ranks of other replicas."""
        own = self.grid.partners()
        return tuple(own[rank] for rank in ranks) if own.keys() >= set(ranks) else None

    def record_waits(self, activity: Activity) -> None:
        """Record the training thread's waits for peers."""
        for group in (*self.inner.values(), *self.outer.values()):
            group.activity = activity

    def cut(self) -> None:
        """Release all waits for other replicas."""
        for group in list(self.outer.values()):
            group.cut()
        if self.exchange is not None:
            self.exchange.abort("the connections between replicas were cut")
        self.outer_accelerated.abort()

    def close(self) -> None:
        """Release all connections but those that were carried, or adopted meanwhile."""
        for group in self.outer.values():
            group.close()
        self.outer = {}
        if self.exchange is not None:
            self.exchange.close()
        self.outer_accelerated.close()
        if not self.adopted:
            for group in self.inner.values():
                group.close()

    def _open(self, name: str, rank: int, world: int, host: str, *, all_pairs: bool = True) -> PeerGroup:
        return PeerGroup(dist.PrefixStore(name, self.store), rank, world, host, all_pairs=all_pairs)


@dataclass(frozen=True, kw_only=True)
class AcceleratedGroup:
    """One group.

    Attributes:
        holder: torch's process group, which refers to the back-end.
        backend: the library's.
        size: number of members.
        inside: whether all members are in one replica.
        messages: whether its members also send each other messages.
    """

    holder: Any
    backend: Any
    size: int
    inside: bool
    messages: bool = False


class AcceleratedGroups:
    """The present epoch's groups, and the aborts of earlier ones.

    Args:
        synchronize: waits until all kernels on the device have ended.
        library: connects groups on a device.
    """

    def __init__(
        self,
        synchronize: Callable[[torch.device], Any] = torch.cuda.synchronize,
        library: Callable[[torch.device], Library] = NcclLibrary,
    ) -> None:
        self._synchronize = synchronize
        self._library = library
        self._settle: Callable[[], Any] = lambda: None
        self._connected = False
        self._present: Sequence[AcceleratedGroup] = ()
        self._retired: list[Retirement] = []

    def leave(self) -> bool:
        """Let helper threads abort and destroy the present groups; return whether there were any.

        The caller drops its references to them.
        """
        groups, self._present = self._present, ()
        if not groups:
            return False
        holders, backends = [group.holder for group in groups], [group.backend for group in groups]
        retired = Retirement(holders, backends, self._settle)
        if (
            self._connected
        ):  # else they have exchanged nothing, and an abort may have to wait for a dead peer's time-out
            self._retired.append(retired)
        return True

    def wait_retired(self, check: Callable[[], None]) -> None:
        """Wait until the kernels of earlier groups, which may still write to gradients, have ended.

        Raises:
            RuntimeError: an error of the accelerator, after which the process cannot continue.
            Exception: any exception of ``check``, which is called while waiting.
        """
        while self._retired:
            self._retired[0].wait_aborted(check)
            del self._retired[0]

    def connect(
        self,
        channels: Channels,
        groups: Sequence[AcceleratedGroup],
        device: torch.device,
        check: Callable[[], None],
    ) -> None:
        """Connect the groups of an epoch, which are then aborted with its channels.

        Args:
            channels: of the epoch.
            groups: in the order in which all ranks have made them.
            device: of the tensors.
            check: called while waiting; raises if the epoch has ended.

        Raises:
            CommunicatorAborted: a group could not be connected.
        """
        grid = channels.grid
        inner, outer = LazyGroups(), LazyGroups()
        inner.add_barrier(dist.PrefixStore(f"abort/{grid.place}", channels.store), grid.shard, grid.shards)
        outer.add_barrier(dist.PrefixStore("abort", channels.store), grid.rank, grid.shards * grid.replicas)
        channels.inner_accelerated, channels.outer_accelerated = inner, outer
        for group in groups:
            (inner if group.inside else outer).groups.append(group.backend)
        library = self._library(device)

        def settle() -> None:
            self._synchronize(device)
            library.close()

        self._present, self._settle, self._connected = tuple(groups), settle, False
        try:
            connect_apart([group for group in groups if group.size > 1], library, check)
        except CommunicatorAborted as error:
            if is_out_of_memory(str(error)):
                relieve()
            raise
        self._connected = True
        inner.meet()
        outer.meet()
