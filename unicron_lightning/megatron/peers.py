"""Groups of peers that Megatron waits in, and out of which it can be let at any moment.

gloo forgets a receive of which a part has come when its connection breaks: the wait for it ends with gloo's own
time-out, minutes later. Megatron waits in the library, not at our gate (`worker.communicator`); so `torch.distributed`
is given groups whose waits look up now and then, and end once gloo has closed all connections, as it does soon after a
cut. From then on nothing is written into the tensors any more. With CUDA groups are aborted by NCCL, and this
is not used.

Torch's reduce-scatter for gloo is a sum of copies, of which each rank takes its part. Its `Work` takes no time limit
and never says that it has completed; so that is done here, in the same way.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from unicron_lightning.worker.gloo import Ending, GlooGroup

LOOK_UP: Final = timedelta(seconds=0.1)
"""How often a wait looks whether the group has been cut; one that gloo ends itself ends at once."""

MESSAGES: Final = ("send", "recv", "recv_anysource")
COLLECTIVES: Final = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "barrier"),
    *("allgather", "allgather_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
)
REDUCE_SCATTERS: Final = ("_reduce_scatter_base", "reduce_scatter_single")
COALESCED_REDUCE_SCATTERS: Final = ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced")
"""Methods of torch's ProcessGroup, by the names that its versions 2.11 to 2.13 have for them."""


class PeerGroup(GlooGroup):
    """A gloo group that lets go of those who wait in it; arguments as for `GlooGroup`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._works: list[dist.Work] = []
        self._messages: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: dist.Work) -> Collective:
        """Takes charge of a collective."""
        self._works = [other for other in self._works if not other.is_completed()]
        self._works.append(work)
        return Collective(work, self)

    def wait_aside(self, work: dist.Work) -> Future[bool]:
        """Waits for a message in a thread: such a wait cannot be broken off without breaking the connection."""
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

    def look_up(self, gone: bool) -> bool:
        """Whether gloo has closed all connections.

        Args:
            gone: whether it had at the look before: what had come has been made use of since.

        Raises:
            DistNetworkError: there is nothing to wait for any more.
        """
        now = self.disconnected()
        if now and (gone or self.was_cut):
            raise dist.DistNetworkError("the group's connections are closed")
        return now

    def close(self, handles: Sequence[Ending] = ()) -> None:
        """Cuts, and lets go of the group when its collectives, too, have ended."""
        works, self._works = self._works, []
        super().close([*handles, *map(_Unfinished, works)])
        if self._thread is not None:
            self._messages.put(None)
            self._thread = None

    def _serve(self) -> None:
        while (wait := self._messages.get()) is not None:
            wait()


class _Unfinished:
    """A collective that may be stuck in gloo."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    @property
    def done(self) -> bool:
        return self._work.is_completed()


class Collective:
    """In place of a collective's `Work`."""

    def __init__(self, work: dist.Work, group: PeerGroup) -> None:
        self._work = work
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As torch's, but ends when there is nobody left to wait for.

        Raises:
            RuntimeError: it has failed, or the connections are closed.
        """
        if timeout is not None:
            return self._work.wait(timeout)
        gone = False
        while True:
            try:
                return self._work.wait(LOOK_UP)
            except RuntimeError:
                if self._work.is_completed():
                    return self._work.wait()  # what it has to say
                gone = self._group.look_up(gone)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class ReduceScatter:
    """In place of a reduce-scatter's `Work`.

    Args:
        sums: under way, of copies of what is summed.
        parts: what each is to be put into, and this rank's part of the copy.
    """

    def __init__(self, sums: Sequence[Collective], parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._sums = sums
        self._parts = parts

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As `Collective.wait`."""
        for each in self._sums:
            each.wait(timeout)
        for output, part in self._parts:
            output.copy_(part.view_as(output))
        self._parts = ()
        return True

    def is_completed(self) -> bool:
        """Whether a wait would not have to wait."""
        return all(each.is_completed() for each in self._sums)


class Message:
    """In place of the `Work` of a send or a receive."""

    def __init__(self, work: dist.Work, group: PeerGroup) -> None:
        self._work = work
        self._group = group
        self._ended: Future[bool] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As torch's, but ends when there is nobody left to wait for.

        Raises:
            RuntimeError: it has failed, or the connections are closed.
        """
        if timeout is not None:
            return self._work.wait(timeout)
        if self._ended is None:
            self._ended = self._group.wait_aside(self._work)
        gone = False
        while True:
            try:
                return self._ended.result(LOOK_UP.total_seconds())
            except FutureTimeoutError:
                gone = self._group.look_up(gone)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class ProcessGroup(dist.ProcessGroup):
    """What `torch.distributed` and Megatron see of a `PeerGroup`: its collectives and messages.

    Args:
        group: the connections; other process groups may have the same.
        rank, size: as in it.
    """

    def __init__(self, group: PeerGroup, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        assert group.backend is not None, "the connections were closed"
        self._peers = group
        self._inner = dist.ProcessGroup(dist.HashStore(), rank, size)
        self._inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, group.backend)

    def name(self) -> str:
        return "unicron"

    getBackendName = name  # noqa: N815 - what C++ asks a Python group for

    def reduce_scatter_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any) -> ReduceScatter:
        """Starts several at once."""
        summing = dist.AllreduceOptions()
        summing.reduceOp = options.reduceOp
        copies = [tensor.clone() for tensor in inputs]
        sums = [self._peers.start(self._inner.allreduce([copy], summing)) for copy in copies]
        own = [copy.view(-1).chunk(self.size())[self.rank()] for copy in copies]
        return ReduceScatter(sums, list(zip(outputs, own, strict=True)))

    def reduce_scatter_one(self, output: Tensor, tensor: Tensor, options: Any) -> ReduceScatter:
        """Starts one."""
        return self.reduce_scatter_all([output], [tensor], options)


def _collective(name: str) -> Callable[..., Collective]:
    def start(self: ProcessGroup, *args: Any, **kwargs: Any) -> Collective:
        return self._peers.start(getattr(self._inner, name)(*args, **kwargs))

    return start


def _message(name: str) -> Callable[..., Message]:
    def start(self: ProcessGroup, *args: Any, **kwargs: Any) -> Message:
        return Message(getattr(self._inner, name)(*args, **kwargs), self._peers)

    return start


for _name in COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(ProcessGroup, _name, _collective(_name))
for _name in MESSAGES:
    setattr(ProcessGroup, _name, _message(_name))
for _name in REDUCE_SCATTERS:
    setattr(ProcessGroup, _name, ProcessGroup.reduce_scatter_one)
for _name in COALESCED_REDUCE_SCATTERS:
    setattr(ProcessGroup, _name, ProcessGroup.reduce_scatter_all)
