"""Megatron's groups on a GPU: a worker of a replica dies, and the run ends as an undisturbed one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import kit
from system.cluster import Cluster
from system.megatron import MODEL, SCRIPT, finals

pytest.importorskip("megatron.core.package_info")

pytestmark = [pytest.mark.timeout(kit.limit())]

STEPS = 12
WORKERS = 4
DEATHS = [{"point": "forward", "replica": 1, "shard": 0, "micro_batch": 1, "from_step": 3}]
Parameters = dict[str, torch.Tensor]


def trained(folder: Path, model: dict[str, Any], deaths: list[dict[str, Any]]) -> dict[int, Parameters]:
    """Train; returns the parameters of each shard, which all replicas share bit by bit."""
    folder.mkdir()
    accelerator = "gpu" if kit.device() == "cuda" else "cpu"
    settings = {**model, "steps": STEPS, "full": WORKERS, "slow": 0.2, "accelerator": accelerator}
    with Cluster(
        folder,
        script=SCRIPT,
        agents=WORKERS + 1 if deaths else WORKERS,
        nodes=f"2:{WORKERS}",
        schedule=deaths,
        settings=settings,
        variables=lambda node: kit.environment(node),
    ) as cluster:
        cluster.wait_end(kit.limit() - 10)
        assert len(cluster.notes("fault")) == len(deaths)
    _, paths = finals(folder)
    found: dict[int, Parameters] = {}
    for path in paths:
        shard = int(path.stem.rpartition("-")[2])
        parameters: Parameters = torch.load(path)["parameters"]
        first = found.setdefault(shard, parameters)
        assert all(torch.equal(first[name], value) for name, value in parameters.items())
    return found


@pytest.mark.gpu("K11", worth=6, seconds=130)
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp2_dp2", "pp2_dp2"])
def test_a_death_in_a_replica(
    layout: dict[str, int], tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    model = {**MODEL, **layout}
    undisturbed = trained(tmp_path / "undisturbed", model, [])
    healed = trained(tmp_path / "healed", model, DEATHS)
    assert healed.keys() == undisturbed.keys() == {0, 1}
    worst = max(
        float((healed[shard][name] - value).abs().max())
        for shard, values in undisturbed.items()
        for name, value in values.items()
    )
    record_property("difference", worst)
    assert worst <= 1e-5
