"""Redundant copies of optimizer shards in the host memory of data-parallel peers, and the way back from them.

After each optimizer step (`protect`) a thread copies this rank's shard into host memory and sends it to its holders,
while the training thread goes on with the next step's forward and backward passes. `settle` waits for it; it belongs
before the next optimizer step, ahead of a point that all ranks pass together. There are two buffers for everything, so
that of two successive versions one is whole at any moment:

    step n's commit          protect(n)   forward, backward of n+1      settle   commit   optimizer step n+1
    ----|--------------------|============ copy, send ==================|--------|--------|----
    whole everywhere: n-1 (own and mirrored) ............................ n ..............

**Guaranteed.** If no rank dies together with all holders of its shard, there is a version that is whole on every stage
(`survey`), and `restore` gives each member of the new group its shard of it bit by bit, and the parameters that belong
to it. It is never a mixture of versions, wherever in a step the death was: in the reduce-scatter, the optimizer step or
the gathering of parameters. That version is

- the last committed one, if the death was after its `settle`, or its copies had arrived by then;
- else the one before: the step in between has to be done again.

With ``every`` above 1 it is up to so many steps older. Gradients accumulated so far (``main_grad``) are kept. After
`restore`, `protect` has to be called for the version restored: until that has settled there may be no second copy. If
nothing is whole (`ShardsLost`), a checkpoint is what is left.

**Cost.** Host memory: 24 bytes per element of a shard for its owner's copies, and as much again for each copy at
others; during a recovery the new layout's beside the old one's. Traffic: 12 bytes per element, step and copy.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch
from torch import Tensor

from unicron_lightning.errors import ConfigError, UnicronError
from unicron_lightning.megatron import shards
from unicron_lightning.megatron.copies import ROWS, Ring, Slot, Stored, assemble, cut
from unicron_lightning.megatron.shards import Holding, Piece
from unicron_lightning.worker.communicator import Communicator, Handle, SoloCommunicator, gather_bytes

if TYPE_CHECKING:
    from unicron_lightning.megatron.sharded import ShardedOptimizer


class ShardsLost(UnicronError):
    """No version of the optimizer's state is whole any more; the message names what is lost."""


class Exchange(Communicator, Protocol):
    """A communicator of the data-parallel group for tensors in host memory: a `GlooCommunicator` serves."""

    def all_to_all(self, sent: Tensor, sent_to: list[int], received: Tensor, received_from: list[int]) -> Handle:
        """As `unicron_lightning.worker.gloo.GlooCommunicator.all_to_all`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Redundancy:
    """How shards are kept safe.

    Args:
        copies: of each shard, at other ranks; 0 for none: then only what survivors have survives.
        every: steps between copies.
        overlap: go on training while they are made; else each step waits for them, and no committed step is redone.
    """

    copies: int = 1
    every: int = 1
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.copies < 0:
            raise ConfigError(f"copies={self.copies}: expected 0 or more")
        if self.every < 1:
            raise ConfigError(f"every={self.every}: expected 1 or more steps")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a member tells the others of the group."""

    holdings: tuple[Holding, ...]
    steps: dict[int, float]
    """Adam's count of steps, by version."""
    pieces: tuple[Piece, ...]
    """Its shard in the layout that it has."""
    groups: dict[int, int]
    """Parameter to optimizer group, as far as known."""
    node: str


