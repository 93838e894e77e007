"""``unicron calibrate``: measures a task's speed at chosen sizes, and writes a table for job files and plan files."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import time
from pathlib import Path
from typing import Any, Final

from unicron_lightning.cli.client import access_of, answering, fetch, quoted
from unicron_lightning.cli.output import console, table, visible
from unicron_lightning.errors import ConfigError, CoordinatorUnavailable, UnicronError

_POLL_SECONDS: Final = 0.5


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``unicron``."""
    command = commands.add_parser("calibrate", parents=[answering()], help="measure a task's speed at some sizes")
    command.add_argument("task", metavar="TASK", help="torchrun's --rdzv-id")
    sizes = "numbers of nodes; default: the smallest one, its doubles, and the largest one"
    command.add_argument("--sizes", metavar="N,N,...", help=sizes)
    command.add_argument("--steps", default="20", metavar="N", help="steps at each size (default: %(default)s)")
    limit = "seconds after which a size is skipped (default: %(default)s)"
    command.add_argument("--seconds", default="300", metavar="S", help=limit)
    command.add_argument("--output", metavar="FILE", help="table for job and plan files; default: TASK.csv")
    command.add_argument("--stop", action="store_true", help="end a calibration that runs")
    command.set_defaults(run=_calibrate)


def _calibrate(options: argparse.Namespace) -> int:
    output = Path(options.output or f"{options.task}.csv")
    if options.output is None and output.name != str(output):
        raise ConfigError(f"task {options.task!r} is no name of a file: expected --output FILE")
    if options.stop:
        _order(options, stop="1")
        print(visible(f"{options.task}: no calibration"))
        return 0
    sizes = {} if options.sizes is None else {"sizes": options.sizes}
    begun = _order(options, steps=options.steps, seconds=options.seconds, **sizes)["since"]
    try:
        found, flops = _wait(options, begun)
    except KeyboardInterrupt:
        _order(options, stop="1")
        print(visible(f"{options.task}: the calibration was stopped; the plan is free again"))
        return 130
    if found["measured"]:
        text = written(found["measured"], flops)
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UnicronError(f"{output}: {error.strerror}; the table is:\n{text}") from error
    if options.json:
        print(json.dumps({**found, "flops_per_step": flops}, indent=2))
    else:
        _print(options.task, found, flops, output)
    return 0 if found["measured"] and not found["ended"] else 1


def _order(options: argparse.Namespace, **query: str) -> Any:
    path = f"/v1/tasks/{quoted(options.task)}/calibrate"
    return fetch(options.endpoint, path, access_of(options), method="POST", **query)


def _wait(options: argparse.Namespace, begun: float) -> tuple[dict[str, Any], float | None]:
    """Wait for the end of a calibration, even while the coordinator is away; return it, and the FLOPs of a step."""
    while True:
        with contextlib.suppress(CoordinatorUnavailable):
            tasks = fetch(options.endpoint, "/v1/status", access_of(options))["tasks"]
            task = tasks.get(options.task)
            if task is None or task["state"] == "over":
                raise UnicronError(f"task {options.task!r} has ended before its calibration")
            found = task["calibration"]
            if found is None or found["since"] != begun:
                raise UnicronError(f"the calibration of task {options.task!r} was replaced, or the coordinator lost it")
            if found["size"] is None:
                return found, task["flops_per_step"]
        time.sleep(_POLL_SECONDS)


def written(rows: list[dict[str, Any]], flops: float | None) -> str:
    """Return measurements as a table that `planner.performance.model` reads.

    Args:
        rows: with ``workers``, ``step_seconds`` and ``relative_error``.
        flops: of a step; None if unknown: then the table has the duration of a step.
    """
    text = io.StringIO()
    speed = "step_seconds" if flops is None else "flops_per_second"
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["workers", speed, "relative_error"])
    for row in rows:
        seconds = row["step_seconds"]
        table.writerow([row["workers"], seconds if flops is None else flops / seconds, row["relative_error"]])
    return text.getvalue()


def _print(task: str, found: dict[str, Any], flops: float | None, output: Path) -> None:
    columns = ("nodes", "workers", "step [s]", "+- %", "TFLOP/s", "of a worker")
    shown = table(*columns, right=columns)
    for row in found["measured"]:
        seconds = row["step_seconds"]
        speed = 0.0 if flops is None else flops / seconds / 1e12
        speeds = (speed, speed / row["workers"])
        error = f"{100 * row['relative_error']:.1f}"
        about = (str(row["nodes"]), str(row["workers"]), f"{seconds:.4g}", error)
        shown.add_row(*about, *(f"{speed:.4g}" if speed else "" for speed in speeds))
    if found["measured"]:
        console().print(shown)
    for size, reason in found["skipped"].items():
        print(visible(f"{size} nodes: skipped: {reason}"))
    if found["ended"]:
        print(visible(f"{task}: the calibration has ended: {found['ended']}"))
    if found["measured"]:
        print(visible(f"{output}: for `profile` of a job file and `csv` of a plan file"))
