"""Placement: running workers stay, no node is overfull, and the fewest workers move."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lightning.planner.placement import Demand, Move, NodeCapacity, place

Running = dict[str, dict[str, int]]
Case = tuple[list[NodeCapacity], list[Demand], Running]


def build(
    generator: np.random.Generator, num_nodes: int, num_tasks: int, sizes: tuple[int, ...] = (3, 4, 8), islands: int = 0
) -> Case:
    """Tasks on nodes, some of them lost, and the tasks' demands: a little more or less than before."""
    nodes, running = [], {}
    for index in range(num_nodes):
        state = str(generator.choice(["ready"] * 9 + ["failed", "draining", "cordoned"]))
        size, island = int(generator.choice(sizes)), int(generator.integers(0, islands + 1))
        where = f"island{island}" if island else ""
        nodes.append(NodeCapacity(name=f"n{index:02}", num_accelerators=size, state=state, island=where))
        free = nodes[-1].num_accelerators
        for task in generator.permutation(num_tasks) if generator.random() < 0.9 else ():
            num = int(generator.integers(0, free + 1))
            if num and generator.random() < 0.6:
                running.setdefault(f"n{index:02}", {})[f"t{task}"] = num
                free -= num
    left = sum(node.num_accelerators for node in nodes if node.state == "ready")
    demands = []
    for task in generator.permutation(num_tasks):
        now = sum(tasks.get(f"t{task}", 0) for tasks in running.values())
        num = min(max(0, now + int(generator.integers(-3, 4))), left)
        left -= num
        together, in_island = (int(generator.choice([1, 2, 3])) for _ in range(2))
        demands.append(Demand(task=f"t{task}", num_workers=num, together=together, in_island=in_island))
    return nodes, demands, running


@st.composite
def cases(draw: st.DrawFn) -> Case:
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return build(generator, draw(st.integers(1, 9)), draw(st.integers(1, 5)), islands=draw(st.sampled_from([0, 1, 3])))


def in_use(accelerators: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {node: sum(tasks.values()) for node, tasks in accelerators.items()}


@given(cases())
def test_every_task_gets_what_it_shall_have_where_there_is_room(case: Case) -> None:
    nodes, demands, running = case
    placement = place(nodes, demands, running)
    for demand in demands:
        on_nodes = placement.of_task(demand.task)
        assert sum(on_nodes.values()) == demand.num_workers
        assert all(num > 0 for num in on_nodes.values())
        spanning = sum(num % demand.together for num in on_nodes.values())
        assert placement.num_spanning[demand.task] == spanning
    room = {node.name: node.num_accelerators for node in nodes if node.state == "ready"}
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


@given(cases())
def test_it_moves_as_few_as_any_placement(case: Case) -> None:
    nodes, demands, running = case
    ready = {node.name for node in nodes if node.state == "ready"}
    kept = {d.task: sum(tasks.get(d.task, 0) for node, tasks in running.items() if node in ready) for d in demands}
    fewest = sum(max(0, demand.num_workers - kept[demand.task]) for demand in demands)
    assert place(nodes, demands, running).num_moved == fewest


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 12), st.booleans())
def test_a_task_alone_has_as_many_whole_groups_in_islands_as_any_placement_with_the_fewest_moves(
    seed: int, group: int, num_workers: int, starts: bool
) -> None:
    dice = np.random.default_rng(seed)
    nodes = [
        NodeCapacity(
            name=f"n{n}", num_accelerators=int(dice.integers(0, 5)), island=str(dice.choice(["", "x", "y", "z"]))
        )
        for n in range(5)
    ]
    has = {node.name: int(dice.integers(0, node.num_accelerators + 1)) * (not starts) for node in nodes}
    num_workers = min(num_workers, sum(node.num_accelerators for node in nodes))
    demand = Demand(task="a", num_workers=num_workers, in_island=group)
    placement = place(nodes, [demand], {name: {"a": number} for name, number in has.items()})
    change = num_workers - sum(has.values())
    assert placement.num_moved == max(0, change)
    found = Counter[str]()
    islands: dict[str, tuple[int, int]] = {}
    for node in nodes:
        low, high = islands.get(node.island or node.name, (0, 0))
        more = (has[node.name], node.num_accelerators) if change >= 0 else (0, has[node.name])
        islands[node.island or node.name] = (low + more[0], high + more[1])
        found[node.island or node.name] += placement.of_task("a").get(node.name, 0)
    apart = {0: 0}  # by workers so far, the fewest that are in no whole group
    for low, high in islands.values():
        ways = [(x + n, num + n % group) for x, num in apart.items() for n in range(low, high + 1)]
        apart = {x: min(num for y, num in ways if y == x) for x, _ in ways}
    spanning = sum(number % group for number in found.values())
    assert spanning == apart[num_workers]
    assert placement.num_spanning_islands == ({"a": spanning} if any(node.island for node in nodes) else {})


