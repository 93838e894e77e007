"""Compares what two runs of a case have recorded, by kind of record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from matrix.documented import DOCUMENTED, Documented
from matrix.features import Case

TOLERANCE: Final = 2e-5
HALF_TOLERANCE: Final = 2e-2
"""For bf16: sums in another order differ in the last digit of 32, which moves weights across a rounding edge of 16."""
ARRIVING: Final = ("on_train_epoch_start",)
"""The last hook of a replacement before its first step."""
KINDS: Final = ("state", "hooks", "logged", "table", "metrics", "evaluated", "counters", "checkpoints", "batches")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run of a case has recorded.

    Attributes:
        processes: the records of each process that came to the end, by rank.
        batches: the contents of batches, of all processes, by fit, stage and step.
    """

    processes: list[dict[str, Any]]
    batches: dict[str, list[list[float]]]

    @classmethod
    def load(cls, folder: Path, name: str) -> Run:
        """The run of a case in a folder."""
        paths = sorted(folder.glob(f"{name}-[0-9]-*.pt"))
        batches: dict[str, list[list[float]]] = {}
        for path in (folder / name).glob("batches-*.jsonl"):
            for line in path.read_text().splitlines():
                place, content = json.loads(line)
                batches.setdefault(place, []).append(content)
        return cls(processes=[torch.load(path, weights_only=False) for path in paths], batches=batches)


@dataclass
class Found:
    """The result of comparisons.

    Attributes:
        values: number of values compared.
        differences: kinds of record that differ at all, by process; and each one's first difference.
        unexplained: those that differ beyond what is documented.
        occurred: names of the documented differences that have been seen.
    """

    values: int = 0
    differences: dict[str, str] = field(default_factory=dict)
    unexplained: dict[str, str] = field(default_factory=dict)
    occurred: set[str] = field(default_factory=set)


def compare(case: Case, world: str, mine: Run, theirs: Run) -> Found:
    """Compare a run under unicron in a world with one under ddp."""
    found = Found()
    expected = 1 if world == "one" else 2
    if len(mine.processes) != expected or len(theirs.processes) != 2:
        said = f"{len(mine.processes)} processes of {expected} have come to the end, under ddp {len(theirs.processes)}"
        found.differences["exit"] = found.unexplained["exit"] = said
        return found
    for rank, record in enumerate(mine.processes):
        for kind in KINDS[:-1]:
            # Under ddp the state of other ranks may differ from the one that is saved.
            other = theirs.processes[0 if world == "killed" or kind == "state" else rank]
            pair = _Pair(kind=kind, case=case, mine=record[kind], theirs=other[kind], replaces=record["replaces"])
            _compare_kind(found, f"rank {rank}: {kind}", world, pair)
    pair = _Pair(
        kind="batches", case=case, mine=_contents(mine, world), theirs=_contents(theirs, world), replaces=False
    )
    _compare_kind(found, "batches", world, pair)
    if world == "killed" and not any(record["replaces"] for record in mine.processes):
        found.unexplained["kill"] = found.differences["kill"] = "no worker was killed and replaced"
    return found


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """Two records of a kind; ``replaces``: mine is that of a replacement."""

    kind: str
    case: Case
    mine: Any
    theirs: Any
    replaces: bool

    def differ(self, without: list[Documented]) -> str:
        """The first difference beside those that are documented, or nothing."""
        mine, theirs = (_without(without, self.kind, each, self.case) for each in (self.mine, self.theirs))
        if self.replaces and self.kind == "hooks":  # what it has done as a member
            mine = mine[mine.index(ARRIVING) + 1 :]
        if self.replaces and self.kind in ("hooks", "logged"):
            theirs = theirs[len(theirs) - len(mine) :]
        return _differ(mine, theirs, HALF_TOLERANCE if self.case["precision"].startswith("bf16") else TOLERANCE)


def _compare_kind(found: Found, label: str, world: str, pair: _Pair) -> None:
    found.values += sum(1 for _ in _leaves(pair.mine))
    if not (said := pair.differ([])):
        return
    found.differences[label] = said
    known = [each for each in DOCUMENTED if each.applies(pair.kind, pair.case, world)]
    if said := pair.differ(known):
        found.unexplained[label] = said
    for each in known:
        if pair.differ([other for other in known if other is not each]):
            found.occurred.add(each.name)


def _without(known: list[Documented], kind: str, record: Any, case: Case) -> Any:
    for each in known:
        record = each.without(kind, record, case)
    return record


def _contents(run: Run, world: str) -> dict[str, Any]:
    """Batches by place; after a death some were computed twice, so that only their set is the same."""
    repeats = world == "killed"
    return {
        place: sorted(set(map(tuple, each))) if repeats else sorted(map(tuple, each))
        for place, each in run.batches.items()
    }


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


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
