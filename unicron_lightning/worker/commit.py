"""The commit of a step: one small sum over all members, after which each of them may step its optimizer.

By it the members sum the step's other results (loss, logged values) and count those that know of a pending epoch; if
all do, all switch at the end of the step. A member with the result knows that every member has come this far.

`Step` has what the steps of all kinds share: their plan from the members' reports, the commit, and the comparison of
states after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
import torch

from unicron_lightning.worker.agreement import Difference, first_unequal, odd_holders
from unicron_lightning.worker.buckets import Bucket
from unicron_lightning.worker.communication.communicator import gather_bytes, gather_rows
from unicron_lightning.worker.digest import StateDigest
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.rows import Balance, ReportSum

Agreed = tuple[int, bool, list[float], list[float]]
"""The result of a step, the same on all members: the epoch that all agree to leave at its end (0: none); whether any
member wants the run to end with it; the members' further numbers, and the step's other sums, over the members.
"""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Agreed).decode


class Sums(Protocol):
    """Other sums over a step's micro-batches: metrics, buffers, the loss."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Large sums over this rank's micro-batches, reduced after the gradients; the same number and sizes on all
        ranks.
        """

    def totals(self) -> Sequence[float]:
        """Small sums over this rank's micro-batches, sent with the commit; equally many on all ranks."""

    def read(self, totals: Sequence[float]) -> bool:
        """Store `totals` summed over the ranks; return whether `settle` must follow."""

    def settle(self, engine: Engine) -> None:
        """Communicate before a second commit; must be repeatable."""


_Sums = TypeVar("_Sums", bound=Sums)


class Step(ABC, Generic[_Sums]):
    """The operation of one optimizer step, up to its commit.

    Args:
        micro_batches: all of the step's, by number; of replicas of several workers, its rows.
        sums: the other sums; None: they are made once this worker's part is complete.
        balance: shares by speed; None: equal ones.
        digest: of this worker's state before the step.

    Attributes:
        micro_batches, sums: as above.
        recomputed: micro-batches that no present worker had finished when the step was planned again.
        difference: between the states of the present world's ranks before the step; None without one.
        numbers: further numbers of the members in the commit, summed over them.
    """

    name = "step"

    def __init__(
        self, micro_batches: Sequence[int], sums: _Sums | None, balance: Balance | None, digest: StateDigest
    ) -> None:
        self.micro_batches = list(micro_batches)
        self.sums = sums
        self.recomputed: list[int] = []
        self.difference: Difference | None = None
        self.numbers: list[float] = []
        self._balance = balance
        self._digest = digest
        self._engine: Engine | None = None
        self._again = False
        """Whether the step has been planned before."""

    def plan(self, reports: ReportSum, rank: int) -> None:
        counts = None if self._balance is None else self._balance.counts(len(self.micro_batches))
        lost = self._plan_rest(reports, rank, counts)
        if self._again:
            self.recomputed = list(lost)
        self._again = True

    @abstractmethod
    def _plan_rest(self, reports: ReportSum, rank: int, counts: Sequence[int] | None) -> Sequence[int]:
        """Plan this worker's remaining work; return the micro-batches that no present worker has finished.

        Args:
            reports: of the members.
            rank: of this worker.
            counts: of the shares by speed; None: equal ones.
        """

    def adopt(self, result: bytes) -> None:
        # A peer has committed, so this worker was in the commit: only the result is missing.
        engine = self._engine
        assert engine is not None and self.sums is not None
        self.difference = None  # refers to another world, if to any
        engine.switch_from, engine.stops, own, totals = _decode(result)
        *self.numbers, _ = own
        self.sums.read(totals)

    def _commit(
        self, engine: Engine, digest: StateDigest, replicas: Sequence[Sequence[int]], numbers: Sequence[float] = ()
    ) -> bytes:
        """Commit the step, of which this worker's part is complete, and compare states; return the result.

        Args:
            engine: this worker's.
            digest: of this worker's state.
            replicas: the ranks that hold the parts of the model, of each replica in the same order.
            numbers: further ones of this rank; equally many on all ranks.
        """
        assert self.sums is not None
        engine.activity.enter("commit")
        busy, mine = engine.activity.busy(), [*numbers, float(bool(digest.parts))]
        leave, stop, own, totals = _vote(engine, mine, self.sums.totals())
        if self.sums.read(totals):
            self.sums.settle(engine)
            leave, stop, own, _ = _vote(engine, mine, ())
        engine.switch_from, engine.stops = leave, stop
        engine.fault("committed", engine.step)
        self.difference = None
        *self.numbers, compares = own
        if compares or self._balance is not None:
            times, *rows = gather_rows(engine.communicator, [busy, *digest.row]).T.tolist()
            self.difference = compare_states(engine, digest, rows, list(zip(*replicas, strict=True)))
            if self._balance is not None:  # partners wait for each other in every micro-batch
                self._balance.take([max(times[member] for member in members) for members in replicas])
        return _encode((leave, stop, own, totals))


def _vote(engine: Engine, own: Sequence[float], totals: Sequence[float]) -> Agreed:
    pending = engine.control is not None and engine.control.newer_than(engine.world.epoch) is not None
    engine.fault("commit", engine.step)
    ballot = torch.tensor([float(pending), float(engine.wants_stop), *own, *totals], dtype=torch.float64)
    engine.communicator.wait(engine.communicator.all_reduce(ballot))
    votes, stops, *summed = ballot.tolist()
    leave = int(votes) == engine.world.size or engine.world.hold
    return engine.world.epoch if leave else 0, stops > 0, summed[: len(own)], summed[len(own) :]


def compare_states(
    engine: Engine, digest: StateDigest, rows: Sequence[Sequence[float]], parts: Sequence[Sequence[int]]
) -> Difference | None:
    """Compare the states of the ranks that hold each part of a model, and find where they differ.

    Args:
        engine: exchanges what differs, if anything does.
        digest: of this rank.
        rows: the numbers of `StateDigest.row` of all ranks, in its order.
        parts: the ranks that hold each part; a whole model is one part.
    """
    digests, further, joined = rows
    late = [rank for rank, has_joined in enumerate(joined) if has_joined]
    odd = odd_holders(digests, parts, late) or odd_holders(further, parts, late)
    if not odd:
        return None
    own = msgspec.msgpack.encode({**digest.parts, **digest.further})
    states = [
        msgspec.msgpack.decode(each, type=dict[str, int])
        for each in gather_bytes(engine.communicator, own, engine.tag("digests"))
    ]
    holders = next(each for each in parts if not {*each}.isdisjoint(odd))
    first = next(filter(None, (first_unequal([states[rank] for rank in each]) for each in (holders, *parts))))
    return Difference(odd=odd, joined=late, first=first)
