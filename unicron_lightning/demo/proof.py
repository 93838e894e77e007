"""Proofs from the diaries and results: pure functions over their lines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

ProofLine = dict[str, Any]
"""A line of a worker's diary: an event, its time, its process, and what it is about."""


def micro_batches(lines: Iterable[ProofLine]) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """The processes that computed each micro-batch, in the diary's order, by its step and samples."""
    workers: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for line in lines:
        if line["event"] == "micro_batch":
            workers[line["step"], tuple(line["samples"])].append(line["pid"])
    return workers


def wasted(lines: Iterable[ProofLine], dead: set[int]) -> int:
    """Number of micro-batches that were recomputed although a worker that had finished them survived."""
    return sum(any(pid not in dead for pid in pids[:-1]) for pids in micro_batches(lines).values())


@dataclass(frozen=True, kw_only=True)
class WorkProof:
    """Micro-batches of a run.

    Attributes:
        needed: in all steps.
        computed: forward passes run.
        recomputed: computed by more than one worker, because the first died.
        wasted: recomputed although the worker that had computed it survived; must be 0.
        lost_samples, repeated_samples: per epoch, of the data set; must be 0.
    """

    needed: int
    computed: int
    recomputed: int
    wasted: int
    lost_samples: int
    repeated_samples: int


def prove_work(diary: Sequence[ProofLine], dead: set[int], steps_per_epoch: int) -> WorkProof:
    """Account for every micro-batch and sample.

    Args:
        diary: all lines of all workers.
        dead: processes that were killed.
        steps_per_epoch: optimizer steps in an epoch.
    """
    workers = micro_batches(diary)
    used: dict[int, Counter[int]] = defaultdict(Counter)
    for step, samples in workers:
        used[step // steps_per_epoch].update(samples)
    every = set().union(*(set(counts) for counts in used.values()))
    return WorkProof(
        needed=len(workers),
        computed=sum(map(len, workers.values())),
        recomputed=sum(len(pids) > 1 for pids in workers.values()),
        wasted=wasted(diary, dead),
        lost_samples=sum(len(every - set(counts)) for counts in used.values()),
        repeated_samples=sum(count - 1 for counts in used.values() for count in counts.values() if count > 1),
    )


def loss_curve(diary: Iterable[ProofLine]) -> dict[int, float]:
    """Loss by step, which is the same on all workers."""
    return {line["step"]: line["loss"] for line in diary if line["event"] == "step"}


def worlds(diary: Iterable[ProofLine]) -> dict[int, int]:
    """Workers by step."""
    return {line["step"]: line["world"] for line in diary if line["event"] == "step"}


def step_times(diary: Iterable[ProofLine]) -> list[float]:
    """Time at which each step was first recorded as finished, in order."""
    first: dict[int, float] = {}
    for line in diary:
        if line["event"] == "step":
            first[line["step"]] = min(line["at"], first.get(line["step"], line["at"]))
    return sorted(first.values())


def longest_gap(times: Sequence[float], start: float, stop: float) -> float:
    """Longest time without a finished step that overlaps [start, stop], in seconds."""
    gaps = [b - a for a, b in pairwise(times) if b >= start and a <= stop]
    return max(gaps, default=0.0)


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """Comparison of a run's final parameters with those of a reference.

    Attributes:
        largest_difference: over all parameters.
        identical: whether the run's own workers ended with bitwise equal parameters.
        losses: largest difference of the loss curves.
        val_losses: of the two runs.
    """

    largest_difference: float
    identical: bool
    losses: float
    val_losses: tuple[float, float]


def prove_exactness(run: Path, reference: Path, curves: tuple[dict[int, float], dict[int, float]]) -> Exactness:
    """Compare the results that the workers of two runs have saved."""
    mine = [torch.load(path) for path in sorted(run.glob("final-*.pt"))]
    other = torch.load(min(reference.glob("final-*.pt")))
    first = mine[0]["parameters"]
    differences = [
        float((first[name].double() - value.double()).abs().max()) for name, value in other["parameters"].items()
    ]
    identical = all(torch.equal(first[name], result["parameters"][name]) for result in mine for name in first)
    assert curves[0].keys() == curves[1].keys(), "the runs have different steps"
    return Exactness(
        largest_difference=max(differences),
        identical=identical,
        losses=max(abs(curves[0][step] - curves[1][step]) for step in curves[0]),
        val_losses=(mine[0]["val_loss"], other["val_loss"]),
    )


def report(console: Console, checks: Sequence[tuple[str, bool]]) -> bool:
    """Print each claim with its outcome; return whether all hold."""
    for text, passed in checks:
        console.print(f"[{'green' if passed else 'bold red'}]{'ok  ' if passed else 'FAIL'}[/] {text}")
    return all(passed for _, passed in checks)
