"""Simulated costs against closed forms."""

from __future__ import annotations

from functools import partial

import pytest
from simulate.scenes import CLUSTER, costs, random_trace, task, two_tasks

from unicron_lightning.coordinator.events import Competitor, Limits, Question
from unicron_lightning.coordinator.severity.record import SeverityLimits
from unicron_lightning.planner.performance.model import MeasuredPoint, MeasuredTable, ParallelConfiguration
from unicron_lightning.simulate import result as order
from unicron_lightning.simulate.costs import CHANGES
from unicron_lightning.simulate.result import Clock, SimulationResult
from unicron_lightning.simulate.settings import simulate
from unicron_lightning.simulate.trace import Trace, TraceFault
from unicron_lightning.simulate.unicron_system import SimShell, shares_of, static
from unicron_lightning.terms import Terms

SECONDS = 5000.0
WORKERS = CLUSTER.num_workers
"""All are the task's: 24 of 1 FLOP/s each; a step takes 10 s, with one node less 12 s."""
DIES = TraceFault(at=1003.0, kind="exited_abnormally", node=2, worker=0)
LOST = TraceFault(at=1003.0, kind="lost_connection", node=2, repair=1000.0)
BROKEN = TraceFault(at=1003.0, kind="connection_failed", node=2, worker=0)


def one(policy: str, *faults: TraceFault, **changes: object) -> SimulationResult:
    return simulate(policy, CLUSTER, [task("t")], Trace.of("one", SECONDS, faults), costs(**changes))


def test_a_restart_costs_detection_restart_and_the_way_back():
    result = one("megatron", DIES)
    assert result.accumulated_waf == pytest.approx(WORKERS * (SECONDS - 3.0 - 100.0 - 403.0))
    (incident,) = result.incidents
    assert incident.seconds == {"detection": 3.0, "transition": 503.0, "sub_healthy": 0.0}
    assert sum(incident.waf_seconds.values()) == pytest.approx(result.ideal - result.accumulated_waf)


def test_a_restart_waits_for_the_repair_if_there_is_no_spare_node():
    result = one("megatron", LOST)
    assert result.accumulated_waf == pytest.approx(WORKERS * (SECONDS - 1000.0 - 100.0 - 403.0))
    narrow = simulate("megatron", CLUSTER, [task("t", max_workers=20)], Trace.of("one", SECONDS, [LOST]), costs())
    assert narrow.accumulated_waf == pytest.approx(20 * (SECONDS - 5.0 - 100.0 - 403.0)), "the sixth node is one"


def test_unicron_loses_the_dead_workers_part_of_the_step():
    result = one("unicron", DIES)
    # Of 0.3 steps a sixth is repeated, in 0.6 s; the worker is ready 30.1 s after its death is known, at 1036.1; the
    # step in progress ends at 1041.0, and the join takes a second.
    done = WORKERS * 1003.0 + 20 * (1041.0 - 1008.6) + WORKERS * (SECONDS - 1042.0)
    assert result.accumulated_waf == pytest.approx(done, rel=1e-9)
    (incident,) = result.incidents
    assert incident.seconds == pytest.approx({"detection": 3.0, "transition": 2.6, "sub_healthy": 33.4})
    assert sum(incident.waf_seconds.values()) == pytest.approx(result.ideal - result.accumulated_waf)


def test_without_partial_reuse_the_whole_step_is_done_again():
    reused, again = one("unicron", DIES), one("unicron_no_partial_reuse", DIES)
    assert reused.tasks["t"].worker_micros["recomputing"] == 600_000 * 20
    assert again.tasks["t"].worker_micros["recomputing"] == 3_600_000 * 20


def test_unicron_renews_a_broken_connection_in_place():
    result = one("unicron", BROKEN)
    assert result.accumulated_waf == pytest.approx(WORKERS * (SECONDS - 3.0 - 1.0))


def test_unicron_loses_a_node_and_takes_it_back():
    result = one("unicron", LOST)
    # Detected at 1008, resumed at 1010; back at 2003, ready at 2033, the present step ends after that.
    run = SECONDS - 1003.0 - 7.0
    least = WORKERS * 1003.0 + 20 * run
    assert least < result.accumulated_waf < least + 4 * (SECONDS - 2033.0)
    assert result.tasks["t"].goodput > 0.9
    assert result.counts["epochs_fail"] == 1 and result.counts["epochs_join"] == 1


