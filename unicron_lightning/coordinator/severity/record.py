"""What the severity workflow remembers of a task: plain structs, stored with it."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

KEPT: Final = 20
"""Failures kept for a diagnosis."""

Awaited = Literal["", "reports", "entries"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error that was seen."""

    kind: str
    """One of `errors.KINDS`."""
    node: str
    agent: str
    worker: str | None = None
    cause: str = ""
    """For people: exit status, signal, ..."""
    step: int = 0
    """Optimizer steps known to be finished."""
    at: float = 0.0
    """time.time() of the coordinator."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker that is not on record said of its error before its process ended."""

    kind: str
    cause: str


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Since when a worker has been a member."""

    node: str
    step: int
    """Optimizer steps that were finished then."""


class Series(msgspec.Struct, kw_only=True):
    """Failures of one node in a row, each of a worker that had just come."""

    times: list[float] = []
    mark: int = 0
    """`Record.mark` when it began."""
    step: int = 0
    """`Record.step` at the last one: whoever joins later and lasts ends the series."""


class Record(msgspec.Struct, kw_only=True):
    """All that decisions are made from. Steps are optimizer steps finished."""

    epoch: int = 0
    """The newest epoch that was looked at."""
    settled: bool = False
    life: int = 1

    step: int = 0
    """Newest step known of in this life."""
    mark: int = 0
    """Newest step ever known of: beyond it is progress."""
    base: int = 0
    """`step` when the newest epoch was settled."""
    joined: dict[str, Joined] = {}
    """The members of the newest settled epoch."""
    awaited: Awaited = ""
    """What the newest epoch's time is running for."""
    entered: list[str] = []
    """Members that said that they have entered the newest epoch."""
    tells: bool = False
    """The task's workers say when they enter an epoch."""

    unjudged: list[Failure] = []
    """Members' failures since the newest epoch was settled: how far they had come is known at the next."""
    failed: list[Failure] = []
    """The last failures since there was progress."""
    attempts: int = 0
    """Epochs that failed at one step since there was progress."""
    lives: int = 0
    """Lives that failed since there was progress."""
    starts: dict[str, int] = {}
    """By agent: rounds that failed before anybody trained, since there was progress."""
    rounds: dict[str, int] = {}
    """By agent: the last round in which a worker failed while it started; its siblings' failures are the same one."""

    reattempts: list[float] = []
    """When SEV3 was answered in place since a step was finished."""
    named: dict[str, int] = {}
    """By agent: how many of its workers' reports told of a failed connection since a step was finished."""
    series: dict[str, Series] = {}
    """By node."""

    told: dict[str, Told] = {}
    """By worker, of an agent's present round."""
    reports: list[tuple[str, str, float]] = []
    """Source, kind and time of the newest errors that ended nothing: an agent says some twice."""

    @property
    def most_starts(self) -> int:
        """Rounds that failed before anybody trained, of the agent that had most."""
        return max(self.starts.values(), default=0)

    @property
    def tries(self) -> int:
        """How often it has not worked since there was progress."""
        return max(self.attempts, self.most_starts)

    def begin_afresh(self) -> None:
        """What failed was not the nodes' doing, and is not tried again."""
        self.attempts = 0
        self.starts.clear()
        for failure in self.failed:
            self.series.pop(failure.node, None)
        self.failed.clear()
