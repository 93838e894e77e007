"""A local cluster does to its processes what it says, and leaves none behind."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from unicron_lightning import LocalCluster
from unicron_lightning.coordinator.storage import Store
from unicron_lightning.errors import ConfigError, CoordinatorUnavailable
from unicron_lightning.local_cluster.processes import MARK, kill, lives, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
TOY = Path(__file__).parents[1] / "agent" / "toy_worker.py"


def test_kill_stop_drain_add_and_end(tmp_path: Path) -> None:
    with LocalCluster([TOY, tmp_path], nodes=2, nnodes="1:3", workers_per_node=2, folder=tmp_path) as cluster:
        assert len(cluster.wait_workers(4)) == 4
        one, other = cluster.workers("node1").values()
        cluster.kill_worker("node1", 1)
        until("the end of its agent's workers", lambda: not lives(one) and not lives(other))

        def replaced() -> bool:
            """Whether the coordinator has the successors; for a moment it has still their predecessors, or none."""
            found = cluster.workers("node1")
            return set(found) == {0, 1} and {one, other}.isdisjoint(found.values())

        cluster.until("the successors", replaced)
        cluster.wait_workers(4)
        assert cluster.add_node() == "node2"
        cluster.wait_workers(6)
        cluster.drain("node0")
        assert set(cluster.wait_workers(4)) == {"node1", "node2"}
        cluster.undrain("node0")
        cluster.wait_workers(6)
        before = cluster.coordinator()
        cluster.kill_coordinator()
        cluster.until("the next coordinator", lambda: cluster.coordinator() not in (None, before))
        cluster.kill_node("node2")
        cluster.wait_workers(4)
        assert [event["fields"]["node"] for event in cluster.events("agent_lost")] == ["node2"]
        (tmp_path / "finish").touch()
        assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.log")} == {0o600}
        assert cluster.wait_exit() == {"node0": 0, "node1": 0, "node2": -signal.SIGKILL}
        assert "stop_ordered" in cluster.log("node0"), "drained"
    assert not cluster.processes.alive() and not cluster.temporary.exists() and tmp_path.exists()


TIED = """
import os, signal, subprocess, sys, time
from pathlib import Path
from unicron_lightning.parent_death import tie_to

folder = Path(sys.argv[1])
if sys.argv[2:]:
    signal.signal(signal.SIGTERM, lambda *about: (folder / "left").touch())
    tie_to(os.getppid())
    (folder / "ready").touch()
else:
    subprocess.Popen([sys.executable, __file__, folder, "below"])
time.sleep(60)
"""


def test_no_process_of_a_killed_node_leaves_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel sends SIGTERM to a daemon's torchruns when the daemon has died."""

    def late(pid: int, number: int = signal.SIGKILL) -> bool:
        time.sleep(0.3)
        return kill(pid, number)

    (tmp_path / "tied.py").write_text(TIED)
    cluster = LocalCluster(["train.py"])
    monkeypatch.setattr(cluster, "coordinator", lambda: None)
    monkeypatch.setattr("unicron_lightning.local_cluster.cluster.kill", late)
    cluster.agents["node0"] = subprocess.Popen([sys.executable, str(tmp_path / "tied.py"), str(tmp_path)])
    until("its process", (tmp_path / "ready").exists, 60)
    below = psutil.Process(cluster.agents["node0"].pid).children()
    cluster.kill_node("node0")
    until("their end", lambda: not any(lives(process.pid) for process in below), 20)
    assert len(below) == 1 and not (tmp_path / "left").exists()


def test_events_while_a_coordinator_makes_its_database(tmp_path: Path) -> None:
    with closing(LocalCluster([TOY], folder=tmp_path)) as cluster:
        assert cluster.events() == []
        cluster.state_dir.mkdir()
        (cluster.state_dir / "coordinator.sqlite").touch()
        assert cluster.events() == []
        with closing(Store(cluster.state_dir)):
            assert cluster.events("recovered") == []


