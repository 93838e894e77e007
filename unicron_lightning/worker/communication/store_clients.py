"""Clients of the epochs' stores: the next one is opened beforehand.

torch's client asks the name server for the name of the store's address, which takes seconds if it does not answer. A
recovery would wait for that.
"""

from __future__ import annotations

import hmac
import threading
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from unicron_lightning import wire
from unicron_lightning.worker.communication.owned_group import start_owner

CONNECT_TIMEOUT: Final = timedelta(seconds=60)
"""For all connections of an epoch together."""
_SPARE_TIMEOUT: Final = timedelta(seconds=2)
"""For the client that is opened beforehand; the end of the process may wait for it."""


def name_key(epoch_key: str) -> str:
    """Derive the unpredictable part of names in the store, which does not reveal the epoch's key."""
    return hmac.digest(epoch_key.encode(), b"names", "sha256").hex()[:32]


class StoreClients:
    """Opens clients, and one beforehand, of the store that was used last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: tuple[wire.Address, dist.TCPStore] | None = None
        self._address: wire.Address | None = None

    def open(self, epoch: wire.Epoch) -> dist.Store:
        """Return a client of the epoch's store, with an unpredictable prefix, since any host that reaches the store can
        use it.

        Each use needs its own client: a blocked one would delay the next epoch.
        """
        with self._lock:
            spare, self._spare, self._address = self._spare, None, epoch.store
        client = None if spare is None or spare[0] != epoch.store or not _alive(spare[1]) else spare[1]
        if client is None:
            client = _connected(epoch.store, CONNECT_TIMEOUT)
        start_owner(self._prepare, "unicron-store")
        return dist.PrefixStore(f"unicron/{epoch.number}/{name_key(epoch.key)}", client)

    def close(self) -> None:
        """Close the client that was opened beforehand."""
        with self._lock:
            self._spare = self._address = None

    def _prepare(self) -> None:
        with self._lock:
            address = self._address
        if address is None:
            return
        try:
            client = _connected(address, _SPARE_TIMEOUT)
        except (RuntimeError, OSError):  # the store's agent has died
            return
        client.set_timeout(CONNECT_TIMEOUT)
        with self._lock:
            if self._address == address and self._spare is None:
                self._spare = address, client


def _connected(address: wire.Address, timeout: timedelta) -> dist.TCPStore:
    return dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)


def _alive(client: dist.TCPStore) -> bool:
    try:
        client.check(["unicron"])
    except (RuntimeError, OSError):
        return False
    return True


clients: Final = StoreClients()
"""Of this process."""
