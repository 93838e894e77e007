"""Collectives as state machines: which bytes a rank sends at first, and after each arrival; pure.

Bytes are identified by ``(part, segment)``: a part is a hop, and a large tensor is broadcast as segments, so that a hop
of one overlaps another hop of the next. An exchange names the memory for bytes that arrive, and is told once they are
there.
All ranks must start the same exchanges in the same order, with tensors of the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from unicron_lightning.worker.communication.communicator import Route
from unicron_lightning.worker.communication.links.pattern import distances

CHUNK_BYTES: Final = 1 << 20
"""Most bytes sent at once by broadcasts and transfers."""
GATHERED_SUM_BYTES: Final = 1 << 13
"""Sums up to this many bytes of all ranks together are gathered and added in rank order, the way of the fewest hops."""


@dataclass(frozen=True)
class Outbound:
    """Bytes for a rank. They may lie in a tensor of the collective, which is not changed before they are sent."""

    rank: int
    part: int
    segment: int
    data: memoryview


class HostCollective(Protocol):
    """One collective on one rank.

    Attributes:
        kind: a number for each kind of collective; with ``size`` it detects ranks in different collectives.
        size: bytes of the rank's tensor.
    """

    kind: int
    size: int

    @property
    def done(self) -> bool:
        """Whether the result is complete on this rank."""
        ...

    def begin(self) -> Sequence[Outbound]:
        """Return what this rank sends before anything has arrived."""
        ...

    def place(self, part: int, segment: int) -> memoryview:
        """Return the memory for arriving bytes.

        Raises:
            KeyError: nothing more is expected under this name.
        """
        ...

    def arrived(self, part: int, segment: int) -> Sequence[Outbound]:
        """Process bytes that are complete at their place; return what can be sent now."""
        ...


def bytes_of(tensor: Tensor) -> memoryview:
    """View a contiguous CPU tensor as bytes."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"a tensor on {tensor.device}, strides {tensor.stride()}: expected a contiguous one on the CPU"
        )
    if tensor.numel() == 0:
        return memoryview(bytearray())
    flat: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


class Gather:
    """Collects a row of each rank: after round k a rank has the rows of 2^(k+1) ranks, beginning with its own.

    Args:
        received: (world, *row).
        sent: this rank's row.
        rank: this rank.
    """

    kind = 1

    def __init__(self, received: Tensor, sent: Tensor, rank: int) -> None:
        self._world, self._rank = received.shape[0], rank
        self._received = received.view(self._world, -1)
        self._work = torch.empty_like(self._received)  # row i belongs to rank (rank + i) % world
        self._work[0] = sent.detach().reshape(-1)
        self._rows = bytes_of(self._work)
        self.size = len(self._rows) // self._world
        self._distances = distances(self._world) if self.size else []
        self._missing = set(range(len(self._distances)))
        self._next = 0
        self.done = not self._missing

    def begin(self) -> Sequence[Outbound]:
        if self.done:
            self._received.copy_(self._work)
        return self._ready()

    def place(self, part: int, segment: int) -> memoryview:
        if part not in self._missing or segment:
            raise KeyError(part)
        return self._range(self._distances[part], self._count(part))

    def arrived(self, part: int, segment: int) -> Sequence[Outbound]:
        self._missing.remove(part)
        sends = self._ready()
        if not self._missing:
            split = self._world - self._rank
            self._received[self._rank :].copy_(self._work[:split])
            self._received[: self._rank].copy_(self._work[split:])
            self.done = True
        return sends

    def _ready(self) -> list[Outbound]:
        """The rounds whose rows are all here: those up to the first missing one."""
        sends = []
        while self._next < len(self._distances) and all(part >= self._next for part in self._missing):
            target = (self._rank - self._distances[self._next]) % self._world
            sends.append(Outbound(target, self._next, 0, self._range(0, self._count(self._next))))
            self._next += 1
        return sends

    def _count(self, part: int) -> int:
        distance = self._distances[part]
        return min(distance, self._world - distance)

    def _range(self, first: int, count: int) -> memoryview:
        return self._rows[first * self.size : (first + count) * self.size]


