"""Nodes with network namespaces of their own, joined by a bridge, so that a link can be cut in one direction or both.

A cut is silent, as by a switch that stops forwarding: the sender's table of neighbours gets an unused hardware address.
Nothing is refused and no connection is closed. Packets never leave the machine: the bridge has no other port.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType
from typing import Final

_SUBNET: Final = "10.213.0"
_NOBODY: Final = "02:00:00:00:00:99"
_SWITCH: Final = "switch"


class Network:
    """Some nodes, and a switch where the coordinator runs; for a ``with`` block.

    Args:
        nodes: labels of the nodes.
    """

    def __init__(self, *nodes: str) -> None:
        self._places = {node: number for number, node in enumerate((_SWITCH, *nodes), start=1)}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self.host = self.address(_SWITCH)

    def __enter__(self) -> Network:
        for node in self._places:
            holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._holders[node] = holder
            assert holder.stdin is not None and holder.stdout is not None
            holder.stdin.write(b"there\n")
            holder.stdin.flush()
            holder.stdout.readline()  # printed inside its namespace
        self._run(_SWITCH, "link set lo up")
        self._run(_SWITCH, "link add bridge type bridge")
        self._run(_SWITCH, f"addr add {self.host}/24 dev bridge")
        self._run(_SWITCH, "link set bridge up")
        for node, place in self._places.items():
            if node == _SWITCH:
                continue
            pid = self._holders[node].pid
            self._run(_SWITCH, f"link add to{place} type veth peer name eth0 netns {pid}")
            self._run(_SWITCH, f"link set to{place} master bridge up")
            self._run(node, "link set lo up")
            self._run(node, f"addr add {self.address(node)}/24 dev eth0")
            self._run(node, "link set eth0 up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for holder in self._holders.values():
            holder.communicate(timeout=20)

    def address(self, node: str) -> str:
        """Return the node's address."""
        return f"{_SUBNET}.{self._places[node]}"

    def prefix(self, node: str) -> list[str]:
        """Return the first words of a command to be run on the node."""
        return ["nsenter", "--target", str(self._holders[node].pid), "--net"]

    def at_switch(self) -> list[str]:
        """Return the first words of a command to be run where all nodes reach it."""
        return self.prefix(_SWITCH)

    def cut(self, sender: str, receiver: str, *, both: bool = False) -> None:
        """Silently drop all packets from one node to another."""
        self._run(sender, f"neigh replace {self.address(receiver)} lladdr {_NOBODY} dev eth0 nud permanent")
        if both:
            self.cut(receiver, sender)

    def heal(self, sender: str, receiver: str, *, both: bool = False) -> None:
        """Deliver packets again."""
        self._run(sender, f"neigh del {self.address(receiver)} dev eth0")
        if both:
            self.heal(receiver, sender)

    def _run(self, node: str, command: str) -> None:
        subprocess.run([*self.prefix(node), "ip", *command.split()], check=True, timeout=20)


def why_not() -> str | None:
    """Return the reason why this machine does not support such a network; None if it does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]:
        return f"not installed: {missing}"
    script = "ip link add try0 type bridge && ip link add try1 type veth peer name try2"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, check=False)
    return tried.stderr.strip() or "no network namespaces" if tried.returncode else None
