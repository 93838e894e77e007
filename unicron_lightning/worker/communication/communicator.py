"""The interface to the data plane: a communicator of one epoch that can be aborted.

Collectives return a handle at once. `wait` blocks in Python, never inside a library, so that another thread's `abort`
releases it within milliseconds; it then raises `CommunicatorAborted`. An aborted communicator cannot be used again: the
next epoch has a new one. All ranks must start collectives in the same order. A tensor belongs to its collective until
the handle has been waited for. After an abort the library may still write to the tensor for a while, so it must not be
reused.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from unicron_lightning.errors import ProgramsDiffer, UnicronError
from unicron_lightning.worker.control.activity import Activity

STOP: Final = "stop"
"""Name of the operation by which members agree on the end of a run; it gives way to any other one."""
PATHS: Final = "the members' scripts have taken different paths"
_TAG_BYTES: Final = 100
_NAMED: Final = 8


class CommunicatorAborted(UnicronError):
    """The epoch's communicator was aborted or a collective failed; the message contains the reason."""


class Handle:
    """One collective in progress. Completion is signalled under the communicator's condition."""

    __slots__ = ("_work", "done")

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work
        self.done = work is None

    def succeeded(self) -> bool:
        """Whether the collective has completed successfully; never blocks."""
        if self._work is None:
            return True
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError:
            return False
        return True

    @property
    def work(self) -> dist.Work | None:
        """The library's own handle; None for a world of one."""
        return self._work


@dataclass(frozen=True)
class Route:
    """Bytes on their way through some ranks. All ranks know all routes; the memory is each rank's own.

    Attributes:
        ranks: the first one sends, and each of the others receives.
        size: number of bytes.
        accelerated: whether they go from accelerator to accelerator. There is then at most one route of two ranks.
        memory: uint8 of one dimension, whose bytes follow each other: one tensor if ``accelerated``, else any number of
            contiguous ones, in host memory. Empty on a rank that is not on the route.
    """

    ranks: tuple[int, ...]
    size: int
    accelerated: bool = False
    memory: Sequence[Tensor] = ()


