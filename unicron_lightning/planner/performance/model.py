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
        degrees = {
            "tensor_parallel": self.tensor_parallel,
            "pipeline_parallel": self.pipeline_parallel,
            "data_parallel": self.data_parallel,
            "micro_batch_size": self.micro_batch_size,
            "num_micro_batches": self.num_micro_batches,
            "interleave": self.interleave,
        }
        for name, value in degrees.items():
            if value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")
        if self.recompute not in ("none", "selective", "full"):
            raise ValueError(f"recompute={self.recompute!r}: expected 'none', 'selective' or 'full'")
        if self.memory_bytes < 0:
            raise ValueError(f"memory_bytes={self.memory_bytes!r}: expected 0 or more")

    @property
    def num_workers(self) -> int:
        """Computing workers: TP x PP x DP. Fewer than the task has if it leaves some idle."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.data_parallel * self.num_micro_batches * self.micro_batch_size


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
