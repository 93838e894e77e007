"""What is known of an agent's exchanges of data with others of its task; a part of `state.Agent`."""

from __future__ import annotations

import msgspec

from unicron_lightning.detection.pairs import Bad


class Paired(msgspec.Struct, kw_only=True):
    """Of one agent. Used only where the check is wanted; see `pairing`."""

    passed: bool = False
    """It may have workers."""
    proof: str = ""
    """The agent with which an exchange was good; "" while there was none, as if it was alone."""
    suspect: bool = False
    """An exchange with it failed for one that had a good one with another."""

    count: int = 0
    check: str = ""
    """Name of the exchange that it has asked for and that goes on; "" if none does."""
    partner: str = ""
    """With whom."""
    asked: bool = False
    """The partner serves, and the agent was told where."""
    told: str = ""
    """Why it failed, by the agent's word; the partner's is awaited."""
    saw: str = ""
    """Why it failed, by the partner's word; the agent's is awaited."""

    bad: list[Bad] = []
    """Those that failed, since it last began."""
    reason: str = ""
    """Why it is not admitted; "" if it is, or that is not known yet."""
    rests: bool = False
    """It was not admitted, and waits for the next try."""

    def ended(self) -> None:
        """No exchange goes on any more."""
        self.check = self.partner = self.told = self.saw = ""
        self.asked = False
