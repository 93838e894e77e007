"""The interface between the planner and any model of a task's speed.

A performance model provides T(t,x) of "Unicron", arXiv 2401.00134: the achieved aggregate FLOP/s of task t on x workers
in the best parallel configuration for that x. The planner uses no other information about a task's speed.

Every model guarantees:

* ``throughput`` is finite and never negative; it is 0.0 at 0 workers and wherever the task cannot run;
* equal calls return equal results as long as no measurement is added in between: a model is called many times for one
  plan.

No model guarantees that more workers are faster: a task that can use 8 or 16 but not 12 workers has T(12) = 0, unless
the model is configured to leave workers idle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class ParallelConfiguration:
    """Distribution of a task over its workers.

    Attributes:
        tensor_parallel: workers that share each layer (TP).
        pipeline_parallel: stages that the layers are divided into (PP).
        data_parallel: copies of the model (DP).
        micro_batch_size: samples in one micro-batch of one copy.
        num_micro_batches: micro-batches that each copy computes per step (m).
        interleave: groups of layers per stage (v), 1 without the interleaved schedule.
        recompute: activations recomputed in the backward pass: ``none``, ``selective`` or ``full``.
        memory_bytes: memory needed by the fullest worker, 0 if unknown.

    Raises:
        ValueError: a degree is below 1, or ``recompute`` is unknown.
    """

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    micro_batch_size: int
    num_micro_batches: int = 1
    interleave: int = 1
    recompute: str = "none"
    memory_bytes: int = 0

    def __post_init__(self) -> None:
        sizes = ("tensor_parallel", "pipeline_parallel", "data_parallel")
        for name in (*sizes, "micro_batch_size", "num_micro_batches", "interleave"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")
        if self.recompute not in ("none", "selective", "full"):
            raise ValueError(f"recompute={self.recompute!r}: expected 'none', 'selective' or 'full'")
        if self.memory_bytes < 0:
            raise ValueError(f"memory_bytes={self.memory_bytes!r}: expected 0 or more")

    @property
    def num_workers(self) -> int:
        """Computing workers: TP x PP x DP. Fewer than the task has if it leaves some idle."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


@runtime_checkable
class PerformanceModel(Protocol):
    """T(t,x) of one task."""

    def throughput(self, num_workers: int) -> float:
        """T(t,x): achieved aggregate FLOP/s on ``num_workers`` accelerators, 0.0 where the task cannot run.

        Raises:
            ValueError: ``num_workers`` is negative.
        """
        ...

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        """The best configuration on ``num_workers`` accelerators, None if unknown or if the task cannot run."""
        ...

    def uncertainty(self, num_workers: int) -> float:
        """Relative standard error of ``throughput(num_workers)``: 0.0 if taken as given, inf without any
        information.
        """
        ...


def check_num_workers(num_workers: int) -> None:
    """Reject a negative number of workers.

    Raises:
        ValueError: the number is negative.
    """
    if num_workers < 0:
        raise ValueError(f"num_workers={num_workers!r}: expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class SublinearModel:
    """A default performance model, also used as the prior of a `CalibratedModel`.

    Attributes:
        rate: FLOP/s of one worker, > 0.
        num_parts: M, None for arbitrarily divisible work; need not be an integer (parts per worker of a group).
        exponent: 0 (more workers add nothing) to 1 (each adds as much as the first).
        relative_error: result of `uncertainty`.

    Raises:
        ValueError: a value is out of range.
    """

    rate: float = 1.0
    num_parts: float | None = None
    exponent: float = 0.95
    relative_error: float = 0.3

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"rate={self.rate!r}: expected FLOP/s, a finite number > 0")
        if self.num_parts is not None and not self.num_parts > 0:
            raise ValueError(f"num_parts={self.num_parts!r}: expected a number > 0, or None")
        if not 0 <= self.exponent <= 1:
            raise ValueError(f"exponent={self.exponent!r}: expected 0 to 1")
        if not (math.isfinite(self.relative_error) and self.relative_error >= 0):
            raise ValueError(f"relative_error={self.relative_error!r}: expected a finite number, 0 or more")

    def throughput(self, num_workers: int) -> float:
        check_num_workers(num_workers)
        return self.rate * self._useful(num_workers) ** self.exponent if num_workers else 0.0

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        check_num_workers(num_workers)
        return None

    def uncertainty(self, num_workers: int) -> float:
        check_num_workers(num_workers)
        return self.relative_error if num_workers else 0.0

    def _useful(self, num_workers: int) -> float:
        if self.num_parts is None:
            return num_workers
        return min(num_workers, self.num_parts / math.ceil(self.num_parts / num_workers))
