"""Finds the best parallel configuration for every number of workers at once.

All combinations of TP, PP, interleaving, micro-batch, recomputation and DP that divide evenly are laid out as arrays.
Combinations that do not fit in memory are dropped, and the fastest is kept for each number of workers. The number of
combinations depends on the divisors of the model's sizes and of the global batch, not on the size of the cluster.

Candidates:

* TP divides the heads, the groups of keys and values (or they divide it), the feed-forward width, and the accelerators
  of a node: it never leaves a node.
* PP divides the layers; v groups per stage divide its layers again, and p then divides m (Narayanan et al. 2021, 2.2).
* DP x b divides the global batch. With ``uneven_shares`` some copies have one micro-batch less, as with this package's
  strategy; the copies with most micro-batches then determine the duration of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from unicron_lightning.planner.performance.cluster import Hardware
from unicron_lightning.planner.performance.layouts import RECOMPUTE, FloatArray, IntArray, Layouts
from unicron_lightning.planner.performance.recipe import Recipe
from unicron_lightning.planner.performance.shape import ModelShape
from unicron_lightning.planner.performance.timing import step_seconds
from unicron_lightning.planner.performance.worker_memory import worker_bytes


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Configurations to try: all TP, PP and interleavings that divide, with these choices.

    Attributes:
        micro_batch_sizes: samples in a micro-batch.
        recompute: some of ``none``, ``selective``, ``full``.
        uneven_shares: whether DP need not divide the global batch.

    Raises:
        ValueError: no micro-batch size is given or one is below 1, or a recomputation is unknown.
    """

    micro_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    recompute: tuple[str, ...] = RECOMPUTE
    uneven_shares: bool = False

    def __post_init__(self) -> None:
        if not self.micro_batch_sizes or min(self.micro_batch_sizes) < 1:
            raise ValueError(f"micro_batch_sizes={self.micro_batch_sizes!r}: expected whole numbers of at least 1")
        if not self.recompute or any(choice not in RECOMPUTE for choice in self.recompute):
            raise ValueError(f"recompute={self.recompute!r}: expected some of {', '.join(RECOMPUTE)}")


@dataclass(frozen=True, kw_only=True)
class BestConfigurations:
    """The best configuration for each number of workers that has one.

    Attributes:
        num_workers: rising, each once.
        step_seconds: of the best configuration with exactly that many.
        memory_bytes: of its fullest worker.
        layouts: the configurations.
    """

    num_workers: IntArray
    step_seconds: FloatArray
    memory_bytes: FloatArray
    layouts: Layouts


def search(
    shape: ModelShape, cluster: Hardware, recipe: Recipe, space: SearchSpace, global_batch_size: int
) -> BestConfigurations:
    """Find the best configurations of a task, over all numbers of workers.

    Among equally fast ones the order of the search decides: less PP, less TP, less interleaving, less recomputation,
    larger micro-batches (fewer kernels, which the formulas do not charge for).
    """
    parts: list[tuple[Layouts, FloatArray, FloatArray]] = []
    for layouts in _candidates(shape, cluster, recipe, space, global_batch_size):
        memory = worker_bytes(shape, recipe, layouts)
        fits = memory <= cluster.usable_bytes
        layouts, memory = layouts.at(fits), memory[fits]
        seconds = step_seconds(shape, cluster, recipe, layouts).total
        best = _best_per_count(layouts.num_workers, seconds)
        parts.append((layouts.at(best), seconds[best], memory[best]))
    layouts = Layouts.concatenate([part[0] for part in parts])
    seconds = np.concatenate([part[1] for part in parts])
    memory = np.concatenate([part[2] for part in parts])
    best = _best_per_count(layouts.num_workers, seconds)
    layouts = layouts.at(best)
    return BestConfigurations(
        num_workers=layouts.num_workers, step_seconds=seconds[best], memory_bytes=memory[best], layouts=layouts
    )


def _best_per_count(num_workers: IntArray, seconds: FloatArray) -> IntArray:
    """Indices of the fastest configuration of each count, by rising count; among equally fast ones the first."""
    # A stable sort lets the search's order decide among equals; single precision removes differences by rounding.
    order = np.lexsort((seconds.astype(np.float32), num_workers))
    _, first = np.unique(num_workers[order], return_index=True)
    return order[first].astype(np.int64)


def _candidates(
    shape: ModelShape, cluster: Hardware, recipe: Recipe, space: SearchSpace, global_batch_size: int
) -> Iterator[Layouts]:
    """Candidates, one PP at a time to bound the memory of the arrays."""
    batches = np.array(list(_batches(space, global_batch_size)), dtype=np.int64).reshape(-1, 3)
    # Fused attention never keeps the tensors that `selective` would recompute, which makes it equal to `none`.
    skipped = "selective" if recipe.fused_attention and "none" in space.recompute else ""
    choices = [choice for choice in RECOMPUTE if choice in space.recompute and choice != skipped]
    recompute = np.array([RECOMPUTE.index(choice) for choice in choices], dtype=np.int64)
    tensor = np.array(_tensor_degrees(shape, cluster), dtype=np.int64)
    for p in _divisors(shape.num_layers):
        interleave = np.array([v for v in _divisors(shape.num_layers // p) if p > 1 or v == 1], dtype=np.int64)
        grid = np.meshgrid(tensor, interleave, recompute, np.arange(len(batches)), indexing="ij")
        t, v, again, batch = (axis.ravel() for axis in grid)
        b, d, m = batches[batch].T
        yield Layouts(
            tensor=t,
            pipeline=np.full_like(t, p),
            data=d,
            micro_batch=b,
            num_micro_batches=m,
            interleave=v,
            recompute=again,
        ).at((v == 1) | (m % p == 0))


def _tensor_degrees(shape: ModelShape, cluster: Hardware) -> list[int]:
    kv = shape.kv_heads
    return [
        t
        for t in _divisors(cluster.accelerators_per_node)
        if shape.num_heads % t == 0 and shape.ffn % t == 0 and (kv % t == 0 or t % kv == 0)
    ]


def _batches(space: SearchSpace, global_batch_size: int) -> Iterator[tuple[int, int, int]]:
    """(b, d, m): micro-batch size, copies, and micro-batches of the copy with most micro-batches."""
    for b in sorted(space.micro_batch_sizes, reverse=True):
        if global_batch_size % b:
            continue
        micro_batches = global_batch_size // b
        copies = range(1, micro_batches + 1) if space.uneven_shares else _divisors(micro_batches)
        # More copies with equally many micro-batches each are no faster, but divide the optimizer's state further.
        yield from ((b, d, -(-micro_batches // d)) for d in copies)


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
