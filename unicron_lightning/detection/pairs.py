"""Whether an exchange of data between two nodes was good enough, and which of them is at fault if not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from unicron_lightning.pairwire import Amount, PairResult

PARTNERS: Final = 2
"""With so many others an exchange has to fail before it is known to be the node's own fault."""

_MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PairLimits:
    """Of the exchange before a node's admission. See the group ``health`` of the configuration."""

    check: bool = False
    """Whether there is one."""
    size: float = 4.0
    """MiB in each direction."""
    seconds: float = 2.0
    """How long all of it may take."""
    bandwidth: float = 100.0
    """Mbit/s, the least in either direction; 0: any will do."""
    retry: float = 30.0
    """Seconds after which a node that was not admitted is tried again."""

    @property
    def amount(self) -> Amount:
        """What is exchanged."""
        return Amount(size=max(1, round(self.size * _MIB)), seconds=self.seconds)


class Bad(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange with an agent failed."""

    agent: str
    node: str
    cause: str
    saw: str = ""
    """What the other one has seen of it."""


def fault(result: PairResult, limits: PairLimits) -> str:
    """What was wrong with an exchange; "" if nothing was."""
    if result.cause or not limits.bandwidth:
        return result.cause
    for direction, speed in (("sent", result.sent or 0.0), ("received", result.received or 0.0)):
        if speed * 8 / 1e6 < limits.bandwidth:
            return f"{direction} at {speed * 8 / 1e6:.3g} Mbit/s; expected {limits.bandwidth:g}"
    return ""


def conclude(bad: Sequence[Bad], *, others: bool, before: bool) -> Literal["try", "admit", "bar"]:
    """What follows from failed exchanges of a node that has had no good one.

    Args:
        bad: each with another partner.
        others: whether there is a node with which none was tried.
        before: whether the node came before its last partner, and neither has workers or is known to be good: one of
            the two is let in, as nobody could ever train otherwise.

    Returns:
        Whether the next is to be tried, or else the node is to be admitted or not. One that has nobody to exchange data
        with is admitted.
    """
    if others and len(bad) < PARTNERS:
        return "try"
    return "admit" if not bad or (len(bad) == 1 and before) else "bar"


def cause(bad: Sequence[Bad]) -> str:
    """Why a node is not admitted, for people."""
    failed = "; ".join(f"with {each.node}: {each.cause}" for each in bad)
    whose = "its own link" if len(bad) >= PARTNERS else "no third node is there to tell whose link it is"
    return f"the exchange of data failed {failed} ({whose})"
