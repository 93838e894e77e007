"""One optimizer step up to its commit: micro-batches, overlapped reduction, commit, and the rest after a failure.

Protocol (docs/protocol.md):

1. Each rank runs its share of the step's micro-batches; gradients accumulate in local buckets without communication.
2. During the backward of its last micro-batch it launches the all-reduces on *copies* of the buckets. The last bucket
   has the step's small sums (loss, logged values): when all are complete, a dead rank has nothing left to contribute.
3. Then the **commit** follows: one small sum over all members. No rank steps the optimizer before it, so a rank with
   its result knows that every rank has every reduction. By it the members also count those that know of a pending
   epoch; if all do, all switch at the end of the step.
4. After a failure the survivors keep local buckets and completed reductions, and plan the rest (`plan_step`). If
   the library does not report which reductions have completed (`Communicator.tells_success`), all are repeated.

Without failures, in steps with a witness, other ranks repeat micro-batches before the commit: see `witness`.

A micro-batch is atomic: nothing is raised inside its backward, and failures are checked only between micro-batches.

`Step` has what steps of models that several workers hold share with this: their plan from the members' reports, the
commit, and the comparison of states after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import msgspec
import torch
from typing_extensions import override

from unicron_lightning.worker.agreement import NO_DIGEST, Difference, StateDigest, first_unequal, odd_holders
from unicron_lightning.worker.buckets import Bucket, GradientBuckets
from unicron_lightning.worker.communication.communicator import (
    Communicator,
    CommunicatorAborted,
    Handle,
    gather_bytes,
    gather_rows,
)
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.rows import Balance, Report, ReportSum, plan_rows, shares_of
from unicron_lightning.worker.witness import WitnessedStep

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
        """Small sums over this rank's micro-batches, reduced after `buckets`; equally many on all ranks."""

    def read(self, totals: Sequence[float]) -> bool:
        """Store `totals` summed over the ranks, or over some; return whether these need `settle`."""

    def settle(self, engine: Engine) -> None:
        """Communicate before a second commit, from this rank's micro-batches; must be repeatable."""


SumsT = TypeVar("SumsT", bound=Sums)


class TotalsBucket(Bucket):
    """The small sums of a step, in host memory; they are complete with the last micro-batch.

    Args:
        sums: whose `Sums.totals` they are.
    """

    def __init__(self, sums: Sums) -> None:
        super().__init__(torch.empty(0, dtype=torch.float64))
        self._sums = sums

    @override
    def load(self) -> None:
        self.reduced = torch.tensor(self._sums.totals(), dtype=torch.float64)

    @override
    def renew(self) -> None:
        self.load()


class Step(ABC, Generic[SumsT]):
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
        self, micro_batches: Sequence[int], sums: SumsT | None, balance: Balance | None, digest: StateDigest
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
        self,
        engine: Engine,
        totals: Sequence[float],
        digest: StateDigest,
        replicas: Sequence[Sequence[int]],
        numbers: Sequence[float] = (),
    ) -> bytes:
        """Commit the step, of which this worker's part is complete, and compare states; return the result.

        Args:
            engine: this worker's.
            totals: the small sums, over the workers with this one's part of the model.
            digest: of this worker's state.
            replicas: the ranks that hold the parts of the model, of each replica in the same order.
            numbers: further ones of this rank; equally many on all ranks.
        """
        assert self.sums is not None
        engine.activity.enter("commit")
        busy, mine = engine.activity.busy(), [*numbers, float(bool(digest.parts))]
        # They are the same in all replicas, so those of the first one count.
        part = totals if engine.world.rank in replicas[0] else [0.0] * len(totals)
        leave, stop, own, totals = _vote(engine, mine, part)
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


RELEASE_SECONDS: Final = 30.0
"""Time to wait for the buffer of an aborted reduction before a second one is allocated."""