def test_larger_groups_choose_their_island_first() -> None:
    nodes = [NodeCapacity(name=f"n{n}", num_accelerators=4, island="xxyy"[n]) for n in range(4)]
    demands = [Demand(task="a", num_workers=4, in_island=2), Demand(task="b", num_workers=8, in_island=8)]
    placement = place(nodes, demands, {"n0": {"a": 1}})
    assert placement.num_spanning_islands == {"a": 0, "b": 0}
    assert placement.of_task("b") == {"n2": 4, "n3": 4}


def cluster(num_nodes: int, num_accelerators: int = 8) -> list[NodeCapacity]:
    return [NodeCapacity(name=f"n{n}", num_accelerators=num_accelerators) for n in range(num_nodes)]


def test_new_workers_are_put_beside_the_tasks_own_and_then_on_roomy_nodes() -> None:
    running = {"n0": {"a": 4}, "n1": {"b": 6}}
    demands = [Demand(task="a", num_workers=14), Demand(task="b", num_workers=6)]
    placement = place(cluster(3), demands, running)
    assert placement.of_task("a") == {"n0": 8, "n2": 6}
    assert placement.of_task("b") == {"n1": 6}


def test_a_task_releases_where_it_has_fewest() -> None:
    running = {"n0": {"a": 2}, "n1": {"a": 8}, "n2": {"a": 5}}
    placement = place(cluster(3), [Demand(task="a", num_workers=12)], running)
    assert placement.of_task("a") == {"n1": 8, "n2": 4}
    assert placement.num_moved == 0


def test_workers_that_should_share_a_node_and_do_not_are_counted() -> None:
    placement = place(cluster(2, num_accelerators=6), [Demand(task="a", num_workers=8, together=4)], {})
    assert placement.of_task("a") == {"n0": 6, "n1": 2}
    assert placement.num_spanning == {"a": 4}


def test_nodes_of_different_sizes_and_a_tight_fit() -> None:
    nodes = [
        NodeCapacity(name="big", num_accelerators=8),
        NodeCapacity(name="small", num_accelerators=4),
        NodeCapacity(name="odd", num_accelerators=3),
    ]
    demands = [Demand(task="a", num_workers=11), Demand(task="b", num_workers=4)]
    placement = place(nodes, demands, {})
    assert placement.accelerators == {"big": {"a": 8}, "small": {"a": 3, "b": 1}, "odd": {"b": 3}}


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


def test_twelve_thousand_nodes_and_256_tasks_take_seconds() -> None:
    generator = np.random.default_rng(61)
    nodes = [NodeCapacity(name=f"n{i:05}", num_accelerators=8) for i in range(12_500)]
    demands = [Demand(task=f"t{i:03}", num_workers=int(generator.integers(1, 24)) * 16, together=8) for i in range(256)]
    start = time.process_time()
    first = place(nodes, demands, {})
    broken = [replace(node, state="failed" if i % 500 == 7 else "ready") for i, node in enumerate(nodes)]
    second = place(broken, demands, first.accelerators)
    assert time.process_time() - start < 60
    lost = sum(sum(tasks.values()) for name, tasks in first.accelerators.items() if int(name[1:]) % 500 == 7)
    assert (first.num_moved, second.num_moved) == (sum(d.num_workers for d in demands), lost)
    assert set(first.num_spanning.values()) == {0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NodeCapacity(name="", num_accelerators=1), "expected the name of a node"),
        (lambda: NodeCapacity(name="a", num_accelerators=-1), "node 'a': num_accelerators=-1: expected"),
        (lambda: Demand(task="t", num_workers=-2), "task 't': num_workers=-2: expected an integer >= 0"),
        (lambda: Demand(task="t", num_workers=4, together=0), "task 't': together=0: expected an integer >= 1"),
        (lambda: place([NodeCapacity(name="a", num_accelerators=1)] * 2, [], {}), "node 'a' is given twice"),
        (lambda: place([], [Demand(task="t", num_workers=0)] * 2, {}), "task 't' is given twice"),
        (lambda: place([NodeCapacity(name="a", num_accelerators=1)], [], {"a": {"t": 2}}), "2 accelerators run on it"),
        (lambda: place([NodeCapacity(name="a", num_accelerators=1)], [], {"a": {"t": -2}}), "-2 accelerators of"),
        (lambda: place([], [Demand(task="t", num_workers=3)], {}), "the tasks get 3 workers: expected at most the 0"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_in_words(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
