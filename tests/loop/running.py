"""Runs the workers of this folder: in a process alone, and in worlds with deaths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from joins.running import SECONDS, Site, World, results

from unicron_lightning.local_cluster.processes import until

TOLERANCE = 1e-12
RECOVERING = ("exchange", "connect", "join")


def single(world: Site, folder: Path, module: str, name: str = "alone") -> dict[str, Any]:
    """Train in one process; return its result."""
    folder.mkdir(exist_ok=True)
    process = world.start_alone(folder / "log")
    process.start("alone", module, str(folder), name)
    try:
        until("the end", process.has_ended, SECONDS)
        codes = process.codes()
    finally:
        process.stop()
    assert codes == [0], (folder / "log" / "alone.log").read_text()
    found: dict[str, Any] = torch.load(folder / (name if name.startswith("alone") else "alone") / "result.pt")
    return found


def run(
    world: Site,
    name: str,
    module: str,
    history: list[tuple[int, int, str]],
    *,
    workers: int,
    least: int = 1,
    act: Callable[[World], None] | None = None,
) -> list[dict[str, Any]]:
    """Run a task's workers under a history of deaths; return their results."""
    folder = world.folder / name
    folder.mkdir(exist_ok=True)
    started = world.start_world(
        f"{module.replace('.', '-')}-{name}", folder / "agents", workers, least=least, restarts=6
    )
    (folder / "history.json").write_text(json.dumps(history))
    codes = started.run(module, str(folder), name, act=act)
    logs = "\n".join(path.read_text()[-3000:] for path in sorted((folder / "agents").glob("*.log")))
    assert set(codes) == {0}, f"{history} {codes}\n{logs}"
    assert not history or list(folder.glob("died-*")), f"{history}: nothing has died"
    found = results(folder)
    assert found
    return found


def check(found: dict[str, Any], alone: dict[str, Any]) -> None:
    """Compare what a worker has at the end with what one process has."""
    assert found["state"].keys() == alone["state"].keys()
    for key, value in alone["state"].items():
        assert torch.allclose(found["state"][key].double(), value.double(), rtol=TOLERANCE, atol=TOLERANCE), key
    assert [found.get(part) for part in ("step", "rate", "scale")] == [alone.get(p) for p in ("step", "rate", "scale")]
    assert torch.equal(found["random"], alone["random"])
    for part in ("losses", "evaluated"):
        assert found[part]
        for number, values in found[part].items():
            assert values == pytest.approx(alone[part][number], rel=TOLERANCE, abs=TOLERANCE), (part, number)
