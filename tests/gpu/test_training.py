"""The strategy on a GPU: deaths at every place of a step, precisions, full memory, an error of the device.

Four agents with one worker each share the GPU. The reference is the same script in a world of one on the same GPU.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import kit
from system.cluster import SETTINGS, Cluster
from system.judge import Reference, check_exact
from system.test_worker_faults import check_schedule, groups

pytestmark = [pytest.mark.timeout(kit.limit())]

OVERHEAD = Path(__file__).parents[2] / "benchmarks" / "overhead.py"
WORKERS = 4
WHOLE = {"world": WORKERS}
KILLS = [
    {**group, **WHOLE}
    for group in groups(
        "kill rank=1 micro_batch=0",
        "kill rank=0 point=training_step micro_batch=1",  # the last backward, in which reductions start
        "kill rank=2 bucket=0",
        "kill rank=3 phase=reduced",
        "kill rank=0 phase=commit",
    )
]
DURING_RECOVERY = [
    {**group, **WHOLE}
    for group in groups(
        ["kill rank=1 micro_batch=0", "kill rank=0 phase=connect"],
        ["kill rank=2 micro_batch=0", "kill rank=-1 joiner=yes phase=join"],
    )
]
Record = Callable[[str, Any], None]
FREE_BYTES = 2 << 30
"""Of the device's memory that nobody holds in K9."""
CONTEXT_BYTES = 1 << 30
"""Of a worker: its context, its model, NCCL's buffers."""


def on_device(**different: Any) -> dict[str, Any]:
    """Settings of a run on the kit's device."""
    accelerator = "gpu" if kit.device() == "cuda" else "cpu"
    settled = {"nodes": WORKERS, "accumulation": 2, "full": WORKERS, "dtype": "float32", "accelerator": accelerator}
    return {**SETTINGS, **settled, **different}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[dict[str, Any]], Reference]]:
    """Give the failure-free run of settings, made once."""
    made: dict[str, Reference] = {}

    def reference(settings: dict[str, Any]) -> Reference:
        alone = {**settings, "fill": 0.0, "assert_at": None}
        key = repr(sorted(alone.items(), key=lambda item: item[0]))
        if key not in made:
            made[key] = Reference(tmp_path_factory.mktemp("reference"), alone, 12)
        return made[key]

    return reference


def heals(folder: Path, schedule: list[dict[str, Any]], settings: dict[str, Any], reference: Reference) -> Any:
    """Run a schedule to its end and compare; returns the differences, and times of the recoveries."""
    with Cluster(
        folder,
        agents=WORKERS,
        nodes=f"1:{WORKERS}",
        schedule=schedule,
        settings=settings,
        variables=lambda node: kit.environment(node),
    ) as cluster:
        cluster.finish(kit.limit() - 10)
        check_schedule(cluster, schedule)
        return {**check_exact(folder, reference, workers=WORKERS), **phases(cluster)}


def phases(cluster: Cluster) -> dict[str, float]:
    """Medians over the recoveries: until workers agree on an epoch and are connected, and seconds of the incidents."""
    entered = [event for event in cluster.events("worker.entered_epoch") if event["kind"] == "fail"]
    found = {name: statistics.median(event[name] for event in entered) for name in ("wait_ms", "connect_ms")}
    closed = [event["phases"] for event in cluster.events("incident_closed")]
    for name in ("detection", "transition"):
        found[f"{name}_seconds"] = statistics.median(each[name]["seconds"] for each in closed)
    return {name: round(value, 3) for name, value in found.items()}


def full() -> float:
    """Part of the memory that each worker holds, so that all of it is used but for some."""
    if kit.device() != "cuda":
        return 0.0
    total = torch.cuda.get_device_properties(0).total_memory
    return max(0.0, (total - FREE_BYTES) / WORKERS - CONTEXT_BYTES) / total


@pytest.mark.gpu("K7", worth=10, seconds=100)
@pytest.mark.parametrize("part", [slice(0, 3), slice(3, 5)], ids=["computation", "commit"])
def test_kills_in_a_step(part: slice, tmp_path: Path, references: Any, record_property: Record) -> None:
    settings = on_device()
    record_property("differences", heals(tmp_path, KILLS[part], settings, references(settings)))


