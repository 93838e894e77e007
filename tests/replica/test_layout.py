"""Places in an epoch, and shares of a step: pure functions of the workers' reports."""

from __future__ import annotations

import pytest

from unicron_lightning.replica.layout import Replica, ReplicaLayout, Shape, ShardReport, StateLost, plan_layout
from unicron_lightning.replica.step import FINAL, OPEN, SUMMED, CallReport, kept_calls, plan_calls

SHAPE = Shape(tensor=1, pipeline=2, replicas=2)


def founders(number: int, shape: Shape = SHAPE) -> ReplicaLayout:
    return plan_layout(1, [ShardReport(at=0)] * number, shape)


def words(layout: ReplicaLayout, at: int = 5, *, intact: bool = True) -> list[ShardReport]:
    """Descriptions of an epoch's members at its end."""
    names = {rank: replica.name for replica in layout.replicas for rank in replica.members}
    return [
        ShardReport(shard=shard, replica=names.get(rank), intact=intact, at=at)
        for rank, shard in enumerate(layout.shards)
    ]


def test_founders_are_neighbours_in_replicas() -> None:
    layout = founders(5)
    assert [replica.members for replica in layout.replicas] == [(0, 1), (2, 3)]
    assert layout.shards == (0, 1, 0, 1, 0)
    assert layout.place(4) is None and layout.place(3) == 1
    assert layout.stale == frozenset()
    wide = founders(8, Shape(tensor=2, pipeline=2, replicas=2))
    assert [replica.members for replica in wide.replicas] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_whole_replicas_go_on_and_partners_of_the_dead_are_spares() -> None:
    before = words(founders(4))
    layout = plan_layout(2, [before[0], before[2], before[3]], SHAPE)  # rank 1 died
    (replica,) = layout.replicas
    assert replica.members == (1, 2) and replica.continues and replica.carried
    assert layout.missing(SHAPE) == [1]


def test_a_joiner_makes_a_spare_whole_and_both_are_given_the_state() -> None:
    before = words(founders(4))
    broken = plan_layout(2, [before[0], before[2], before[3]], SHAPE)
    later = words(broken, at=9)
    later[0] = ShardReport(shard=0, at=5)
    layout = plan_layout(3, [*later, ShardReport(shard=1)], SHAPE)
    assert [replica.members for replica in layout.replicas] == [(1, 2), (0, 3)]
    assert [replica.continues for replica in layout.replicas] == [True, False]
    assert layout.stale == frozenset({0, 3}) and layout.newest == 9
    assert layout.missing(SHAPE) == []


def test_two_broken_replicas_make_a_whole_one() -> None:
    before = words(founders(4))
    layout = plan_layout(2, [before[0], before[3]], SHAPE)
    (replica,) = layout.replicas
    assert replica.members == (0, 1) and not replica.continues and not replica.carried
    assert layout.stale == frozenset()


def test_without_the_newest_state_of_some_shard_there_is_no_way_on() -> None:
    before = words(founders(4))
    with pytest.raises(StateLost, match="step 5"):
        plan_layout(2, [before[0], before[2]], SHAPE)
    stale = ShardReport(shard=1, at=4)
    with pytest.raises(StateLost):
        plan_layout(2, [before[0], stale], SHAPE)


def test_between_two_updates_nothing_is_copied() -> None:
    before = words(founders(4))
    updated = [ShardReport(shard=w.shard, replica=w.replica, at=6) for w in before[:2]]
    ready = [ShardReport(shard=w.shard, replica=w.replica, at=5, ready=True) for w in before[2:]]
    layout = plan_layout(2, [*updated, *ready, ShardReport(shard=0, at=3)], Shape(tensor=1, pipeline=2, replicas=3))
    assert [replica.members for replica in layout.replicas] == [(0, 1), (2, 3)]
    assert layout.stale == frozenset() and layout.newest == 6


def test_between_two_operations_nothing_is_copied() -> None:
    before = words(founders(4))
    members = [*before, ShardReport(shard=0, at=3), ShardReport(shard=1, at=3)]
    wide = Shape(tensor=1, pipeline=2, replicas=3)
    uneven, even = (plan_layout(2, members, wide, even=each) for each in (False, True))
    assert [replica.members for replica in uneven.replicas] == [(0, 1), (2, 3)] and uneven.stale == frozenset()
    assert [replica.members for replica in even.replicas][2:] == [(4, 5)] and even.stale == frozenset({4, 5})


def test_connections_within_a_replica_are_carried_only_if_all_its_workers_have_them() -> None:
    before = words(founders(4))
    before[1] = ShardReport(shard=1, replica=before[1].replica, at=5, intact=False)
    layout = plan_layout(2, before, SHAPE)
    assert [replica.carried for replica in layout.replicas] == [False, True]
    assert all(replica.continues for replica in layout.replicas)


def report(*calls: tuple[int, ...], began: int | None = None) -> CallReport:
    return CallReport(calls=calls, began=len(calls) if began is None else began)


