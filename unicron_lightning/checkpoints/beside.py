"""Checkpoints that are written while training continues, by processes of their own, from copies in shared memory.

All members call `CheckpointsBeside.write` at the same place. They agree on the members that write the version, begin to
copy their parts and return: parameters and states of optimizers, which the next gradients do not change, are copied
meanwhile (`CheckpointsBeside.settle`). A version is complete when its folder is at its path; each worker then reports
it. A failure is a warning and an event, and leaves the version before it in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import torch
from torch import Tensor

from unicron_lightning.checkpoints.client import IN_FLIGHT, WriterProcess
from unicron_lightning.checkpoints.files import located
from unicron_lightning.checkpoints.messages import HOLDERS_LOST, WriteVersion
from unicron_lightning.checkpoints.pieces import HeldCheckpoint, part_writers, stage
from unicron_lightning.checkpoints.reported import ReportedCheckpoints
from unicron_lightning.errors import UnicronError
from unicron_lightning.shared_memory import MemoryPool, PooledMemory
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.comparison import TaskHost
from unicron_lightning.worker.operations import Agreement
from unicron_lightning.worker.state_parts import RackAndNode, holders

logger = logging.getLogger(__name__)

WRITE_SECONDS: Final = 600.0
"""Time limit of a version; a save waits as long if two versions before it are not finished."""
_CHANGED: Final = (
    "tensors were changed before the next step of the optimizer, while they were copied; from now on they are copied "
    "at once"
)
OTHERS_SECONDS: Final = 5.0
"""Seconds for which a life that ends waits for them; without them the state is saved all the same."""
_BROKEN_OFF_SECONDS: Final = 20.0
"""Seconds for which a run that an exception has ended waits for its checkpoints."""


class CheckpointLost(UnicronError):
    """All holders of a part of the newest checkpoint died after the last step, and the others cannot write it."""


@dataclass
class _SavedVersion:
    """A version, from its staging on."""

    path: str
    step: int
    reports: bool
    state: str = "pending"
    error: str = ""
    then: list[Callable[[], None]] = field(default_factory=list)
    removes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TakenCheckpoint:
    """A checkpoint that is to be written.

    Attributes:
        step: optimizer steps finished.
        resumable: whether a task can resume from it.
        held: returns it as this worker holds it.
        steady: addresses of the memory (`memory_of`) that changes in the optimizer's step only, if the next gradients
            follow at once; it is copied meanwhile.
    """

    step: int
    resumable: bool
    held: Callable[[], HeldCheckpoint]
    steady: Collection[int] = ()


class SavingHost(TaskHost, Protocol):
    """A strategy or a loop whose checkpoints are written."""

    @property
    def reported(self) -> ReportedCheckpoints: ...


class CheckpointsBeside(ABC):
    """This worker's part in writing checkpoints.

    Args:
        host: has the session, and reports what is complete.
    """

    def __init__(self, host: SavingHost) -> None:
        self._host = host
        self._writer: WriterProcess | None = None
        self._partners = 0
        self._overlap = True
        self._copies = LateCopies()
        self._unsteady: set[int] = set()
        """Addresses of memory that was changed while it was copied: from then on it is copied at once."""
        self._lock = threading.Lock()
        self._saved: list[_SavedVersion] = []
        self._newest: _SavedVersion | None = None
        """Newest finished version; of a run that has ended, without its error."""
        self._replaced: list[str] = []
        """Checkpoints to remove once a newer version is complete."""
        self._due: list[str] = []
        """Checkpoints that the first rank has to remove, or had to when this worker saw them last."""
        self._number = 0

    # ---- the host's

    def held_parts(self) -> Sequence[str]:
        """Return the names of the parts of a divided model that this worker could write, its own first."""
        return ()

    def written(self, step: int) -> None:  # noqa: B027
        """Learn that a checkpoint of a step is complete; called by any thread."""

    @abstractmethod
    def remove_now(self, path: str) -> None:
        """Remove a checkpoint.

        Raises:
            OSError: it cannot be removed, or is not there.
        """

    # ---- called by the training thread

    def use(self, folder: str, partners: int, *, overlap: bool) -> None:
        """Start this worker's writer.

        Args:
            folder: of the checkpoints, or its URL.
            partners: workers that also hold each part, and write it if its first writer is lost.
            overlap: whether to copy while the next gradients are computed.
        """
        self._partners = max(partners, self._partners)
        self._overlap = self._overlap and overlap
        if self._writer is None:
            self._writer = WriterProcess(self._members)
            importlib.import_module("torch.distributed.checkpoint._nested_dict")  # here, not in the step that saves

    def write(self, path: Any, take: Callable[[], TakenCheckpoint]) -> None:
        """Stage a checkpoint and have it written; for all members together.

        Args:
            path: of the checkpoint.
            take: returns it, once the members have agreed on its writers.
        """
        session, engine, writer = self._host.session, self._host.session.engine, self._writer
        assert writer is not None, "use() first"
        self.settle()
        with engine.activity.during("checkpoint"):
            agreed = self._agree()
            taken = take()
            saved = _SavedVersion(located(path), taken.step, taken.resumable)
            self._number += 1
            order = WriteVersion(
                number=self._number,
                name=agreed.name,
                path=saved.path,
                rank=agreed.rank,
                holders=agreed.holders,
                seconds=WRITE_SECONDS,
                record=session.record if saved.reports else "",
                step=saved.step,
                fit=session.fits,
            )
            with self._lock:
                saved.removes = sorted(agreed.removes.difference(self._to_remove()))
                self._saved.append(saved)
                for left in (self._replaced, self._due, *(each.removes for each in self._saved)):
                    left[:] = [each for each in left if each != saved.path]
            try:
                if not writer.wait(IN_FLIGHT - 1, WRITE_SECONDS, saved.path):
                    raise OSError("versions before it are not finished")
                steady = set(taken.steady) - self._unsteady if self._overlap else set()
                parts = taken.held()
                copy = _Copy(order, agreed.parts, parts.apart(steady) if steady else parts)
            except (OSError, LookupError, ValueError, RuntimeError) as error:
                writer.write(_failed(order, repr(error)), agreed.workers, (), partial(self._outcome, saved))
                return

            def hand_over(changed: Sequence[torch.Tensor] = ()) -> None:
                if changed:
                    self._unsteady |= memory_of(changed)
                    copy.order = _failed(copy.order, f"{len(changed)} {_CHANGED}")
                writer.write(copy.order, agreed.workers, copy.memories, partial(self._outcome, saved))

            if steady:
                self._copies.begin(partial(copy.make, writer.pool), copy.sources, hand_over)
            else:
                copy.make(writer.pool)
                hand_over()

    def settle(self) -> None:
        """Wait until the newest version is copied: parameters or states of optimizers are about to change."""
        if self._copies.active:
            with self._host.session.engine.activity.during("checkpoint"):
                self._copies.settle()

    def pending(self, path: Any) -> bool:
        """Whether a version is being written to this path."""
        with self._lock:
            return any(each.path == located(path) and each.state == "pending" for each in self._saved)

    def after(self, action: Callable[[], None]) -> None:
        """Act once the newest version is complete and those before it are finished; not if the newest one fails."""
        with self._lock:
            if self._saved:
                self._saved[-1].then.append(action)
                return
        if not self._has_failed:
            action()

    def remove(self, path: Any) -> None:
        """Remove a checkpoint that the newest version replaces, once that one, or a later one, is complete."""
        with self._lock:
            (self._saved[-1].removes if self._saved else self._replaced).append(located(path))
        self._sweep()

    def finish(self, seconds: float) -> None:
        """Wait for the versions of a life that ends, at most so long."""
        self.settle()
        if self._writer is not None:
            self._writer.finish(seconds)

    def close(self, *, whole: bool) -> None:
        """End a run: wait for the versions, if no exception has ended it, and end the writer.

        Raises:
            CheckpointLost: the run is whole, and its newest version is lost: the next life trains the last steps again.
        """
        self._copies.settle()
        if self._writer is not None:
            self._writer.close(WRITE_SECONDS if whole else _BROKEN_OFF_SECONDS)
            self._writer = None
            self._sweep(all_ranks=True)  # the first rank may have died since the last step
        for left in (self._saved, self._replaced, self._due):
            left.clear()
        newest = self._newest
        if newest is not None:
            error, newest.error = newest.error, ""
            if whole and error.startswith(HOLDERS_LOST):
                raise CheckpointLost(f"{newest.path}: {error}")

    @property
    def _has_failed(self) -> bool:
        """Whether the newest finished version has failed."""
        return self._newest is not None and self._newest.state == "failed"

    # ---- parts of a save

    def _agree(self) -> _VersionAgreement:
        """Agree on the writers of a version, and notify joiners which checkpoints are to be removed.

        A failure may be known to some members only. The result of an operation is the same on all.
        """
        engine = self._host.session.engine
        own = "" if engine.control is None else engine.control.worker

        def about(rank: int) -> bytes:
            place = engine.world.places[rank] if engine.world.nodes else ("", "")
            with self._lock:
                removes = self._to_remove()
            return msgspec.json.encode([own, place, self.held_parts(), removes])

        result = engine.run(Agreement("checkpoint_writers", about))
        told = tuple[str, RackAndNode, list[str], list[str]]
        members = [msgspec.json.decode(part, type=told) for part in unpack_parts(result)]
        workers, places, parts, removes = ([*each] for each in zip(*members, strict=True))
        named = part_writers(parts, places, self._partners)
        whole = [holders(places, part, self._partners) for part in range(len(places))]
        return _VersionAgreement(
            workers=workers,
            parts=list(named) or [""] * len(places),
            holders=list(named.values()) or whole,
            rank=workers.index(own),
            name=f"{engine.position}-{hashlib.sha256(result).hexdigest()[:12]}",
            removes=frozenset().union(*removes),
        )

    def _to_remove(self) -> list[str]:
        """Return the checkpoints that are to be removed now or later; for the holder of the lock."""
        return [*self._due, *self._replaced, *(path for each in self._saved for path in each.removes)]

    # ---- called by the writer's thread

    def _members(self) -> Collection[str] | None:
        control = self._host.session.control
        latest = None if control is None else control.latest
        return None if latest is None else {member.worker for member in latest.members}

    def _outcome(self, saved: _SavedVersion, digest: str, error: str) -> None:
        engine, control = self._host.session.engine, self._host.session.control
        if digest and saved.reports:
            self._host.reported.written(control, saved.path, saved.step, digest)
            self.written(saved.step)
        elif error:
            logger.warning("checkpoint_failed path=%s step=%d error=%s", saved.path, saved.step, error)
            if control is not None and engine.world.rank == 0:
                control.event("checkpoint_failed", path=saved.path, step=saved.step, error=error[:500])
        with self._lock:
            saved.state, saved.error = "complete" if digest else "failed", error
            finished = []
            while self._saved and self._saved[0].state != "pending":
                finished.append(self._saved.pop(0))
                self._newest = finished[-1]
                self._replaced += self._newest.removes
                if not self._has_failed:
                    self._due, self._replaced = self._due + self._replaced, []
        for action in (action for each in finished if each.state == "complete" for action in each.then):
            try:
                action()
            except OSError as problem:  # e.g. of a link
                logger.warning("checkpoint_left path=%s error=%s", saved.path, problem)
        self._sweep()

    def _sweep(self, *, all_ranks: bool = False) -> None:
        """Remove what is due, as the first rank; others keep it in mind until it is gone, as they may become that."""
        control = self._host.session.control
        if control is not None and control.is_ending:
            return  # the report of the newest one may come too late for the next life
        with self._lock:
            if not self._saved and not self._has_failed:
                self._due, self._replaced = self._due + self._replaced, []
            due = list(self._due)
        for path in due:
            try:
                if self._host.session.engine.world.rank == 0 or all_ranks:
                    self.remove_now(path)
                elif "://" not in path and Path(path).exists():
                    continue
            except FileNotFoundError:
                pass  # another rank has removed it
            except OSError as problem:
                logger.warning("checkpoint_left path=%s error=%s", path, problem)
            with self._lock:
                self._due = [each for each in self._due if each != path]


@dataclass(frozen=True, kw_only=True)
class _VersionAgreement:
    """The members' agreement on a version.

    Attributes:
        workers: identities, by rank.
        parts: names of a divided model's parts; otherwise empty ones.
        holders: ranks that hold each part.
        rank: of this worker.
        name: of the version.
        removes: paths of the checkpoints that any member has to remove, now or later.
    """

    workers: list[str]
    parts: list[str]
    holders: list[list[int]]
    rank: int
    name: str
    removes: frozenset[str]


class _Copy:
    """A version on its way into shared memory.

    Args:
        order: without its parts.
        names: of all parts.
        held: the checkpoint as this worker holds it.

    Attributes:
        order, memories: for the writer, once it is copied.
    """

    def __init__(self, order: WriteVersion, names: Sequence[str], held: HeldCheckpoint) -> None:
        self.order = order
        self.memories: list[PooledMemory] = []
        self._names = names
        self._held = held

    @property
    def sources(self) -> list[torch.Tensor]:
        """All tensors."""
        return self._held.sources

    def make(self, pool: MemoryPool) -> None:
        """Copy; an error becomes that of the order."""
        try:
            self.order, self.memories = stage(pool, self.order, self._names, self._held)
        except (OSError, MemoryError, LookupError, ValueError, RuntimeError) as error:
            self.order = _failed(self.order, str(error) or repr(error))


def memory_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the addresses of the memory in which tensors, or this worker's parts of them, are."""
    with torch.no_grad():  # a DTensor is known by its method: its package takes half a second to import
        own = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return {each.untyped_storage().data_ptr() for each in own}


