"""Many parallel configurations as arrays, so that the formulas of memory and time evaluate them all at once."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from unicron_lightning.planner.performance.model import ParallelConfiguration
from unicron_lightning.planner.performance.shape import Recompute

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Parallel configurations as integer arrays of one length.

    Attributes:
        tensor: TP, t.
        pipeline: PP, p.
        data: DP, d.
        micro_batch: samples in a micro-batch, b.
        num_micro_batches: per step, of the copy with most micro-batches, m.
        interleave: groups of layers per stage, v.
        recompute: index into `RECOMPUTE`.
    """

    tensor: IntArray
    pipeline: IntArray
    data: IntArray
    micro_batch: IntArray
    num_micro_batches: IntArray
    interleave: IntArray
    recompute: IntArray

    @property
    def num_workers(self) -> IntArray:
        """TP x PP x DP."""
        return self.tensor * self.pipeline * self.data

    def __len__(self) -> int:
        return len(self.tensor)

    def at(self, index: IntArray | BoolArray | slice) -> Layouts:
        """The configurations selected by ``index``."""
        return Layouts(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def configuration(self, index: int, memory_bytes: int) -> ParallelConfiguration:
        """One configuration in the form that the planner uses."""
        return ParallelConfiguration(
            tensor_parallel=int(self.tensor[index]),
            pipeline_parallel=int(self.pipeline[index]),
            data_parallel=int(self.data[index]),
            micro_batch_size=int(self.micro_batch[index]),
            num_micro_batches=int(self.num_micro_batches[index]),
            interleave=int(self.interleave[index]),
            recompute=RECOMPUTE[int(self.recompute[index])],
            memory_bytes=memory_bytes,
        )

    @staticmethod
    def concatenate(parts: list[Layouts]) -> Layouts:
        """All of the parts' configurations, in order."""
        return Layouts(
            **{
                field.name: np.concatenate([getattr(part, field.name) for part in parts], dtype=np.int64)
                for field in fields(Layouts)
            }
        )
