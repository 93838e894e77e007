"""The agent's record of its workers. No I/O and no clock: times are passed in, in seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from unicron_lightning import wire
from unicron_lightning.wire.epoch_changes import EpochMissed, changed
from unicron_lightning.worker.siblings import HOOKS_SECONDS

logger = logging.getLogger(__name__)

ENDING_SECONDS: Final = 30.0
"""Seconds that a worker's process may take to exit after closing its connection, however short the time-out is."""


@dataclass(frozen=True, kw_only=True)
class LocalWorker:
    """A live worker of the present round."""

    worker: str
    local_rank: int
    hello: wire.WorkerHello | None = None
    ready: wire.WorkerReady | None = None
    replicas: wire.Replicas | None = None
    saved: wire.CheckpointSaved | None = None
    """The last checkpoint that it has reported."""
    member: bool = False
    """Whether it has reported for an epoch."""
    done: bool = False
    training: bool = False
    """Whether a run of its trainer is in progress, so that its script has not ended."""
    heard_at: float = 0.0
    """Time of its last message; counts only after its hello."""
    left: bool = False
    """Whether it has closed its connection because its process is ending."""
    ends: bool = False
    """Whether it has reported an error that ends its process."""


class Roster:
    """The live workers of one agent and their open lookups."""

    def __init__(self) -> None:
        self._workers: dict[str, LocalWorker] = {}
        self._lookups: dict[tuple[str, str], wire.Lookup] = {}
        self.epoch = 0
        """Newest epoch seen."""
        self.went = 0
        """Newest epoch whose `wire.Go` was received."""
        self._newest: wire.Epoch | None = None

    def __contains__(self, worker: object) -> bool:
        return worker in self._workers

    @property
    def names(self) -> list[str]:
        """The live workers."""
        return list(self._workers)

    @property
    def staying(self) -> list[str]:
        """The live workers but those that end by an error of their own."""
        return [name for name, each in self._workers.items() if not each.ends]

    @property
    def any_hello(self) -> bool:
        """Whether a live worker has sent a hello: the script recovers in process."""
        return any(each.hello is not None for each in self._workers.values())

    @property
    def any_ends(self) -> bool:
        """Whether a live worker has reported an error that ends its process."""
        return any(each.ends for each in self._workers.values())

    def runs_error_hooks(self, worker: str) -> bool:
        """Whether a worker that ends by an error may still run its trainer's hooks."""
        return self.ends(worker) and self._workers[worker].training

    def ends(self, worker: str) -> bool:
        """Whether a live worker has reported an error that ends its process."""
        return worker in self._workers and self._workers[worker].ends

    def add(self, worker: str, local_rank: int) -> None:
        """Add a worker that was found, or sent its hello before it was found."""
        self._workers.setdefault(worker, LocalWorker(worker=worker, local_rank=local_rank))

    def remove(self, worker: str) -> LocalWorker | None:
        """Remove a worker; return None if it is unknown or was removed before."""
        self._lookups = {key: lookup for key, lookup in self._lookups.items() if key[0] != worker}
        return self._workers.pop(worker, None)

    def heard(self, worker: str, message: wire.FromWorker, now: float) -> None:
        """Record a worker's message."""
        known = replace(self._workers[worker], heard_at=now)
        match message:
            case wire.WorkerHello():
                known = replace(known, hello=message, ready=None, left=False)
            case wire.WorkerReady() if not 0 < message.epoch < self.epoch:
                known = replace(known, ready=message, member=known.member or message.epoch > 0)
            case wire.Replicas():
                known = replace(known, replicas=message)
            case wire.CheckpointSaved():
                known = replace(known, saved=message)
            case wire.WorkerDone():
                known = replace(known, done=True)
            case wire.Training():
                known = replace(known, training=message.active)
            case wire.ErrorReport() if message.ends:
                known = replace(known, ends=True)
            case wire.Lookup():
                self._lookups[worker, message.key] = message
        self._workers[worker] = known

    def leaves(self, worker: str) -> None:
        """Record that a worker has closed its connection: its process is about to end."""
        if worker in self._workers:
            self._workers[worker] = replace(self._workers[worker], left=True)

    def trains(self, worker: str) -> bool:
        """Whether a run of the worker's trainer is in progress, or was ended by an error."""
        return worker in self._workers and (self._workers[worker].training or self._workers[worker].ends)

    def has_left(self, worker: str) -> bool:
        """Whether the worker's connection has ended, so that all its messages have arrived."""
        return worker in self._workers and self._workers[worker].left

    def whole(self, message: wire.Epoch | wire.EpochChange) -> wire.Epoch | None:
        """Return the epoch that a message describes; None if it is a change of another epoch than the newest here."""
        if isinstance(message, wire.Epoch):
            return message
        try:
            return changed(self._newest, message)
        except EpochMissed as error:
            logger.warning("epoch_missed epoch=%d reason=%s", message.number, error)
            return None

    def saw_epoch(self, epoch: wire.Epoch) -> None:
        """Discard reports of the epoch's members that it makes outdated; candidates keep theirs."""
        if epoch.number >= self.epoch:
            self.epoch, self._newest = epoch.number, epoch
        members = {member.worker for member in epoch.members}
        for name, known in self._workers.items():
            ready = known.ready
            if ready is not None and ready.epoch < epoch.number and (ready.epoch > 0 or name in members):
                self._workers[name] = replace(known, ready=None)

    def saw(self, message: wire.Go | wire.Notice) -> None:
        """Record that an epoch's work has begun."""
        self.went = max(self.went, message.epoch) if isinstance(message, wire.Go) else self.went

    def saw_reply(self, reply: wire.LookupReply) -> None:
        """Record the answer to a lookup."""
        self._lookups.pop((reply.worker, reply.key), None)

    def silent(self, now: float, timeout: float) -> list[str]:
        """Return workers that have sent a hello but no message for ``timeout`` seconds.

        Workers that are exiting (an interpreter with torch takes a second or more for it) are given `ENDING_SECONDS`.
        """
        return [
            each.worker
            for each in self._workers.values()
            if each.hello is not None
            and not each.done
            and now - each.heard_at > (max(timeout, ENDING_SECONDS) if each.left else timeout)
        ]

    def excuse(self, seconds: float) -> None:
        """Extend the time limit of all workers: the agent itself could not receive."""
        for name, each in self._workers.items():
            self._workers[name] = replace(each, heard_at=each.heard_at + seconds)

    def infos(self) -> list[wire.WorkerInfo]:
        """Return all live workers for a registration."""
        return [
            wire.WorkerInfo(
                worker=each.worker,
                local_rank=each.local_rank,
                hello=each.hello,
                ready=each.ready,
                replicas=each.replicas,
                member=each.member,
            )
            for each in self._workers.values()
        ]

    def unanswered(self) -> list[wire.FromWorker]:
        """Return messages to repeat in a new session: lookups, and reports of workers that wait to be restarted.

        A coordinator that could not write such a report before it ended has lost it, and the workers wait for its
        consequence.
        """
        parting = [each.saved for each in self._workers.values() if each.saved is not None and each.saved.parting]
        return [*self._lookups.values(), *parting]