@pytest.mark.parametrize(
    ("reports", "kept"),
    [
        ([report((0, 2)), report((0, 2))], 1),
        # one worker has not begun the second call, which thus has changed nothing
        ([report((0, 2), began=2), report((0, 2))], 1),
        # both have begun it, so its gradients may be partly added
        ([report((0, 2), began=2), report((0, 2), began=2)], 0),
        ([report((0, 2), (1,)), report((0, 2), began=2)], 0),
        ([report(began=1), report()], 0),
        ([None, None], 0),
    ],
)
def test_which_calls_count(reports: list[CallReport | None], kept: int) -> None:
    assert kept_calls(reports) == kept


def test_each_micro_batch_is_run_once() -> None:
    for world in (1, 2, 3):
        plans = [plan_calls(range(12), 3, [None] * world, place) for place in range(world)]
        assert sorted(m for plan in plans for call in plan.calls for m in call) == list(range(12))
        assert all(plan.calls[0] == tuple(range(place, 12, 3)) for place, plan in enumerate(plans))
    assert plan_calls(range(12), 3, [None] * 2, None).calls == ()
    fast, slow = (plan_calls(range(6), 2, [None] * 2, place, (4, 2)).calls for place in (0, 1))
    assert (fast, slow) == (((0, 2, 4, 5),), ((1, 3),)), "by speed"
    assert plan_calls(range(6), 3, [None] * 2, 0, (4, 2)) == plan_calls(range(6), 3, [None] * 2, 0), "one is missing"


def test_what_a_lost_replica_has_done_is_dealt_out_and_summed_apart() -> None:
    done = [[report((0, 2)), report((0, 2))]]
    plan = plan_calls(range(4), 2, done, 0)
    assert plan.kept == 1 and plan.calls == ((1, 3),) and plan.lost == (1, 3)
    three = [[report((0, 3))], [report((1, 4))]]
    assert [plan_calls(range(6), 3, three, place).calls for place in (0, 1)] == [((2,),), ((5,),)]


def summed(*calls: tuple[int, ...], state: int = SUMMED, reduced: int = 2) -> CallReport:
    return CallReport(calls=calls, began=len(calls), reduced=reduced, state=state)


@pytest.mark.parametrize(
    ("replicas", "complete", "reduced"),
    [
        ([[summed((0,)), summed((0,))], [summed((1,)), summed((1,))]], True, 2),
        ([[summed((0,)), summed((0,))], [summed((1,), state=FINAL), summed((1,), state=FINAL)]], True, 2),
        # one worker has finalized its gradients, its partner has not
        ([[summed((0,)), summed((0,), state=FINAL)], [summed((1,)), summed((1,))]], False, 2),
        ([[summed((0,)), summed((0,))], [summed((1,)), summed((1,), state=OPEN, reduced=1)]], False, 1),
        # a replica that is new, or has to begin again, lacks all sums
        ([[summed((0,)), summed((0,))], None], False, 0),
        ([[summed((0,)), summed((0,))], [summed((1,)), CallReport(calls=(), began=1)]], False, 0),
    ],
)
def test_nothing_is_left_if_all_present_replicas_have_all_sums(
    replicas: list[list[CallReport | None] | None], complete: bool, reduced: int
) -> None:
    """The third replica, with row 2, is lost; planned is for the second shard."""
    plans = [plan_calls(range(3), 3, replicas, place, shard=1) for place in (0, 1, None)]
    assert all((plan.complete, plan.reduced) == (complete, reduced) for plan in plans)
    assert ((2,) in {plan.lost for plan in plans} or not reduced) != complete
    if complete:
        assert all((plan.calls, plan.lost) == ((), ()) for plan in plans)
        assert [plan.kept for plan in plans] == [1, 1, 0], "the calls are those of the small sums"


def test_a_replica_that_is_new_in_the_middle_of_a_step_takes_its_part_of_the_rest() -> None:
    replicas = [[report((0, 2)), report((0, 2))], None]
    plans = [plan_calls(range(4), 2, replicas, place) for place in (0, 1)]
    assert [plan.calls for plan in plans] == [((1,),), ((3,),)]
    assert [plan.kept for plan in plans] == [1, 0]


@pytest.mark.parametrize(
    ("shards", "replicas", "expected"),
    [
        ([0, 1, 0, 0], 4, [3]),  # two joiners at a time have taken the same shard
        ([0, 1, 0, 0, 0, 0], 4, [4, 5]),
        ([0, 1, 0, 0, 1], 4, []),  # one more replica is formed; the other spare waits for a joiner
        ([0, 1, 0, 0], 1, [2, 3]),  # no further replica can be used
        ([0, 1, 0, 1], 1, [2, 3]),
        ([0, 1, 0], 2, []),
    ],
)
def test_a_spare_is_surplus_if_its_shard_completes_no_replica(
    shards: list[int], replicas: int, expected: list[int]
) -> None:
    first = Replica(name="1/0", members=(0, 1), continues=True, carried=True)
    layout = ReplicaLayout(replicas=(first,), shards=tuple(shards), stale=frozenset(), newest=0)
    shape = Shape(tensor=1, pipeline=2, replicas=replicas)
    assert [rank for rank in range(len(shards)) if layout.is_surplus(rank, shape)] == expected
