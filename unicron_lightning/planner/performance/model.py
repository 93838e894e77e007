"""The seam between the planner and whatever knows how fast a task runs.

A performance model says T(t,x) of "Unicron", arXiv 2401.00134: the achieved aggregate FLOP/s of task t on x workers in
the best parallel configuration for that x. The planner asks nothing else of a task's speed.

What every model guarantees:

* ``throughput`` is finite and never negative; it is 0.0 at 0 workers and wherever the task cannot run;
* the same question has the same answer as long as nothing was measured in between: a model is asked many times while a
  plan is made.

What no model promises is that more workers are faster: a task that can use 8 or 16 but not 12 has T(12) = 0, unless the
model was told that the task may leave workers idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class ParallelConfiguration:
    """How a task is spread over its workers.

    Attributes:
        tensor_parallel: workers that share each layer (TP).
        pipeline_parallel: stages that the layers are divided into (PP).
        data_parallel: copies of the model (DP).
        micro_batch_size: samples in one micro-batch of one copy.
        num_micro_batches: micro-batches that each copy computes per step (m).
        interleave: groups of layers per stage (v), 1 without the interleaved schedule.
        recompute: what is computed again in the backward pass: ``none``, ``selective`` or ``full``.
        memory_bytes: what the fullest worker needs, 0 where it is not known.

    Raises:
        ValueError: a degree below 1, or an unknown ``recompute``.
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
        """Workers that compute: TP x PP x DP. Fewer than the task was given if it leaves some idle."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.data_parallel * self.num_micro_batches * self.micro_batch_size


@runtime_checkable
class PerformanceModel(Protocol):
    """T(t,x) of one task."""

    def throughput(self, num_workers: int) -> float:
        """T(t,x): achieved aggregate FLOP/s on ``num_workers`` accelerators, 0.0 where it cannot run.

        Raises:
            ValueError: ``num_workers`` is negative.
        """
        ...

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        """The best configuration on ``num_workers`` accelerators, None where it is not known or the task cannot run."""
        ...

    def uncertainty(self, num_workers: int) -> float:
        """Relative standard error of ``throughput(num_workers)``: 0.0 if taken as given, inf if nothing is known."""
        ...


def check_num_workers(num_workers: int) -> None:
    """Refuse a number of workers that cannot be.

    Raises:
        ValueError: it is negative.
    """
    if num_workers < 0:
        raise ValueError(f"num_workers={num_workers!r}: expected 0 or more")
