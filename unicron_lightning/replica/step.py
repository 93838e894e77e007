"""Steps and evaluations of a world of replicas through failures: one optimizer step up to its commit, and some batches
of a validation pass (`ReplicaEvaluation`).

1. **Calls.** Each replica runs its micro-batches in one or two calls; gradients accumulate without other replicas.
   In steps with a witness, replicas repeat rows of others after them, and gradients are compared: see
   `worker.witness`.
2. **Reduction** over the replicas: the gradients' buckets, and last the small sums (loss, logged values). Each worker
   keeps its own sums.
3. **Gate.** A small all-reduce of all members. A worker past it knows that all reductions are complete, and that its
   partners have come this far. Before it, workers wait within a replica only in calls.
4. **Finalization** within each replica, such as the norm of the gradients.
5. **Commit**, as for a model that each worker holds. The update follows and
   needs no other worker. If optimizer shards are spread over replicas, the update and its copies (`keeper`) come before
   the commit, so that a committed step has nothing left to lose. An update that communicates within the replica is
   staged before the commit: after it, the staged values only have to be taken.

After a failure complete replicas keep their sums, the lost micro-batches are redistributed (`plan_calls`), and the step
continues from 1. If all present replicas have all sums over the replicas, nothing is lost, and it continues from 3.
Otherwise the workers of a shard keep the buckets that all of them have, unless gradients add up in the same memory.
Spares take part in gate and commit, which gives them the logged values and the task's progress.

A step's micro-batches are divided into *shares*, one for each declared replica. A replica runs its own share in one
call, and its part of a missing replica's share in another one, whose gradients are summed separately. With two replicas
the sums then equal those of the failure-free run, in the same order. The division is pure, with the same result on
every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch
from typing_extensions import override

from unicron_lightning.replica.fabric import EpochPlace, ReplicaFabric, run_released
from unicron_lightning.replica.member import ReplicaModel
from unicron_lightning.worker.agreement import NO_DIGEST, StateDigest
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Evaluation
from unicron_lightning.worker.rows import Balance, Report, ReportSum, RowPlan, plan_rows, shares_of
from unicron_lightning.worker.step import Step, SumsT
from unicron_lightning.worker.witness import WitnessedStep

OPEN, SUMMED, FINAL = range(3)
"""A worker's gradients of a step: not all summed over the replicas, or being finalized; all summed; finalized."""


class Call(Protocol):
    """Runs some micro-batches of a step on this worker's shard, together with its partners; gradients accumulate."""

    def __call__(self, micro_batches: Sequence[int], *, last: bool) -> None:
        """Run them.

        Args:
            micro_batches: by number.
            last: whether the reduction may start in it, since no further call of the step is planned.
        """


