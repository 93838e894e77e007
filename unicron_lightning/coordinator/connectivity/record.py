"""State of an agent's data exchanges, a part of `state.Agent`, and of nodes that do not reach each other, a part of
`state.Task`. The rules are in `pairing` and `partition`.
"""

from __future__ import annotations

import msgspec

from unicron_lightning.detection.pairs import FailedExchange


class PairCheck(msgspec.Struct, kw_only=True):
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
    own_cause: str = ""
    """Cause of the failure as reported by the agent, while the partner's report is awaited."""
    partner_cause: str = ""
    """Cause of the failure as reported by the partner, while the agent's report is awaited."""

    bad: list[FailedExchange] = []
    """Failed exchanges of the present attempt."""
    reason: str = ""
    """Reason why the agent is not admitted; "" if it is, or the result is open."""
    rests: bool = False
    """Whether the agent was not admitted and waits for the next attempt."""

    def ended(self) -> None:
        """Clear the exchange in progress."""
        self.check = self.partner = self.own_cause = self.partner_cause = ""
        self.asked = False


class NodeExclusion(msgspec.Struct, kw_only=True):
    """State of one node of a task that is excluded, or was recently."""

    reason: str = ""
    """Reason of the exclusion; "" if the node is not excluded."""
    times: list[float] = []
    """time.time() of each recent exclusion."""
    reached_since: float = 0.0
    """Time since which the node and the others have reached each other; 0 if they do not."""


class ProbeState(msgspec.Struct, kw_only=True):
    """State of one task: the probe in progress, and excluded nodes."""

    number: int = 0
    """Number of the newest probe."""
    asked: list[str] = []
    """Agents whose answer is pending; empty if no probe is in progress."""
    missed: dict[str, list[str]] = {}
    """Agents not reached, by agent that has answered."""
    rests_until: float = 0.0
    """Time until which no suspicion leads to another probe."""
    weak_rests_until: float = 0.0
    """Time until which no weak suspicion (a wait, perhaps for a slow rank) leads to another probe."""
    clean: int = 0
    """Number of probes since the last one that found a cut."""
    entering: int = 0
    """Epoch whose members are watched while they connect."""
    looks: int = 0
    """Number of checks of that epoch's members."""
    nodes: dict[str, NodeExclusion] = {}
    """By label."""
