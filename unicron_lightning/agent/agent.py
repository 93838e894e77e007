"""The agent: a thread with an event loop that joins session, local socket and supervision.

The main thread belongs to torchelastic. It calls the methods of `AgentThread` marked as such; everything else runs in
the agent's thread. The two share a `SharedView` under one condition, on which the main thread waits in short steps so
that its signal handlers run.

Guarantees: a worker's death is reported to the coordinator before the agent's next rendezvous; the present round's
workers are never touched because the coordinator is away; `close` leaves no thread, socket or file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from unicron_lightning import environ, wire
from unicron_lightning.agent.checks import HealthWatch, Prober
from unicron_lightning.agent.coordinator_session import CoordinatorSession, SessionHooks
from unicron_lightning.agent.embedded import EmbeddedCoordinator
from unicron_lightning.agent.injection import AgentFaults
from unicron_lightning.agent.options import AgentOptions
from unicron_lightning.agent.round_view import PickedT, RoundView, SharedView, call, registration
from unicron_lightning.agent.workers.inspection import Deaths, Inspector
from unicron_lightning.agent.workers.local_socket import LocalHooks, LocalServer
from unicron_lightning.agent.workers.memory import AgentMemory
from unicron_lightning.agent.workers.roster import Fencing, LocalWorker, Roster
from unicron_lightning.agent.workers.slot_lock import SlotGate, SlotLock
from unicron_lightning.agent.workers.supervisor import Exit, LastOutput, Supervisor, WatchedProcess, folder_of_logs
from unicron_lightning.checkpoints.files import record_of, young_records
from unicron_lightning.detection.exits import LEFT_EARLY
from unicron_lightning.errors import ConfigError, SessionRefused, UnicronError
from unicron_lightning.private_files import make_private, user_path

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.25
DEFAULT_WORKER_TIMEOUT: Final = 10.0  # seconds, until the coordinator's value is known
_GOODBYE_SECONDS: Final = 2.0
_SUCCESS_SECONDS: Final = 15.0
"""Seconds without a coordinator for which a success is kept: one that is killed at the end is back after 1 to 4 s."""
_LOOK_SECONDS: Final = 0.02
_LOOKS: Final = 50
"""Number of short waits for the last messages of a worker that has ended."""


class AgentThread:
    """One agent. Created, started, queried and closed by the main thread.

    Args:
        options: the user's options.
        num_keys: returns the number of keys in the present round's store; called in the agent's thread.
        lock: lock of the slot, if the slot has a label.
    """

    def __init__(self, options: AgentOptions, num_keys: Callable[[], int], lock: SlotLock | None = None) -> None:
        self._options = options
        self._secret = secrets.token_hex(16)
        self._worker_timeout = options.worker_timeout or DEFAULT_WORKER_TIMEOUT
        self._num_keys = num_keys
        self._scratch = ScratchFolder()
        self._shared = SharedView()
        self._roster = Roster()
        self._deaths = Deaths()
        self._output = LastOutput(folder_of_logs())
        self._health = HealthWatch(self._told_reading)
        self._reading: wire.NodeReading | None = None
        self._embedded = EmbeddedCoordinator(options)
        self._supervisor = Supervisor(options.agent, self._on_found, self._on_exit)
        self._memory = AgentMemory(self._scratch.path, self._send)
        self._inspector = Inspector(self._scratch.path, self._supervisor, self._send)
        self._prober = Prober(self._send)
        self._local = LocalServer(
            self.socket_path,
            LocalHooks(accept=self._accept, received=self._from_worker, left=self._roster.leaves),
        )
        self._gate = SlotGate(lock, self._goes_on, self._local.send)
        self._undecided: set[str] = set()
        """Workers that have ended with status 0 in the middle of a run: unread messages may explain it."""
        self._leaving = False
        self._failed = False
        self._said_bye = False
        self._succeeded = False
        self._store_evidence = False
        self._loop = asyncio.new_event_loop()
        self._fencing = Fencing(self._roster, self._loop.call_later, self._supervisor.kill)
        self._closing = asyncio.Event()
        self._session = CoordinatorSession(
            options.url,
            options.access,
            options.connect_timeout,
            SessionHooks(
                register=self._register,
                received=self._from_coordinator,
                nothing_listens=self._nothing_listens,
                not_answering=self._not_answering,
            ),
        )
        self._faults = AgentFaults(self._supervisor.kill, self._local.send, self._session.cut)
        self._thread = threading.Thread(target=self._run, name="unicron-agent", daemon=True)

    # ---- main thread -----------------------------------------------------------------------------------------------

    @property
    def socket_path(self) -> Path:
        """Path of the socket that workers connect to."""
        return self._scratch.path / "socket"

    @property
    def view(self) -> RoundView:
        """The present round."""
        return self._shared.now

    def start(self) -> None:
        """[main thread] Start the agent's thread."""
        self._thread.start()

    def begin_round(self, store: wire.Address) -> int:
        """[main thread] Request a grant, with all workers stopped; return the new round's number."""
        number = self._shared.now.number + 1
        self._call(self._begin_round, number, store)
        return number

    def announce_local_world(self, size: int) -> None:
        """[main thread] Report the number of workers that torchelastic is about to start."""
        self._call(self._announce_local_world, size)

    def wait(self, pick: Callable[[RoundView], PickedT | None], seconds: float | None = None) -> PickedT | None:
        """[main thread] Wait for a condition of the view; see `SharedView.wait`."""
        return self._shared.wait(pick, seconds)

    def away_seconds(self) -> float:
        """[main thread] Return the seconds since the session was lost; 0 if it is open."""
        return self._session.away_seconds

    def leaving(self) -> None:
        """[any thread] Treat workers that end from now on as stopped on order: their siblings are not killed."""
        self._leaving = True

    @property
    def may_depart(self) -> bool:
        """[any thread] Whether workers of this round take part in a task, and can leave it in order."""
        view = self._shared.now
        return view.grant is not None and not view.grant.warm and view.over is None and view.fatal is None

    def depart(self) -> None:
        """[signal handler] Ask the coordinator to let the workers leave at the next step boundary."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._send, wire.Departing())

    def say_bye(self, *, succeeded: bool) -> None:
        """[main thread] Report that the agent exits; sent only once."""
        if not self._said_bye:
            self._said_bye = True
            self._call(self._say_bye, succeeded)

    @property
    def failed(self) -> bool:
        """[any thread] Whether a worker of this round has failed."""
        return self._failed

    def close(self) -> None:
        """[main thread] End the thread and remove everything; queued messages get a moment to be sent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop ended by itself meanwhile
                self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_SUCCESS_SECONDS + 5.0)
        self._scratch.close()

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        call(self._loop, self._thread, function, *arguments)

    # ---- agent's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except UnicronError as error:
            self._shared.update(fatal=error)
        # Supervisor boundary of this thread: any failure must end torchelastic's wait with a message.
        except Exception as error:
            logger.exception("agent_thread_broke agent=%s", self._options.agent)
            self._shared.update(fatal=UnicronError(f"the agent's thread broke: {error!r}"))
        finally:
            self._loop.close()

    async def _main(self) -> None:
        await self._local.start()
        self._memory.start()
        self._reading = await self._loop.run_in_executor(None, self._health.start)
        keeping_up = asyncio.create_task(self._keep_session())
        ticking = asyncio.create_task(self._tick())
        try:
            await self._closing.wait()
            await self._take_leave()
        finally:
            for task in (ticking, keeping_up):
                task.cancel()
            await asyncio.gather(ticking, keeping_up, return_exceptions=True)
            self._gate.close()
            self._inspector.close()
            await self._prober.close()
            self._memory.close()
            self._supervisor.close()
            self._deaths.close()
            self._health.close()  # not in an executor: at the end of the interpreter there is none
            await self._local.close()
            self._embedded.release()

    async def _take_leave(self) -> None:
        """Wait until the coordinator has answered the goodbye, for as long as that is worth it."""
        since = time.monotonic()
        while not await self._session.ended(_LOOK_SECONDS):
            if self._leaves_unanswered(time.monotonic() - since):
                logger.log(logging.WARNING if self._succeeded else logging.DEBUG, "goodbye_unanswered")
                return

    def _leaves_unanswered(self, waited: float) -> bool:
        """Whether to exit though the coordinator has not answered for ``waited`` seconds.

        A coordinator detects a failure without the goodbye, but one that misses a success runs the task again. Whether
        this agent is the only one is not known: the first one's grant was for a world of one.
        """
        away = self._session.away_seconds
        if away == 0.0:
            return waited > _GOODBYE_SECONDS
        view = self._shared.now
        alone = view.over is not None or view.fatal is not None or view.grant is None or self._options.max_nodes == 1
        return alone or not self._succeeded or away > _SUCCESS_SECONDS

    async def _keep_session(self) -> None:
        """Keep the session; if it ends permanently, notify the main thread, while workers are still served."""
        try:
            await self._session.run()
        except UnicronError as error:
            # Without workers, torchrun ends at once with this very error.
            level = logging.DEBUG if self._shared.now.grant is None else logging.ERROR
            logger.log(level, "session_ended agent=%s reason=%s", self._options.agent, error)
            self._shared.update(fatal=error)

    async def _nothing_listens(self) -> None:
        if self._options.embedded and not self._said_bye:
            await self._embedded.ensure()

    def _not_answering(self) -> None:
        if self._options.embedded and not self._said_bye:
            self._embedded.end_if_stopped()

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            # If this loop could not run, e.g. in a stalled virtual machine, workers' heartbeats are unread.
            if (late := now - last - TICK_SECONDS) > 1.0:
                self._roster.excuse(late)
            last = now
            for worker in [] if self._leaving else self._roster.silent(now, self._worker_timeout):
                self._give_up(worker, "silent")
            self._look_for_store_use()
            self._embedded.reap()

    def _told_reading(self, reading: wire.NodeReading) -> None:
        """[the watch's thread] Pass on a new reading."""
        self._loop.call_soon_threadsafe(self._read, reading)

    def _read(self, reading: wire.NodeReading) -> None:
        self._reading = reading
        self._send(reading)

    def _say_bye(self, succeeded: bool) -> None:
        if self._undecided:
            self._loop.call_later(_LOOK_SECONDS, self._say_bye, succeeded)
            return
        self._succeeded = succeeded and not self._failed
        self._send(wire.Bye(succeeded=self._succeeded))

    def _send(self, message: wire.Message) -> None:
        if isinstance(message, wire.WorkerDied | wire.RendezvousBegin):
            self._memory.report()  # first what the workers have handed over
        self._session.send(message)

    # ---- rounds

    def _begin_round(self, number: int, store: wire.Address) -> None:
        assumed = self._assumed_exit()
        unseen = self._supervisor.end_round(assumed)
        for worker in self._roster.names:  # ended before it was found
            self._on_exit(worker, assumed)
        for rank, how in unseen.items():  # and before it could send anything
            worker = environ.worker_id(self._options.agent, rank, self._shared.now.number)
            self._roster.add(worker, rank)
            self._on_exit(worker, how)
        self._shared.update(number=number, store=store, local_world=None, grant=None, ranks=None, stop=None)
        self._failed = False
        self._gate.begin_round()
        self._fencing.begin_round()
        self._store_evidence = False
        self._send(wire.RendezvousBegin(round=number, store=store))

    def _assumed_exit(self) -> Exit:
        """Assume the exit of a worker whose status torchelastic has collected."""
        stopped = self._leaving or self._shared.now.stop is not None
        return Exit(cause="signal", code=signal.SIGTERM) if stopped else Exit(cause="exit", code=1)

    def _announce_local_world(self, size: int) -> None:
        self._shared.update(local_world=size)
        self._send(wire.LocalWorld(round=self._shared.now.number, size=size))
        self._output.begin(size)
        self._supervisor.expect(self._shared.now.number, size)

    def _look_for_store_use(self) -> None:
        """Detect keys in the round's store without a hello: the script makes its process group by ``env://``."""
        view = self._shared.now
        if self._store_evidence or view.grant is None or self._roster.any_hello or self._roster.epoch:
            return
        if self._num_keys() > 0:
            self._store_evidence = True
            self._send(wire.StoreUsed(round=view.number))

    # ---- coordinator

    def _register(self) -> wire.Register:
        for message in self._roster.unanswered():
            self._send(message)
        own = (self._roster, self._reading, self._secret, self._memory.copies)
        return registration(self._options, self._shared.now, *own)

    def _from_coordinator(self, message: wire.ToAgent) -> None:
        view = self._shared.now
        match message:
            case wire.Registered():
                self._worker_timeout = self._options.worker_timeout or message.worker_timeout or self._worker_timeout
                self._embedded.met(started_by_agent=message.started_by_agent)
            case wire.Grant() if message.round == view.number and (view.grant is None or view.grant.warm):
                self._shared.update(grant=message)
            case wire.Ranks() if message.round == view.number:
                self._shared.update(ranks=message)
            case wire.Barred():
                logger.warning("node_barred agent=%s reason=%r", self._options.agent, message.reason)
            case wire.Stop():
                self._stop(message)
            case wire.Refused():
                raise SessionRefused(message.reason)
            case wire.Fence():
                self._fence(message)
            case wire.TaskOver():
                self._shared.update(over=message)
                if not message.succeeded:  # workers of plain scripts are not notified otherwise
                    self._stop(wire.Stop(reason="the task was ended"))
                self._local.broadcast(message)
            case wire.Welcome():
                self._gate.welcome(message)
            case wire.LookupReply():
                self._roster.saw_reply(message)
                self._local.send(message.worker, message)
            case wire.Epoch() | wire.EpochChange():
                self._take_epoch(message)
            case wire.Go() | wire.Notice():
                self._roster.saw(message)
                self._local.broadcast(message)
            case wire.ActivityQuery():
                self._inspector.asked(self._roster.names)
                self._local.broadcast(message)
            case wire.Inject() | wire.FaultRecorded():
                self._faults.take(message)
            case wire.Inspect():
                self._inspector.begin(message)
            case wire.Probe():
                self._prober.begin(message)
            case wire.StateComplete():
                self._memory.complete(message.version)

    def _take_epoch(self, message: wire.Epoch | wire.EpochChange) -> None:
        """Forward an epoch to the workers; request the whole if the change is not one of the newest epoch here."""
        epoch = self._roster.whole(message)
        if epoch is None:
            self._send(wire.EpochWanted(epoch=self._roster.epoch))
            return
        self._roster.saw_epoch(epoch)
        self._local.broadcast(epoch, without=self._fencing)

    def _fence(self, fence: wire.Fence) -> None:
        if not fence.worker.startswith(f"{self._options.agent}/"):
            return
        logger.warning("worker_fenced worker=%s reason=%s", fence.worker, fence.reason)
        self._fencing.fence(fence.worker)

    def _stop(self, order: wire.Stop) -> None:
        """Have torchelastic stop the workers of this round, if it has any."""
        view = self._shared.now
        if view.grant is not None:
            logger.warning("stop_ordered agent=%s reason=%s", self._options.agent, order.reason)
            self._shared.update(stop=order)
            allowed = self._options.stop_timeout if order.seconds is None else order.seconds
            self._loop.call_later(allowed, self._kill_stopping, view.number)

    def _kill_stopping(self, number: int) -> None:
        """Kill workers that ignore SIGTERM: torchelastic would wait 30 s."""
        if self._shared.now.number == number and self._shared.now.stop is not None:
            for worker in self._roster.staying:
                self._supervisor.kill(worker)

    # ---- workers

    def _accept(self, message: wire.WorkerHello | wire.ErrorReport) -> bool:
        """Whether the message is from one of the present round's workers."""
        view = self._shared.now
        ranks = range(view.local_world or 0)
        mine = {environ.worker_id(self._options.agent, rank, view.number): rank for rank in ranks}
        rank = mine.get(message.worker or "")
        return rank is not None and rank == getattr(message, "local_rank", rank)

    def _goes_on(self, worker: str) -> bool:
        return worker in self._roster and self._shared.now.stop is None

    def _from_worker(self, worker: str, message: wire.FromWorker) -> None:
        if isinstance(message, wire.WorkerHello):
            self._roster.add(worker, message.local_rank)
            self._supervisor.look_at(message.pid)
        elif isinstance(message, wire.ErrorReport) and isinstance(pid := message.details.get("pid"), int):
            self._supervisor.look_at(pid)  # sent before a hello, maybe before the worker was found
        if worker not in self._roster:  # its death is already reported, so earlier messages no longer count
            return
        self._roster.heard(worker, message, time.monotonic())
        self._inspector.heard(worker)
        if isinstance(message, wire.ErrorReport | wire.Training):
            self._fencing.heard(worker)
        if isinstance(message, wire.Imported):
            now = self._shared.now
            known = now.set_by_script or frozenset()
            self._shared.update(
                set_by_script=known.union(message.changed), lightning=now.lightning or message.lightning
            )
        if isinstance(message, wire.Heartbeat | wire.Imported | wire.Training):
            return
        if isinstance(message, wire.StateWanted):
            self._local.send(worker, self._memory.given())
            return
        if isinstance(message, wire.WorkerHello) and self._shared.now.over is not None:
            self._local.send(worker, self._shared.now.over)
            return
        self._send(self._deaths.explain(message) if isinstance(message, wire.ErrorReport) else message)

    def _on_found(self, process: WatchedProcess) -> None:
        self._roster.add(process.worker, process.local_rank)
        self._deaths.found(process.pid)
        self._fencing.found(process.worker)

    def _on_exit(self, worker: str, how: Exit, looks: int = _LOOKS) -> None:
        early = how.is_clean and self._roster.trains(worker) and (worker in self._undecided or not self._leaving)
        if early and looks and not self._roster.has_left(worker):  # its last messages may be unread
            self._undecided.add(worker)
            self._loop.call_later(_LOOK_SECONDS, self._on_exit, worker, how, looks - 1)
            return
        self._undecided.discard(worker)
        known = self._roster.remove(worker)
        if known is None:  # reported when it was declared dead
            return
        early = early and not (known.done or self._shared.now.over)
        if early:
            how = replace(how, code=LEFT_EARLY)  # a success for torchelastic, but not for the task
        logger.info("worker_ended worker=%s cause=%s code=%d", worker, how.cause, how.code)
        self._failed = self._failed or early or not (how.is_clean or self._leaving)
        output = self._output.lines(known.local_rank) if known.hello is None and not how.is_clean else ()
        if not how.is_clean:
            self._report_checkpoint(known)
        self._send(self._deaths.tell(worker, how, output))
        if not how.is_clean:
            self._give_up_siblings()

    def _report_checkpoint(self, known: LocalWorker) -> None:
        """Report a checkpoint that a dead worker has completed, but has not reported itself."""
        left = record_of(self._scratch.path, known.hello.pid) if known.hello is not None else None
        reported = (known.saved.path, known.saved.digest) if known.saved is not None else None
        if left is not None and (left.path, left.digest) != reported:
            self._send(
                wire.CheckpointSaved(
                    worker=known.worker,
                    path=left.path,
                    step=left.step,
                    digest=left.digest,
                    bytes=left.bytes,
                    fit=left.fit,
                )
            )

    def _give_up(self, worker: str, cause: Any) -> None:
        """Declare a live worker dead and kill it."""
        known = self._roster.remove(worker)
        if known is None:
            return
        logger.warning("worker_given_up worker=%s cause=%s", worker, cause)
        self._supervisor.kill(worker)
        self._report_checkpoint(known)
        if not known.done:
            self._send(wire.WorkerDied(worker=worker, cause=cause, code=signal.SIGKILL, at=time.time()))
        if cause == "silent":
            self._give_up_siblings()

    def _give_up_siblings(self) -> None:
        """Kill siblings without an error of their own: torchelastic restarts all, but waits up to 30 s for SIGTERM."""
        if not self._leaving and self._shared.now.stop is None:
            for sibling in self._roster.staying:
                self._give_up(sibling, "signal")


