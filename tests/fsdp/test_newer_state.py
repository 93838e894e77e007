"""A script with ``ckpt_path``: workers whose state comes from others, or from an earlier life, do not load it."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsdp.judge import SCRIPT, alone, between_replicas, differences, notes
from system.cluster import Cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

TOLERANCE = 1e-10
EVERY = 3
KINDS: dict[str, dict[str, Any]] = {
    "memory": {"memory": [EVERY, 1]},
    "file": {"save_every": EVERY},
    "beside": {"save_every": EVERY, "beside": True},
}


@pytest.mark.parametrize(
    "kind", ["memory", *(pytest.param(kind, marks=pytest.mark.chaos) for kind in ("file", "beside"))]
)
def test_an_older_checkpoint_replaces_no_newer_state(tmp_path: Path, kind: str) -> None:
    """One of two workers dies and joins again; then both die."""
    model = {"shards": 1, "replicas": 2, "full": 2, "groups": 2, "tied": False}
    alone(tmp_path / "old", {**model, "steps": 2, "save_every": 2, "reference": "unicron"})
    settings = {**model, "resume": str(tmp_path / "old" / "checkpoints" / "step=2.ckpt"), "finish": True, "pace": 0.1}
    schedule = [{"point": "backward", "replica": 1, "shard": 0, "from_step": 4}]
    run = tmp_path / "run"
    run.mkdir()
    options: dict[str, Any] = {"agents": 2, "nodes": "1:2", "schedule": schedule, "leaves": "agent-*/*"}
    with Cluster(run, script=SCRIPT, settings={**settings, **KINDS[kind]}, **options) as cluster:
        [died] = cluster.watch(lambda: cluster.notes("fault"), "the death", 200)
        joins = partial(cluster.events, "worker.state_restored")
        joined = cluster.watch(lambda: [each for each in joins() if each["at"] > died["at"]], "the join", 200)
        world = cluster.wait_world(2, after=joined[0]["at"])
        last = max(line["step"] for line in world)
        if kind == "memory":
            cluster.watch(lambda: cluster.world()[0]["step"] > last + 2 * EVERY, "a newer state", 100)
        else:
            saved = partial(cluster.events, "checkpoint_saved")
            cluster.watch(lambda: any(each["step"] >= last for each in saved()), "a newer state", 100)
        for line in world:
            os.kill(line["pid"], signal.SIGKILL)
        (run / "finish").touch()
        cluster.wait_end(300, linger=True)
        [restored] = (each for each in cluster.events("worker.state_restored") if each["tier"] != "peer")
        assert restored["tier"] == ("memory" if kind == "memory" else "disk")
    [steps] = {note["step"] for note in notes(run, "end")}
    found = differences(run, alone(tmp_path / "alone", {**model, "steps": steps}))
    assert len(found) == 2 and max(found.values()) < TOLERANCE, found
    assert not between_replicas(run)
    after = [note["step"] for note in notes(run, "step") if note["at"] > restored["at"]]
    assert min(after) == restored["step"] + 1
