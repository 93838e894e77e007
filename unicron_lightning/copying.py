"""Copies of trainers: what belongs to this process, such as threads, sockets and hooks, is not copied.

Scripts for ddp copy trainers with `copy.deepcopy` and pickle them. A copy of a trainer under ``unicron`` has its
settings, its counters and its model; it opens its part in the task when it is run.
"""

from __future__ import annotations

from typing import Any, SupportsIndex


class OfProcess:
    """Base of objects that exist once in a process: the copy of a reference to one, or what is pickled, is None."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return type(None), ()
