"""The baseline's axes: operators who scale down by hand, and the range that they make of the headline."""

from __future__ import annotations

import baseline
import pytest
from experiment_cases import at_their_best, composed, moved
from simulate.scenes import CLUSTER, costs, task

from unicron_lightning.errors import ConfigError
from unicron_lightning.simulate.output import WafCurve
from unicron_lightning.simulate.result import SimulationResult
from unicron_lightning.simulate.settings import simulate
from unicron_lightning.simulate.trace import Trace, TraceFault

HOUR = 3600.0
SECONDS = 20 * HOUR
LOST = TraceFault(at=1000.0, kind="lost_connection", node=2, repair=10 * HOUR)


def megatron(hours: float | None, *faults: TraceFault, **changes: object) -> SimulationResult:
    extra = {} if hours is None else {"scale_down_hours": hours}
    given = costs(extra=extra, checkpoint_interval=1000.0, **changes)
    return simulate("megatron", CLUSTER, [task("t")], Trace.of("one", SECONDS, faults or (LOST,)), given)


def test_a_task_that_is_scaled_down_runs_on_five_nodes_until_the_sixth_is_back() -> None:
    result = megatron(2.0)
    # Detected in 5 s, then 2 h of waiting and a restart. When the node is back its workers start in 30 s, and a planned
    # restart loses nothing.
    small = 10 * HOUR - 5.0 - 2 * HOUR - 100.0 + 30.0
    large = SECONDS - 1000.0 - 10 * HOUR - 30.0 - 100.0
    assert result.accumulated_waf == pytest.approx(24 * 1000.0 + 20 * small + 24 * large)
    assert result.counts["checkpoints_loaded"] == 2, "as it begins to wait, and as it is restarted"


def test_the_sooner_operators_scale_down_the_more_is_done() -> None:
    done = [megatron(hours).accumulated_waf for hours in (None, 9.0, 2.0, 0.0)]
    assert done == sorted(done) and len(set(done)) == len(done)


def test_a_patient_operator_changes_nothing() -> None:
    assert megatron(1000.0).accumulated_waf == megatron(None).accumulated_waf


def test_below_its_minimum_a_task_waits_all_the_same() -> None:
    all_but_none = [TraceFault(at=1000.0, kind="lost_connection", node=node, repair=5 * HOUR) for node in range(6)]
    result = megatron(1.0, *all_but_none)
    assert result.accumulated_waf == pytest.approx(24 * (SECONDS - 5 * HOUR - 100.0), rel=1e-2)
    assert result.values[-1] == 24.0


def test_a_second_loss_of_a_scaled_down_task_waits_again() -> None:
    again = TraceFault(at=4 * HOUR, kind="lost_connection", node=3, repair=6 * HOUR)
    result = megatron(2.0, LOST, again)
    rates = {at: float(result.values[result.times <= at][-1]) for at in (3 * HOUR, 5 * HOUR, 7 * HOUR, 19 * HOUR)}
    assert rates == {3 * HOUR: 20.0, 5 * HOUR: 0.0, 7 * HOUR: 16.0, 19 * HOUR: 24.0}


def test_a_step_may_be_several_times_as_long() -> None:
    quiet = Trace(name="none", seconds=1000.0)
    assert simulate("oobleck", CLUSTER, [task("t")], quiet, costs(step_overhead=2.7)).of_ideal == pytest.approx(1 / 3.7)
    with pytest.raises(ConfigError, match=r"redundancy=1\.0: expected a part below 1"):
        costs(redundancy=1.0)


def test_times_measured_for_torchrun_are_among_the_best() -> None:
    best = dict(at_their_best(composed(()).costs))
    assert best["megatron.detection.default"] == 5.19
    assert best["megatron.change.restart"] == pytest.approx(9.41 - 5.19)
    assert best["megatron.extra.scale_down_hours"] == 1.0
    assert best["megatron.detection.task_hang"] == 600.0, "torchrun does not see a hang"


def test_all_moved_figures_exist() -> None:
    for case in baseline.baseline_cases(1):
        given = composed(()).costs
        for key, value in case.moves:
            given = moved(given, key, value)
        given.of(case.policy)


def test_the_range_is_that_of_all_points() -> None:
    curves = []
    for number, case in enumerate(baseline.baseline_cases(2)):
        waf = 0.9 if case.policy == "unicron" else 0.3 + 0.001 * number
        trace = case.overrides[0].removeprefix("trace=")
        row = {"policy": case.policy, "trace": trace, "variant": case.variant, "of_ideal": waf}
        curves.append(WafCurve(row=row, seconds=None, waf=None))  # type: ignore[arg-type]
    found = baseline.ratios(curves)
    assert len(found) == 3 * 2 * 4 * 3
    text = baseline.show_baseline(curves, None)  # type: ignore[arg-type]
    for trace in baseline.TRACES:
        here = [value for point, value in found.items() if point[0] == trace]
        assert f"- **Trace {trace}: {min(here):.2f} to {max(here):.2f} times**" in text
    assert text.count("\n| ") == 1 + 18
