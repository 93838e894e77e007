"""State of an agent's data exchanges with others of its task; a part of `state.Agent`."""

from __future__ import annotations

import msgspec

from unicron_lightning.detection.pairs import Bad


class Paired(msgspec.Struct, kw_only=True):
    """Exchanges of one agent. Used only where the check is enabled; see `pairing`."""

    passed: bool = False
    """Whether the agent may have workers."""
    proof: str = ""
    """Agent of the successful exchange; "" if there was none, e.g. because the agent was alone."""
    suspect: bool = False
    """Whether an exchange with this agent failed for one that succeeded with another."""

    count: int = 0
    check: str = ""
    """Name of the exchange in progress that the agent has requested; "" if there is none."""
    partner: str = ""
    """Partner of the exchange in progress."""
    asked: bool = False
    """Whether the partner serves, and the agent was notified of its address."""
    told: str = ""
    """Cause of the failure as reported by the agent, while the partner's report is awaited."""
    saw: str = ""
    """Cause of the failure as reported by the partner, while the agent's report is awaited."""

    bad: list[Bad] = []
    """Failed exchanges of the present attempt."""
    reason: str = ""
    """Reason why the agent is not admitted; "" if it is, or the result is open."""
    rests: bool = False
    """Whether the agent was not admitted and waits for the next attempt."""

    def ended(self) -> None:
        """Clear the exchange in progress."""
        self.check = self.partner = self.told = self.saw = ""
        self.asked = False
