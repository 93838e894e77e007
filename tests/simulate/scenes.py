"""Small clusters, tasks, costs and random traces for the tests of the simulator."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

from unicron_lightning.planner.performance.model import SublinearModel
from unicron_lightning.simulate.costs import Costs
from unicron_lightning.simulate.trace import SimCluster, SimTask, Trace, TraceFault
from unicron_lightning.terms import Terms

CLUSTER = SimCluster(num_nodes=6, workers_per_node=4)
HARDWARE = ("lost_connection", "ecc_error")
SOFTWARE = ("exited_abnormally", "task_hang", "cuda_error", "connection_failed")


def task(name: str, **changes: Any) -> SimTask:
    """Create a task with 1 FLOP/s per worker, a step of 240 FLOP, and at least one node of `CLUSTER`.

    Args:
        name: its name.
        changes: fields, and terms by their names.
    """
    terms = {each.name: changes.pop(each.name) for each in fields(Terms) if each.name in changes}
    given = {"performance": SublinearModel(rate=1.0, exponent=1.0), "flops_per_step": 240.0}
    return SimTask(name=name, terms=Terms(**{"min_workers": 4, **terms}), **{**given, **changes})


def two_tasks() -> list[SimTask]:
    """Create two tasks: four nodes for the first, two for the second."""
    return [task("a", weight=2.0, max_workers=16), task("b", max_workers=8)]


def costs(**changes: Any) -> Costs:
    """Costs of no particular system."""
    change = {"continue": 2.0, "join": 1.0, "leave": 0.5, "start": 30.0, "restart": 100.0, "reattempt": 1.0}
    given = {
        "system": "test",
        "detection": {"default": 3.0, "lost_connection": 5.0},
        "change": {**change, "migrate": 20.0},
        "checkpoint_interval": 600.0,
    }
    return Costs(**{**given, **changes})


def random_trace(seed: int, cluster: SimCluster = CLUSTER, *, seconds: float = 40_000.0, faults: int = 25) -> Trace:
    """Create faults of all kinds; some at the same moment, some during the recovery from the previous one."""
    chance = random.Random(seed)
    moments = [chance.uniform(0, seconds) for _ in range(faults)]
    moments += [at + chance.choice([0.0, 0.0, 1.0, 30.0]) for at in chance.sample(moments, faults // 3)]
    return Trace.of(f"random-{seed}", seconds, [_fault(chance, at, cluster) for at in moments])


def _fault(chance: random.Random, at: float, cluster: SimCluster) -> TraceFault:
    node = chance.randrange(cluster.num_nodes)
    if chance.random() < 0.4:
        return TraceFault(at=at, kind=chance.choice(HARDWARE), node=node, repair=chance.uniform(10.0, 4_000.0))
    worker = chance.randrange(cluster.workers_per_node)
    return TraceFault(at=at, kind=chance.choice(SOFTWARE), node=node, worker=worker)
