"""One optimizer step up to its commit: micro-batches, overlapped reduction, commit, and the rest after a failure.

Protocol (docs/protocol.md):

1. Each rank runs its share of the step's micro-batches; gradients accumulate in local buckets without communication.
2. During the backward of its last micro-batch it launches the all-reduces on *copies* of the buckets.
3. When all are complete, the **commit** follows (`worker.commit`). No rank steps the optimizer before it, so a rank
   with its result knows that every rank has every reduction.
4. After a failure the survivors keep local buckets and completed reductions, and plan the rest (`plan_step`). If
   the library does not report which reductions have completed (`Communicator.tells_success`), all are repeated.

A micro-batch is atomic: nothing is raised inside its backward, and failures are checked only between micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from typing_extensions import override

from unicron_lightning.worker.buckets import Bucket, GradientBuckets
from unicron_lightning.worker.commit import Step, Sums
from unicron_lightning.worker.communication.communicator import Communicator, CommunicatorAborted, Handle
from unicron_lightning.worker.digest import NO_DIGEST, StateDigest
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.rows import Balance, Report, ReportSum, plan_rows, shares_of

DEVICE_POLL_SECONDS: Final = 0.0002
RELEASE_SECONDS: Final = 30.0
"""Time to wait for the buffer of an aborted reduction before a second one is allocated."""


class GradientStep(Step[Sums]):
    """The operation of one step of a model that each worker holds.

    Args:
        micro_batches, sums, balance, digest: as of `Step`.
        gradients: accumulates the gradients; `GradientBuckets.begin` was called.
        run: runs forward and backward of one micro-batch.
        in_full_step: see `rows.shares_of`.
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
    ) -> None:
        super().__init__(micro_batches, sums, balance, digest)
        self._in_full_step = in_full_step
        self._gradients = gradients
        self._run = run
        self._buckets: list[Bucket] = [*gradients.buckets, *sums.buckets]
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
        places = self._in_full_step
        self._plan = plan_step(self.micro_batches, len(self._buckets), reports, rank, counts, places)
        self._reduced &= self._plan.reduced
        return self._plan.lost

    def attempt(self, engine: Engine) -> bytes:
        plan = self._plan
        assert plan is not None
        self._engine, self._aborted, self._used = engine, False, engine.communicator
        self._take_held(engine, plan)
        self._compute(engine, plan)
        self._await_device(engine)
        engine.activity.enter("reduce")
        self._await_reductions(engine)
        engine.fault("reduced", engine.step)
        return self._commit(engine, self._digest, [[rank] for rank in range(engine.world.size)])

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
        tells = self._used is None or self._used.tells_success
        return {"finished": sorted(self._finished), "reduced": sorted(self._reduced) if tells else []}

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
        left = order
        for place, micro_batch in enumerate(plan.todo):
            engine.check()
            if place == len(plan.todo) - 1:
                gradients.arm(order, self._launch_in_backward)
            engine.activity.enter("compute", micro_batch)
            self._run(micro_batch)
            self._finished.add(micro_batch)
            engine.activity.computed()
            engine.fault("micro_batch", engine.step, place)
        if plan.todo:
            left = gradients.finish()
        if self._aborted:
            engine.check()
            raise CommunicatorAborted("a reduction could not be started")
        for index in left:
            self._launch(index)
        for index in range(number, len(self._buckets)):
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
        device = self._buckets[0].reduced.device if self._buckets else None
        if device is None or device.type != "cuda":
            return
        done = torch.cuda.current_stream(device).record_event()
        while not done.query():
            engine.check()
            time.sleep(DEVICE_POLL_SECONDS)

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
        counts: determine the shares in a step that no rank has begun, as of `rows.shares_of`.
        in_full_step: as of `rows.shares_of`, too.
    """
    shares = None if reports.begun else shares_of(micro_batches, reports.world, counts, in_full_step)
    rows = plan_rows(micro_batches, reports.finished, rank, reports.world, shares=shares)
    reduced = {bucket: reports.reduced[bucket] for bucket in range(num_buckets) if bucket in reports.reduced}
    return StepPlan(
        todo=tuple(rows.rows),
        held=tuple((bucket, first) for bucket, (first, number) in reduced.items() if number < reports.world),
        reduced=frozenset(reduced),
        lost=rows.lost,
    )
