"""A worker's connections with its peers beside each epoch's communicator, and its place among the replicas.

These rules keep complete replicas from being interrupted, and broken ones from waiting for dead workers:

* A failure cuts all connections between replicas, and those of a broken replica. A complete replica's connections stay,
  and its workers finish their present call (some micro-batches).
* A worker that leaves an epoch while its partners may wait for it cuts the connections of its replica. The exception is
  the time between the end of its calls and the step's gate, when no partner waits for it, unless the lanes of a single
  replica sum their gradients then. A partner that has committed
  may be in its next call already, as may one that has entered the next epoch before this worker. In an evaluation the
  first stage finishes its calls before the last one (docs/megatron.md).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal, NoReturn

import torch
import torch.distributed as dist
from typing_extensions import override

from unicron_lightning import wire
from unicron_lightning.replica.channels import Channels, PeerGroup
from unicron_lightning.replica.layout import ReplicaLayout, Shape, ShardReport, StateLost, plan_layout
from unicron_lightning.worker.communication.communicator import (
    Communicator,
    CommunicatorAborted,
    ForwardingCommunicator,
)
from unicron_lightning.worker.communication.gloo import GlooGroup
from unicron_lightning.worker.communication.owned_group import is_sticky
from unicron_lightning.worker.communication.store_clients import clients, name_key
from unicron_lightning.worker.control.thread import EXIT_EXPELLED, Control
from unicron_lightning.worker.engine import EpochChanged

LOOK_SECONDS: Final = 0.1
"""Seconds between two looks of `PartnerWatch`."""
EXPLANATION_SECONDS: Final = 2.0
"""Seconds in which a failure must become known that explains an exception of the user's code."""


class PartnerWatch:
    """Detects a partner's cut of its replica's connections, for workers that wait in NCCL's kernels.

    A worker that cuts its replica's connections shuts gloo's sockets, which all partners have beside NCCL's groups, and
    aborts its own NCCL groups. Within a machine NCCL's peers share memory and are not notified. Therefore a thread
    checks the sockets until it is closed or has detected a cut, and has this worker's groups aborted, too.

    Args:
        groups: with partners.
        let_go: called from the watch's thread, once, when a connection of one of them has been closed.
    """

    def __init__(self, groups: Sequence[GlooGroup], let_go: Callable[[], None]) -> None:
        self._groups = groups
        self._let_go = let_go
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="unicron-partners", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; call this before the groups are closed."""
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            if any(group.broken() for group in self._groups):
                self._let_go()
                return


LACKING: Final = "replica/lacking"
"""Key of the record of missing shards: the epoch, the shards, and the address of the epoch's store.

Each missing shard is claimed by one joiner, those of a replica before those of the next one.
"""
_ANY: Final = "any"
"""Record of a worker's shard whose successor is to take the most urgent one."""
_CLAIM_TIMEOUT: Final = timedelta(seconds=10)
_POLL_SECONDS: Final = 0.05


def wait_lacking(control: Control) -> dict[str, Any] | None:
    """Wait for a record with missing shards; the members may not have published the loss that this worker
    replaces yet.
    """
    deadline = time.monotonic() + _CLAIM_TIMEOUT.total_seconds()
    while time.monotonic() < deadline:
        lacking: dict[str, Any] = json.loads(control.lookup(LACKING) or "{}")
        if lacking.get("shards"):
            return lacking
        time.sleep(_POLL_SECONDS)
    return None


def claim_shard(lacking: dict[str, Any], first: int | None) -> int:
    """Claim a missing shard in the epoch's store, the one of the most urgent replica; each entry is claimed once.

    Args:
        lacking: record published by `ReplicaFabric`.
        first: preferred shard; None without one.

    Returns:
        The claimed shard; any missing one if all are claimed (perhaps by workers that have died since), or if the
        store's agent has died.
    """
    shards: list[int] = lacking["shards"]
    entries = sorted(range(len(shards)), key=lambda entry: shards[entry] != first)
    prefix = f"{LACKING}/{lacking['epoch']}/{lacking['key']}"
    try:
        store = dist.TCPStore(lacking["host"], lacking["port"], is_master=False, timeout=_CLAIM_TIMEOUT)
        for entry in entries:
            if store.add(f"{prefix}/{entry}", 1) == 1:
                return shards[entry]
    except (RuntimeError, OSError) as error:
        logger.warning("shard_not_claimed error=%s", error)
    return shards[entries[0]]


logger = logging.getLogger(__name__)

Phase = Literal["idle", "calls", "reducing", "finalizing", "ready"]
"""Progress of this worker in a step, as relevant for its partners."""


