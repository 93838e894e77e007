"""A Megatron task under faults from outside: a stopped worker, and deaths of an agent and of the coordinator."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from system.cluster import Cluster
from system.healing import check
from system.megatron import MODEL, SCRIPT, wait_replicas

from unicron_lightning.local_cluster.processes import kill, lives, until

pytest.importorskip("megatron.core.package_info")

pytestmark = [pytest.mark.faults, pytest.mark.chaos, pytest.mark.timeout(500)]

WORKERS = 4


def test_faults_from_outside_heal_bit_by_bit(tmp_path: Path, worlds: Any) -> None:
    model = {**MODEL, "pp": 2}
    settings = {**model, "steps": 6, "finish": True, "full": WORKERS, "slow": 0.05}
    with Cluster(
        tmp_path, script=SCRIPT, agents=WORKERS + 1, nodes=f"2:{WORKERS}", conf="worker_timeout=8", settings=settings
    ) as cluster:
        stopped = next(note for note in wait_replicas(cluster) if note["replica"] == 1 and note["shard"] == 0)
        kill(stopped["pid"], signal.SIGSTOP)
        until("the stopped worker's end", lambda: not lives(stopped["pid"]), 60)

        world = {note["pid"]: note for note in wait_replicas(cluster, after=stopped["at"])}
        agents = {worker.pid: node for node, agent in cluster.agents.items() for worker in children(agent.pid)}
        victim = next(pid for pid in agents if pid in world and world[pid]["shard"] == 1)
        kill(cluster.agents[agents[victim]].pid)
        until("the worker's end without its agent", lambda: not lives(victim), 60)
        cluster.replace(agents[victim])

        at = max(note["at"] for note in wait_replicas(cluster, after=world[victim]["at"]))
        coordinator = cluster.coordinator()
        assert coordinator is not None
        kill(coordinator)
        at = max(note["at"] for note in wait_replicas(cluster, after=at))
        until("another coordinator", lambda: cluster.coordinator() not in (None, coordinator), 60)
        wait_replicas(cluster, after=at)
        (tmp_path / "finish").touch()
        cluster.wait_end(150)
    check(tmp_path, model, worlds)


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children()
