"""Parses rows of measurements from text or loaded values into points of a table. The caller opens files.

A row has these columns; exactly one of the four speed columns is given:

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

import csv
import io
import math
from collections.abc import Iterable, Mapping

from unicron_lightning.planner.performance.model import ParallelConfiguration
from unicron_lightning.planner.performance.table import MeasuredPoint

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
