"""The seam to the data plane: a communicator of one epoch that can be aborted.

Collectives return a handle at once. `wait` blocks in Python, never inside a library, so that another thread's `abort`
releases it within milliseconds; it then raises `CommunicatorAborted`. An aborted communicator is dead: the next epoch
has a new one. Collectives must be started in the same order by all ranks. A tensor given to a collective belongs to it
until the handle is waited for; after an abort the library may go on writing to it for a while, so it must not be
reused.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unicron_lightning.errors import UnicronError


class CommunicatorAborted(UnicronError):
    """The epoch's communicator was aborted or a collective failed; the reason is the message."""


class Handle:
    """One collective on its way. Completion is signalled under the communicator's condition."""

    __slots__ = ("_work", "done")

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work
        self.done = work is None

    def succeeded(self) -> bool:
        """Whether the collective has completed well; never blocks."""
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


class Communicator(Protocol):
    """Collectives among the members of one epoch.

    Attributes:
        tells_success: whether `Handle.succeeded` can be trusted after a failure. If not, a reduction counts only
            through the commit: after a failure all are done again.
    """

    rank: int
    world: int
    tells_success: bool

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Starts summing ``tensor`` over the ranks, in place."""
        ...

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        """Starts collecting ``sent`` of each rank, in host memory, as the rows of ``received`` (world, *sent.shape)."""
        ...

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        """Starts copying ``tensor`` of rank ``root`` to all, in place."""
        ...

    def wait(self, handle: Handle) -> None:
        """Waits for a handle.

        Raises:
            CommunicatorAborted: if the communicator is aborted meanwhile or the collective fails.
        """
        ...

    def abort(self, reason: str) -> None:
        """Makes all present and later calls raise; callable from any thread, returns at once, idempotent."""
        ...

    def close(self) -> None:
        """Aborts, and lets go of all resources (in the background if the library still holds them)."""
        ...

    def released(self, seconds: float) -> bool:
        """After `close`: waits until the library writes to no tensor any more; False if it may still."""
        ...


class SoloCommunicator:
    """A world of one: nothing to exchange."""

    rank = 0
    world = 1
    tells_success = True

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


class ProgramsDiffer(UnicronError):
    """The members are not at the same operation: their scripts have taken different paths."""


def gather_rows(communicator: Communicator, row: Sequence[float]) -> Tensor:
    """Each rank's numbers, as many on all, as the rows of a float64 matrix in rank order.

    Half the hops of a sum: small enough, their number is what counts.
    """
    sent = torch.tensor(row, dtype=torch.float64)
    received = torch.empty(communicator.world, len(row), dtype=torch.float64)
    communicator.wait(communicator.all_gather(received, sent))
    return received


def gather_bytes(communicator: Communicator, payload: bytes, tag: str = "") -> list[bytes]:
    """Each rank's payload, in rank order, on every rank.

    Two all-reduces: of the sizes, and (unless all are empty) of one zero-filled buffer in which each rank owns a part.

    Raises:
        ProgramsDiffer: if the ranks have different tags, i.e. mean different exchanges.
    """
    header = torch.zeros(2, communicator.world, dtype=torch.int64)
    header[0, communicator.rank] = len(payload)
    header[1, communicator.rank] = zlib.crc32(tag.encode())
    communicator.wait(communicator.all_reduce(header))
    if len(set(header[1].tolist())) > 1:
        raise ProgramsDiffer(
            f"this worker is in {tag!r}, and not all others are: the members' scripts have taken different paths"
        )
    lengths: list[int] = header[0].tolist()
    total = sum(lengths)
    if total == 0:
        return [b""] * communicator.world
    everything = torch.zeros(total, dtype=torch.uint8)
    start = sum(lengths[: communicator.rank])
    if payload:
        everything[start : start + len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    communicator.wait(communicator.all_reduce(everything))
    data = everything.numpy().tobytes()
    parts, offset = [], 0
    for length in lengths:
        parts.append(data[offset : offset + length])
        offset += length
    return parts


def broadcast_bytes(communicator: Communicator, payload: bytes | None, root: int) -> bytes:
    """Rank ``root``'s payload on every rank; others pass None."""
    size = torch.tensor([len(payload) if payload is not None else 0], dtype=torch.int64)
    communicator.wait(communicator.broadcast(size, root))
    buffer = torch.zeros(int(size.item()), dtype=torch.uint8)
    if payload:
        buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    if buffer.numel():
        communicator.wait(communicator.broadcast(buffer, root))
    return buffer.numpy().tobytes()


class Gate:
    """A condition that waits for handles or an abort, shared by the back-ends: the only place where training blocks."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.condition = threading.Condition()

    def watch(self, work: dist.Work) -> Handle:
        """A handle whose completion, seen by the library's callback thread, wakes the waiters."""
        handle = Handle(work)

        def finished(_: object) -> None:
            with self.condition:
                handle.done = True
                self.condition.notify_all()

        work.get_future().add_done_callback(finished)
        return handle

    def check(self) -> None:
        """Raises if aborted."""
        if self.reason is not None:
            raise CommunicatorAborted(self.reason)

    def wait(self, handle: Handle, on_error: Callable[[str], None]) -> None:
        """Waits for the handle or an abort; a failed collective is told to ``on_error`` and raised."""
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
            # What fails because of an abort says so.
            raise CommunicatorAborted(self.reason or reason) from None

    def wait_for(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Waits for ``ready`` or an abort; False after ``seconds``."""
        with self.condition:
            return self.condition.wait_for(lambda: ready() or self.reason is not None, seconds)

    def shut(self, reason: str) -> bool:
        """Marks as aborted and wakes all waiters; False if it already was."""
        with self.condition:
            if self.reason is not None:
                return False
            self.reason = reason
            self.condition.notify_all()
            return True
