"""Nodes that do not reach each other while the coordinator reaches all: real processes, real network namespaces."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from system.cluster import Cluster
from system.judge import Reference, check_exact
from system.network import Network, why_not

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]


@contextmanager
def apart(folder: Path, *nodes: str) -> Iterator[tuple[Cluster, Network]]:
    """Agents on nodes of their own, and the coordinator at the switch between them."""
    options = ["cluster=network", "coordinator=embedded"]
    with Network(*nodes) as network, Cluster(folder, agents=len(nodes), coordinator=options, network=network) as made:
        yield made, network


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("nodes", "both"), [(("n0", "n1", "n2"), True), pytest.param(("n0", "n1"), False, marks=pytest.mark.chaos)]
)
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
        assert set(cluster.wait_exit(200).values()) == {0}
        # The node that is left out may still finish the step before it leaves; its peer, without it, cannot know.
        check_exact(tmp_path, reference, workers=len(nodes), left_out={pids[out]: left_out["at"]})
