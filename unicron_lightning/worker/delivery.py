"""Sends states from the workers that have them to those that lack them, in one collective of all members.

A *subject* is what several workers have alike: the state of a task, or that of a shard of its model. Those that have it
give it, each a part of the large tensors that are equal on them; the rest comes from the first one. A receiver has the
nearest givers as its sources. Receivers with the same sources pass on to each other what they receive, so that a
source sends each byte once. Members that neither give nor lack anything only take part in two small exchanges.

Tensors are sent from where they are, in windows, and received in the memory that the receiver keeps. On an accelerator
windows are staged there, and received tensors are in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from unicron_lightning.worker.communication.communicator import Communicator, Route, gather_bytes
from unicron_lightning.worker.state_parts import DividedState, RackAndNode, nearest, part_range, pieces, restored

LARGE: Final = 1 << 20
"""Bytes from which a tensor is sent by itself."""
WINDOW_BYTES: Final = 1 << 26
"""Most bytes that a source sends before the receivers have confirmed those sent earlier."""
SOURCES: Final = 16
"""Most sources of a receiver."""


class DeliveryPart(msgspec.Struct, array_like=True):
    """A worker's part in a delivery.

    Attributes:
        subject: number of the state that it has, or lacks.
        layout: that of the state; None if it does not have it.
        lacks: whether it is to receive it.
    """

    subject: int
    layout: str | None
    lacks: bool


class Contents(msgspec.Struct, array_like=True):
    """A state, as its first giver has it.

    Attributes:
        note: numbers that come with it.
        root: bytes of the root.
        large: of each large tensor the bytes, whether all givers have it, and whether it is on the accelerator.
    """

    note: list[int]
    root: int
    large: list[tuple[int, bool, bool]]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each large tensor."""
        return [size for size, _, _ in self.large]


class Delivered(NamedTuple):
    """A received state, and the numbers that came with it."""

    state: Any
    note: list[int]


@dataclass(frozen=True)
class Way:
    """The way of some bytes: each source sends a part of them, and the receivers pass it on."""

    sources: tuple[int, ...]
    receivers: tuple[int, ...]

    def routes(self, size: int, window: int, *, accelerated: bool) -> Iterator[tuple[Route, int]]:
        """Yield the routes of a window of ``size`` bytes, and where the bytes of each begin."""
        number = len(self.sources)
        first = window * number * WINDOW_BYTES
        total = max(0, min(size - first, number * WINDOW_BYTES))
        for place, source in enumerate(self.sources):
            low, high = part_range(total, place, number)
            turn = place % len(self.receivers)
            if low < high:
                ranks = (source, *self.receivers[turn:], *self.receivers[:turn])
                yield Route(ranks, high - low, accelerated), first + low


def divided_shard(state: Mapping[str, Any], parameters: int) -> DividedState:
    """Divide the plain state of a shard of a model.

    Args:
        state: ``tensors``, with the parameters first, and ``optimizer``. Buffers may differ between workers in a step.
        parameters: their number.
    """
    equal = {f"value['tensors'][{number}]" for number in range(parameters)}
    return DividedState.of(state, LARGE, ("",), lambda path: path in equal or path.startswith("value['optimizer']"))


def ways(givers: Sequence[int], lacking: Sequence[int], places: Sequence[RackAndNode]) -> list[Way]:
    """Return the ways from those that have some bytes to those that lack them."""
    receivers: dict[tuple[int, ...], list[int]] = {}
    for rank in lacking:
        receivers.setdefault(nearest(rank, givers, places, SOURCES), []).append(rank)
    return [Way(sources, tuple(ranks)) for sources, ranks in receivers.items()]


def deliver(
    communicator: Communicator,
    places: Sequence[RackAndNode],
    tag: str,
    state: DividedState | None,
    *,
    lacks: bool,
    subject: int = 0,
    note: Sequence[int] = (),
) -> Delivered | None:
    """Give a state, receive it, or neither; a collective of all members.

    Args:
        communicator: of the epoch.
        places: place of each rank.
        tag: of the exchange.
        state: this worker's; None if it has none to give. It must not change meanwhile.
        lacks: whether this worker is to receive it.
        subject: its number.
        note: numbers that come with the state.

    Returns:
        The received state; None on ranks that did not lack it.

    Raises:
        CommunicatorAborted: a member failed; what has been received is void.
    """
    own = DeliveryPart(subject, None if state is None else state.layout, lacks)
    subjects = _subjects(communicator, tag, own, state, note)
    streams: list[Stream] = []
    received: list[Tensor] = []
    for number, (givers, receivers, contents) in subjects.items():
        memory: list[Tensor] = []
        if number == subject and lacks:
            memory = received = [torch.empty(size, dtype=torch.uint8) for size in (contents.root, *contents.sizes)]
        elif number == subject and state is not None:
            memory = [torch.frombuffer(bytearray(state.root), dtype=torch.uint8), *state.large]
        first, every = (ways(sources, receivers, places) for sources in (givers[:1], givers))
        streams += _streams(contents, memory, first, every)
    pass_streams(communicator, streams)
    if not lacks:
        return None
    return Delivered(restored(received[0].numpy().tobytes(), received[1:]), subjects[subject].contents.note)


