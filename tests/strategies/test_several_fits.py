"""Several fits in one script: a worker that returns leaves finished fits out, and joins the present one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.launching import PROGRAMS, launch
from programs.several_fits import SHARDS
from system.cluster import Cluster

from unicron_lightning.local_cluster.processes import free_port

pytestmark = [pytest.mark.faults, pytest.mark.chaos, pytest.mark.timeout(400)]

SCRIPT = PROGRAMS / "several_fits.py"


SHARDED: dict[str, Any] = {"strategy": "unicron_fsdp", "workers": 4, "same": True}
"""Settings of a sharded model."""


def results(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("result-*.pt"))]


def plain(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps({**settings, "strategy": "ddp"}))
    workers = f"--nproc-per-node={settings.get('workers', 2)}"
    agent = ["--nnodes", "1", workers, "--rdzv-backend", "c10d", "--rdzv-id", "fits"]
    launch([*agent, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", str(SCRIPT), str(folder)], folder)
    return results(folder)[0]


@pytest.mark.parametrize(
    ("kill", "settings"),
    [
        ([1, 3, 1], {"fits": 2, "evaluates": True}),  # it evaluates alone before
        ([2, 3, 1], {"fits": 2, "evaluates": True}),
        ([3, 7, 0], {"fits": 3}),
        ([2, 21, 1], {"fits": 2, "same": True}),
        ([1, 18, 1], {"fits": 2}),  # its successor waits in the first fit, and the task begins the second one
        ([1, 3, 1], {"fits": 3, "same": True}),
        ([1, 3, 1], {"fits": 3, **SHARDED}),
        ([2, 13, 0], {"fits": 2, **SHARDED}),
        ([3, 22, 3], {"fits": 3, "evaluates": "after", **SHARDED}),
        ([1, 9, 2], {"fits": 2, **SHARDED}),  # as above
        ([2, 3, 1], {"fits": 3, "evaluates": True, **SHARDED, "same": False}),
        ([1, 3, 2], {"fits": 2, **SHARDED, "same": False}),
    ],
)
def test_a_kill_in_each_fit(kill: list[int], settings: dict[str, Any], tmp_path: Path) -> None:
    expected = plain(tmp_path / "ddp", settings)
    folder = tmp_path / "killed"
    folder.mkdir()
    given = {"strategy": "unicron", **settings, "kill": kill}
    workers, shards = settings.get("workers", 2), SHARDS if settings.get("strategy") else 1
    with Cluster(folder, agents=workers, nodes=f"{workers}:{workers}", script=SCRIPT, settings=given) as task:
        task.wait_end(240)
    found = results(folder)
    assert len(found) == workers and sum(each["replaces"] for each in found) == 1
    largest = 0.0
    for each in found:
        for name, value in expected["state"].items():
            own, wanted = each["state"][name], value.chunk(shards)[each["shard"] :][:1]
            assert len(own) == sum(map(len, wanted))
            largest = max(largest, *(float((own - part).abs().max()) for part in wanted), 0.0)
        for mine, theirs in zip(each["seen"], expected["seen"], strict=True):
            assert Path(mine[0]).name == Path(theirs[0]).name and mine[2] == theirs[2]
            assert mine[1] == pytest.approx(theirs[1], rel=1e-5)
    print(f"kill {kill}: largest difference {largest:.1e}")
    assert largest < 1e-6
    for survivor in (each for each in found if not each["replaces"]):
        for mine, theirs in zip(survivor["evaluated"], expected["evaluated"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
