"""The interface between the planner and any model of a task's speed.

A performance model provides T(t,x) of "Unicron", arXiv 2401.00134: the achieved aggregate FLOP/s of task t on x workers
in the best parallel configuration for that x. The planner uses no other information about a task's speed.

Every model guarantees:

* ``throughput`` is finite and never negative; it is 0.0 at 0 workers and wherever the task cannot run;
* equal calls return equal results as long as no measurement is added in between: a model is called many times for one
  plan.

No model guarantees that more workers are faster: a task that can use 8 or 16 but not 12 workers has T(12) = 0, unless
the model is configured to leave workers idle.

**A table of measurements** (`MeasuredTable`), as the user gives it. Its rules:

* At a measured count the table is taken as given.
* Between two counts, ``stair`` (the default) uses the smaller one's value: the task runs as measured and the other
  workers are idle. This is always possible, so nothing unmeasured is assumed. ``linear`` joins the points by straight
  lines, for a task that can use every count.
* Below the smallest count the task does not run: 0.
* Beyond the largest count, more workers add nothing, in either mode. ``beyond="extend"`` extends the line through the
  last two points instead; ``uncertainty`` is then inf, since nothing was measured there.

A table need not rise: a measured fall is kept. `unicron_lightning.planner.performance.model` reads tables from text.

**Its rows**, from text or loaded values; the caller opens files. Exactly one of the four speed columns is given:

| column | meaning |
|---|---|
| ``workers`` | accelerators, at least 1 |
| ``flops_per_second`` | achieved aggregate FLOP/s |
| ``tflops_per_second`` | the same in units of 1e12 |
| ``tflops_per_worker`` | 1e12 FLOP/s of each worker |
| ``step_seconds`` | duration of an optimizer step; needs ``flops_per_step`` of the whole table |
| ``relative_error`` | relative standard error, optional |
| ``tensor_parallel``, ``pipeline_parallel``, ``data_parallel``, ``micro_batch_size`` | all four or none |
"""

from __future__ import annotations

import bisect
import csv
import io
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from unicron_lightning.errors import check_numbers


