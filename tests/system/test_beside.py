"""UnicronCheckpoint: versions are written beside the training, whatever dies meanwhile."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from system.cluster import Cluster, Note, Notes
from system.judge import Reference, check_exact
from torch.distributed import checkpoint as dcp

from unicron_lightning.checkpoints.files import digest_of, is_folder
from unicron_lightning.checkpoints.index import read_checkpoint
from unicron_lightning.fsdp.export import export_checkpoint

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]

SETTINGS = {"pace": 0.1, "epochs": 5, "keep": -1, "beside": True}
OPEN = {**SETTINGS, "epochs": -1}
"""The run ends in a complete world."""


def writer_of(pid: int) -> int:
    """The writer of a worker."""
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except (OSError, NotADirectoryError):
            continue
        if b"unicron_lightning.checkpoints.writer" in words and f"PPid:\t{pid}\n" in (folder / "status").read_text():
            return int(folder.name)
    raise AssertionError(f"{pid} has no writer")


def saved_at(cluster: Cluster, step: int) -> list[dict[str, Any]]:
    """Reported checkpoints of a step."""
    return [event for event in cluster.events("checkpoint_saved") if event["step"] == step]


def stop_a_writer_before_a_save(cluster: Cluster, rank: int) -> tuple[Note, int]:
    """Stop a rank's writer, and wait until the others have written their parts of step 30."""
    cluster.wait_world(3)
    cluster.watch(lambda: len(saved_at(cluster, 20)) == 2, "two checkpoints", 180)  # the writers have started long ago
    worker = next(line for line in cluster.world() if line["rank"] == rank)
    writer = writer_of(worker["pid"])
    os.kill(writer, signal.SIGSTOP)

    def begun() -> bool:
        folders = list((cluster.folder / "checkpoints").glob("*step=30*.unfinished"))
        return bool(folders) and len(list(folders[0].glob("part-*"))) == 2

    cluster.watch(begun, "the parts of the others", 60)
    assert not saved_at(cluster, 30)
    return worker, writer


def check_last(folder: Path) -> None:
    """Plain torch, in one process, reads the last checkpoint; it exports to safetensors."""
    path = folder / "checkpoints" / "last.ckpt"
    assert is_folder(path)
    ends = [numpy.load(each) for each in folder.glob("final-*.npz")]
    names = [name for name in ends[0] if name.startswith("net.")]
    state = {"state_dict": {name: torch.zeros_like(torch.from_numpy(ends[0][name])) for name in names}}
    dcp.load(state, checkpoint_id=path)
    for name in names:
        assert numpy.array_equal(state["state_dict"][name].numpy(), ends[0][name]), name
    export_checkpoint(path, folder / "last.safetensors")
    export_checkpoint(path, folder / "one.ckpt")
    content = torch.load(folder / "one.ckpt", weights_only=True)
    [steps] = {int(note["step"]) for note in Notes(folder)("end")}
    assert content["global_step"] == steps
    assert int(content["optimizer_states"][0]["state"][0]["step"]) == steps


@pytest.mark.filterwarnings("ignore:.*to load in a single process")
@pytest.mark.chaos
def test_three_write_and_two_resume(tmp_path: Path, reference: Reference) -> None:
    """All workers die, and one node with its agent."""
    with Cluster(tmp_path, settings={**SETTINGS, "full": 0}, leaves="agent-*/*") as cluster:
        cluster.wait_world(3)
        cluster.watch(lambda: len(saved_at(cluster, 20)) == 2, "the checkpoints of step 20", 180)
        world = cluster.world()
        cluster.agents.pop(world[2]["node"]).kill()  # its worker ends with it
        for line in world[:2]:
            os.kill(line["pid"], signal.SIGKILL)
        cluster.wait_end(linger=True)
    assert min(line["step"] for line in cluster.notes("step", life=2)) == 20
    assert max(line["world"] for line in cluster.notes("step", life=2)) == 2
    path = tmp_path / "checkpoints" / "epoch=1-step=20.ckpt"
    assert len(list(path.glob("__*.distcp"))) == 3, "each worker has written its part"
    assert digest_of(str(path)) == next(event["digest"] for event in saved_at(cluster, 20) if "epoch" in event["path"])
    assert not list((tmp_path / "checkpoints").glob("*.unfinished"))
    check_exact(tmp_path, reference, workers=2)
    check_last(tmp_path)