@pytest.mark.gpu("K8", worth=7, seconds=90)
@pytest.mark.hardware
@pytest.mark.parametrize(
    "different",
    [
        pytest.param({"precision": "bf16-mixed", "fused": True}, id="bf16_fused"),
        pytest.param({"precision": "16-mixed"}, id="fp16_scaler"),
        pytest.param({"compile": True}, id="compiled"),
    ],
)
def test_kills_in_other_precisions(
    different: dict[str, Any], tmp_path: Path, references: Any, record_property: Record, request: pytest.FixtureRequest
) -> None:
    if "compile" in different:
        request.getfixturevalue("with_compiler")
    settings = on_device(**different)
    record_property("differences", heals(tmp_path, KILLS[:3:2], settings, references(settings)))


@pytest.mark.gpu("K9", worth=7, seconds=110)
@pytest.mark.parametrize("number", [0, 1], ids=["a_survivor", "a_joiner"])
def test_a_kill_during_a_recovery_with_full_memory(
    number: int, tmp_path: Path, references: Any, record_property: Record
) -> None:
    settings = on_device(fill=full())
    record_property("differences", heals(tmp_path, [DURING_RECOVERY[number]], settings, references(settings)))


@pytest.mark.gpu("K19", worth=6, seconds=120)
@pytest.mark.hardware
def test_a_kill_with_cuda_graphs_and_full_memory(
    tmp_path: Path, references: Any, record_property: Record, with_compiler: None
) -> None:
    """The compiled network is captured in CUDA graphs, whose memory belongs to them."""
    settings = on_device(compile="reduce-overhead", fill=0.9 * full())
    record_property("differences", heals(tmp_path, KILLS[:1], settings, references(settings)))


@pytest.mark.gpu("K17", worth=8, seconds=110)
@pytest.mark.hardware
def test_cost_beside_lightnings_ddp(tmp_path: Path, record_property: Record) -> None:
    """Two ranks of a GPT with 100 M parameters, bf16, in paired segments; the goal is a ratio of 0.99."""
    found = compared(tmp_path, ["unicron", "ddp"], record_property)
    assert found["ratio"] >= 0.97


@pytest.mark.gpu("K18", worth=6, seconds=120)
@pytest.mark.hardware
@pytest.mark.parametrize("jobs", [["memory", "unicron"], ["beside", "saved"]], ids=["memory", "folders"])
def test_cost_of_checkpoints(jobs: list[str], tmp_path: Path, record_property: Record) -> None:
    """The same model; the stall of a save is a part of the time, and of ModelCheckpoint's."""
    found = compared(tmp_path, jobs, record_property)
    assert found["stall_ratio"] is None or found["stall_ratio"] < 0.5


def compared(folder: Path, jobs: list[str], record_property: Record) -> dict[str, Any]:
    """Measure two jobs with 100 M parameters on the GPU; return the figures."""
    command = [sys.executable, str(OVERHEAD), "--accelerator", "gpu", "--sizes", "100M", "--buckets", "25"]
    command += ["--pairs", "4", "--steps", "10", "--jobs", *jobs, "--output", str(folder)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=140).stdout
    found: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    for name in ("ratio", "low", "high", "steps_per_s", "stall", "stall_ratio"):
        record_property(name, found[name])
    return found


@pytest.mark.gpu("K12", worth=4, seconds=100)
@pytest.mark.hardware
def test_an_assertion_of_the_device_ends_one_worker_and_is_named(
    tmp_path: Path, references: Any, record_property: Record
) -> None:
    settings = on_device(assert_at=[1, 12])
    reference = references(settings)
    with Cluster(
        tmp_path,
        agents=WORKERS,
        nodes=f"1:{WORKERS}",
        settings=settings,
        variables=lambda node: kit.environment(node),
    ) as cluster:
        cluster.watch(lambda: len(cluster.events("worker_died")) >= 1, "the worker's end", 100)
        cluster.finish(100)
        died = cluster.events("worker_died")
        record_property(
            "died", [{name: event[name] for name in event if name in ("kind", "cause", "error")} for event in died]
        )
        assert len(died) == 1
        texts = [json.dumps(event) for event in cluster.events()]
        assert any("device-side assert" in text or "cuda_error" in text for text in texts), "its cause is not known"
        record_property("differences", check_exact(tmp_path, reference, workers=WORKERS))
