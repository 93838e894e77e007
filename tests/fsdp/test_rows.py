"""The rows of a global batch, of which some streams may have ended, and a worker's part in them."""

from __future__ import annotations

import torch
from torch import nn

from unicron_lightning.data.loader import BatchRows, GlobalBatch
from unicron_lightning.data.passes import RowPart
from unicron_lightning.fsdp.gradients import ShardedGradients
from unicron_lightning.fsdp.holder import ShardHolder
from unicron_lightning.fsdp.rows import StepRows
from unicron_lightning.replica.fabric import EpochPlace
from unicron_lightning.replica.layout import Shape, ShardReport, plan_layout
from unicron_lightning.worker.control.activity import Activity
from unicron_lightning.worker.effects import Effects
from unicron_lightning.worker.sums import SumsLayout


def test_a_row_has_the_micro_batches_of_a_full_step() -> None:
    """Four devices and two rounds: streams 0 and 1 have ended before this step, stream 3 after its first batch."""
    batch = GlobalBatch(0, 9, range(3), lambda _: None, lambda _: 1, in_full_step=[2, 3, 6])
    first, second = (BatchRows(batch, 2, shard) for shard in (0, 1))
    assert first.numbers == second.numbers == [0, 1, 2, 3]
    assert [first.is_empty(row) for row in first.numbers] == [True, False, True, False]
    assert [rows.own(1) for rows in (first, second)] == [(0, True), (1, True)]
    assert [rows.own(3) for rows in (first, second)] == [(2, True), (2, False)]


def test_a_row_with_an_index_is_filled_at_the_end() -> None:
    batch = GlobalBatch(0, 0, range(3), lambda _: None, lambda _: 1)
    rows = [BatchRows(batch, 2, shard) for shard in (0, 1)]
    assert [[each.own(row) for row in each.numbers] for each in rows] == [
        [(0, True), (2, True)],
        [(1, True), (2, False)],
    ]


def test_a_spare_that_gets_a_state_in_a_step_begins_with_its_buffers() -> None:
    norm = nn.BatchNorm1d(2)
    effects, samples = Effects(norm, None), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    batch = GlobalBatch(0, 0, range(1), lambda _: samples, lambda _: 2)
    rows = StepRows(batch, RowPart(), effects, SumsLayout(), Activity(), ShardedGradients([], torch.device("cpu")))
    norm.load_state_dict({**norm.state_dict(), "running_mean": torch.tensor([5.0, 7.0])})
    rows.renew()

    def run(number: int, *, counts: bool) -> None:
        effects.start_micro_batch()
        rows.add(norm(batch.fetch(number)).sum(), (), number)
        effects.finish_micro_batch(number)

    rows.call(run, [0], last=True)
    sums = rows.sums([0])
    sums.read(sums.totals())
    effects.norms.commit(1)
    assert norm.running_mean is not None
    assert torch.allclose(norm.running_mean, 0.9 * torch.tensor([5.0, 7.0]) + 0.1 * samples.mean(0))


def test_a_worker_that_is_left_alone_in_a_commit_makes_its_own_update() -> None:
    holder = ShardHolder(Shape(tensor=2, replicas=2, sharded=True))
    members = [ShardReport(at=0)] * 3
    layout = plan_layout(1, members, holder.fabric.shape)
    holder.fabric.place = EpochPlace(epoch=1, rank=2, layout=layout, members=("a", "b", "c"))
    assert holder.is_spare
    holder.fabric.phase = "ready"
    assert not holder.is_spare
