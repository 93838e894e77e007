"""The kit's table: rows are replaced by test and sorted by item."""

from __future__ import annotations

import pytest
from gpu import kit, report
from gpu.portions import Portion, cost_of, order_of

DOCUMENT = f"Before.\n\n{report.BEGIN}\n{report.END}\n\nAfter.\n"


def row(item: str, test: str, result: str) -> report.Row:
    return item, test, result, "1.0", "{}", "torch 2.11.0"


def test_rows_are_replaced_and_sorted() -> None:
    once = report.merged(DOCUMENT, {"test_b": row("K10", "test_b", "failed"), "test_a": row("K2", "test_a", "passed")})
    twice = report.merged(once, {"test_b": row("K10", "test_b", "passed")})
    lines = [line for line in twice.splitlines() if line.startswith("| K")]
    assert [line.split(" | ")[:3] for line in lines] == [["| K2", "test_a", "passed"], ["| K10", "test_b", "passed"]]
    assert twice.startswith("Before.\n")
    assert twice.endswith("\nAfter.\n")


def test_document_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="kit: begin"):
        report.merged("nothing", {})


def test_warnings_of_nccl_on_stdout_are_no_measurements() -> None:
    warning = "[2026-11-26 10:51:45] vm:1182:1254 [0] misc/socket.cc:72 NCCL WARN Connection closed by remote peer"
    assert kit.measured_in(f'{warning}\n{{"total": 3.0}}\n{warning}\n') == {"total": 3.0}
    assert kit.measured_in(warning) == {}


def test_what_is_worth_most_per_second_comes_first_and_what_has_passed_does_not_run() -> None:
    rows = {
        "passed": row("K1", "passed", "passed"),
        "failed": row("K2", "failed", "failed"),  # in 1.0 s
        "rehearsed": row("K3", "rehearsed", "passed (rehearsal)"),
    }
    portions = [
        Portion(test="passed", worth=9, seconds=1),
        Portion(test="new", worth=10, seconds=20),
        Portion(test="failed", worth=1, seconds=100),
        Portion(test="rehearsed", worth=3, seconds=10),
    ]
    assert order_of(portions, rows) == ["failed", "new", "rehearsed"]
    assert [cost_of(portion, rows) for portion in portions[1:]] == [20, pytest.approx(1.2), 10]
