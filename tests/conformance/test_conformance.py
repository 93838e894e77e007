"""A few scenarios, and the parts of their comparison; ``make conformance`` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance.documented import MOST, MOST_PAIRED, MOST_TRIPLED, NAMED, PAIRED, TRIPLED
from conformance.running import differences, run
from conformance.table import scenarios
from conformance.worlds import run_worlds

SHORT = (
    "loops.fit[val_interval_float]",
    "loops.batch_norm_that_trains_in_validation[running]",
    "loops.batch_norm_that_trains_in_validation[of_batches]",
    "checkpoints.contents_of[fit]",
    "checkpoints.model_checkpoint[best_two_last]",
    "logged.in_training_step[both]",
    "logged.value_in_validation[float]",
    "logged.synced_in_hooks",
    "optimizing.configure_optimizers[plateau]",
    "optimizing.manual[toggled]",
    "data.transfer_hooks[fit]",
    "several.loaders_with_a_stream[cycle]",
    "several.evaluation_of_loaders_at_once[stream_cycle]",
    "callbacks.stochastic_weight_averaging[norms]",
    "runs.hooks[fit]",
    "failing.error_in_callback[on_train_batch_end]",
)
DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"


@pytest.mark.parametrize("name", SHORT)
def test_scenarios(name: str) -> None:
    scenario = scenarios()[name]
    found = list(differences(run(scenario, "unicron"), run(scenario, scenario.reference)))
    named = NAMED.get(name)
    assert [each for each in found if named is None or not named.explains(each[0])] == []
    assert bool(found) == (named is not None)


def test_named_scenarios_have_a_row() -> None:
    rows = DIFFERENCES.read_text()
    assert len(NAMED) <= MOST and len(PAIRED) <= MOST_PAIRED and len(TRIPLED) <= MOST_TRIPLED
    assert (NAMED | PAIRED | TRIPLED).keys() <= scenarios().keys()
    assert [
        each.row for table in (NAMED, PAIRED, TRIPLED) for each in table.values() if f"| {each.row}" not in rows
    ] == []


def test_the_number_of_scenarios_in_the_document() -> None:
    assert f"{len(scenarios())} scenarios" in DIFFERENCES.read_text()
    assert f"{len(NAMED)} of them differ" in DIFFERENCES.read_text()
    assert f"{len(PAIRED)} scenarios differ in two processes only" in DIFFERENCES.read_text()
    assert f"{len(TRIPLED)} more in three" in DIFFERENCES.read_text()


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 3])
def test_scenarios_in_several_processes(size: int, tmp_path: Path) -> None:
    names = [name for name in SHORT if name not in NAMED] + ["loops.returned[loss]"]
    mine, theirs = (run_worlds(strategy, names, tmp_path / strategy, size) for strategy in ("unicron", "ddp"))
    for name in names:
        for pair in zip(mine[name], theirs[name], strict=True):
            found = list(differences(*pair))
            named = PAIRED.get(name)
            assert [each for each in found if named is None or not named.explains(each[0])] == []
            assert bool(found) == (named is not None)


def test_what_differs() -> None:
    error = {"class": "ConfigError", "bases": ["ValueError", "Exception"], "message": "m"}
    theirs = {"a": [1.0, float("nan")], "error": {"class": "ValueError", "bases": ["Exception"], "message": "m"}}
    assert not list(differences({"a": [1.0 + 1e-9, float("nan")], "error": error}, theirs))
    found = differences({"a": [1, float("nan")], "error": {**error, "message": "n"}, "more": 2}, theirs)
    assert [place for place, *_ in found] == ["a.0", "error.message", "more"]
    assert [place for place, *_ in differences({"a": [1.0]}, {"a": [1.0, 2.0]})] == ["a"]
    assert list(differences({"error": error}, {"error": {**error, "class": "KeyError"}}))
    assert not list(differences({"a": "of 1.83207905 s"}, {"a": "of 1.83207941 s"}))
    assert len(list(differences(["1.25 a", "1.5 a"], ["1.25001 a", "1.5 b"]))) == 2
