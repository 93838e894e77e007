"""The kit's ranks run on the CPU over gloo: a change that breaks the kit is found without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import kit, report

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forking")]

CASES = ["sums", "killed", "absent", "deceived", "ticking", "recovered"]
LOST = {"killed": 1, "deceived": 1, "ticking": 1}


@pytest.mark.parametrize("case", CASES)
def test_cases_run_on_the_cpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kit.REHEARSAL, "1")
    lost = LOST.get(case, 0)
    measured = kit.run(case, 3 if lost else 2, lost=lost, extra={"KIT_ABSENT": "1"})
    if case == "sums":
        assert [rank["totals"] for rank in measured] == [[3.0], [3.0]]
    elif case == "deceived":
        assert [rank["complete"] for rank in measured] == [False, False]
    elif case == "ticking":
        assert all(rank["freed"] for rank in measured)
    elif case == "recovered":
        assert [rank["reserved"] for rank in measured] == [0, 0]
    else:
        assert [rank["total"] for rank in measured] == [3.0, 3.0]
    if case == "absent":
        assert measured[0]["finished"]


def test_a_portion_ends_in_time_and_its_results_are_kept(tmp_path: Path) -> None:
    """Of three tests one has passed, and one took too long for the budget."""
    sums, document = "test_sums_of_all_elements", tmp_path / "gpu.md"
    earlier = {
        f"{sums}[{world}]": ("K1", f"{sums}[{world}]", result, seconds, "{}", "earlier")
        for world, result, seconds in ((2, "failed", "1.0"), (4, "failed", "9000.0"), (8, "passed", "1.0"))
    }
    document.write_text(report.merged(f"{report.BEGIN}\n{report.END}\n", earlier))
    environment = {
        **os.environ,
        kit.REHEARSAL: "1",
        "UNICRON_KIT_REPORT": str(document),
        "UNICRON_KIT_BUDGET": "250",
        "UNICRON_KIT_ITEMS": "K1",
        "UNICRON_TEST_FORKS": "0",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "gpu", "-rs"]
    command.append("tests/gpu/test_data_plane.py")
    run = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, stdout=subprocess.PIPE, text=True)
    rows = report.rows_of(document.read_text())
    assert rows[f"{sums}[2]"][2] == "passed (rehearsal)", run.stdout
    assert "it takes about 10800 s" in run.stdout and "it has passed" in run.stdout
    assert {world: rows[f"{sums}[{world}]"] for world in (4, 8)} == {
        world: earlier[f"{sums}[{world}]"] for world in (4, 8)
    }
