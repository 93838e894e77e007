"""An operator's order divides a running model into another number of shards, although a worker dies meanwhile."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp.judge import SCRIPT, alone, differences, notes
from fsdp.train import SETTINGS as DEFAULTS
from system.cluster import Cluster

from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = {
    "steps": 6,
    "full": 4,
    "finish": True,
    "pace": 0.05,
}
DIES: dict[str, Any] = {"point": "collect", "replica": 0, "shard": 1}
"""A death while the workers write the checkpoint for the new layout: no other checkpoint is written."""
TOLERANCE = 1e-10


def test_two_replicas_of_two_shards_become_one_of_four(tmp_path: Path) -> None:
    with Cluster(tmp_path, script=SCRIPT, agents=5, nodes="2:4", schedule=[DIES], settings=SETTINGS) as cluster:
        cluster.wait_world(4, after=time.time())
        for words, reason in (
            (("--shards", "3"), "a replica of 3 workers; expected a divisor of the 4 declared"),
            (("--tp", "4", "--pp", "1"), "tp=4, pp=1: the task has shards=2; expected shards"),
        ):
            with pytest.raises(AssertionError, match=reason):
                cluster.order("relayout", "task", *words)
        cluster.order("relayout", "task", "--shards", "4")
        cluster.watch((tmp_path / "struck-0").exists, "the death", 100)
        (changed,) = cluster.watch(lambda: cluster.events("layout_changes"), "the order's end", 200, 100)
        cluster.wait_world(4, after=changed["at"])
        (tmp_path / "finish").touch()
        cluster.wait_end(200)
        events = cluster.events()
    assert changed["before"] == {"shards": 2} and changed["shards"] == 4
    [restart] = [event for event in events if event["name"] == "task_restarts"]
    assert restart["path"] == str(tmp_path / "checkpoints" / f"relayout-step={changed['step']}.ckpt")
    steps = notes(tmp_path, "step")
    done = {size: {note["step"] for note in steps if note["replicas"] == size} for size in (1, 2)}
    assert max(done[2]) == changed["step"], "the checkpoint is of the last step in the old layout"
    assert min(note["step"] for note in steps if note["shard"] == 3) == changed["step"] + 1
    [last] = {note["step"] for note in notes(tmp_path, "end")}
    found = differences(tmp_path, alone(tmp_path / "alone", {**SETTINGS, "steps": last}))
    assert len(found) == 4 and max(found.values()) < TOLERANCE, found
    assert all(torch.load(path, weights_only=True)["step"] == last for path in tmp_path.glob("final-*.pt"))


@pytest.mark.chaos
def test_two_replicas_of_a_lane_become_one_of_two(tmp_path: Path) -> None:
    """With tensor parallelism an order changes the number of lanes of a replica."""
    settings = {**SETTINGS, "shards": 1, "slices": 2}
    with Cluster(tmp_path, script=SCRIPT, agents=5, nodes="2:4", schedule=[DIES], settings=settings) as cluster:
        cluster.wait_world(4, after=time.time())
        with pytest.raises(AssertionError, match="shards=1, tp=2: that is what the task has"):
            cluster.order("relayout", "task", "--shards", "1")
        cluster.order("relayout", "task", "--shards", "2")
        cluster.watch((tmp_path / "struck-0").exists, "the death", 100)
        (changed,) = cluster.watch(lambda: cluster.events("layout_changes"), "the order's end", 200, 100)
        cluster.wait_world(4, after=changed["at"])
        (tmp_path / "finish").touch()
        cluster.wait_end(200)
    assert changed["before"] == {"shards": 1, "tp": 2} and (changed["shards"], changed["tp"]) == (2, 2)
    [last] = {note["step"] for note in notes(tmp_path, "end")}
    found = differences(tmp_path, alone(tmp_path / "alone", {**settings, "steps": last}))
    assert len(found) == 4 and max(found.values()) < TOLERANCE, found


@pytest.mark.chaos
def test_a_job_gets_the_shards_that_it_names_for_its_slots(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({**DEFAULTS, **SETTINGS}))
    (tmp_path / "schedule.json").write_text("[]")
    environment = {"OMP_NUM_THREADS": "1"}
    with LocalCluster(nodes=4, environment=environment, folder=tmp_path) as cluster:
        command = [str(SCRIPT), str(tmp_path)]
        cluster.submit("task", command, min_nodes=2, max_nodes=4, layouts={2: [2], 4: [4]})
        watch = partial(cluster.until, seconds=200.0)
        watch("the order's end", lambda: any(note["shard"] == 3 for note in notes(tmp_path, "step")))
        (tmp_path / "finish").touch()
        cluster.wait_state("succeeded", task="task")
        [ordered], [changed] = (cluster.events(name) for name in ("layout_ordered", "layout_changes"))
    assert ordered["fields"] == {"shards": 4, "before": {"shards": 2}, "by": "plan"}
    steps = notes(tmp_path, "step")
    done = {size: {note["step"] for note in steps if note["replicas"] == size} for size in (1, 2)}
    assert max(done[2]) == changed["fields"]["step"], "the plan orders it after a step with all slots"
    assert min(note["step"] for note in steps if note["shard"] == 3) == changed["fields"]["step"] + 1
    [last] = {note["step"] for note in notes(tmp_path, "end")}
    found = differences(tmp_path, alone(tmp_path / "alone", {**SETTINGS, "steps": last}))
    assert len(found) == 4 and max(found.values()) < TOLERANCE, found


def test_the_report_of_the_checkpoint_is_lost_with_the_coordinator(tmp_path: Path) -> None:
    """It is sent into links that are cut, and repeated to the next coordinator, although only the links' silence shows
    seconds later that it was lost.
    """
    options = {"coordinator": (), "separable": True}
    with Cluster(tmp_path, script=SCRIPT, agents=4, nodes="2:4", settings=SETTINGS, **options) as cluster:
        cluster.wait_world(4, after=time.time())
        cluster.fetch(f"/v1/tasks/{cluster.task}/relayout", method="POST", shards="4")
        until("its folder", lambda: [*tmp_path.glob("checkpoints/*")], 60)  # all have the order, and write
        for node in cluster.agents:
            cluster.cut(node)
        until("the checkpoint", lambda: [*tmp_path.glob("checkpoints/relayout-step=*.ckpt")], 60)
        time.sleep(8.0)
        cluster.kill_coordinator()
        cluster.start_coordinator()
        for node in cluster.agents:
            cluster.heal(node)
        (changed,) = cluster.watch(lambda: cluster.events("layout_changes"), "the order's end", 100, 100)
        cluster.wait_world(4, after=changed["at"])
        (tmp_path / "finish").touch()
        cluster.wait_end(200)
    assert len(cluster.events("task_restarts")) == 1
