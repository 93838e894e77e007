"""Submitting and cancelling over HTTP: accepted and refused requests, with their messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
from coordinator.shell import Coordinator, access, connected, get, train
from coordinator.shell import ask as proven

from unicron_lightning import wire
from unicron_lightning.link import open_socket
from unicron_lightning.wire.daemon import NodeHello, decode_to_node


async def test_jobs_are_taken_in_told_to_daemons_and_cancelled(tmp_path: Path) -> None:
    with Coordinator(tmp_path / "state", env={"UNICRON_TOKEN": "secret"}) as coordinator:
        async with aiohttp.ClientSession() as http:

            async def ask(method: str, path: str, body: Any = None) -> tuple[int, Any]:
                data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
                return await proven(coordinator.url, method, path, data, "secret")

            job = {"name": "j", "command": ["train.py"], "profile": {"1": 1e12}}
            assert (await ask("POST", "/v1/jobs", job))[1]["state"] == "queued"
            for body, status, words in [
                (b"{", 400, "expected a job: Input data was truncated"),
                ({"name": "k"}, 400, "expected a job: Object missing required field `command`"),
                ({**job, "weigth": 1}, 400, "expected a job: Object contains unknown field `weigth`"),
                ({**job, "name": "k", "weight": "heavy"}, 400, "expected a job: Expected `float`, got `str`"),
                ({**job, "name": "k", "max_nodes": 0}, 400, "min_nodes=1, max_nodes=0: expected 1 <= min_nodes"),
                (
                    {**job, "name": "k", "transformer": {"layers": 2}},
                    400,
                    "expected a job: transformer.layers=2: unknown key",
                ),
                (job, 409, "task 'j' exists already"),
            ]:
                answered, answer = await ask("POST", "/v1/jobs", body)
                assert (answered, answer["error"][: len(words)]) == (status, words)
            assert await ask("GET", "/v1/jobs/x") == (404, {"error": "no job 'x' is known"})
            async with await open_socket(http, f"{coordinator.url}/v1/node", access("secret")) as daemon:
                hello = NodeHello(protocol=wire.PROTOCOL_VERSION, node="n", host="h", pid=1, started_at=1.0,
                                           slots=["0"], tasks=[])  # fmt: skip
                await daemon.send_str(wire.encode(hello).decode())
                while not (run := decode_to_node(await daemon.receive_str(timeout=10))).launches:
                    pass
                assert [(each.job.name, each.slot) for each in run.launches] == [("j", "0")]
                assert (await ask("POST", "/v1/nodes/n/drain"))[0] == 200
                assert (await ask("POST", "/v1/tasks/j/cancel"))[1]["state"] == "cancelled"
                while decode_to_node(await daemon.receive_str(timeout=10)).launches:
                    pass
            assert (await ask("GET", "/v1/jobs/j"))[1]["state"] == "cancelled"
            assert (await ask("POST", "/v1/tasks/j/cancel"))[0] == 404
            coordinator.kill()
            coordinator.start()
            assert [each["state"] for each in (await ask("GET", "/v1/jobs"))[1]] == ["cancelled"]


async def test_without_the_token_nothing_is_run_or_ended(tmp_path: Path) -> None:
    """Any user of this machine can reach a loopback port; that must not let them act as the daemons' user."""
    with Coordinator(tmp_path / "state") as coordinator:
        async with connected(coordinator.url, "a", nodes=(1, 1)) as agents, aiohttp.ClientSession() as http:
            await train(agents)
            job = json.dumps({"name": "j", "command": ["train.py"]}).encode()
            for method, path in (("POST", "/v1/jobs"), ("GET", "/v1/node"), ("POST", "/v1/tasks/t/cancel")):
                async with http.request(method, coordinator.url + path, data=job) as answer:
                    assert answer.status == 401
            assert (await get(f"{coordinator.url}/v1/status"))["tasks"]["t"]["members"]


async def test_a_jobs_environment_is_in_no_answer(tmp_path: Path) -> None:
    job = {"name": "j", "command": ["train.py"], "environment": {"API_KEY": "hunter2"}}
    with Coordinator(tmp_path / "state", env={"UNICRON_TOKEN": "secret"}) as coordinator:
        assert "hunter2" not in str(
            await proven(coordinator.url, "POST", "/v1/jobs", json.dumps(job).encode(), "secret")
        )
        for path in ("status", "jobs", "jobs/j", "events", "incidents"):
            status, answer = await proven(coordinator.url, "GET", f"/v1/{path}", token="secret")
            assert status == 200
            assert "hunter2" not in str(answer)
