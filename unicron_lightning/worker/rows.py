"""Division of work among replicas, from the members' reports: the same result on every worker. Pure.

A *row* is the part of a step, an evaluation or a prediction that a replica computes at a time: ``width`` micro-batches
or batches with neighbouring numbers. A worker that holds the whole model is a replica by itself, with a width of 1.
Workers that hold stages, or parts of each layer, compute one together. A replica of S shards computes S together, one
on each shard.

One rule holds for all of them (UNICRON section "resume from partial results"): the rows that no present worker has
finished are distributed round-robin over the present replicas (`plan_rows`). Two cases deviate:

- A step that no replica has begun is divided into shares (`shares_of`). They depend on the replicas' speed, on
  micro-batches that are missing because streams have ended, and on replicas that are missing, whose shares are
  computed apart: with two replicas, the sums of gradients then equal those of a run without failures.
- A stream is read in order, so replicas get whole streams as long as each can have one (`share_streams`).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from typing_extensions import Self

from unicron_lightning import wire
from unicron_lightning.copying import OfProcess
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


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """Remaining work of a replica.

    Attributes:
        calls: its rows, in order. Its part of missing replicas' shares is a call of its own, whose gradients a replica
            of several workers sums separately.
        lost: rows that no present worker has finished, over all replicas.
    """

    calls: tuple[tuple[int, ...], ...]
    lost: tuple[int, ...]

    @property
    def rows(self) -> list[int]:
        """The rows of all calls."""
        return [row for call in self.calls for row in call]


def plan_rows(
    batches: Iterable[int],
    finished: Collection[int],
    place: int | None,
    replicas: int,
    *,
    width: int = 1,
    shares: Sequence[Sequence[int]] | None = None,
) -> RowPlan:
    """Plan the rest of an operation for one replica.

    Args:
        batches: all micro-batches or batches, by number.
        finished: those that present workers have finished.
        place: of the replica among the present ones; None for a spare, which has no rows.
        replicas: number of present replicas.
        width: micro-batches or batches of a row; an incomplete row is computed again.
        shares: rows of each declared replica, as long as nothing is finished; None: they are shared like the rest.
    """
    lost = list(dict.fromkeys(batch // width for batch in batches if batch not in finished))
    if shares is None or finished or place is None:
        calls = [share(lost, place, replicas)]
    else:
        rest = sorted(row for missing in shares[replicas:] for row in missing)
        own = shares[place] if place < len(shares) else ()  # more replicas than declared may be present
        calls = [list(own), share(rest, place, replicas)]
    return RowPlan(calls=tuple(tuple(call) for call in calls if call), lost=tuple(lost))


def share(rows: Sequence[int], place: int | None, replicas: int) -> list[int]:
    """Return the round-robin share of the replica at ``place``, in order; an empty one for a spare (None).

    Raises:
        ValueError: there is no such place.
    """
    if place is None:
        return []
    if not 0 <= place < replicas:
        raise ValueError(f"rank {place} is not in 0..{replicas - 1}")
    return list(rows[place::replicas])


def shares_of(
    rows: Sequence[int],
    replicas: int,
    counts: Sequence[int] | None = None,
    in_full_step: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the share of each replica in a step that none has begun.

    Args:
        rows: all of the step.
        replicas: number of replicas.
        counts: number of rows of each replica, by speed; None: as equal as possible.
        in_full_step: of each row its number in a step without missing ones, which determines its replica unless there
            are counts; None: there are none missing.
    """
    if counts is not None:
        return deal(rows, counts)
    shares: list[list[int]] = [[] for _ in range(replicas)]
    for row, number in zip(rows, range(len(rows)) if in_full_step is None else in_full_step, strict=True):
        shares[number % replicas].append(row)
    return shares


