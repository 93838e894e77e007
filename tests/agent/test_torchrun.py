"""The agent inside real torchrun processes, with a real coordinator."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from agent.torchrun import Cluster, command_line, workers_of

from unicron_lightning import environ
from unicron_lightning.agent.workers.forked import PARENT
from unicron_lightning.checkpoints.files import leave_record, record_path
from unicron_lightning.local_cluster.processes import kill, lives, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]


def listening_ports(pid: int) -> list[int]:
    return [c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def prepared(cluster: Cluster, node: str) -> list[psutil.Process]:
    """Return the prepared processes of an agent."""
    children = psutil.Process(cluster.agents[node].pid).children()
    return [child for child in children if command_line(child)[2:3] == [str(PARENT)]]


def test_plain_script_gets_correct_ranks(tmp_path: Path) -> None:
    with Cluster(tmp_path, "plain_worker.py", "2", per_node=2) as cluster:
        cluster.add_node()
        cluster.add_node()
        cluster.wait_notes(4, "steps")
        assert cluster.finish() == [0, 0]
        ranks = sorted((e["RANK"], e["GROUP_RANK"], e["LOCAL_RANK"]) for e in cluster.notes("finished"))
        assert ranks == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
        assert {e["WORLD_SIZE"] for e in cluster.notes("started")} == {4}


def test_plain_script_restarts_on_change(tmp_path: Path) -> None:
    with Cluster(tmp_path, "plain_worker.py", "1:2") as cluster:
        cluster.add_node()
        cluster.wait_notes(1, "steps", WORLD_SIZE=1)
        cluster.add_node()
        cluster.wait_notes(2, "steps", WORLD_SIZE=2)
        kill(cluster.notes("steps", WORLD_SIZE=2, RANK=1)[0]["pid"])
        cluster.wait_notes(4, "steps", WORLD_SIZE=2)
        assert cluster.finish() == [0, 0]
        assert len(cluster.notes("finished")) == 2


def test_death_in_one_agent_leaves_the_other_alone(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1:2", per_node=2) as cluster:
        first, second = cluster.add_node(), cluster.add_node()
        cluster.wait_notes(4, "go", world=4)
        founders = {e["pid"] for e in cluster.notes("started")}
        spared = {w.pid for w in workers_of(cluster.agents[first].pid)}
        victim = workers_of(cluster.agents[second].pid)[0].pid
        at = time.time()
        kill(victim)
        survivors = cluster.wait_notes(2, "epoch", kind="fail")
        assert {e["pid"] for e in survivors} == spared
        assert min(e["at"] for e in survivors) - at < 5, "not by its silence"
        joined = cluster.wait_notes(4, "go", world=4, number=survivors[0]["number"] + 1)
        assert {e["pid"] for e in joined} & founders == spared
        assert sorted(e["rank"] for e in joined) == [0, 1, 2, 3]
        assert {e["rank"] for e in joined if e["pid"] in spared} == {0, 1}
        assert cluster.finish() == [0, 0]


def test_workers_of_a_prepared_process(tmp_path: Path) -> None:
    """They are detected, replaced and ended as ordinary ones; nothing outlives a killed agent."""
    with Cluster(tmp_path, "torch_worker.py", "1:2", per_node=2, prepare="true") as cluster:
        first, second = cluster.add_node(), cluster.add_node()
        cluster.wait_notes(4, "go", world=4)
        assert list(cluster.workers(second)) == [0, 1], "found by their environment"
        until("the prepared process", lambda: prepared(cluster, second))
        known = [note["pid"] for note in cluster.notes("go")]
        kill(workers_of(cluster.agents[second].pid)[0].pid)
        until("replacements", lambda: len([n for n in cluster.notes("go", world=4) if n["pid"] not in known]) >= 2)
        children = psutil.Process(cluster.agents[second].pid).children(recursive=True)
        assert len(prepared(cluster, second)) == 1 and len(workers_of(cluster.agents[second].pid)) == 2
        os.kill(cluster.agents[second].pid, signal.SIGKILL)
        cluster.agents[second].wait()
        embedded = cluster.coordinator()
        until("the end of all", lambda: not any(lives(each.pid) for each in children if each.pid != embedded))
        cluster.wait_notes(2, "go", world=2)
        (tmp_path / "finish").touch()
        assert cluster.agents[first].wait(60) == 0
        assert [note["had_torch"] for note in cluster.notes("imported")] == [False] * 4 + [True] * 2
        assert "ordinary_start" not in "".join(log.read_text() for log in tmp_path.glob("*.log"))


@pytest.mark.parametrize(("when", "threads"), [("before", 2), ("after", 1)])
def test_variables_that_a_script_sets_take_effect_in_replacements(
    when: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``prepare`` has its default value: they are forked unless the script sets variables before it imports torch."""
    monkeypatch.delenv(environ.PREPARE)
    (tmp_path / when).touch()
    with Cluster(tmp_path, "torch_worker.py", "1:1") as cluster:
        node = cluster.add_node()
        for number in range(1, 4):
            cluster.wait_notes(number, "go")
            until("its decision", lambda: prepared(cluster, node) or "ordinary_start" in cluster.log(node))
            kill(workers_of(cluster.agents[node].pid)[0].pid)
        cluster.wait_notes(4, "go")
        pid = workers_of(cluster.agents[node].pid)[0].pid
        imports = cluster.notes("imported")
        assert [note["threads"] for note in imports] == [threads] * 4
        assert [note["had_torch"] for note in imports] == [False, *[when == "after"] * 3]
        lines = cluster.log(node).count("ordinary_start reason='the script sets OMP_NUM_THREADS before it")
        assert lines == (when == "before")
        os.kill(cluster.agents[node].pid, signal.SIGKILL)
        cluster.agents[node].wait()
        until("the worker's end", lambda: not lives(pid))


