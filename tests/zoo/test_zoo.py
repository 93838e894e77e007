"""Models that people train, each with a worker killed in the middle of a step: the parameters equal those of ddp."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from zoo.packages import FOLDER
from zoo.running import difference, train_killed, train_plainly

pytestmark = [pytest.mark.zoo, pytest.mark.faults, pytest.mark.timeout(600)]

EMA = {"model": "vision:Diffusion", "callbacks": ["average"]}
IDLE = {"model": "vision:Diffusion", "callbacks": ["scheduled"], "workers": 4, "declared": 2}
"""Steps of four micro-batches, then of two: two of the four workers are idle."""
CASES: dict[str, tuple[dict[str, Any], tuple[str, int, int], str]] = {
    "gan between backward and step": ({"model": "gan:Gan"}, ("optimizer", 5, 1), ""),
    "gan before a backward": ({"model": "gan:Gan"}, ("backward", 8, 0), ""),
    "gan without toggling": ({"model": "gan:Plain"}, ("backward", 11, 1), ""),
    "wasserstein gan": ({"model": "gan:Critic"}, ("optimizer", 6, 1), ""),
    "gradients over batches": ({"model": "gan:Accumulating"}, ("forward", 5, 1), ""),
    "actor and critic": ({"model": "rollouts:ActorCritic"}, ("optimizer", 9, 1), ""),
    "diffusion": ({"model": "vision:Diffusion"}, ("forward", 7, 1), ""),
    "diffusion, moving average": (EMA, ("forward", 7, 1), ""),
    "scheduled": (IDLE, ("forward", 2, 3), ""),
    "scheduled, busy": (IDLE, ("forward", 5, 1), ""),
    "scheduled, idle": (IDLE, ("optimizer", 6, 3), ""),
    "timm, transformer": ({"model": "images:transformer"}, ("forward", 5, 1), "timm"),
    "timm, residual network": ({"model": "images:residual"}, ("forward", 5, 0), "timm"),
    "torchvision, detector": ({"model": "images:detector", "passes": 2}, ("forward", 5, 1), "torchvision"),
    "gpt2": ({"model": "language:gpt2"}, ("forward", 5, 1), "transformers"),
    "llama": ({"model": "language:llama"}, ("forward", 5, 0), "transformers"),
    "llama, compiled": ({"model": "language:compiled"}, ("forward", 5, 1), "transformers"),
    "llama, lora": ({"model": "language:lora"}, ("forward", 5, 1), "peft"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_kill(name: str, tmp_path: Path) -> None:
    case, kill, package = CASES[name]
    if package and PathFinder.find_spec(package, [*sys.path, *FOLDER]) is None:
        pytest.skip(f"{package} is not installed")
    expected = train_plainly(tmp_path / "ddp", case, "ddp", case.get("declared", 2))[0]
    found = train_killed(tmp_path / "killed", case, kill)
    differences = [difference(each, expected) for each in found]
    print(f"{name}: largest difference {max(differences):.1e} in {len(found)} processes")
    assert max(differences) < 2e-5
