"""One optimizer step of a world of replicas through failures, up to its commit.

1. **Calls.** Each replica runs its micro-batches in one or two calls; gradients accumulate without other replicas.
2. **Reduction** over the replicas; each worker keeps its own sums.
3. **Gate.** A small all-reduce of all members. A worker past it knows that all reductions are complete, and that its
   partners have come this far. Before it, workers wait within a replica only in calls.
4. **Finalization** within each replica, such as the norm of the gradients.
5. **Commit** (`worker.commit`), as for a model that each worker holds. The update follows and
   needs no other worker. If optimizer shards are spread over replicas, the update and its copies (`keeper`) come before
   the commit, so that a committed step has nothing left to lose.

After a failure complete replicas keep their sums, the lost micro-batches are redistributed (`plan_calls`), and the step
continues from 1. Spares take part in gate and commit, which gives them the logged values and the task's progress.

A step's micro-batches are divided into *shares*, one for each declared replica. A replica runs its own share in one
call, and its part of a missing replica's share in another one, whose gradients are summed separately. With two replicas
the sums then equal those of the failure-free run, in the same order. The division is pure, with the same result on
every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from unicron_lightning.replica.fabric import ReplicaFabric, run_released
from unicron_lightning.replica.model import ReplicaModel
from unicron_lightning.worker.agreement import Difference
from unicron_lightning.worker.balance import Balance
from unicron_lightning.worker.commit import Sums, adopt_commit, commit
from unicron_lightning.worker.communication.communicator import gather_rows
from unicron_lightning.worker.digest import NO_DIGEST, StateDigest
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.report_sum import Report, ReportSum
from unicron_lightning.worker.rows import RowPlan, plan_rows, shares_of
from unicron_lightning.worker.step import compare_states

_Sums = TypeVar("_Sums", bound=Sums)


class Call(Protocol):
    """Runs some micro-batches of a step on this worker's shard, together with its partners; gradients accumulate."""

    def __call__(self, micro_batches: Sequence[int], *, last: bool) -> None:
        """Run them.

        Args:
            micro_batches: by number.
            last: whether the reduction may start in it, since no further call of the step is planned.
        """


