"""The command `unicron` and the coordinator's configuration, as users run them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

import aiohttp
import pytest
from coordinator.shell import Coordinator, access, connected, get, train

from unicron_lightning import wire
from unicron_lightning.cli.client import stored
from unicron_lightning.link import open_socket
from unicron_lightning.local_cluster.processes import free_port
from unicron_lightning.wire.daemon import NodeHello


def unicron(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from unicron_lightning.cli import main; main()"
    own = os.environ.copy()  # not the COLUMNS that readline sets for children of pytest
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, env=own)


@pytest.fixture
def coordinator(tmp_path):
    with Coordinator(tmp_path / "state") as running:
        yield running


async def test_status_and_events_show_a_task(coordinator):
    endpoint = f"127.0.0.1:{coordinator.port}"

    async def ask(*arguments: str) -> str:
        done = await asyncio.to_thread(unicron, *arguments, "--endpoint", endpoint)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert "no tasks" in await ask("status")
    async with connected(coordinator.url, "a", "b", nodes=(2, 2)) as agents:
        await train(agents)
        text = await ask("status")
        assert "t  running  epoch 1  life 1  2:2 nodes" in text
        assert "a/0#1" in text
        assert json.loads(await ask("status", "--json", "--task", "t"))["tasks"]["t"]["settled"] is True
        lines = (await ask("events", "--task", "t")).splitlines()
        assert " t - task_created min_nodes=2 max_nodes=2" in lines[0]
        assert "epoch_settled" in lines[-1]
        events = json.loads(await ask("events", "--json", "--since", "3"))
        assert events[0]["seq"] == 4
    done = await asyncio.to_thread(unicron, "status", "--endpoint", endpoint, "--task", "x")
    assert done.returncode == 2
    assert done.stderr == f"unicron: no task 'x' at {endpoint}; expected one of: ['t']\n"


async def test_an_array_is_submitted_as_a_whole(coordinator, monkeypatch, tmp_path):
    monkeypatch.setenv("UNICRON_ENDPOINT", f"127.0.0.1:{coordinator.port}")
    (tmp_path / "j.yaml").write_text("command: [train.py, '{index}']\n")

    async def submit(*arguments: str) -> tuple[int, str]:
        done = await asyncio.to_thread(unicron, "submit", str(tmp_path / "j.yaml"), *arguments)
        return done.returncode, done.stdout + done.stderr

    assert await submit("--array", "0-1") == (0, "j-0: queued\nj-1: queued\n")
    status, text = await submit("--array", "1-2")
    assert (status, text[:30]) == (2, "unicron: task 'j-1' exists alr")
    status, text = await submit("--set", "name=last", "--set", "after=[j-0,j-1]", "--json")
    assert status == 0 and [(job["name"], job["state"]) for job in json.loads(text)] == [("last", "queued")]
    status, text = await submit("--set", "name=x", "--set", "after=[j-2]")
    assert (status, text[:29]) == (2, "unicron: after='j-2': no such")
    done = await asyncio.to_thread(unicron, "jobs", "--json")
    reasons = {job["name"]: job["reason"] for job in json.loads(done.stdout)}
    assert reasons == {"j-0": "needs 1 node, 0 slots are usable", "j-1": "needs 1 node, 0 slots are usable",
                       "last": "comes after j-0, j-1"}  # fmt: skip
    waiting = asyncio.create_task(submit("--set", "name=late", "--set", "after=[j-0]", "--wait", "--json"))
    while "late" not in (await asyncio.to_thread(unicron, "jobs")).stdout:
        assert not waiting.done()
    done = await asyncio.to_thread(unicron, "cancel", "j-0", "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (0, "cancelled")
    status, text = await waiting
    assert (status, [(job["name"], job["state"]) for job in json.loads(text)]) == (1, [("late", "failed")])


async def test_the_endpoint_is_taken_from_the_environment(coordinator, monkeypatch):
    monkeypatch.setenv("UNICRON_ENDPOINT", f"127.0.0.1:{coordinator.port}")
    done = await asyncio.to_thread(unicron, "status")
    assert (done.returncode, done.stderr) == (0, "") and str(coordinator.port) in done.stdout
    other = free_port()
    done = await asyncio.to_thread(unicron, "status", "--endpoint", f"127.0.0.1:{other}")
    assert done.returncode == 2 and f"127.0.0.1:{other}" in done.stderr


async def test_the_state_of_an_ended_coordinator_is_shown(coordinator, tmp_path, monkeypatch):
    endpoint = f"127.0.0.1:{coordinator.port}"
    async with connected(coordinator.url, "a", "b", nodes=(2, 2)) as agents:
        await train(agents)
        for agent in agents:
            await agent.say(wire.Bye(succeeded=True))
        for _ in range(500):
            if (await get(f"{coordinator.url}/v1/jobs"))[0]["state"] == "succeeded":
                break
            await asyncio.sleep(0.02)
    coordinator.kill()

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        return unicron(*arguments, "--endpoint", endpoint)

    refused = ask("jobs")
    assert refused.returncode == 2 and "no coordinator answers" in refused.stderr, "it does not look elsewhere"
    monkeypatch.setenv("UNICRON_STATE_DIR", str(tmp_path / "state"))
    done = ask("jobs", "--json")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert f"no coordinator listens at {endpoint}" in done.stderr and str(tmp_path / "state") in done.stderr
    assert [(job["name"], job["state"]) for job in json.loads(done.stdout)] == [("t", "succeeded")]
    events = ask("events", "--task", "t")
    assert "task_over succeeded=true" in events.stdout and events.stderr.count("\n") == 1
    assert json.loads(ask("incidents", "--json").stdout)["incidents"] == []
    assert "succeeded" in ask("jobs").stdout, "of the coordinator that was the last one"
    status = ask("status")
    assert "t" in status.stdout and "succeeded" in status.stdout and status.returncode == 0


async def test_endpoints_are_read_in_one_way(coordinator, tmp_path, monkeypatch, capsys):
    """An IPv6 address and a missing port name the same state folder as they do to agents."""
    await get(f"{coordinator.url}/v1/status")
    coordinator.stop()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    state = coordinator.state_dir
    (own := tmp_path / f"unicron-{os.getuid()}").mkdir(mode=0o700)
    places = {
        f"[::1]:{coordinator.port}": f"__1-{coordinator.port}",
        "[::1]": "__1-29461",
        "a.invalid": "a.invalid-29461",
    }
    for endpoint, name in places.items():
        state = state.rename(own / name)
        (event, *_) = stored(endpoint, "/v1/events")
        assert event["name"] == "coordinator_started" and f"from {state}" in capsys.readouterr().err


def test_the_version_is_shown():
    assert unicron("--version").stdout == f"unicron-lightning {version('unicron-lightning')}\n"


async def test_top_prints_json(coordinator):
    async with connected(coordinator.url, "a", "b", nodes=(2, 2)) as agents:
        await train(agents)
        words = ("top", "--json", "--interval", "0.05", "--endpoint", f"127.0.0.1:{coordinator.port}")
        answer = json.loads((await asyncio.to_thread(unicron, *words)).stdout)
    assert answer["tasks"]["t"]["state"] == "running" and answer["steps_per_second"] == {"t": 0.0}


async def test_a_node_is_drained_and_undrained(coordinator):
    endpoint = f"127.0.0.1:{coordinator.port}"

    async def order(*arguments: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(unicron, *arguments, "--endpoint", endpoint)

    async with connected(coordinator.url, "a", "b", nodes=(2, 2)) as agents:
        await train(agents)
        assert (await order("drain", "b")).stdout == (
            "drained: b\nb stays: task t needs at least 2 nodes, 1 other has its workers\n"
        )
        assert "drained: b" in (await order("status")).stdout
        refused = await order("drain", "c")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr == "unicron: no node or agent 'c'; expected one of: ['a', 'b']\n"
        coordinator.kill()
        coordinator.start()
        assert "drained: b" in (await order("status")).stdout, "it is remembered"
        assert (await order("undrain", "b")).stdout == "drained: none\n"


async def test_a_task_is_resized(coordinator):
    endpoint = f"127.0.0.1:{coordinator.port}"

    async def order(*arguments: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(unicron, "resize", *arguments, "--endpoint", endpoint)

    async with connected(coordinator.url, "a", "b", nodes=(2, 4)) as agents:
        await train(agents)
        assert (await order("t", "3")).stdout == "t: 3 nodes\n"
        status = await asyncio.to_thread(unicron, "status", "--endpoint", endpoint)
        assert "2:4 nodes, 3 wanted" in status.stdout
        assert (await order("t", "all")).stdout == "t: all nodes\n"
        for words, reason in [
            (("t", "5"), "nodes=5: expected 2 to 4 (its --nnodes), or all"),
            (("t", "1.5"), "nodes=1.5: expected 2 to 4 (its --nnodes), or all"),
            (("t", "few"), "nodes=few: expected 2 to 4 (its --nnodes), or all"),
            (("x", "2"), "no task 'x'; expected one of: ['t']"),
        ]:
            refused = await order(*words)
            assert (refused.returncode, refused.stderr) == (2, f"unicron: {reason}\n")


async def test_a_layout_is_refused_in_words(coordinator):
    async with connected(coordinator.url, "a", nodes=(1, 1)) as agents:
        await train(agents)
        for task, tp, reason in [
            ("t", "2", "tp=2, pp=1: the task 't' has not begun to train, or is of a strategy without layouts"),
            ("t", "0", "tp=0: expected a whole number, 1 or more"),
            ("x", "2", "no task 'x'; expected one of: ['t']"),
        ]:
            words = ("relayout", task, "--tp", tp, "--pp", "1", "--endpoint", f"127.0.0.1:{coordinator.port}")
            refused = await asyncio.to_thread(unicron, *words)
            assert (refused.returncode, refused.stderr) == (2, f"unicron: {reason}\n")
        for size, reason in [
            ("2", "shards=2: the task 't' has not begun to train, or is of a strategy without layouts"),
            ("x", "shards=x: expected a whole number, 1 or more"),
        ]:
            words = ("relayout", "t", "--shards", size, "--endpoint", f"127.0.0.1:{coordinator.port}")
            refused = await asyncio.to_thread(unicron, *words)
            assert (refused.returncode, refused.stderr) == (2, f"unicron: {reason}\n")


def test_sizes_of_a_layout_are_of_one_kind():
    done = unicron("relayout", "t", "--tp", "2", "--shards", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "unicron: relayout with --tp, --shards: expected --tp and --pp, also with --ep, or --shards\n"


@pytest.mark.parametrize("command", ["status", "events"])
def test_no_coordinator_is_one_line_and_status_2(command):
    endpoint = f"127.0.0.1:{free_port()}"
    done = unicron(command, "--endpoint", endpoint)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"unicron: no coordinator answers at {endpoint}: [Errno 111] Connection refused\n"


@pytest.mark.parametrize("endpoint", ["nonsense:port", "127.0.0.1"])
def test_a_malformed_endpoint_is_one_line(endpoint):
    done = unicron("status", "--endpoint", endpoint)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_the_token_is_shown(tmp_path):
    file = tmp_path / "token"
    file.write_text("secret\n")
    with Coordinator(tmp_path / "state", f"coordinator.token_file={file}") as coordinator:
        endpoint = f"127.0.0.1:{coordinator.port}"
        refused = unicron("status", "--endpoint", endpoint)
        assert refused.returncode == 2
        assert f"what answers at {endpoint} cannot prove that it knows the token (that of " in refused.stderr
        assert unicron("status", "--endpoint", endpoint, "--token-file", str(file)).returncode == 0


def test_the_configuration_can_be_shown(monkeypatch):
    monkeypatch.setenv("UNICRON_ENDPOINT", "HOST:4321")
    assert "port: 4321" in unicron("coordinator", "--cfg", "job", "--resolve").stdout
    done = unicron("coordinator", "--cfg", "job", "coordinator.port=1234")
    assert done.returncode == 0
    assert "port: 1234" in done.stdout
    assert "restart_grace: ${of_timeout:1,3}" in done.stdout


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("coordinator.prot=1", "coordinator.prot: unknown key; known are allow_injection, exit_when_idle, hook, "),
        ("coordinator.port=many", "coordinator.port='many': expected a whole number"),
        ("coordinator.port=70000", "coordinator.port=70000: expected 0..65535"),
        ("detection.join_grace=-1", "detection.join_grace=-1.0: expected a number >= 0"),
        ("coordinator.token_file=/no/such/file", "token_file=/no/such/file: "),
        ("coordinator.host=no.such.host.invalid", "coordinator.host=no.such.host.invalid: "),
    ],
)
def test_wrong_configuration_is_refused_in_words(override, words, tmp_path):
    done = unicron("coordinator", override, f"store.state_dir={tmp_path / 'state'}")
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


async def test_an_incident_is_a_line_and_ended_tasks_of_a_former_coordinator_are_left_out(
    coordinator, tmp_path, monkeypatch
):
    monkeypatch.delenv("COLUMNS", raising=False)

    async def say(*words: str, status: int = 0) -> str:
        endpoint = f"127.0.0.1:{coordinator.port}"
        done = await asyncio.to_thread(unicron, *words, "--endpoint", endpoint)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    cause = "signal SIGKILL, which nobody on this node has sent, and of which the kernel's log says nothing"
    async with connected(coordinator.url, "a", "b", nodes=(2, 2)) as (a, b):
        await train([a, b])
        await b.say(wire.WorkerDied(worker=b.worker, cause="signal", code=9, at=time.time(), meaning=cause))
        await a.hear(wire.Epoch)
        (line,) = [line for line in (await say("incidents")).splitlines() if "i1" in line]
        assert cause in line and line.rstrip().endswith("open"), "a file or a pipe gets all of it"
        details = await say("incidents", "--id", "i1")
        assert details.startswith(f"i1 of task t: {cause}\n") and "; lost 0.00 worker-seconds" in details
        assert "detection" in details and "failures" in details
        assert await say("incidents", "--id", "i7", status=2) == "unicron: no incident 'i7'; expected one of: i1\n"
        report = await say("report", "t", "--out", str(tmp_path / "t.html"))
        assert ": 1 incident, goodput" in report
        coordinator.kill()
        coordinator.start()
        assert "\ni1 " in await say("incidents"), "a task that has not ended is of this coordinator, too"
        await say("cancel", "t")
    assert "cancelled" in await say("jobs")
    coordinator.kill()
    coordinator.start()
    none = "since this coordinator started; --all shows what former ones had\n"
    assert (await say("jobs"), await say("incidents")) == (f"no jobs {none}", f"no incidents {none}")
    assert "cancelled" in await say("jobs", "--all") and "\ni1 " in await say("incidents", "--all")


async def test_status_shows_the_nodes_that_have_a_daemon(coordinator):
    async with (
        aiohttp.ClientSession() as http,
        await open_socket(http, f"{coordinator.url}/v1/node", access()) as daemon,
    ):
        hello = NodeHello(protocol=wire.PROTOCOL_VERSION, node="n7", host="h", pid=1, started_at=1.0, slots=["0", "1"],
                          tasks=[])  # fmt: skip
        await daemon.send_str(wire.encode(hello).decode())
        await daemon.receive_str(timeout=10)
        done = await asyncio.to_thread(unicron, "status", "--endpoint", f"127.0.0.1:{coordinator.port}")
    assert (done.returncode, done.stderr) == (0, "") and "no tasks" in done.stdout
    assert [line.split()[:3] for line in done.stdout.splitlines() if "n7" in line] == [["n7", "h", "ready"]]


def test_a_reader_that_closes_the_pipe_ends_any_command_quietly(coordinator):
    def read_by_none(*words: str) -> subprocess.CompletedProcess[str]:
        reader, writer = os.pipe()
        os.close(reader)
        try:
            return subprocess.run(
                [sys.executable, "-m", "unicron_lightning.cli", *words],
                stdout=writer,
                stderr=subprocess.PIPE,
                text=True,
            )
        finally:
            os.close(writer)

    endpoint = ("--endpoint", f"127.0.0.1:{coordinator.port}")
    for words in (("--help",), ("coordinator", "--help"), ("coordinator", "--cfg", "job"), ("status", *endpoint)):
        done = read_by_none(*words)
        assert (done.returncode, done.stderr) == (0, ""), words


async def test_a_report_a_credential_and_the_page_of_a_coordinator(coordinator, tmp_path):
    endpoint = f"127.0.0.1:{coordinator.port}"

    async def say(*words: str) -> str:
        done = await asyncio.to_thread(unicron, *words, "--endpoint", endpoint)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async with connected(coordinator.url, "a", "b", nodes=(2, 2)) as agents:
        await train(agents)
        out = tmp_path / "t.md"
        assert (await say("report", "t", "--out", str(out))).startswith(f"{out}: 0 incidents, goodput ")
        assert out.read_text().startswith("# Task t\n") and "| reason |" not in out.read_text()
        await agents[1].say(wire.WorkerDied(worker=agents[1].worker, cause="exit", code=1, at=time.time()))
        await agents[0].hear(wire.Epoch)
        await say("report", "t", "--out", str(out))
        assert "| reason | recovering: waits for a/0#1; for detection.recovery_time at most |" in out.read_text()
        assert len((await say("metrics", "--credential")).strip()) == 64
        for address in (
            (await say("dashboard")).splitlines()[0],
            json.loads(await say("dashboard", "--json"))["address"],
        ):
            assert address.startswith(f"http://{endpoint}/dashboard#code=")
