"""Loops as jobs of a cluster: a fault by order, and a pause for another job, after which the loop resumes."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from loop import managed

from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]

STEPS = 120
SCRIPT = Path(managed.__file__)


def notes(folder: Path) -> list[dict[str, Any]]:
    """Return the notes of all workers so far."""
    lines = [line for path in folder.glob("notes-*") for line in path.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.mark.chaos  # to keep `make test` short; tests/system/test_pause.py pauses a Trainer
def test_a_loop_is_killed_and_paused_for_another_one(tmp_path: Path) -> None:
    with LocalCluster(nodes=2, folder=tmp_path / "cluster", environment={"OMP_NUM_THREADS": "1"}) as cluster:
        folders = {name: tmp_path / name for name in ("low", "high", "alone")}
        for folder in folders.values():
            folder.mkdir()

        def submit(name: str, steps: int, **fields: Any) -> None:
            cluster.submit(name, [SCRIPT, folders[name], str(steps), "0.1"], max_nodes=2, **fields)

        def trains_again() -> bool:
            lines = [each for each in notes(folders["low"]) if "step" in each]
            return bool(lines) and max(lines, key=lambda each: int(each["step"]))["world"] == 2

        submit("low", STEPS, may_pause=True, profile={1: 1e9, 2: 2e9})
        until("two workers", trains_again, 150)
        cluster.fetch("/v1/tasks/low/inject", method="POST", body={"fault": "kill rank=1 phase=commit"})
        until("the fault", lambda: cluster.events("worker_died"), 60)
        time.sleep(0.5)
        until("two workers again", trains_again, 150)
        submit("high", 5, min_nodes=2, weight=100.0, profile={2: 2e9})
        cluster.wait_state("succeeded", 150, "high")
        cluster.wait_state("succeeded", 150, "low")
        paused = cluster.events("task_paused")
        assert [event["task"] for event in paused] == ["low"]
        assert cluster.events("fault_injected")
    expected = managed.train(folders["alone"], STEPS, 0.0)
    ends = [torch.load(path) for path in folders["low"].glob("final-*.pt")]
    assert len(ends) == 2
    for each in ends:
        assert torch.allclose(each, expected, rtol=1e-12, atol=1e-12)
    lines = notes(folders["low"])
    assert {each["step"] for each in lines if "step" in each} == {*range(1, STEPS + 1)}
    computed = Counter((each["epoch"], number) for each in lines if "samples" in each for number in each["samples"])
    again = [place for place, number in computed.items() if number > 1]
    assert len(computed) == STEPS * 8 and len(again) <= 4, "those of the worker that was killed"
