"""``unicron plan`` shows the places that the coordinator assigns in the same situation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from coordinator.driver import World

from unicron_lightning.cli.plan.situation import (
    FailuresConfig,
    NodeConfig,
    PerformanceConfig,
    PlanClusterConfig,
    PlanConfig,
    PlanTaskConfig,
    Situation,
    situation_of,
)
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation.places import NO_TASK
from unicron_lightning.planner.fleet import solve_fleet

TASKS = "abc"
Assigned = dict[str, dict[str, int]]


def assigned(world: World) -> Assigned:
    """Node -> task -> places, as the coordinator has assigned them."""
    found: Assigned = {}
    for place, task in sorted(world.machine.lasting.assigned.items()):
        if task != NO_TASK:
            node = found.setdefault(place.partition("/")[0], {})
            node[task] = node.get(task, 0) + 1
    return found


def situation(dice: random.Random, sizes: dict[str, int], running: Assigned) -> Situation:
    """The command's file: the cluster, what runs now, and tasks of random value."""
    flops = {task: [0.0, *sorted(dice.uniform(1e15, 9e15) for _ in range(sum(sizes.values())))] for task in TASKS}
    tasks = {
        task: PlanTaskConfig(
            performance=PerformanceConfig(flops={x: flops[task][x] for x in range(1, len(flops[task]))}),
            transition_seconds=1.0,
            weight=dice.uniform(0.5, 2.0),
            accelerators={node: held[task] for node, held in running.items() if task in held},
        )
        for task in TASKS
    }
    nodes = {node: NodeConfig(num_accelerators=size) for node, size in sizes.items()}
    cluster = PlanClusterConfig(nodes=nodes, workers_per_node=max(sizes.values()))
    config = PlanConfig(cluster=cluster, failures=FailuresConfig(worker_mtbf_hours=100), tasks=tasks)
    return situation_of(config, Path())


@pytest.mark.parametrize("seed", range(5))
def test_the_command_places_as_the_coordinator_does(seed: int) -> None:
    dice, world = random.Random(seed), World()
    world.answers_at_once = False
    sizes = {f"n{node}": dice.randint(1, 4) for node in range(5)}
    for task in TASKS:
        for node, size in sizes.items():
            for slot in range(size):
                world.agent(f"{task}.{node}.{slot}", task=task, nodes=(1, 99), place=f"{node}/{slot}").start()
    world.advance(1.0)
    moved = 0
    for number in range(6):
        world.do(ev.Resize(task="a", nodes=99 - number % 2))  # asks for a plan again
        before = assigned(world)
        shown = situation(dice, sizes, before)
        plan = solve_fleet(shown.fleet)
        placement = shown.place(plan)
        world.do(ev.Planned(key=world.questions[-1].key, allocation=dict(plan.allocation)))
        assert assigned(world) == {node: dict(tasks) for node, tasks in placement.accelerators.items()}
        moved += bool(before) and placement.num_moved
    assert moved > 0
