"""The terms on which a task competes for workers: one value for jobs, the coordinator, the planner and the simulator.

A term that is added here is in every fingerprint of a plan, since these are made from all fields, and reaches every
holder, since these are made by `Terms.of` and `dataclasses.replace`. The coordinator counts slots, each of which is one
worker to the planner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of one task.

    Attributes:
        weight: w(t), the value of a FLOP of this task relative to other tasks.
        min_workers: fewest workers with which it may run.
        max_workers: most workers it may have, None for no limit.
        granularity: its number of workers is a multiple of this, e.g. TP x PP, or the workers of a node.
        may_pause: whether a plan may give it no workers in favour of others. Otherwise the task is paused only if
            the minimums of all such tasks do not fit together.
    """

    weight: float = 1.0
    min_workers: int = 1
    max_workers: int | None = None
    granularity: int = 1
    may_pause: bool = True

    @classmethod
    def of(cls, given: object, **known: Any) -> Terms:
        """Take each term from the attribute of its name.

        Args:
            given: holder of the attributes, e.g. a section of a file.
            known: terms that ``given`` has not, or has under another name.
        """
        # Not by `fields`, which is slower: a coordinator of many tasks does this for each when a place changes.
        return cls(**{name: getattr(given, name) for name in cls.__dataclass_fields__ if name not in known}, **known)

    @property
    def values(self) -> tuple[object, ...]:
        """Every term, in the order of the fields, for a digest."""
        return tuple(vars(self).values())

    def problem(self) -> str | None:
        """Return the error in the terms, in words that quote it; None if they are valid."""
        if not (math.isfinite(self.weight) and self.weight > 0):
            return f"weight={self.weight!r}: expected a positive number"
        if self.min_workers < 1 or self.granularity < 1:
            given = f"min_workers={self.min_workers!r}, granularity={self.granularity!r}"
            return f"{given}: expected whole numbers of at least 1"
        if self.max_workers is not None and self.max_workers < self.min_workers:
            return f"max_workers={self.max_workers!r}: expected at least min_workers={self.min_workers}"
        return None

    def usable(self, num_workers: int) -> int:
        """Return how many of a number of workers the task can use; 0 if they are fewer than its minimum."""
        most = num_workers if self.max_workers is None else min(num_workers, self.max_workers)
        whole = most - most % self.granularity
        return whole if whole >= self.min_workers else 0