@pytest.mark.parametrize(("script", "variable"), [("toy_worker.py", "1"), ("torch_worker.py", "0")])
def test_no_process_is_prepared_without_need(
    script: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environ.PREPARE, variable)
    with Cluster(tmp_path, script, "1:1") as cluster:
        node = cluster.add_node()
        cluster.wait_notes(1, "go")
        kill(workers_of(cluster.agents[node].pid)[0].pid)
        cluster.wait_notes(2, "go")
        assert not prepared(cluster, node)
        assert [note["had_torch"] for note in cluster.notes("imported")] == [False] * 2 * (script == "torch_worker.py")
        assert "ordinary_start" not in cluster.log(node)
        assert cluster.finish() == [0]


def test_coordinator_is_restarted(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "2") as cluster:
        cluster.add_node()
        second = cluster.add_node()
        cluster.wait_notes(2, "go", world=2)
        old = cluster.coordinator()
        cluster.kill_coordinator()
        until("a new coordinator", lambda: cluster.coordinator() not in (None, old))
        victim = workers_of(cluster.agents[second].pid)[0].pid
        kill(victim)
        cluster.wait_notes(1, "epoch", kind="fail")
        cluster.wait_notes(2, "go", number=cluster.notes("epoch", kind="fail")[0]["number"] + 1)
        assert len(cluster.notes("started")) == 3
        assert cluster.finish() == [0, 0]


