"""T(t,x) of a transformer on a described cluster, from formulas: the model for a task without measurements."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from unicron_lightning.planner.performance.cluster import Hardware
from unicron_lightning.planner.performance.layouts import FloatArray
from unicron_lightning.planner.performance.model import ParallelConfiguration, check_num_workers
from unicron_lightning.planner.performance.recipe import MEGATRON_CORE, Recipe
from unicron_lightning.planner.performance.search import BestConfigurations, SearchSpace, search
from unicron_lightning.planner.performance.shape import ModelShape

# Root mean square of the relative errors of free search against published runs that no constant was fitted to, rounded
# up (benchmarks/planner_model.py prints them). With the published configurations it is 0.07: most of the error is the
# choice of a better configuration than was run, and software that is older than the recipe.
RELATIVE_ERROR = 0.27

# Part of a step's time that each doubling of the number of nodes adds: stragglers, contention in the network, and what
# else the formulas leave out. Mean of published / predicted - 1 per doubling over free search on the MegaScale runs on
# A100 and NVIDIA's bf16 runs of 175B on H100 (0.026 and 0.006; tests/planner/performance/published.py).
SCALING_LOSS = 0.02


@dataclass(frozen=True, kw_only=True)
class TransformerModel:
    """The best throughput of a task with x workers, by search over its parallel configurations.

    The search runs once for all x, at the first call.

    Attributes:
        shape: the trained model.
        cluster: the machines.
        global_batch_size: B, samples per optimizer step; the same for all x.
        recipe: the training method and its efficiency.
        space: the configurations to try.
        may_idle: whether the task may leave some of its x workers idle. Then T never falls with x; otherwise T is 0
            where no configuration takes exactly x workers.
        scaling_loss: part of a step's time that each doubling of the number of nodes adds to the formulas.

    Raises:
        ValueError: the batch or the loss is out of range, or the cluster has no figure for the precision.
    """

    shape: ModelShape
    cluster: Hardware
    global_batch_size: int
    recipe: Recipe = MEGATRON_CORE
    space: SearchSpace = field(default_factory=SearchSpace)
    may_idle: bool = True
    scaling_loss: float = SCALING_LOSS

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size={self.global_batch_size!r}: expected a whole number of at least 1")
        if not (math.isfinite(self.scaling_loss) and self.scaling_loss >= 0):
            raise ValueError(f"scaling_loss={self.scaling_loss!r}: expected a finite number, 0 or more")
        for precision in (self.recipe.precision, self.recipe.attention_precision):
            self.cluster.peak(precision)

    @property
    def step_flops(self) -> int:
        """The model's FLOPs of one optimizer step; T x duration of a step."""
        return self.shape.step_flops(self.global_batch_size)

    def throughput(self, num_workers: int) -> float:
        index = self._index(num_workers)
        return 0.0 if index is None else float(self._throughput[index])

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        index = self._index(num_workers)
        return None if index is None else self._best.layouts.configuration(index, int(self._best.memory_bytes[index]))

    def uncertainty(self, num_workers: int) -> float:
        check_num_workers(num_workers)
        return RELATIVE_ERROR

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of workers at which T changes, rising."""
        return tuple(int(count) for count in self._best.num_workers)

    @cached_property
    def _best(self) -> BestConfigurations:
        """The best configuration for each count; if workers may idle, only counts that beat all smaller ones."""
        found = search(self.shape, self.cluster, self.recipe, self.space, self.global_batch_size)
        nodes = np.maximum(1.0, found.num_workers / self.cluster.accelerators_per_node)
        slower = found.step_seconds * (1 + self.scaling_loss * np.log2(nodes))
        found = dataclasses.replace(found, step_seconds=slower)
        if not self.may_idle or not len(found.num_workers):
            return found
        record = np.minimum.accumulate(found.step_seconds)
        better = np.concatenate([[True], found.step_seconds[1:] < record[:-1]])
        return BestConfigurations(
            num_workers=found.num_workers[better],
            step_seconds=found.step_seconds[better],
            memory_bytes=found.memory_bytes[better],
            layouts=found.layouts.at(better),
        )

    @cached_property
    def _throughput(self) -> FloatArray:
        return self.step_flops / self._best.step_seconds

    def _index(self, num_workers: int) -> int | None:
        """Index in `_best` for ``num_workers``."""
        check_num_workers(num_workers)
        counts = self._best.num_workers
        index = int(np.searchsorted(counts, num_workers, side="right")) - 1
        if index < 0 or (not self.may_idle and counts[index] != num_workers):
            return None
        return index
