"""Redundant copies of optimizer shards in the host memory of data-parallel peers, and their restoration.

With the distributed optimizer (ZeRO-1) each data-parallel rank of a stage owns a *shard*: ranges of the flattened
parameters with their main values and moments. A *holding* is a copy of one shard after a number of optimizer steps, its
*version*, in the host memory of its owner or of a rank that mirrors it. Shards do not depend on the group's size: a
holding made among three ranks serves a group of two, or of four. If a replica has several
columns, lanes that divide experts or parts of sequences, the group has the ranks of all of them, and its whole the
experts of all lanes; a shard's copies are at ranks of its own column, in other replicas, since the ranks of a replica
are lost together.

After each optimizer step and before its commit (`Mirror.keep`) a rank copies its shard into host memory and sends it
to its holders. Every buffer exists twice, so that one of two successive versions is complete at any moment. After a
failure each member reports its holdings, and every member computes the same results from these reports: `versions`,
`missing` and `transfers`, which are pure.

**Guaranteed.** If no rank dies together with all holders of its shard, some version is complete on every stage
(`Mirror.survey`), and `Mirror.restore` gives each member of the new group its exact shard of this version with the
corresponding parameters. Versions are never mixed, wherever in a step the death was: in the reduce-scatter, the
optimizer step, the gathering of parameters or the copies. As no rank commits a step before its copies are made, the
version is the last committed one.

Gradients accumulated so far (``main_grad``) are kept. After `Mirror.restore`, call `Mirror.keep` for the restored
version: before, a second copy may not exist. If no version is complete (`ShardsLost`), only a checkpoint remains.

**Cost.** Host memory: 24 bytes per element of a shard for its owner's copies, and as much again for each copy on
others; during a recovery the new layout's beside the old one's. Traffic: 12 bytes per element, step and copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch
from torch import Tensor

from unicron_lightning.errors import ConfigError, UnicronError
from unicron_lightning.worker.communication.communicator import EpochCollectives, Handle, SoloCommunicator, gather_bytes
from unicron_lightning.worker.state_parts import RackAndNode, apart, following

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Piece(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Elements ``start`` to ``stop`` (excluded) of a flattened parameter.

    Args:
        parameter: its place in the order of the stage's parameters.
    """

    parameter: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of a shard.

    Args:
        version: optimizer steps done when it was made.
        pieces: its contents, in the order in which they are stored.
    """

    version: int
    pieces: tuple[Piece, ...]


class Transfer(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One range to be sent.

    Args:
        source, target: members.
        holding: index of the source's holding.
        piece: the range; it lies within one piece of that holding, and within one piece of the target's shard.
    """

    source: int
    target: int
    holding: int
    piece: Piece


def versions(held: Sequence[Sequence[Holding]], whole: Sequence[Piece]) -> tuple[int, ...]:
    """The versions that can be restored without loss, newest first.

    Args:
        held: each member's holdings.
        whole: all elements of the stage.
    """
    known = {holding.version for holdings in held for holding in holdings}
    return tuple(sorted((version for version in known if not missing(version, held, whole)), reverse=True))


def missing(version: int, held: Sequence[Sequence[Holding]], whole: Sequence[Piece]) -> tuple[Piece, ...]:
    """The elements of ``whole`` that no holding of this version has."""
    candidates = _by_parameter(version, held)
    gaps: list[Piece] = []
    for piece in whole:
        position = piece.start
        for _, _, other in sorted(candidates[piece.parameter], key=lambda item: item[2]):
            if other.start > position:
                gaps.append(Piece(piece.parameter, position, min(other.start, piece.stop)))
            position = max(position, other.stop)
            if position >= piece.stop:
                break
        if position < piece.stop:
            gaps.append(Piece(piece.parameter, position, piece.stop))
    return tuple(gap for gap in gaps if len(gap))


