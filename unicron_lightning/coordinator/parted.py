"""What is known of nodes that do not reach each other; a part of `state.Task`. Rules are in `partition`."""

from __future__ import annotations

import msgspec


class Parted(msgspec.Struct, kw_only=True):
    """Of one node of a task that was left out, now or lately."""

    reason: str = ""
    """Why it is left out; "" if it is not any more."""
    times: list[float] = []
    """time.time() of each time that it was left out lately."""
    reached_since: float = 0.0
    """Since when it and the others have reached each other; 0: they do not."""


class Probing(msgspec.Struct, kw_only=True):
    """Of one task: the probe in progress, and the nodes that were left out."""

    number: int = 0
    """Of the newest probe."""
    asked: list[str] = []
    """Agents of which an answer is awaited; empty if no probe is in progress."""
    missed: dict[str, list[str]] = {}
    """By agent that has answered: agents that it did not reach."""
    rests_until: float = 0.0
    """Until then no suspicion leads to another probe."""
    weak_rests_until: float = 0.0
    """The same for a weak suspicion: that somebody waits, maybe for a slow rank."""
    clean: int = 0
    """Probes since a cut was found last."""
    entering: int = 0
    """Epoch whose members are watched while they connect."""
    looks: int = 0
    """How often they have been."""
    nodes: dict[str, Parted] = {}
    """By label."""
