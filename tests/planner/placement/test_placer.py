"""Placement: running workers stay, no node is overfull, groups share nodes; compared with an integer program."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from unicron_lightning.planner.placement.placer import Demand, Move, NodeCapacity, NodeState, Placement, place

Running = dict[str, dict[str, int]]
Case = tuple[list[NodeCapacity], list[Demand], Running]


def build(
    generator: np.random.Generator,
    groups: tuple[int, ...],
    num_nodes: int,
    num_tasks: int,
    sizes: tuple[int, ...] = (),
) -> Case:
    """Tasks on nodes, some of them lost, and the tasks' demands: a little more or less than before."""
    sizes = sizes or (8 if max(groups) == 8 else 4,)
    group_of = [int(generator.choice(groups)) for _ in range(num_tasks)]
    nodes, running = [], {}
    for index in range(num_nodes):
        state = NodeState(str(generator.choice(["ready"] * 9 + ["failed", "draining", "cordoned"])))
        nodes.append(
            NodeCapacity(
                name=f"n{index:02}", num_accelerators=int(generator.choice(sizes)), switch=f"s{index // 3}", state=state
            )
        )
        free = nodes[-1].num_accelerators
        for task in generator.permutation(num_tasks) if generator.random() < 0.9 else ():
            num = int(generator.integers(0, free // group_of[task] + 1)) * group_of[task]
            if num and generator.random() < 0.6:
                running.setdefault(f"n{index:02}", {})[f"t{task}"] = num
                free -= num
    left = sum(node.num_accelerators for node in nodes if node.state is NodeState.READY)
    demands = []
    for task in generator.permutation(num_tasks):
        group = group_of[task]
        now = sum(tasks.get(f"t{task}", 0) for tasks in running.values())
        num = min(max(0, now + int(generator.integers(-3, 4)) * group), left // group * group)
        left -= num
        replica = group * int(generator.choice([1, 2, 3]))
        demands.append(Demand(task=f"t{task}", num_workers=num, group_size=group, replica_size=replica))
    return nodes, demands, running


@st.composite
def cases(draw: st.DrawFn) -> Case:
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    groups = draw(st.sampled_from([(1,), (1, 2, 4), (2, 8), (1, 2, 4, 8), (8,)]))
    return build(generator, groups, draw(st.integers(1, 9)), draw(st.integers(1, 5)))


def in_use(accelerators: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {node: sum(tasks.values()) for node, tasks in accelerators.items()}


@given(cases())
def test_every_task_gets_what_it_shall_have_where_there_is_room(case: Case) -> None:
    nodes, demands, running = case
    placement = place(nodes, demands, running)
    for demand in demands:
        on_nodes = placement.of_task(demand.task)
        assert sum(on_nodes.values()) == demand.num_workers
        assert all(num > 0 and num % demand.group_size == 0 for num in on_nodes.values())
    room = {node.name: node.num_accelerators for node in nodes if node.state is NodeState.READY}
    assert all(num <= room.get(node, 0) for node, num in in_use(placement.accelerators).items())


@given(cases())
def test_the_moves_lead_from_what_runs_to_the_placement(case: Case) -> None:
    nodes, demands, running = case
    placement = place(nodes, demands, running)
    accelerators = Counter({(node, task): num for node, tasks in running.items() for task, num in tasks.items()})
    for move in placement.moves:
        assert move.num_accelerators > 0 and move.source != move.target
        if move.source is not None:
            accelerators[move.source, move.task] -= move.num_accelerators
        if move.target is not None:
            accelerators[move.target, move.task] += move.num_accelerators
    placed = {(node, task): num for node, tasks in placement.accelerators.items() for task, num in tasks.items()}
    assert {key: num for key, num in accelerators.items() if num} == placed
    # No task both releases accelerators and gets new ones: that would be a move.
    ends = {(move.task, move.source is None, move.target is None) for move in placement.moves}
    assert not any((task, True, False) in ends and (task, False, True) in ends for task, _, _ in ends)


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_in_which_things_are_named_does_not_matter(case: Case, random: object) -> None:
    nodes, demands, running = case
    shuffled_nodes, shuffled_demands, items = list(nodes), list(demands), list(running.items())
    for each in (shuffled_nodes, shuffled_demands, items):
        random.shuffle(each)  # type: ignore[attr-defined]
    assert place(shuffled_nodes, shuffled_demands, dict(items)) == place(nodes, demands, running)


@given(cases())
def test_what_is_placed_stays_where_it_is(case: Case) -> None:
    nodes, demands, running = case
    placement = place(nodes, demands, running)
    again = place(nodes, demands, placement.accelerators)
    assert (again.moves, again.accelerators) == ((), placement.accelerators)


@given(st.integers(0, 2**32), st.sampled_from([(1,), (8,)]))
def test_with_single_slots_or_whole_nodes_it_moves_the_fewest(seed: int, groups: tuple[int, ...]) -> None:
    assert place(*build(np.random.default_rng(seed), groups, 9, 5)).proven_fewest


def fewest_moves(case: Case) -> int | None:
    """The minimum by an integer program, None if nothing fits.

    It has groups q and kept accelerators k by task and node, with k <= running and k <= placed accelerators.
    """
    nodes, demands, running = case
    ready = [node for node in nodes if node.state is NodeState.READY]
    shape = (len(demands), len(ready))
    size = shape[0] * shape[1]
    groups = np.array([demand.group_size for demand in demands])
    ran = np.array([[running.get(node.name, {}).get(d.task, 0) for node in ready] for d in demands]).reshape(shape)
    by_task = np.kron(np.diag(groups), np.ones((1, shape[1])))
    by_node = np.kron(groups[None, :], np.eye(shape[1]))
    kept = np.hstack([-np.diag(np.repeat(groups, shape[1])), np.eye(size)])
    wanted = [demand.num_workers for demand in demands]
    room = [node.num_accelerators for node in ready]
    solution = optimize.milp(
        np.concatenate([np.zeros(size), -np.ones(size)]),
        integrality=np.ones(2 * size),
        bounds=optimize.Bounds(0, np.concatenate([np.full(size, np.inf), ran.ravel()])),
        constraints=[
            optimize.LinearConstraint(np.hstack([by_task, np.zeros_like(by_task)]), wanted, wanted),
            optimize.LinearConstraint(np.hstack([by_node, np.zeros_like(by_node)]), -np.inf, room),
            optimize.LinearConstraint(kept, -np.inf, 0),
        ],
    )
    if solution.status == 2:
        return None
    assert solution.success, solution.message
    return sum(wanted) + round(solution.fun)


@pytest.mark.parametrize("groups", [(1,), (8,), (1, 2, 4, 8), (1, 8), (4, 8)])
def test_it_moves_as_few_as_an_integer_program_finds(groups: tuple[int, ...]) -> None:
    generator = np.random.default_rng(53)
    excess = []
    for _ in range(60):
        case = build(generator, groups, 6, 4)
        if not any(node.state is NodeState.READY for node in case[0]):
            continue
        placement, best = place(*case), fewest_moves(case)
        assert best is not None
        assert placement.fewest_moves <= best <= placement.num_moved
        excess.append(placement.num_moved - best)
    if len(groups) == 1:
        assert set(excess) == {0}
    else:  # packing, solved greedily: 98 to 99 of 100 cases are optimal
        assert np.mean(np.array(excess) == 0) >= 0.9


@pytest.mark.parametrize("groups", [(1, 2, 4), (1, 3, 6), (2, 4, 8)])
def test_groups_that_divide_each_other_are_refused_only_where_nothing_fits(groups: tuple[int, ...]) -> None:
    generator = np.random.default_rng(67)
    outcomes = set()
    for _ in range(60):
        case = build(generator, groups, 5, 4, sizes=(3, 5, 6, 7, 8, 11))
        if not any(node.state is NodeState.READY for node in case[0]):
            continue
        try:
            place(*case)
            placed = True
        except ValueError:
            placed = False
        outcomes.add((placed, fewest_moves(case) is not None))
    assert outcomes == {(True, True), (False, False)}


def test_the_search_for_room_moves_smaller_groups_only_as_far_as_needed() -> None:
    nodes = [NodeCapacity(name=name, num_accelerators=8) for name in "abc"]
    running = {"a": {"small": 4}, "b": {"small": 4}, "c": {"small": 2}}
    demands = [Demand(task="large", num_workers=16, group_size=8), Demand(task="small", num_workers=8, group_size=2)]
    placement = place(nodes, demands, running)
    # two of the three nodes have to be emptied: small keeps 4 and moves 4
    assert (placement.num_moved, placement.fewest_moves, placement.proven_fewest) == (16 + 4, 16, False)
    assert fewest_moves((nodes, demands, running)) == 20


def test_it_gives_up_what_makes_room_for_others() -> None:
    nodes = [NodeCapacity(name=name, num_accelerators=8) for name in "abc"]
    running = {"a": {"x": 4, "y": 4}, "b": {"x": 4}, "c": {"y": 4}}
    demands = [
        Demand(task="x", num_workers=4, group_size=4),
        Demand(task="y", num_workers=8, group_size=4),
        Demand(task="z", num_workers=8, group_size=8),
    ]
    placement = place(nodes, demands, running)
    assert placement.proven_fewest
    assert placement.accelerators == {"a": {"x": 4, "y": 4}, "b": {"z": 8}, "c": {"y": 4}}
    assert placement.moves == (
        Move(task="x", source="b", target=None, num_accelerators=4),
        Move(task="z", source=None, target="b", num_accelerators=8),
    )


def cluster(num_switches: int, nodes_each: int, num_accelerators: int = 8) -> list[NodeCapacity]:
    return [
        NodeCapacity(name=f"s{s}n{n}", num_accelerators=num_accelerators, switch=f"s{s}")
        for s in range(num_switches)
        for n in range(nodes_each)
    ]


def switches_of(placement: Placement, task: str) -> Counter[str]:
    totals: Counter[str] = Counter()
    for node, num in placement.of_task(task).items():
        totals[node.partition("n")[0]] += num
    return totals


def test_new_replicas_are_whole_on_nodes_and_under_switches() -> None:
    demands = [
        Demand(task="a", num_workers=64, replica_size=32, group_size=8),
        Demand(task="b", num_workers=12, replica_size=4, group_size=2),
        Demand(task="c", num_workers=32, replica_size=16, group_size=8),
    ]
    placement = place(cluster(4, 4), demands, {})
    assert placement.num_spanning == {"a": 0, "b": 0, "c": 0}
    assert [len(switches_of(placement, task)) for task in "abc"] == [2, 1, 1]
    assert [len(placement.of_task(task)) for task in "abc"] == [8, 2, 4]


def test_a_replica_that_lost_a_node_gets_one_under_its_switch() -> None:
    nodes = [
        node
        if node.name != "s1n0"
        else NodeCapacity(name="s1n0", num_accelerators=8, switch="s1", state=NodeState.FAILED)
        for node in cluster(3, 3)
    ]
    running = {name: {"a": 8} for name in ("s0n0", "s0n1", "s1n0", "s1n1")}
    demand = Demand(task="a", num_workers=32, replica_size=16, group_size=8)
    placement = place(nodes, [demand], running)
    assert placement.moves == (Move(task="a", source="s1n0", target="s1n2", num_accelerators=8),)


def test_a_broken_replica_is_what_is_given_up() -> None:
    nodes = [
        node
        if node.name != "s1n0"
        else NodeCapacity(name="s1n0", num_accelerators=8, switch="s1", state=NodeState.DRAINING)
        for node in cluster(2, 2)
    ]
    running = {node.name: {"a": 8} for node in nodes}
    placement = place(nodes, [Demand(task="a", num_workers=16, replica_size=16, group_size=8)], running)
    assert placement.of_task("a") == {"s0n0": 8, "s0n1": 8}
    assert placement.num_moved == 0


def test_one_worker_of_a_group_died_and_its_node_is_well() -> None:
    nodes = [NodeCapacity(name="a", num_accelerators=8), NodeCapacity(name="b", num_accelerators=8)]
    placement = place(nodes, [Demand(task="t", num_workers=8, group_size=8, replica_size=8)], {"a": {"t": 7}})
    assert placement.moves == (Move(task="t", source=None, target="a", num_accelerators=1),)
    assert placement.proven_fewest


def test_nodes_of_different_sizes_and_a_tight_fit() -> None:
    nodes = [
        NodeCapacity(name="big", num_accelerators=8),
        NodeCapacity(name="small", num_accelerators=4),
        NodeCapacity(name="odd", num_accelerators=3),
    ]
    demands = [Demand(task="a", num_workers=3), Demand(task="b", num_workers=4, group_size=4, replica_size=4)]
    placement = place(nodes, demands, {})
    assert placement.accelerators == {"odd": {"a": 3}, "small": {"b": 4}}


def test_a_task_that_is_over_leaves_and_lost_nodes_are_named() -> None:
    placement = place(
        [NodeCapacity(name="a", num_accelerators=2)],
        [Demand(task="t", num_workers=1)],
        {"a": {"gone": 1}, "b": {"t": 1}},
    )
    assert placement.moves == (
        Move(task="gone", source="a", target=None, num_accelerators=1),
        Move(task="t", source="b", target="a", num_accelerators=1),
    )


def spread(placement: Placement, demand: Demand, switch_of: dict[str, str]) -> tuple[int, int, int]:
    """Accelerators of replicas that span switches, accelerators that span nodes, and nodes in use: less is better."""
    on_nodes = placement.of_task(demand.task)
    on_switches: Counter[str] = Counter()
    for node, num in on_nodes.items():
        on_switches[switch_of[node]] += num
    size = demand.replica_size
    return sum(n % size for n in on_switches.values()), sum(n % size for n in on_nodes.values()), len(on_nodes)


def test_one_growing_task_is_as_compact_as_any_placement_with_as_few_moves() -> None:
    """Brute force over all placements that keep the running workers, in clusters with scattered free accelerators."""
    generator = np.random.default_rng(59)
    best = 0
    for _ in range(150):
        nodes = [NodeCapacity(name=f"n{i}", num_accelerators=4, switch=f"s{i // 2}") for i in range(4)]
        switch_of = {node.name: node.switch for node in nodes}
        taken = generator.integers(0, 5, size=4)
        running = {f"n{i}": {"other": int(num)} for i, num in enumerate(taken) if num}
        free = 16 - int(taken.sum())
        size = int(generator.choice([2, 4]))
        demand = Demand(task="t", num_workers=int(generator.integers(0, free // size + 1)) * size, replica_size=size)
        stays = Demand(task="other", num_workers=int(taken.sum()))
        placement = place(nodes, [demand, stays], running)
        assert placement.num_moved == demand.num_workers
        choices = np.array(np.meshgrid(*[range(5 - int(num)) for num in taken])).reshape(4, -1).T
        spreads = []
        for choice in choices[choices.sum(axis=1) == demand.num_workers]:
            accelerators = {f"n{i}": {"t": int(num)} for i, num in enumerate(choice) if num}
            other = Placement(accelerators=accelerators, moves=(), fewest_moves=0, num_spanning={})
            spreads.append(spread(other, demand, switch_of))
        found = spread(placement, demand, switch_of)
        assert found[1] == placement.num_spanning["t"]
        best += found == min(spreads)
    assert best >= 140  # greedy


def test_twelve_thousand_nodes_and_256_tasks_take_seconds() -> None:
    generator = np.random.default_rng(61)
    nodes = [NodeCapacity(name=f"n{i:05}", num_accelerators=8, switch=f"s{i // 32:03}") for i in range(12_500)]
    demands = [
        Demand(task=f"t{i:03}", num_workers=int(generator.integers(1, 24)) * 16, replica_size=16, group_size=8)
        for i in range(256)
    ]
    start = time.process_time()
    first = place(nodes, demands, {})
    broken = [
        NodeCapacity(
            name=n.name,
            num_accelerators=8,
            switch=n.switch,
            state=NodeState.FAILED if i % 500 == 7 else NodeState.READY,
        )
        for i, n in enumerate(nodes)
    ]
    second = place(broken, demands, first.accelerators)
    assert time.process_time() - start < 20  # 0.1 s each on the development machine
    lost = sum(sum(tasks.values()) for name, tasks in first.accelerators.items() if int(name[1:]) % 500 == 7)
    assert (first.num_moved, second.num_moved) == (sum(d.num_workers for d in demands), lost)
    assert set(first.num_spanning.values()) == {0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NodeCapacity(name="", num_accelerators=1), "expected the name of a node"),
        (lambda: NodeCapacity(name="a", num_accelerators=-1), "node 'a': num_accelerators=-1: expected"),
        (lambda: Demand(task="t", num_workers=5, group_size=2), "task 't': num_workers=5: expected a multiple of"),
        (lambda: Demand(task="t", num_workers=-2, group_size=2), "num_workers=-2: expected"),
        (lambda: Demand(task="t", num_workers=4, group_size=0), "group_size=0: expected"),
        (lambda: Demand(task="t", num_workers=4, replica_size=-1), "replica_size=-1: expected"),
        (lambda: place([NodeCapacity(name="a", num_accelerators=1)] * 2, [], {}), "node 'a' is given twice"),
        (lambda: place([], [Demand(task="t", num_workers=0)] * 2, {}), "task 't' is given twice"),
        (lambda: place([NodeCapacity(name="a", num_accelerators=1)], [], {"a": {"t": 2}}), "2 accelerators run on it"),
        (lambda: place([NodeCapacity(name="a", num_accelerators=1)], [], {"a": {"t": -2}}), "-2 accelerators of"),
        (lambda: place([], [Demand(task="t", num_workers=3)], {}), "the tasks get 3 workers: expected at most the 0"),
        (
            lambda: place([NodeCapacity(name=n, num_accelerators=3) for n in "ab"],
                          [Demand(task="t", num_workers=4, group_size=4)], {}),
            "task 't': 4 of its 4 workers do not fit on any node with 4 free accelerators",
        ),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_in_words(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