@dataclass(frozen=True, kw_only=True)
class EpochPlace:
    """This worker's part in an epoch.

    Attributes:
        epoch: its number.
        rank: in the epoch.
        layout: of all members.
        members: identities of all workers, by rank.
        built: whether all members have their parts of the model.
    """

    epoch: int
    rank: int
    layout: ReplicaLayout
    members: tuple[str, ...]
    built: bool = True

    @property
    def replica(self) -> int | None:
        """The place of its replica; None for a spare."""
        return self.layout.place(self.rank)

    @property
    def spares(self) -> int:
        """Number of members that are in no replica."""
        return len(self.members) - sum(len(replica.members) for replica in self.layout.replicas)

    @property
    def replicas(self) -> list[list[str]]:
        """The workers of each replica, by shard."""
        return [[self.members[rank] for rank in replica.members] for replica in self.layout.replicas]

    @property
    def workers(self) -> frozenset[str]:
        """Workers of its replica; none for a spare."""
        return frozenset() if self.replica is None else frozenset(self.replicas[self.replica])


class ReplicaFabric:
    """Implements `worker.engine.Fabric`.

    Args:
        shape: declared.
        open_ended: whether the declared replicas are only the most that the task can use: a step is then divided among
            those that are there.
        copies: number of copies of each optimizer shard on other replicas; None if each replica has the whole state.

    Attributes:
        phase, at: set by the step; see `Word`.
        built: set by the strategy; see `Word`.
        spread: set by the strategy once the model is built, for the coordinator.
        ordered: whether ``shape`` comes from the coordinator; otherwise it is the script's.
        intact: whether this replica's connections have not been cut.
        place: the newest one settled.
        epoch_key: `wire.Epoch.key` of the newest one settled.
        channels: those of the newest epoch entered; None for spares.
    """

    def __init__(self, shape: Shape, *, open_ended: bool = False, copies: int | None = None) -> None:
        self.shape = shape
        self._open_ended = open_ended
        self._copies = copies
        self.built = self.ordered = False
        self.spread: wire.Spread | None = None
        self.phase: Phase = "idle"
        self.at: int | None = 0
        self.shard: int | None = None
        self.place: EpochPlace | None = None
        self.channels: Channels | None = None
        self._built: dict[int, Channels | None] = {}
        self._control: Control | None = None
        self._store: wire.Address | None = None
        self.epoch_key = ""
        self._worker = ""
        self._lock = threading.Lock()
        self.intact = False
        self._inner: dict[tuple[int, ...], PeerGroup] = {}
        self._partners: frozenset[str] = frozenset()
        self._entered: str | None = None
        self._watch: PartnerWatch | None = None

    # ---- worker.engine.Fabric

    @property
    def granularity(self) -> int:
        return self.shape.shards

    def about(self, epoch: wire.Epoch) -> list[Any]:
        """Describe this worker, see the module's rules; a planned change interrupts nothing, since no step has
        begun.
        """
        quiet = self.phase == "reducing" and not self._reduces_within
        if not quiet and epoch.kind not in wire.PLANNED:
            self.cut()
        word = ShardReport(
            shard=self.shard,
            replica=self._entered,
            intact=self.intact,
            at=self.at,
            ready=self.phase == "ready",
            built=self.built,
        )
        # A partner that receives this may enter the epoch and begin a call with this worker.
        if self.phase == "reducing":
            self.phase = "idle"
        return word.plain()

    @property
    def _reduces_within(self) -> bool:
        """Whether partners wait for this worker even in the reduction: a single replica's columns sum gradients."""
        shape, place = self.shape, self.place
        columns = 1 if shape.sharded else shape.columns
        return columns > 1 and place is not None and len(place.layout.replicas) == 1

    def settle(self, epoch: wire.Epoch, abouts: Sequence[Any], *, even: bool) -> None:
        """Plan the layout; exit if training can continue only from a checkpoint, so that the agent restarts this
        worker.
        """
        rank = next(i for i, member in enumerate(epoch.members) if member.worker == self._worker)
        words = [ShardReport.from_plain(about) for about in abouts]
        try:
            layout = plan_layout(epoch.number, words, self.shape, even=even)
        except StateLost as error:
            start_anew(str(error))
        members = tuple(member.worker for member in epoch.members)
        built = all(word.built for word in words)
        self.place = EpochPlace(epoch=epoch.number, rank=rank, layout=layout, members=members, built=built)
        self.shard, self._store, self.epoch_key = layout.shards[rank], epoch.store, epoch.key

    def connect(self, epoch: wire.Epoch, base: Communicator) -> Communicator:
        """Build the channels beside a CPU communicator for small data."""
        place = self.place
        assert place is not None and place.epoch == epoch.number
        channels = self._built[epoch.number] = self._channels(place, epoch)
        return ReplicaCommunicator(base, channels)

    def abort(self, epoch: wire.Epoch) -> None:
        """Cut this replica's connections unless all of its workers are alive, so that they finish their call.

        In an epoch that only renews the connections of the same members, it is unknown which of them is to blame. A
        wait within the replica may be for a partner whose script has taken another path.
        """
        members, place = [member.worker for member in epoch.members], self.place
        renewed = epoch.kind == "fail" and place is not None and set(members) == set(place.members)
        with self._lock:
            broken = not self._partners.issubset(members) or (renewed and self.phase != "reducing")
        if broken:
            self.cut()

    # ---- called by the strategy

    def begin(self, control: Control | None, *, joins: bool) -> None:
        """Set this worker's identity; without a control plane it is the only member."""
        self._control = control
        if joins:
            self.at = None
        if control is not None:
            self._worker = control.worker
            if (other := control.welcome.layout) is not None:
                self.shape, self.ordered = self.shape.relaid(other), True
        else:
            layout = plan_layout(0, [ShardReport(at=0)], self.shape)
            self.place, self.shard = EpochPlace(epoch=0, rank=0, layout=layout, members=("",)), 0

    @property
    def declared(self) -> int:
        """Number of replicas among which a step is divided as long as none has begun it."""
        assert self.place is not None, "no epoch entered"
        return len(self.place.layout.replicas) if self._open_ended else self.shape.replicas

    @property
    def own_shard(self) -> int:
        """Number of the shard that this worker builds."""
        assert self.shard is not None, "no epoch entered"
        return self.shard

    def take_shard(self, local_rank: int) -> None:
        """Choose a joiner's shard: the replaced worker's if it is missing, else another missing one.

        A joiner that chooses by an outdated record may take a shard that another worker has taken; it then is surplus.
        """
        control, shards = self._control, self.shape.shards
        assert control is not None
        own = control.lookup(_record_of(self._worker))
        preferred = int(own) if own and own != _ANY else None
        if not own and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) % shards == 0:
            preferred = local_rank % shards  # a replica's workers are on one node
        lacking = wait_lacking(control)
        if lacking is not None:
            self.shard = claim_shard(lacking, preferred)
        else:
            self.shard = local_rank % shards if preferred is None else preferred

    def leave_if_surplus(self) -> None:
        """Exit, to be restarted with another shard, if more workers hold this shard than can be used."""
        place = self.place
        if place is not None and self._control is not None and place.layout.is_surplus(place.rank, self.shape):
            logger.warning("surplus_shard shard=%d epoch=%d", self.shard, place.epoch)
            self._control.record(_record_of(self._worker), _ANY, place.epoch)
            logging.shutdown()
            os._exit(EXIT_EXPELLED)

    @property
    def accelerated(self) -> bool:
        """Whether tensors are exchanged by groups on an accelerator, whose unfinished work looks complete after an
        abort.
        """
        return self.channels is not None and bool(self.channels.inner_accelerated.groups)

    def arrive(self, device: torch.device) -> None:
        """Wait on an accelerator for all started work.

        Raises:
            CommunicatorAborted: the replica's connections were cut.
        """
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        if self.accelerated and self._is_cut():
            raise CommunicatorAborted("the replica's connections were cut")

    def released(self, run: Callable[[int], Any], device: torch.device) -> Callable[[int], None]:
        """Return a function that runs a row with the partners, and then knows that they have come this far."""

        def released(row: int) -> None:
            run_released(partial(run, row), self)
            self.arrive(device)

        return released

    def _is_cut(self) -> bool:
        """Whether this replica's connections were cut, here or by a partner: `PartnerWatch` may notice that later."""
        return not self.intact or any(group.broken() for group in list(self._inner.values()))

    def interrupted(self) -> bool:
        """Whether a failure explains an exception in a call: a kernel that was aborted leaves anything in its tensors.

        The news may come after the exception, so this waits for it for a while.
        """
        control, place = self._control, self.place
        deadline = time.monotonic() + EXPLANATION_SECONDS
        while self.accelerated and time.monotonic() < deadline:
            if self._is_cut() or (control is not None and place is not None and control.failed_since(place.epoch)):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def stepped(self) -> None:
        """Record that the update is done."""
        assert self.at is not None
        self.phase, self.at = "idle", self.at + 1

    def cut(self) -> None:
        """Release all waits within this replica; from any thread."""
        with self._lock:
            self.intact = False
            for group in self._inner.values():
                group.cut()
            if self.channels is not None:
                self.channels.inner_accelerated.abort()

    def enter(self) -> Channels | None:
        """Adopt the channels built with the epoch's communicator; close replaced ones."""
        place = self.place
        assert place is not None
        self._end_watch()
        channels = self._alone() if self._control is None else self._built[place.epoch]
        self._built = {place.epoch: channels}
        with self._lock:
            kept = {} if channels is None else channels.inner
            left = [group for shards, group in self._inner.items() if kept.get(shards) is not group]
            self._inner, self._partners, self.intact = dict(kept), place.workers, True
            if channels is not None:
                channels.adopted = True
            if self.channels is not None and self.channels is not channels:
                self.channels.inner_accelerated.close()
        for group in left:
            group.close()
        self.channels = channels
        self._tell(place)
        self._entered = None if place.replica is None else place.layout.replicas[place.replica].name
        return channels

    def watch(self) -> None:
        """On an accelerator, once the channels have its groups: follow a partner's cut."""
        channels = self.channels
        if channels is not None and self.accelerated:
            self._watch = PartnerWatch(list(channels.inner.values()), self.cut)

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def close(self) -> None:
        """Release everything."""
        self._end_watch()
        with self._lock:
            groups, self._inner = list(self._inner.values()), {}
        for group in groups:
            group.close()

    def _alone(self) -> Channels:
        grid = self.shape.grid(replicas=1, place=0, shard=0)
        return Channels(grid, dist.HashStore(), "127.0.0.1", None, mirrors=self._copies is not None)

    def _tell(self, place: EpochPlace) -> None:
        """Record this worker's shard for its successors, and publish missing shards and the composition of the
        replicas.
        """
        if self._control is None:
            return
        self._control.record(_record_of(self._worker), str(place.layout.shards[place.rank]), place.epoch)
        if place.rank == 0 and self._store is not None:
            lacking = {
                "epoch": place.epoch,
                "key": name_key(self.epoch_key),
                "shards": place.layout.missing(self.shape),
                "host": self._store.host,
                "port": self._store.port,
            }
            self._control.record(LACKING, json.dumps(lacking), place.epoch)
        if place.rank == 0:
            at_once = None if self._copies is None else max(1, self._copies)
            told = wire.Replicas(
                worker=self._worker,
                epoch=place.epoch,
                replicas=place.replicas,
                at_once=at_once,
                spread=self.spread,
            )
            self._control.send(told)

    def _channels(self, place: EpochPlace, epoch: wire.Epoch) -> Channels | None:
        if place.replica is None:
            return None
        replica = place.layout.replicas[place.replica]
        grid = self.shape.grid(
            replicas=len(place.layout.replicas),
            place=place.replica,
            shard=place.layout.shards[place.rank],
        )
        store = dist.PrefixStore("replicas", clients.open(epoch))
        carried = self._inner if replica.carried else None
        host = epoch.members[place.rank].host
        return Channels(grid, store, host, carried, mirrors=self._copies is not None)