class GatheredSum:
    """Sums a small tensor: gathers the ranks' tensors, then adds them in rank order; all ranks have the same bits.

    Args:
        tensor: summed in place.
        rank, world: this rank, and number of ranks.
    """

    kind = 2

    def __init__(self, tensor: Tensor, rank: int, world: int) -> None:
        self._tensor = tensor.detach()
        self._rows = torch.empty(world, tensor.numel(), dtype=tensor.dtype)
        self._gather = Gather(self._rows, tensor, rank)
        self.size = self._gather.size

    @property
    def done(self) -> bool:
        return self._gather.done

    def begin(self) -> Sequence[Outbound]:
        return self._gather.begin()

    def place(self, part: int, segment: int) -> memoryview:
        return self._gather.place(part, segment)

    def arrived(self, part: int, segment: int) -> Sequence[Outbound]:
        sends = self._gather.arrived(part, segment)
        if self._gather.done:
            total = self._rows[0].clone()
            for row in self._rows[1:]:
                total += row
            _set(self._tensor, total)
        return sends


def _set(tensor: Tensor, total: Tensor) -> None:
    """Set a sum, with one bit pattern for NaN: that of a sum of two depends on their order and on the processor."""
    if total.is_floating_point():
        total = torch.where(total == total, total, torch.nan)
    tensor.copy_(total.view(tensor.shape))


@dataclass(frozen=True)
class _PairRound:
    """One part of a `PairwiseSum` on one rank."""

    part: int
    peer: int
    sends: bool = True
    receives: bool = True
    adds: bool = True
    """Whether the received sum is added; otherwise it replaces this rank's."""


class PairwiseSum:
    """Sums a tensor by recursive doubling: in each round two ranks exchange and add the sums that they have so far.

    Both add the same two numbers, so that all ranks have the same bits. In a world that is no power of two, the ranks
    beyond the largest one below give their tensors to others first, and receive the result at the end.

    Args:
        tensor: summed in place.
        rank, world: this rank, and number of ranks.
    """

    kind = 5

    def __init__(self, tensor: Tensor, rank: int, world: int) -> None:
        self._tensor = tensor.detach()
        self._sum = self._tensor.reshape(-1).clone()
        self.size = tensor.numel() * tensor.element_size()
        self._rounds = _pair_rounds(rank, world)
        self._expected = {pair.part for pair in self._rounds if pair.receives}
        self._received: dict[int, Tensor] = {}
        self._arrived: set[int] = set()
        self._at = 0
        self._sent = False

    @property
    def done(self) -> bool:
        return self._at == len(self._rounds)

    def begin(self) -> Sequence[Outbound]:
        return self._ready()

    def place(self, part: int, segment: int) -> memoryview:
        if part not in self._expected or segment:
            raise KeyError(part)
        self._received[part] = torch.empty_like(self._sum)
        return bytes_of(self._received[part])

    def arrived(self, part: int, segment: int) -> Sequence[Outbound]:
        self._expected.remove(part)
        self._arrived.add(part)
        return self._ready()

    def _ready(self) -> list[Outbound]:
        """Pass through all rounds that are complete."""
        sends = []
        while not self.done:
            pair = self._rounds[self._at]
            if pair.sends and not self._sent:
                sends.append(Outbound(pair.peer, pair.part, 0, bytes_of(self._sum)))
                self._sent = True
            if pair.receives:
                if pair.part not in self._arrived:
                    return sends
                received = self._received.pop(pair.part)
                self._sum = self._sum + received if pair.adds else received  # the old one may still be in a send
            self._at, self._sent = self._at + 1, False
        _set(self._tensor, self._sum)
        return sends