class Mirror:
    """A rank's copies, of its own shard and of others'.

    Args:
        optimizer: this rank's shard.
        redundancy: how many copies, and when.
        node: label of this rank's machine; copies go to other nodes first.
    """

    def __init__(self, optimizer: ShardedOptimizer, redundancy: Redundancy, node: str = "") -> None:
        self._optimizer = optimizer
        self._redundancy = redundancy
        self.node = node
        self._stored: list[Stored] = []
        self._layout = 0
        self._steps: dict[int, float] = {}
        self._groups: dict[int, int] = {}
        self._surveyed: list[Report] = []
        self._ring: Ring | None = None
        self._exchange: Exchange | SoloCommunicator | None = None
        self._lock = threading.Lock()
        self._running: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unicron-mirror")

    # in a group that is whole

    def join(self, exchange: Exchange | SoloCommunicator) -> None:
        """Begins with a group whose optimizer is laid out for it already. A collective of the group.

        Args:
            exchange: of its ranks, in the order of the data-parallel group; used by nothing else, and closed here.
        """
        reports = self._gather(exchange, ())
        self._groups = {number: group for report in reports for number, group in report.groups.items()}
        self._arrange([report.pieces for report in reports], [report.node for report in reports])

    def protect(self, version: int) -> None:
        """Copies the shard as it now is; all ranks have committed this version.

        Args:
            version: optimizer steps done. One that ``every`` does not ask for is left out, but the first of a layout is
                not. Without ``copies`` nothing is done.
        """
        new = all(stored.layout != self._layout for stored in self._stored)
        if self._redundancy.copies and (new or version % self._redundancy.every == 0):
            self._begin(version, send=True)
            if not self._redundancy.overlap:
                self.settle()

    def hold(self, version: int) -> None:
        """Copies the shard for its owner, without sending it: what has to be done before a planned change of the group.

        Args:
            version: as for `protect`.
        """
        self.settle()
        own = (stored for stored in self._stored if stored.layout == self._layout)
        if all(stored.holding.version != version for stored in own):
            self._begin(version, send=False)
            self.settle()

    def settle(self) -> None:
        """Waits until what `protect` began is done.

        Raises:
            CommunicatorAborted: it was not possible; the group has to recover.
        """
        if self._running is not None:
            self._running.result()
            self._running = None

    def abort(self, reason: str) -> None:
        """Releases a `settle` or an exchange under way; from any thread."""
        if self._exchange is not None:
            self._exchange.abort(reason)

    @property
    def host_bytes(self) -> int:
        """Memory that the buffers of the present layout take."""
        slots = self._ring.slots if self._ring is not None else []
        return sum(tensor.numel() * tensor.element_size() for slot in slots for tensor in (slot.own, *slot.kept))

    def pause(self) -> None:
        """The group is no more; what is stored stays."""
        self._end_transfer("the group has changed")

    def forget(self, above: int) -> None:
        """Drops what is stored of later versions than ``above``; nothing may be under way."""
        with self._lock:
            self._stored = [stored for stored in self._stored if stored.holding.version <= above]

    def close(self) -> None:
        """Ends the thread and forgets all copies."""
        self._end_transfer("closed")
        self._thread.shutdown()
        self._stored, self._ring = [], None

    # after a failure, or before another layout

    def survey(self, exchange: Exchange | SoloCommunicator) -> tuple[int, ...]:
        """What can be restored, newest first. A collective of the new group.

        Joiners have made their optimizer in whatever layout; they call it as well.

        Args:
            exchange: of the new group, in its order; it takes the place of the old one.
        """
        self.pause()
        with self._lock:
            holdings = tuple(stored.holding for stored in self._stored)
        self._surveyed = self._gather(exchange, holdings)
        return shards.versions([report.holdings for report in self._surveyed], self._optimizer.whole)

    def lost(self) -> str:
        """What the newest version of the last survey lacks, in words; empty if nothing."""
        held = [report.holdings for report in self._surveyed]
        newest = max((holding.version for holdings in held for holding in holdings), default=None)
        if newest is None:
            return "no rank has a copy of any shard"
        gaps = shards.missing(newest, held, self._optimizer.whole)
        if not gaps:
            return ""
        names = sorted({self._optimizer.name(gap.parameter) for gap in gaps})
        total = sum(len(piece) for piece in self._optimizer.whole)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"{sum(map(len, gaps))} of {total} elements of version {newest} are lost, of {shown}"

    def restore(self, version: int) -> None:
        """Lays the optimizer out for the groups of ``parallel_state`` and fills it. A collective of the new group.

        Args:
            version: in every stage's `survey`.

        Raises:
            ShardsLost: it is not whole here.
        """
        exchange = self._exchange
        assert exchange is not None, "survey comes first"
        held = [report.holdings for report in self._surveyed]
        if version not in shards.versions(held, self._optimizer.whole):
            raise ShardsLost(f"version {version} of the optimizer's state cannot be restored: {self.lost() or held}")
        steps = next(report.steps[version] for report in self._surveyed if version in report.steps)
        groups = {number: group for report in self._surveyed for number, group in report.groups.items()}
        self._optimizer.lay_out(groups)
        layouts = [report.pieces for report in self._gather(exchange, ())]
        data = self._fetch(exchange, version, held, layouts)
        self._optimizer.write(data, steps)
        self._optimizer.gather_parameters()
        self._groups = groups
        self._stored = [stored for stored in self._stored if stored.holding.version == version]
        self._arrange(layouts, [report.node for report in self._surveyed])

    def _gather(self, exchange: Exchange | SoloCommunicator, holdings: tuple[Holding, ...]) -> list[Report]:
        self._exchange = exchange
        mine = Report(
            holdings=holdings,
            steps=self._steps,
            pieces=self._optimizer.pieces,
            groups={**self._groups, **self._optimizer.groups},
            node=self.node,
        )
        told = gather_bytes(exchange, msgspec.json.encode(mine), "optimizer shards")
        return [msgspec.json.decode(report, type=Report) for report in told]

    def _arrange(self, layouts: list[tuple[Piece, ...]], nodes: list[str]) -> None:
        """Takes up a layout. What is stored of older ones stays until a version is whole in this one."""
        assert self._exchange is not None
        chosen = [shards.holders(rank, nodes, self._redundancy.copies) for rank in range(len(layouts))]
        ring = Ring(layouts=layouts, rounds=[list(holders) for holders in zip(*chosen, strict=True)])
        rank, pinned = self._exchange.rank, self._optimizer.device.type == "cuda"
        if self._redundancy.copies:
            for _ in range(2):
                received = [sum(map(ring.elements, ring.sources(n, rank))) for n in range(len(ring.rounds))]
                own = torch.empty(ROWS, ring.elements(rank), pin_memory=pinned)
                ring.slots.append(Slot(own=own, kept=[torch.empty(ROWS * elements) for elements in received]))
        self._ring = ring
        self._layout += 1

    def _begin(self, version: int, send: bool) -> None:
        assert self._ring is not None and self._running is None, "settle comes between two versions"
        ready = None
        if self._optimizer.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        with self._lock:
            # All ranks have settled the last version, or there would have been no commit: only it is still needed.
            newest = max((stored.holding.version for stored in self._stored), default=version)
            layout = max((stored.layout for stored in self._stored if stored.holding.version == newest), default=0)
            self._stored = [s for s in self._stored if (s.holding.version, s.layout) == (newest, layout)]
            self._steps = {newest: self._steps.get(newest, 0.0), version: self._optimizer.steps}
            slot = self._free_slot()
        self._running = self._thread.submit(self._copy, version, slot, ready, send)

    def _free_slot(self) -> Slot:
        """Buffers that hold nothing that is stored."""
        assert self._ring is not None and self._exchange is not None
        for slot in self._ring.slots:
            if all(stored.data is not slot.own for stored in self._stored):
                return slot
        return Slot(own=torch.empty(ROWS, self._ring.elements(self._exchange.rank)), kept=[])  # no copies: `hold`

    def _copy(self, version: int, slot: Slot, ready: torch.cuda.Event | None, send: bool) -> None:
        """The thread's work: device to host, then host to host."""
        ring, exchange = self._ring, self._exchange
        assert ring is not None and exchange is not None
        if ready is None:
            self._optimizer.read(slot.own)
        else:
            stream = torch.cuda.Stream(self._optimizer.device)
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                self._optimizer.read(slot.own)
            stream.synchronize()
        self._store(version, ring.layouts[exchange.rank], slot.own)
        if not send:
            return
        for number, kept in enumerate(slot.kept):
            assert not isinstance(exchange, SoloCommunicator)
            sources = ring.sources(number, exchange.rank)
            sent_to = [0] * exchange.world
            sent_to[ring.rounds[number][exchange.rank]] = slot.own.numel()
            received_from = [ROWS * ring.elements(owner) if owner in sources else 0 for owner in range(exchange.world)]
            exchange.wait(exchange.all_to_all(slot.own.view(-1), sent_to, kept, received_from))
            for owner, data in zip(sources, kept.split([received_from[owner] for owner in sources]), strict=True):
                self._store(version, ring.layouts[owner], data.view(ROWS, -1))

    def _store(self, version: int, pieces: tuple[Piece, ...], data: Tensor) -> None:
        with self._lock:
            holding = Holding(version=version, pieces=pieces)
            self._stored.append(Stored(holding=holding, data=data, layout=self._layout))

    def _end_transfer(self, reason: str) -> None:
        """Whatever the thread is at ends, well or not; what has arrived as a whole stays."""
        if self._exchange is not None:
            self._exchange.abort(reason)
        if self._running is not None:
            self._running.exception()
            self._running = None
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _fetch(
        self,
        exchange: Exchange | SoloCommunicator,
        version: int,
        held: list[tuple[Holding, ...]],
        layouts: list[tuple[Piece, ...]],
    ) -> Tensor:
        """This member's shard of the new layout, from everybody's copies."""
        found = shards.transfers(version, held, layouts)
        rank, world = exchange.rank, exchange.world
        out = [item for item in found if item.source == rank]
        into = [item for item in found if item.target == rank]
        out.sort(key=lambda item: (item.target, item.piece))
        into.sort(key=lambda item: (item.source, item.piece))
        # Read from what was told: the list has not changed since, as no transfer is under way.
        sent = torch.cat([cut(self._stored[item.holding], item.piece).reshape(-1) for item in out] or [torch.empty(0)])
        received = torch.empty(ROWS * sum(len(item.piece) for item in into))
        sent_to = [ROWS * sum(len(item.piece) for item in out if item.target == other) for other in range(world)]
        received_from = [ROWS * sum(len(item.piece) for item in into if item.source == other) for other in range(world)]
        if isinstance(exchange, SoloCommunicator):
            received = sent
        else:
            exchange.wait(exchange.all_to_all(sent, sent_to, received, received_from))
        return assemble(layouts[rank], [item.piece for item in into], received)