def transfers(
    version: int, held: Sequence[Sequence[Holding]], targets: Sequence[Sequence[Piece]]
) -> tuple[Transfer, ...]:
    """Transfers by which each target gets its shard, each element once.

    A member takes elements from its own holdings if possible, otherwise from the member that sends least so far.

    Args:
        version: one of `versions`.
        held: each member's holdings.
        targets: each member's shard in the new layout.
    """
    candidates = _by_parameter(version, held)
    load = [0] * len(held)
    found = []
    for target, pieces in enumerate(targets):
        for piece in pieces:
            for stretch in _cut(piece, candidates[piece.parameter]):
                offers = [
                    (member != target, load[member], member, index)
                    for member, index, other in candidates[piece.parameter]
                    if other.start <= stretch.start and stretch.stop <= other.stop
                ]
                assert offers, f"no member holds {stretch} of version {version}"
                _, _, source, holding = min(offers)
                if source != target:
                    load[source] += len(stretch)
                found.append(Transfer(source=source, target=target, holding=holding, piece=stretch))
    return tuple(found)


def _by_parameter(version: int, held: Sequence[Sequence[Holding]]) -> defaultdict[int, list[tuple[int, int, Piece]]]:
    """(member, holding, piece) of all holdings of a version, by parameter."""
    candidates: defaultdict[int, list[tuple[int, int, Piece]]] = defaultdict(list)
    for member, holdings in enumerate(held):
        for index, holding in enumerate(holdings):
            if holding.version == version:
                for piece in holding.pieces:
                    candidates[piece.parameter].append((member, index, piece))
    return candidates


def _cut(piece: Piece, candidates: Iterable[tuple[int, int, Piece]]) -> Iterator[Piece]:
    """The piece divided at the bounds of all candidates, so that each candidate has a part completely or not at all."""
    bounds = {piece.start, piece.stop}
    for _, _, other in candidates:
        bounds |= {bound for bound in (other.start, other.stop) if piece.start < bound < piece.stop}
    for start, stop in pairwise(sorted(bounds)):
        yield Piece(piece.parameter, start, stop)


ROWS = 3
"""Number of values kept for each element: `sharded.FIELDS`."""


class ShardsLost(UnicronError):
    """No version of the optimizer's state is complete; the message names the missing elements."""


class Exchange(EpochCollectives, Protocol):
    """A communicator of the data-parallel group for tensors in host memory, such as a `GlooCommunicator`."""

    def all_to_all(self, sent: Tensor, sent_to: list[int], received: Tensor, received_from: list[int]) -> Handle:
        """See `unicron_lightning.worker.communication.gloo.GlooCommunicator.all_to_all`."""


