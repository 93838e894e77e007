"""UnicronCheckpoint under unicron_megatron: each worker writes its part while training continues."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from system.cluster import Cluster
from system.healing import check
from system.megatron import MODEL, SCRIPT, ZERO1, notes, wait_replicas
from system.test_beside import writer_of
from torch.distributed import checkpoint as dcp

from unicron_lightning.checkpoints.files import digest_of

pytest.importorskip("megatron.core.package_info")

pytestmark = [pytest.mark.faults, pytest.mark.chaos, pytest.mark.timeout(600)]

MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    # parts of a shard without its ranges of the optimizer's state, then those ranges
    "zero1": ({"pp": 2, **ZERO1}, {"0", "2"}),
    "bfloat16": (
        {"tp": 2, "toy": {"sequence_parallel": True, "bf16": True}, "ddp": {"overlap_grad_reduce": True}},
        {"0"},
    ),
}


def without(folder: Path, parts: set[str]) -> Path | None:
    """The path of a version of which all other parts are written."""
    for version in folder.glob("step=*.ckpt.*.unfinished"):
        written = {path.name.split("-")[1] for path in version.glob("part-*")}
        if written == ({"1", "3", "4", "5"} if len(parts) > 1 else {"1"}):
            return folder / f"{version.name.partition('.ckpt')[0]}.ckpt"
    return None


def saved_at(cluster: Cluster, path: Path) -> list[dict[str, Any]]:
    return [event for event in cluster.events("checkpoint_saved") if event["path"] == str(path)]


def check_read(path: Path, plain: Path, step: int, model: dict[str, Any]) -> None:
    """Plain torch, in one process, reads the parameters of the failure-free run."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    whole = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in entries.items()
        if hasattr(each, "size")
    }
    dcp.load(whole, checkpoint_id=path)
    found = 0
    for stage in range(model["pp"]):
        for name, value in torch.load(plain / f"plain-{step}-{model['tp'] * stage}.pt").items():
            layer = re.match(r"(.*\.layers)\.(\d+)(\..*)", name)
            key = (f"{layer[1]}{layer[3]}" if layer else name).removeprefix("module.")  # of Float16Module
            if key not in whole:
                continue
            there = whole[key] if layer is None else whole[key][int(layer[2]) + stage * 4 // model["pp"]]
            rows = tuple(slice(0, size) for size in value.shape)  # of the first tensor-parallel rank
            assert torch.equal(there.double()[rows], value), name
            found += 1
    assert found >= 20


@pytest.mark.filterwarnings("ignore:.*to load in a single process")
@pytest.mark.parametrize("name", [*MODELS])
def test_a_worker_dies_with_its_writer_and_then_all_die(name: str, tmp_path: Path, worlds: Any) -> None:
    options, lost = MODELS[name]
    model, folder = {**MODEL, **options}, tmp_path / "first"
    folder.mkdir()
    settings = {**model, "steps": 6, "finish": True, "full": 4, "pace": 0.2, "save_every": 6, "beside": True}
    checkpoints = folder / "checkpoints"
    with Cluster(folder, script=SCRIPT, agents=4, nodes="2:4", settings=settings, leaves="agent-*/socket") as cluster:
        wait_replicas(cluster, 2)
        cluster.watch(lambda: cluster.events("checkpoint_saved"), "a checkpoint", 120)
        victim = next(note for note in cluster.world() if (note["replica"], note["shard"]) == (0, 0))
        writer = writer_of(victim["pid"])
        os.kill(writer, signal.SIGSTOP)
        path: Path = cluster.watch(lambda: without(checkpoints, lost), "the parts of the others", 120)
        for pid in (victim["pid"], writer):
            os.kill(pid, signal.SIGKILL)
        [saved] = cluster.watch(lambda: saved_at(cluster, path), "the complete checkpoint", 60)
        listed = cluster.fetch("/v1/tasks/task/checkpoints")
        assert [each["step"] for each in listed if each["tier"] == "disk" and str(path) in each["holders"]] == [
            saved["step"]
        ]
        died = max(note["at"] for note in cluster.notes("step"))
        wait_replicas(cluster, 2, after=died)
        for note in cluster.world():
            os.kill(note["pid"], signal.SIGKILL)
        died = max(note["at"] for note in cluster.notes("step"))
        wait_replicas(cluster, 2, after=died)
        (restored,) = (each for each in cluster.events("worker.state_restored") if each["tier"] == "disk")
        (restart,) = cluster.events("task_restarts")
        (folder / "finish").touch()
        cluster.wait_end(150, linger=True)
        newest = max(each["step"] for each in cluster.events("checkpoint_saved") if each["at"] < restart["at"])
        assert not cluster.events("worker.checkpoint_failed")
    assert saved["digest"] == digest_of(str(path))
    assert restored["step"] == restart["step"] == newest >= saved["step"]
    assert min(note["step"] for note in notes(folder, "step") if note["at"] > restored["at"]) == newest
    writers = {file.name.split("_")[2]: file.name for file in path.glob("__*") if file.name.split("_")[2] in lost}
    assert len(writers) == len(lost) and not any(
        file.endswith(f"_{victim['rank']}.distcp") for file in writers.values()
    )
    check(folder, model, worlds)
    plain = tmp_path / "plain"
    worlds.run("reference:run", 4, plain, settings=model, steps=[saved["step"]])
    check_read(path, plain, saved["step"], model)
    check_another_layout(tmp_path / "second", path, model, folder)


def check_another_layout(folder: Path, path: Path, model: dict[str, Any], first: Path) -> None:
    """A task with TP and PP exchanged resumes from the checkpoint; the norms are those of the first task."""
    folder.mkdir()
    step = int(path.stem.partition("=")[2])
    swapped = {"tp": model["pp"], "pp": model["tp"], "dp": 1, "accumulation": 4}
    toy = {**model["toy"], "sequence_parallel": False}  # it needs TP
    settings = {**model, **swapped, "toy": toy, "steps": step + 2, "resume": str(path)}
    with Cluster(folder, script=SCRIPT, agents=2, nodes="2:2", settings=settings) as cluster:
        cluster.wait_end(300)
    expected = {note["step"]: note["norm"] for note in notes(first, "step")}
    close = 2**-8 if "bf16" in model["toy"] else 1e-5  # a rounding of bfloat16, which another layout does elsewhere
    found = {note["step"]: note["norm"] for note in notes(folder, "step")}
    assert found == pytest.approx({number: expected[number] for number in (step, step + 1)}, rel=close)
