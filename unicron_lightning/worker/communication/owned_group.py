"""A process group of a library that may block, owned by one helper thread.

NCCL may block in the construction of a group, in its connection, in an abort and in its destructor; after an error it
does not report which collectives have completed. One thread per group therefore makes it, connects it by a first
collective, looks for the ends of others, aborts it and destroys it. The training thread and the control thread only
queue work for the owner, and wait at a `Gate`, which an abort opens at once. Between start and abort the owner calls
nothing that may block, so that nothing delays the abort (`device_marks`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch.distributed as dist

from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.communication.abort_barrier import BARRIER_SECONDS, AbortBarrier
from unicron_lightning.worker.communication.communicator import Gate, Handle

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.05
POLL_SECONDS: Final = 0.0002
SHARED_DEVICE: Final = "Duplicate GPU detected"
"""NCCL's message when two ranks of a host use the same GPU; no later attempt can succeed."""
ENQUEUE_SECONDS: Final = 1.0
"""Time that the owner gives a collective being enqueued before it aborts the group."""
TURN_SECONDS: Final = 0.01
"""Period in which a caller that is to enqueue looks for an abort, for the whole of which the owner keeps others out."""


_owners: list[threading.Thread] = []
_owners_lock = threading.Lock()
ending = threading.Event()
"""Set while the process waits for its end: owners then keep no group for the sake of references to it."""


