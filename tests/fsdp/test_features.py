"""Everything that a shard has to keep, through deaths, a drain and a resize: as in one process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp.judge import alone, between_replicas, differences, notes
from system.cluster import Cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("features.py")
SETTINGS: dict[str, Any] = {
    "steps": 6,
    "full": 4,
    "validate": 3,
    "finish": True,
    "pace": 0.05,
    "tests": True,
    "reference": "unicron",
    "stream": {},
    "samples": 144,  # streams of 18 batches: a short step has another gradient in the reference, which is one device
    "options": {"blocks": ["Block"], "activation_checkpointing": ["Mlp"]},
}
TOLERANCE = 1e-9


def test_all_features_through_deaths_and_orders(tmp_path: Path) -> None:
    schedule = [
        {"point": "backward", "replica": 0, "shard": 0, "nth": 1},
        {"point": "validation", "replica": 1, "shard": 1},
    ]
    with Cluster(tmp_path, script=SCRIPT, agents=5, nodes="2:4", schedule=schedule, settings=SETTINGS) as cluster:
        cluster.watch((tmp_path / "struck-1").exists, "both deaths", 300, 120)
        node = str(cluster.wait_world(4, after=time.time())[0]["node"])
        cluster.order("drain", node)
        cluster.watch(lambda: node not in {note["node"] for note in cluster.world()}, "the drain", 120)
        assert node not in {note["node"] for note in cluster.wait_world(4, after=time.time())}
        with pytest.raises(AssertionError, match="a replica of the model takes 2 nodes"):
            cluster.order("resize", "task", "3")
        cluster.order("resize", "task", "2")
        cluster.wait_world(2, after=time.time())
        cluster.order("resize", "task", "all")
        cluster.wait_world(4, after=time.time())
        (tmp_path / "finish").touch()
        cluster.wait_end(300)
        assert not cluster.events("task_restarts")
    [step] = {note["step"] for note in notes(tmp_path, "end")}
    reference = alone(tmp_path / "alone", {**SETTINGS, "steps": step}, SCRIPT)
    found = differences(tmp_path, reference)
    assert len(found) == 4 and max(found.values()) < TOLERANCE, found
    assert not between_replicas(tmp_path)
    for path in tmp_path.glob("final-*.pt"):
        own = torch.load(path, weights_only=True)
        for one, other in zip(own["buffers"], reference["buffers"], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
        assert own["metrics"] == pytest.approx(reference["metrics"], abs=TOLERANCE)
    [tested] = notes(tmp_path / "alone", "tested")
    names = ("test_loss", "test_right")
    for note in notes(tmp_path, "tested"):
        assert [note[name] for name in names] == pytest.approx([tested[name] for name in names], abs=TOLERANCE)
