"""NCCL as a communicator, with gloo for tensors in host memory.

After an error NCCL's works look completed whether they are or not, and its calls may block (docs/decisions/0018). Two
rules follow: only the commit confirms reductions (`tells_success` is false), and a helper thread owns each group
(`owned.OwnedGroup`). The agent sets the variables that NCCL needs (`agent.handler`). docs/protocol.md lists
the tests on hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.communication.background_connect import abandoned
from unicron_lightning.worker.communication.communicator import Handle, Route
from unicron_lightning.worker.communication.device_marks import DeviceMarks
from unicron_lightning.worker.communication.gloo import OPERATION_TIMEOUT
from unicron_lightning.worker.communication.owned_group import (
    EndMark,
    Library,
    OwnedGroup,
    OwnedHandle,
    is_out_of_memory,
    wait_owners,
)

BROKEN_FROM: Final = (2, 28, 3)
BROKEN_TO: Final = (2, 28, 8)
"""First and last version of NCCL with a broken abort; NVIDIA's resiliency extension excludes them too."""

TORCH_FROM: Final = (2, 11)
TORCH_TO: Final = (2, 13)
"""First and last minor version of torch whose ProcessGroupNCCL this module was written for."""


class HostCommunicator(Protocol):
    """A communicator for tensors in host memory, such as `links.communicator.LinkCommunicator`."""

    def all_reduce(self, tensor: Tensor) -> Handle: ...
    def all_gather(self, received: Tensor, sent: Tensor) -> Handle: ...
    def broadcast(self, tensor: Tensor, root: int) -> Handle: ...
    def transfer(self, routes: Sequence[Route]) -> Handle: ...
    def wait(self, handle: Handle) -> None: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def broken(self) -> bool:
        """Whether a peer's connection has been closed."""
        ...


def refusal(device: torch.device, version: tuple[int, ...] | None, torch_version: str) -> str | None:
    """The reason why workers on this device could not recover, None if they can.

    Args:
        device: of the gradients.
        version: NCCL's; None if torch was built without it.
        torch_version: such as "2.13.0+cu130".
    """
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"accelerator {device.type!r}: expected 'cpu' or 'gpu' (CUDA with NCCL); no other can be recovered"
    if not TORCH_FROM <= tuple(map(int, torch_version.split(".")[:2])) <= TORCH_TO:
        return f"accelerator 'gpu': torch {torch_version} has not been tried with NCCL; expected torch 2.11 to 2.13"
    if version is None:
        return "accelerator 'gpu': torch was built without NCCL; expected a build with NCCL, or accelerator='cpu'"
    if BROKEN_FROM <= version[:3] <= BROKEN_TO:
        text = ".".join(map(str, version))
        return f"NCCL {text}: its abort is broken in 2.28.3 to 2.28.8; expected another version, such as 2.28.9"
    return None


def check_device(device: torch.device) -> None:
    """Check that workers on this device can recover.

    Raises:
        ConfigError: they cannot; see `refusal`.
    """
    version = None
    if device.type == "cuda" and dist.is_nccl_available():
        version = tuple(torch.cuda.nccl.version())
    if (reason := refusal(device, version, torch.__version__)) is not None:
        raise ConfigError(reason)


def make_group(store: dist.Store, rank: int, world: int, device: torch.device) -> Any:
    """Build an unconnected process group of NCCL."""
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0  # so that abort also ends a communicator that is still being set up
    options._timeout = timedelta(seconds=OPERATION_TIMEOUT.total_seconds())
    return dist.ProcessGroupNCCL(store, rank, world, options)


OUT_OF_MEMORY_SECONDS: Final = 5.0
"""Longest wait for the memory of earlier groups after a connection that lacked memory."""


