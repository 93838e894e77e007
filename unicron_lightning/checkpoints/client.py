"""A worker's side of its writer: the process, the shared memory, and the versions that are being written.

The training thread copies into shared memory and returns. A thread of its own sends orders to the writer, reports ranks
that are no longer members, and receives the outcomes. A writer that ends is started again, with the versions that it
has not finished.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Final

from unicron_lightning.checkpoints.messages import (
    Channel,
    FromWriter,
    LeaveUntraced,
    VersionFailed,
    VersionOutcome,
    VersionWritten,
    WriterEnds,
    WriterReady,
    WritersGone,
    WriteVersion,
)
from unicron_lightning.shared_memory import MemoryPool, PooledMemory

logger = logging.getLogger(__name__)

IN_FLIGHT: Final = 4
"""Versions that are written at a time; a further one waits. With ``save_last`` each save makes two."""
_LOOK_SECONDS: Final = 0.2
"""Seconds between two looks at the members."""
_PATIENCE_SECONDS: Final = 2.0
_BESIDE_SECONDS: Final = 0.02
"""Seconds between two looks at the files of other writers, while this process writes."""
_STARTS: Final = 3
"""Starts of the writer after which unfinished versions fail."""
_END_SECONDS: Final = 10.0
_LATE_SECONDS: Final = 5.0
"""Seconds after a version's time limit in which the writer reports; it is killed then, e.g. if its storage hangs."""


@dataclass
class _Version:
    """A version that is being written."""

    order: WriteVersion
    workers: Sequence[str]
    memories: Sequence[PooledMemory]
    outcome: Callable[[str, str], None]
    gone: set[int] = field(default_factory=set)
    starts: int = 0
    since: float = field(default_factory=time.monotonic)


