"""Megatron models resume from the memory of the agents, bit by bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from system.cluster import Cluster
from system.healing import check
from system.megatron import EXPERTS, MODEL, SCRIPT, ZERO1, ZERO1_EXPERTS, wait_replicas

pytest.importorskip("megatron.core.package_info")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(500)]

EVERY = 3
AGAIN = pytest.mark.chaos  # one case of each test is run without -m chaos, to keep `make test` short
VIRTUAL: dict[str, Any] = {**EXPERTS, "pp": 2, "vpp": 2, "dp": 1, "toy": {**EXPERTS["toy"], "layers": 4}}
MODELS: dict[str, dict[str, Any]] = {
    "zero1": {"pp": 2, **ZERO1},
    "bfloat16": {"tp": 2, "toy": {"sequence_parallel": True, "bf16": True}, "ddp": {"overlap_grad_reduce": True}},
    "alone": {"pp": 2, "dp": 1},
    "zero1_alone": {"pp": 2, "dp": 1, **ZERO1},
    "experts": EXPERTS,
    "interleaved": {"pp": 2, "vpp": 2, **ZERO1},
    "parts": {"cp": 2, "toy": {"double": True}, **ZERO1},
    "expert_parts": {**EXPERTS, **ZERO1_EXPERTS, "cp": 2},
    "virtual_experts": {**VIRTUAL, **ZERO1_EXPERTS, "ep": 2},
    "virtual_parts": {"pp": 2, "vpp": 2, "dp": 1, "cp": 2, "toy": {"double": True}, **ZERO1},
    "scaled": {"pp": 2, **ZERO1, "toy": {"fp16": True}},
    "experts_alone": {**EXPERTS, "dp": 1},
    "sharded_experts": {**EXPERTS, **ZERO1_EXPERTS},
    "sharded_experts_alone": {**EXPERTS, **ZERO1_EXPERTS, "dp": 1},
}


def size_of(model: dict[str, Any]) -> int:
    """Workers of a replica."""
    return int(model["tp"] * model["pp"] * max(model.get("cp", 1), model.get("ep", 1)))


def begin(folder: Path, model: dict[str, Any]) -> Cluster:
    workers = size_of(model) * model["dp"]
    settings = {**model, "steps": 6, "finish": True, "full": workers, "pace": 0.15, "memory": [EVERY, 1]}
    return Cluster(folder, script=SCRIPT, agents=workers, nodes=f"2:{workers}", settings=settings, leaves="agent-*/*")


def end(cluster: Cluster, model: dict[str, Any], died: float, worlds: Any) -> dict[str, Any]:
    """Let the task go on and end; compare parameters and norms; return the event of the restoration."""
    wait_replicas(cluster, model["dp"], workers=size_of(model), after=died)
    (cluster.folder / "finish").touch()
    cluster.wait_end(150, linger=True)
    (restored,) = (each for each in cluster.events("worker.state_restored") if each["tier"] == "memory")
    (restart,) = cluster.events("task_restarts")
    assert restart["memory"] == restored["step"]
    notes = cluster.notes("step")
    last = max(note["step"] for note in notes if note["at"] < restored["at"]) + 1
    assert 0 <= last - restored["step"] <= EVERY
    assert min(note["step"] for note in notes if note["at"] > restored["at"]) == restored["step"]
    assert not cluster.events("worker.memory_checkpoint_failed")
    # Some may have begun before others, and then the sums over lanes and replicas had another order.
    check(cluster.folder, model, worlds, within=1e-10 if {"ep", "cp"} & model.keys() else 0.0)
    return dict(restored)


def after_step(cluster: Cluster, model: dict[str, Any], step: int) -> dict[str, int]:
    """Wait for a step, and a version in memory, of all workers; return the process of each node's worker."""
    whole = max(note["step"] for note in wait_replicas(cluster, model["dp"], workers=size_of(model)))
    cluster.watch(lambda: any(note["step"] >= step for note in cluster.notes("step")), f"step {step}", 200)
    cluster.watch(lambda: ((cluster.task_status().get("memory") or {}).get("step", 0)) > whole, "a version of all", 200)
    return {note["node"]: note["pid"] for note in cluster.world()}


@pytest.mark.parametrize(
    "name",
    [
        "zero1",
        *(
            pytest.param(name, marks=AGAIN)
            for name in (
                *("bfloat16", "experts", "sharded_experts", "interleaved", "parts"),
                *("expert_parts", "virtual_experts", "virtual_parts", "scaled"),
            )
        ),
    ],
)
def test_all_workers_die(name: str, tmp_path: Path, worlds: Any) -> None:
    model = {**MODEL, **MODELS[name]}
    with begin(tmp_path, model) as cluster:
        for pid in after_step(cluster, model, 8).values():
            os.kill(pid, signal.SIGKILL)
        died = max(note["at"] for note in cluster.notes("step"))
        restored = end(cluster, model, died, worlds)
    assert len(restored["holders"]) == 4
    assert all(len(nodes) == 2 for nodes in restored["holders"])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=AGAIN) for name in ("alone", "zero1_alone", "experts_alone", "sharded_experts_alone")],
)
@pytest.mark.parametrize("agent", [False, True], ids=["worker", "node"])
def test_the_only_replica_loses_a_worker(name: str, agent: bool, tmp_path: Path, worlds: Any) -> None:
    model = {**MODEL, **MODELS[name]}
    with begin(tmp_path, model) as cluster:
        worker = after_step(cluster, model, 8)["n1"]
        died = max(note["at"] for note in cluster.notes("step"))
        os.kill(cluster.agents["n1"].pid if agent else worker, signal.SIGKILL)
        if agent:
            cluster.replace("n1")
        restored = end(cluster, model, died, worlds)
    assert len(restored["holders"]) == 2
    assert all(nodes == ["n0"] if agent else len(nodes) == 2 for nodes in restored["holders"])
