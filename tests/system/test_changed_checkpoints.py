"""No worker survives, and the newest checkpoints were changed meanwhile: the next older one is loaded, or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from system.cluster import Cluster
from system.judge import Reference, check_exact

from unicron_lightning.checkpoints.files import digest_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]

DIES = {"world": 3, "step": 25, "faults": [f"kill rank={rank} step=25 micro_batch=0" for rank in range(3)]}
SETTINGS = {"pace": 0.05, "epochs": 5, "keep": -1}


def after_the_deaths(folder: Path, act: Callable[[dict[str, Any]], None], *, fails: bool) -> Cluster:
    """Run the task; act on each reported checkpoint once all workers are dead, before others have imported torch."""
    with Cluster(folder, schedule=[DIES], settings=SETTINGS) as cluster:
        cluster.watch(lambda: len(cluster.notes("fault")) == 3, "three deaths", 180)
        cluster.watch(lambda: cluster.events("task_restarts"), "the next life", 60)
        for saved in cluster.events("checkpoint_saved"):
            if digest_of(saved["path"]) == saved["digest"]:  # else it was replaced since
                act(saved)
        if fails:
            cluster.watch(lambda: all(a.poll() is not None for a in cluster.agents.values()), "the end", 120, 120)
        else:
            cluster.wait_end(linger=True)
    return cluster


def change(saved: dict[str, Any]) -> None:
    """Move a checkpoint with other parameters to the path, as whoever can write to the folder can."""
    checkpoint = torch.load(saved["path"], weights_only=True)
    checkpoint["state_dict"]["net.0.weight"].mul_(2)
    other = Path(f"{saved['path']}.other")
    torch.save(checkpoint, other)
    other.replace(saved["path"])


def test_a_changed_checkpoint_is_not_loaded_but_the_one_before(tmp_path: Path, reference: Reference) -> None:
    changed: list[str] = []

    def newest(saved: dict[str, Any]) -> None:
        if saved["step"] == 20:
            changed.append(saved["path"])
            change(saved)

    cluster = after_the_deaths(tmp_path, newest, fails=False)
    assert len(changed) == 2, "the epoch's and last.ckpt"
    rejected = cluster.events("worker.checkpoint_rejected")
    assert {event["path"] for event in rejected} == set(changed)
    assert all(event["found"] == digest_of(event["path"]) != event["expected"] for event in rejected)
    assert min(line["step"] for line in cluster.notes("step", life=2)) == 10
    check_exact(tmp_path, reference, workers=3)


@pytest.mark.chaos
def test_if_all_are_changed_the_task_ends_with_one_error(tmp_path: Path) -> None:
    known: list[dict[str, Any]] = []

    def each(saved: dict[str, Any]) -> None:
        known.append(saved)
        change(saved)

    cluster = after_the_deaths(tmp_path, each, fails=True)
    assert len(known) == 3
    assert not cluster.notes("step", life=2), "never from the beginning"
    assert 0 not in {agent.returncode for agent in cluster.agents.values()}
    (stopped,) = cluster.events("task_stopped")
    (newest,) = [saved for saved in known if saved["path"].endswith("last.ckpt")]
    found = {saved["path"]: digest_of(saved["path"]) for saved in known}
    assert f"has {found[newest['path']]}, expected {newest['digest']} (and 2 older" in stopped["reason"]
    rejected = cluster.events("worker.checkpoint_rejected")
    assert {event["path"]: event["found"] for event in rejected} == found
    assert any("CheckpointsChanged" in (tmp_path / f"agent-n{place}.log").read_text() for place in range(3))
