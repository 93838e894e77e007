"""Division of a step's micro-batches over the ranks: pure functions with the same result on every rank.

A step consists of the micro-batches ``0..M-1``; fewer at the end of the data. Shares are distributed round-robin. The
redistribution of a lost rank's micro-batches (UNICRON section "resume from partial results") applies the same rule to
another list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unicron_lightning.worker.balance import deal
from unicron_lightning.worker.report_sum import ReportSum


def share(micro_batches: Sequence[int], rank: int, world: int) -> list[int]:
    """The share of ``micro_batches`` for ``rank`` of ``world`` ranks, in order."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not in 0..{world - 1}")
    return list(micro_batches[rank::world])


def own(in_full_step: Sequence[int], rank: int, world: int) -> list[int]:
    """The share of a step with missing micro-batches: each stays on the rank that has it in a step without.

    Args:
        in_full_step: of each micro-batch its number in a step without missing ones.
        rank: rank to plan for.
        world: number of ranks.
    """
    return [number for number, place in enumerate(in_full_step) if place % world == rank]


def present(places: Sequence[int], in_full_step: Sequence[int]) -> list[int]:
    """Return the micro-batches that there are at some places of a full step; ``in_full_step`` as for `own`."""
    numbers = {place: number for number, place in enumerate(in_full_step)}
    return [numbers[place] for place in places if place in numbers]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Remaining work of a step for one rank.

    Attributes:
        todo: micro-batches to compute, in order.
        held: buckets that some ranks have reduced and others have not, with the rank that sends each.
        reduced: buckets that need no further reduction, ``held`` included.
        lost: micro-batches that no present rank has finished.
    """

    todo: tuple[int, ...]
    held: tuple[tuple[int, int], ...]
    reduced: frozenset[int]
    lost: tuple[int, ...]


def plan_step(
    micro_batches: Sequence[int],
    num_buckets: int,
    reports: ReportSum,
    rank: int,
    counts: Sequence[int] | None = None,
    in_full_step: Sequence[int] | None = None,
) -> StepPlan:
    """Plan the rest of a step from the members' reports.

    A bucket that is complete on any rank is sent from the lowest such rank and not reduced again. A dead rank's values
    for the commit (its loss, its logged values) are in no bucket, so its micro-batches are recomputed even if every
    bucket is complete.

    Args:
        micro_batches: all of the step.
        num_buckets: number of gradient buckets.
        reports: finished micro-batches and reduced buckets. Reduced buckets include every finished micro-batch, also
            those of dead ranks.
        rank: rank to plan for.
        counts: share of each rank in a step that no rank has begun; None: as `own`.
        in_full_step: of each micro-batch its number in a step without missing ones; None: there are none missing.
    """
    held: list[tuple[int, int]] = []
    reduced: set[int] = set()
    for bucket in range(num_buckets):
        if bucket in reports.reduced:
            first, number = reports.reduced[bucket]
            reduced.add(bucket)
            if number < reports.world:
                held.append((bucket, first))
    lost = [m for m in micro_batches if m not in reports.finished]
    if reports.begun or (counts is None and in_full_step is None):
        todo = share(lost, rank, reports.world)
    elif counts is not None:
        todo = deal(lost, counts)[rank]
    else:
        todo = [lost[number] for number in own(in_full_step or (), rank, reports.world)]
    return StepPlan(todo=tuple(todo), held=tuple(held), reduced=frozenset(reduced), lost=tuple(lost))