_LOCK: Final = "lock"
_PREFIX: Final = "agent-"
_MOST_BYTES: Final = 107 - len(f"/{_PREFIX}12345678/socket")
"""Longest path of the folder's parent: the kernel allows 107 bytes for that of a UNIX socket."""


class ScratchFolder:
    """A folder of mode 0700 that exists until `close`; a lock in it shows others that it is in use.

    Raises:
        ConfigError: the path of the folder for temporary files is too long.
    """

    def __init__(self) -> None:
        if len(os.fsencode(user_path())) > _MOST_BYTES:
            raise ConfigError(
                f"TMPDIR={user_path().parent}: too long for a socket in {user_path().name}/; expected at most "
                f"{_MOST_BYTES - len(user_path().name) - 1} bytes"
            )
        parent = make_private(user_path())
        sweep(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            lock = self.path / _LOCK
            self._lock = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if lock.exists():  # otherwise another agent removed it before it was locked
                return
            os.close(self._lock)

    def close(self) -> None:
        """Remove the folder."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> None:
    """Remove the folders of agents that no longer live, but for a day the records of checkpoints in them."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                records = young_records(folder)
                for place in set(folder.iterdir()) - {*records, folder / _LOCK} if records else {folder}:
                    if place.is_dir():
                        shutil.rmtree(place, ignore_errors=True)
                    else:
                        place.unlink()
            finally:
                os.close(lock)
