"""The tasks of a cluster: their speed by size, arrival and departure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unicron_lightning.errors import ConfigError
from unicron_lightning.terms import Terms

if TYPE_CHECKING:
    from unicron_lightning.planner.performance.model import PerformanceModel


@dataclass(frozen=True, kw_only=True)
class SimTask:
    """A task.

    Attributes:
        name: unique.
        performance: T(t,x) by number of workers (accelerators), FLOP/s.
        flops_per_step: FLOPs of one optimizer step of the whole task; a step at x workers takes this / T(t,x).
        terms: the terms on which it competes; of the workers of its places, those beyond a multiple of the granularity
            stand idle.
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
    terms: Terms = field(default_factory=Terms)
    arrival: float = 0.0
    departure: float | None = None
    steps: float | None = None
    state_gigabytes: float | None = None

    def __post_init__(self) -> None:
        if (problem := self.terms.problem()) is not None:
            raise ConfigError(f"task {self.name!r}: {problem}")
        if not (math.isfinite(self.flops_per_step) and self.flops_per_step > 0):
            raise ConfigError(f"task {self.name!r}: flops_per_step={self.flops_per_step!r}: expected a number > 0")
        if not (math.isfinite(self.arrival) and self.arrival >= 0):
            raise ConfigError(f"task {self.name!r}: arrival={self.arrival!r}: expected seconds, 0 or more")
        if self.departure is not None and not self.departure > self.arrival:
            given = f"departure={self.departure!r}"
            raise ConfigError(f"task {self.name!r}: {given}: expected seconds after arrival={self.arrival!r}")
        for name in ("steps", "state_gigabytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"task {self.name!r}: {name}={value!r}: expected a number > 0")

    def throughput(self, num_workers: int) -> float:
        """Return FLOP/s with a number of workers, rounded down to those that it can use; 0.0 below its minimum."""
        usable = self.terms.usable(num_workers)
        return self.performance.throughput(usable) if usable else 0.0

    def layout(self, num_workers: int) -> tuple[int, int] | None:
        """Return TP and PP with a number of workers; None if unknown, or below its minimum."""
        usable = self.terms.usable(num_workers)
        found = self.performance.configuration(usable) if usable else None
        return None if found is None else (found.tensor_parallel, found.pipeline_parallel)
