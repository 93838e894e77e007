"""Messages about links between agents: probes.

The coordinator has agents probe each other (`Probe`) when workers wait for each other and none hangs, and while
nodes are left out that others did not reach. Each agent reports the peers that it did not reach (`Probed`).
"""

from __future__ import annotations

import msgspec

from unicron_lightning.wire.fields import Count, Id, Key, Message


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Address on which an agent accepts connections."""

    agent: str
    host: str
    port: int


class Probe(Message, frozen=True, kw_only=True, tag="probe"):
    """[to the agent] Connect to each of the peers. Answered by one `Probed`."""

    number: int
    """Number of the probe in this task."""
    peers: list[Peer]
    seconds: float
    """Time limit for each peer."""


class Probed(Message, frozen=True, kw_only=True, tag="probed"):
    """[to the coordinator] A probe has ended."""

    number: Count
    missed: dict[Id, Key]
    """Peers that were not reached, by agent, with the reasons."""
