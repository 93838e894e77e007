"""Judges finished runs of tests/fsdp/train.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).with_name("train.py")


def alone(folder: Path, settings: dict[str, Any], script: Path = SCRIPT) -> dict[str, Any]:
    """Train in one process, without an agent."""
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps(settings))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = torch.load(folder / "final-0-0.pt", weights_only=True)
    return result


def differences(folder: Path, reference: dict[str, Any]) -> dict[str, float]:
    """For each worker the largest difference of a parameter from the reference's."""
    found = {}
    for path in sorted(folder.glob("final-*.pt")):
        own = torch.load(path, weights_only=True)
        assert own["step"] == reference["step"]
        worst = 0.0
        for part, place, whole in zip(own["parameters"], own["places"], reference["parameters"], strict=True):
            expected = whole[tuple(slice(*along) for along in place)]
            assert part.shape == expected.shape
            worst = max(worst, float((part - expected).abs().max()) if part.numel() else 0.0)
        found[path.name] = worst
    return found


def notes(folder: Path, what: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for path in folder.glob("notes-*.jsonl") for line in path.read_text().splitlines()]
    return sorted((line for line in lines if line["what"] == what), key=lambda line: float(line["at"]))


def between_replicas(folder: Path) -> list[str]:
    """The final files of workers that differ from the first replica's worker of the same shard in any bit."""
    different = []
    for path in sorted(folder.glob("final-*.pt")):
        first = path.with_name(f"final-0-{path.stem.split('-')[2]}.pt")
        pairs = zip(*(torch.load(each, weights_only=True)["parameters"] for each in (path, first)), strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            different.append(path.name)
    return different