def _failed(order: WriteVersion, error: str) -> WriteVersion:
    return msgspec.structs.replace(order, error=error[:500])


class LateCopies:
    """Makes the copies of one version at a time, by a thread while training continues, until their sources change.

    Parameters and states of optimizers change only in the optimizer's step. The training thread waits for the copies
    before that, and not while it computes the gradients; torch copies without the interpreter's lock. A GPU copies on a
    stream beside those that compute.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def active(self) -> bool:
        """Whether copies are being made."""
        return self._thread is not None

    def begin(
        self, copy: Callable[[], None], sources: Sequence[Tensor], then: Callable[[Sequence[Tensor]], None]
    ) -> None:
        """Begin to copy; `settle` must be called before the sources may change.

        Args:
            copy: makes the copies; it reports its errors itself.
            sources: of the copies.
            then: called afterwards, by the same thread, with the sources that have changed: their copies are not valid.
        """
        self.settle()
        versions = [source._version for source in sources]
        streams = [self._stream_on(device) for device in {each.device for each in sources} if device.type == "cuda"]

        def run() -> None:
            with torch.no_grad(), contextlib.ExitStack() as stack:
                for stream in streams:
                    stack.enter_context(torch.cuda.stream(stream))
                    stack.callback(stream.synchronize)
                copy()
            pairs = zip(versions, sources, strict=True)
            then([source for version, source in pairs if version != source._version])

        self._thread = threading.Thread(target=run, name="unicron-late-copies", daemon=True)
        self._thread.start()

    def _stream_on(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream for copies, behind the work so far of the one that computes."""
        stream = self._streams.get(device) or self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def settle(self) -> None:
        """Wait until the copies are made."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
