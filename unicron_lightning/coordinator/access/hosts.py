"""Validation of host names: in requests to the coordinator, and in agents' addresses of their stores.

A web page can resolve its own name to a loopback address and then send requests to a coordinator there; the name in
the Host header gives them away. An agent may direct other processes only to its own machine.
"""

from __future__ import annotations

import ipaddress
import socket

from unicron_lightning.credentials import is_loopback
from unicron_lightning.wire.fields import shortened


def misdirected(header: str, configured: str) -> str | None:
    """Return why a request to a coordinator on a loopback address is refused; None if it is accepted.

    Args:
        header: its Host header, "" for none.
        configured: ``coordinator.host``.
    """
    name = _without_port(header).lower().rstrip(".")
    if is_loopback(name) or name in (configured.lower().strip("[]"), socket.gethostname().lower()):
        return None
    return f"Host: {shortened(header)}: expected a loopback address, localhost or {configured}"


def misplaced(store: str, host: str, peer: str) -> str | None:
    """Return why an agent's store can't be at the host that it names; None if it can.

    Args:
        store: the host that the agent names for its store.
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
