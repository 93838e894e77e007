"""Messages of the pairwise check: two agents exchange data before one of them may have workers. Part of `wire`.

The coordinator has one agent serve (`PairServe`), which opens a port for this one exchange and says where
(`PairServing`); then it has the other one connect there (`PairConnect`). Each tells what it saw (`PairResult`).
"""

from __future__ import annotations

import msgspec

from unicron_lightning.fields import Host, Key, Port, Rate, Seconds
from unicron_lightning.message import Message


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """How much is exchanged, and how long that may take."""

    size: int
    """Bytes in each direction."""
    seconds: float


class PairServe(Message, frozen=True, kw_only=True, tag="pair_serve"):
    """[to the agent] Serve one exchange. Answered by `PairServing`, or by a `PairResult` that says why not."""

    check: str
    amount: Amount


class PairServing(Message, frozen=True, kw_only=True, tag="pair_serving"):
    """[to the coordinator] The exchange is served here, for some seconds."""

    check: Key
    host: Host
    port: Port
    key: Key
    """Made for this exchange, 64 hexadecimal digits. Who connects proves that it knows it, and the token."""


class PairConnect(Message, frozen=True, kw_only=True, tag="pair_connect"):
    """[to the agent] Exchange data with an agent that serves. Answered by `PairResult`."""

    check: str
    agent: str
    """Who serves."""
    host: str
    port: int
    key: str
    amount: Amount


class PairEnd(Message, frozen=True, kw_only=True, tag="pair_end"):
    """[to the agent that serves] The other one has given up: say what you saw, by `PairResult`."""

    check: str


class PairResult(Message, frozen=True, kw_only=True, tag="pair_result"):
    """[to the coordinator] An exchange has ended."""

    check: Key
    cause: str = ""
    """Why it failed; "" if it did not."""
    round_trip: Seconds | None = None
    """Seconds, the median of some."""
    sent: Rate | None = None
    """Bytes per second to the other one."""
    received: Rate | None = None
    """Bytes per second from it."""
