"""A real Prometheus scrapes a real coordinator by the files under deploy/, and evaluates the rules."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from coordinator.shell import Coordinator, connected, train

from unicron_lightning import wire
from unicron_lightning.credentials import token_for
from unicron_lightning.local_cluster.processes import free_port
from unicron_lightning.proof import scrape_credential

DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "prometheus"
PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed: apt-get install prometheus"),
    pytest.mark.timeout(120),
]


class Server:
    """Prometheus in a folder of its own, with the deployed configuration at another target and pace."""

    def __init__(self, folder: Path, target: str) -> None:
        folder.mkdir()
        secret = token_for("127.0.0.1", None, option="").secret
        (folder / "credential").write_text(scrape_credential(secret))
        shutil.copy(DEPLOY / "unicron-rules.yaml", folder)
        text = (DEPLOY / "prometheus.yaml").read_text()
        assert "127.0.0.1:29461" in text and "interval: 5s" in text
        text = text.replace("127.0.0.1:29461", target).replace("interval: 5s", "interval: 1s")
        (folder / "prometheus.yaml").write_text(text)
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [str(PROMETHEUS), f"--config.file={folder / 'prometheus.yaml'}"]
        command += [
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(command, stderr=self._log)

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=5) as answer:
            return json.load(answer)["data"]

    async def value(self, query: str, at_least: float) -> float:
        """The value of a query once it has reached a limit."""
        end = time.monotonic() + 40
        found = []
        while time.monotonic() < end:
            await asyncio.sleep(0.2)
            try:
                found = self.ask(f"query?query={urllib.parse.quote(query)}")["result"]
            except OSError:
                continue  # it starts
            if found and float(found[0]["value"][1]) >= at_least:
                return float(found[0]["value"][1])
        raise AssertionError(f"{query}: {found}, expected {at_least}; targets {self.ask('targets')}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


async def test_prometheus_reads_the_coordinator_and_evaluates_the_rules(tmp_path: Path) -> None:
    with Coordinator(tmp_path / "state") as coordinator:
        server = Server(tmp_path / "prometheus", f"127.0.0.1:{coordinator.port}")
        try:
            async with connected(coordinator.url, "a", "b", nodes=(2, 2)) as (a, b):
                await train([a, b])
                assert await server.value('up{job="unicron"}', 1) == 1
                assert await server.value('unicron_task_workers{task="t"}', 2) == 2
                await b.say(wire.WorkerDied(worker=b.worker, cause="signal", code=9, at=time.time()))
                assert await server.value('unicron_failures_total{task="t",kind="signal"}', 1) == 1
                assert await server.value('sum(unicron_incidents_open{task="t"})', 1) == 1
                assert await server.value("unicron_coordinator_loop_lag_seconds_count", 1) >= 1
            rules = [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]
            assert len(rules) > 10
            assert {rule["lastError"] for rule in rules if "lastError" in rule} == set()
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        finally:
            server.stop()
