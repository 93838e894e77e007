"""Workers of a loop, ordinary and forked ones, import what they need and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron_lightning import environ
from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("importing.py")
LIBRARIES = {
    "aiohttp", "cryptography", "fsspec", "hydra", "lightning", "lightning_fabric", "lightning_utilities", "numba",
    "omegaconf", "prometheus_client", "pytorch_lightning", "rich", "scipy", "shtab", "sqlite3", "torchmetrics", "yaml",
}  # fmt: skip
PARTS = {
    "agent", "callbacks", "certificates", "cli", "conf", "coordinator", "demo", "fsdp", "jobs", "launcher",
    "local_cluster", "megatron", "node", "planner", "proof", "replica", "simulate", "strategies", "terms", "tls",
}  # fmt: skip
"""Parts of this package that belong to other processes, or to Lightning."""


def test_a_loops_worker_imports_nothing_of_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environ.PREPARE)
    with LocalCluster([SCRIPT, tmp_path], nodes=2, folder=tmp_path, stop_seconds=0.0) as cluster:
        noted = lambda: list(tmp_path.glob("modules-*"))  # noqa: E731
        until("steps", lambda: len(noted()) == 2, 120)
        cluster.kill_worker("node1")
        until("the replacement's steps", lambda: len(noted()) == 3, 120)
        (tmp_path / "stop").touch()
        assert set(cluster.wait_exit(60).values()) == {0}
        assert "ordinary_start" not in cluster.log("node1")
    found = [path.read_text().splitlines() for path in noted()]
    assert sorted(lines[0] for lines in found) == ["forked False", "forked False", "forked True"]
    for _, *names in found:
        parts = {name.split(".")[1] for name in names if name.startswith("unicron_lightning.")}
        assert {"loop", "worker", "data"} <= parts
        assert ({name.partition(".")[0] for name in names} & LIBRARIES, parts & PARTS) == (set(), set())