@pytest.mark.allow_leak("unix_sockets", reason="a SIGKILLed agent cannot remove its socket; a later agent does")
def test_agents_death_takes_its_workers(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1:2", per_node=2) as cluster:
        cluster.add_node()
        second = cluster.add_node()
        cluster.wait_notes(4, "go", world=4)
        doomed = [w.pid for w in workers_of(cluster.agents[second].pid)]
        at = time.time()
        cluster.kill_agent(second)
        until("the workers' end", lambda: all(not lives(pid) for pid in doomed))
        survivors = cluster.wait_notes(2, "epoch", kind="fail")
        assert min(e["at"] for e in survivors) - at < 5, "not by its silence"
        third = cluster.add_node()
        cluster.wait_notes(4, "go", world=4, number=survivors[0]["number"] + 1)
        (tmp_path / "finish").touch()
        assert [cluster.agents["node0"].wait(60), cluster.agents[third].wait(60)] == [0, 0]


def test_a_checkpoint_that_a_dead_worker_did_not_report_is_reported(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1:2") as cluster:
        cluster.add_node()
        worker = cluster.wait_notes(1, "go")[0]["pid"]
        environment = psutil.Process(worker).environ()
        record = record_path(Path(environment[environ.AGENT_SOCKET]).parent, "", worker)
        (tmp_path / "a.ckpt").write_bytes(b"state")
        leave_record(record, str(tmp_path / "a.ckpt"), 8, "0" * 64, 2)
        kill(worker)
        until("the report", lambda: cluster.events("checkpoint_saved"))
        assert [event["fields"]["step"] for event in cluster.events("checkpoint_saved")] == [8]
        assert cluster.finish() == [0]


def test_a_resize_takes_the_node_whose_worker_restarts_and_its_reason_is_the_order(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1:3", slot=0) as cluster:
        oldest = cluster.add_node()
        cluster.wait_notes(1, "go", world=1)
        cluster.add_node()
        cluster.add_node()
        cluster.wait_notes(3, "go", world=3)
        victim = workers_of(cluster.agents[oldest].pid)[0].pid
        (tmp_path / "hold").touch()
        kill(victim)
        survivors = {note["pid"] for note in cluster.wait_notes(2, "epoch", kind="fail")}
        cluster.wait_notes(2, "go", number=cluster.notes("epoch", kind="fail")[0]["number"])
        assert cluster.unicron("resize", cluster.task, "2").stdout == f"{cluster.task}: 2 nodes\n"
        (revoked,) = until("the end of its slot", lambda: cluster.events("slot_revoked"))
        assert revoked["fields"]["node"] == oldest
        assert revoked["fields"]["reason"] == f"task {cluster.task} was resized to 2 nodes by order"
        (tmp_path / "hold").unlink()
        (tmp_path / "finish").touch()
        assert list(cluster.wait_exit(60).values()) == [0, 0, 0]
        assert {note["pid"] for note in cluster.notes("finished")} == survivors


def test_clean_end_leaves_nothing(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "2") as cluster:
        cluster.add_node()
        cluster.add_node()
        cluster.wait_notes(2, "go", world=2)
        assert cluster.coordinator() is not None
        assert cluster.finish() == [0, 0]
        until("the coordinator's end", lambda: cluster.coordinator() is None)
        assert not list((cluster.temporary / f"unicron-{os.getuid()}").glob("agent-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_stops_everything(tmp_path: Path, number: signal.Signals) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1", per_node=2) as cluster:
        cluster.add_node()
        cluster.wait_notes(2, "go", world=2)
        workers = [w.pid for w in workers_of(cluster.agents["node0"].pid)]
        cluster.agents["node0"].send_signal(number)
        assert cluster.agents["node0"].wait(60) != 0, "the task ends with its only agent"
        assert "agent_thread_broke" not in cluster.log("node0")
        assert all(not lives(pid) for pid in workers)
        assert not list((cluster.temporary / f"unicron-{os.getuid()}").glob("agent-*"))


def test_sigterm_while_waiting_for_a_grant(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "2") as cluster:
        cluster.add_node()
        base = cluster.temporary / f"unicron-{os.getuid()}"
        until("the socket", lambda: list(base.glob("agent-*/socket")))
        cluster.agents["node0"].terminate()
        assert cluster.agents["node0"].wait(60) == 128 + signal.SIGTERM
        assert not list(base.glob("agent-*"))


def test_a_script_that_does_not_start_ends_after_a_few_tries(tmp_path: Path) -> None:
    with Cluster(tmp_path, "failing_worker.py", "2") as cluster:
        cluster.add_node()
        cluster.add_node()
        assert list(cluster.wait_exit(90).values()) == [1, 1]
        reason = cluster.events("task_over")[0]["fields"]["reason"]
        assert reason.startswith("the script does not start: failed 3 times") and "exit 1" in reason
        assert reason.endswith("  ModuleNotFoundError: No module named 'this_module_does_not_exist'")
        assert len(cluster.events("worker_died")) <= 6 and len(cluster.events("slot_granted")) <= 7
        assert any("the script does not start" in cluster.log(node) for node in ("node0", "node1"))


def test_silent_worker_is_killed_and_started_anew(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "2", worker_timeout=1.5) as cluster:
        cluster.add_node()
        second = cluster.add_node()
        cluster.wait_notes(2, "go", world=2)
        victim = workers_of(cluster.agents[second].pid)[0].pid
        at = time.time()
        kill(victim, signal.SIGSTOP)
        (survivor,) = cluster.wait_notes(1, "epoch", kind="fail")
        assert 1.0 < survivor["at"] - at < 8.0, "by its silence, which is 10 s by default"
        cluster.wait_notes(2, "go", world=2, number=survivor["number"] + 1)
        assert not lives(victim)
        assert cluster.finish() == [0, 0]


def one_error(cluster: Cluster, node: str, *words: str) -> None:
    """The agent ends with one error that contains all the words, in the last line and nowhere before it."""
    assert cluster.agents[node].wait(60) == 1
    log = cluster.log(node)
    errors = [line for line in log.splitlines() if "RendezvousFailed: " in line or "ConfigError: " in line]
    assert len(errors) == 1, log
    assert all(word in errors[0] for word in words), errors[0]
    sentence = errors[0].partition("Failed: ")[2] or errors[0].partition("Error: ")[2]
    assert log.count(sentence) == 1 and log.rstrip().endswith(sentence), log


def test_wrong_token(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1") as cluster:
        cluster.start_node("node0", UNICRON_TOKEN="right")
        cluster.wait_notes(1, "go", world=1)
        cluster.start_node("node1", "--rdzv-conf", "connect_timeout=1,embedded=false", UNICRON_TOKEN="wrong")
        one_error(cluster, "node1", "cannot prove that it knows the token (that of UNICRON_TOKEN)", "connect_timeout")
        assert cluster.finish() == [0, 1]


def test_token_is_required_beyond_loopback(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1") as cluster:
        cluster.start_node(
            "n", "--rdzv-endpoint", "192.0.2.1:29461", UNICRON_TOKEN="", XDG_STATE_HOME=str(tmp_path / "none")
        )
        one_error(cluster, "n", "192.0.2.1", "UNICRON_TOKEN", str(tmp_path / "none" / "unicron" / "token"))


def test_unreachable_coordinator(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1", connect_timeout=1, embedded=False) as cluster:
        cluster.add_node()
        one_error(cluster, "node0", "no coordinator answered", f"127.0.0.1:{cluster.port}", "connect_timeout")


def test_differing_node_counts(tmp_path: Path) -> None:
    with Cluster(tmp_path, "toy_worker.py", "1:2") as cluster:
        cluster.add_node()
        cluster.wait_notes(1, "go", world=1)
        cluster.start_node("node1", "--nnodes", "2:3")
        one_error(cluster, "node1", "2:3", "1:2")
        assert cluster.finish() == [0, 1]
