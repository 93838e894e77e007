"""Whether a run of tests/megatron/train.py has recovered, and whether it equals that of a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from system.cluster import Cluster
from system.megatron import VALIDATED, differences, finals, notes


def healed(cluster: Cluster, folder: Path, number: int) -> bool:
    """Whether all faults have struck, and the newest step of the newest world was one of all replicas."""
    struck = all((folder / f"struck-{fault}").exists() for fault in range(number))
    world = cluster.world() if struck else []
    last = max((note["at"] for note in cluster.notes("fault")), default=0.0)
    return bool(world) and all(note["replicas"] == 2 and note["at"] > last for note in world)


def check(folder: Path, model: dict[str, Any], worlds: Any) -> None:
    """Every worker's parameters, and each step's norm, are those of a plain Megatron loop."""
    step, paths = finals(folder)
    world = model["tp"] * model["pp"] * model["dp"]
    assert len(paths) == world
    norms = worlds.run("reference:run", world, folder / "plain", settings=model, steps=[step])[0]
    logged = {note["step"]: note["norm"] for note in notes(folder, "step")}
    close = 1e-5 if model["optimizer"] else 0.0
    assert [logged[number] for number in range(step)] == pytest.approx(norms, rel=close, abs=0.0)
    assert set(differences(paths, folder / "plain").values()) == {0.0}


def check_validation(folder: Path) -> None:
    """After `check`: each validation gave the plain loop's value everywhere, with each sample once; the best
    was kept.
    """
    told = notes(folder, "validated")
    assert sum(note["ran"] for note in told if note["sanity"] and note["shard"] == 1) == 2  # one for each replica
    expected = {path.name.split("-")[2]: float(path.read_text()) for path in (folder / "plain").glob("validation-*")}
    values: dict[str, set[float]] = {step: set() for step in expected}
    for note in told:
        if not note["sanity"]:
            assert note["samples"] == VALIDATED
            values[str(note["step"])].add(note["val_loss"])
    assert all(len(found) == 1 for found in values.values())
    assert {step: next(iter(found)) for step, found in values.items()} == pytest.approx(expected, rel=1e-6)
    best = min(expected, key=lambda step: expected[step])
    assert [path.name for path in (folder / "best").iterdir()] == [f"step={best}.ckpt"]
