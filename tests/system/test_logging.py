"""What is logged survives the rank that logs, and a worker that returns sees the metrics that the others see."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from system.cluster import Cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).parent / "logging_worker.py"


def test_no_row_is_lost_with_the_first_rank(tmp_path: Path) -> None:
    with Cluster(tmp_path, agents=2, nodes="1:2", script=SCRIPT) as cluster:
        cluster.wait_end(240)
    steps = {int((tmp_path / f"end-{rank}").read_text()) for rank in range(2)}
    assert len(steps) == 1 and (tmp_path / "killed-1").exists()
    assert [path.name for path in (tmp_path / "logs/lightning_logs").iterdir()] == ["version_0"]
    with (tmp_path / "logs/lightning_logs/version_0/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["loss_step"]] == list(range(steps.pop()))
    epochs = {int(row["epoch"]): float(row["loss_epoch"]) for row in rows if row["loss_epoch"]}
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert len(seen) > len(epochs)
    for each in seen:
        assert abs(each["loss"] - epochs[each["epoch"] - 1]) < 1e-6, each
