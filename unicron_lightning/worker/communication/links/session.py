"""One epoch's exchanges on one rank: from frames to handles. The methods of `LinkSession` need the hub's lock.

Those that change tensors run in inference mode, which is a thread's own: evaluations sum tensors that were made in it,
and torch forbids changing these outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from unicron_lightning import wire
from unicron_lightning.worker.communication.communicator import PATHS, Gate, Handle
from unicron_lightning.worker.communication.links.exchanges import HostCollective, Outbound
from unicron_lightning.worker.communication.links.link import RESUME, Header, Link
from unicron_lightning.worker.communication.links.pattern import dials, peers

EARLY_BYTES: Final = 1 << 22
"""Most bytes kept for exchanges that this rank has not begun; beyond, the link is not read."""


class LinkHandle(Handle):
    """An exchange in progress."""

    __slots__ = ()

    def __init__(self, *, done: bool) -> None:
        super().__init__(None)
        self.done = done

    def succeeded(self) -> bool:
        return self.done


@dataclass
class _Early:
    """A payload of an exchange that this rank has not begun."""

    header: Header
    data: bytearray
    complete: bool = False


@dataclass
class _Running:
    exchange: HostCollective
    handle: LinkHandle


@dataclass
class LinkSession:
    """The links and exchanges of one epoch.

    Attributes:
        epoch: the epoch.
        rank: of this worker.
        gate: on which the training thread waits.
        links: by rank; those that both ends use in this epoch are `ready`.
        further: ranks to which this one needs a link beside those of the pattern.
    """

    epoch: wire.Epoch
    rank: int
    gate: Gate
    links: dict[int, Link] = field(default_factory=dict)
    further: frozenset[int] = frozenset()
    _running: dict[int, _Running] = field(default_factory=dict)
    _early: dict[int, list[_Early]] = field(default_factory=dict)
    _early_bytes: int = 0
    _begun: int = 0

    @property
    def world(self) -> int:
        return len(self.epoch.members)

    @property
    def peers(self) -> set[int]:
        """The ranks that this one is connected to."""
        return peers(self.rank, self.world) | self.further

    @property
    def ready(self) -> bool:
        """Whether all links are there, and used by both ends."""
        return all(
            (link := self.links.get(peer)) is not None and link.resumed >= self.epoch.number for peer in self.peers
        )

    def undialled(self) -> list[int]:
        """Ranks without a link which this rank has to dial."""
        missing = self.peers - self.links.keys()
        return sorted(peer for peer in missing if dials(self.rank, peer, self.world))

    def rank_of(self, link: Link) -> int | None:
        """The rank at the other end; None if the epoch does not use the link."""
        return next((rank for rank, known in self.links.items() if known is link), None)

    def use(self, rank: int, link: Link) -> None:
        """Use a link in this epoch, and notify the other end."""
        self.links[rank] = link
        link.send(Header(RESUME, self.epoch.number))

    @torch.inference_mode()
    def begin(self, exchange: HostCollective) -> LinkHandle:
        """Begin the next exchange; process what has arrived for it."""
        sequence, self._begun = self._begun, self._begun + 1
        handle = LinkHandle(done=False)
        self._running[sequence] = _Running(exchange, handle)
        self._send(sequence, exchange.begin(), exchange)
        for early in self._early.pop(sequence, []):
            if not early.complete:  # its bytes are on their way, and `arrived` follows
                self._early.setdefault(sequence, []).append(early)
            else:
                self._take_early(sequence, early)
        self._finish(sequence)
        for link in self.links.values():
            link.resume()
        return handle

    @torch.inference_mode()
    def place(self, header: Header) -> memoryview | None:
        """Return memory for a payload of this epoch; None if this rank is too far behind to keep it.

        Raises:
            ValueError: the ranks are in different exchanges.
        """
        running = self._running.get(header.sequence)
        if running is not None:
            return self._place(running.exchange, header)
        if header.sequence < self._begun:
            raise ValueError(f"exchange {header.sequence} is complete here, but another rank sends to it")
        if self._early_bytes + header.length > EARLY_BYTES:
            return None
        early = _Early(header, bytearray(header.length))
        self._early.setdefault(header.sequence, []).append(early)
        self._early_bytes += header.length
        return memoryview(early.data)

    @torch.inference_mode()
    def arrived(self, header: Header) -> None:
        """Process a payload that is complete at its place."""
        running = self._running.get(header.sequence)
        early = next((each for each in self._early.get(header.sequence, ()) if each.header == header), None)
        if early is not None:
            early.complete = True
            if running is None:
                return
            self._early[header.sequence].remove(early)
            self._take_early(header.sequence, early)
        elif running is not None:
            self._send(header.sequence, running.exchange.arrived(header.part, header.segment), running.exchange)
        self._finish(header.sequence)

    def end(self) -> None:
        """Forget all exchanges, after an abort."""
        self._running.clear()
        self._early.clear()

    def _take_early(self, sequence: int, early: _Early) -> None:
        self._early_bytes -= len(early.data)
        exchange, header = self._running[sequence].exchange, early.header
        self._place(exchange, header)[:] = early.data
        self._send(sequence, exchange.arrived(header.part, header.segment), exchange)

    def _place(self, exchange: HostCollective, header: Header) -> memoryview:
        if (header.kind, header.size) != (exchange.kind, exchange.size):
            raise ValueError(
                f"exchange {header.sequence} is of kind {exchange.kind} with {exchange.size} bytes here, but of kind "
                f"{header.kind} with {header.size} bytes elsewhere: {PATHS}"
            )
        try:
            place = exchange.place(header.part, header.segment)
        except KeyError:
            place = None
        if place is None or len(place) != header.length:
            expected = "nothing" if place is None else f"{len(place)} bytes"
            raise ValueError(
                f"{header.length} bytes for part {header.part} of exchange {header.sequence}: expected {expected}"
            )
        return place

    def _send(self, sequence: int, sends: Sequence[Outbound], exchange: HostCollective) -> None:
        for send in sends:
            header = Header(
                kind=exchange.kind,
                epoch=self.epoch.number,
                sequence=sequence,
                part=send.part,
                segment=send.segment,
                size=exchange.size,
                length=len(send.data),
            )
            link = self.links.get(send.rank)
            if link is None:
                raise ValueError(f"worker {self.epoch.members[send.rank].worker} has left")
            link.send(header, send.data)

    def _finish(self, sequence: int) -> None:
        running = self._running.get(sequence)
        if running is None or not running.exchange.done:
            return
        del self._running[sequence]
        with self.gate.condition:
            running.handle.done = True
            self.gate.condition.notify_all()