@dataclass(frozen=True, kw_only=True)
class ParallelConfiguration:
    """Distribution of a task over its workers.

    Attributes:
        tensor_parallel: workers that share each layer (TP).
        pipeline_parallel: stages that the layers are divided into (PP).
        data_parallel: copies of the model (DP); with experts, copies of all that is not an expert.
        context_parallel: workers that share each sequence (CP).
        expert_parallel: data-parallel workers that share a layer's experts (EP), a divisor of CP x DP.
        micro_batch_size: samples in one micro-batch of one copy.
        num_micro_batches: micro-batches that each copy computes per step (m).
        interleave: groups of layers per stage (v), 1 without the interleaved schedule.
        recompute: activations recomputed in the backward pass: ``none``, ``selective`` or ``full``.
        memory_bytes: memory needed by the fullest worker, 0 if unknown.

    Raises:
        ValueError: a degree is below 1 or does not divide, or ``recompute`` is unknown.
    """

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    micro_batch_size: int
    num_micro_batches: int = 1
    interleave: int = 1
    recompute: str = "none"
    memory_bytes: int = 0
    context_parallel: int = 1
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        check_numbers(self, "tensor_parallel", "pipeline_parallel", "data_parallel", least=1)
        check_numbers(self, "context_parallel", "expert_parallel", least=1)
        if self.context_parallel * self.data_parallel % self.expert_parallel:
            copies = self.context_parallel * self.data_parallel
            raise ValueError(f"expert_parallel={self.expert_parallel}: expected a divisor of CP x DP = {copies}")
        check_numbers(self, "micro_batch_size", "num_micro_batches", "interleave", least=1)
        if self.recompute not in ("none", "selective", "full"):
            raise ValueError(f"recompute={self.recompute!r}: expected 'none', 'selective' or 'full'")
        if self.memory_bytes < 0:
            raise ValueError(f"memory_bytes={self.memory_bytes!r}: expected 0 or more")

    @property
    def num_workers(self) -> int:
        """Computing workers: TP x PP x CP x DP. Fewer than the task has if it leaves some idle."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @property
    def replica_size(self) -> int:
        """Workers of one whole copy of the model: TP x PP x what CP and EP span."""
        spanned = math.lcm(self.context_parallel, self.expert_parallel)
        return self.tensor_parallel * self.pipeline_parallel * spanned


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
        check_numbers(self, "rate", above=0, expected="FLOP/s, a finite number > 0")
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


Between = Literal["stair", "linear"]
Beyond = Literal["hold", "extend"]


@dataclass(frozen=True, kw_only=True)
class MeasuredPoint:
    """One row of a table.

    Attributes:
        num_workers: number of the task's accelerators, at least 1.
        flops_per_second: achieved aggregate FLOP/s, at least 0.
        relative_error: relative standard error of ``flops_per_second``, 0.0 if exact.
        configuration: distribution of the task, if known.

    Raises:
        ValueError: a value is out of range, or the configuration needs more workers than ``num_workers``.
    """

    num_workers: int
    flops_per_second: float
    relative_error: float = 0.0
    configuration: ParallelConfiguration | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "num_workers", least=1)
        check_numbers(self, "flops_per_second", "relative_error", least=0)
        if self.configuration is not None and self.configuration.num_workers > self.num_workers:
            needed = self.configuration.num_workers
            raise ValueError(f"configuration needs {needed} workers: expected at most num_workers={self.num_workers}")


@dataclass(frozen=True, kw_only=True)
class MeasuredTable:
    """A performance model from measured points. See the module for its rules.

    Attributes:
        points: at least one, rising in ``num_workers``, each count once.
        between: ``stair`` or ``linear``.
        beyond: ``hold`` or ``extend`` (which needs two points).

    Raises:
        ValueError: no points, not rising, or an unknown rule.
    """

    points: tuple[MeasuredPoint, ...]
    between: Between = "stair"
    beyond: Beyond = "hold"

    def __post_init__(self) -> None:
        counts = [point.num_workers for point in self.points]
        if not counts:
            raise ValueError("points=(): expected at least one measured point")
        for smaller, larger in itertools.pairwise(counts):
            if larger <= smaller:
                raise ValueError(f"num_workers {larger} after {smaller}: expected rising counts, each once")
        if self.between not in ("stair", "linear"):
            raise ValueError(f"between={self.between!r}: expected 'stair' or 'linear'")
        if self.beyond not in ("hold", "extend"):
            raise ValueError(f"beyond={self.beyond!r}: expected 'hold' or 'extend'")
        if self.beyond == "extend" and len(counts) < 2:
            raise ValueError("beyond='extend' with one point: expected at least two to draw a line through")

    def throughput(self, num_workers: int) -> float:
        left, right = self._around(num_workers)
        if left is None:
            return 0.0
        if right is None:
            if self.beyond == "hold" or num_workers == left.num_workers:
                return left.flops_per_second
            return max(0.0, _line(self.points[-2], left, num_workers))
        return left.flops_per_second if self.between == "stair" else _line(left, right, num_workers)

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        left, right = self._around(num_workers)
        if left is None:
            return None
        idle_rest = self.between == "stair" if right is not None else self.beyond == "hold"
        return left.configuration if idle_rest or num_workers == left.num_workers else None

    def uncertainty(self, num_workers: int) -> float:
        left, right = self._around(num_workers)
        if left is None:
            return 0.0  # by the table, the task does not run there
        if right is None:
            known = self.beyond == "hold" or num_workers == left.num_workers
            return left.relative_error if known else math.inf
        if self.between == "stair" or num_workers == left.num_workers:
            return left.relative_error
        return max(left.relative_error, right.relative_error)

    def _around(self, num_workers: int) -> tuple[MeasuredPoint | None, MeasuredPoint | None]:
        """The last point with at most ``num_workers``, and the first with more."""
        check_num_workers(num_workers)
        index = bisect.bisect_right(self.points, num_workers, key=lambda point: point.num_workers)
        left = self.points[index - 1] if index else None
        return left, self.points[index] if index < len(self.points) else None


def _line(first: MeasuredPoint, second: MeasuredPoint, num_workers: int) -> float:
    """The straight line through two points, at ``num_workers``."""
    share = (num_workers - first.num_workers) / (second.num_workers - first.num_workers)
    return first.flops_per_second + share * (second.flops_per_second - first.flops_per_second)


_SPEEDS = ("flops_per_second", "tflops_per_second", "tflops_per_worker", "step_seconds")
_LAYOUT = ("tensor_parallel", "pipeline_parallel", "data_parallel", "micro_batch_size")
_COLUMNS = frozenset(("workers", "relative_error", *_SPEEDS, *_LAYOUT))


def points_from_rows(
    rows: Iterable[Mapping[str, object]], *, flops_per_step: float | None = None
) -> tuple[MeasuredPoint, ...]:
    """The points of a table, rising, from rows in any order.

    Args:
        rows: mappings from column to value; numbers, or text that is one. Empty text and None count as absent.
        flops_per_step: FLOPs of one optimizer step, needed if rows give ``step_seconds``.

    Raises:
        ValueError: the first wrong row, by its number (from 1), with the given and the expected value.
    """
    points: dict[int, MeasuredPoint] = {}
    for number, row in enumerate(rows, start=1):
        try:
            point = _point({key: value for key, value in row.items() if value not in (None, "")}, flops_per_step)
            if point.num_workers in points:
                raise ValueError(f"workers={point.num_workers}: expected each count once")
        except ValueError as error:
            raise ValueError(f"table row {number}: {error}") from None
        points[point.num_workers] = point
    return tuple(points[count] for count in sorted(points))


def points_from_csv(text: str, *, flops_per_step: float | None = None) -> tuple[MeasuredPoint, ...]:
    """The points from the text of a CSV file with a header line. Lines that start with ``#`` are comments.

    Raises:
        ValueError: as `points_from_rows`, or no header, or a line with more fields than the header.
    """
    lines = [line for line in text.lstrip("\ufeff").splitlines() if line.strip() and not line.lstrip().startswith("#")]
    reader = csv.reader(io.StringIO("\n".join(lines)), skipinitialspace=True)
    header = [name.strip() for name in next(reader, [])]
    if "workers" not in header:
        raise ValueError(f"CSV header {header!r}: expected a column 'workers'")
    rows: list[dict[str, object]] = []
    for number, fields in enumerate(reader, start=1):
        if len(fields) > len(header):
            raise ValueError(f"table row {number}: {len(fields)} fields: expected at most {len(header)}")
        rows.append({name: field.strip() for name, field in zip(header, fields, strict=False)})
    return points_from_rows(rows, flops_per_step=flops_per_step)


def _point(row: Mapping[str, object], flops_per_step: float | None) -> MeasuredPoint:
    unknown = sorted(str(key) for key in row if key not in _COLUMNS)
    if unknown:
        raise ValueError(f"column {unknown[0]!r}: expected one of {', '.join(sorted(_COLUMNS))}")
    if "workers" not in row:
        raise ValueError("no 'workers': expected a number of accelerators")
    num_workers = _whole(row, "workers")
    return MeasuredPoint(
        num_workers=num_workers,
        flops_per_second=_speed(row, num_workers, flops_per_step),
        relative_error=_number(row, "relative_error") if "relative_error" in row else 0.0,
        configuration=_configuration(row),
    )


def _speed(row: Mapping[str, object], num_workers: int, flops_per_step: float | None) -> float:
    given = [name for name in _SPEEDS if name in row]
    if len(given) != 1:
        raise ValueError(f"speed given by {given or 'nothing'}: expected exactly one of {', '.join(_SPEEDS)}")
    value = _number(row, given[0])
    if given[0] == "tflops_per_second":
        return value * 1e12
    if given[0] == "tflops_per_worker":
        return value * 1e12 * num_workers
    if given[0] == "step_seconds":
        if flops_per_step is None:
            raise ValueError("step_seconds without flops_per_step: expected the FLOPs of one step for the table")
        if value <= 0:
            raise ValueError(f"step_seconds={value!r}: expected more than 0")
        return flops_per_step / value
    return value


def _configuration(row: Mapping[str, object]) -> ParallelConfiguration | None:
    given = [name for name in _LAYOUT if name in row]
    if not given:
        return None
    if len(given) != len(_LAYOUT):
        raise ValueError(f"only {', '.join(given)}: expected all of {', '.join(_LAYOUT)}, or none")
    tensor, pipeline, data, micro_batch = (_whole(row, name) for name in _LAYOUT)
    return ParallelConfiguration(
        tensor_parallel=tensor, pipeline_parallel=pipeline, data_parallel=data, micro_batch_size=micro_batch
    )


def _number(row: Mapping[str, object], name: str) -> float:
    value = row[name]
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name}={value!r}: expected a finite number, 0 or more")
    return number


def _whole(row: Mapping[str, object], name: str) -> int:
    number = _number(row, name)
    if number != int(number) or number < 1:
        raise ValueError(f"{name}={row[name]!r}: expected a whole number of at least 1")
    return int(number)
