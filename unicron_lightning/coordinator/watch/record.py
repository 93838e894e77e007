"""State of a task's hang and slowness detection: a plain struct, stored with the task."""

from __future__ import annotations

import msgspec

from unicron_lightning import wire


class WatchRecord(msgspec.Struct, kw_only=True):
    """Detection state. All times are time.time() of the coordinator."""

    epoch: int = 0
    """The task's newest epoch when the reports were made; reports of other epochs do not count."""
    since: float = 0.0
    """Time at which the first member was overdue; 0: none is."""
    pause: float = 0.0
    """Seconds until the members are asked again."""
    reports: dict[str, wire.ActivityReport] = {}
    """Reported activity of each member."""
    inspected: dict[str, wire.Inspect] = {}
    """Orders to agents to record stacks, by worker."""

    slow_since: float = 0.0
    """Time since which steps have been slower than usual; 0: they are not."""
    degraded: bool = False
    """Whether steps have been slow long enough for the task to be degraded."""
    behind: dict[str, float] = {}
    """Time since which a member's micro-batches have taken longer than its peers', by member."""
    stragglers: dict[str, float] = {}
    """Factor by which each straggler is slower: members that have been behind for long enough."""
