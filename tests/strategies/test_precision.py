"""Training in each precision with a worker killed: the result is that of the run without a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from zoo.running import difference, train_killed, train_plainly

pytestmark = [pytest.mark.faults, pytest.mark.chaos, pytest.mark.timeout(600)]

EPOCHS, SCALE = 3, 1024.0


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true", "64-true"])
def test_one_kill(precision: str, tmp_path: Path) -> None:
    overflows = precision == "16-mixed"
    model = "precision:overflowing" if overflows else "precision:ordinary"
    case: dict[str, Any] = {
        "model": model,
        "passes": EPOCHS,
        "trainer": {"precision": precision, "gradient_clip_val": 0.5},
    }
    whole = train_plainly(tmp_path / "whole", case, "unicron", 2)
    found = train_killed(tmp_path / "killed", case, ("forward", 8, 1))
    theirs = train_plainly(tmp_path / "ddp", case, "ddp", 2)[0]
    assert len(found) == 2 and sum(each["replaces"] for each in found) == 1
    for each in found:
        assert difference(each, whole[0]) == 0.0 and each["scaler"] == whole[0]["scaler"]
    if overflows:  # a step of each epoch is skipped, and the scale halved, on all ranks
        assert [each["scaler"]["scale"] for each in (*whole, *found, theirs)] == [SCALE / 2**EPOCHS] * 5
    print(f"{precision}: {difference(found[0], theirs):.1e} from ddp")
