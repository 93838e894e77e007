"""Shares and plans: each row is computed once by present replicas; of a step, it is in a finished bucket otherwise."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lightning import wire
from unicron_lightning.wire.report_sums import summed
from unicron_lightning.worker.rows import ReportSum, plan_rows, share, shares_of
from unicron_lightning.worker.step import StepPlan, plan_step


@given(st.lists(st.integers(), max_size=40), st.integers(1, 8))
def test_shares_partition_evenly(items: list[int], world: int) -> None:
    shares = [share(items, rank, world) for rank in range(world)]
    assert sorted(item for part in shares for item in part) == sorted(items)
    sizes = [len(part) for part in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_a_share_keeps_the_order() -> None:
    assert share(range(7), 1, 3) == [1, 4]


@given(st.sets(st.integers(0, 30)), st.integers(1, 8))
def test_in_a_step_with_missing_micro_batches_each_stays_on_its_rank(places: set[int], world: int) -> None:
    present = sorted(places)
    for rank in range(world):
        mine = shares_of(range(len(present)), world, None, present)[rank]
        assert {present[number] for number in mine} == places & set(share(range(31), rank, world))
        plan = plan_step(range(len(present)), 2, ReportSum.nothing(world), rank, None, present)
        assert plan.todo == tuple(mine) and len(plan.lost) == len(present)


def test_what_is_lost_of_a_step_with_missing_micro_batches_is_dealt_to_all() -> None:
    reports = summed(1, [{"position": 1, "operation": "step", "report": {"finished": [0], "reduced": []}}])
    total = ReportSum.of(msgspec.json.decode(msgspec.json.encode(reports), type=wire.Go), 1)
    assert plan_step(range(3), 1, total, 0, None, [1, 5, 7]).todo == (1, 2)


@given(st.integers(0, 30), st.sets(st.integers(0, 29)), st.integers(1, 4), st.integers(1, 5))
def test_each_row_with_an_unfinished_batch_is_computed_by_one_replica(
    number: int, finished: set[int], width: int, replicas: int
) -> None:
    plans = [plan_rows(range(number), finished, place, replicas, width=width) for place in range(replicas)]
    rows = sorted(row for plan in plans for row in plan.rows)
    assert rows == sorted({batch // width for batch in range(number) if batch not in finished})
    assert all(plan.lost == tuple(rows) for plan in plans)
    assert plan_rows(range(number), finished, None, replicas, width=width).calls == (), "a spare has none"


def test_replicas_beyond_the_declared_ones_have_no_share_of_a_step_that_none_has_begun() -> None:
    shares = shares_of(range(5), 2)
    assert [plan_rows(range(5), (), place, 3, shares=shares).rows for place in range(3)] == [[0, 2, 4], [1, 3], []]
    assert [plan_rows(range(5), {0}, place, 3, shares=shares).rows for place in range(3)] == [[1, 4], [2], [3]]


def test_the_share_of_a_missing_replica_is_a_call_of_its_own() -> None:
    shares = shares_of(range(12), 3)
    assert [plan_rows(range(12), (), place, 2, shares=shares).calls for place in range(2)] == [
        ((0, 3, 6, 9), (2, 8)),
        ((1, 4, 7, 10), (5, 11)),
    ]


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"not in 0\.\.2"):
        share(range(4), rank, 3)


Report = dict[str, list[int]]


def plans_of(number: int, buckets: int, reports: list[Report | None]) -> list[StepPlan]:
    """Each rank's plan from the sum that the coordinator sends; members without a report are one operation behind."""
    states = [
        {"position": 1, "operation": "step", "report": report} if report is not None else {"position": 0}
        for report in reports
    ]
    go = msgspec.json.decode(msgspec.json.encode(summed(1, states)), type=wire.Go)
    begun = any(report is not None for report in reports)
    total = ReportSum.of(go, len(reports)) if begun else ReportSum.nothing(len(reports))
    return [plan_step(range(number), buckets, total, rank) for rank in range(len(reports))]


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, int, list[Report | None]]:
    """Micro-batches, buckets, and reports in which no two ranks have finished the same micro-batch."""
    micro_batches, buckets, world = draw(st.integers(1, 12)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    # -1: lost with a dead rank
    owner = draw(st.lists(st.integers(-1, world - 1), min_size=micro_batches, max_size=micro_batches))
    reports: list[Report | None] = []
    for rank in range(world):
        reduced = draw(st.sets(st.integers(0, buckets - 1)))
        finished = [m for m, who in enumerate(owner) if who == rank]
        reports.append(draw(st.sampled_from([None, {"finished": finished, "reduced": sorted(reduced)}])))
    return micro_batches, buckets, reports


@given(situations())
def test_what_is_lost_is_computed_once_unless_each_bucket_is_complete(
    situation: tuple[int, int, list[Report | None]],
) -> None:
    number, buckets, reports = situation
    plans = plans_of(number, buckets, reports)
    finished = [m for report in reports if report is not None for m in report["finished"]]
    todo = [m for plan in plans for m in plan.todo]
    if len({bucket for report in reports if report is not None for bucket in report["reduced"]}) == buckets:
        assert todo == [], "each bucket has the lost micro-batches"
    else:
        assert sorted(todo + finished) == list(range(number))
    assert all(sorted(plan.lost) == sorted(todo) for plan in plans)


@given(situations())
def test_a_bucket_finished_anywhere_is_handed_to_those_without(
    situation: tuple[int, int, list[Report | None]],
) -> None:
    number, buckets, reports = situation
    plans = plans_of(number, buckets, reports)
    assert len({(plan.held, plan.reduced) for plan in plans}) == 1, "all ranks must start the same collectives"
    held = dict(plans[0].held)
    for bucket in range(buckets):
        have = [r for r, report in enumerate(reports) if report is not None and bucket in report["reduced"]]
        assert (bucket in plans[0].reduced) == bool(have)
        if bucket in held:
            assert held[bucket] == have[0] and len(have) < len(reports)
        else:
            assert len(have) in (0, len(reports))


def test_the_first_plan_is_the_plain_share() -> None:
    plan = plan_step(range(5), 2, ReportSum.nothing(2), 1)
    assert (plan.todo, plan.held, plan.reduced) == ((1, 3), (), frozenset())


@pytest.mark.parametrize(("reduced", "todo"), [([0, 1, 2], ()), ([0, 1], (2,)), ([0, 2], (2,)), ([], (2,))])
def test_a_step_lacks_what_one_bucket_lacks(reduced: list[int], todo: tuple[int, ...]) -> None:
    """The last rank of three dies; of the last bucket, the loss and the logged values are in no other."""
    reports: list[Report | None] = [{"finished": [0], "reduced": reduced}, {"finished": [1], "reduced": []}]
    plans = plans_of(3, 3, reports)
    assert [plan.todo for plan in plans] == [todo, ()]
    assert all(plan.lost == todo and plan.reduced == set(reduced) for plan in plans)


def test_the_papers_example_of_a_lost_rank() -> None:
    """Three ranks with four micro-batches each; the third dies before finishing any: its four are redistributed."""
    reports: list[Report | None] = [{"finished": [0, 3, 6, 9]}, {"finished": [1, 4, 7, 10]}]
    assert [plan.todo for plan in plans_of(12, 1, reports)] == [(2, 8), (5, 11)]
