"""A worker's progress through a program of collective operations, and through epochs.

All members run the same sequence of *operations*: agreements, optimizer steps, evaluations, joins. An operation
completes on one rank only when every rank has taken part, so at any time the members' **positions** (numbers of
completed operations) differ by at most one. Recovery relies on this: after a failure the members exchange positions and
partial results. Members that are behind take the last operation's result from members that are ahead, and the operation
in progress is planned again from everything that its members have finished. Operations of one position share one epoch.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from unicron_lightning import wire
from unicron_lightning.errors import ProgramsDiffer, UnicronError
from unicron_lightning.worker.communication.background_connect import Connect, Connecting
from unicron_lightning.worker.communication.communicator import (
    STOP,
    Communicator,
    CommunicatorAborted,
    SoloCommunicator,
    WatchedCommunicator,
    broadcast_bytes,
    gather_bytes,
)
from unicron_lightning.worker.control.activity import Activity
from unicron_lightning.worker.control.thread import Control
from unicron_lightning.worker.rows import Report, ReportSum

logger = logging.getLogger(__name__)

JOIN: Final = "join"
"""Name of the operation that admits joiners."""


class EpochChanged(UnicronError):
    """The present epoch has ended; the current work must stop and the newest epoch must be entered."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The members of the epoch entered last."""

    epoch: int
    kind: wire.EpochKind
    rank: int
    size: int
    hold: bool
    nodes: tuple[str, ...] = ()
    """Nodes of the members, by rank."""
    racks: tuple[str, ...] = ()
    """Racks of the members, by rank; a node without a label is its own rack."""
    workers: tuple[str, ...] = ()
    """The members, by rank."""

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Rack and node of each member, by rank."""
        return tuple(zip(self.racks or self.nodes, self.nodes, strict=True))


class Operation(Protocol):
    """A collective activity of all members. It is planned and attempted, and again after each failure."""

    name: str

    def plan(self, reports: ReportSum, rank: int) -> None:
        """Decide this rank's part from the members' finished work of the operation."""
        ...

    def attempt(self, engine: Engine) -> bytes:
        """Do this rank's part; return the result, which is the same on all ranks.

        Raises:
            CommunicatorAborted, EpochChanged: a member failed; `plan` and `attempt` follow in a new epoch.
        """
        ...

    def suspend(self) -> None:
        """Record completed work at the end of the epoch. The communicator still exists, but waiting for it is
        forbidden.
        """
        ...

    def report(self) -> Report:
        """This rank's finished work of the operation, as plain JSON; see `wire.WorkerReady` for what is summed."""
        ...

    def adopt(self, result: bytes) -> None:
        """Take the result of a rank that has completed the operation."""
        ...


class Fabric(Protocol):
    """Further connections that the members build for each epoch, from their own descriptions."""

    @property
    def granularity(self) -> int:
        """Workers of a replica."""
        ...

    def about(self, epoch: wire.Epoch) -> Any:
        """This worker's description, as plain JSON, for the other members, after the epoch before has ended and its
        operation is suspended.
        """
        ...

    def settle(self, epoch: wire.Epoch, abouts: Sequence[Any], *, even: bool) -> None:
        """Process all members' descriptions, in rank order.

        Args:
            epoch: that follows.
            abouts: the descriptions.
            even: whether all members that have the state are in the same operation.
        """
        ...

    def connect(self, epoch: wire.Epoch, base: Communicator) -> Communicator:
        """Build the further connections of the epoch settled last; return its communicator, which closes ``base`` too.
        May block; is called in its own thread.
        """
        ...

    def abort(self, epoch: wire.Epoch) -> None:
        """From the control thread: release the training thread from waits that cannot complete because of a failure."""
        ...


