"""GET /metrics over real sockets: who may read it, and a real Prometheus that does."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import aiohttp
import pytest
import yaml
from coordinator.shell import Coordinator, connected, known, train

from unicron_lightning import wire
from unicron_lightning.cli.client import request
from unicron_lightning.local_cluster.processes import free_port
from unicron_lightning.proof import scrape_credential
from unicron_lightning.tls import Access

DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "prometheus"
PROMETHEUS = shutil.which("prometheus")


@pytest.fixture
def coordinator(tmp_path):
    with Coordinator(tmp_path / "state") as running:
        yield running


async def test_the_credential_reads_metrics_and_nothing_else(coordinator):
    bearer = {"Authorization": f"Bearer {scrape_credential(known().secret)}"}
    async with aiohttp.ClientSession() as http:
        for path, headers, status in (
            ("/metrics", bearer, 200),
            ("/metrics", {}, 401),
            ("/metrics", {"Authorization": "Bearer x"}, 401),
            ("/metrics", {"Authorization": f"Bearer {known().secret}"}, 401),
            ("/metrics", {**bearer, "Origin": "http://127.0.0.1"}, 403),
            ("/metrics", {**bearer, "Host": "example.org"}, 421),
            ("/v1/status", bearer, 401),
        ):
            async with http.get(coordinator.url + path, headers=headers) as answer:
                assert answer.status == status, (path, headers)
        async with http.post(f"{coordinator.url}/v1/nodes/a/drain", headers=bearer) as answer:
            assert answer.status == 401
    endpoint = coordinator.url.removeprefix("http://")
    status, body = await asyncio.to_thread(request, endpoint, "GET", "/metrics", Access(token=known()))
    assert (status, b"unicron_coordinator_info" in body) == (200, True)


def query(port: int, expression: str) -> list[tuple[dict[str, str], float]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(expression)}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        found = json.loads(answer.read())["data"]["result"]
    return [(sample["metric"], float(sample["value"][1])) for sample in found]


def start_prometheus(folder: Path, coordinator: Coordinator) -> tuple[subprocess.Popen[bytes], int]:
    """Start Prometheus with the files of deploy/, with this coordinator as their target."""
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [coordinator.url.removeprefix("http://")]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(DEPLOY / "unicron-rules.yaml", folder)
    (folder / "credential").write_text(scrape_credential(known().secret))
    port = free_port()
    command = [str(PROMETHEUS), f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    return subprocess.Popen(command), port


@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed: apt-get install prometheus")
async def test_a_real_prometheus_scrapes_and_evaluates_the_rules(tmp_path, coordinator):
    process, port = start_prometheus(tmp_path, coordinator)
    try:
        async with connected(coordinator.url, "a", "b", nodes=(2, 2)) as (a, b):
            await train([a, b])
            await b.say(wire.WorkerDied(worker=b.worker, cause="signal", code=9, at=time.time()))
            deadline, found = time.monotonic() + 30, []
            while not found:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
                try:
                    found = await asyncio.to_thread(query, port, 'unicron_incidents_total{severity="SEV2"} == 1')
                except OSError:
                    continue
            assert found[0][0]["task"] == "t"
            up = await asyncio.to_thread(query, port, "up")
            assert [value for _, value in up] == [1]
            names = {
                labels["__name__"] for labels, _ in await asyncio.to_thread(query, port, '{__name__=~"unicron_.+"}')
            }
            assert {"unicron_task_time_seconds_total", "unicron_coordinator_loop_lag_seconds_bucket"} <= names
    finally:
        process.terminate()
        process.wait(20)