class ReplicaStep(Step[SumsT]):
    """The operation of one step.

    Args:
        micro_batches, balance, digest: as of `Step`.
        model: this worker's shard.
        fabric: provides its place, and receives its progress.
        call: runs forward and backward of some micro-batches with the partners.
        sums: makes the other sums, from the micro-batches finished here.
        witness: has other replicas repeat rows; None: they do not in this step.
    """

    def __init__(
        self,
        micro_batches: Sequence[int],
        model: ReplicaModel,
        fabric: ReplicaFabric,
        call: Call,
        sums: Callable[[Sequence[int]], SumsT],
        balance: Balance | None = None,
        digest: StateDigest = NO_DIGEST,
        witness: WitnessedStep | None = None,
    ) -> None:
        place = fabric.place
        self._witness = witness
        spare = place is None or place.replica is None
        super().__init__(micro_batches, None, balance, NO_DIGEST if spare else digest)  # a spare's may be older
        self._model = model
        self._fabric = fabric
        self._call = call
        self._make_sums = sums
        self._calls: list[tuple[int, ...]] = []
        self._began = 0
        self._device = model.device
        self._plan: CallPlan | None = None
        self._totals: list[float] = []
        """The small sums over the workers of this shard."""
        self._state = OPEN
        """`OPEN` also if the state cannot be relied on after a failure."""
        model.begin()

    @property
    def grad_norm(self) -> float:
        """Norm of the committed step's gradients over the whole model."""
        return self.numbers[0]

    @override
    def _plan_rest(self, reports: ReportSum, rank: int, counts: Sequence[int] | None) -> Sequence[int]:
        place = self._fabric.place
        assert place is not None
        replicas = [
            [_parse(reports.members[member]) for member in replica.members] if replica.continues else None
            for replica in place.layout.replicas
        ]
        declared, shard = self._fabric.declared, self._fabric.own_shard
        plan = plan_calls(self.micro_batches, declared, replicas, place.replica, counts, shard)
        self._plan = plan
        if self._witness is not None and place.replica is not None:
            shares = shares_of(self.micro_batches, declared, counts if len(replicas) == declared else None)
            shares += [[] for _ in replicas[len(shares) :]]
            own = [reports.members[member] for member in place.layout.replicas[place.replica].members]
            self._witness.plan_together(place.replicas, place.replica, lambda other: shares[other], own)
        if not plan.complete or place.replica is None:
            self._state = OPEN
            if self._again:
                self._model.recover(plan.reduced)
                if plan.kept == 0:
                    self._model.begin()
        self._calls = self._calls[: plan.kept]
        self._began = len(self._calls)
        return plan.lost

    def attempt(self, engine: Engine) -> bytes:
        plan, fabric = self._plan, self._fabric
        assert plan is not None and fabric.place is not None
        self._engine = engine
        active = fabric.place.replica is not None
        if active:
            self._compute(engine, plan)
        self._compare(engine, plan)
        if active:
            self._reduce(engine)
        else:
            self._sum_totals()
        self._gate(engine)
        if active:
            self._finalize()
            self._update_shard(engine)
            fabric.phase = "ready"
        else:
            fabric.phase = "idle"  # it may have been ready in an attempt that was lost completely
        speaks = fabric.place.rank == fabric.place.layout.replicas[0].members[0]
        replicas = [replica.members for replica in fabric.place.layout.replicas]
        norm = self._model.grad_norm if speaks else 0.0
        return self._commit(engine, self._totals, self._digest if active else NO_DIGEST, replicas, [norm])

    def suspend(self) -> None:
        if self._fabric.phase == "reducing":
            self._model.gradients.settle()

    def report(self) -> Report:
        state = self._state
        if state != OPEN and (self.sums is None or self.sums.read(self._totals)):
            state = OPEN  # lost micro-batches are needed for more than their sums
        calls = [list(call) for call in self._calls]
        known = {} if self._witness is None else self._witness.report()
        return {"calls": calls, "began": self._began, "buckets": self._model.gradients.reduced, "state": state, **known}

    def _compute(self, engine: Engine, plan: CallPlan) -> None:
        fabric, model = self._fabric, self._model
        fabric.phase = "calls"
        for number, call in enumerate(plan.calls):
            engine.fault("call", engine.step, number)
            self._began += 1
            if self._calls:
                with model.gradients.apart():
                    run_released(partial(self._call, call, last=False), fabric)
            else:  # with a witness nothing is reduced before the comparison
                last = len(plan.calls) == 1 and self._witness is None
                run_released(partial(self._call, call, last=last), fabric)
            fabric.arrive(self._device)
            self._calls.append(call)
        if self._witness is not None and not plan.complete:
            self._witness.repeat(engine)
        engine.activity.enter("reduce")
        fabric.phase = "reducing"
        engine.check()

    def _compare(self, engine: Engine, plan: CallPlan) -> None:
        """Compare gradients with a witness: nothing wrong is reduced."""
        fabric = self._fabric
        assert fabric.place is not None

        @contextmanager
        def lockstep() -> Iterator[None]:
            if fabric.place is not None and fabric.place.replica is not None:
                fabric.phase = "calls"  # from here on a worker that leaves cuts the connections, see `_gate`
            _meet(engine)
            yield
            if fabric.phase == "calls":
                fabric.phase = "reducing"

        if self._witness is not None and not plan.complete:
            self._witness.compare(engine, [each.members for each in fabric.place.layout.replicas], lockstep)

    def _reduce(self, engine: Engine) -> None:
        fabric, model = self._fabric, self._model
        engine.activity.enter("reduce")
        engine.fault("reduce", engine.step)
        if self._state == OPEN:
            run_released(model.gradients.reduce, fabric)
            fabric.arrive(self._device)
            if fabric.accelerated:
                engine.check()
            run_released(self._sum_totals, fabric)
            # Kernels that were aborted look complete. A part of an optimizer shard is nowhere else.
            self._state = OPEN if fabric.accelerated or model.keeper is not None else SUMMED
        engine.fault("reduced", engine.step)

    def _sum_totals(self) -> None:
        """Sum this worker's small sums over the workers of this shard; a spare's are zero."""
        self.sums = self._make_sums([m for call in self._calls for m in call])
        totals = torch.tensor(self.sums.totals(), dtype=torch.float64)
        channels = self._fabric.channels
        if channels is not None and channels.grid.replicas > 1:
            channels.same_shard.sum(totals)
        self._totals = totals.tolist()

    def _finalize(self) -> None:
        """Finalize the gradients, once: Megatron changes them in place."""
        if self._state != FINAL:
            state, self._state = self._state, OPEN
            run_released(self._model.finalize, self._fabric)
            self._fabric.arrive(self._device)
            self._state = FINAL if state == SUMMED else OPEN

    def _update_shard(self, engine: Engine) -> None:
        """If the update communicates: stage it. If optimizer shards are spread over replicas: copy it."""
        keeper, done = self._model.keeper, self._fabric.at
        if not self._model.stages:
            return
        engine.fault("update", engine.step)
        run_released(self._model.stage, self._fabric)
        self._fabric.arrive(self._device)
        engine.fault("updated", engine.step)
        if keeper is not None:
            assert done is not None
            keeper.keep(done + 1)
            engine.fault("kept", engine.step)

    def _gate(self, engine: Engine) -> None:
        """Pass the gate. A worker that leaves the step before it need not cut its partners' connections; afterwards it
        must.

        A replica of one worker needs no gate.
        """
        if self._fabric.shape.shards == 1:
            return
        if self._fabric.phase == "reducing":
            self._fabric.phase = "finalizing"
        _meet(engine)
        engine.fault("gate", engine.step)


