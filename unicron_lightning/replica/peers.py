"""Groups of peers whose waits can be released at any moment, for collectives in the library.

gloo forgets a partly received message when its connection breaks: the wait for it ends with gloo's own time-out,
minutes later. Megatron waits in the library, not at a `Gate` of the communicator. Therefore `torch.distributed` gets
groups whose waits check the connections periodically, and end once gloo has closed all of them, as it does soon after a
cut. From then on nothing is written into the tensors. With CUDA, collectives of tensors go to NCCL's groups instead,
whose waits need no more than an abort.

Torch's reduce-scatter for gloo is a sum of copies, from which each rank takes its part. Its `Work` accepts no time
limit and never reports completion; this module implements it in the same way without these defects.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from unicron_lightning.worker.communication.gloo import LOOK_UP, Ending, GlooGroup, Unfinished
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
        self.connect(all_pairs=all_pairs)

    def start(self, work: dist.Work) -> Collective:
        """Register a collective and wrap its `Work`."""
        self._works = [other for other in self._works if not other.is_completed()]
        self._works.append(work)
        return Collective(work, self)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy rank ``root``'s tensor, in host memory, to all.

        Raises:
            RuntimeError: the connections are closed.
        """
        backend: Any = self.backend
        self.start(backend.broadcast(tensor, root)).wait()

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


class Collective:
    """Replacement for a collective's `Work`."""

    def __init__(self, work: dist.Work, group: PeerGroup) -> None:
        self._work = work
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as torch's `Work` does, but end when no peer is left to wait for.

        Raises:
            RuntimeError: the collective has failed, or the connections are closed.
        """
        if timeout is not None:
            return self._work.wait(timeout)
        gone = False
        with self._group.recorded():
            while True:
                try:
                    return self._work.wait(LOOK_UP)
                except RuntimeError:
                    if self._work.is_completed():
                        return self._work.wait()  # returns the result or raises the error
                    gone = self._group.look_up(gone)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class ReduceScatter:
    """Replacement for a reduce-scatter's `Work`.

    Args:
        sums: in progress, of copies of the inputs.
        parts: each output, with this rank's part of the copy.
    """

    def __init__(self, sums: Sequence[Collective], parts: Sequence[tuple[Tensor, Tensor]]) -> None:
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


class PeerMessage:
    """Replacement for the `Work` of a send or a receive."""

    def __init__(self, work: dist.Work, group: PeerGroup) -> None:
        self._work = work
        self._group = group
        self._ended: Future[bool] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as torch's `Work` does, but end when no peer is left to wait for.

        Raises:
            RuntimeError: the message has failed, or the connections are closed.
        """
        if timeout is not None:
            return self._work.wait(timeout)
        if self._ended is None:
            self._ended = self._group.wait_aside(self._work)
        gone = False
        with self._group.recorded():
            while True:
                try:
                    return self._ended.result(LOOK_UP.total_seconds())
                except FutureTimeoutError:
                    gone = self._group.look_up(gone)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


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
        self._inner = dist.ProcessGroup(dist.HashStore(), self.rank(), self.size())
        self._inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, group.backend)

    def name(self) -> str:
        return "unicron"

    getBackendName = name  # noqa: N815 - the name that C++ calls on a Python group

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
        return (
            start(self, *args, **kwargs)
            if self.accelerated is None
            else getattr(self.accelerated, name)(*args, **kwargs)
        )

    return begin


def _message(name: str) -> Callable[..., PeerMessage]:
    def start(self: ProcessGroup, *args: Any, **kwargs: Any) -> PeerMessage:
        return PeerMessage(getattr(self._inner, name)(*args, **kwargs), self._peers)

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
