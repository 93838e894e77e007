"""Count the micro-batches that are computed again, by the phase in which a worker dies, for each executor of steps.

    python benchmarks/recomputed.py

Workers are threads of one process: real engines, steps, reports and plans, with collectives in memory. In each phase a
worker dies at a certain point once the others have come as far as they can without it. The result is printed as a table
in Markdown: micro-batches that a worker had finished and another one computes again, and the step's buckets that are
reduced again. Megatron's rule is shown with FSDP2's sums, as if further calls would add to them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fsdp import deaths
from worker.nccl_simulation import NcclCoordinator
from worker.simulation import Coordinator, LateFault, run_threads
from worker.test_engine import CountSum, data, net

from unicron_lightning.fsdp.gradients import ShardedGradients
from unicron_lightning.strategies.manual.steps import MeetingStep
from unicron_lightning.strategies.manual.strand import END
from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.communication.gloo import leave_buried
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Agreement
from unicron_lightning.worker.step import GradientStep

WORKERS = ("w0", "w1", "w2")
SHARE = 2
"""Micro-batches of each worker."""
MICRO_BATCHES = SHARE * len(WORKERS)
"""Of a step of three workers that hold the model; four workers that hold two replicas of it run eight."""
Cell = tuple[int, int | None]
"""Micro-batches computed again, and buckets reduced again; None: not counted."""

PHASES = {
    "second micro-batch": lambda last: (("micro_batch", 0, 0), 0, ""),
    "reduction, first bucket complete": lambda last: (("launched", 0, 0), 1, ""),
    "reduction, all but the last bucket complete": lambda last: (("launched", 0, last - 1), last, ""),
    "reduction, all buckets complete": lambda last: (("reduced", 0), last + 1, "reduced"),
    "commit": lambda last: (("commit", 0), last + 1, "commit"),
    "after its commit": lambda last: (("committed", 0), last + 1, "committed"),
}
"""Of a model that each worker holds: the point of the death; buckets that the others have then, and their own point."""

REPLICAS: dict[str, tuple[int | str, list[tuple[int, str]]]] = {
    "second micro-batch": (deaths.POINTS // 2 + 1, [(0, "reduce"), (1, "reduce")]),
    "reduction, all but the last bucket complete": ("reduce", [(0, "reduced"), (2, "reduced")]),
    "reduction, all buckets complete": ("reduced", [(rank, "reduced") for rank in (0, 1, 2)]),
    "commit": ("commit", [(rank, "commit") for rank in (0, 1, 2)]),
    "after its commit": ("committed", [(rank, "committed") for rank in (0, 1, 2)]),
}
"""Of two replicas of two workers: the point of the last one's death, and the points to which others come before."""


class Training:
    """One step of a worker that holds the model.

    Args:
        engine: of the worker.
        manual: whether the step is a meeting of manual optimization.
    """

    def __init__(self, engine: Engine, *, manual: bool) -> None:
        self.engine = engine
        self.sums, strands = CountSum(), set[int]()
        self.ran = self.again = 0
        self.passed: set[str] = set()

        def run(micro_batch: int) -> None:
            strands.add(micro_batch)
            self.net(data(0, micro_batch)).square().sum().backward()
            self.sums.count()
            self.ran += 1

        self.net = net()
        self.gradients = GradientBuckets(self.net.named_parameters(), 32, overlap=True)
        self.gradients.begin()
        plain: Any = (range(MICRO_BATCHES), self.gradients, self.sums, run)
        meeting: Any = {"strands": strands, "meeting": END, "place": "training_step"}
        self.step = MeetingStep(*plain, **meeting) if manual else GradientStep(*plain)
        engine.fault = self._count

    def __call__(self) -> None:
        self.engine.run(Agreement("start", lambda rank: b""))
        self.engine.run(self.step)
        assert self.sums.total == MICRO_BATCHES, "each micro-batch counts once"
        self.engine.run(Agreement("end", lambda rank: b""))
        self.engine.close()

    def _count(self, *point: Any) -> None:
        self.passed.add(point[0])
        self.again += point[0] == "launched" and self.engine.world.size < len(WORKERS)


def whole(phase: str, coordinator: Coordinator, *, manual: bool = False) -> Cell:
    """Let the first of three workers that hold the model die."""
    trainings = {name: Training(coordinator.worker(name), manual=manual) for name in WORKERS}
    first, *others = trainings.values()
    at, reduced, point = PHASES[phase](len(first.step._buckets) - 1)

    def have_come() -> bool:
        there = all(not point or point in each.passed for each in others)
        return there and all(each.ran == SHARE and len(each.step._reduced) >= reduced for each in others)

    first.engine.fault = LateFault(at, have_come)
    coordinator.start()
    run_threads(coordinator, list(trainings.items()))
    for each in trainings.values():
        each.gradients.close()
    return sum(each.ran for each in trainings.values()) - MICRO_BATCHES, others[0].again


def nccl(phase: str) -> Cell:
    """The same with NCCL's stand-in."""
    coordinator = NcclCoordinator()
    try:
        return whole(phase, coordinator)
    finally:
        for _, communicator in coordinator.built:
            communicator.close()
        for network in coordinator.networks.values():
            network.groups.clear()
        for _, communicator in coordinator.built:
            assert communicator._owned.join(20), "a group's owner hangs"


def replicas(phase: str) -> Cell:
    """Let the last worker of two sharded replicas die."""
    point, after = REPLICAS[phase]
    task = deaths.check(deaths.Deaths(replicas=2, tied=False, at=[[3, point]], after=after))
    return task.ran - deaths.ROWS * deaths.SHARDS, None


def megatron(phase: str) -> Cell:
    """The same where sums over replicas are in the memory to which further calls would add."""
    none = property(lambda self: 0, lambda self, value: None)
    with mock.patch.object(ShardedGradients, "reduced", none, create=True):
        return replicas(phase)


EXECUTORS: dict[str, Callable[[str], Cell]] = {
    "whole model, gloo": lambda phase: whole(phase, Coordinator()),
    "manual optimization, gloo": lambda phase: whole(phase, Coordinator(), manual=True),
    "whole model, NCCL": nccl,
    "FSDP2": replicas,
    "Megatron": megatron,
}


def main() -> None:
    print(f"| death in | {' | '.join(EXECUTORS)} |\n|---|{'---|' * len(EXECUTORS)}")
    for phase in PHASES:
        cells = []
        for name, run in EXECUTORS.items():
            if run in (replicas, megatron) and phase not in REPLICAS:
                cells.append("")
                continue
            try:
                again, reduced = run(phase)
            except AssertionError as error:
                raise AssertionError(f"{name}, {phase}: {error}") from error
            cells.append(str(again) if reduced is None else f"{again}; {reduced}")
        print(f"| {phase} | {' | '.join(cells)} |", flush=True)
    leave_buried()
    os._exit(0)


if __name__ == "__main__":
    main()
