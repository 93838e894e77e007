"""A fresh TCPStore server for every round.

Keys of an earlier round would make torch's ``env://`` rendezvous hang, and a peer that still uses an earlier
round's store must not meet the present one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from datetime import timedelta
from typing import Any, Final

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist

from unicron_lightning import wire

logger = logging.getLogger(__name__)

_BACKLOG: Final = 4096


class RoundStore:
    """A store server of this process, open until `close`.

    Args:
        host: address of this machine for other workers; the only one that is listened on, if possible.
        timeout: time limit of blocking operations.
    """

    def __init__(self, host: str, timeout: timedelta = timedelta(seconds=300)) -> None:
        listener = listen(host)
        port = int(listener.getsockname()[1])
        # The store takes over the descriptor and closes it with the server.
        self._store: dist.TCPStore | None = dist.TCPStore(
            host_name=listener.getsockname()[0] if listener.getsockname()[0] not in ("0.0.0.0", "::") else host,
            port=port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
        self.address = wire.Address(host=host, port=port)

    def num_keys(self) -> int:
        """Return the number of keys in the store; 0 if it is closed."""
        store = self._store
        return 0 if store is None else int(store.num_keys())

    def num_clients(self) -> int:
        """Return the number of connections from other processes to the server."""
        if self._store is None:
            return 0
        connections = psutil.Process().net_connections("tcp")
        own = {_plain(each.laddr) for each in connections}
        served = [each for each in connections if each.status == psutil.CONN_ESTABLISHED]
        return sum(each.laddr.port == self.address.port and _plain(each.raddr) not in own for each in served)

    def close(self) -> None:
        """Close the server; its port is free when this returns."""
        self._store = None


def _plain(address: Any) -> tuple[str, int]:
    """Return an address with IPv4 written the same way on sockets of both families."""
    return str(address.ip).removeprefix("::ffff:"), int(address.port)


def listen(host: str) -> socket.socket:
    """Listen on a free port of ``host``, or on all addresses if it does not belong to this machine (NAT)."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    logger.warning("listens_everywhere host=%s reason='not an address of this machine'", host)
    listener = socket.socket()
    listener.bind(("", 0))
    listener.listen(_BACKLOG)
    return listener
