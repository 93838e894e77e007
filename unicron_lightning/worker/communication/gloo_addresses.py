"""The addresses by which gloo's members connect. gloo reads the address of a peer when it first needs the connection.

Each store also knows on which addresses the members listen, by which a group's connections are found among the sockets
of the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

import msgspec
import torch.distributed as dist

from unicron_lightning.worker.communication import sockets

AllGather = Callable[[bytes], Sequence[bytes]]
"""Gives the other members this one's bytes, and returns those of all, in rank order."""
_AGAIN_SECONDS: Final = 0.005
_PEER_SECONDS: Final = 300.0
"""Longest wait for a peer's address."""


class Addresses(msgspec.Struct, frozen=True, array_like=True):
    """Addresses of one member."""

    listening: list[tuple[str, int]]
    """Of its sockets, and of those that other threads opened meanwhile: each connection of the group ends at one of
    some member.
    """
    written: dict[str, bytes]
    """Keys and values that gloo has written to the store."""


class AddressStore(dist.Store):
    """A store in this process: gloo writes its own address first, and reads those of the others after `publish`.

    Attributes:
        listening: addresses of this member, and of the others whose addresses are known.
        peers: keys that gloo has read: one for each peer that it has connected, or tries to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.listening: set[sockets.SocketAddress] = set()
        self.peers: set[str] = set()
        self._own: dict[str, bytes] = {}

    def publish(self, listening: Sequence[sockets.SocketAddress]) -> None:
        """Make this member's addresses known to the others."""
        self.listening.update(listening)
        self._publish(msgspec.msgpack.encode(Addresses(list(listening), self._own)))

    def end(self) -> None:
        """Release all waits for addresses, and refuse later ones."""

    def _publish(self, addresses: bytes) -> None:
        raise NotImplementedError

    def _read(self, key: str) -> bytes:
        """Return the value of a peer's key.

        Raises:
            RuntimeError: there is none.
        """
        raise NotImplementedError

    # ---- called by gloo, from any thread

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] # C++ passes bytes
        self._own[key] = value

    def get(self, key: str) -> bytes:
        value = self._read(key)
        self.peers.add(key)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._read(key)


class GatheredAddresses(AddressStore):
    """The addresses of all members, gathered by a collective, without a store of torch's.

    A client of `torch.distributed.TCPStore` resolves the name of the server's address, which takes seconds if the name
    server does not answer, and each member would read the addresses of its peers from one server.

    Args:
        exchange: the collective.
    """

    def __init__(self, exchange: AllGather) -> None:
        super().__init__()
        self._exchange = exchange
        self._all: dict[str, bytes] = {}

    def _publish(self, addresses: bytes) -> None:
        members = [msgspec.msgpack.decode(each, type=Addresses) for each in self._exchange(addresses)]
        self._all = {key: value for member in members for key, value in member.written.items()}
        self.listening.update(address for member in members for address in member.listening)

    def _read(self, key: str) -> bytes:
        if key not in self._all:
            raise RuntimeError(f"gloo reads {key!r}: no member has written it")
        return self._all[key]


class StoredAddresses(AddressStore):
    """The addresses of those members that gloo connects, read from a store of torch's one by one.

    Args:
        store: with a prefix fresh to the group; several threads may use it.
        rank: this member's.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        super().__init__()
        self._store = store
        self._rank = rank
        self._known: dict[str, bytes] = {}
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()

    def _publish(self, addresses: bytes) -> None:
        self._store.set(str(self._rank), addresses.hex())

    def _read(self, key: str) -> bytes:
        if key in self._known:
            return self._known[key]
        name, deadline = key.rpartition("/")[2], time.monotonic() + _PEER_SECONDS
        # A blocked client would delay the other threads, and could not be released.
        while not self._store.check([name]):
            if self._ended.wait(_AGAIN_SECONDS) or time.monotonic() > deadline:
                raise RuntimeError(f"gloo waits for the address of rank {name}: it has written none")
        member = msgspec.msgpack.decode(bytes.fromhex(self._store.get(name).decode()), type=Addresses)
        self.listening.update(member.listening)
        self._known.update(member.written)
        return self._known[key]
