"""The address of a connection's end as text that both ends compute independently."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any


def address_of(end: Any) -> str:
    """Return the address of a socket's end, given as by `socket.getsockname` or `getpeername`.

    Loopback addresses exist on every machine, so a mark of the machine is added to them.
    """
    address = ipaddress.ip_address(str(end[0]).partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    text = f"[{address}]:{end[1]}"
    return f"{text}@{_machine()}" if address.is_loopback else text


@functools.lru_cache(maxsize=1)
def _machine() -> str:
    """Return a mark of this boot of the machine and of this network namespace, the same for all users."""
    boot = _read(lambda: Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    namespace = _read(lambda: str(Path("/proc/self/ns/net").readlink()))
    return hashlib.sha256(f"{boot}|{namespace}".encode()).hexdigest()[:16]


def _read(read: Callable[[], str]) -> str:
    try:
        return read().strip()
    except OSError:
        return ""
