"""Possible next events of a cluster, which plans are made ahead for.

* `WorkersLost`: workers fail, of one or several tasks, or idle ones.
* `NodesJoined`: workers are added, new or repaired.
* `TaskFinished`: a task ends.
* `TaskLaunched`: a queued task is to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkersLost:
    """Workers fail.

    Attributes:
        num_workers: number of failed workers, idle ones included.
        by_task: number of failed workers of each affected task, by name; given as a mapping or as pairs.

    Raises:
        ValueError: a number is not positive, or the tasks lose more workers than fail.
    """

    num_workers: int
    by_task: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        pairs = self.by_task.items() if isinstance(self.by_task, Mapping) else self.by_task
        object.__setattr__(self, "by_task", tuple(sorted(pairs)))
        lost = [number for _, number in self.by_task]
        if self.num_workers < 1 or any(number < 1 for number in lost):
            raise ValueError(f"{self!r}: expected at least one lost worker, and one of each named task")
        if sum(lost) > self.num_workers:
            raise ValueError(f"{self!r}: the tasks lose {sum(lost)} workers, expected at most {self.num_workers}")
        if len(dict(self.by_task)) != len(self.by_task):
            raise ValueError(f"{self!r}: expected each task once")


@dataclass(frozen=True, kw_only=True)
class NodesJoined:
    """``num_workers`` workers are added.

    Raises:
        ValueError: the number is below one.
    """

    num_workers: int

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"num_workers={self.num_workers!r}: expected at least 1")


@dataclass(frozen=True, kw_only=True)
class TaskFinished:
    """The running task ``task`` ends and frees its workers."""

    task: str


@dataclass(frozen=True, kw_only=True)
class TaskLaunched:
    """The queued task ``task`` is to run."""

    task: str


Event = WorkersLost | NodesJoined | TaskFinished | TaskLaunched