def _meet(engine: Engine) -> None:
    """Wait until all members have come this far."""
    engine.communicator.wait(engine.communicator.all_reduce(torch.zeros(1)))


def _parse(report: Any) -> CallReport | None:
    if report is None:
        return None
    calls = tuple(tuple(call) for call in report["calls"])
    return CallReport(calls=calls, began=report["began"], reduced=report["buckets"], state=report["state"])


@dataclass(frozen=True, kw_only=True)
class CallReport:
    """One worker's progress in the present step.

    Attributes:
        calls: micro-batches of each completed call, in order.
        began: number of begun calls.
        reduced: number of its shard's buckets whose sums over the replicas it has.
        state: `OPEN`, `SUMMED` or `FINAL`.
    """

    calls: tuple[tuple[int, ...], ...]
    began: int
    reduced: int = 0
    state: int = OPEN


@dataclass(frozen=True, kw_only=True)
class CallPlan(RowPlan):
    """Remaining work of a replica.

    Attributes:
        kept: number of completed calls that count.
        reduced: number of its shard's buckets that need no further reduction.
        complete: whether all present replicas have all sums, so that nothing is left to compute or to reduce.
    """

    kept: int
    reduced: int = 0
    complete: bool = False


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
    shard: int = 0,
) -> CallPlan:
    """Plan the rest of a step.

    Args:
        micro_batches: all of the step.
        declared: number of replicas without failures.
        replicas: for each replica its workers' reports, by shard; None for a replica without progress.
        place: the replica to plan for; None for a spare.
        counts: micro-batches of each replica in a step that none has begun, if all declared ones are there; None:
            distributed round-robin.
        shard: to plan for.
    """
    complete = all(reports is not None and _are_summed(reports) for reports in replicas)
    kept = [0 if reports is None else kept_calls(reports) for reports in replicas]
    finished: set[int] = set()
    for number, reports in zip(kept, replicas, strict=True):
        if reports is not None and reports[0] is not None:
            finished.update(m for call in reports[0].calls[:number] for m in call)
    world = len(replicas)
    shares = shares_of(micro_batches, declared, counts if world == declared else None)
    rows = plan_rows(() if complete else micro_batches, finished, place, world, shares=shares)
    reduced = 0
    if all(kept):  # otherwise some worker begins with new gradients
        own = [reports[shard] for reports in replicas if reports is not None]
        reduced = min(0 if report is None else report.reduced for report in own)
    return CallPlan(
        kept=0 if place is None else kept[place], calls=rows.calls, lost=rows.lost, reduced=reduced, complete=complete
    )


def _are_summed(reports: Sequence[CallReport | None]) -> bool:
    """Whether a replica's workers have all sums, and have either all finalized them or not begun to."""
    states = {OPEN if report is None else report.state for report in reports}
    return len(states) == 1 and OPEN not in states


