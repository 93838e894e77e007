"""Traces, tasks and costs: orders and refusals."""

from __future__ import annotations

import random

import pytest
from simulate.scenes import task

from unicron_lightning.errors import ConfigError
from unicron_lightning.planner.performance.model import SublinearModel
from unicron_lightning.simulate.costs import Costs
from unicron_lightning.simulate.trace import SimCluster, Trace, TraceFault, order


def test_faults_of_one_moment_have_one_order():
    faults = [
        TraceFault(at=5.0, kind="lost_connection", node=1, repair=9.0),
        TraceFault(at=5.0, kind="lost_connection", node=2),
        TraceFault(at=5.0, kind="exited_abnormally", node=0, worker=0),
        TraceFault(at=5.0, kind="exited_abnormally", node=0, worker=1),
        TraceFault(at=5.0, kind="task_hang", node=0),
        TraceFault(at=6.0, kind="lost_connection", node=0),
    ]
    for seed in range(5):
        shuffled = random.Random(seed).sample(faults, len(faults))
        assert list(Trace.of("t", 10.0, shuffled).faults) == faults
    assert Trace.of("t", 6.0, faults).faults == tuple(faults[:-1]), "what is at the end or later is left out"
    assert [order(fault) for fault in faults] == sorted(order(fault) for fault in faults)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TraceFault(at=1.0, kind="flood", node=0), "'flood'"),
        (lambda: TraceFault(at=-1.0, kind="task_hang", node=0), "at=-1.0"),
        (lambda: TraceFault(at=1.0, kind="task_hang", node=-1), "node=-1"),
        (lambda: Trace(name="x", seconds=0.0), "seconds=0.0"),
        (lambda: SimCluster(num_nodes=10, workers_per_node=8, cell=4), "cell=4"),
        (lambda: Costs(system="s", detection={}, change={}), "default"),
        (lambda: Costs(system="s", detection={"default": 1.0, "flood": 1.0}, change={}), "flood"),
        (lambda: Costs(system="s", detection={"default": -1.0}, change={}), "-1.0"),
        (lambda: Costs(system="s", detection={"default": 1.0}, change={}).takes("join"), "join"),
        (lambda: task("t", weight=0.0), "weight=0.0"),
        (lambda: task("t", arrival=5.0, departure=5.0), "departure=5.0"),
        (lambda: task("t", min_workers=4, max_workers=2), "max_workers=2"),
    ],
)
def test_what_cannot_be_is_refused_by_value(make, said):
    with pytest.raises(ConfigError, match=said.replace("'", "")):
        make()


def test_a_task_uses_whole_quanta_between_its_limits():
    speed = SublinearModel(rate=2.0, exponent=1.0)
    elastic = task("t", performance=speed, flops_per_step=16.0, granularity=4, min_workers=8, max_workers=16)
    assert [elastic.throughput(x) for x in (7, 8, 11, 12, 99)] == [0.0, 16.0, 16.0, 24.0, 32.0]
