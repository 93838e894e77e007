"""The batches of a Megatron model's stages: their random state, and a pass over streams of different lengths."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("megatron.core.package_info")

from unicron_lightning.data.loader import BatchRows, GlobalBatch
from unicron_lightning.data.order import StepShape
from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.layout import Shape
from unicron_lightning.replica.step import ReplicaEvaluation
from unicron_lightning.strategies.megatron.batches import (
    StageBatches,
    StageSteps,
    stage_evaluation,
    transfer_batch,
)
from unicron_lightning.strategies.megatron.parallel import MegatronParallel
from unicron_lightning.worker.comparison import Divergence
from unicron_lightning.worker.control.activity import Activity
from unicron_lightning.worker.rows import ReportSum


def grid_at(tensor: int, stage: int) -> Any:
    """A worker's grid whose transfer to the device adds random numbers."""
    augments = lambda batch, loader: batch + torch.rand(4)  # noqa: E731
    strategy = SimpleNamespace(seed=1, to_device=augments, root_device=torch.device("cpu"))
    shape = Shape(tensor=1 + tensor, pipeline=1 + stage, replicas=1)
    grid: Any = SimpleNamespace(strategy=strategy, coordinate=(tensor, stage), shape=shape, lane=0, context_rank=0)
    grid.begin_stage = partial(MegatronParallel.begin_stage, grid)
    return grid


def test_all_workers_of_a_replica_augment_a_batch_alike_whatever_they_ran_before() -> None:
    def staged(number: int, tensor: int, stage: int) -> tuple[list[float], float]:
        samples = torch.full((4,), float(number))
        grid, place = grid_at(tensor, stage), (1, 0, 0, number)
        data = transfer_batch(grid, samples, place)
        grid.begin_stage(place, 0)
        return data.tolist(), float(torch.rand(()))

    first, computes = staged(0, 0, 0)
    staged(1, 0, 0)
    assert staged(0, 0, 0) == (first, computes), "after another batch"
    partners = [staged(0, tensor, stage) for tensor, stage in ((1, 0), (0, 1), (1, 1))]
    assert [data for data, _ in partners] == [first] * 3
    assert partners[1][1] != computes, "stages compute with random numbers of their own"
    assert first[0] != computes
    other, _ = staged(1, 0, 0)
    assert [value - 1.0 for value in other] != pytest.approx(first)


def test_a_step_loads_and_computes_for_the_detection_of_hangs() -> None:
    phases: list[tuple[str, int]] = []
    activity = Activity()

    def note(*_: Any) -> torch.Tensor:
        phases.append((activity.now.phase, activity.now.micro_batch))
        return torch.ones(4)

    grid = grid_at(0, 0)
    grid.strategy.engine = SimpleNamespace(activity=activity)
    grid.strategy.module = SimpleNamespace(training_step=note, loss=lambda output, batch: output.sum())
    grid.strategy.results = SimpleNamespace(recording=lambda data: nullcontext([]))
    batches = StageBatches(grid, GlobalBatch(0, 0, range(2), note, lambda number: 4), 0)
    _, loss = batches.forward(1, 0)
    assert float(loss(torch.ones(2))) == 2.0
    assert phases == [("data", 1), ("compute", 1)]


def test_samples_are_to_make_whole_micro_batches_of_all_replicas() -> None:
    model = SimpleNamespace(micro_batch_size=0)
    shape, witness = StepShape(devices=2, accumulation=3), SimpleNamespace(check_data=lambda data: None)
    strategy, member = SimpleNamespace(shape=shape, witness=witness), SimpleNamespace(model=model)
    grid: Any = SimpleNamespace(strategy=strategy, member=member)
    StageSteps(grid, Divergence(0, "heal")).check_data(DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
    assert model.micro_batch_size == 2
    with pytest.raises(ConfigError, match=r"6 samples.* 2 replicas"):
        StageSteps(grid, Divergence(0, "heal")).check_data(DataLoader(range(6), batch_size=2))  # type: ignore[arg-type]


def test_places_of_a_global_batch_that_begins_later() -> None:
    """Map-style data: the second global batch of a pass, which is smaller."""
    rows = BatchRows(GlobalBatch(0, 1, range(4, 7), lambda number: None, lambda number: 2, in_full_step=range(3)))
    assert rows.numbers == [0, 1, 2] and rows.counted(rows.numbers) == [4, 5, 6]


class Replica:
    """A replica of two, in a pass over streams; notes which rows it runs."""

    def __init__(self, batch: GlobalBatch, number: int, replicas: int) -> None:
        self.ran: list[tuple[int, int]] = []
        self.looked: list[int] = []
        self.place = SimpleNamespace(replica=number, layout=SimpleNamespace(replicas=range(replicas)))
        member = SimpleNamespace(fabric=self, model=self)
        shape = Shape(tensor=2, replicas=replicas)
        grid = SimpleNamespace(strategy=None, member=member, tells=True, shape=shape, lane=0)
        values: Any = SimpleNamespace(batch=batch, results=lambda numbers: bytes(numbers))
        batch.finished = self.looked.append
        self.operation: ReplicaEvaluation = stage_evaluation(grid, values)  # type: ignore[arg-type]

    device = torch.device("cpu")
    phase = ""

    def arrive(self, device: torch.device) -> None:
        """Do nothing: there is no accelerator."""

    def evaluate(self, forward: Any, rows: list[int], size: int) -> None:
        self.ran.extend((row, size) for row in rows)


class Alone:
    """An engine without other members."""

    step = 0
    communicator: Any = None

    def fault(self, *where: Any) -> None:
        """Strike nowhere."""

    def tag(self, name: str) -> str:
        return name


def run(replica: Replica, reports: ReportSum, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run a replica's share; return the batches whose results it gives."""
    given: list[bytes] = []

    def gathers(communicator: Any, told: bytes, tag: Any) -> list[bytes]:
        given.append(told)
        return given

    monkeypatch.setattr("unicron_lightning.worker.operations.gather_bytes", gathers)
    replica.operation.plan(reports, 0)
    engine: Any = Alone()
    replica.operation.attempt(engine)
    return list(given[0])


def test_each_replica_runs_its_own_stream_and_others_those_of_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas and two rounds: stream 1 has ended, so that the places 1 and 3 are missing."""

    def batch() -> GlobalBatch:
        return GlobalBatch(0, 1, range(2), lambda number: None, lambda number: 3, in_full_step=[0, 2])

    nothing = ReportSum.nothing(2)
    first, second = (Replica(batch(), number, 2) for number in range(2))
    assert run(first, nothing, monkeypatch) == [0, 1] == first.looked
    assert first.ran == [(0, 3), (2, 3)], "in one call, of the size of all batches"
    assert run(second, nothing, monkeypatch) == [] == second.ran
    reported = ReportSum(world=1, begun=True, finished=frozenset(second.operation.report()["finished"]))
    second.place = SimpleNamespace(replica=0, layout=SimpleNamespace(replicas=range(1)))
    assert run(second, reported, monkeypatch) == [0, 1] == second.looked, "the other replica is lost"
    kept = ReportSum(world=1, begun=True, finished=frozenset({0, 1, 3}))
    third = Replica(batch(), 0, 1)
    assert run(third, kept, monkeypatch) == [1], "the place 0 is kept by a survivor"
