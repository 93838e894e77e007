"""Rows of evaluations: which batches reports of rows name; tests of megatron and fsdp run them in real processes."""

from __future__ import annotations

from unicron_lightning.replica.step import batches_of
from unicron_lightning.worker.rows import ReportSum, plan_rows


def test_a_row_is_finished_when_present_workers_have_the_batch_of_each_shard() -> None:
    """Row 1 is missing on shard 1, row 2 on shard 0, and the last member has not begun."""
    members = ({"finished": [0, 1]}, {"finished": [0, 2]}, {"finished": [3]}, {"finished": [3]}, None)
    reports = ReportSum(world=5, begun=True, members=members)
    finished = batches_of(reports, (0, 1, 0, 1, 0), 2)
    assert finished == {0, 2, 6, 1, 5, 7}
    plans = [plan_rows(range(10), finished, place, 2, width=2) for place in range(2)]
    assert [plan.rows for plan in plans] == [[1, 4], [2]]


def test_nothing_is_finished_before_the_first_attempt() -> None:
    assert batches_of(ReportSum.nothing(4), (0, 1, 0, 1), 2) == set()
