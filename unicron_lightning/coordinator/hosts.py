"""Which hosts are named: by requests to the coordinator, and by agents as the place of their stores.

A web page can have its own name resolve to a loopback address, and then send requests to a coordinator there: they are
known by the name in their Host header. An agent may have others connect to its own machine only.
"""

from __future__ import annotations

import ipaddress
import socket

from unicron_lightning.credentials import is_loopback
from unicron_lightning.fields import shortened


def misdirected(header: str, configured: str) -> str | None:
    """Why a request to a coordinator on a loopback address is refused; None if it is not.

    Args:
        header: its Host header, "" for none.
        configured: ``coordinator.host``.
    """
    name = _without_port(header).lower().rstrip(".")
    if is_loopback(name) or name in (configured.lower().strip("[]"), socket.gethostname().lower()):
        return None
    return f"Host: {shortened(header)}: expected a loopback address, localhost or {configured}"


def misplaced(store: str, host: str, peer: str) -> str | None:
    """Why an agent's store can't be where it says; None if it can.

    Args:
        store: the host that it names for its store.
        host: the host that its registration names.
        peer: the address that its connection comes from.
    """
    if store == host or _address(store) == _address(peer) or (is_loopback(store) and is_loopback(peer)):
        return None
    return f"store.host={shortened(store)}: expected {shortened(host)}, the agent's host, or {shortened(peer)}"


def _without_port(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0] if header.count(":") == 1 else header


def _address(text: str) -> str:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
