"""Who computes which micro-batches of a step: pure functions, the same answer on every rank.

A step is the micro-batches ``0..M-1``. Shares are dealt round-robin, so a step's normal shares and the dealing of a
lost rank's micro-batches (UNICRON section "resume from partial results") are one rule applied to different lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unicron_lightning.worker.balance import deal


def share(micro_batches: Sequence[int], rank: int, world: int) -> list[int]:
    """The part of ``micro_batches`` that falls to ``rank`` of ``world`` ranks, in order."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not in 0..{world - 1}")
    return list(micro_batches[rank::world])


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one rank has of the step in progress.

    Attributes:
        finished: micro-batches summed into its local gradients.
        reduced: buckets whose all-reduce completed here; they hold every finished micro-batch, the dead's included.
    """

    finished: frozenset[int]
    reduced: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What remains of a step for one rank.

    Attributes:
        todo: micro-batches to compute, in order.
        held: buckets that some ranks have reduced and others have not, with the rank that hands each out.
        reduced: buckets that need no reduction any more, ``held`` included.
        lost: micro-batches that nobody present has finished, over all ranks.
    """

    todo: tuple[int, ...]
    held: tuple[tuple[int, int], ...]
    reduced: frozenset[int]
    lost: tuple[int, ...]


def plan_step(
    micro_batches: Sequence[int],
    num_buckets: int,
    reports: Sequence[StepReport | None],
    rank: int,
    counts: Sequence[int] | None = None,
) -> StepPlan:
    """Plans the rest of a step from what each rank has of it (None: nothing yet).

    A bucket that is complete anywhere is handed out from the lowest such rank and not reduced again. What a dead rank
    would have said in the commit (its loss, what it logged) is in no bucket, so its micro-batches are computed again
    even if every bucket is complete.

    Args:
        micro_batches: all of the step.
        num_buckets: number of gradient buckets.
        reports: by rank; their number is the world.
        rank: whose plan it is.
        counts: by rank, how many of a step that nobody has begun it gets; None: dealt round-robin.
    """
    world = len(reports)
    held: list[tuple[int, int]] = []
    reduced: set[int] = set()
    for bucket in range(num_buckets):
        holders = [r for r, report in enumerate(reports) if report is not None and bucket in report.reduced]
        if holders:
            reduced.add(bucket)
            if len(holders) < world:
                held.append((bucket, holders[0]))
    finished = _union(report.finished for report in reports if report is not None)
    lost = [m for m in micro_batches if m not in finished]
    begun = any(report is not None for report in reports)
    todo = share(lost, rank, world) if counts is None or begun else deal(lost, counts)[rank]
    return StepPlan(todo=tuple(todo), held=tuple(held), reduced=frozenset(reduced), lost=tuple(lost))


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*sets)
