"""The tasks of a cluster: their speed by size, arrival and departure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unicron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from unicron_lightning.planner.performance.model import PerformanceModel


@dataclass(frozen=True, kw_only=True)
class SimTask:
    """A task.

    Attributes:
        name: unique.
        performance: T(t,x) by number of workers (accelerators), FLOP/s.
        flops_per_step: FLOPs of one optimizer step of the whole task; a step at x workers takes this / T(t,x).
        weight: w(t).
        min_workers: fewest with which it may run.
        max_workers: most that it can use; None: all.
        quantum: number that its workers are a multiple of (TP x PP, or a node's); workers beyond a multiple stand idle.
        micro_batches: M, of a step.
        arrival: seconds from the beginning; 0: it runs already when the trace begins.
        departure: time of its end, whatever its progress; None: never.
        steps: optimizer steps after which it ends; None: never.
        state_gigabytes: parameters and optimizer state of a replica; None: unknown, and transfers take what costs say.

    Raises:
        ConfigError: a value out of its range.
    """

    name: str
    performance: PerformanceModel
    flops_per_step: float
    weight: float = 1.0
    min_workers: int = 1
    max_workers: int | None = None
    quantum: int = 1
    micro_batches: int = 1024
    arrival: float = 0.0
    departure: float | None = None
    steps: float | None = None
    state_gigabytes: float | None = None

    def __post_init__(self) -> None:
        for name in ("flops_per_step", "weight", "min_workers", "quantum", "micro_batches"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"task {self.name!r}: {name}={value!r}: expected a number > 0")
        if not (math.isfinite(self.arrival) and self.arrival >= 0):
            raise ConfigError(f"task {self.name!r}: arrival={self.arrival!r}: expected seconds, 0 or more")
        if self.departure is not None and not self.departure > self.arrival:
            given = f"departure={self.departure!r}"
            raise ConfigError(f"task {self.name!r}: {given}: expected seconds after arrival={self.arrival!r}")
        for name in ("steps", "state_gigabytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"task {self.name!r}: {name}={value!r}: expected a number > 0")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            given = f"max_workers={self.max_workers!r}"
            raise ConfigError(f"task {self.name!r}: {given}: expected at least min_workers={self.min_workers}")

    def throughput(self, num_workers: int) -> float:
        """Return FLOP/s with a number of workers, rounded down to whole quanta; 0.0 below its minimum."""
        if self.max_workers is not None:
            num_workers = min(num_workers, self.max_workers)
        usable = num_workers // self.quantum * self.quantum
        return self.performance.throughput(usable) if usable >= self.min_workers else 0.0

    def layout(self, num_workers: int) -> tuple[int, int] | None:
        """Return TP and PP with a number of workers; None if unknown, or below its minimum."""
        if self.max_workers is not None:
            num_workers = min(num_workers, self.max_workers)
        usable = num_workers // self.quantum * self.quantum
        found = self.performance.configuration(usable) if usable >= self.min_workers else None
        return None if found is None else (found.tensor_parallel, found.pipeline_parallel)

    def step_seconds(self, num_workers: int) -> float:
        """Return the seconds of one optimizer step; inf if it cannot run."""
        rate = self.throughput(num_workers)
        return self.flops_per_step / rate if rate else math.inf
