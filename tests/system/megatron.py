"""Judges a finished run of tests/megatron/train.py against a plain Megatron loop with as many steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from system.cluster import Cluster, Note

from unicron_lightning.local_cluster.processes import lives

SCRIPT = Path(__file__).parents[1] / "megatron" / "train.py"
MODEL: dict[str, Any] = {"tp": 1, "pp": 1, "dp": 2, "accumulation": 2, "toy": {}, "ddp": {}, "optimizer": {}}
"""Settings that the reference needs."""

VALIDATED = 22
"""Number of validation samples."""
STREAMED = 21
"""Number of those in whole batches of streams."""

ZERO1: dict[str, Any] = {
    "ddp": {"use_distributed_optimizer": True},
    # A norm is summed shard by shard, so its rounding depends on the world; without clipping it does not affect the
    # parameters.
    "optimizer": {"use_distributed_optimizer": True, "clip_grad": 0.0},
}
"""Settings that differ with the distributed optimizer."""

EXPERTS: dict[str, Any] = {
    **MODEL,
    "ep": 2,
    "toy": {
        "experts": 4,
        "double": True,
        "layers": 2,
        "router": {
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 1e-3,
            "moe_z_loss_coeff": 1e-3,
            "moe_expert_capacity_factor": 1.0,
        },
    },
    "optimizer": {"clip_grad": 0.0, "lr": 1e-3},
}
"""A model whose experts two workers of each replica divide."""

ZERO1_EXPERTS: dict[str, Any] = {
    "ddp": ZERO1["ddp"],
    "optimizer": {**EXPERTS["optimizer"], **ZERO1["optimizer"]},
}
"""Settings of that model that differ with the distributed optimizer."""


def wait_replicas(
    cluster: Cluster,
    number: int = 2,
    *,
    workers: int = 2,
    after: float = 0.0,
    tp: int | None = None,
    seconds: float = 300.0,
) -> list[Note]:
    """Wait for a world of complete replicas without spares; return the newest step of each worker.

    Args:
        cluster: of the task.
        number: of replicas.
        workers: of a replica.
        after: time after which all of them, alive, must have finished a step.
        tp: number of workers that slice a layer, if required.
        seconds: time limit.
    """

    def there() -> list[Note] | None:
        world = cluster.world()
        whole = len(world) == number * workers == world[0]["world"] and all(n["replicas"] == number for n in world)
        new = all(n["at"] > after and lives(n["pid"]) and tp in (None, n["tp"]) for n in world)
        return world if whole and new else None

    return list(cluster.watch(there, f"{number} whole replicas", seconds, 150))


def finals(folder: Path) -> tuple[int, list[Path]]:
    """The last step, which is the same for all workers, and the files that they have saved after it."""
    paths = sorted(folder.glob("final-*.pt"))
    steps = {int(path.stem.split("-")[1]) for path in paths}
    assert len(steps) == 1, paths
    return steps.pop(), paths


def notes(folder: Path, what: str) -> list[dict[str, Any]]:
    """The notes of a kind by all workers, oldest first."""
    lines = [json.loads(line) for path in folder.glob("notes-*.jsonl") for line in path.read_text().splitlines()]
    return sorted((line for line in lines if line["what"] == what), key=lambda line: float(line["at"]))


def differing_replicas(paths: list[Path]) -> list[str]:
    """Files of workers whose parameters differ in any bit from those of the same shard in the first replica."""
    found = []
    first = {
        path.stem.split("-")[3]: torch.load(path)["parameters"] for path in paths if path.stem.split("-")[2] == "0"
    }
    for path in paths:
        own, other = torch.load(path)["parameters"], first[path.stem.split("-")[3]]
        if any(not torch.equal(own[name], other[name]) for name in other):
            found.append(path.name)
    return found


def differences(paths: list[Path], plain: Path) -> dict[str, float]:
    """For each worker the largest difference of a parameter from the plain loop's; 0 means bitwise equality."""
    found = {}
    for path in paths:
        _, step, _, shard = path.stem.split("-")
        own, other = torch.load(path)["parameters"], torch.load(plain / f"plain-{step}-{shard}.pt")
        assert own.keys() == other.keys()
        found[path.name] = max(float((own[name] - other[name]).abs().max()) for name in own)
    return found


def train(folder: Path, agents: int, **settings: Any) -> dict[int, dict[str, Any]]:
    """Run a task to its end, without deaths in a complete world; return its steps as rank 0 recorded them."""
    folder.mkdir()
    schedule = settings.pop("schedule", [])
    replica = settings["tp"] * settings["pp"] * max(settings.get("cp", 1), settings.get("ep", 1))
    most = replica * settings["dp"]
    nodes = f"{replica if schedule else most}:{most}"
    cluster = Cluster(folder, script=SCRIPT, agents=agents, nodes=nodes, schedule=schedule, settings=settings)
    with cluster:
        ended = lambda: all(agent.poll() is not None for agent in cluster.agents.values())  # noqa: E731
        cluster.watch(ended, "the agents' end", 240, stalled=240)
        cluster.wait_end()
    lines = [json.loads(line) for path in folder.glob("notes-*.jsonl") for line in path.read_text().splitlines()]
    return {line["step"]: line for line in lines if line["what"] == "step" and line["rank"] == 0}
