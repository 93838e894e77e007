"""The remaining work of a validation after a death; test_faults covers the rest with real processes."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core.package_info")

from unicron_lightning.replica.evaluation import plan_evaluation
from unicron_lightning.worker.report_sum import ReportSum


def test_what_nobody_present_has_is_dealt_out_again() -> None:
    nothing = ReportSum.nothing(4)
    assert plan_evaluation(range(8), nothing, 0, 2) == [0, 2, 4, 6]
    assert plan_evaluation(range(8), nothing, 1, 2) == [1, 3, 5, 7]
    assert plan_evaluation(range(8), nothing, None, 2) == []
    told = ReportSum(world=3, begun=True, finished=frozenset({1, 3}))
    assert plan_evaluation(range(4, 8), told, 0, 1) == [4, 5, 6, 7]
    assert plan_evaluation(range(8), told, 0, 1) == [0, 2, 4, 5, 6, 7]
