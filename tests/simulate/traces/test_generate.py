"""Traces: nodes, kinds and repairs; the same seed gives the same bytes; the presets match their descriptions."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from unicron_lightning.errors import ConfigError
from unicron_lightning.sections import read_section
from unicron_lightning.simulate.trace import SimCluster, Trace, order
from unicron_lightning.simulate.traces import (
    DAY,
    CauseConfig,
    RepairConfig,
    SourceConfig,
    TraceConfig,
    generate,
    repair_seconds,
)

PAPER = SimCluster(num_nodes=16, workers_per_node=8)
LOST = {"lost": CauseConfig(kind="lost_connection", count=1)}
CRASH = {"crash": CauseConfig(kind="exited_abnormally", count=1)}
LONG = RepairConfig(distribution="fixed", hours=24)


def preset(name: str) -> TraceConfig:
    with initialize_config_module("unicron_lightning.conf.simulate", version_base="1.3"):
        data = OmegaConf.to_container(compose(config_name=f"trace/{name}").trace)
        return read_section(TraceConfig, data, "trace")


def trace(name: str, cluster: SimCluster, seed: int = 0) -> Trace:
    return generate(preset(name), cluster, seed)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    first, again, other = (repr(trace("a", PAPER, seed).faults) for seed in (3, 3, 4))
    assert first.encode() == again.encode()
    assert first != other


def test_a_source_more_does_not_change_the_others() -> None:
    one = TraceConfig(
        name="x", days=10, sources={"crash": SourceConfig(component="worker", mtbf_hours=500, causes=CRASH)}
    )
    lost = SourceConfig(component="node", mtbf_hours=300, causes=LOST)
    two = TraceConfig(name="x", days=10, sources={"lost": lost, **one.sources})
    crashes = [fault for fault in generate(two, PAPER, 0).faults if fault.kind == "exited_abnormally"]
    assert crashes == list(generate(one, PAPER, 0).faults)


def test_llama3_has_the_published_counts() -> None:
    faults = trace("llama3", SimCluster(num_nodes=2048, workers_per_node=8)).faults
    assert len(faults) == 419
    kinds = Counter(fault.kind for fault in faults)
    # GPU 148, system processor 17, thermal 6; HBM3 72, SRAM 19, silent corruption 6; bugs 54 and dependencies 2.
    assert (kinds["gpu_driver_error"], kinds["ecc_error"], kinds["other_software_error"]) == (171, 97, 56)
    assert (kinds["other_network_error"], kinds["nccl_timeout"], kinds["lost_connection"]) == (35, 7, 53)
    assert max(fault.at for fault in faults) < 54 * DAY


def test_figure_1_has_its_shares() -> None:
    faults = trace("figure1", PAPER).faults
    assert len(faults) == 45
    # Of 43.4: ECC 5.0, NVLink 4.5, DMA 2.1, driver 0.6; time-outs 10.1, network 4.0, links 3.9, refused 2.1, reset 1.0.
    shares = {"SEV1": 12.2, "SEV3": 21.1, "SEV2": 10.1}
    counts = Counter(fault.severity for fault in faults)
    for severity, share in shares.items():
        assert counts[severity] == pytest.approx(45 * share / 43.4, abs=1.5), severity
    assert all((fault.severity == "SEV1") == fault.takes_node for fault in faults)
    source = preset("figure1").sources["tasks"]
    assert len(source.causes) == 13 and sum(cause.count for cause in source.causes.values()) == pytest.approx(43.4)


def test_llama3_on_more_nodes_has_as_many_more() -> None:
    assert len(trace("llama3", SimCluster(num_nodes=12_500, workers_per_node=8)).faults) == round(
        419 * 100_000 / 16_384
    )


def test_a_and_b_are_what_they_say() -> None:
    a, b = preset("a"), preset("b")
    of_a = [generate(a, PAPER, seed).faults for seed in range(30)]
    of_b = [generate(b, PAPER, seed).faults for seed in range(30)]
    # 33.1 of processes, 12.1 of nodes less failures of nodes that are down for four days.
    assert statistics.fmean(map(len, of_a)) == pytest.approx(44, abs=3)
    repairs = [fault.repair / DAY for faults in of_a for fault in faults if fault.repair]
    assert 1 <= min(repairs) < 1.3
    assert 6.7 < max(repairs) <= 7
    # 20 times as many per day, less failures of nodes that are down, which amount to a half.
    processes = [sum(not fault.repair for fault in faults) for faults in of_b]
    assert 0.5 < statistics.fmean(processes) / (33.1 * 20 / 8) < 0.7
    assert (a.days, b.days) == (56, 7)
    assert b.sources == {name: replace(source, frequency=20) for name, source in a.sources.items()}


@pytest.mark.parametrize("name", ["a", "b", "b_quick", "spot", "ageing", "none"])
def test_every_preset_makes_a_trace(name: str) -> None:
    made = trace(name, PAPER, 1)
    assert made.name == name
    assert (len(made.faults) == 0) == (name == "none")


def test_a_switch_takes_its_nodes_along_at_once() -> None:
    switch = SourceConfig(component="switch", nodes_per_switch=6, mtbf_hours=100, causes=LOST, repair=LONG)
    faults = generate(TraceConfig(name="x", days=5, sources={"switch": switch}), PAPER, 1).faults
    groups: dict[float, list[int]] = {}
    for fault in faults:
        groups.setdefault(fault.at, []).append(fault.node)
    assert {tuple(nodes) for nodes in groups.values()} <= {tuple(range(6)), tuple(range(6, 12)), tuple(range(12, 16))}
    assert groups


def test_severity_1_costs_the_node_and_others_a_worker() -> None:
    causes = {**LOST, "crash": CauseConfig(kind="exited_abnormally", count=3)}
    source = SourceConfig(component="worker", mtbf_hours=50, causes=causes, repair=LONG)
    faults = generate(TraceConfig(name="x", days=10, sources={"x": source}), PAPER, 1).faults
    assert {(fault.worker is None, fault.repair) for fault in faults if fault.kind == "lost_connection"} == {
        (True, DAY)
    }
    crashes = [fault for fault in faults if fault.kind == "exited_abnormally"]
    assert {fault.worker for fault in crashes} == set(range(8))
    assert {fault.repair for fault in crashes} == {0.0}


@settings(max_examples=30, deadline=None)
@given(
    process=st.sampled_from(["poisson", "weibull", "bursts", "exact"]),
    mtbf=st.floats(5, 500),
    hours=st.floats(0.1, 100),
    counts=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_order_shares_and_nodes_that_are_down(
    process: str, mtbf: float, hours: float, counts: list[int], seed: int
) -> None:
    kinds = ("lost_connection", "ecc_error", "exited_abnormally", "nccl_timeout")
    causes = {kind: CauseConfig(kind=kind, count=count) for kind, count in zip(kinds, counts, strict=False)}
    repair = RepairConfig(distribution="fixed", hours=hours)
    source = SourceConfig(component="node", mtbf_hours=mtbf, process=process, causes=causes, repair=repair)
    config = TraceConfig(name="x", days=4, sources={"x": source})
    faults = generate(config, PAPER, seed).faults
    assert list(faults) == sorted(faults, key=order)
    assert faults == generate(config, PAPER, seed).faults
    until = dict.fromkeys(range(16), 0.0)
    for fault in faults:
        assert fault.at >= until[fault.node], "a node that is down does not fail"
        until[fault.node] = fault.at + fault.repair
    if process == "exact" and len(faults) == round(16 * 96 / mtbf):
        got = Counter(fault.kind for fault in faults)
        for kind, cause in causes.items():
            assert abs(got[kind] - len(faults) * cause.count / sum(counts)) < 1


def test_repairs_have_the_distribution() -> None:
    random = np.random.default_rng(0)
    lognormal = repair_seconds(RepairConfig(distribution="lognormal", median_hours=2, log_deviation=1), 4000, random)
    assert np.median(lognormal) / 3600 == pytest.approx(2, rel=0.08)
    assert np.std(np.log(lognormal)) == pytest.approx(1, rel=0.05)
    uniform = repair_seconds(RepairConfig(distribution="uniform", least_hours=1, most_hours=3), 4000, random)
    assert np.mean(uniform) / 3600 == pytest.approx(2, rel=0.02)
    assert not repair_seconds(RepairConfig(), 3, random).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dayz": 3}, r"trace.dayz=3: unknown key, expected one of name, days"),
        ({"days": 0}, r"days=0\.0: expected a number > 0"),
        ({"days": "long"}, r"trace.days='long'"),
        ({"sources": {"x": {"component": "node", "mtbf_hours": 0, "causes": {"c": {}}}}}, r"kind is missing"),
        ({"sources": {"x": {"component": "rack"}}}, r"trace.sources.x.component='rack'"),
        (
            {"sources": {"x": {"component": "node", "mtbf_hours": 9, "causes": {"c": {"kind": "fire", "count": 1}}}}},
            r"kind='fire': expected one of lost_connection, ",
        ),
    ],
)
def test_what_is_wrong_is_quoted(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_section(TraceConfig, {"name": "x", "days": 1, **change}, "trace")
