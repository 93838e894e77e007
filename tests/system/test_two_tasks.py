"""Two tasks share nodes: the plan moves nodes between them while both train exactly."""

from __future__ import annotations

import itertools
import signal
import time
from pathlib import Path

import pytest
from system.cluster import Cluster
from system.judge import Reference, check_exact

from unicron_lightning.local_cluster.processes import kill, lives

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]


def places(cluster: Cluster) -> dict[str, int]:
    """Number of places of each task by the newest plan."""
    return dict(cluster.events("plan_made")[-1]["allocation"])


def test_nodes_move_between_tasks_that_train(tmp_path: Path, reference: Reference) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        Cluster(tmp_path / "a", task="a", agents=4, nodes="2:4", conf="slot=0", settings={"full": 4}) as a,
        Cluster(tmp_path / "b", task="b", agents=4, nodes="1:4", conf="slot=0", settings={"full": 2}, beside=a) as b,
    ):
        for cluster in (a, b):
            cluster.wait_world(2)
        assert places(a) == {"a": 2, "b": 2}
        assert not {line["node"] for line in a.world()} & {line["node"] for line in b.world()}

        victim = a.world()[0]
        stays = {line["pid"] for line in a.world()} - {victim["pid"]}
        for cluster in (a, b):
            kill(cluster.agents[victim["node"]].pid)
        since = time.time()
        assert {line["pid"] for line in a.wait_world(2, after=since)} > stays, "it keeps its minimum"
        b.wait_world(1, after=since)
        assert places(a) == {"a": 2, "b": 1}

        for cluster in (a, b):
            cluster.replace(victim["node"])
        # The assignment depends on the order of registration, and on the measured speeds.
        a.watch(lambda: sum(places(a).values()) == 4, "a plan for the node that is back", 60)
        b.finish(whole=False)
        a.wait_world(4, after=time.time())
        assert places(a) == {"a": 4}

        _check_exclusive(a, b)
        for cluster in (a, b):
            assert not cluster.events("task_restarts"), "both went on in place"
        a.finish()
        check_exact(a.folder, reference, workers=4)
        check_exact(b.folder, reference, workers=len(b.world()))


def test_an_agent_that_was_stopped_cannot_use_a_place_that_is_anothers(tmp_path: Path) -> None:
    """The agent does not know that it was declared dead, and its workers live. A lock on its machine excludes other
    agents.
    """
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        Cluster(tmp_path / "a", task="a", agents=1, nodes="1:1", conf="slot=0") as a,
        Cluster(tmp_path / "b", task="b", agents=0, nodes="1:1", conf="slot=0", beside=a) as b,
    ):
        (held,) = a.wait_world(1)
        kill(a.coordinator() or 0)
        kill(a.agents["n0"].pid, signal.SIGSTOP)
        for path in a.state_dir.glob("coordinator.sqlite*"):
            path.unlink()
        b.start_node("n0")
        b.watch(lambda: "slot_in_use" in (b.folder / "agent-n0.log").read_text(), "the lock being met", 60)
        assert lives(held["pid"]) and not b.notes.all(), "b has been granted the slot, and waits all the same"
        kill(a.agents["n0"].pid)
        b.wait_world(1)
        assert not lives(held["pid"])
        kill(a.coordinator() or 0, signal.SIGTERM)


def _check_exclusive(*clusters: Cluster) -> None:
    """On each node the workers' lives, from the first to the last note of each, do not overlap."""
    spans: dict[str, list[tuple[float, float, int]]] = {}
    for cluster in clusters:
        lives_of: dict[tuple[str, int], list[float]] = {}
        for line in cluster.notes("computed"):
            lives_of.setdefault((line["node"], line["pid"]), []).append(line["at"])
        for (node, pid), moments in lives_of.items():
            spans.setdefault(node, []).append((min(moments), max(moments), pid))
    for node, found in spans.items():
        found.sort()
        for one, other in itertools.pairwise(found):
            assert one[1] < other[0], f"{node} was used by processes {one[2]} and {other[2]} at a time"
