"""Sums of the members' reports: what the coordinator sends all members of an epoch before they connect. Pure.

A member's plan for the rest of an operation depends on what all members together have done of it. The size of the sum
depends on what is missing and not on the number of members. If the model is spread over several workers, a plan also
depends on each member's own report: the members exchange these after they have connected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

from unicron_lightning.wire import Go, Holders, Standing


def summed(epoch: int, states: Sequence[Mapping[str, Any]]) -> Go:
    """Sum the states that an epoch's members reported (`wire.WorkerReady.state`).

    Args:
        epoch: its number.
        states: by rank; a missing entry has the value of a worker that has begun nothing.
    """
    positions = [state.get("position", 0) if state.get("has_state", True) else None for state in states]
    newest = max((position for position in positions if position is not None), default=None)
    standings: dict[tuple[int | None, str], list[int]] = {}
    finished: set[int] = set()
    holders: dict[int, list[int]] = {}
    for rank, (state, position) in enumerate(zip(states, positions, strict=True)):
        standings.setdefault((position, state.get("operation", "")), []).append(rank)
        if position is not None and position == newest:
            report = state.get("report", {})
            finished.update(report.get("finished", ()))
            for bucket in report.get("reduced", ()):
                holders.setdefault(bucket, []).append(rank)
    return Go(
        epoch=epoch,
        standings=tuple(
            Standing(position=position, operation=operation, first=ranks[0], count=len(ranks))
            for (position, operation), ranks in standings.items()
        ),
        finished=tuple(lengths_of(finished)),
        reduced=tuple(_runs_of(holders)),
    )


def lengths_of(numbers: Iterable[int]) -> list[int]:
    """Describe a set of numbers by the lengths of its runs: of missing ones from 0, of present ones, and so on."""
    lengths: list[int] = []
    end = 0
    for number in sorted(numbers):
        if lengths and number == end:
            lengths[-1] += 1
        else:
            lengths += [number - end, 1]
        end = number + 1
    return lengths


def numbers_of(lengths: Sequence[int]) -> frozenset[int]:
    """Return the numbers that `lengths_of` has described."""
    ends = [0, *accumulate(lengths)]
    return frozenset(n for start, end in zip(ends[1::2], ends[2::2], strict=False) for n in range(start, end))


def _runs_of(holders: Mapping[int, Sequence[int]]) -> list[Holders]:
    """Join neighbouring buckets that as many members hold, with the same first one."""
    found: list[Holders] = []
    facts = sorted((bucket, ranks[0], len(ranks)) for bucket, ranks in holders.items())
    for (_, first, count), run in groupby(enumerate(facts), lambda item: (item[1][0] - item[0], *item[1][1:])):
        buckets = [bucket for _, (bucket, _, _) in run]
        found.append(Holders(bucket=buckets[0], buckets=len(buckets), first=first, count=count))
    return found
