"""Messages of the pairwise check: two agents exchange data before one of them may have workers. Part of `wire`.

The coordinator orders one agent to serve (`PairServe`). The agent opens a port for this one exchange and reports its
address (`PairServing`); the other agent is then ordered to connect (`PairConnect`). Each reports its result
(`PairResult`).
"""

from __future__ import annotations

import msgspec

from unicron_lightning.fields import Host, Key, Port, Rate, Seconds
from unicron_lightning.message import Message


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
