"""The kit's table: rows are replaced by test and sorted by item."""

from __future__ import annotations

import pytest
from gpu import kit, report

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
