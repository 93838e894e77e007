"""What the members have done of the operation in progress, as known to each of them when they plan the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import Self

from unicron_lightning import wire
from unicron_lightning.wire.report_sums import numbers_of

Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReportSum:
    """The members' reports of one operation, summed over the members that have begun it.

    Attributes:
        world: number of members.
        begun: whether any has begun.
        finished: micro-batches, or batches, that any has finished.
        reduced: for each bucket whose reduction is complete somewhere, the lowest such rank and the number of ranks.
        donor: lowest rank that has the task's state, if some have not; else None.
        members: each one's own report, by rank (None: not begun); empty if each worker holds the whole model and
            there are reports.
    """

    world: int
    begun: bool = False
    finished: frozenset[int] = frozenset()
    reduced: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    donor: int | None = None
    members: tuple[Report | None, ...] = ()

    @classmethod
    def nothing(cls, world: int) -> Self:
        """The sum of an operation that no member has begun."""
        return cls(world=world, members=(None,) * world)

    @classmethod
    def of(cls, go: wire.Go, world: int, members: tuple[Report | None, ...] = ()) -> Self:
        """The sum that the coordinator has sent for an epoch of ``world`` members, with each one's own report."""
        having = [standing.first for standing in go.standings if standing.position is not None]
        return cls(
            world=world,
            begun=True,
            finished=numbers_of(go.finished),
            reduced={run.bucket + place: (run.first, run.count) for run in go.reduced for place in range(run.buckets)},
            donor=min(having, default=None) if len(having) < len(go.standings) else None,
            members=members,
        )
