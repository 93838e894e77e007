"""Compares what two runs of a case have recorded: lists of differences, by kind."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch
from matrix.features import Case, is_documented

Results = list[dict[str, Any]]
"""What each rank has recorded."""
TOLERANCE: Final = 2e-5
HALF_TOLERANCE: Final = 2e-2
"""For bf16, where evaluation batches are rounded one by one."""


def load(folder: Path, name: str) -> Results:
    """All ranks' records of a case."""
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob(f"{name}-[0-9].pt"))]


def differences(case: Case, mine: Results, theirs: Results) -> dict[str, str]:
    """What differs, and isn't documented: a kind of record and its first difference."""
    if not mine or not theirs:
        return {"exit": f"{len(mine)} and {len(theirs)} ranks have come to the end"}
    tolerance = HALF_TOLERANCE if case["precision"].startswith("bf16") else TOLERANCE
    found = {}
    for what in ("state", "hooks", "logged", "metrics", "counters", "checkpoints"):
        said = _differ(_plain(what, mine[0][what]), _plain(what, theirs[0][what]), tolerance)
        if said and not is_documented(what, case):
            found[what] = said
    if said := _differ(_batches(mine), _batches(theirs), 1e-6):
        found["batches"] = said
    return found


def _plain(what: str, record: Any) -> Any:
    if what == "hooks":  # validation batches are counted per rank
        return [call for call in record if "validation_batch" not in call[0]]
    return record


def _batches(results: Results) -> Any:
    """Samples of each step, over all ranks."""
    steps: dict[int, Counter[float]] = {}
    for result in results:
        for step, samples in result["batches"]:
            steps.setdefault(step, Counter()).update(round(value, 5) for value in samples)
    return {step: sorted(samples.elements()) for step, samples in steps.items()}


def _differ(mine: Any, theirs: Any, tolerance: float, where: str = "") -> str:
    """The first difference, or nothing."""
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"{where}: {mine.shape} {mine.dtype} and {theirs.shape} {theirs.dtype}"
        same = torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance)
        return "" if same else f"{where}: differ by {float((mine - theirs).abs().max()):.2g}"
    if isinstance(mine, dict) and isinstance(theirs, dict):
        if mine.keys() != theirs.keys():
            return f"{where}: {sorted(mine.keys() ^ theirs.keys(), key=str)} in one only"
        pairs = [(f"{where}.{key}", value, theirs[key]) for key, value in mine.items()]
    elif isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(mine, theirs, strict=False))]
        pairs.append((f"{where}.length", len(mine), len(theirs)))
    elif isinstance(mine, float) and isinstance(theirs, float | int):
        return "" if math.isclose(mine, theirs, rel_tol=tolerance, abs_tol=tolerance) else f"{where}: {mine}, {theirs}"
    else:
        return "" if mine == theirs else f"{where}: {mine!r} and {theirs!r}"
    return next((said for place, a, b in pairs if (said := _differ(a, b, tolerance, place))), "")
