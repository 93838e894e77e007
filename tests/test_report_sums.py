"""Sums of reports: what a member derives from the sum equals what it would derive from every member's report."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lightning import wire
from unicron_lightning.wire.report_sums import lengths_of, numbers_of, summed
from unicron_lightning.worker.rows import ReportSum

numbers = st.sets(st.integers(0, 60)).map(sorted)
reports = st.fixed_dictionaries({}, optional={"finished": numbers, "reduced": st.sets(st.integers(0, 8)).map(sorted)})
states = st.fixed_dictionaries(
    {
        "position": st.integers(4, 5),
        "operation": st.sampled_from(["step", "evaluation"]),
        "has_state": st.booleans(),
        "report": reports,
    }
)


@given(st.sets(st.integers(0, 300)))
def test_runs_describe_any_set(chosen: set[int]):
    lengths = lengths_of(chosen)
    assert numbers_of(lengths) == chosen
    assert len(lengths) % 2 == 0 and all(length > 0 for length in lengths[1:])


@given(st.lists(states, min_size=1, max_size=9))
def test_a_sum_says_what_the_members_said(told: list[dict[str, Any]]):
    go = msgspec.json.decode(wire.encode(summed(7, told)), type=wire.Go)
    ranks = range(len(told))
    known = [rank for rank in ranks if told[rank]["has_state"]]
    top = max((told[rank]["position"] for rank in known), default=None)
    begun = [rank for rank in known if told[rank]["position"] == top]
    assert sum(standing.count for standing in go.standings) == len(told)
    for standing in go.standings:
        same = [
            rank
            for rank in ranks
            if (told[rank]["position"] if rank in known else None, told[rank]["operation"])
            == (standing.position, standing.operation)
        ]
        assert (standing.first, standing.count) == (same[0], len(same))
    total = ReportSum.of(go, len(told))
    assert total.finished == {m for rank in begun for m in told[rank]["report"].get("finished", [])}
    for bucket in range(9):
        holders = [rank for rank in begun if bucket in told[rank]["report"].get("reduced", [])]
        assert total.reduced.get(bucket) == ((holders[0], len(holders)) if holders else None)
    if known:
        assert total.donor == (known[0] if len(known) < len(told) else None)


def test_the_size_of_a_sum_does_not_grow_with_the_world():
    def size(world: int) -> int:
        told = [
            {
                "position": 3_000,
                "step": 1_000,
                "has_state": True,
                "operation": "step",
                "report": {"finished": list(range(rank, 4 * world, world)), "reduced": [0, 1, 2, 3]},
            }
            for rank in range(world)
            if rank != world // 2
        ]
        return len(wire.encode(summed(2, told)))

    assert size(4_096) - size(16) < 30


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"position": -1}, "position"),
        ({"operation": 3}, "operation"),
        ({"operation": "x" * 101}, "operation"),
        ({"report": [1]}, "report"),
        ({"report": {"finished": 3}}, "finished"),
        ({"report": {"finished": [1, -1]}}, "finished"),
        ({"report": {"reduced": [True]}}, "reduced"),
        ({"report": {"reduced": ["0"]}}, "reduced"),
    ],
)
def test_a_report_that_cannot_be_summed_is_refused(state: dict[str, Any], reason: str):
    message = {"type": "worker_ready", "worker": "a/0#1", "epoch": 1, "state": {"step": 1, **state}}
    with pytest.raises(msgspec.ValidationError, match=f"expected {reason}"):
        wire.decode_from_agent(msgspec.json.encode(message))