@pytest.mark.chaos
def test_a_cut_is_silent_and_a_separate_coordinator_comes_back(tmp_path: Path) -> None:
    limits = ["detection.beat=0.1", "detection.least_silence=1", "detection.most_silence=2"]
    with LocalCluster([TOY, tmp_path], nodes=2, coordinator=limits, separable=True, folder=tmp_path) as cluster:
        cluster.wait_workers(2)
        cluster.cut("node1")
        assert cluster.wait_workers(1) == ["node0"]
        cluster.heal("node1")
        cluster.wait_workers(2)
        cluster.kill_coordinator()
        assert cluster.coordinator() is None and cluster.task_status() == {}
        cluster.start_coordinator()
        cluster.wait_state("running")
        assert cluster.unicron("resize", "task", "1").returncode == 0
        cluster.wait_workers(1)


@pytest.mark.chaos
def test_agents_leave_a_separate_coordinator_alone(tmp_path: Path) -> None:
    with LocalCluster([TOY, tmp_path], nodes=2, coordinator=[], folder=tmp_path) as cluster:
        cluster.wait_workers(2)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            cluster.kill_coordinator(number)
            time.sleep(3)
            with socket.socket() as probe:
                listens = probe.connect_ex(("127.0.0.1", cluster.port)) == 0
            assert listens == (number == signal.SIGSTOP), "an agent has started another coordinator, or ended this one"
        cluster.kill_agent("node1")
        cluster.start_node("node1")  # an agent that has never met the coordinator
        until("its wait", lambda: cluster.log("node1").count("coordinator_awaited") == 1)
        cluster.start_coordinator()
        cluster.wait_workers(2)
        cluster.wait_state("running")
        assert not (cluster.state_dir / "coordinator.log").exists(), "an agent has started a coordinator"


def test_everything_is_stopped_when_the_block_raises_and_its_folder_is_kept() -> None:
    cluster = LocalCluster(nodes=2, stop_seconds=3.0)

    def use() -> None:
        with cluster:
            assert len(cluster.processes.alive()) == 3
            cluster.kill_agent("node0", signal.SIGSTOP)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert not cluster.processes.alive() and not cluster.temporary.exists()
    assert (cluster.folder / "coordinator.log").exists()
    shutil.rmtree(cluster.folder)


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from unicron_lightning import LocalCluster
with LocalCluster(folder=Path({str(tmp_path)!r})) as cluster:
    print(cluster.processes.environment[{MARK!r}], flush=True)
    input()
"""
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        mark = process.stdout.readline().strip()
        process.kill()

    def left() -> list[str]:
        found = []
        for each in psutil.process_iter():
            try:
                if each.environ().get(MARK) == mark and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each.name())
            except psutil.Error:
                continue
        return found

    assert mark
    until("the end of all processes", lambda: not left(), 30)


def test_errors_quote_what_was_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"LocalCluster\('train.py'\): expected a sequence"):
        LocalCluster("train.py")
    with pytest.raises(ConfigError, match="separable=True: expected coordinator="):
        LocalCluster([TOY], separable=True)
    started = time.monotonic()
    with pytest.raises(
        CoordinatorUnavailable, match=r"exited with status 1: coordinator: detection.beat='often': expected a number"
    ):
        LocalCluster(coordinator=["detection.beat=often"], folder=tmp_path).start()
    assert time.monotonic() - started < 30
    with LocalCluster(nodes=["a"], folder=tmp_path) as cluster:
        with pytest.raises(ConfigError, match=r"start_node\('a'\): expected a node without a running agent"):
            cluster.start_node("a")
        with pytest.raises(ConfigError, match=r"kill_worker\('a', 3\): expected one of \[\]"):
            cluster.kill_worker("a", 3)
        with pytest.raises(ConfigError, match=r"a link of 'a' can't be cut: expected .*separable=True"):
            cluster.cut("a")
        with pytest.raises(TimeoutError, match=f"not within 0.1 s: step 3; logs are in {tmp_path}"):
            cluster.wait_step(3, 0.1)
