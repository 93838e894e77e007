"""Whether a run of tests/megatron/train.py has recovered, and whether it equals that of a plain loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from system.cluster import Cluster
from system.megatron import STREAMED, VALIDATED, differences, differing_replicas, finals, notes


def healed(cluster: Cluster, folder: Path, number: int) -> bool:
    """Whether all faults have struck, and the newest step of the newest world was one of all replicas."""
    struck = all((folder / f"struck-{fault}").exists() for fault in range(number))
    world = cluster.world() if struck else []
    last = max((note["at"] for note in cluster.notes("fault")), default=0.0)
    return bool(world) and all(note["replicas"] == 2 and note["at"] > last for note in world)


def check(
    folder: Path, model: dict[str, Any], worlds: Any, within: float = 0.0, *, replicas: int | None = None
) -> None:
    """Every worker's parameters, and each step's norm, are those of a plain Megatron loop, within a difference; those
    of replicas are equal bit by bit.

    Args:
        folder: of the run.
        model: its settings that the reference needs.
        worlds: runs the plain loop.
        within: largest difference of a parameter.
        replicas: that have ended; None: the declared ones.
    """
    step, paths = finals(folder)
    size = model["tp"] * model["pp"] * max(model.get("cp", 1), model.get("ep", 1))
    world = size * model["dp"]
    assert len(paths) == size * (replicas or model["dp"])
    norms = worlds.run("reference:run", world, folder / "plain", settings=model, steps=[step])[0]
    logged = {note["step"]: note["norm"] for note in notes(folder, "step")}
    close = 1e-5 if model["optimizer"] or within else 0.0
    assert [logged[number] for number in range(step)] == pytest.approx(norms, rel=close, abs=0.0, nan_ok=True)
    assert max(differences(paths, folder / "plain").values()) <= within
    assert not differing_replicas(paths)


def check_validation(folder: Path, model: dict[str, Any]) -> None:
    """After `check`: each validation gave the plain loop's values everywhere, with each sample once; the best
    was kept.
    """
    told = notes(folder, "validated")
    judged = model.get("judged", VALIDATED)
    loaders = {"/dataloader_idx_0": STREAMED, "/dataloader_idx_1": judged} if model.get("stream") else {"": judged}
    ran = sum(note["ran"] for note in told if note["sanity"] and note["shard"] == 1)
    forwards = model.get("vpp", 1) * 2 * len(loaders)  # one batch for each replica
    repeated = forwards * model["pp"]  # the interleaved schedule has a batch for each stage at least
    assert ran in (forwards, repeated if model.get("vpp", 1) > 1 else forwards)
    paths = (folder / "plain").glob("validation-*")
    expected: dict[str, list[float]] = {path.name.split("-")[2]: json.loads(path.read_text()) for path in paths}
    values: dict[str, set[tuple[float, ...]]] = {step: set() for step in expected}
    for note in told:
        if not note["sanity"]:
            assert {name: note[f"samples{name}"] for name in loaders} == loaders
            values[str(note["step"])].add(tuple(note[f"val_loss{name}"] for name in loaders))
    assert all(len(found) == 1 for found in values.values())
    for step, found in values.items():
        assert next(iter(found)) == pytest.approx(expected[step], rel=1e-6)
    best = min(expected, key=lambda step: expected[step][0])
    assert [path.name for path in (folder / "best").iterdir()] == [f"step={best}.ckpt"]
