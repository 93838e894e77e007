"""Groups that behave as NCCL's do, on the CPU, for tests of the sharded strategy's path for accelerators.

* A collective whose peer dies or aborts never ends, and raises nothing, until the group is aborted here.
* After an abort it looks complete; what it should have received is left as garbage.
* A collective that is started later raises.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # a worker's script has only its own folder
from worker.nccl_stand_in import StandInLibrary

from unicron_lightning.fsdp.model import ShardAccelerator
from unicron_lightning.replica.channels import AcceleratedGroups, PeerGroup, ProcessGroup

GARBAGE = 1e6


class StandInWork(dist.Work):
    """Work of such a group; the training thread waits in `wait` as it would for a stream."""

    def __init__(self, work: Any, outputs: list[Tensor], aborted: threading.Event) -> None:
        super().__init__()
        self._work, self._outputs, self._aborted = work, outputs, aborted

    def is_completed(self) -> bool:
        return self._aborted.is_set() or bool(self._work.is_completed())

    def wait(self, timeout: Any = None) -> bool:
        try:
            self._work.wait()
        except RuntimeError:
            self._aborted.wait()
        if self._aborted.is_set():
            Path(sys.argv[1], f"garbage-{os.getpid()}").touch()
            for tensor in self._outputs:
                if tensor.is_floating_point():
                    tensor.fill_(GARBAGE)
        return True


class StandInBackend:
    """A group over gloo."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.aborted = threading.Event()
        self._store, self._rank, self._world = store, rank, world
        self._peers: PeerGroup | None = None
        self._group: Any = None

    def _connected(self) -> Any:
        if self.aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted on rank 0.")
        if self._group is None:
            self._peers = PeerGroup(self._store, self._rank, self._world, "127.0.0.1")
            self._group = ProcessGroup(self._peers, self._rank, self._world)
        return self._group

    def start(self, name: str, *args: Any, **kwargs: Any) -> StandInWork:
        work = getattr(self._connected(), name)(*args, **kwargs)
        return StandInWork(work, list(_tensors(args[0])), self.aborted)

    def allreduce(self, tensors: list[Tensor]) -> StandInWork:
        return self.start("allreduce", tensors)

    def abort(self) -> None:
        self.aborted.set()
        if self._peers is not None:
            self._peers.cut()

    def __del__(self) -> None:
        if self._peers is not None:
            self._peers.close()


class StandInHolder:
    """What torch's process group is for NCCL's back-end."""

    def __init__(self, backend: StandInBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Callable[..., StandInWork]:
        backend = self._backend
        return lambda *args, **kwargs: backend.start(name, *args, **kwargs)


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from _tensors(each)


def make(store: dist.Store, rank: int, world: int, device: torch.device) -> tuple[Any, Any]:
    """Make a group, as `nccl_group` does."""
    backend = StandInBackend(store, rank, world)
    return StandInHolder(backend), backend


def accelerator_for(device: torch.device, check: Callable[[], None]) -> ShardAccelerator:
    """Return an accelerator with such groups, also for the CPU."""
    library = StandInLibrary(make, lambda work: bool(work.is_completed()))
    groups = AcceleratedGroups(synchronize=lambda _: None, library=lambda _: library)
    return ShardAccelerator(device, check, groups, make)
