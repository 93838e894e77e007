"""Which replica computes which micro-batches of a step: pure, the same answer on every worker.

A step's micro-batches fall into *shares*, one for each declared replica. A replica runs its own share in one call of
Megatron's schedule, and what it does for a missing replica in another, whose gradients are summed apart: with two
replicas the sums are then those of the failure-free run, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unicron_lightning.worker.ledger import share


@dataclass(frozen=True, kw_only=True)
class CallReport:
    """What one worker has of the step in progress.

    Attributes:
        calls: micro-batches of each completed call of the schedule, in order.
        began: calls begun.
    """

    calls: tuple[tuple[int, ...], ...]
    began: int


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """What remains for a replica.

    Attributes:
        kept: completed calls that count.
        calls: micro-batches of each call to make, in order.
        lost: micro-batches that nobody present has finished, over all replicas.
    """

    kept: int
    calls: tuple[tuple[int, ...], ...]
    lost: tuple[int, ...]


def kept_calls(reports: Sequence[CallReport | None]) -> int:
    """How many calls of a replica count, from its workers' reports.

    A call that some worker has not begun has changed nothing anywhere: no backward can run without all of them. One
    that all have begun and not all completed may have left parts of itself in some gradients: then nothing counts.
    """
    done = [0 if report is None else len(report.calls) for report in reports]
    began = [0 if report is None else report.began for report in reports]
    return min(done) if min(done) == max(done) and (max(began) == max(done) or min(began) < max(began)) else 0


def plan_calls(
    micro_batches: Sequence[int],
    declared: int,
    replicas: Sequence[Sequence[CallReport | None] | None],
    place: int | None,
) -> CallPlan:
    """Plans the rest of a step.

    Args:
        micro_batches: all of the step.
        declared: replicas without failures.
        replicas: for each replica its workers' reports, by shard; None for one that has nothing.
        place: whose plan it is; None of a spare.
    """
    kept = [0 if reports is None else kept_calls(reports) for reports in replicas]
    finished: set[int] = set()
    for number, reports in zip(kept, replicas, strict=True):
        if reports is not None and reports[0] is not None:
            finished.update(m for call in reports[0].calls[:number] for m in call)
    lost = [m for m in micro_batches if m not in finished]
    if place is None:
        return CallPlan(kept=0, calls=(), lost=tuple(lost))
    world = len(replicas)
    if not finished:
        shares = [share(micro_batches, number, declared) for number in range(declared)]
        rest = sorted(m for missing in shares[world:] for m in missing)
        calls = [shares[place] if place < declared else [], share(rest, place, world)]
    else:
        calls = [share(lost, place, world)]
    return CallPlan(kept=kept[place], calls=tuple(tuple(call) for call in calls if call), lost=tuple(lost))