def test_out_of_band_a_failure_is_known_after_half_an_hour():
    (incident,) = one("unicron_no_inband", DIES).incidents
    assert incident.seconds["detection"] == 1800.0


def test_when_nobody_is_left_memory_or_disk_has_the_state():
    all_die = [TraceFault(at=1003.0, kind="lost_connection", node=node, repair=50.0) for node in range(6)]
    memory = one("unicron", *all_die, memory_checkpoint_interval=100.0)
    disk = one("unicron_no_memory_checkpoint", *all_die, memory_checkpoint_interval=100.0)
    assert memory.counts["checkpoints_loaded"] == disk.counts["checkpoints_loaded"] == 1
    assert memory.tasks["t"].worker_micros["recomputing"] == pytest.approx(3e6 * WORKERS, rel=0.3)
    assert disk.tasks["t"].worker_micros["recomputing"] == pytest.approx(403e6 * WORKERS, rel=0.3)


def test_unicron_moves_a_node_to_where_it_is_worth_more():
    kept = simulate("unicron_no_planner", CLUSTER, two_tasks(), Trace.of("one", SECONDS, [LOST]), costs())
    moved = simulate("unicron", CLUSTER, two_tasks(), Trace.of("one", SECONDS, [LOST]), costs())
    at = 1500.0
    assert _waf(kept, at) == 2.0 * 12 + 8, "the first task has lost a node"
    assert _waf(moved, at) == 2.0 * 16 + 4, "the second has given it one"
    assert _waf(moved, 4000.0) == 2.0 * 16 + 8


@pytest.mark.parametrize("policy", ["unicron", "oobleck", "bamboo", "torchft", "inprocess"])
def test_every_system_pays_the_same_for_another_layout(policy: str):
    """Of six nodes one is lost, which leads to another TP x PP, and back; the change alone takes seconds."""
    rows = [(16, 2, 2), (20, 1, 1), (24, 2, 2)]
    layouts = {
        x: ParallelConfiguration(tensor_parallel=t, pipeline_parallel=p, data_parallel=1, micro_batch_size=1)
        for x, t, p in rows
    }
    points = tuple(MeasuredPoint(num_workers=x, flops_per_second=x, configuration=layouts[x]) for x, _, _ in rows)
    laid = task("t", performance=MeasuredTable(points=points), min_workers=16)
    change = dict.fromkeys(CHANGES, 2.0) | {"relayout": 150.0, "start": 30.0, "restart": 100.0}
    trace = Trace.of("one", SECONDS, [LOST])
    result = simulate(policy, CLUSTER, [laid], trace, costs(change=change))
    assert result.counts["relayouts"] == 2
    (incident,) = result.incidents
    again = (
        result.tasks["t"].worker_micros.get("recomputing", 0) / 20e6
    )  # parts of steps, or all since the last checkpoint
    assert incident.seconds["detection"] == 5.0
    assert 150.0 <= incident.seconds["transition"] <= 150.0 + again + 1e-6
    free = simulate(policy, CLUSTER, [laid], trace, costs(change={**change, "relayout": 0.0}))
    assert free.counts["relayouts"] == 2 and free.accumulated_waf > result.accumulated_waf + 50 * 20


@pytest.mark.parametrize("policy", ["megatron", "varuna", "oobleck", "bamboo", "torchft", "inprocess"])
def test_the_loss_of_a_node_is_detected_after_its_time(policy: str):
    (incident,) = one(policy, LOST).incidents
    assert incident.seconds["detection"] == 5.0 and incident.seconds["transition"] > 0.0


def test_the_coordinators_own_rules_apply():
    """Workers of one node fail twice in a row, the second time in their first step."""
    again = TraceFault(at=1043.0, kind="exited_abnormally", node=2, worker=0)
    trace = Trace.of("twice", SECONDS, [DIES, again])
    paper = Limits(warm_standby=True, severity=SeverityLimits(strict=True, cordon_failures=2))
    kept, isolated = (
        simulate("unicron", CLUSTER, [task("t")], trace, costs(), limits)
        for limits in (Limits(warm_standby=True), paper)
    )
    assert "cordons" not in kept.counts and isolated.counts["cordons"] == 1
    assert _waf(kept, SECONDS - 1) == 24.0 and _waf(isolated, SECONDS - 1) == 20.0