class EpochCollectives(Protocol):
    """Collectives among the members of one epoch.

    Attributes:
        tells_success: whether `Handle.succeeded` is reliable after a failure. If not, only the commit confirms
            reductions: after a failure all of them are repeated.
    """

    rank: int
    world: int
    tells_success: bool

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Start summing ``tensor`` over the ranks, in place."""
        ...

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        """Start collecting ``sent`` of each rank, in host memory, as the rows of ``received`` (world, *sent.shape)."""
        ...

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        """Start copying ``tensor`` of rank ``root`` to all ranks, in place.

        A rank may still pass the bytes on after its wait: it must not change them before all ranks have them.
        """
        ...

    def wait(self, handle: Handle) -> None:
        """Wait for a handle.

        Raises:
            CommunicatorAborted: the communicator is aborted meanwhile or the collective fails.
        """
        ...

    def abort(self, reason: str) -> None:
        """Make all present and later calls raise; callable from any thread, returns at once, idempotent."""
        ...

    def close(self) -> None:
        """Abort, and release all resources (in the background while the library still holds them)."""
        ...

    def released(self, seconds: float) -> bool:
        """After `close`: wait until the library no longer writes to any tensor; return False if it may still do so."""
        ...


class Communicator(EpochCollectives, Protocol):
    """Collectives, and bytes from rank to rank.

    Attributes:
        device: of the tensors that it sends from accelerator to accelerator; None without one.
    """

    device: torch.device | None

    def transfer(self, routes: Sequence[Route]) -> Handle:
        """Start passing bytes along routes; all ranks start it, with the same routes.

        The handle is done once the bytes for this rank have arrived, and the memory of those that it sends is free.
        """
        ...


class SoloCommunicator:
    """The communicator of a world of one, without communication."""

    rank = 0
    world = 1
    tells_success = True
    device: torch.device | None = None

    def __init__(self) -> None:
        self._reason: str | None = None

    def all_reduce(self, tensor: Tensor) -> Handle:
        self._check()
        return Handle(None)

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        self._check()
        received[0] = sent
        return Handle(None)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        self._check()
        return Handle(None)

    def transfer(self, routes: Sequence[Route]) -> Handle:
        self._check()
        return Handle(None)

    def wait(self, handle: Handle) -> None:
        self._check()

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason

    def close(self) -> None:
        self.abort("closed")

    def released(self, seconds: float) -> bool:
        return True

    def _check(self) -> None:
        if self._reason is not None:
            raise CommunicatorAborted(self._reason)


def gather_rows(communicator: EpochCollectives, row: Sequence[float]) -> Tensor:
    """Gather equally many numbers of each rank as the rows of a float64 matrix, in rank order.

    A gather needs half the hops of a sum, and for small messages the number of hops determines the duration.
    """
    sent = torch.tensor(row, dtype=torch.float64)
    received = torch.empty(communicator.world, len(row), dtype=torch.float64)
    communicator.wait(communicator.all_gather(received, sent))
    return received


def gather_bytes(communicator: EpochCollectives, payload: bytes, tag: str = "") -> list[bytes]:
    """Gather each rank's payload, in rank order, on every rank.

    Gathers the sizes, and then (unless all are empty) the payloads: as rows if their sizes are similar, else by the sum
    of one zero-filled buffer with a part for each rank.

    Raises:
        ProgramsDiffer: the ranks' tags differ, i.e. they are in different exchanges.
    """
    own = torch.tensor([len(payload), zlib.crc32(tag.encode())])
    headers = torch.empty(communicator.world, 2, dtype=torch.int64)
    communicator.wait(communicator.all_gather(headers, own))
    if len(set(headers[:, 1].tolist())) > 1:
        _raise_difference(communicator, tag)
    lengths: list[int] = headers[:, 0].tolist()
    width, total = max(lengths), sum(lengths)
    if total == 0:
        return [b""] * communicator.world
    if width * communicator.world <= 2 * total:
        row = torch.frombuffer(bytearray(payload.ljust(width, b"\0")), dtype=torch.uint8)
        rows = torch.empty(communicator.world, width, dtype=torch.uint8)
        communicator.wait(communicator.all_gather(rows, row))
        return [row.numpy().tobytes()[:length] for row, length in zip(rows, lengths, strict=True)]
    everything = torch.zeros(total, dtype=torch.uint8)
    start = sum(lengths[: communicator.rank])
    if payload:
        everything[start : start + len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    communicator.wait(communicator.all_reduce(everything))
    data = everything.numpy().tobytes()
    ends = list(accumulate(lengths))
    return [data[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _raise_difference(communicator: EpochCollectives, tag: str) -> NoReturn:
    """Raise the error of ranks in different exchanges, from which a recovery follows if one of them gives way."""
    row = torch.frombuffer(bytearray(tag.encode()[:_TAG_BYTES].ljust(_TAG_BYTES, b"\0")), dtype=torch.uint8)
    rows = torch.empty(communicator.world, _TAG_BYTES, dtype=torch.uint8)
    communicator.wait(communicator.all_gather(rows, row))
    tags = [each.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for each in rows]
    if any(each.startswith(f"{STOP} ") for each in tags):
        communicator.abort(PATHS)
        raise CommunicatorAborted(PATHS)
    names = [each.rpartition(" ")[0] for each in tags]
    raise ProgramsDiffer(who_is_where(names if len(set(names)) > 1 else tags))


def who_is_where(names: Sequence[str]) -> dict[str, str]:
    """Return the operation of each group of ranks, from that of each rank."""
    groups: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        groups.setdefault(name, []).append(rank)
    return {_ranks(ranks): name for name, ranks in groups.items()}


def _ranks(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {first}{more}"


def broadcast_bytes(communicator: EpochCollectives, payload: bytes | None, root: int) -> bytes:
    """Send the payload of rank ``root`` to every rank; the others pass None."""
    size = torch.tensor([len(payload) if payload is not None else 0], dtype=torch.int64)
    communicator.wait(communicator.broadcast(size, root))
    if not size:
        return b""
    data = torch.empty(int(size), dtype=torch.uint8)
    if payload is not None:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    communicator.wait(communicator.broadcast(data, root))
    return data.numpy().tobytes() if payload is None else payload


class Gate:
    """A condition on which training waits for handles or an abort, shared by the back-ends; training blocks
    only here.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.condition = threading.Condition()

    def watch(self, work: dist.Work) -> Handle:
        """Return a handle whose completion, reported by the library's callback thread, wakes the waiters."""
        handle = Handle(work)

        def finished(_: object) -> None:
            with self.condition:
                handle.done = True
                self.condition.notify_all()

        work.get_future().add_done_callback(finished)
        return handle

    def check(self) -> None:
        """Raise if aborted."""
        if self.reason is not None:
            raise CommunicatorAborted(self.reason)

    def wait(self, handle: Handle, on_error: Callable[[str], None]) -> None:
        """Wait for the handle or an abort; a failed collective is reported to ``on_error`` and raised."""
        with self.condition:
            self.condition.wait_for(lambda: handle.done or self.reason is not None)
        if not handle.done:
            raise CommunicatorAborted(self.reason or "aborted")
        if handle.work is None:
            return
        try:
            handle.work.wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            on_error(reason)
            # Failures caused by an abort carry the abort's reason.
            raise CommunicatorAborted(self.reason or reason) from None

    def wait_for(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait for ``ready`` or an abort; return False after ``seconds``."""
        with self.condition:
            return self.condition.wait_for(lambda: ready() or self.reason is not None, seconds)

    def shut(self, reason: str) -> bool:
        """Mark as aborted and wake all waiters; return False if already aborted."""
        with self.condition:
            if self.reason is not None:
                return False
            self.reason = reason
            self.condition.notify_all()
            return True


class ForwardingCommunicator:
    """Forwards all calls to another communicator.

    Args:
        base: performs the collectives.
    """

    def __init__(self, base: Communicator) -> None:
        self.rank, self.world, self.tells_success = base.rank, base.world, base.tells_success
        self.device = base.device
        self._base = base

    def all_reduce(self, tensor: Tensor) -> Handle:
        return self._base.all_reduce(tensor)

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        return self._base.all_gather(received, sent)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        return self._base.broadcast(tensor, root)

    def transfer(self, routes: Sequence[Route]) -> Handle:
        return self._base.transfer(routes)

    def wait(self, handle: Handle) -> None:
        self._base.wait(handle)

    def abort(self, reason: str) -> None:
        self._base.abort(reason)

    def close(self) -> None:
        self._base.close()

    def released(self, seconds: float) -> bool:
        return self._base.released(seconds)


class WatchedCommunicator(ForwardingCommunicator):
    """Records waits: a rank blocked in a collective waits for others and does not hang itself.

    Args:
        base: the communicator whose waits are recorded.
        activity: the record.
    """

    def __init__(self, base: Communicator, activity: Activity) -> None:
        super().__init__(base)
        self._activity = activity

    @override
    def transfer(self, routes: Sequence[Route]) -> Handle:
        self._activity.waits(True)  # further peers may have to be connected first
        try:
            return super().transfer(routes)
        finally:
            self._activity.waits(False)

    @override
    def wait(self, handle: Handle) -> None:
        self._activity.waits(True)
        try:
            super().wait(handle)
        finally:
            self._activity.waits(False)
