"""The kit's ranks run on the CPU over gloo: a change that breaks the kit is found without a GPU."""

from __future__ import annotations

import pytest
from gpu import kit


@pytest.mark.parametrize("case", ["sums", "killed", "absent", "deceived"])
def test_cases_run_on_the_cpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kit.REHEARSAL, "1")
    lost = 1 if case in ("killed", "deceived") else 0
    measured = kit.run(case, 3 if lost else 2, lost=lost)
    if case == "absent":
        assert measured[0]["finished"]
    elif case == "deceived":
        assert [rank["complete"] for rank in measured] == [False, False]
    else:
        assert [rank["total"] for rank in measured] == [3.0, 3.0]