@pytest.mark.filterwarnings("ignore:.*to load in a single process")
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.chaos), 1])  # chaos: to keep `make test` short
def test_a_worker_dies_with_its_writer(tmp_path: Path, reference: Reference, rank: int) -> None:
    """Another holder writes its part."""
    with Cluster(tmp_path, settings=OPEN) as cluster:
        worker, writer = stop_a_writer_before_a_save(cluster, rank)
        os.kill(worker["pid"], signal.SIGKILL)
        os.kill(writer, signal.SIGKILL)
        cluster.watch(lambda: len(saved_at(cluster, 30)) == 2, "the checkpoints of step 30", 30)
        cluster.finish()
    path = tmp_path / "checkpoints" / "epoch=2-step=30.ckpt"
    assert (path / f"__{rank}_{(rank + 1) % 3}.distcp").exists()
    assert digest_of(str(path)) == next(event["digest"] for event in saved_at(cluster, 30) if "epoch" in event["path"])
    assert not cluster.events("worker.checkpoint_failed")
    check_exact(tmp_path, reference, workers=3)
    check_last(tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_of_the_only_node_dies(tmp_path: Path, reference: Reference, rank: int) -> None:
    """Its writer survives it. Its siblings die with it, so the version is complete, but not reported."""
    settings = {**OPEN, "devices": 3, "nodes": 1}
    with Cluster(tmp_path, agents=1, nodes="1:1", per_node=3, settings=settings) as cluster:
        worker, writer = stop_a_writer_before_a_save(cluster, rank)
        os.kill(worker["pid"], signal.SIGKILL)
        os.kill(writer, signal.SIGCONT)
        path = tmp_path / "checkpoints" / "epoch=2-step=30.ckpt"
        cluster.watch(path.exists, "the checkpoint of step 30", 60)
        cluster.finish()
    assert (path / f"__{rank}_{rank}.distcp").exists()
    assert read_checkpoint(path)["global_step"] == 30


@pytest.mark.chaos
def test_a_writer_dies(tmp_path: Path, reference: Reference) -> None:
    with Cluster(tmp_path, settings=SETTINGS) as cluster:
        worker, writer = stop_a_writer_before_a_save(cluster, 1)
        os.kill(writer, signal.SIGKILL)
        cluster.watch(lambda: len(saved_at(cluster, 30)) == 2, "the checkpoints of step 30", 30)
        assert writer_of(worker["pid"]) != writer
        cluster.wait_end(linger=True)
    assert len(cluster.notes("begin")) == 3, "no worker has died"
    assert (tmp_path / "checkpoints" / "epoch=2-step=30.ckpt" / "__1_1.distcp").exists()
    check_exact(tmp_path, reference, workers=3)


def failed(folder: Path, node: str, name: str) -> bool:
    """Whether the worker of a node has printed that the version of step 20 could not be written."""
    return bool(re.search(rf"checkpoint_failed path=\S+/{name} step=20", (folder / f"agent-{node}.log").read_text()))


def test_a_save_that_fails_fails_no_step(tmp_path: Path, reference: Reference) -> None:
    folder = tmp_path / "checkpoints"
    with Cluster(tmp_path, settings=SETTINGS) as cluster:
        cluster.wait_world(3)
        cluster.watch(lambda: len(saved_at(cluster, 10)) == 2, "the first checkpoints", 180)
        folder.rename(tmp_path / "away")
        folder.touch()  # no folder any more
        cluster.watch(lambda: cluster.events("worker.checkpoint_failed"), "the failure", 60)
        # One that begins a version in the restored folder waits long for those that have failed without a trace.
        cluster.watch(
            lambda: all(failed(tmp_path, node, "last.ckpt") for node in ("n0", "n1", "n2")), "all failures", 60
        )
        folder.unlink()
        (tmp_path / "away").rename(folder)
        cluster.watch(lambda: saved_at(cluster, 30), "the next checkpoint", 60)
        cluster.wait_end(linger=True)
    assert {event["step"] for event in cluster.events("worker.checkpoint_failed")} == {20}
    assert len(cluster.notes("begin")) == 3
    check_exact(tmp_path, reference, workers=3)
