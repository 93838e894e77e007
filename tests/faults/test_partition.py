"""Nodes that do not reach each other while the coordinator reaches all: real processes, real network namespaces."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faults.cluster import Cluster, until
from faults.judge import Reference, check_exact
from faults.network import Network, why_not

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]


@contextmanager
def apart(folder: Path, *nodes: str) -> Iterator[tuple[Cluster, Network]]:
    """Agents on nodes of their own, and the coordinator at the switch between them."""
    cluster = Cluster(folder, agents=0)
    cluster.state_dir.mkdir()
    command = [sys.executable, "-m", "unicron_lightning.coordinator", "cluster=network", "coordinator=embedded"]
    where = [f"coordinator.port={cluster.port}", f"store.state_dir={cluster.state_dir}"]
    with Network(*nodes) as network, (cluster.state_dir / "coordinator.log").open("wb") as log:
        coordinator = subprocess.Popen([*network.at_switch(), *command, *where], stderr=log)
        try:
            with cluster:
                cluster.network = network
                until("the coordinator", cluster.coordinator)
                for node in nodes:
                    cluster.start(node)
                yield cluster, network
        finally:
            coordinator.terminate()
            coordinator.wait(20)


@pytest.fixture(autouse=True)
def _needs_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setenv("UNICRON_TOKEN", "beyond loopback there is no token by default")


@pytest.mark.parametrize(("nodes", "both"), [(("n0", "n1", "n2"), True), (("n0", "n1"), False)])
def test_training_continues_without_one_side_and_takes_it_back(
    nodes: tuple[str, ...], both: bool, tmp_path: Path, reference: Reference
) -> None:
    with apart(tmp_path, *nodes) as (cluster, network):
        pids = {line["node"]: line["pid"] for line in cluster.wait_world(len(nodes))}
        network.cut("n0", "n1", both=both)
        # Training continues during the cut, which is possible only without one of the two nodes.
        world = cluster.wait_world(len(nodes) - 1, after=time.time())
        (left_out,) = cluster.events("nodes_left_out")
        (out,) = left_out["nodes"]
        assert out in ("n0", "n1") and left_out["unreached"] == [["n0", "n1"]]
        assert {line["node"] for line in world} == set(nodes) - {out}
        assert all(line["pid"] == pids[line["node"]] for line in world), "the others are not restarted"
        assert not cluster.events("node_readmitted")
        network.heal("n0", "n1", both=both)
        back = cluster.wait_world(len(nodes), after=time.time())
        assert {line["node"] for line in back} == set(nodes)
        assert len(cluster.events("node_readmitted")) == 1
        assert not cluster.events("agent_lost")
        (cluster.folder / "finish_in_any_world").touch()
        cluster.watch(lambda: all(agent.poll() is not None for agent in cluster.agents.values()), "the end", 200)
        assert {agent.returncode for agent in cluster.agents.values()} == {0}
        check_exact(tmp_path, reference, workers=len(nodes))
