"""UnicronCheckpoint under unicron_fsdp: each worker writes its shard while training continues."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp.judge import SCRIPT, alone, differences, notes
from fsdp.train import SETTINGS, Model
from system.cluster import Cluster
from system.test_beside import writer_of
from torch.distributed import checkpoint as dcp

from unicron_lightning.checkpoints.files import digest_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

TOLERANCE = 1e-10
RUN: dict[str, Any] = {"steps": 48, "full": 4, "pace": 0.2, "save_every": 6, "beside": True}


def without_first_shard(folder: Path) -> Path | None:
    """The path of a version of which only the other shard is written."""
    for version in folder.glob("step=*.ckpt.*.unfinished"):
        names = {path.name[:7] for path in version.glob("part-*")}
        if names == {"part-1-"}:
            return folder / f"{version.name.partition('.ckpt')[0]}.ckpt"
    return None


def check_read(folder: Path, path: Path, steps: int) -> None:
    """Plain torch, in one process, reads a checkpoint; its parameters are those of a run in one process."""
    expected = alone(folder / "saved", {**RUN, "pace": 0.0, "save_every": 0, "steps": steps})
    torch.set_default_dtype(torch.float64)
    try:
        model = Model(SETTINGS)
    finally:
        torch.set_default_dtype(torch.float32)
    state = {"state_dict": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["state_dict"])
    for own, parameter in zip(model.parameters(), expected["parameters"], strict=True):
        torch.testing.assert_close(own.detach(), parameter, rtol=0, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:.*to load in a single process")
@pytest.mark.chaos
def test_a_worker_dies_with_its_writer_and_others_resume_in_another_layout(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    with Cluster(first, script=SCRIPT, agents=4, nodes="2:4", settings=RUN) as cluster:
        cluster.watch(lambda: cluster.notes("step"), "the first step", 180)
        cluster.watch(lambda: any(e["step"] == 6 for e in cluster.events("checkpoint_saved")), "a checkpoint", 120)
        victim = next(note for note in cluster.notes("step") if (note["replica"], note["shard"]) == (0, 0))
        writer = writer_of(victim["pid"])
        os.kill(writer, signal.SIGSTOP)
        folder = first / "checkpoints"
        path: Path = cluster.watch(lambda: without_first_shard(folder), "the other shard's part", 120)
        for pid in (victim["pid"], writer):
            os.kill(pid, signal.SIGKILL)
        cluster.watch(path.exists, "the complete checkpoint", 60)
        cluster.wait_end(300)
        (saved,) = [event for event in cluster.events("checkpoint_saved") if event["path"] == str(path)]
        assert not cluster.events("worker.checkpoint_failed")
    assert saved["digest"] == digest_of(str(path))
    assert {part.name for part in path.glob("__*")} == {"__0_2.distcp", "__1_3.distcp"}, "of the other replica"
    check_read(first, path, saved["step"])
    [steps] = {note["step"] for note in notes(first, "end")}
    found = differences(first, alone(first / "alone", {**RUN, "pace": 0.0, "save_every": 0, "steps": steps}))
    assert len(found) == 4 and max(found.values()) < TOLERANCE, found
    resumed = {
        **RUN,
        "steps": steps,
        "shards": 1,
        "replicas": 4,
        "full": 1,
        "resume": str(path),
        "save_every": 0,
        "pace": 0.0,
    }
    with Cluster(second, script=SCRIPT, agents=1, nodes="1:4", settings=resumed) as cluster:
        cluster.wait_end(300)
    reference = torch.load(next(second.glob("final-*.pt")), weights_only=True)
    found = differences(first, reference)
    assert len(found) == 4 and max(found.values()) < TOLERANCE, found
