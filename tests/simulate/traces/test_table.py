"""CSV of custom events: written events are read back, and an invalid line gives one error that names it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lightning.coordinator.severity.record import SEVERITY
from unicron_lightning.errors import ConfigError
from unicron_lightning.simulate.trace import SLOWING, SimCluster, TraceFault
from unicron_lightning.simulate.traces import TraceConfig, generate, parse_table

CLUSTER = SimCluster(num_nodes=4, workers_per_node=2)


def written(faults: Iterable[TraceFault]) -> str:
    lines = ["at,kind,node,worker,repair,strikes,slowdown"]
    for fault in faults:
        worker = "" if fault.worker is None else fault.worker
        values = (
            repr(fault.at),
            fault.kind,
            fault.node,
            worker,
            repr(fault.repair),
            fault.strikes,
            repr(fault.slowdown),
        )
        lines.append(",".join(map(str, values)))
    return "\n".join(lines)


def fault_of(*, kind: str, slowdown: float, **values: Any) -> TraceFault:
    return TraceFault(kind=kind, slowdown=slowdown if kind in SLOWING else 0.0, **values)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.builds(
            fault_of,
            at=st.floats(0, 1e9),
            kind=st.sampled_from(sorted(SEVERITY)),
            node=st.integers(0, 3),
            worker=st.none() | st.integers(0, 1),
            repair=st.floats(0, 1e9),
            slowdown=st.floats(0.01, 5.0),
        )
    )
)
def test_what_was_written_is_read_back(faults: list[TraceFault]) -> None:
    assert parse_table(written(faults), CLUSTER, "x") == faults


def test_times_comments_and_order_of_columns() -> None:
    text = "# ours\n\nnode,at,kind,repair\n1,2026-03-02T00:00:00Z,ecc_error,60\n0,2026-03-01,lost_connection,\n"
    assert parse_table(text, CLUSTER, "x") == [
        TraceFault(at=86400.0, kind="ecc_error", node=1, repair=60.0),
        TraceFault(at=0.0, kind="lost_connection", node=0),
    ]
    late = parse_table("# start 2026-02-28\n" + text, CLUSTER, "x")
    assert [fault.at for fault in late] == [2 * 86400.0, 86400.0]


def test_a_trace_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(
        "at,kind,node,worker\n50,exited_abnormally,3,1\n10,ecc_error,2,\n90000,ecc_error,0,\n"
    )
    faults = generate(TraceConfig(name="own", days=1, csv="own.csv"), CLUSTER, 0, tmp_path).faults
    assert [(fault.at, fault.node, fault.worker) for fault in faults] == [(10.0, 2, None), (50.0, 3, 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"own.csv: no lines"),
        ("at,kind\n", r"line 1: header 'at,kind': expected at,kind,node,worker,repair"),
        ("at,kind,node,colour\n", r"line 1: header"),
        ("at,kind,node\n# x\n1,ecc_error\n", r"line 3: 2 values: expected 3"),
        ("at,kind,node\n1,ecc_error,4\n", r"line 2: node='4': expected a whole number from 0 to 3"),
        ("at,kind,node\n1,fire,0\n", r"line 2: kind='fire': expected one of"),
        ("at,kind,node,worker\n1,ecc_error,0,2\n", r"line 2: worker='2'"),
        ("at,kind,node,repair\n1,ecc_error,0,long\n", r"line 2: repair='long': expected seconds"),
        ("at,kind,node\nsoon,ecc_error,0\n", r"line 2: at='soon': expected seconds, or a time"),
        ("at,kind,node\n1,ecc_error,0\n2026-01-01,ecc_error,0\n", r"line 3: .*all in ISO 8601"),
        ("at,kind,node\n-1,ecc_error,0\n", r"line 2: at=-1.0: expected seconds, 0 or more"),
        ("at,kind,node\n# start 2027-01-01\n2026-01-01,ecc_error,0\n", r"expected a time after the start"),
    ],
)
def test_what_is_wrong_has_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_table(text, CLUSTER, "own.csv")