def deal(rows: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Divide rows among replicas, such that small changes of the counts move few rows.

    Raises:
        ValueError: the counts do not add up to the number of rows.
    """
    if sum(counts) != len(rows):
        raise ValueError(f"shares {list(counts)} of {len(rows)} micro-batches: expected counts with that sum")
    dealt = shares_of(rows, len(counts))
    over = [row for part, count in zip(dealt, counts, strict=True) for row in part[count:]]
    shares = [part[:count] for part, count in zip(dealt, counts, strict=True)]
    for part, count in zip(shares, counts, strict=True):
        while len(part) < count:
            part.append(over.pop(0))
        part.sort()
    return shares


def share_streams(streams: Sequence[int], place: int | None, replicas: int) -> list[tuple[int, int, int]]:
    """Return the streams of the replica at ``place``, each with the place of its first row among the stream's
    unfinished ones, and the step to its next: each replica has as many whole streams, and a part of each remaining one.
    """
    if place is None:
        return []
    whole = len(streams) // replicas * replicas
    parts = [(stream, 0, 1) for stream in share(streams[:whole], place, replicas)]
    return parts + [(stream, place, replicas) for stream in streams[whole:]]


def present(places: Sequence[int], in_full_step: Sequence[int]) -> list[int]:
    """Return the micro-batches that there are at some places of a full step; ``in_full_step`` as of `shares_of`."""
    numbers = {place: number for number, place in enumerate(in_full_step)}
    return [numbers[place] for place in places if place in numbers]


OBSERVED: Final = 8
"""Steps with one division, whose median decides on the next one."""
WORTH: Final = 0.1
"""Relative reduction of the step's longest share that justifies another division; smaller ones may be noise."""


def fit(times: Sequence[float], total: int) -> list[int]:
    """The counts with the shortest longest share, with at least one micro-batch for each rank.

    Args:
        times: of one micro-batch, by rank; > 0.
        total: number of micro-batches, at least one for each rank.
    """
    counts = [1] * len(times)
    for _ in range(total - len(times)):
        rank = min(range(len(times)), key=lambda r: ((counts[r] + 1) * times[r], r))
        counts[rank] += 1
    return counts


class Balance(OfProcess):
    """Shares of the present epoch by speed: a rank with slower micro-batches gets fewer of them.

    Every rank has to plan the same step, so the decision uses data that is equal on all ranks: each rank's time per
    micro-batch since the epoch began, as gathered after the commits. Nothing is carried over to another epoch: joiners
    and recovered workers have the same data as the others, and every epoch begins with equal shares.

    Args:
        total: returns the micro-batches of a whole step, the same on all ranks.
        epoch: returns the present epoch of membership.
        changed: called with the new counts and each rank's seconds per micro-batch.
    """

    def __init__(
        self, total: Callable[[], int], epoch: Callable[[], int], changed: Callable[[list[int], list[float]], None]
    ) -> None:
        self._whole = total
        self._now = epoch
        self._changed = changed
        self._epoch, self._total = -1, 0
        self._counts: list[int] | None = None
        self._seen: deque[list[float]] = deque(maxlen=OBSERVED)
        self._skips = True

    def counts(self, total: int) -> list[int] | None:
        """Number of a step's micro-batches for each rank; None for shares as equal as possible."""
        return self._counts if self._now() == self._epoch and total == self._total else None

    def take(self, times: Sequence[float]) -> None:
        """Record a committed step.

        Args:
            times: seconds per micro-batch of each rank; 0 for a rank without one.
        """
        if (epoch := self._now()) != self._epoch or self._whole() != self._total:
            self._epoch, self._total, self._counts, self._skips = epoch, self._whole(), None, True
            self._seen.clear()
        if self._skips or min(times) <= 0.0 or self._total < len(times):
            self._skips = False  # the first step of a division is slow because caches are cold
            return
        self._seen.append(list(times))
        if len(self._seen) == OBSERVED:
            self._review()

    def _review(self) -> None:
        usual = [statistics.median(values) for values in zip(*self._seen, strict=True)]
        counts = self._counts or [*map(len, shares_of(range(self._total), len(usual)))]
        better = fit(usual, self._total)
        now, then = (max(n * t for n, t in zip(part, usual, strict=True)) for part in (counts, better))
        if then > (1.0 - WORTH) * now:
            return
        self._counts, self._skips = better, True
        self._seen.clear()
        self._changed(better, usual)