class ReplicaEvaluation(Evaluation[Sequence[int]]):
    """An evaluation, whose units are calls of some rows.

    1. **Calls.** Each replica runs its share forward, batches of equal size in one call. One of its workers keeps the
       results, call by call; in rows of several batches, each worker those of its own batches.
    2. **Exchange.** All members, including spares, receive the results of every batch.

    A worker that leaves before the end of the exchange cuts its replica's connections, since the first stage finishes
    while the last one still computes. No worker thus waits for one that has left, and a complete replica may have to
    repeat its share. Nothing is counted twice, as each batch's results are taken from one worker; no parameter or
    gradient is changed.

    Args:
        batches: all of them, by number.
        size: samples of a row's batches, by number of the row.
        fabric: provides this worker's place, and receives its progress.
        device: of the model.
        call: runs some rows of one size forward, with the partners; arguments: their numbers, and the size.
        results: returns the results of some rows, by their numbers, as bytes.
        tells: whether this worker reports its replica's results, or those of its lane's batches.
        width: batches of a row, one for each lane.
    """

    def __init__(
        self,
        batches: Iterable[int],
        size: Callable[[int], int],
        fabric: ReplicaFabric,
        device: torch.device,
        call: Callable[[Sequence[int], int], None],
        results: Callable[[Collection[int]], bytes],
        *,
        tells: bool,
        width: int = 1,
    ) -> None:
        finished: set[int] = set()

        def run(rows: Sequence[int]) -> None:
            fabric.phase = "calls"
            run_released(partial(call, rows, size(rows[0])), fabric)
            fabric.arrive(device)
            if tells:
                finished.update(rows)

        super().__init__(self._calls, run, finished, lambda: results(sorted(finished)))
        self._batches = batches
        self._size = size
        self._fabric = fabric
        self._width = width

    @property
    def _place(self) -> EpochPlace:
        assert self._fabric.place is not None
        return self._fabric.place

    @override
    def attempt(self, engine: Engine) -> bytes:
        result = super().attempt(engine)
        self._fabric.phase = "idle"
        return result

    @override
    def adopt(self, result: bytes) -> None:
        self._fabric.phase = "idle"

    @override
    def _run_in(self, engine: Engine, unit: Sequence[int]) -> None:
        self._run(unit)  # without a check: partners that have begun a call wait for this worker

    def _calls(self, reports: ReportSum, rank: int) -> list[list[int]]:
        layout, width = self._place.layout, self._width
        finished: Collection[int] = reports.finished
        if width > 1:
            finished = batches_of(reports, [self._fabric.shape.lane(shard) for shard in layout.shards], width)
        plan = plan_rows(self._batches, finished, self._place.replica, len(layout.replicas), width=width)
        return [list(rows) for _, rows in groupby(plan.rows, self._size)]


class RowPass(ReplicaEvaluation):
    """A pass in rows of batches whose number may be unknown; each worker keeps the results of its own batches.

    Args:
        name: of the operation.
        fabric, device: as of `ReplicaEvaluation`.
        plan: divides the rows with batches that no member has run, given the members' reports, this worker's replica
            (None: a spare) and the number of replicas; returns whether this worker may have rows.
        run: runs all of them with the partners.
        report: returns this worker's report.
        results: returns this worker's results.
    """

    def __init__(
        self,
        name: str,
        fabric: ReplicaFabric,
        device: torch.device,
        plan: Callable[[ReportSum, int | None, int], bool],
        run: Callable[[], None],
        report: Callable[[], Report],
        results: Callable[[], bytes] = bytes,
    ) -> None:
        super().__init__((), lambda _: 0, fabric, device, lambda *_: run(), lambda _: results(), tells=False)
        self.name = name
        self._divide, self._tell = plan, report

    @override
    def report(self) -> Report:
        return self._tell()

    @override
    def _calls(self, reports: ReportSum, rank: int) -> list[list[int]]:
        found = self._divide(reports, self._place.replica, len(self._place.layout.replicas))
        return [[0]] if found else []  # one call has all rows, of which some end unexpectedly


def batches_of(reports: ReportSum, lanes: Sequence[int], width: int) -> set[int]:
    """Return the batches that present workers have finished, from reports of the rows in which each has run its own.

    Args:
        reports: of the members.
        lanes: of the members, by rank.
        width: batches of a row, one for each lane.
    """
    of_lanes = zip(reports.members, lanes, strict=True)
    return {row * width + lane for report, lane in of_lanes if report is not None for row in report["finished"]}
