"""The worker's end of the control plane: one UNIX socket to its agent, and one light thread on the CPU.

The thread keeps the newest epoch, wakes its waiters, notifies the engine of a failure at once (so that blocked
collectives are aborted) and sends heartbeats. Without an agent no `Control` exists: the world is this process alone.
An end of file on the socket means that the agent has died, and ends the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any, Final

import msgspec

from unicron_lightning import wire
from unicron_lightning.autoload import LIGHTNING
from unicron_lightning.prepared import set_by_script
from unicron_lightning.worker.control.monitor import Monitor

logger = logging.getLogger(__name__)

EXIT_EXPELLED: Final = 75
"""Exit status of a worker that was declared dead while alive; its agent restarts it."""
EXIT_AGENT_LOST: Final = 76
HEARTBEAT_SECONDS: Final = 1.0


def _leave(status: int) -> None:
    """End the process at once: neither Python's finalisers nor gloo's destructors may delay a fenced worker."""
    logging.shutdown()
    os._exit(status)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the process at once, whatever handler is installed. Does nothing outside the main thread."""
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL) if in_main else None
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


class Control:
    """Connection of one worker to its agent.

    Args:
        path: the agent's UNIX socket.
        worker: this worker's identity.
        local_rank: place among the agent's workers.
        on_failure: called from the control thread with each new epoch of kind ``fail``; must not block.
        monitor: used by the control thread to watch the training thread.
    """

    def __init__(
        self,
        path: str,
        worker: str,
        local_rank: int,
        on_failure: Callable[[wire.Epoch], None],
        monitor: Monitor | None = None,
    ) -> None:
        self.worker = worker
        self.path = path
        self.local_rank = local_rank
        self.is_member = False
        self.condition = threading.Condition()
        self.fit = 0
        """Number of the script's ``fit`` call, sent with the progress."""
        self.flops_per_step: float | None = None
        """Model FLOPs of a step, sent with the progress."""
        self.listeners: list[Callable[[wire.Notice], None]] = []
        """Called with each notice, and with this worker's own events in the same form; from any thread, must
        not block.
        """
        self._on_failure = on_failure
        self._monitor = monitor
        self._latest: wire.Epoch | None = None
        self._went: dict[int, wire.Go] = {}
        self._welcome: wire.Welcome | None = None
        self._replies: dict[str, wire.LookupReply] = {}
        self._noted: dict[str, wire.FaultRecorded] = {}
        self._given: wire.StateGiven | None = None
        self.on_order: Callable[[wire.Inject], None] = lambda order: None
        """Called from the control thread with each fault ordered by an operator; must not block."""
        self._progress: wire.Progress | None = None
        self._closed = False
        self._ending = False
        self._idle = False
        """Whether the training thread waits for the end of the task."""
        self._over = False
        self._write_lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="unicron-control", daemon=True)
        self._thread.start()

    # ---- called by the training thread

    @property
    def welcome(self) -> wire.Welcome:
        """The coordinator's newest welcome of this worker."""
        assert self._welcome is not None, "hello() first"
        return self._welcome

    @property
    def latest(self) -> wire.Epoch | None:
        """Newest epoch received."""
        return self._latest

    def newer_than(self, number: int) -> wire.Epoch | None:
        """The newest epoch if it is newer than ``number``."""
        latest = self._latest
        return latest if latest is not None and latest.number > number else None

    @property
    def is_ending(self) -> bool:
        """Whether this worker has reported an error that ends it."""
        return self._ending

    def failed_since(self, number: int) -> bool:
        """Whether work of epoch ``number`` must stop now. A planned change waits for a step boundary instead."""
        latest = self._latest
        return latest is not None and latest.number > number and latest.kind not in wire.PLANNED

    def hello(self, capacity: int, granularity: int | None = None, port: int = 0) -> None:
        """Announce the worker; see `wire.WorkerHello`."""
        self.send(
            wire.WorkerHello(
                worker=self.worker,
                local_rank=self.local_rank,
                pid=os.getpid(),
                capacity=capacity,
                granularity=granularity,
                port=port,
            )
        )
        if (changed := set_by_script.noted()) is not None:
            lightning = not sys.modules.keys().isdisjoint(LIGHTNING)
            self.send(wire.Imported(worker=self.worker, changed=tuple(sorted(changed)), lightning=lightning))

    def wait_welcome(self) -> wire.Welcome:
        """Wait for the coordinator's welcome (as founder or joiner), which follows once the agent has a slot.

        Meanwhile SIGTERM ends the process, whatever handler the script has installed.
        """
        with terminable(), self.condition:
            self.condition.wait_for(lambda: self._welcome is not None)
        return self.welcome

    def wait_newer(self, number: int) -> None:
        """Wait until an epoch newer than ``number`` is known."""
        with self.condition:
            self.condition.wait_for(lambda: self.newer_than(number) is not None)

    def stand_aside(self, number: int) -> None:
        """Wait, outside the task after a planned change, for an epoch with this worker, by which the change is
        cancelled.

        Otherwise SIGTERM ends the process at once, although Lightning's handler would only record it.
        """
        with terminable():
            self.wait_newer(number)

    def wait_over(self) -> None:
        """Wait for the end of the task, after the end of a script in which this worker has not become a member.

        The members have all its results. If none of them survives, all workers start again, this one as well. An error
        that ends the process ends the wait.
        """
        if self._ending:
            return
        self._idle = True
        self.send(wire.WorkerReady(worker=self.worker, epoch=0, state={"idle": True}))
        with terminable(), self.condition:
            self.condition.wait_for(lambda: self._over)

    def wait_go(self, number: int) -> wire.Go | None:
        """Wait until all members are ready for epoch ``number``; return None if a newer epoch came first."""
        with self.condition:
            self.condition.wait_for(lambda: number in self._went or self.newer_than(number) is not None)
            return self._went.pop(number, None)

    def lookup(self, key: str) -> str | None:
        """The value recorded under ``key`` in this life of the task, None if none was recorded."""
        self.send(wire.Lookup(worker=self.worker, key=key))
        with self.condition:
            self.condition.wait_for(lambda: key in self._replies)
            return self._replies.pop(key).value

    def held(self, seconds: float) -> wire.StateGiven | None:
        """The copies in the agent's memory; None without an answer within ``seconds``."""
        self.send(wire.StateWanted(worker=self.worker))
        with self.condition:
            self.condition.wait_for(lambda: self._given is not None, seconds)
            given, self._given = self._given, None
            return given

    def claim(self, fault: wire.FaultDue, seconds: float) -> wire.FaultRecorded | None:
        """Request permission for a fault on purpose; return None without an answer within ``seconds``."""
        self.send(fault)
        with self.condition:
            self.condition.wait_for(lambda: fault.claim in self._noted, seconds)
            return self._noted.pop(fault.claim, None)

    def ready(self, epoch: int, state: dict[str, Any]) -> None:
        """Report that this worker waits for ``epoch`` (0: for its admission)."""
        self.send(wire.WorkerReady(worker=self.worker, epoch=epoch, state=state))

    def event(self, name: str, **fields: Any) -> None:
        """Add a line to the task's event log."""
        event = wire.WorkerEvent(worker=self.worker, name=name, at=time.time(), fields=fields)
        self.send(event)
        self._tell(wire.Notice(name=f"worker.{name}", at=event.at, incident=None, fields=fields))

    def report(
        self, kind: str, cause: str, *, phase: str, step: int | None, details: dict[str, Any], ends: bool = False
    ) -> None:
        """Report an error of this worker, see `wire.ErrorReport`.

        An error that ends the process (``ends``) is reported once, and the first one counts. From then on no message
        ends the process before it has written its diagnostics; its agent stops it if this takes too long.
        """
        if self._ending:
            return
        self._ending = ends
        self._tell_progress()  # the report needs the newest progress
        self.send(
            wire.ErrorReport(
                worker=self.worker,
                kind=kind,
                cause=cause,
                phase=phase,
                step=step,
                at=time.time(),
                details=details,
                ends=ends,
            )
        )

    def progress(self, step: int, metrics: Mapping[str, float], num_samples: int | None = None) -> None:
        """Set the progress after the last finished step; the control thread sends it within a second."""
        self._progress = wire.Progress(
            worker=self.worker,
            step=step,
            metrics=dict(metrics),
            at=time.time(),
            flops_per_step=self.flops_per_step,
            fit=self.fit,
            samples_per_step=num_samples,
        )

    def record(self, key: str, value: str, epoch: int, *, lasting: bool = False) -> None:
        """Record a value of the worker's epoch for workers that join later, and if it is lasting for later lives."""
        self.send(wire.Record(key=key, value=value, epoch=epoch, lasting=lasting))

    def send(self, message: wire.Message) -> None:
        """Send a message; if the agent is gone the process is about to end and nothing is raised."""
        data = wire.encode(message) + b"\n"
        try:
            with self._write_lock:
                self._socket.sendall(data)
        except OSError as error:
            logger.debug("control_send_failed error=%s", error)

    def close(self) -> None:
        """End the thread and the connection."""
        if self._closed:
            return
        self._tell_progress()
        self._closed = True
        os.write(self._wake_write, b"x")
        self._thread.join()
        self._socket.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ---- the control thread

    def _run(self) -> None:
        buffer = bytearray()
        next_beat = time.monotonic()
        while not self._closed:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + HEARTBEAT_SECONDS
                self._beat()
            pause = next_beat - now
            if self._monitor is not None:
                pause = min(pause, self._watch(self._monitor))
            sources: list[socket.socket | int] = [self._socket, self._wake_read]
            readable = wait(sources, max(0.0, pause))  # of any number: select() takes descriptors below 1024
            if self._socket not in readable:
                continue
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                if not self._closed:
                    _leave(EXIT_AGENT_LOST)
                return
            buffer += data
            while (end := buffer.find(b"\n")) >= 0:
                line = bytes(buffer[:end])
                del buffer[: end + 1]
                self._receive(line)

    def _beat(self) -> None:
        self.send(wire.Heartbeat())
        self._tell_progress()

    def _tell_progress(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            pace = None if self._monitor is None else self._monitor.pace()
            self.send(msgspec.structs.replace(progress, pace=pace))

    def _watch(self, monitor: Monitor) -> float:
        """Check the training thread; return the seconds until the next check."""
        pause, doing = monitor.tick()
        if doing is not None:
            self.send(doing)
        return pause

    def _receive(self, line: bytes) -> None:
        try:
            message = wire.decode_to_worker(line)
        except msgspec.DecodeError as error:
            logger.error("control_message_refused error=%s", error)
            return
        if isinstance(message, wire.Notice):
            self._tell(message)
            return
        with self.condition:
            match message:
                case wire.Epoch():
                    if self._concerns_me(message):
                        self._latest = message
                        if message.kind == "leave" and not self._is_in(message):
                            self.is_member = False  # later epochs do not concern this worker
                case wire.Go():
                    self._went[message.epoch] = message
                    if self._latest is not None and self._latest.number == message.epoch and self._is_in(self._latest):
                        # Set now, not when the training thread wakes: an epoch without this worker may follow at once.
                        self.is_member = True
                case wire.Welcome():
                    self._welcome = message
                case wire.LookupReply():
                    self._replies[message.key] = message
                case wire.FaultRecorded():
                    self._noted[message.claim] = message
                case wire.StateGiven():
                    self._given = message
                case wire.TaskOver():
                    self._over = message.succeeded
            self.condition.notify_all()
        if self._monitor is not None and isinstance(message, wire.ActivityQuery):
            self.send(self._monitor.look())
        elif self._monitor is not None and isinstance(message, wire.Welcome):
            self._monitor.limit(message.watch)
        if isinstance(message, wire.Epoch):
            self._judge(message)
        elif isinstance(message, wire.Inject):
            self.on_order(message)
        elif isinstance(message, wire.TaskOver) and not (
            self._ending or (message.succeeded and (self.is_member or self._idle))
        ):
            # Members of a cancelled task exit at once: a step that only some of them begin would never end.
            _leave(0 if message.succeeded else 1)

    def _tell(self, notice: wire.Notice) -> None:
        for listener in list(self.listeners):
            listener(notice)

    def _concerns_me(self, epoch: wire.Epoch) -> bool:
        """Whether the epoch is newer, and this worker is a member of it or of the epoch before."""
        newer = self._latest is None or epoch.number > self._latest.number
        return newer and (self.is_member or self._is_in(epoch))

    def _is_in(self, epoch: wire.Epoch) -> bool:
        return any(member.worker == self.worker for member in epoch.members)

    def _judge(self, epoch: wire.Epoch) -> None:
        """Exit if this worker was expelled; otherwise have the collectives of older epochs aborted."""
        if self.is_member and not self._is_in(epoch) and not self._ending:
            logger.error("worker_expelled worker=%s epoch=%d", self.worker, epoch.number)
            _leave(EXIT_EXPELLED)
        if epoch.kind not in wire.PLANNED:
            self._on_failure(epoch)