class WriterProcess:
    """The writer of this worker.

    Args:
        members: returns the present members of the task; None: not known.

    Attributes:
        pool: memory for versions; the writer has no more use of it when a version is finished.
    """

    def __init__(self, members: Callable[[], Collection[str] | None]) -> None:
        self.pool = MemoryPool()
        self._members = members
        self._condition = threading.Condition()
        self._versions: dict[int, _Version] = {}
        self._orders: queue.SimpleQueue[_Version | None] = queue.SimpleQueue()
        self._broken = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        """Whether the writer has started."""
        self._ends = False
        """Whether the run ends once its versions are finished."""
        self._told = False
        """Whether the writer knows of it."""
        self._waited = False
        """Whether the worker has waited for versions, which the writer does not know yet."""
        self._left = False
        """Whether the writer may have files to delete."""
        self._channel: Channel | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="unicron-checkpoints", daemon=True)
        self._thread.start()

    # ---- called by the training thread

    def wait(self, versions: int, seconds: float, path: str | None = None) -> bool:
        """Wait until at most so many versions are unfinished, and none at this path; return whether that is so.

        If this is before a further version, the writer leaves versions to others after `_PATIENCE_SECONDS` of which it
        has not found a trace: the others may have gone on, and written and removed them before it had started.
        """

        def finished() -> bool:
            there = [each.order.path for each in self._versions.values()]
            return len(there) <= versions and path not in there

        with self._condition:
            if path is None:
                return self._condition.wait_for(finished, seconds)
            if self._condition.wait_for(finished, min(seconds, _PATIENCE_SECONDS)):
                return True
            self._waited = True
            os.write(self._wake_write, b"x")
            return self._condition.wait_for(finished, max(0.0, seconds - _PATIENCE_SECONDS))

    def write(
        self,
        order: WriteVersion,
        workers: Sequence[str],
        memories: Sequence[PooledMemory],
        outcome: Callable[[str, str], None],
    ) -> None:
        """Have a version written.

        Args:
            order: for the writer.
            workers: that write the version, by rank.
            memories: of the order, from the pool.
            outcome: called from another thread with the digest, or an error.
        """
        version = _Version(order, workers, memories, outcome)
        with self._condition:
            self._versions[order.number] = version
        if self._broken:
            self._finish(version, "", self._broken)
            return
        self._orders.put(version)
        os.write(self._wake_write, b"x")

    def finish(self, seconds: float) -> None:
        """Wait for the versions of a process that ends, at most so long. The thread writes them itself if the writer
        has not started: that would last seconds.
        """
        self._ends = True
        os.write(self._wake_write, b"x")
        if not self.wait(0, seconds):
            logger.warning("checkpoints_not_finished versions=%d seconds=%g", len(self._versions), seconds)

    def close(self, seconds: float) -> None:
        """Wait for the unfinished versions, then end the writer."""
        self.finish(seconds)
        self._orders.put(None)
        os.write(self._wake_write, b"x")
        self._thread.join()
        for version in self._versions.values():
            self.pool.give_back(version.memories)
        self.pool.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ---- the thread

    def _run(self) -> None:
        try:
            self._start()  # before the first version, as imports take seconds
            self._serve()
        except Exception as error:
            logger.exception("checkpoint_writer_broke")
            self._broken = str(error) or repr(error)
            self._stop()
            for version in list(self._versions.values()):
                self._finish(version, "", self._broken)

    def _serve(self) -> None:
        while True:
            channel = self._channel
            waits = [self._wake_read, *([] if channel is None else [channel.fileno()])]
            ready = wait(waits, _LOOK_SECONDS if self._versions else None)
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            try:
                while not self._orders.empty():
                    version = self._orders.get()
                    if version is None:
                        self._stop(idle=not self._versions and not self._left)
                        return
                    self._send(version)
                if self._ends and self._channel is not None:
                    if not self._ready:
                        self._write_here()
                        continue
                    if not self._told:
                        self._told = True
                        self._channel.send(WriterEnds())
                if self._waited and self._ready and self._channel is not None:
                    self._waited = False
                    self._channel.send(LeaveUntraced())
                self._report_gone()
                self._end_late()
                if channel is not None and channel is self._channel and channel.fileno() in ready:
                    self._receive()
            except OSError as error:
                self._start_again(str(error))

    def _start(self) -> None:
        own, other = socket.socketpair()
        words = [sys.executable, "-m", "unicron_lightning.checkpoints.writer", f"{other.fileno()}"]
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
        with other:
            passed, nothing = [other.fileno()], subprocess.DEVNULL
            self._process = subprocess.Popen(
                words, pass_fds=passed, env=environment, stdin=nothing, start_new_session=True
            )
        self._channel, self._ready, self._told = Channel(own, FromWriter), False, False

    def _stop(self, *, idle: bool = False) -> None:
        """End the writer.

        Args:
            idle: it has nothing to do any more.
        """
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            try:
                if idle:
                    self._process.kill()
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _send(self, version: _Version) -> None:
        if self._channel is None:
            self._start()
        assert self._channel is not None
        version.starts += 1
        self._channel.send(version.order, [each.descriptor for each in version.memories])

    def _report_gone(self) -> None:
        present = self._members() if self._versions else None
        if present is None or self._channel is None:
            return
        for number, version in list(self._versions.items()):
            gone = {rank for rank, worker in enumerate(version.workers) if worker not in present} - version.gone
            if gone:
                version.gone |= gone
                self._channel.send(WritersGone(number=number, ranks=sorted(version.gone)))

    def _end_late(self) -> None:
        """Fail versions of which the writer has reported nothing in time, and replace the writer."""
        now = time.monotonic()
        late = [v for v in self._versions.values() if v.starts and now > v.since + v.order.seconds + _LATE_SECONDS]
        if late and self._process is not None:
            self._process.kill()  # before the memory is used again
            self._stop()
            for version in late:
                self._finish(version, "", f"the writer has not answered for {now - version.since:.0f} s")
            self._send_again()

    def _receive(self) -> None:
        assert self._channel is not None
        received = self._channel.receive()
        if received is None:
            raise OSError("the writer has ended")
        message, _ = received
        if isinstance(message, WriterReady):
            self._ready = True
        else:
            self._take(message)

    def _take(self, message: VersionOutcome) -> None:
        """Finish a version by its outcome."""
        version = self._versions.get(message.number)
        self._left = self._left or isinstance(message, VersionFailed)
        if version is not None:
            digest = message.digest if isinstance(message, VersionWritten) else ""
            self._finish(version, digest, message.error if isinstance(message, VersionFailed) else "")

    def _write_here(self) -> None:
        """Write the versions in this process: the run ends, and the writer has not started."""
        from unicron_lightning.checkpoints.writer import Versions  # takes half a second to import

        self._stop(idle=True)
        writing = Versions()
        writing.ending = True
        for version in self._versions.values():
            writing.add(version.order, [each.content for each in version.memories])
        while self._versions and self._orders.empty():
            present = self._members()
            for number, version in self._versions.items():
                if present is not None:
                    writing.gone(number, [n for n, worker in enumerate(version.workers) if worker not in present])
            for outcome in writing.advance():
                self._take(outcome)
            time.sleep(_BESIDE_SECONDS)
        writing.leave()
        self._left = False

    def _finish(self, version: _Version, digest: str, error: str) -> None:
        version.outcome(digest, error)
        with self._condition:
            self._versions.pop(version.order.number, None)
            self.pool.give_back(version.memories)
            self._condition.notify_all()

    def _start_again(self, why: str) -> None:
        """Replace a writer that has ended; its versions are written by the next one."""
        self._stop()
        logger.warning("checkpoint_writer_ended reason=%s versions=%d", why, len(self._versions))
        time.sleep(_LOOK_SECONDS)
        self._send_again()

    def _send_again(self) -> None:
        for version in list(self._versions.values()):
            if version.starts >= _STARTS:
                self._finish(version, "", f"the writer has ended {version.starts} times")
            elif version.starts:
                self._orders.put(version)
                version.gone.clear()
        os.write(self._wake_write, b"x")