def test_static_shares_stay_when_a_node_is_lost():
    tasks = [task("a", weight=2.0), task("b", weight=1.0)]
    trace = Trace.of("one", SECONDS, [LOST])
    equal = simulate("unicron_equal", CLUSTER, tasks, trace, costs())
    by_weight = simulate("unicron_by_weight", CLUSTER, tasks, trace, costs())
    planned = simulate("unicron", CLUSTER, tasks, trace, costs())
    assert _waf(equal, 500.0) == 2.0 * 12 + 12
    assert _waf(by_weight, 500.0) == 2.0 * 16 + 8
    assert _waf(planned, 500.0) == 2.0 * 24
    for result in (equal, by_weight):
        assert _waf(result, 1500.0) < _waf(result, 500.0) == _waf(result, 4000.0)
    assert _waf(equal, 1500.0) == 2.0 * 8 + 12, "the second task gives nothing to the first"


def test_static_shares_by_size_and_within_limits():
    tasks = [
        task("a", state_gigabytes=9.0, max_workers=16),
        task("b", state_gigabytes=3.0),
        task("c", state_gigabytes=1),
    ]
    shares = shares_of(tasks, "size")
    assert shares == {"a": 9.0, "b": 3.0, "c": 1.0}
    assert shares_of([*tasks, task("d")], "size") == dict.fromkeys("abcd", 240.0), "FLOPs of a step, if one is unknown"
    rivals = tuple(
        Competitor(name=name, terms=Terms(min_workers=1, max_workers=most), runs=True, before=left, left=left)
        for name, most, left in (("a", 4, 3), ("b", 6, 1), ("c", 6, 0))
    )
    assert static(Question(key="k", num_places=6, node_places=1, tasks=rivals), 6, shares).allocation == {
        "a": 4, "b": 1, "c": 1,
    }  # fmt: skip
    short = static(Question(key="k", num_places=5, node_places=1, tasks=rivals), 6, shares)
    assert short.allocation == {"a": 4, "b": 1, "c": 0}, "the place under repair was that of the last"


def test_a_task_below_its_minimum_waits_for_the_repair():
    """Longer than the hour after which a coordinator stops a task by default."""
    lost = TraceFault(at=1003.0, kind="lost_connection", node=2, repair=8_000.0)
    tasks = [task("a", min_workers=12, max_workers=12), task("b", min_workers=12)]
    result = simulate("unicron_equal", CLUSTER, tasks, Trace.of("one", 20_000.0, [lost]), costs())
    assert "tasks_stopped" not in result.counts
    assert _waf(result, 5_000.0) == 12.0 and _waf(result, 19_000.0) == 24.0


def test_what_comes_together_is_as_if_it_came_one_by_one(monkeypatch: pytest.MonkeyPatch):
    trace = random_trace(5, faults=8)
    together = simulate("unicron", CLUSTER, two_tasks(), trace, costs())
    monkeypatch.setattr(SimShell, "say", lambda shell, said: shell._clock.after(0.0, partial(shell.do, said)))
    alone = simulate("unicron", CLUSTER, two_tasks(), trace, costs())
    assert alone.accumulated_waf == pytest.approx(together.accumulated_waf, rel=1e-3)


def test_what_happens_at_one_moment_has_an_order():
    clock, seen = Clock(), []
    for rank, name in [(order.CONSEQUENCE, "first"), (order.ARRIVAL, "arrival"), (order.REPAIR, "repair")]:
        clock.at(5, partial(seen.append, name), rank)
    clock.at(5, partial(seen.append, "second"))
    clock.at(5, partial(seen.append, "fault"), order.FAULT)
    clock.at(5, partial(seen.append, "departure"), order.DEPARTURE)
    clock.run(5)
    assert not seen, "what is due at the end is not done"
    clock.run(6)
    assert seen == ["fault", "repair", "departure", "arrival", "first", "second"]


def _waf(result: SimulationResult, at: float) -> float:
    return float(result.values[result.times <= at][-1])