class Engine:
    """Runs operations through failures.

    Args:
        control: link to the agent; None for a world of this process alone.
        connect: builds communicators.
        on_world: called with each new world, on the training thread, before any work in it.
        is_joiner: whether this worker joins a running task and thus has no state yet.
        activity: record of the training thread's activity.
        fabric: builds further connections beside the communicator, if any.

    Attributes:
        running: the name of the operation in progress.
        switch_from: the epoch that all members have agreed to leave at the next step boundary; 0 if none.
        wants_stop: whether this worker votes for the end of the run in the next commit.
        stops: whether any member has done so in the last one; the same on all.
    """

    def __init__(
        self,
        control: Control | None,
        connect: Connect,
        on_world: Callable[[World], None],
        is_joiner: bool,
        activity: Activity | None = None,
        fabric: Fabric | None = None,
    ) -> None:
        self.control = control
        self.activity = Activity() if activity is None else activity
        self.has_state = not is_joiner
        self.step = 0
        self.switch_from = 0
        self.wants_stop = self.stops = False
        self.running: str | None = None
        self.fault: Callable[..., None] = lambda *point: None
        self._connect = connect
        self._on_world = on_world
        self._fabric = fabric
        self._lock = threading.Lock()
        self._communicator: Communicator | None = None
        self._world = World(epoch=0, kind="init", rank=0, size=1, hold=False)
        self._position = 0
        self._last_result = b""
        self._interruption = ""
        self._pending: ReportSum | None = None
        self._gives_way = False
        if control is None:
            self._communicator = SoloCommunicator()

    @property
    def world(self) -> World:
        return self._world

    @property
    def communicator(self) -> Communicator:
        """The present epoch's communicator."""
        assert self._communicator is not None, "no epoch entered"
        return self._communicator

    @property
    def position(self) -> int:
        """Number of completed operations."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        self._position = value

    @property
    def reports(self) -> ReportSum:
        """The members' reported work of the next operation."""
        return self._pending or ReportSum.nothing(self._world.size)

    def follow(self, on_world: Callable[[World], None]) -> None:
        """Replace the listener for new worlds, and call it with the present one."""
        self._on_world = on_world
        on_world(self._world)

    def tag(self, name: str) -> str:
        """Name an exchange, so that members in different exchanges detect it."""
        return f"{name} {self._position}"

    def check(self) -> None:
        """Raise `EpochChanged` after a failure; called where work can be interrupted, e.g. between micro-batches."""
        if self.control is not None and self.control.failed_since(self._world.epoch):
            raise EpochChanged(f"epoch {self._world.epoch} is over")

    def abort(self, epoch: wire.Epoch) -> None:
        """From the control thread: release the training thread from collectives of older epochs."""
        with self._lock:
            if self._communicator is not None and self._world.epoch < epoch.number:
                self._communicator.abort(f"epoch {epoch.number}")
        if self._fabric is not None:
            self._fabric.abort(epoch)

    def run(self, operation: Operation) -> bytes:
        """Complete an operation, through any number of failures, and return its result.

        The operation `STOP` gives way to another one that members run at its place: nothing is completed then, and the
        result is empty.
        """
        outer, self.running = self.running, operation.name
        self.activity.operation = (self._position, operation.name)
        try:
            return self._complete(operation)
        finally:
            self.running, self.activity.operation = outer, None

    def _complete(self, operation: Operation) -> bytes:
        failed = self._communicator is None
        while True:
            try:
                if failed:
                    result = self._recover(operation)
                    if result is not None:
                        operation.adopt(result)
                        break
                    if self._gives_way:
                        return b""
                self.check()
                operation.plan(self.reports, self._world.rank)
                self._pending = None
                result = operation.attempt(self)
                break
            except (CommunicatorAborted, EpochChanged) as error:
                logger.debug("operation_interrupted name=%s reason=%s", operation.name, error)
                failed, self._interruption = True, str(error)
        self._position += 1
        self._last_result = result
        return result

    def switch(self, join: Operation) -> None:
        """At a step boundary: run ``join`` in the newest epoch, if all members have agreed to.

        A failure may have driven some members from the agreed epoch meanwhile, and others may already wait for them in
        ``join``; those members run it in their present epoch.
        """
        agreed, self.switch_from = self.switch_from, 0
        if not agreed:
            return
        if agreed == self._world.epoch and not self._world.hold and self._communicator is not None:
            self._communicator.close()
            with self._lock:
                self._communicator = None
        self.run(join)

    def close(self) -> None:
        """Release the communicator."""
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None

    # ---- entering an epoch

    def _recover(self, operation: Operation) -> bytes | None:
        """Enter the newest epoch; return the operation's result if another member has completed it already."""
        assert self.control is not None, "a world of one has no failures"
        with self.activity.during("recovery"):
            while True:
                started = time.monotonic()
                epoch = self._newest_epoch(operation)
                try:
                    if self._place(epoch) is None:
                        self._stand_aside(epoch, operation)
                    return self._enter(epoch, operation, started)
                except (CommunicatorAborted, EpochChanged) as error:
                    logger.debug("recovery_interrupted epoch=%d reason=%s", epoch.number, error)
                    self._interruption = str(error)

    def _newest_epoch(self, operation: Operation) -> wire.Epoch:
        """The epoch to enter; a pending join is entered only at a step boundary, by its own operation."""
        control, number = self.control, self._world.epoch
        assert control is not None

        def due() -> bool:
            newer = control.newer_than(number)
            at_boundary = number == 0 or operation.name == JOIN
            return newer is not None and (at_boundary or newer.kind not in wire.PLANNED or self._place(newer) is None)

        if not due() and number > 0:
            # Connections broke without a known failure so far: only the coordinator decides about failures.
            control.send(
                wire.CommError(worker=control.worker, epoch=number, error=self._interruption.partition("\n")[0][:200])
            )
        with control.condition:
            control.condition.wait_for(due)
            epoch = control.newer_than(number)
        assert epoch is not None
        return epoch

    def _place(self, epoch: wire.Epoch) -> int | None:
        """This worker's rank in an epoch, None if it is not a member."""
        assert self.control is not None
        return next((i for i, member in enumerate(epoch.members) if member.worker == self.control.worker), None)

    def _stand_aside(self, epoch: wire.Epoch, operation: Operation) -> None:
        """Wait while the others continue without this worker, keeping its state in case they fail; then raise."""
        assert self.control is not None
        operation.suspend()
        self.close()
        self.control.ready(epoch.number, self._state(operation))
        self.control.stand_aside(epoch.number)
        raise EpochChanged(f"epoch {epoch.number} was cancelled")

    def _enter(self, epoch: wire.Epoch, operation: Operation, started: float) -> bytes | None:
        control = self.control
        assert control is not None
        operation.suspend()
        self.close()
        rank = self._place(epoch)
        assert rank is not None
        with self._lock:
            self._world = World(
                epoch=epoch.number,
                kind=epoch.kind,
                rank=rank,
                size=len(epoch.members),
                hold=epoch.hold,
                nodes=tuple(member.node for member in epoch.members),
                racks=tuple(member.rack or member.node for member in epoch.members),
                workers=tuple(member.worker for member in epoch.members),
            )
        self.fault("exchange", epoch.number)
        about = None if self._fabric is None else self._fabric.about(epoch)
        control.ready(epoch.number, self._state(operation))
        go = control.wait_go(epoch.number)
        if go is None:
            raise EpochChanged(f"epoch {epoch.number} was superseded")
        exchanged = time.monotonic()
        self.fault("connect", epoch.number)
        base = self._open(self._connect, epoch, rank)
        reports = () if self._fabric is None else self._settle(self._fabric, epoch, go, about, operation, base)
        connected = time.monotonic()
        self._on_world(self._world)
        result = self._catch_up(operation.name, go, reports)
        control.event(
            "entered_epoch",
            epoch=epoch.number,
            kind=epoch.kind,
            rank=rank,
            world=self._world.size,
            step=self.step,
            wait_ms=round(1e3 * (exchanged - started), 2),
            connect_ms=round(1e3 * (connected - exchanged), 2),
        )
        return result

    def report_again(self, operation: Operation) -> None:
        """Report that this worker has the state now, so that a coordinator without its store does not count it as a
        joiner.
        """
        if self.control is not None:
            self.control.ready(self._world.epoch, self._state(operation))

    def _state(self, operation: Operation) -> Report:
        return {
            "position": self._position,
            "step": self.step,
            "has_state": self.has_state,
            "operation": operation.name,
            "report": operation.report(),
        }

    def _settle(
        self, fabric: Fabric, epoch: wire.Epoch, go: wire.Go, about: Any, operation: Operation, base: Communicator
    ) -> tuple[Report | None, ...]:
        """Exchange the members' descriptions and build the fabric's connections; return the members' reports, by
        rank.
        """
        begun = self.has_state and self._position == max(_positions(go)) and operation.name != STOP
        word = json.dumps([about, operation.report() if begun else None]).encode()
        words = [json.loads(each) for each in gather_bytes(self.communicator, word, "words")]
        places = {(each.position, each.operation) for each in go.standings if each.position is not None}
        fabric.settle(epoch, [about for about, _ in words], even=len(places) == 1)
        self._open(lambda epoch, rank, world: fabric.connect(epoch, base), epoch, self._world.rank)
        return tuple(report for _, report in words)

    def _open(self, connect: Connect, epoch: wire.Epoch, rank: int) -> Communicator:
        """Build a communicator in a thread: its constructor blocks on a peer that died between go and connect."""
        attempt = Connecting(connect, epoch, rank)
        control = self.control
        assert control is not None
        with control.condition:
            attempt.start(control.condition)
            control.condition.wait_for(lambda: attempt.finished or control.failed_since(epoch.number))
        communicator = attempt.take()
        if communicator is None:
            raise EpochChanged(f"epoch {epoch.number} was superseded while connecting")
        with self._lock:
            self._communicator = WatchedCommunicator(communicator, self.activity)
        self.activity.epoch = epoch.number
        self.check()  # a failure received just before would have found no communicator to abort
        return communicator

    def _catch_up(self, name: str, go: wire.Go, reports: tuple[Report | None, ...]) -> bytes | None:
        """Bring members that are one operation behind up to date; store the reports for `Operation.plan`."""
        positions = _positions(go)
        top, low = max(positions), min(positions)
        if top - low > 1:
            raise ProgramsDiffer({_who(each): f"{each.operation} {each.position}" for each in go.standings})
        furthest = [standing for standing in go.standings if standing.position == top]
        names = {standing.operation for standing in furthest}
        if len(names - {STOP}) > 1:
            raise ProgramsDiffer({_who(each): each.operation for each in furthest})
        self._gives_way = len(names) > 1 and name == STOP
        self._pending = ReportSum.of(go, self._world.size, reports)
        result = None
        if low < top:
            root = furthest[0].first
            result = broadcast_bytes(self.communicator, self._last_result if self._world.rank == root else None, root)
        return result if self.has_state and self._position < top else None


def _who(standing: wire.Standing) -> str:
    others = f" and {standing.count - 1} more" if standing.count > 1 else ""
    return f"rank {standing.first}{others}"


def _positions(go: wire.Go) -> set[int]:
    """The positions of the members that have state."""
    found = {standing.position for standing in go.standings if standing.position is not None}
    assert found, "an epoch without state is not published"
    return found
