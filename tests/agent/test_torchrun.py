"""The agent inside real torchrun processes, with a real coordinator."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from agent.torchrun import Cluster, kill, until, workers_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]


def listening_ports(pid: int) -> list[int]:
    return [c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_plain_script_gets_correct_ranks(tmp_path: Path) -> None:
    with Cluster(tmp_path, "plain_worker.py", "2", per_node=2) as cluster:
        cluster.start()
        cluster.start()
        cluster.wait_events(4, "steps")
        assert cluster.finish() == [0, 0]
        ranks = sorted((e["RANK"], e["GROUP_RANK"], e["LOCAL_RANK"]) for e in cluster.events("finished"))
        assert ranks == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
        assert {e["WORLD_SIZE"] for e in cluster.events("started")} == {4}


def test_plain_script_restarts_on_change(tmp_path: Path) -> None:
    with Cluster(tmp_path, "plain_worker.py", "1:2") as cluster:
        cluster.start()
        cluster.wait_events(1, "steps", WORLD_SIZE=1)
        cluster.start()
        cluster.wait_events(2, "steps", WORLD_SIZE=2)
        kill(cluster.events("steps", WORLD_SIZE=2, RANK=1)[0]["pid"])
        cluster.wait_events(4, "steps", WORLD_SIZE=2)
        assert cluster.finish() == [0, 0]
        assert len(cluster.events("finished")) == 2


def test_death_in_one_agent_leaves_the_other_alone(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1:2", per_node=2) as cluster:
        first, second = cluster.start(), cluster.start()
        cluster.wait_events(4, "go", world=4)
        founders = {e["pid"] for e in cluster.events("started")}
        spared = {w.pid for w in workers_of(cluster.agents[first].pid)}
        victim = workers_of(cluster.agents[second].pid)[0].pid
        at = time.time()
        kill(victim)
        survivors = cluster.wait_events(2, "epoch", kind="fail")
        assert {e["pid"] for e in survivors} == spared
        assert min(e["at"] for e in survivors) - at < 5, "not by its silence"
        joined = cluster.wait_events(4, "go", world=4, number=survivors[0]["number"] + 1)
        assert {e["pid"] for e in joined} & founders == spared
        assert sorted(e["rank"] for e in joined) == [0, 1, 2, 3]
        assert {e["rank"] for e in joined if e["pid"] in spared} == {0, 1}
        assert cluster.finish() == [0, 0]


def test_coordinator_is_restarted(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "2") as cluster:
        cluster.start()
        second = cluster.start()
        cluster.wait_events(2, "go", world=2)
        old = cluster.coordinator()
        assert old is not None
        old.kill()
        until("a new coordinator", lambda: (new := cluster.coordinator()) is not None and new.pid != old.pid)
        victim = workers_of(cluster.agents[second].pid)[0].pid
        kill(victim)
        cluster.wait_events(1, "epoch", kind="fail")
        cluster.wait_events(2, "go", number=cluster.events("epoch", kind="fail")[0]["number"] + 1)
        assert len(cluster.events("started")) == 3
        assert cluster.finish() == [0, 0]


@pytest.mark.allow_leak("unix_sockets", reason="a SIGKILLed agent cannot remove its socket; a later agent does")
def test_agents_death_takes_its_workers(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1:2", per_node=2) as cluster:
        cluster.start()
        second = cluster.start()
        cluster.wait_events(4, "go", world=4)
        doomed = [w.pid for w in workers_of(cluster.agents[second].pid)]
        at = time.time()
        cluster.agents[second].kill()
        until("the workers' end", lambda: all(gone(pid) for pid in doomed))
        survivors = cluster.wait_events(2, "epoch", kind="fail")
        assert min(e["at"] for e in survivors) - at < 5, "not by its silence"
        cluster.agents[second].wait()
        third = cluster.start()
        cluster.wait_events(4, "go", world=4, number=survivors[0]["number"] + 1)
        (tmp_path / "finish").touch()
        assert [cluster.agents[0].wait(60), cluster.agents[third].wait(60)] == [0, 0]


def test_clean_end_leaves_nothing(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "2") as cluster:
        cluster.start()
        cluster.start()
        cluster.wait_events(2, "go", world=2)
        coordinator = cluster.coordinator()
        assert coordinator is not None
        assert cluster.finish() == [0, 0]
        until("the coordinator's end", lambda: cluster.coordinator() is None)
        assert not list((Path(os.environ["TMPDIR"]) / f"unicron-{os.getuid()}").glob("agent-*"))


def test_sigterm_stops_everything(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1", per_node=2) as cluster:
        cluster.start()
        cluster.wait_events(2, "go", world=2)
        workers = [w.pid for w in workers_of(cluster.agents[0].pid)]
        cluster.agents[0].terminate()
        assert cluster.agents[0].wait(60) != 0
        assert all(gone(pid) for pid in workers)
        assert not list((Path(os.environ["TMPDIR"]) / f"unicron-{os.getuid()}").glob("agent-*"))


def test_sigterm_while_waiting_for_a_grant(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "2") as cluster:
        cluster.start()
        base = Path(os.environ["TMPDIR"]) / f"unicron-{os.getuid()}"
        until("the socket", lambda: list(base.glob("agent-*/socket")))
        cluster.agents[0].terminate()
        assert cluster.agents[0].wait(60) == 128 + signal.SIGTERM
        assert not list(base.glob("agent-*"))


def test_silent_worker_is_killed_and_started_anew(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "2", conf="worker_timeout=1.5") as cluster:
        cluster.start()
        second = cluster.start()
        cluster.wait_events(2, "go", world=2)
        victim = workers_of(cluster.agents[second].pid)[0].pid
        at = time.time()
        kill(victim, signal.SIGSTOP)
        (survivor,) = cluster.wait_events(1, "epoch", kind="fail")
        assert 1.0 < survivor["at"] - at < 8.0, "by its silence, which is 10 s by default"
        cluster.wait_events(2, "go", world=2, number=survivor["number"] + 1)
        assert gone(victim)
        assert cluster.finish() == [0, 0]


def one_error(cluster: Cluster, place: int, *words: str) -> None:
    """The agent ends with one error that contains all the words."""
    assert cluster.agents[place].wait(60) == 1
    log = cluster.log(place)
    errors = [line for line in log.splitlines() if "RendezvousFailed: " in line or "ConfigError: " in line]
    assert len(errors) == 1, log
    assert all(word in errors[0] for word in words), errors[0]


def test_wrong_token(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1") as cluster:
        cluster.start(UNICRON_TOKEN="right")
        cluster.wait_events(1, "go", world=1)
        cluster.conf = "connect_timeout=1"
        cluster.start(UNICRON_TOKEN="wrong")
        one_error(cluster, 1, "cannot prove that it knows the token (that of UNICRON_TOKEN)", "connect_timeout")
        cluster.agents[1] = cluster.agents[0]
        assert cluster.finish() == [0, 0]


def test_token_is_required_beyond_loopback(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1") as cluster:
        cluster.start(endpoint="192.0.2.1:29461", XDG_STATE_HOME=str(tmp_path / "none"))
        one_error(cluster, 0, "192.0.2.1", "UNICRON_TOKEN", str(tmp_path / "none" / "unicron" / "token"))


def test_unreachable_coordinator(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1", conf="connect_timeout=1,embedded=false") as cluster:
        cluster.start()
        one_error(cluster, 0, "no coordinator answered", f"127.0.0.1:{cluster.port}", "connect_timeout")


def test_differing_node_counts(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1:2") as cluster:
        cluster.start()
        cluster.wait_events(1, "go", world=1)
        cluster.start(nodes="2:3")
        one_error(cluster, 1, "2:3", "1:2")
        cluster.agents[1] = cluster.agents[0]
        assert cluster.finish() == [0, 0]
