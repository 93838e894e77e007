"""Division of a step's micro-batches over replicas: pure, with the same result on every worker.

A step's micro-batches are divided into *shares*, one for each declared replica. A replica runs its own share in one
call, and its part of a missing replica's share in another one, whose gradients are summed separately. With two replicas
the sums then equal those of the failure-free run, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unicron_lightning.worker.balance import deal
from unicron_lightning.worker.ledger import share


@dataclass(frozen=True, kw_only=True)
class CallReport:
    """One worker's progress in the present step.

    Attributes:
        calls: micro-batches of each completed call, in order.
        began: number of begun calls.
    """

    calls: tuple[tuple[int, ...], ...]
    began: int


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """Remaining work of a replica.

    Attributes:
        kept: number of completed calls that count.
        calls: micro-batches of each call to make, in order.
        lost: micro-batches that no present worker has finished, over all replicas.
    """

    kept: int
    calls: tuple[tuple[int, ...], ...]
    lost: tuple[int, ...]


def kept_calls(reports: Sequence[CallReport | None]) -> int:
    """Number of a replica's calls that count, from its workers' reports.

    A call that some worker has not begun has changed nothing anywhere, since no backward can run without all workers. A
    call that all have begun and not all completed may have changed some gradients: then nothing counts.
    """
    done = [0 if report is None else len(report.calls) for report in reports]
    began = [0 if report is None else report.began for report in reports]
    return min(done) if min(done) == max(done) and (max(began) == max(done) or min(began) < max(began)) else 0


def plan_calls(
    micro_batches: Sequence[int],
    declared: int,
    replicas: Sequence[Sequence[CallReport | None] | None],
    place: int | None,
    counts: Sequence[int] | None = None,
) -> CallPlan:
    """Plan the rest of a step.

    Args:
        micro_batches: all of the step.
        declared: number of replicas without failures.
        replicas: for each replica its workers' reports, by shard; None for a replica without progress.
        place: the replica to plan for; None for a spare.
        counts: micro-batches of each replica in a step that none has begun, if all declared ones are there; None:
            distributed round-robin.
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
    if not finished and counts is not None and world == declared:
        calls = [deal(micro_batches, counts)[place]]
    elif not finished:
        shares = [share(micro_batches, number, declared) for number in range(declared)]
        rest = sorted(m for missing in shares[world:] for m in missing)
        calls = [shares[place] if place < declared else [], share(rest, place, world)]
    else:
        calls = [share(lost, place, world)]
    return CallPlan(kept=kept[place], calls=tuple(tuple(call) for call in calls if call), lost=tuple(lost))
