"""Messages about links between agents: the pairwise check and probes.

Pairwise check: two agents exchange data before one of them may have workers. The coordinator orders one agent to serve
(`PairServe`). The agent opens a port for this one exchange and reports its address (`PairServing`); the other agent is
then ordered to connect (`PairConnect`). Each reports its result (`PairResult`).

Probes: the coordinator has agents probe each other (`Probe`) when workers wait for each other and none hangs, and while
nodes are left out that others did not reach. Each agent reports the peers that it did not reach (`Probed`).
"""

from __future__ import annotations

import msgspec

from unicron_lightning.wire.fields import Count, Host, Id, Key, Message, Port, Rate, Seconds


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """Amount of exchanged data, and its time limit."""

    size: int
    """Bytes in each direction."""
    seconds: float


class PairServe(Message, frozen=True, kw_only=True, tag="pair_serve"):
    """[to the agent] Serve one exchange. Answered by `PairServing`, or by a `PairResult` with the reason for a
    failure.
    """

    check: str
    amount: Amount


class PairServing(Message, frozen=True, kw_only=True, tag="pair_serving"):
    """[to the coordinator] The exchange is served at this address, for some seconds."""

    check: Key
    host: Host
    port: Port
    key: Key
    """Made for this exchange, 64 hexadecimal digits. A connecting agent proves that it knows the key and the token."""


class PairConnect(Message, frozen=True, kw_only=True, tag="pair_connect"):
    """[to the agent] Exchange data with a serving agent. Answered by `PairResult`."""

    check: str
    agent: str
    """The serving agent."""
    host: str
    port: int
    key: str
    amount: Amount


class PairEnd(Message, frozen=True, kw_only=True, tag="pair_end"):
    """[to the serving agent] The other agent has aborted: report the result by `PairResult`."""

    check: str


class PairResult(Message, frozen=True, kw_only=True, tag="pair_result"):
    """[to the coordinator] An exchange has ended."""

    check: Key
    cause: str = ""
    """Reason of a failure; "" for a success."""
    round_trip: Seconds | None = None
    """Seconds, the median of several."""
    sent: Rate | None = None
    """Bytes per second to the other agent."""
    received: Rate | None = None
    """Bytes per second from the other agent."""


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
