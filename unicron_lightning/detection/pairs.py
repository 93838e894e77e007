"""Judgement of a data exchange between two nodes, and of the node at fault if it failed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from unicron_lightning.wire.peers import Amount, PairResult

PARTNERS: Final = 2
"""Number of partners with which exchanges have to fail before the fault is the node's own."""

_MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PairLimits:
    """Limits of the exchange before a node's admission. See the group ``health`` of the configuration."""

    check: bool = False
    """Whether the exchange takes place."""
    size: float = 4.0
    """MiB in each direction."""
    seconds: float = 2.0
    """Maximum seconds of the whole exchange."""
    bandwidth: float = 100.0
    """Minimum Mbit/s in either direction; 0: no limit."""
    retry: float = 30.0
    """Seconds after which a node that was not admitted tries again."""

    @property
    def amount(self) -> Amount:
        """Amount of data to exchange."""
        return Amount(size=max(1, round(self.size * _MIB)), seconds=self.seconds)


class FailedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """A failed exchange with an agent."""

    agent: str
    node: str
    cause: str
    partner_cause: str = ""
    """The failure as the other agent observed it."""


def fault(result: PairResult, limits: PairLimits) -> str:
    """Return the fault of an exchange; "" if there is none."""
    if result.cause or not limits.bandwidth:
        return result.cause
    for direction, speed in (("sent", result.sent or 0.0), ("received", result.received or 0.0)):
        if speed * 8 / 1e6 < limits.bandwidth:
            return f"{direction} at {speed * 8 / 1e6:.3g} Mbit/s; expected {limits.bandwidth:g}"
    return ""


def conclude(bad: Sequence[FailedExchange], *, others: bool, before: bool) -> Literal["try", "admit", "bar"]:
    """Decide the next step for a node without a successful exchange.

    Args:
        bad: failed exchanges, each with another partner.
        others: whether an untried node is left.
        before: whether the node came before its last partner, and neither has workers or is known to be good: one of
            the two is admitted, as training could never start otherwise.

    Returns:
        Whether to try the next partner, or else to admit the node or not. A node without any partner is admitted.
    """
    if others and len(bad) < PARTNERS:
        return "try"
    return "admit" if not bad or (len(bad) == 1 and before) else "bar"


def cause(bad: Sequence[FailedExchange]) -> str:
    """Explain why a node is not admitted."""
    failed = "; ".join(f"with {each.node}: {each.cause}" for each in bad)
    whose = "its own link" if len(bad) >= PARTNERS else "without a third node, either link may be at fault"
    return f"the exchange of data failed {failed} ({whose})"