class ReplicaStep(Generic[_Sums]):
    """The operation of one step.

    Args:
        micro_batches: all of the step's, by number.
        model: this worker's shard.
        fabric: provides its place, and receives its progress.
        call: runs forward and backward of some micro-batches with the partners.
        sums: makes the other sums, from the micro-batches finished here.
        balance: the replicas' shares by speed; None: equal ones.
        digest: of this worker's part of the state before the step.

    Attributes:
        recomputed: micro-batches that no present worker had finished when the step was planned again.
        difference: between the states of the present world's ranks before the step; None without one.
        grad_norm, sums: of the committed step.
    """

    name = "step"

    def __init__(
        self,
        micro_batches: Sequence[int],
        model: ReplicaModel,
        fabric: ReplicaFabric[Any],
        call: Call,
        sums: Callable[[Sequence[int]], _Sums],
        balance: Balance | None = None,
        digest: StateDigest = NO_DIGEST,
    ) -> None:
        self.micro_batches = list(micro_batches)
        self.recomputed: list[int] = []
        self.difference: Difference | None = None
        place = fabric.place
        spare = place is None or place.replica is None
        self._digest = NO_DIGEST if spare else digest  # a spare's may be of an older step
        self.grad_norm = 0.0
        self.sums: _Sums | None = None
        self._model = model
        self._fabric = fabric
        self._call = call
        self._make_sums = sums
        self._balance = balance
        self._calls: list[tuple[int, ...]] = []
        self._began = 0
        self._device = model.device
        self._plan: CallPlan | None = None
        self._attempts = 0
        self._engine: Engine | None = None
        model.begin()

    def plan(self, reports: ReportSum, rank: int) -> None:
        place = self._fabric.place
        assert place is not None
        replicas = [
            [_parse(reports.members[member]) for member in replica.members] if replica.continues else None
            for replica in place.layout.replicas
        ]
        counts = None if self._balance is None else self._balance.counts(len(self.micro_batches))
        self._plan = plan_calls(self.micro_batches, self._fabric.shape.replicas, replicas, place.replica, counts)
        self._attempts += 1
        if self._attempts > 1:
            self.recomputed = list(self._plan.lost)
            self._model.recover()
            if self._plan.kept == 0:
                self._model.begin()
        self._calls = self._calls[: self._plan.kept]
        self._began = len(self._calls)

    def attempt(self, engine: Engine) -> bytes:
        plan, fabric = self._plan, self._fabric
        assert plan is not None and fabric.place is not None
        self._engine = engine
        active = fabric.place.replica is not None
        if active:
            self._compute(engine, plan)
        self._gate(engine)
        if active:
            run_released(self._model.finalize)
            fabric.arrive(self._device)
            self._update_shard(engine)
            fabric.phase = "ready"
        else:
            fabric.phase = "idle"  # it may have been ready in an attempt that was lost completely
        self.sums = self._make_sums([m for call in self._calls for m in call])
        speaks = fabric.place.rank == fabric.place.layout.replicas[0].members[0]
        engine.activity.enter("commit")
        busy = engine.activity.busy()
        digest = self._digest if active else NO_DIGEST
        committed = commit(engine, self.sums, [self._model.grad_norm if speaks else 0.0, float(bool(digest.parts))])
        self.grad_norm, compares = committed.own
        self.difference = None
        if compares or self._balance is not None:
            times, *rows = gather_rows(engine.communicator, [busy, *digest.row]).T.tolist()
            replicas = [replica.members for replica in fabric.place.layout.replicas]
            self.difference = compare_states(engine, digest, rows, list(zip(*replicas, strict=True)))
            if self._balance is not None:  # partners wait for each other in every micro-batch
                self._balance.take([max(times[member] for member in members) for members in replicas])
        return committed.encode()

    def suspend(self) -> None:
        if self._fabric.phase == "reducing":
            self._model.gradients.settle()

    def report(self) -> Report:
        return {"calls": [list(call) for call in self._calls], "began": self._began}

    def adopt(self, result: bytes) -> None:
        # A peer has committed, so this worker was in the commit: only the result is missing.
        assert self._engine is not None and self.sums is not None
        self.difference = None  # refers to another world, if to any
        self.grad_norm, _ = adopt_commit(self._engine, self.sums, result)

    def _compute(self, engine: Engine, plan: CallPlan) -> None:
        fabric, model = self._fabric, self._model
        fabric.phase = "calls"
        for number, call in enumerate(plan.calls):
            engine.fault("call", engine.step, number)
            self._began += 1
            if self._calls:
                with model.gradients.apart():
                    run_released(partial(self._call, call, last=False))
            else:
                run_released(partial(self._call, call, last=len(plan.calls) == 1))
            fabric.arrive(self._device)
            self._calls.append(call)
        engine.activity.enter("reduce")
        fabric.phase = "reducing"
        engine.check()
        engine.fault("reduce", engine.step)
        run_released(model.gradients.reduce)
        fabric.arrive(self._device)
        if fabric.accelerated:
            engine.check()
        engine.fault("reduced", engine.step)

    def _update_shard(self, engine: Engine) -> None:
        """If optimizer shards are spread over replicas: do the update, and copy it."""
        keeper, done = self._model.keeper, self._fabric.at
        if keeper is None:
            return
        assert done is not None
        run_released(self._model.update)
        self._fabric.arrive(self._device)
        engine.fault("updated", engine.step)
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
        communicator = engine.communicator
        communicator.wait(communicator.all_reduce(torch.zeros(1)))
        engine.fault("gate", engine.step)


def _parse(report: Any) -> CallReport | None:
    if report is None:
        return None
    return CallReport(calls=tuple(tuple(call) for call in report["calls"]), began=report["began"])


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
class CallPlan(RowPlan):
    """Remaining work of a replica.

    Attributes:
        kept: number of completed calls that count.
    """

    kept: int


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
    world = len(replicas)
    shares = shares_of(micro_batches, declared, counts if world == declared else None)
    rows = plan_rows(micro_batches, finished, place, world, shares=shares)
    return CallPlan(kept=0 if place is None else kept[place], calls=rows.calls, lost=rows.lost)
