"""Faults beyond a death: repeated outages, slow nodes, corrupted state, bugs that strike all, lemons, sizes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from experiment_cases import composed
from simulate.scenes import CLUSTER, costs, random_trace, task, two_tasks
from simulate.test_policies import check_accounts
from simulate.traces.test_table import written

from unicron_lightning.errors import ConfigError
from unicron_lightning.simulate.costs import read_calibration
from unicron_lightning.simulate.result import SimulationResult
from unicron_lightning.simulate.settings import POLICIES, simulate
from unicron_lightning.simulate.trace import SimCluster, Trace, TraceFault
from unicron_lightning.simulate.traces import (
    CauseConfig,
    CoordinatorFaults,
    SourceConfig,
    TraceConfig,
    generate,
    parse_table,
)

SECONDS = 20_000.0
LOST = TraceFault(at=1003.0, kind="lost_connection", node=2, repair=1000.0)
DIES = TraceFault(at=1003.0, kind="exited_abnormally", node=2, worker=0)
CRASH = {"crash": CauseConfig(kind="exited_abnormally", count=1)}


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def one(policy: str, *faults: TraceFault, outages: tuple[tuple[float, float], ...] = (), **changes: object):
    trace = Trace.of("one", SECONDS, faults, outages)
    result = simulate(policy, CLUSTER, [task("t")], trace, costs(**changes))
    check_accounts(result, CLUSTER)
    return result


def waf_at(result: SimulationResult, at: float) -> float:
    return float(result.values[result.times <= at][-1])


# ---- a node that is down


def test_a_second_outage_prolongs_the_first(policy: str) -> None:
    again = TraceFault(at=1500.0, kind="ecc_error", node=2, repair=4000.0)
    once, twice = one(policy, LOST), one(policy, LOST, again)
    assert twice.worker_micros["repairing"] == 4_497_000_000 * 4, "from the first fault to the end of the second"
    assert twice.counts["repairs_prolonged"] == 1 and twice.counts["faults"] == 1
    assert twice.accumulated_waf < once.accumulated_waf
    assert waf_at(twice, SECONDS - 1) == 24.0, "it is back in the end"


def test_a_second_outage_that_ends_before_the_first_changes_nothing(policy: str) -> None:
    shorter = TraceFault(at=1500.0, kind="ecc_error", node=2, repair=100.0)
    crash = TraceFault(at=1600.0, kind="exited_abnormally", node=2, worker=1)
    assert one(policy, LOST, shorter, crash).accumulated_waf == one(policy, LOST).accumulated_waf


def test_a_log_of_overlapping_outages_keeps_its_loss() -> None:
    rows = "".join(f"{100 * number},lost_connection,2,,{1000 if number < 99 else 5000}\n" for number in range(1, 100))
    faults = parse_table(f"at,kind,node,worker,repair\n{rows}", CLUSTER, "log")
    result = one("torchft", *faults)
    assert result.worker_micros["repairing"] == (9900 + 5000 - 100) * 1_000_000 * 4


# ---- slow nodes and links


@pytest.mark.parametrize("kind", ["node_degraded", "link_degraded"])
def test_a_slow_node_slows_its_task_for_as_long_as_it_lasts(policy: str, kind: str) -> None:
    slow = TraceFault(at=1000.0, kind=kind, node=2, repair=5000.0, slowdown=0.25)
    result = one(policy, slow)
    assert result.accumulated_waf == pytest.approx(24 * (SECONDS - 5000.0 + 5000.0 / 1.25))
    assert waf_at(result, 3000.0) == pytest.approx(24 / 1.25) and waf_at(result, 6001.0) == 24.0
    assert not result.incidents and result.lost["sub_healthy"] == pytest.approx(24 * 1000.0)


def test_the_slowest_node_counts_and_only_for_its_own_task(policy: str) -> None:
    slow = [
        TraceFault(at=1000.0, kind="node_degraded", node=0, repair=4000.0, slowdown=0.2),
        TraceFault(at=2000.0, kind="link_degraded", node=0, repair=1000.0, slowdown=1.0),
    ]
    result = simulate(policy, CLUSTER, two_tasks(), Trace.of("slow", SECONDS, slow), costs())
    check_accounts(result, CLUSTER)
    assert {name: each.goodput < 1.0 for name, each in result.tasks.items()} in (
        {"a": True, "b": False},
        {"a": False, "b": True},
    )
    whole = waf_at(result, 0.0)
    lost = {at: whole - waf_at(result, at) for at in (1500.0, 2500.0, 3500.0, 5500.0)}
    assert lost[2500.0] == pytest.approx(3 * lost[1500.0]) and lost[3500.0] == lost[1500.0] and lost[5500.0] == 0.0


def test_a_slow_task_of_fixed_length_ends_later(policy: str) -> None:
    slow = TraceFault(at=100.0, kind="node_degraded", node=1, repair=0.0, slowdown=0.5)
    trace = Trace.of("slow", 2000.0, [slow])
    result = simulate(policy, CLUSTER, [task("t", steps=100.0)], trace, costs())
    assert result.tasks["t"].present == pytest.approx(100.0 + 900.0 * 1.5), "100 steps of 10 s, 90 of them slow"


# ---- corrupted state


def test_a_nan_in_the_loss_rolls_back_to_the_checkpoint(policy: str) -> None:
    result = one(policy, TraceFault(at=1003.0, kind="nan_loss", node=2, worker=0))
    assert result.counts["rollbacks"] == 1
    # Checkpoints every 600 s: 403 s are repeated, after a restart of 100 s.
    assert result.accumulated_waf == pytest.approx(24 * (SECONDS - 100.0 - 403.0))


def test_silent_corruption_found_late_costs_all_since_the_last_sound_checkpoint(policy: str) -> None:
    result = one(policy, TraceFault(at=1003.0, kind="parameters_differ", node=2, worker=0, repair=6000.0))
    assert result.accumulated_waf == pytest.approx(24 * (SECONDS - 100.0 - 6403.0)), (
        "newer checkpoints are corrupted too"
    )
    (incident,) = result.incidents
    assert incident.kind == "parameters_differ" and incident.at == 7003.0


@pytest.mark.parametrize(
    ("kind", "steps", "found"),
    [
        ("parameters_differ", 30.0, 1303.0),
        ("parameters_differ", 5000.0, 7003.0),  # without the witness it is found earlier
        ("nan_loss", 30.0, 7003.0),
    ],
)
def test_a_witness_finds_corruption_after_some_steps(kind: str, steps: float, found: float) -> None:
    """A step takes 10 s; the newest sound checkpoint is at 600 s of training."""
    result = one("unicron", TraceFault(at=1003.0, kind=kind, node=2, repair=6000.0), extra={"witness_steps": steps})
    assert result.accumulated_waf == pytest.approx(24 * (SECONDS - 100.0 - (found - 600.0)))
    (incident,) = result.incidents
    assert incident.at == found


def test_a_corruption_found_after_a_rollback_is_no_corruption(policy: str) -> None:
    silent = TraceFault(at=1003.0, kind="parameters_differ", node=2, worker=0, repair=6000.0)
    nan = TraceFault(at=1100.0, kind="nan_loss", node=1, worker=0)
    assert one(policy, silent, nan).counts["rollbacks"] == 1


# ---- bugs that strike all workers


@pytest.mark.parametrize("system", ["megatron", "varuna", "torchft", "inprocess"])
def test_a_bug_stops_every_worker_of_the_task(system: str) -> None:
    bug = replace(DIES, kind="other_software_error", strikes="task")
    result = one(system, bug)
    assert result.counts["checkpoints_loaded"] == 1
    assert result.accumulated_waf == pytest.approx(24 * (SECONDS - 3.0 - 100.0 - 403.0))


def test_checkpoints_in_memory_outlive_a_bug() -> None:
    bug = replace(DIES, kind="other_software_error", strikes="task")
    memory = one("unicron", bug, memory_checkpoint_interval=100.0)
    disk = one("unicron_no_memory_checkpoint", bug, memory_checkpoint_interval=100.0)
    assert memory.counts["checkpoints_loaded"] == disk.counts["checkpoints_loaded"] == 1
    assert memory.tasks["t"].worker_micros["recomputing"] == pytest.approx(3e6 * 24)
    assert disk.tasks["t"].worker_micros["recomputing"] == pytest.approx(403e6 * 24)


# ---- repeated offenders


def test_a_few_offenders_have_most_failures_and_the_mean_stays() -> None:
    source = SourceConfig(component="node", mtbf_hours=100.0, causes=CRASH, offenders=0.1, offender_factor=20.0)
    big = SimCluster(num_nodes=100, workers_per_node=8)
    config = TraceConfig(name="lemons", days=100.0, sources={"nodes": source})
    per_node = Counter(fault.node for fault in generate(config, big, 0).faults)
    worst = sum(number for _, number in per_node.most_common(10))
    total = sum(per_node.values())
    assert total == pytest.approx(100 * 24 * 100 / 100.0, rel=0.06)
    assert worst / total == pytest.approx(200 / 290, abs=0.04)
    even = TraceConfig(name="even", days=100.0, sources={"nodes": replace(source, offenders=0.0)})
    assert len(generate(even, big, 0).faults) == total, "when they fail is drawn before who fails"


def test_offenders_of_other_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match="process=weibull: expected poisson or exact"):
        SourceConfig(component="node", mtbf_hours=9.0, causes=CRASH, process="weibull", offenders=0.1)


# ---- size


def test_a_larger_model_takes_longer_to_load_to_move_and_to_save() -> None:
    figure = {"value": 10.0, "origin": "guess", "source": "test"}
    plus = {**figure, "plus": ["load"]}
    system = {
        "detection": {"default": 3.0},
        "change": {"restart": plus, "join": {**figure, "plus": ["state"]}, "continue": 1.0},
        "checkpoint_interval": 600.0,
        "extra": {"checkpoint_blocking": 0.5},
    }
    given = read_calibration({"common": {"load": 60.0, "state": 5.0}, "megatron": system}).of("megatron")
    cluster = replace(CLUSTER, storage_gigabytes_per_second=2.0, peer_gigabytes_per_second=1.0)
    large = task("t", state_gigabytes=400.0, granularity=4)
    sized = given.sized(*cluster.transfer_seconds(large))
    assert given.takes("restart") == 70.0 and sized.takes("restart") == 10.0 + 200.0
    assert given.takes("join") == 15.0 and sized.takes("join") == 10.0 + 100.0
    assert sized.takes("continue") == 1.0 and sized.persistent_seconds == 100.0
    assert given.sized(*CLUSTER.transfer_seconds(large)) is given, "unless the bandwidth is known"
    result = simulate("megatron", cluster, [large], Trace.of("one", SECONDS, [DIES]), given)
    check_accounts(result, cluster)
    assert result.of_ideal == pytest.approx((SECONDS - 3.0 - 210.0 - 403.0) / SECONDS * (1 - 100 / 600))


def test_the_size_of_a_transformer_is_that_of_its_parameters() -> None:
    cluster, tasks, _ = composed(("cluster.storage_gigabytes_per_second=5",)).scene()
    sizes = {each.name: each.state_gigabytes for each in tasks}
    assert sizes["gpt-18b"] == pytest.approx(14 * 18.4, rel=0.02)
    load, state = cluster.transfer_seconds(tasks[-1])
    assert load == pytest.approx(14 * 18.4 / 5, rel=0.02) and state is None


# ---- the coordinator fails


def test_training_goes_on_without_the_coordinator() -> None:
    assert one("unicron", outages=((2000.0, 9000.0),)).accumulated_waf == 24 * SECONDS


def test_a_failure_without_the_coordinator_waits_for_it() -> None:
    there, gone = one("unicron", DIES), one("unicron", DIES, outages=((900.0, 2000.0),))
    # Without the coordinator no next epoch is started: 2000 instead of 1006.
    assert gone.incidents[0].seconds["detection"] == pytest.approx(2000.0 - 1003.0)
    assert there.accumulated_waf - gone.accumulated_waf == pytest.approx(24 * (2000.0 - 1006.0), rel=0.02)
    assert waf_at(gone, SECONDS - 1) == 24.0
    assert one("torchft", DIES, outages=((900.0, 2000.0),)).accumulated_waf == one("torchft", DIES).accumulated_waf


def test_a_coordinator_that_is_lost_for_good_leaves_tasks_that_fail_waiting() -> None:
    config = TraceConfig(name="c", days=100.0, coordinator=CoordinatorFaults(mtbf_hours=24.0, minutes=None))
    [(begin, end)] = generate(config, CLUSTER, 0).coordinator_outages
    assert 0 < begin < end == 100 * 86400
    gone = one("unicron", DIES, outages=((900.0, float(SECONDS)),))
    assert waf_at(gone, SECONDS - 1) == 0.0 and gone.accumulated_waf == pytest.approx(24 * 1003.0, rel=0.02)


def test_outages_of_the_coordinator_have_a_rate() -> None:
    config = TraceConfig(name="c", days=100.0, coordinator=CoordinatorFaults(mtbf_hours=24.0, minutes=30.0))
    outages = generate(config, CLUSTER, 0).coordinator_outages
    assert 70 < len(outages) < 130 and all(end - begin == pytest.approx(1800.0) for begin, end in outages)


# ---- together, and refusals


def test_whatever_fails_time_is_conserved_with_all_of_them(policy: str) -> None:
    kinds = [
        TraceFault(at=3000.0, kind="node_degraded", node=1, repair=9000.0, slowdown=0.3),
        TraceFault(at=5000.0, kind="parameters_differ", node=3, repair=7000.0),
        TraceFault(at=9000.0, kind="other_software_error", node=4, strikes="task"),
        TraceFault(at=12_000.0, kind="nan_loss", node=0),
        TraceFault(at=12_500.0, kind="link_degraded", node=5, slowdown=0.1),
    ]
    drawn = random_trace(3, seconds=SECONDS)
    trace = Trace.of("all", SECONDS, [*drawn.faults, *kinds], [(4000.0, 4300.0)])
    tasks = [*two_tasks(), task("d", weight=1.5, max_workers=4, steps=500.0)]
    result = simulate(policy, CLUSTER, tasks, trace, costs(memory_checkpoint_interval=60.0))
    check_accounts(result, CLUSTER)
    assert result.accumulated_waf > 0.1 * result.ideal


def test_a_table_keeps_what_a_fault_strikes_and_how_slow_it_is() -> None:
    faults = [
        TraceFault(at=1.0, kind="node_degraded", node=1, repair=9.0, slowdown=0.3),
        TraceFault(at=2.0, kind="other_software_error", node=4, strikes="task"),
    ]
    assert parse_table(written(faults), CLUSTER, "t") == faults
    (slow,) = parse_table("at,kind,node\n1,link_degraded,0\n", CLUSTER, "t")
    assert slow.slowdown == 0.1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kind": "node_degraded"}, "slowdown=0.0: expected a slowdown > 0"),
        ({"kind": "cuda_error", "slowdown": 0.1}, "and of no other kind"),
        ({"kind": "cuda_error", "strikes": "all"}, "strikes='all': expected one of one, task"),
        ({"kind": "lost_connection", "strikes": "task", "repair": 5.0}, "expected a kind that stops workers"),
        ({"kind": "nan_loss", "strikes": "task"}, "expected a kind that stops workers"),
    ],
)
def test_faults_that_contradict_themselves_are_refused(values: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TraceFault(at=1.0, node=0, **values)


def test_a_recovery_takes_longer_with_more_workers() -> None:
    plain, growing = one("unicron", DIES), one("unicron", DIES, extra={"doubling": 10.0})
    seconds = 10.0 * (math.log2(20 / 4) + math.log2(24 / 4))  # it continues without the node, which joins again
    assert growing.lost["transition"] - plain.lost["transition"] == pytest.approx(24 * seconds)
