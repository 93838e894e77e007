"""The addresses by which gloo's members connect, exchanged by a collective instead of a store of torch's.

A client of `torch.distributed.TCPStore` resolves the name of the server's address, which takes seconds if the name
server does not answer, and each member would read the addresses of its peers from one server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
import torch.distributed as dist

from unicron_lightning.worker.communication import sockets

Exchange = Callable[[bytes], Sequence[bytes]]
"""Gives the other members this one's bytes, and returns those of all, in rank order."""


class Addresses(msgspec.Struct, frozen=True, array_like=True):
    """Addresses of one member."""

    listening: list[tuple[str, int]]
    """Of its sockets, and of those that other threads opened meanwhile: each connection of the group ends at one of
    some member.
    """
    written: dict[str, bytes]
    """Keys and values that gloo has written to the store."""


class AddressStore(dist.Store):
    """A store in this process: first gloo writes its own addresses, and after `exchange` reads those of the others."""

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[str, bytes] = {}
        self._all: dict[str, bytes] = {}

    def exchange(self, listening: Sequence[sockets.SocketAddress], exchange: Exchange) -> set[sockets.SocketAddress]:
        """Exchange the members' addresses; return those on which they listen.

        Raises:
            CommunicatorAborted: a member was lost.
        """
        own = msgspec.msgpack.encode(Addresses(list(listening), self._own))
        members = [msgspec.msgpack.decode(each, type=Addresses) for each in exchange(own)]
        self._all = {key: value for member in members for key, value in member.written.items()}
        return {address for member in members for address in member.listening}

    # ---- called by gloo, from any thread

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] # C++ passes bytes
        self._own[key] = value

    def get(self, key: str) -> bytes:
        if key not in self._all:
            raise RuntimeError(f"gloo reads {key!r}: no member has written it")
        return self._all[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)
