"""Faults as sentences on the simulator's clock."""

from __future__ import annotations

import pytest

from unicron_lightning.errors import ConfigError
from unicron_lightning.sections import read_section
from unicron_lightning.simulate.trace import SimCluster, TraceFault
from unicron_lightning.simulate.traces import DAY, TraceConfig, generate, replay

CLUSTER = SimCluster(num_nodes=4, workers_per_node=8)


def faults(*sentences: str, seed: int = 1) -> tuple[TraceFault, ...]:
    trace = read_section(TraceConfig, {"name": "x", "days": 10, "faults": list(sentences)}, "trace")
    return generate(trace, CLUSTER, seed).faults


def test_what_where_and_when() -> None:
    found = faults(
        "drop network node=3 after=90m for=4h",
        "raise ecc_error node=1 after=2d",
        "kill agent node=0",
        "hang node=2 after=1s times=3",
        "kill node=0 after=11d",  # after the end
        "drop network node=0 after=9d",  # without end
    )
    assert [(fault.at, fault.kind, fault.node, fault.repair) for fault in found] == [
        (0.0, "lost_connection", 0, 0.0),
        *[(1.0, "task_hang", 2, 0.0)] * 3,
        (5400.0, "lost_connection", 3, 14_400.0),
        (2 * DAY, "ecc_error", 1, 0.0),
        (9 * DAY, "lost_connection", 0, 10 * DAY),
    ]
    assert [fault.worker is None for fault in found] == [True, False, False, False, True, True, True]


def test_a_rate_ends_with_the_trace_and_is_repeated_by_its_seed() -> None:
    found = faults("kill rate=10/d")
    assert len(found) == pytest.approx(100, abs=40)
    assert {fault.node for fault in found} == set(range(4))
    assert {fault.worker for fault in found} == set(range(8))
    assert found == faults("kill rate=10/d") != faults("kill rate=10/d", seed=2)
    assert faults("kill rate=10/d seed=5") == faults("kill rate=10/d seed=5", seed=2)


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("kil node=1", "expected it to begin with"),
        ("kill coordinator", "the simulator knows kill, exit"),
        ("slow x2", "the simulator knows kill, exit"),
        ("kill rank=1", "no tasks, ranks and points"),
        ("kill step=3", "no tasks, ranks and points"),
        ("hang for=3s", "expected no for="),
        ("kill node=4", "expected a number from 0 to 3"),
        ("kill node=b", "expected a number from 0 to 3"),
    ],
)
def test_what_it_does_not_know_is_refused(sentence: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        list(replay([sentence], CLUSTER, DAY, 0))
    assert repr(sentence) in str(refusal.value)
    assert expected in str(refusal.value)
