"""What is remembered of a task's hangs and slowness: a plain struct, stored with the task."""

from __future__ import annotations

import msgspec

from unicron_lightning import wire


class Watch(msgspec.Struct, kw_only=True):
    """All times are time.time() of the coordinator."""

    epoch: int = 0
    """The task's newest epoch when the answers were given: those of another say nothing."""
    since: float = 0.0
    """When the first member was overdue; 0: none is."""
    pause: float = 0.0
    """Until the members are asked again."""
    said: dict[str, wire.Doing] = {}
    """By member: what it does."""
    inspected: dict[str, wire.Inspect] = {}
    """By worker: its agent takes down its stacks."""

    slow_since: float = 0.0
    """Since when the steps have been slower than usual; 0: they are not."""
    degraded: bool = False
    """They have been for long."""
    behind: dict[str, float] = {}
    """By member: since when its micro-batches have taken longer than its peers'."""
    stragglers: dict[str, float] = {}
    """Those for whom that has been so for long: how many times longer."""
