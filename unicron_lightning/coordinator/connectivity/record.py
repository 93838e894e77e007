"""State of nodes that do not reach each other, a part of `state.Task`. The rules are in `partition`."""

from __future__ import annotations

import msgspec


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