class GradientStep(Step[Sums]):
    """The operation of one step of a model that each worker holds.

    Args:
        micro_batches, sums, balance, digest: as of `Step`.
        gradients: accumulates the gradients; `GradientBuckets.begin` was called.
        run: runs forward and backward of one micro-batch.
        in_full_step: see `rows.shares_of`.
        witness: has other ranks repeat micro-batches; None: they do not in this step.
    """

    def __init__(
        self,
        micro_batches: Sequence[int],
        gradients: GradientBuckets,
        sums: Sums,
        run: Callable[[int], None],
        balance: Balance | None = None,
        digest: StateDigest = NO_DIGEST,
        in_full_step: Sequence[int] | None = None,
        witness: WitnessedStep | None = None,
    ) -> None:
        super().__init__(micro_batches, sums, balance, digest)
        self._witness = witness
        self._in_full_step = in_full_step
        self._gradients = gradients
        self._run = run
        self._totals = TotalsBucket(sums)
        self._buckets: list[Bucket] = [*gradients.buckets, *sums.buckets, self._totals]
        self._finished: set[int] = set()
        self._reduced: set[int] = set()
        self._in_flight: dict[int, Handle] = {}
        self._used: Communicator | None = None
        self._held: dict[int, Communicator] = {}
        """Buckets into which an aborted communicator may still write: NCCL takes half a second to abort, meanwhile the
        lost micro-batches are computed.
        """
        self._plan: StepPlan | None = None
        self._aborted = False

    @override
    def _plan_rest(self, reports: ReportSum, rank: int, counts: Sequence[int] | None) -> Sequence[int]:
        def plan_of(rank: int) -> StepPlan:
            return plan_step(self.micro_batches, len(self._buckets), reports, rank, counts, self._in_full_step)

        self._plan = plan_of(rank)
        if self._witness is not None and not reports.finished:
            self._witness.plan(rank, reports.world, lambda other: plan_of(other).todo)
        self._reduced &= self._plan.reduced
        return self._plan.lost

    def attempt(self, engine: Engine) -> bytes:
        plan = self._plan
        assert plan is not None
        self._engine, self._aborted, self._used = engine, False, engine.communicator
        if self._witness is not None:
            self._witness.enter([(worker,) for worker in engine.world.workers], engine.world.rank)
            self._witness.hand_over(engine)
        self._take_held(engine, plan)
        self._compute(engine, plan)
        self._await_device(engine)
        engine.activity.enter("reduce")
        last = len(self._buckets) - 1
        if last not in self._reduced:
            self._launch(last)
        if self._witness is not None:
            self._witness.repeat(engine)
            engine.activity.enter("reduce")
        self._await_reductions(engine)
        engine.fault("reduced", engine.step)
        ranks = [[rank] for rank in range(engine.world.size)]
        if self._witness is not None:
            self._witness.compare(engine, ranks)
        return self._commit(engine, self._totals.reduced.tolist(), self._digest, ranks)

    def suspend(self) -> None:
        # Completion must be read now: after the abort, ended and completed collectives look the same.
        if self._used is None:
            return
        for index, handle in self._in_flight.items():
            if self._used.tells_success and handle.succeeded():
                self._reduced.add(index)
            else:
                self._held[index] = self._used
        self._in_flight.clear()

    def report(self) -> Report:
        keeps = self._witness is None  # they may have what a wrong rank has contributed
        reduced = self._reduced if keeps and (self._used is None or self._used.tells_success) else set()
        last = len(self._buckets) - 1
        if last in reduced and self.sums is not None and self.sums.read(self._totals.reduced.tolist()):
            reduced = reduced - {last}  # a dead rank's micro-batches are needed for more than their sums
        return {"finished": sorted(self._finished), "reduced": sorted(reduced)}

    @override
    def adopt(self, result: bytes) -> None:
        # A peer has committed, so every rank was in the commit and all reductions are complete here too.
        assert len(self._reduced) == len(self._buckets), "a step was committed with reductions missing here"
        super().adopt(result)

    def _take_held(self, engine: Engine, plan: StepPlan) -> None:
        """Copy buckets that are complete on some ranks from there: they include the dead rank's part."""
        communicator = engine.communicator
        for index, holder in plan.held:
            if index not in self._reduced:
                self._held.pop(index, None)
                self._buckets[index].renew()
            communicator.wait(communicator.broadcast(self._buckets[index].reduced, holder))
            self._reduced.add(index)

    def _compute(self, engine: Engine, plan: StepPlan) -> None:
        gradients, number = self._gradients, len(self._gradients.buckets)
        order = [index for index in range(number) if index not in self._reduced]
        left, apart = order, None if self._witness is None else self._witness.own
        for place, micro_batch in enumerate(plan.todo):
            engine.check()
            if place == len(plan.todo) - 1 and micro_batch != apart:
                gradients.arm(order, self._launch_in_backward)
            engine.activity.enter("compute", micro_batch)
            if self._witness is not None and micro_batch == apart:
                self._witness.observe(self._run, micro_batch)
            else:
                self._run(micro_batch)
            gradients.take()
            self._finished.add(micro_batch)
            engine.activity.computed()
            engine.fault("micro_batch", engine.step, place)
        if plan.todo and plan.todo[-1] != apart:
            left = gradients.finish()
        if self._aborted:
            engine.check()
            raise CommunicatorAborted("a reduction could not be started")
        for index in left:
            self._launch(index)
        for index in range(number, len(self._buckets) - 1):
            if index not in self._reduced:
                self._launch(index)

    def _launch_in_backward(self, index: int) -> None:
        if self._aborted:
            return
        try:
            self._launch(index)
        except CommunicatorAborted:
            self._aborted = True  # checked when the micro-batch is complete

    def _launch(self, index: int) -> None:
        assert self._engine is not None
        bucket = self._buckets[index]
        if (held := self._held.pop(index, None)) is not None and not held.released(RELEASE_SECONDS):
            bucket.renew()
        bucket.load()
        self._in_flight[index] = self._engine.communicator.all_reduce(bucket.reduced)
        self._engine.fault("launched", self._engine.step, index)

    def _await_device(self, engine: Engine) -> None:
        """Wait until this rank's accelerator is done, since its work would otherwise count as a wait for other ranks.

        This costs no time, because the reductions wait for the same work.
        """
        device = self._buckets[0].reduced.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # waits for no other rank, and without the lock
            engine.check()

    def _await_reductions(self, engine: Engine) -> None:
        for index in list(self._in_flight):
            engine.communicator.wait(self._in_flight[index])
            self._reduced.add(index)
            del self._in_flight[index]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Remaining work of a step for one rank.

    Attributes:
        todo: micro-batches to compute, in order.
        held: buckets that some ranks have reduced and others have not, with the rank that sends each.
        reduced: buckets that need no further reduction, ``held`` included.
        lost: micro-batches that no present rank has finished and some bucket lacks.
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

    A bucket that is complete on any rank is sent from the lowest such rank and not reduced again. If each is complete
    on some rank, nothing is recomputed. Otherwise the micro-batches of a dead rank are, for the buckets that lack them.

    Args:
        micro_batches: all of the step.
        num_buckets: number of buckets.
        reports: finished micro-batches and reduced buckets. Reduced buckets include every finished micro-batch, also
            those of dead ranks.
        rank: rank to plan for.
        counts: determine the shares in a step that no rank has begun, as of `rows.shares_of`.
        in_full_step: as of `rows.shares_of`, too.
    """
    shares = None if reports.begun else shares_of(micro_batches, reports.world, counts, in_full_step)
    reduced = {bucket: reports.reduced[bucket] for bucket in range(num_buckets) if bucket in reports.reduced}
    missing = () if len(reduced) == num_buckets else micro_batches
    rows = plan_rows(missing, reports.finished, rank, reports.world, shares=shares)
    return StepPlan(
        todo=tuple(rows.rows),
        held=tuple((bucket, first) for bucket, (first, number) in reduced.items() if number < reports.world),
        reduced=frozenset(reduced),
        lost=rows.lost,
    )