SIBLING_SECONDS: Final = 1.0
"""Seconds for the siblings of a worker that ends by an error to report the same error. It needs as long to exit."""


class Later(Protocol):
    """Calls a function after some seconds, as `asyncio.AbstractEventLoop.call_later`."""

    def __call__(self, delay: float, callback: Callable[..., object], *args: Any) -> object: ...


class Fencing:
    """Kills workers that the coordinator has declared dead.

    One that ends by an error of its own may first run its callbacks, such as checkpoints.

    Args:
        roster: the agent's workers.
        later: calls a function after some seconds.
        kill: sends a worker SIGKILL, if it lives.
    """

    def __init__(self, roster: Roster, later: Later, kill: Callable[[str], None]) -> None:
        self._roster = roster
        self._later = later
        self._kill = kill
        self._fenced: set[str] = set()

    def __contains__(self, worker: object) -> bool:
        return worker in self._fenced

    def begin_round(self) -> None:
        """Forget the workers of the round before."""
        self._fenced.clear()

    def fence(self, worker: str) -> None:
        """Kill a worker, also if it is found later. A sibling of one that ends by an error gets `SIBLING_SECONDS`."""
        self._fenced.add(worker)
        if self._roster.any_ends:
            self._later(SIBLING_SECONDS, self._kill_unless_it_ends, worker)
        else:
            self._kill(worker)

    def found(self, worker: str) -> None:
        """Kill a worker whose process was found after it was fenced."""
        if worker in self._fenced:
            self._kill(worker)

    def heard(self, worker: str) -> None:
        """Limit the time of a worker that ends by an error: for its trainer's hooks, and for its exit after them."""
        if self._roster.ends(worker):
            seconds = HOOKS_SECONDS if self._roster.runs_error_hooks(worker) else ENDING_SECONDS
            self._later(seconds, self._kill, worker)

    def _kill_unless_it_ends(self, worker: str) -> None:
        if not self._roster.ends(worker):
            self._kill(worker)