def _record_of(worker: str) -> str:
    """Key of the record of a worker's shard, shared by the workers that its agent starts in its place."""
    return f"replica/shard/{worker.rpartition('#')[0]}"


class ReplicaCommunicator(ForwardingCommunicator):
    """An epoch's communicator, which aborts and closes the channels between replicas with itself.

    Args:
        base: performs the collectives.
        channels: None for a spare.
    """

    def __init__(self, base: Communicator, channels: Channels | None) -> None:
        super().__init__(base)
        self.channels = channels

    @override
    def abort(self, reason: str) -> None:
        super().abort(reason)
        if self.channels is not None:
            self.channels.cut()

    @override
    def close(self) -> None:
        super().close()
        if self.channels is not None:
            self.channels.close()


def start_anew(reason: str) -> NoReturn:
    """Exit after a loss of state, as all workers do; each agent starts a replacement from the newest checkpoint."""
    logger.error("state_lost reason=%s", reason)
    logging.shutdown()
    os._exit(EXIT_EXPELLED)


def run_released(work: Callable[[], Any], fabric: ReplicaFabric | None = None) -> Any:
    """Run work that waits in the collectives of a `PeerGroup` or of NCCL.

    Args:
        work: to be run; may run code of the user's.
        fabric: its connections; None: no other code than this package's looks at received tensors.

    Raises:
        CommunicatorAborted: a connection was cut, or broke, which may have led to any exception.
    """
    try:
        return work()
    except (CommunicatorAborted, EpochChanged):
        raise
    except Exception as error:
        reason = str(error).splitlines()[0][:200] if str(error) else ""
        lost = isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection" in reason
        if isinstance(error, RuntimeError) and lost:
            raise CommunicatorAborted(reason) from error
        if fabric is not None and not is_sticky(str(error)) and fabric.interrupted():
            raise CommunicatorAborted(f"a partner was lost: {reason}") from error
        raise
