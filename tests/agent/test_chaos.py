"""Seeded random faults on real agents with workers that recover in process: each must be recovered from."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from agent.torchrun import Cluster

from unicron_lightning.local_cluster.processes import until

NODES = 3
FAULTS = ("kill", "kill", "kill", "two", "stop", "agent", "coordinator", "kill and coordinator")


class Chaos:
    def __init__(self, cluster: Cluster, seed: int, per_node: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.per_node = per_node
        self.live = [cluster.add_node() for _ in range(NODES)]
        self.wait_healed(0)

    def strike(self, node: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one of a node's workers, all of which run."""
        until("all workers", lambda: len(self.cluster.workers(node)) == self.per_node)
        self.cluster.kill_worker(node, self.random.randrange(self.per_node), number)

    def wait_healed(self, after: int) -> None:
        """Wait until all workers run in the newest epoch, one newer than ``after``."""
        world = NODES * self.per_node

        def healed() -> list[dict[str, Any]] | None:
            newest = max((event["number"] for event in self.cluster.notes("go")), default=0)
            there = self.cluster.notes("go", world=world, number=newest)
            return there if newest > after and len(there) == world else None

        until(f"a world of {world} after epoch {after}", healed)

    def fault(self) -> None:
        newest = max(event["number"] for event in self.cluster.notes("go"))
        kind = self.random.choice(FAULTS)
        print(f"{time.time():.3f} {kind}")
        if "coordinator" in kind and self.cluster.coordinator() is not None:
            self.cluster.kill_coordinator()
        if kind.startswith("kill"):
            self.strike(self.random.choice(self.live))
        elif kind == "two":
            for node in self.random.sample(self.live, 2):
                self.strike(node)
        elif kind == "stop":
            self.strike(self.random.choice(self.live), signal.SIGSTOP)
        elif kind == "agent":
            node = self.random.choice(self.live)
            self.cluster.kill_agent(node)
            self.live.remove(node)
            self.live.append(self.cluster.add_node())
        if kind != "coordinator":
            self.wait_healed(newest)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.allow_leak("unix_sockets", reason="the folder of an agent that was killed last is swept by the next agent")
@pytest.mark.parametrize("per_node", [1, 2])
def test_random_faults_heal(tmp_path: Path, per_node: int) -> None:
    with Cluster(tmp_path, "toy_worker.py", f"1:{NODES}", per_node, worker_timeout=2) as cluster:
        chaos = Chaos(cluster, seed=per_node, per_node=per_node)
        for _ in range(40):
            chaos.fault()
        (tmp_path / "finish").touch()
        assert [cluster.agents[node].wait(40) for node in chaos.live] == [0] * NODES
        until("the coordinator's end", lambda: cluster.coordinator() is None, 20)
