"""The rows of a global batch whose streams have partly ended."""

from __future__ import annotations

from unicron_lightning.data.loader import BatchRows, GlobalBatch


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
