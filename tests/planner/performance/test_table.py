from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lightning.planner.performance.model import (
    MeasuredPoint,
    MeasuredTable,
    ParallelConfiguration,
    PerformanceModel,
    points_from_csv,
    points_from_rows,
)

EIGHT = MeasuredPoint(num_workers=8, flops_per_second=1e15)
SIXTEEN = MeasuredPoint(num_workers=16, flops_per_second=1.8e15, relative_error=0.02)


def test_stair_promises_only_what_was_measured() -> None:
    table = MeasuredTable(points=(EIGHT, SIXTEEN))
    assert isinstance(table, PerformanceModel)
    assert [table.throughput(x) for x in (0, 7, 8, 12, 15, 16, 17, 1000)] == [0, 0, 1e15, 1e15, 1e15, *[1.8e15] * 3]
    assert [table.uncertainty(x) for x in (7, 8, 15, 16, 99)] == [0, 0, 0, 0.02, 0.02]


def test_linear_joins_the_points() -> None:
    table = MeasuredTable(points=(EIGHT, SIXTEEN), between="linear")
    assert table.throughput(12) == pytest.approx(1.4e15)
    assert table.throughput(7) == 0
    assert table.throughput(99) == 1.8e15
    assert table.uncertainty(12) == 0.02


def test_extending_is_asked_for_and_called_unknown() -> None:
    table = MeasuredTable(points=(EIGHT, SIXTEEN), beyond="extend")
    assert table.throughput(24) == pytest.approx(2.6e15)
    assert table.uncertainty(24) == math.inf
    assert table.uncertainty(16) == 0.02


def test_an_extended_fall_stops_at_zero() -> None:
    falling = MeasuredPoint(num_workers=16, flops_per_second=0.5e15)
    assert MeasuredTable(points=(EIGHT, falling), beyond="extend").throughput(100) == 0


def test_configuration_is_that_of_the_workers_in_use() -> None:
    layout = ParallelConfiguration(tensor_parallel=4, pipeline_parallel=2, data_parallel=1, micro_batch_size=1)
    point = MeasuredPoint(num_workers=8, flops_per_second=1e15, configuration=layout)
    stair = MeasuredTable(points=(point, SIXTEEN))
    assert [stair.configuration(x) for x in (7, 8, 15, 16)] == [None, layout, layout, None]
    assert MeasuredTable(points=(point, SIXTEEN), between="linear").configuration(12) is None


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(1, 500), st.floats(0, 1e18), min_size=1),
    st.sampled_from(["stair", "linear"]),
    st.integers(0, 600),
)
def test_never_outside_the_measured_range(throughputs, between, num_workers) -> None:
    table = MeasuredTable(
        points=points_from_rows([{"workers": x, "flops_per_second": value} for x, value in throughputs.items()]),
        between=between,
    )
    assert all(table.throughput(x) == value for x, value in throughputs.items())
    value = table.throughput(num_workers)
    assert 0 <= value <= max(throughputs.values()) * (1 + 1e-12)
    rising = sorted(throughputs.values()) == [throughputs[x] for x in sorted(throughputs)]
    assert not rising or value <= table.throughput(num_workers + 1) * (1 + 1e-12)


def test_csv_with_comments_units_and_layout() -> None:
    points = points_from_csv(
        "# measured on Tuesday\n"
        "workers, tflops_per_worker, tensor_parallel, pipeline_parallel, data_parallel, micro_batch_size\n"
        "\n"
        "16, 120, 8, 1, 2, 4\n"
        "8, 125, 8, 1, 1, 4\n"
    )
    table = MeasuredTable(points=points)
    assert table.throughput(8) == pytest.approx(1e15)
    assert table.throughput(16) == pytest.approx(1.92e15)
    layout = table.configuration(16)
    assert layout is not None and (layout.tensor_parallel, layout.data_parallel, layout.num_workers) == (8, 2, 16)


def test_step_times_become_flops_per_second() -> None:
    table = MeasuredTable(points=points_from_rows([{"workers": 4, "step_seconds": 2.0}], flops_per_step=6e15))
    assert table.throughput(4) == 3e15


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "expected at least one measured point"),
        ([{"flops_per_second": 1}], "table row 1: no 'workers'"),
        ([{"workers": 8, "flops_per_second": 1}, {"workers": 8, "flops_per_second": 2}], "table row 2: workers=8"),
        ([{"workers": 8, "flops_per_second": "fast"}], "flops_per_second='fast': expected a finite number"),
        ([{"workers": 8, "flops_per_second": float("nan")}], "expected a finite number"),
        ([{"workers": 8, "flops_per_second": -1}], "expected a finite number, 0 or more"),
        ([{"workers": 8, "flops_per_second": True}], "flops_per_second=True"),
        ([{"workers": 8.5, "flops_per_second": 1}], "workers=8.5: expected a whole number"),
        ([{"workers": 0, "flops_per_second": 1}], "workers=0: expected a whole number"),
        ([{"workers": 8}], "speed given by nothing"),
        ([{"workers": 8, "flops_per_second": 1, "step_seconds": 1}], "expected exactly one of"),
        ([{"workers": 8, "step_seconds": 1}], "without flops_per_step"),
        ([{"workers": 8, "flop_per_second": 1}], "column 'flop_per_second'"),
        ([{"workers": 8, "flops_per_second": 1, "tensor_parallel": 8}], "only tensor_parallel: expected all of"),
        (
            [
                {
                    "workers": 8,
                    "flops_per_second": 1,
                    "tensor_parallel": 8,
                    "pipeline_parallel": 2,
                    "data_parallel": 1,
                    "micro_batch_size": 1,
                }
            ],
            "configuration needs 16 workers",
        ),
    ],
)
def test_a_wrong_row_is_named(rows, message) -> None:
    with pytest.raises(ValueError, match=message):
        MeasuredTable(points=points_from_rows(rows))


def test_a_wrong_csv_is_named() -> None:
    with pytest.raises(ValueError, match="expected a column 'workers'"):
        points_from_csv("")
    with pytest.raises(ValueError, match="table row 1: 3 fields: expected at most 2"):
        points_from_csv("workers,flops_per_second\n8,1,2")


def test_a_wrong_table_is_refused() -> None:
    with pytest.raises(ValueError, match="num_workers 8 after 16"):
        MeasuredTable(points=(SIXTEEN, EIGHT))
    with pytest.raises(ValueError, match="at least two"):
        MeasuredTable(points=(EIGHT,), beyond="extend")
    with pytest.raises(ValueError, match="between='spline'"):
        MeasuredTable(points=(EIGHT,), between="spline")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_workers=-1"):
        MeasuredTable(points=(EIGHT,)).throughput(-1)