def start_owner(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that calls the library, for `wait_destroyed`."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    with _owners_lock:
        _owners[:] = [*(owner for owner in _owners if owner.is_alive()), thread]
    return thread


def wait_destroyed(seconds: float) -> bool:
    """At the end of the process: wait until no thread is in the library; return False after ``seconds``.

    A thread that returns from the library while the interpreter is finalized would abort the process.
    """
    ending.set()
    left = wait_owners(seconds)
    ending.clear()
    return not left


def wait_owners(seconds: float) -> bool:
    """Wait until no thread is in the library; return whether one still is after ``seconds``."""
    deadline = time.monotonic() + seconds
    with _owners_lock:
        owners = [owner for owner in _owners if owner is not threading.current_thread()]
    for owner in owners:
        owner.join(max(0.0, deadline - time.monotonic()))
    return any(owner.is_alive() for owner in owners)


EndMark = Callable[[], bool]
"""Whether a collective has ended, successfully or not; never blocks, and calls neither driver nor library."""


class Library(Protocol):
    """The library's calls for the groups of one epoch; all but `error` may block."""

    def make(self, store: dist.Store, rank: int, world: int) -> Any:
        """Build an unconnected group, which has a method ``abort``."""
        ...

    def connect(self, group: Any, *, messages: bool = False) -> EndMark:
        """Start the collectives that connect a group.

        Args:
            group: to be connected.
            messages: whether its ranks will also send each other messages, for which there are further connections.
        """
        ...

    def mark(self, work: Any) -> EndMark:
        """Follow a collective that the calling thread has just started."""
        ...

    def error(self, group: Any) -> str | None:
        """The error that the library has found in a group's collectives; None without one."""
        ...

    def close(self) -> None:
        """Release what the followed collectives need, after the aborts."""
        ...


class OwnedHandle(Handle):
    """One collective of an owned group; ``done`` after its owner has seen it end before an abort of this group."""

    __slots__ = ("ended", "memory")

    def __init__(self, ended: EndMark, memory: object) -> None:
        super().__init__(None)
        self.done = False
        self.ended = ended
        self.memory = memory
        """Kept alive while the library may write to it."""

    def succeeded(self) -> bool:
        return self.done


class OwnedGroup:
    """One process group and the thread that owns it.

    Args:
        library: makes the group, and follows its collectives.
        store, rank, world: of the group.
        failed: called with the reason when the library reports an error; on any thread, must not block.

    Attributes:
        gate: releases waiters.
        fatal: an error by which the process must end, such as a CUDA error; None without one.
    """

    def __init__(
        self, library: Library, store: dist.Store, rank: int, world: int, failed: Callable[[str], None]
    ) -> None:
        self.gate = Gate()
        self.fatal: Exception | None = None
        self._library = library
        self._place = (store, rank, world)
        self._failed = failed
        self._barrier: AbortBarrier | None = None
        self._group: Any = None
        self._connected = False
        self._enqueuing = threading.Lock()
        self._on_the_way: list[OwnedHandle] = []
        self._released = threading.Event()
        self._thread = start_owner(self._run, f"unicron-nccl-{rank}")

    def wait_connected(self, look: Callable[[], str | None]) -> None:
        """Wait until the group is connected.

        Args:
            look: called every `LOOK_SECONDS`; returns a reason to abort, or None.

        Raises:
            CommunicatorAborted: the group could not be connected, was aborted, or ``look`` returned a reason.
        """
        while not self.gate.wait_for(lambda: self._connected, LOOK_SECONDS):
            if (reason := look()) is not None:
                self.abort(reason)
        self._check()

    def enqueue(self, begin: Callable[[Any], Any], memory: object) -> OwnedHandle:
        """Start a collective of tensors in ``memory``.

        Raises:
            CommunicatorAborted: the group is aborted, or the library reports an error.
            RuntimeError: an error of the accelerator, after which the process cannot continue.
        """
        while not self._enqueuing.acquire(timeout=TURN_SECONDS):
            self._check()
        try:
            self._check()
            handle = self._begin(begin, memory)
        finally:
            self._enqueuing.release()
        with self.gate.condition:
            self._on_the_way.append(handle)
            self.gate.condition.notify_all()
        return handle

    def _begin(self, begin: Callable[[Any], Any], memory: object) -> OwnedHandle:
        try:
            return OwnedHandle(self._library.mark(begin(self._group)), memory)
        except RuntimeError as error:
            self._fail(error)
            self._check()
            raise

    def wait(self, handle: OwnedHandle) -> None:
        """Wait for a collective, or an abort.

        Raises:
            CommunicatorAborted: as for `enqueue`.
            RuntimeError: as for `enqueue`.
        """
        self.gate.wait_for(lambda: handle.done)
        if not handle.done:
            self._check()

    def abort(self, reason: str) -> None:
        """Release all waiters and let the owner abort the group; return at once."""
        self.gate.shut(reason)

    def released(self, seconds: float) -> bool:
        """Wait until the aborted group no longer writes to any tensor; return False after ``seconds``."""
        return self._released.wait(seconds)

    def join(self, seconds: float) -> bool:
        """Wait until the group is destroyed; return False after ``seconds``."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _check(self) -> None:
        if self.fatal is not None:
            raise self.fatal
        self.gate.check()

    def _fail(self, error: Exception) -> None:
        reason = reason_of(error)
        if self.gate.reason is None:
            if SHARED_DEVICE in str(error):
                self.fatal = ConfigError(f"{_text(error)}: expected one worker per GPU")
            elif isinstance(error, RuntimeError) and is_sticky(str(error)):
                self.fatal = error
        self.gate.shut(reason)
        self._failed(reason)

    def _run(self) -> None:
        group: Any = None
        try:
            barrier = self._barrier = AbortBarrier(*self._place)
            group = self._group = self._library.make(*self._place)
            first = OwnedHandle(self._library.connect(group), None)
            self._on_the_way = [first]
            self._serve(group, lambda: first.done)
            if self.gate.reason is None:
                barrier.meet()
                with self.gate.condition:
                    self._connected = True
                    self.gate.condition.notify_all()
                self._serve(group, lambda: False)
        except (RuntimeError, OSError) as error:
            self._fail(error)
        self._end(group)

    def _serve(self, group: Any, over: Callable[[], bool]) -> None:
        """Until the abort, or until it is over: detect the ends of collectives, and errors of the library."""
        looked = time.monotonic()
        while self.gate.reason is None and not over():
            with self.gate.condition:
                waiting = list(self._on_the_way)
                if not waiting:
                    self.gate.condition.wait_for(lambda: self._on_the_way or self.gate.reason is not None)
                    continue
            if ended := [handle for handle in waiting if handle.ended()]:
                with self.gate.condition:
                    self._end_waits(ended)
                    self.gate.condition.notify_all()
                continue
            if time.monotonic() > looked + LOOK_SECONDS:
                if (error := self._library.error(group)) is not None:
                    raise RuntimeError(error)
                looked = time.monotonic()
            self.gate.wait_for(lambda: False, POLL_SECONDS)

    def _end_waits(self, ended: list[OwnedHandle]) -> None:
        """Let their waiters continue, unless this group is being aborted. They may lack data if another rank has
        aborted its own group: only the commit, which that rank does not reach, confirms their success.
        """
        for handle in ended:
            handle.done = self.gate.reason is None
            self._on_the_way.remove(handle)

    def _end(self, group: Any) -> None:
        """Abort the group, then destroy it: its last reference is the caller's, on this thread."""
        barrier = self._barrier
        if barrier is not None:
            barrier.announce()
        entered = self._enqueuing.acquire(timeout=ENQUEUE_SECONDS)
        try:
            if barrier is not None and not barrier.wait():
                logger.info("abort_not_awaited seconds=%.0f", BARRIER_SECONDS)
            if group is not None:
                abort_logged(group)
        finally:
            self._group = None
            self._on_the_way = []
            if entered:
                self._enqueuing.release()
            self._released.set()
        if entered:  # else a thread may still start a collective
            self._library.close()


def _text(error: Exception) -> str:
    """Return the line of NCCL's message that names the ranks which share a device."""
    return next(line.strip() for line in str(error).splitlines() if SHARED_DEVICE in line)[:200]


def reason_of(error: Exception) -> str:
    """Return the line of an error that states its cause."""
    if is_out_of_memory(str(error)):
        return "NCCL: the device is out of memory"
    return (str(error) or repr(error)).splitlines()[0][:200]


def is_out_of_memory(text: str) -> bool:
    """Whether the accelerator lacked memory. NCCL calls that an unhandled CUDA error, but the process can continue."""
    return "out of memory" in text.lower()


def is_sticky(text: str) -> bool:
    """Whether an error message reports an accelerator error, after which the process cannot use the accelerator."""
    lowered = text.lower()
    names = ("cuda error", "unhandledcudaerror", "unhandled cuda error")
    return any(name in lowered for name in names) and not is_out_of_memory(text)


def abort_logged(group: Any) -> None:
    """Abort a group; an error of the library is only logged."""
    try:
        group.abort()
    except RuntimeError as error:
        logger.warning("group_abort_failed error=%s", error)