class _Subject(NamedTuple):
    givers: list[int]
    receivers: list[int]
    contents: Contents


def _subjects(
    communicator: Communicator, tag: str, own: DeliveryPart, state: DividedState | None, note: Sequence[int]
) -> dict[int, _Subject]:
    """Return the subjects that some members lack, the same on all members."""
    words = [
        msgspec.json.decode(each, type=DeliveryPart)
        for each in gather_bytes(communicator, msgspec.json.encode(own), tag)
    ]
    receivers: dict[int, list[int]] = {}
    for rank, word in enumerate(words):
        if word.lacks:
            receivers.setdefault(word.subject, []).append(rank)
    if not receivers:
        return {}
    givers = {number: _givers(words, number) for number in sorted(receivers)}
    contents = b""
    if state is not None and own.subject in givers and communicator.rank == givers[own.subject][0]:
        contents = msgspec.json.encode(_contents(communicator, state, note))
    told = gather_bytes(communicator, contents, f"{tag} contents")
    return {
        number: _Subject(ranks, receivers[number], msgspec.json.decode(told[ranks[0]], type=Contents))
        for number, ranks in givers.items()
    }


def _givers(words: Sequence[DeliveryPart], subject: int) -> list[int]:
    """Return the ranks that have a state, of those the ones with the layout of the first one."""
    having = [rank for rank, word in enumerate(words) if word.subject == subject and word.layout is not None]
    assert having, f"no member has state {subject}"
    return [rank for rank in having if words[rank].layout == words[having[0]].layout]


def _contents(communicator: Communicator, state: DividedState, note: Sequence[int]) -> Contents:
    device = communicator.device
    large = [
        (tensor.nbytes, equal, device is not None and tensor.device.type == device.type)
        for tensor, equal in zip(state.large, state.equal, strict=True)
    ]
    return Contents(list(note), len(state.root), large)


@dataclass(frozen=True)
class Stream:
    """Tensors that go the same ways, one after another.

    Attributes:
        ways: theirs.
        size: their bytes.
        memory: this rank's; empty if it is on none of the ways.
        accelerated: whether they are on the accelerator.
        equal: whether all givers have them.
    """

    ways: Sequence[Way]
    size: int
    memory: Sequence[Tensor]
    accelerated: bool = False
    equal: bool = True

    @property
    def windows(self) -> int:
        """Number of windows that all ways together need."""
        return max(-(-self.size // (len(way.sources) * WINDOW_BYTES)) for way in self.ways)


def _streams(contents: Contents, memory: Sequence[Tensor], first: Sequence[Way], every: Sequence[Way]) -> list[Stream]:
    """Divide a state: its root and what only the first giver has, and what all givers have; each by its device."""
    each = [(contents.root, False, False), *contents.large]
    found = []
    for accelerated, equal in product((False, True), repeat=2):
        chosen = [number for number, (_, *kind) in enumerate(each) if kind == [equal, accelerated]]
        size = sum(each[number][0] for number in chosen)
        own = [memory[number] for number in chosen] if memory else []
        found.append(Stream(every if equal else first, size, own, accelerated, equal))
    return [stream for stream in found if stream.size]


def pass_streams(communicator: Communicator, streams: Sequence[Stream]) -> None:
    """Pass all bytes of streams on their ways; a collective of all members, who know the same ones."""
    for accelerated, equal in product((False, True), repeat=2):
        chosen = [stream for stream in streams if (stream.accelerated, stream.equal) == (accelerated, equal)]
        for window in range(max((stream.windows for stream in chosen), default=0)):
            _pass_window(communicator, chosen, window, communicator.device if accelerated else None)


def _pass_window(
    communicator: Communicator, streams: Sequence[Stream], window: int, device: torch.device | None
) -> None:
    """Pass a window of each stream, through memory on an accelerator if one is given."""
    routes, arriving = [], []
    for stream in streams:
        for way in stream.ways:
            for route, first in way.routes(stream.size, window, accelerated=stream.accelerated):
                memory: list[Tensor] = []
                if communicator.rank in route.ranks:
                    memory = list(pieces(stream.memory, first, first + route.size))
                if communicator.rank == route.ranks[0]:
                    memory = _sent(memory, device)
                elif memory and device is not None:
                    staged = torch.empty(route.size, dtype=torch.uint8, device=device)
                    arriving.append((staged, memory))
                    memory = [staged]
                routes.append(replace(route, memory=memory))
    communicator.wait(communicator.transfer(routes))
    for staged, memory in arriving:
        for piece, part in zip(memory, staged.split([len(piece) for piece in memory]), strict=True):
            piece.copy_(part)


def _sent(memory: Sequence[Tensor], device: torch.device | None) -> list[Tensor]:
    """Return the bytes to be sent where they have to be: as one tensor on an accelerator, or in host memory."""
    if device is None:
        return [piece.cpu() for piece in memory]
    return [torch.cat([piece.to(device) for piece in memory])]