class MirroredOptimizer(Protocol):
    """A rank's shard of an optimizer that is spread over a group, as `megatron.sharded.ShardedOptimizer` is."""

    columns: int
    """Successive ranks of the group that belong to one replica."""

    @property
    def device(self) -> torch.device: ...
    @property
    def whole(self) -> tuple[Piece, ...]: ...
    @property
    def pieces(self) -> tuple[Piece, ...]: ...
    @property
    def groups(self) -> dict[int, int]: ...
    @property
    def counts(self) -> tuple[float, ...]: ...
    def name(self, parameter: int) -> str: ...
    def read(self, target: Tensor) -> None: ...
    def write(self, source: Tensor, counts: Sequence[float]) -> None: ...
    def gather_parameters(self) -> None: ...
    def lay_out(self, groups: Mapping[int, int]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Redundancy:
    """Redundancy of optimizer shards.

    Args:
        copies: of each shard, on other ranks; 0 for none, in which case a dead worker's shard is lost.
    """

    copies: int = 1

    def __post_init__(self) -> None:
        if self.copies < 0:
            raise ConfigError(f"copies={self.copies}: expected 0 or more")


class HoldingsReport(msgspec.Struct, frozen=True, kw_only=True):
    """A member's report to the others of the group."""

    holdings: tuple[Holding, ...]
    counts: dict[int, tuple[float, ...]]
    """Adam's count of steps, and the state of a loss scale, by version."""
    pieces: tuple[Piece, ...]
    """Its shard in its present layout."""
    groups: dict[int, int]
    """Optimizer group of each parameter, as far as known."""
    place: RackAndNode


@dataclass(kw_only=True)
class Stored:
    """A holding with its data, float32 [3, elements] in host memory.

    Args:
        holding: the holding.
        data: the values.
        layout: counter of this rank's layouts at the time of the copy.
    """

    holding: Holding
    data: Tensor
    layout: int


@dataclass(kw_only=True)
class VersionBuffers:
    """Buffers for one version: this rank's copy, and copies of other ranks' shards by round of sending."""

    own: Tensor
    kept: list[Tensor]


@dataclass(kw_only=True)
class Ring:
    """Senders and holders in the present group.

    Args:
        rank: of this member.
        layouts: each rank's shard.
        rounds: in each, the holder of each rank's copy.
    """

    rank: int
    layouts: Sequence[tuple[Piece, ...]]
    rounds: list[list[int]]
    slots: list[VersionBuffers] = field(default_factory=list)

    def sources(self, number: int) -> list[int]:
        """Owners of the copies that this rank keeps from one round, in rank order."""
        return [owner for owner, holder in enumerate(self.rounds[number]) if holder == self.rank]

    def elements(self, owner: int) -> int:
        """Number of elements of a rank's shard."""
        return sum(len(piece) for piece in self.layouts[owner])


class Mirror:
    """A rank's copies of its own shard and of other ranks' shards.

    Args:
        optimizer: this rank's shard.
        redundancy: number of copies.
        place: of this rank; copies go to other racks first, then to other nodes.
    """

    def __init__(self, optimizer: MirroredOptimizer, redundancy: Redundancy, place: RackAndNode = ("", "")) -> None:
        self._optimizer = optimizer
        self._redundancy = redundancy
        self.place = place
        self._stored: list[Stored] = []
        self._layout = 0
        self._counts: dict[int, tuple[float, ...]] = {}
        self._groups: dict[int, int] = {}
        self._surveyed: list[HoldingsReport] = []
        self._ring: Ring | None = None
        self._exchange: Exchange | SoloCommunicator | None = None

    # in a complete group

    def join(self, exchange: Exchange | SoloCommunicator) -> None:
        """Begin with a group for which the optimizer is laid out already. A collective of the group.

        Args:
            exchange: of its ranks, in the order of the data-parallel group; used by nothing else, and closed here.
        """
        reports = self._gather(exchange, ())
        self._groups = {number: group for report in reports for number, group in report.groups.items()}
        self._arrange([report.pieces for report in reports], [report.place for report in reports])

    def keep(self, version: int) -> None:
        """Return when the present shard is copied for its owner, and sent to its holders. A collective of the group.

        Without ``copies`` nothing is sent: the owner's is enough for a planned change of the group.

        Args:
            version: optimizer steps done.

        Raises:
            CommunicatorAborted: the copies could not be made; the group has to recover.
        """
        own = (stored.holding.version for stored in self._stored if stored.layout == self._layout)
        if self._redundancy.copies or version not in own:
            self._copy(version)

    @property
    def ring(self) -> Ring:
        """The present group."""
        assert self._ring is not None, "call join first"
        return self._ring

    def copies(self, version: int) -> dict[int, Stored]:
        """Return the copies of a version in the present layout by their owners, this rank's own first.

        There are none if its own is missing. They do not change until `keep` is called for the second version after it.
        """
        layouts, rank = self.ring.layouts, self.ring.rank
        stored = [s for s in self._stored if (s.holding.version, s.layout) == (version, self._layout)]
        owners = sorted(range(len(layouts)), key=lambda owner: owner != rank)
        found = {owner: s for owner in owners for s in stored if s.holding.pieces == layouts[owner]}
        return found if rank in found else {}

    def pause(self) -> None:
        """Close the exchange because the group has ended; stored copies are kept."""
        self._leave("the group has changed")

    def forget(self, above: int) -> None:
        """Drop stored versions later than ``above``."""
        self._stored = [stored for stored in self._stored if stored.holding.version <= above]

    def close(self) -> None:
        """Close the exchange and drop all copies."""
        self._leave("closed")
        self._stored, self._ring = [], None

    # after a failure, or before another layout

    def survey(self, exchange: Exchange | SoloCommunicator) -> tuple[int, ...]:
        """Versions that can be restored, newest first. A collective of the new group.

        Joiners call it too, with an optimizer in any layout.

        Args:
            exchange: of the new group, in its order; it replaces the old one.
        """
        self.pause()
        holdings = tuple(stored.holding for stored in self._stored)
        self._surveyed = self._gather(exchange, holdings)
        return versions([report.holdings for report in self._surveyed], self._optimizer.whole)

    def lost(self) -> str:
        """Description of the elements that the newest version of the last survey lacks; empty if it is complete."""
        held = [report.holdings for report in self._surveyed]
        newest = max((holding.version for holdings in held for holding in holdings), default=None)
        if newest is None:
            return "no rank has a copy of any shard"
        gaps = missing(newest, held, self._optimizer.whole)
        if not gaps:
            return ""
        names = sorted({self._optimizer.name(gap.parameter) for gap in gaps})
        total = sum(len(piece) for piece in self._optimizer.whole)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"{sum(map(len, gaps))} of {total} elements of version {newest} are lost, of {shown}"

    def restore(self, version: int) -> None:
        """Lay the optimizer out for the groups of ``parallel_state`` and fill it. A collective of the new group.

        Args:
            version: in every stage's `survey`.

        Raises:
            ShardsLost: the version is incomplete here.
        """
        exchange = self._exchange
        assert exchange is not None, "call survey first"
        held = [report.holdings for report in self._surveyed]
        if version not in versions(held, self._optimizer.whole):
            raise ShardsLost(f"version {version} of the optimizer's state cannot be restored: {self.lost() or held}")
        counts = max(report.counts.get(version, ()) for report in self._surveyed)
        groups = {number: group for report in self._surveyed for number, group in report.groups.items()}
        self._optimizer.lay_out(groups)
        layouts = [report.pieces for report in self._gather(exchange, ())]
        data = self._fetch(exchange, version, self._stored, held, layouts)  # the stored list is the reported one
        self._optimizer.write(data, counts)
        self._optimizer.gather_parameters()
        self._groups = groups
        self._stored = [stored for stored in self._stored if stored.holding.version == version]
        self._arrange(layouts, [report.place for report in self._surveyed])

    def load(self, stored: Sequence[Stored], counts: Sequence[float]) -> None:
        """Fill the optimizer with copies of one version that the members have from elsewhere. A collective of the
        group; call `keep` after it.
        """
        exchange = self._exchange
        assert exchange is not None, "call join first"
        reports = self._gather(exchange, tuple(each.holding for each in stored))
        held, layouts = [report.holdings for report in reports], [report.pieces for report in reports]
        data = self._fetch(exchange, stored[0].holding.version, stored, held, layouts)
        self._optimizer.write(data, counts)
        self._optimizer.gather_parameters()

    def _gather(self, exchange: Exchange | SoloCommunicator, holdings: tuple[Holding, ...]) -> list[HoldingsReport]:
        self._exchange = exchange
        mine = HoldingsReport(
            holdings=holdings,
            counts=self._counts,
            pieces=self._optimizer.pieces,
            groups={**self._groups, **self._optimizer.groups},
            place=self.place,
        )
        told = gather_bytes(exchange, msgspec.json.encode(mine), "optimizer shards")
        return [msgspec.json.decode(report, type=HoldingsReport) for report in told]

    def _arrange(self, layouts: list[tuple[Piece, ...]], places: list[RackAndNode]) -> None:
        """Adopt a layout. Stored copies of older layouts stay until a version is complete in this one."""
        assert self._exchange is not None
        ranks, copies, columns = range(len(layouts)), self._redundancy.copies, self._optimizer.columns
        others = [following(ranks[rank % columns :: columns], rank // columns) for rank in ranks]
        chosen = [apart(rank, others[rank], places, copies, anywhere=True) for rank in ranks]
        rank, pinned = self._exchange.rank, self._optimizer.device.type == "cuda"
        ring = Ring(rank=rank, layouts=layouts, rounds=[list(holders) for holders in zip(*chosen, strict=True)])
        if self._redundancy.copies:
            for _ in range(2):
                received = [sum(map(ring.elements, ring.sources(n))) for n in range(len(ring.rounds))]
                own = torch.empty(ROWS, ring.elements(rank), pin_memory=pinned)
                ring.slots.append(VersionBuffers(own=own, kept=[torch.empty(ROWS * elements) for elements in received]))
        self._ring = ring
        self._layout += 1

    def _free_slot(self) -> VersionBuffers:
        """Buffers without stored data."""
        assert self._ring is not None and self._exchange is not None
        for slot in self._ring.slots:
            if all(stored.data is not slot.own for stored in self._stored):
                return slot
        # without copies
        return VersionBuffers(own=torch.empty(ROWS, self._ring.elements(self._exchange.rank)), kept=[])

    def _copy(self, version: int) -> None:
        """Copy from device to host, then from host to host."""
        ring, exchange = self._ring, self._exchange
        assert ring is not None and exchange is not None, "call join first"
        # All ranks have the copies of the last version, or no commit would have followed: only it is still needed.
        newest = max((stored.holding.version for stored in self._stored), default=version)
        layout = max((stored.layout for stored in self._stored if stored.holding.version == newest), default=0)
        self._stored = [s for s in self._stored if (s.holding.version, s.layout) == (newest, layout)]
        self._counts = {newest: self._counts.get(newest, ()), version: self._optimizer.counts}
        slot = self._free_slot()
        self._optimizer.read(slot.own)
        if self._optimizer.device.type == "cuda":
            torch.cuda.current_stream(self._optimizer.device).synchronize()
        self._store(version, ring.layouts[exchange.rank], slot.own)
        for number, kept in enumerate(slot.kept):
            assert not isinstance(exchange, SoloCommunicator)
            sources = ring.sources(number)
            sent_to = [0] * exchange.world
            sent_to[ring.rounds[number][exchange.rank]] = slot.own.numel()
            received_from = [ROWS * ring.elements(owner) if owner in sources else 0 for owner in range(exchange.world)]
            exchange.wait(exchange.all_to_all(slot.own.view(-1), sent_to, kept, received_from))
            for owner, data in zip(sources, kept.split([received_from[owner] for owner in sources]), strict=True):
                self._store(version, ring.layouts[owner], data.view(ROWS, -1))

    def _store(self, version: int, pieces: tuple[Piece, ...], data: Tensor) -> None:
        holding = Holding(version=version, pieces=pieces)
        self._stored.append(Stored(holding=holding, data=data, layout=self._layout))

    def _leave(self, reason: str) -> None:
        if self._exchange is not None:
            self._exchange.abort(reason)
            self._exchange.close()
            self._exchange = None

    def _fetch(
        self,
        exchange: Exchange | SoloCommunicator,
        version: int,
        stored: Sequence[Stored],
        held: list[tuple[Holding, ...]],
        layouts: list[tuple[Piece, ...]],
    ) -> Tensor:
        """Fetch this member's shard of a layout from all members' copies, of which ``stored`` are its own."""
        found = transfers(version, held, layouts)
        rank, world = exchange.rank, exchange.world
        out = [item for item in found if item.source == rank]
        into = [item for item in found if item.target == rank]
        out.sort(key=lambda item: (item.target, item.piece))
        into.sort(key=lambda item: (item.source, item.piece))
        sent = torch.cat([cut(stored[item.holding], item.piece).reshape(-1) for item in out] or [torch.empty(0)])
        received = torch.empty(ROWS * sum(len(item.piece) for item in into))
        sent_to = [ROWS * sum(len(item.piece) for item in out if item.target == other) for other in range(world)]
        received_from = [ROWS * sum(len(item.piece) for item in into if item.source == other) for other in range(world)]
        if isinstance(exchange, SoloCommunicator):
            received = sent
        else:
            exchange.wait(exchange.all_to_all(sent, sent_to, received, received_from))
        return assemble(layouts[rank], [item.piece for item in into], received)


def _offsets(pieces: Sequence[Piece]) -> list[int]:
    """Offset of each piece in a shard's data."""
    offsets, position = [], 0
    for piece in pieces:
        offsets.append(position)
        position += len(piece)
    return offsets


def cut(stored: Stored, piece: Piece) -> Tensor:
    """The part [3, elements] of a stored shard that ``piece`` describes; it lies within one of the shard's pieces."""
    pieces = stored.holding.pieces
    for other, offset in zip(pieces, _offsets(pieces), strict=True):
        if other.parameter == piece.parameter and other.start <= piece.start and piece.stop <= other.stop:
            start = offset + piece.start - other.start
            return stored.data[:, start : start + len(piece)]
    raise AssertionError(f"{piece} is not within {pieces}")


def assemble(pieces: Sequence[Piece], arrived: Sequence[Piece], data: Tensor) -> Tensor:
    """Assemble a shard [3, elements] from parts in any order, each [3, its elements] flat."""
    shard = torch.empty(ROWS, sum(map(len, pieces)))
    position = 0
    for stretch in arrived:
        part = data[position : position + ROWS * len(stretch)].view(ROWS, -1)
        position += ROWS * len(stretch)
        for piece, offset in zip(pieces, _offsets(pieces), strict=True):
            if piece.parameter == stretch.parameter and piece.start <= stretch.start and stretch.stop <= piece.stop:
                shard[:, offset + stretch.start - piece.start :][:, : len(stretch)].copy_(part)
    return shard
