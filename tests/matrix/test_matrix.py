"""A few cases of the matrix; all of them are run by ``python benchmarks/parity.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix.compare import differences, load
from matrix.features import AXES, EXCEPTIONS, cases
from matrix.running import run

SHORT = ("defaults", "trainer_val_every_3", "callback_top_k")
"""None with loader workers: Lightning's ddp forks them beside its threads, and one of them may hang."""
CASES = dict(cases())


def test_every_value_of_every_axis_is_met() -> None:
    for axis, values in AXES.items():
        assert {case[axis] for case in CASES.values()} == set(values)
    assert len(EXCEPTIONS) <= 10


def record(**changes: Any) -> dict[str, Any]:
    made = {"state": {"w": torch.ones(2)}, "hooks": [("on_fit_start",)], "logged": [(1, {"loss": 0.5})], "metrics": {}}
    return {**made, "batches": [(0, [1.0, 2.0])], "counters": (1, 1), "checkpoints": {}, **changes}


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("state", {"w": torch.ones(2) + 1e-3}),
        ("hooks", [("on_fit_start",), ("on_fit_end",)]),
        ("hooks", [("on_fit_start", "int")]),
        ("logged", [(1, {"loss": 0.501})]),
        ("logged", [(2, {"loss": 0.5})]),
        ("logged", []),
        ("metrics", {"val": 1.0}),
        ("batches", [(0, [1.0, 3.0])]),
        ("counters", (2, 1)),
        ("checkpoints", {"last.ckpt": 1}),
    ],
)
def test_differences_are_found(what: str, value: Any) -> None:
    case = CASES["defaults"]
    assert differences(case, [record()], [record()]) == {}
    assert differences(case, [record(**{what: value})], [record()]).keys() == {what}
    assert differences(case, [], [record()]).keys() == {"exit"}


@pytest.mark.timeout(600)
def test_a_few_cases_in_a_world_of_two(tmp_path: Path) -> None:
    for strategy in ("ddp", "unicron"):
        status = run(strategy, 2, SHORT, tmp_path / strategy, 240)
        assert status == 0, (tmp_path / strategy / "torchrun.log").read_text()[-4000:]
    found = {
        name: differences(CASES[name], load(tmp_path / "unicron", name), load(tmp_path / "ddp", name)) for name in SHORT
    }
    assert found == {name: {} for name in SHORT}
