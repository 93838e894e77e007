"""Conformance suite: properties that every policy must have."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from simulate.scenes import CLUSTER, costs, random_trace, task, two_tasks

from unicron_lightning.errors import ConfigError
from unicron_lightning.simulate.result import MICRO, SimulationResult
from unicron_lightning.simulate.settings import POLICIES, simulate
from unicron_lightning.simulate.trace import SimCluster, Trace, TraceFault


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check_accounts(result: SimulationResult, cluster: SimCluster) -> None:
    """Check that every microsecond of every worker is accounted for, and every FLOP of the ideal."""
    assert sum(result.worker_micros.values()) == round(result.seconds * MICRO) * cluster.num_workers
    assert min(result.worker_micros.values()) >= 0
    done = result.accumulated_waf
    assert done == pytest.approx(sum(each.weight * each.flops for each in result.tasks.values()), rel=1e-9, abs=1e-6)
    assert sum(result.lost.values()) == pytest.approx(result.ideal - done, rel=1e-9, abs=1e-6 * result.ideal)
    assert done <= result.ideal * (1 + 1e-9)
    assert (np.diff(result.times) > 0).all() and result.times[0] == 0.0 and (result.values >= 0).all()
    for incident in result.incidents:
        assert incident.known_at is None or incident.known_at >= incident.at
        assert incident.running_at is None or incident.known_at is not None
        assert min(incident.seconds.values()) >= 0 and min(incident.waf_seconds.values()) >= 0


def test_without_failures_all_is_as_in_the_ideal(policy: str):
    result = simulate(policy, CLUSTER, two_tasks(), Trace(name="none", seconds=5000.0), costs())
    check_accounts(result, CLUSTER)
    assert result.accumulated_waf == pytest.approx(result.ideal, rel=1e-12)
    assert result.worker_micros["useful"] == 5000 * MICRO * CLUSTER.num_workers
    assert not result.incidents
    assert {name: each.ettr for name, each in result.tasks.items()} == {"a": 1.0, "b": 1.0}


def test_overheads_are_paid_for_all_the_time(policy: str):
    paid = costs(step_overhead=0.25, redundancy=0.5)
    result = simulate(policy, CLUSTER, two_tasks(), Trace(name="none", seconds=5000.0), paid)
    check_accounts(result, CLUSTER)
    assert result.of_ideal == pytest.approx(0.5 / 1.25)
    assert result.lost["overhead"] == pytest.approx(result.ideal - result.accumulated_waf)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_time_is_conserved(policy: str, seed: int):
    tasks = [
        *two_tasks(),
        task("c", arrival=9_000.0, departure=30_000.0),
        task("d", weight=1.5, max_workers=4, steps=500.0),
    ]
    result = simulate(policy, CLUSTER, tasks, random_trace(seed), costs(memory_checkpoint_interval=60.0))
    check_accounts(result, CLUSTER)
    assert result.incidents and result.accumulated_waf > 0.1 * result.ideal
    assert 0 < result.tasks["d"].steps <= 500.001


def test_the_same_trace_gives_the_same_bytes(policy: str):
    trace = random_trace(7)
    first, second = (simulate(policy, CLUSTER, two_tasks(), trace, costs()) for _ in range(2))
    assert pickle.dumps(first) == pickle.dumps(second)


def test_a_cell_is_lost_as_a_whole(policy: str):
    cells = SimCluster(num_nodes=12, workers_per_node=2, cell=2)
    faults = [TraceFault(at=100.0, kind="lost_connection", node=3, repair=500.0)]
    trace = Trace.of("one", 4000.0, faults)
    result = simulate(policy, cells, two_tasks(), trace, costs())
    check_accounts(result, cells)
    assert result.worker_micros["repairing"] == 2 * 500 * MICRO, "one node of two workers is under repair"
    assert result.worker_micros["idle"] >= 2 * 400 * MICRO, "its neighbour waits for it"


def test_all_nodes_may_fail_and_come_back(policy: str):
    faults = [TraceFault(at=1000.0, kind="lost_connection", node=node, repair=2000.0 + node) for node in range(6)]
    result = simulate(policy, CLUSTER, two_tasks(), Trace.of("all", 20_000.0, faults), costs())
    check_accounts(result, CLUSTER)
    assert result.values[-1] == pytest.approx(result.values[0]), "everybody has all again"
    assert result.values[np.searchsorted(result.times, 2000.0) - 1] == 0.0


def test_what_cannot_be_simulated_is_refused(policy: str):
    bad = Trace.of("bad", 10.0, [TraceFault(at=1.0, kind="task_hang", node=6)])
    with pytest.raises(ConfigError, match="6 nodes of 4 workers"):
        simulate(policy, CLUSTER, two_tasks(), bad, costs())
    with pytest.raises(ConfigError, match="different names"):
        simulate(policy, CLUSTER, [task("a"), task("a")], Trace(name="x", seconds=1.0), costs())


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="'hope': expected one of"):
        simulate("hope", CLUSTER, two_tasks(), Trace(name="x", seconds=1.0), costs())
