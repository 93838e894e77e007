"""Several runs of one script: evaluations see the finished parameters on each worker, and a further fit begins with a
new optimizer, or continues from a checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from system.cluster import Cluster

pytest.importorskip("megatron.core.package_info")

SCRIPT = Path(__file__).parent / "runs.py"

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]


def run(folder: Path, workers: int = 4, **settings: Any) -> list[dict[str, Any]]:
    """Run the script; return the workers' results."""
    folder.mkdir()
    given = {"workers": workers, **settings}
    with Cluster(folder, agents=workers, nodes=f"{workers}:{workers}", script=SCRIPT, settings=given) as task:
        task.wait_end(200)
    return [json.loads(path.read_text()) for path in folder.glob("result-*.json")]


def states(folder: Path, name: str) -> list[dict[str, Any]]:
    """The parameters of both stages, as the first replica has kept them."""
    return [torch.load(folder / f"{name}-{shard}.pt") for shard in (0, 1)]


def check_equal(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def check_finals(folder: Path, number: int) -> None:
    """Each worker, also one without partners, has the parameters of its stage at the end of a fit."""
    for name in ("first", "second"):
        whole = states(folder, name)
        found = [torch.load(path) for path in folder.glob(f"[0-9]*-{name}.pt")]
        assert len(found) >= number
        for own in found:
            (stage,) = [state for state in whole if state.keys() == own.keys()]
            torch.testing.assert_close(own, stage, rtol=0, atol=0)


KILLS = ([2, 2, 1], [3, 1, 0], [4, 2, 2])
"""In the first fit, for good; in the test after it; in the second fit."""


@pytest.mark.parametrize(
    ("zero1", "kills"),
    [
        (True, KILLS[1:2]),
        pytest.param(True, KILLS, marks=pytest.mark.chaos),
        pytest.param(False, KILLS, marks=pytest.mark.chaos),
    ],
)
def test_kills_in_several_runs_change_nothing(zero1: bool, kills: Any, tmp_path: Path) -> None:
    expected = run(tmp_path / "whole", zero1=zero1)
    assert len(expected) == 4
    assert expected[0]["step"] == 10 and [each.get("samples") for each in expected[0]["found"]].count(22) == 2
    check_finals(tmp_path / "whole", 4)
    if kills == KILLS:  # the second fit is one that begins with the parameters of the first
        start = str(tmp_path / "whole" / "first")
        run(tmp_path / "fresh", zero1=zero1, start=start)
        check_equal(states(tmp_path / "fresh", "second"), states(tmp_path / "whole", "second"))
    for number, kill in enumerate(kills):
        folder = tmp_path / f"killed{number}"
        found = run(folder, zero1=zero1, kill=kill, stays=kill == KILLS[0])
        assert (folder / "killed").exists()
        wanted = [pytest.approx(values, rel=1e-6) for values in expected[0]["found"]]
        assert [each["found"] for each in found].count(wanted) >= 3, found
        assert all(own in ({}, right) for each in found for own, right in zip(each["found"], wanted, strict=True))
        check_equal(states(folder, "second"), states(tmp_path / "whole", "second"))
        check_finals(folder, 3)