def relieve() -> None:
    """After a connection that lacked memory: make room for the next attempt, which the coordinator orders.

    The earlier epoch's groups hold theirs until they are destroyed, and the allocator keeps what tensors have left.
    """
    wait_owners(OUT_OF_MEMORY_SECONDS)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class NcclLibrary:
    """Implements `owned_group.Library`.

    Args:
        device: of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: DeviceMarks | None = None
        self._kept: list[Tensor] = []
        """Tensors of the first collectives, to which the library may write."""

    def make(self, store: dist.Store, rank: int, world: int) -> Any:
        return make_group(store, rank, world, self._device)

    def connect(self, group: Any, *, messages: bool = False) -> EndMark:
        torch.cuda.set_device(self._device)  # of a helper thread
        numbers = torch.ones(1 + 2 * group.size(), 1, device=self._device)
        self._kept.append(numbers)
        one, *parts = numbers.unbind()
        work = group.allreduce([one])
        if messages:
            work = group.alltoall(parts[::2], parts[1::2])
        return self.mark(work)

    def mark(self, work: Any) -> EndMark:
        if self._marks is None:
            self._marks = DeviceMarks.take(self._device)
        return self._marks.after(work)

    def error(self, group: Any) -> str | None:
        """Torch's watchdog finds errors every 0.1 s."""
        look = getattr(group, "get_error", None)
        found = None if look is None else look().name
        return None if found in (None, "SUCCESS") else f"NCCL error: {found}, found by torch's watchdog"

    def close(self) -> None:
        marks, self._marks = self._marks, None
        if marks is not None:
            marks.give_back()
        self._kept.clear()


class NcclCommunicator:
    """Collectives of one epoch: tensors on the accelerator over NCCL, others over ``host``.

    The constructor blocks until all peers are connected, a peer is lost, or the attempt is abandoned.

    Args:
        store: prefix fresh to this epoch.
        rank, world: place and number of members.
        device: this rank's accelerator.
        host: communicator of the same members; closed if this one cannot be built.
        library: makes and follows the group.

    Raises:
        CommunicatorAborted: the group could not be connected.
    """

    tells_success = False

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        device: torch.device,
        host: HostCommunicator,
        library: Library | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self.device: torch.device | None = device
        self._host = host
        self._device = device.type
        self._owned = OwnedGroup(library or NcclLibrary(device), store, rank, world, host.abort)
        try:
            self._owned.wait_connected(self._given_up)
        except BaseException as error:
            self.close()
            if is_out_of_memory(str(error)):
                relieve()
            raise

    def all_reduce(self, tensor: Tensor) -> Handle:
        if tensor.device.type != self._device:
            return self._host.all_reduce(tensor)
        return self._owned.enqueue(lambda group: group.allreduce([tensor]), tensor)

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        return self._host.all_gather(received, sent)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        if tensor.device.type != self._device:
            return self._host.broadcast(tensor, root)
        return self._owned.enqueue(lambda group: group.broadcast(tensor, root), tensor)

    def transfer(self, routes: Sequence[Route]) -> Handle:
        """Over NCCL the first rank of a route sends to each of the others."""
        if not any(route.accelerated for route in routes):
            return self._host.transfer(routes)
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        sent, received = [nothing] * self.world, [nothing] * self.world
        for route in routes:
            source, *others = route.ranks
            if self.rank == source:
                for rank in others:
                    [sent[rank]] = route.memory
            elif self.rank in others:
                [received[source]] = route.memory
        return self._owned.enqueue(lambda group: group.alltoall(received, sent), (received, sent))

    def wait(self, handle: Handle) -> None:
        if isinstance(handle, OwnedHandle):
            self._owned.wait(handle)
        else:
            self._host.wait(handle)

    def abort(self, reason: str) -> None:
        self._owned.abort(reason)
        self._host.abort(reason)

    def close(self) -> None:
        self.abort("closed")
        self._host.close()

    def released(self, seconds: float) -> bool:
        return self._owned.released(seconds)

    def _given_up(self) -> str | None:
        """The reason why the connection cannot be established; NCCL itself would wait for its time-out."""
        if abandoned():
            return "the epoch was superseded while connecting"
        return "a peer was lost while connecting" if self._host.broken() else None