def _pair_rounds(rank: int, world: int) -> list[_PairRound]:
    rounds = distances(world // 2 + 1)
    power = 1 << len(rounds)  # the largest power of two in the world
    begin = int(power < world)
    last = begin + len(rounds)
    if rank >= power:
        first = _PairRound(0, rank - power, receives=False)
        return [first, _PairRound(last, rank - power, sends=False, adds=False)]
    found = [_PairRound(begin + number, rank ^ distance) for number, distance in enumerate(rounds)]
    if rank + power < world:
        found.insert(0, _PairRound(0, rank + power, sends=False))
        found.append(_PairRound(last, rank + power, receives=False))
    return found


class Broadcast:
    """Copies a tensor of the root down a binomial tree, segment by segment.

    Args:
        tensor: of the root; overwritten elsewhere.
        root, rank, world: the root, this rank, and number of ranks.
    """

    kind = 4

    def __init__(self, tensor: Tensor, root: int, rank: int, world: int) -> None:
        self._data = bytes_of(tensor)
        self.size = len(self._data)
        place = (rank - root) % world
        later = [distance for distance in distances(world) if distance > place and place + distance < world]
        self._children = [(rank + distance) % world for distance in later]
        self._segments = -(-self.size // CHUNK_BYTES)
        self._missing = set(range(self._segments)) if place else set()

    @property
    def done(self) -> bool:
        return not self._missing

    def begin(self) -> Sequence[Outbound]:
        if self._missing:
            return []
        return [send for segment in range(self._segments) for send in self._forward(segment)]

    def place(self, part: int, segment: int) -> memoryview:
        if segment not in self._missing:
            raise KeyError(segment)
        return self._range(segment)

    def arrived(self, part: int, segment: int) -> Sequence[Outbound]:
        self._missing.remove(segment)
        return self._forward(segment)

    def _forward(self, segment: int) -> list[Outbound]:
        return [Outbound(child, 0, segment, self._range(segment)) for child in self._children]

    def _range(self, segment: int) -> memoryview:
        return self._data[segment * CHUNK_BYTES : (segment + 1) * CHUNK_BYTES]


class RoutedTransfer:
    """Passes bytes along routes, chunk by chunk: a rank forwards a chunk when it has arrived.

    A rank confirms to the one before that it has all of a route's bytes. Thus a rank is done when the bytes that it has
    sent, which may lie in the training's own tensors, are no longer needed.

    Args:
        routes: those of all ranks.
        rank: this rank.
    """

    kind = 6

    def __init__(self, routes: Sequence[Route], rank: int) -> None:
        self.size = sum(route.size for route in routes)
        self._chunks: dict[int, list[memoryview]] = {}
        self._sender: dict[int, int] = {}
        self._receiver: dict[int, int] = {}
        for number, route in enumerate(routes):
            if rank in route.ranks:
                at = route.ranks.index(rank)
                self._chunks[number] = [chunk for tensor in route.memory for chunk in _chunks(bytes_of(tensor))]
                if at > 0:
                    self._sender[number] = route.ranks[at - 1]
                if at + 1 < len(route.ranks):
                    self._receiver[number] = route.ranks[at + 1]
        self._missing = {number: set(range(len(self._chunks[number]))) for number in self._sender}
        self._unconfirmed = set(self._receiver)

    @property
    def done(self) -> bool:
        return not self._missing and not self._unconfirmed

    def begin(self) -> Sequence[Outbound]:
        own = [number for number in self._receiver if number not in self._sender]
        return [
            send for number in own for chunk in range(len(self._chunks[number])) for send in self._pass(number, chunk)
        ]

    def place(self, part: int, segment: int) -> memoryview:
        if part in self._unconfirmed and segment == len(self._chunks[part]):
            return memoryview(bytearray())
        if segment not in self._missing[part]:
            raise KeyError(segment)
        return self._chunks[part][segment]

    def arrived(self, part: int, segment: int) -> Sequence[Outbound]:
        if segment == len(self._chunks[part]):
            self._unconfirmed.remove(part)
            return []
        missing = self._missing[part]
        missing.remove(segment)
        sends = self._pass(part, segment)
        if not missing:
            del self._missing[part]
            sends.append(Outbound(self._sender[part], part, len(self._chunks[part]), memoryview(b"")))
        return sends

    def _pass(self, number: int, chunk: int) -> list[Outbound]:
        if number not in self._receiver:
            return []
        return [Outbound(self._receiver[number], number, chunk, self._chunks[number][chunk])]


def _chunks(data: memoryview) -> list[memoryview]:
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]


def summing(tensor: Tensor, rank: int, world: int) -> HostCollective:
    """Return the exchange that sums ``tensor`` over the ranks, by its size."""
    if tensor.numel() * tensor.element_size() * world <= GATHERED_SUM_BYTES:
        return GatheredSum(tensor, rank, world)
    return PairwiseSum(tensor, rank, world)
