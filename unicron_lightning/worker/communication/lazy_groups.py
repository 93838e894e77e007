"""NCCL groups that torch makes when Megatron asks for them: connected, aborted and destroyed by helper threads.

Decision 18 gives the reasons. Unlike an `owned.OwnedGroup`, such a group is used by Megatron's code on the training
thread, and referred to by Megatron's objects until they are given the next epoch's groups.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import torch.distributed as dist

from unicron_lightning.worker.communication.abort_barrier import AbortBarrier
from unicron_lightning.worker.communication.communicator import CommunicatorAborted
from unicron_lightning.worker.communication.owned_group import (
    POLL_SECONDS,
    Library,
    abort_logged,
    ending,
    is_sticky,
    reason_of,
    start_owner,
)

logger = logging.getLogger(__name__)

REFERENCE_POLL_SECONDS: Final = 0.05
_CHECK_SECONDS: Final = 0.02
"""Interval at which a caller's check is called while it waits."""
REFERENCE_SECONDS: Final = 60.0
"""Time that a retired group is kept for Megatron's objects to drop it, so that it is destroyed by the helper thread."""


class LazyGroup(Protocol):
    """A group that the library connects with its first collective.

    Attributes:
        backend: the library's.
        messages: whether its members also send each other messages, for which there are further connections.
    """

    @property
    def backend(self) -> Any: ...

    @property
    def messages(self) -> bool: ...


def connect_apart(groups: Sequence[LazyGroup], library: Library, check: Callable[[], None]) -> None:
    """Connect groups that the library builds lazily, one after the other in a helper thread.

    The calling thread never blocks in the library. All ranks must give their groups in one common order.

    Args:
        groups: of this rank.
        library: connects them.
        check: called while waiting; raises if the groups are no longer wanted, and they must then be aborted.

    Raises:
        CommunicatorAborted: a group could not be connected.
        RuntimeError: an error of the accelerator, after which the process cannot continue.
        Exception: any exception of ``check``.
    """
    over, abandoned = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def run() -> None:
        try:
            for group in groups:
                ended = library.connect(group.backend, messages=group.messages)
                while not ended() and not abandoned.wait(POLL_SECONDS):
                    if (error := library.error(group.backend)) is not None:
                        raise RuntimeError(error)
                if abandoned.is_set():
                    return
        except (RuntimeError, OSError) as error:
            errors.append(error)
        finally:
            over.set()

    start_owner(run, "unicron-connect-groups")
    try:
        while not over.wait(_CHECK_SECONDS):
            check()
    finally:
        abandoned.set()
    if errors and isinstance(errors[0], RuntimeError) and is_sticky(str(errors[0])):
        raise errors[0]
    if errors:
        raise CommunicatorAborted(reason_of(errors[0]))


def abort_apart(groups: Sequence[Any], barrier: AbortBarrier | None = None) -> list[threading.Thread]:
    """Abort groups of NCCL in parallel, each in its own thread, after the barrier; return the threads at once.

    Sequential aborts can deadlock: an abort may synchronise the device behind another group's stuck kernel.
    """
    if barrier is not None and groups:
        barrier.announce()
    return [start_owner(partial(_abort, group, barrier), f"unicron-abort-{at}") for at, group in enumerate(groups)]


def _abort(group: Any, barrier: AbortBarrier | None) -> None:
    if barrier is not None:
        barrier.wait()
    abort_logged(group)


@dataclass
class LazyGroups:
    """Groups that are aborted together.

    Attributes:
        groups: back-ends of the library.
        barrier: among the ranks of this host that have them; None if they have no peers.
    """

    groups: list[Any] = field(default_factory=list)
    barrier: AbortBarrier | None = None

    def add_barrier(self, store: dist.Store, rank: int, world: int) -> None:
        """Make the barrier; ``store`` has a prefix of its own."""
        if world > 1:
            self.barrier = AbortBarrier(store, rank, world)

    def meet(self) -> None:
        """Find the ranks of this host, when all groups are connected."""
        if self.barrier is not None:
            self.barrier.meet()

    def abort(self) -> None:
        """Abort the groups in helper threads; return at once."""
        abort_apart(self.groups, self.barrier)

    def close(self) -> None:
        """Release the barrier."""
        if self.barrier is not None:
            self.barrier.wait(0.0)


class Retirement:
    """Groups that are aborted, and then destroyed, by a helper thread.

    The helper thread keeps a group until no other reference exists, so that its destructor cannot run on another
    thread.

    Args:
        holders: torch's process groups, which refer to ``groups``.
        groups: back-ends of the library.
        settle: waits until the aborted kernels have ended; on the helper thread.
    """

    def __init__(self, holders: Sequence[Any], groups: Sequence[Any], settle: Callable[[], None]) -> None:
        self._settle = settle
        self._aborted = threading.Event()
        self._error: RuntimeError | None = None
        self._kept = [list(holders), list(groups)]
        self._thread = start_owner(self._run, "unicron-retire-groups")

    def wait_aborted(self, check: Callable[[], None]) -> None:
        """Wait until no kernel of the groups writes to a tensor any more.

        Args:
            check: called while waiting; raises if the caller must not wait any longer.

        Raises:
            RuntimeError: an error of the accelerator, after which the process cannot continue.
            Exception: any exception of ``check``.
        """
        while not self._aborted.wait(_CHECK_SECONDS):
            check()
        if self._error is not None:
            raise self._error

    def join(self, seconds: float) -> bool:
        """Wait until the groups are destroyed; return False after ``seconds``."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            for thread in abort_apart(self._kept[1]):
                thread.join()
            self._settle()
        except RuntimeError as error:
            self._error = error
        self._aborted.set()
        deadline = time.monotonic() + REFERENCE_SECONDS
        for kept in self._kept:
            _drop_unreferenced(kept)
            while kept and time.monotonic() < deadline and not ending.wait(REFERENCE_POLL_SECONDS):
                _drop_unreferenced(kept)
        left = [item for kept in self._kept for item in kept]
        if ending.is_set():
            for item in left:  # the interpreter must not destroy them
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
        elif left:
            logger.warning("groups_still_referenced count=%d seconds=%.0f", len(left), REFERENCE_SECONDS)
        self._kept = []


def _drop_unreferenced(kept: list[Any]) -> None:
    """Remove the items to which nothing else refers; their destructors run here."""
    probe = [object()]
    alone = sys.getrefcount(probe[0])
    for index in reversed(range(len(kept))):
        if sys.getrefcount(kept[index]) <= alone:
            del kept[index]
