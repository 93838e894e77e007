"""A stand-in for torch's ProcessGroupNCCL: its behaviour after errors and aborts, without a GPU.

Derived from torch's ProcessGroupNCCL and NCCLUtils:

* After an error or an abort every work looks completed; an aborted kernel leaves its tensor half summed.
* An aborted kernel posts its steps to other ranks, whose kernels then end without an error, with stale parts of a sum.
* `Work.wait` of a work with an error aborts the communicator before it raises.
* After a peer's death the next enqueue raises, if the error has been detected.
* Enqueue and abort need a mutex that is held until the communicator is connected.
* Abort and destructor may take long.
* An abort frees buffers that the kernels of other ranks of the host use.
* The library's queries may wait for locks of the driver, with the interpreter's lock.
* Unless NCCL_RUNTIME_CONNECT is 0, the enqueue of a first large sum connects the ranks, and fails if one is late.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

REMOTE_ERROR = "NCCL error in: stand-in, ncclRemoteError: possibly due to a network error or a remote process exiting"


class Network:
    """State shared by the ranks of one communicator.

    Args:
        world: number of ranks.
        seed: of random decisions: ranks that a sum reaches at once, and ranks that detect a lost peer.
        abort_seconds, destroy_seconds: duration of abort and destructor.
        connect_seconds: longest wait of an enqueue for ranks that are to be connected; 0: all were connected before.

    Attributes:
        driver_seconds: how long a query waits for the driver.
    """

    driver_seconds = 0.0

    def __init__(
        self,
        world: int,
        seed: int = 0,
        *,
        abort_seconds: float = 0.0,
        destroy_seconds: float = 0.0,
        connect_seconds: float = 0.0,
    ) -> None:
        self.world = world
        self.connect_seconds = connect_seconds
        self.abort_seconds = abort_seconds
        self.destroy_seconds = destroy_seconds
        self.condition = threading.Condition(threading.RLock())
        self.random = random.Random(seed)
        self.groups: dict[int, StandInGroup] = {}
        self.calls: dict[int, dict[int, StandInWork]] = {}
        self.sums: dict[int, Tensor] = {}
        self.freed_early: list[int] = []
        """Ranks whose abort freed buffers while another rank, which had not begun its own, had a kernel under way."""

    def group(self, rank: int) -> StandInGroup:
        return StandInGroup(self, rank)

    def lose(self, rank: int) -> None:
        """Lose a rank: some of the others detect it."""
        with self.condition:
            for other, group in self.groups.items():
                if other != rank and self.random.random() < 0.5:
                    group.error = REMOTE_ERROR
            self.condition.notify_all()

    def begin(self, work: StandInWork) -> None:
        with self.condition:
            parts = self.calls.setdefault(work.number, {})
            parts[work.rank] = work
            if len(parts) == self.world:
                tensors = [parts[rank].tensor for rank in sorted(parts)]
                root = work.root
                self.sums[work.number] = torch.stack(tensors).sum(0) if root is None else tensors[root].clone()
                for other in parts.values():
                    if self.random.random() < 0.5:
                        other.deliver()
                self.condition.notify_all()

    def connect(self, work: StandInWork) -> None:
        """Wait until all ranks have started a first large collective.

        Raises:
            DistBackendError: one is late.
        """
        with self.condition:
            if not self.condition.wait_for(lambda: work.number in self.sums, self.connect_seconds):
                raise dist.DistBackendError("NCCL timeout in: stand-in, ncclInProgress")


class StandInWork:
    """WorkNCCL."""

    def __init__(self, group: StandInGroup, number: int, tensor: Tensor, root: int | None) -> None:
        self.group, self.rank, self.number = group, group.rank, number
        self.tensor, self.root = tensor, root
        self.delivered = False
        self.error: str | None = None

    def deliver(self) -> None:
        if not self.delivered and not self.group.aborted:
            self.delivered = True
            self.tensor.copy_(self.group.network.sums[self.number])

    def is_completed(self) -> bool:
        network = self.group.network
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(1e6 * network.driver_seconds)))
        if self.error is None and not self.delivered:
            self.error = self.group.error
        return self.ended() or self.error is not None

    def ended(self) -> bool:
        """Whether its kernel has ended."""
        network = self.group.network
        with network.condition:
            if self.group.error is None and self.number in network.sums:
                self.deliver()
            return self.delivered or self.group.aborted

    def wait(self) -> bool:
        if self.error is not None:
            self.group.abort()
            raise dist.DistBackendError(self.error)
        return True


class StandInPassing(StandInWork):
    """WorkNCCL of an exchange of tensors of different sizes, from each rank to each."""

    def __init__(self, group: StandInGroup, number: int, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        super().__init__(group, number, torch.zeros(1), None)
        self.received, self.sent = received, sent

    def deliver(self) -> None:
        if not self.delivered and not self.group.aborted:
            self.delivered = True
            for source, target in enumerate(self.received):
                other = self.group.network.calls[self.number][source]
                assert isinstance(other, StandInPassing)
                target.copy_(other.sent[self.rank])


class StandInGroup:
    """ProcessGroupNCCL of one rank, with a communicator that is connected when all ranks have enqueued."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank
        self.error: str | None = None
        self.stopping = False
        self.aborted = False
        self.ready = threading.Event()
        self.ready.set()
        self.mutex = threading.Lock()
        self.works: list[StandInWork] = []
        self.on_enqueue: Callable[[], None] = lambda: None
        self.threads: set[str] = set()
        """Names of the threads that aborted or destroyed it."""
        with network.condition:
            network.groups[rank] = self

    def allreduce(self, tensors: Sequence[Tensor]) -> StandInWork:
        return self._enqueue(lambda number: StandInWork(self, number, tensors[0], None))

    def broadcast(self, tensor: Tensor, root: int) -> StandInWork:
        return self._enqueue(lambda number: StandInWork(self, number, tensor, root))

    def alltoall(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> StandInWork:
        return self._enqueue(lambda number: StandInPassing(self, number, received, sent))

    def abort(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.stopping = True
        with self.mutex:
            time.sleep(self.network.abort_seconds)
            with self.network.condition:
                self.aborted = True
                if any(group.running for group in self.network.groups.values() if group is not self):
                    self.network.freed_early.append(self.rank)
                for work in self.works:
                    if not work.delivered:
                        work.tensor += 1  # a half-summed tensor
                        self._post_steps(work.number)
        self.network.lose(self.rank)

    def _post_steps(self, number: int) -> None:
        """Let some ranks' kernels of a collective that wait for this one end."""
        for other in self.network.calls[number].values():
            if not other.delivered and not other.group.aborted and self.network.random.random() < 0.5:
                other.delivered = True
                other.tensor += 1

    @property
    def running(self) -> bool:
        """Whether a kernel of this rank is under way."""
        return not self.stopping and any(not work.delivered for work in self.works)

    def __del__(self) -> None:
        time.sleep(self.network.destroy_seconds)
        self.threads.add(threading.current_thread().name)

    def _enqueue(self, make: Callable[[int], StandInWork]) -> StandInWork:
        with self.mutex:
            assert self.ready.wait(60)
        if self.aborted:
            raise dist.DistBackendError("NCCL communicator was aborted on rank 0.")
        if self.error is not None:
            raise dist.DistBackendError(self.error)
        work = make(len(self.works))
        self.works.append(work)
        self.network.begin(work)
        if self.network.connect_seconds and work.tensor.numel() > 1:
            self.network.connect(work)
        self.on_enqueue()
        return work


class StandInLibrary:
    """Implements `owned_group.Library` on the CPU.

    Args:
        make: makes a group, as `owned_group.Library.make`.
        ended: whether a collective has ended.
    """

    def __init__(
        self, make: Callable[..., Any], ended: Callable[[Any], bool] = lambda work: bool(work.ended())
    ) -> None:
        self.make = make
        self._ended = ended

    @classmethod
    def of(cls, network: Network) -> StandInLibrary:
        return cls(lambda store, rank, world: network.group(rank))

    def connect(self, group: Any, *, messages: bool = False) -> Callable[[], bool]:
        work = group.allreduce([torch.ones(1)])
        if messages:
            work = group.alltoall([torch.ones(1)] * 2, [torch.ones(1)] * 2)
        return self.mark(work)

    def mark(self, work: Any) -> Callable[[], bool]:
        return lambda: self._ended(work)

    def error(self, group: Any) -> str | None:
        return getattr(group, "error", None)

    def close(self) -> None:
        pass


class Host:
    """Host communicator that records calls, and forwards them to another one if given."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner
        self.aborted: str | None = None
        self.closed = False
        self.lost = False

    def all_reduce(self, tensor: Tensor) -> Any:
        return self.inner.all_reduce(tensor)

    def all_gather(self, received: Tensor, sent: Tensor) -> Any:
        return self.inner.all_gather(received, sent)

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        return self.inner.broadcast(tensor, root)

    def transfer(self, routes: Any) -> Any:
        return self.inner.transfer(routes)

    def wait(self, handle: Any) -> None:
        self.inner.wait(handle)

    def abort(self, reason: str) -> None:
        self.aborted = self.aborted or reason
        if self.inner is not None:
            self.inner.abort(reason)

    def close(self) -> None:
        self.closed = True
        if self.inner is not None:
            self.inner.close()

    def broken(self) -> bool:
        return self.lost


class Watchdog:
    """The watchdog and the heartbeat monitor of a process's first group.

    Args:
        store: the group's; the key of an error is in the store below all its prefixes.
        environment: of the process.
    """

    KEY = "exception_dump"

    def __init__(self, store: dist.Store, environment: Mapping[str, str]) -> None:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self._store = store
        self._handles_errors = environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"
        if environment.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
            self._handles_errors = True
        self._notes = environment.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "1") == "1"
        self._monitors = environment.get("TORCH_NCCL_ENABLE_MONITORING", "1") == "1"
        self.process_ended = False

    def see_error(self) -> None:
        """A work of this process has failed."""
        if self._notes:
            self._store.set(self.KEY, "1")
        if self._handles_errors:
            self.process_ended = True

    def poll(self) -> None:
        """The monitor's periodic look for other processes' errors."""
        if self._monitors and self._store.check([self.KEY]):
            self.process_ended = True
