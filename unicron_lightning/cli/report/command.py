"""The command ``unicron report``: reads the event log, and a logger's CSV file for the loss; writes one file."""

from __future__ import annotations

import argparse
import csv
import math
import time
from pathlib import Path

from unicron_lightning.cli.client import connecting
from unicron_lightning.cli.output import duration
from unicron_lightning.cli.report.pages import markdown, page
from unicron_lightning.cli.report.story import story_of
from unicron_lightning.cli.stored import ask, events_of
from unicron_lightning.errors import ConfigError
from unicron_lightning.wire.fields import counted


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``unicron``."""
    parser = commands.add_parser("report", parents=[connecting()], help="write one file about a task")
    parser.add_argument("task", metavar="TASK", help="the task (torchrun's --rdzv-id)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="PATH.html or PATH.md; default: TASK.html")
    parser.add_argument(
        "--metrics", type=Path, metavar="CSV", help="metrics.csv of Lightning's CSVLogger, for the loss"
    )
    parser.add_argument("--loss", default="loss", metavar="COLUMN", help="column of the loss; default: %(default)s")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    safe = "".join(each if each.isalnum() or each in "-_." else "_" for each in options.task)
    out: Path = options.out or Path(f"{safe.lstrip('.') or 'task'}.html")
    if out.suffix not in (".html", ".md"):
        raise ConfigError(f"--out {out}: expected a path that ends with .html or .md")
    losses = [] if options.metrics is None else losses_of(options.metrics, options.loss)
    bills = ask(options, "/v1/incidents", task=options.task)["incidents"]
    waits = {job["name"]: job["reason"] or "" for job in ask(options, "/v1/jobs") if job["ended_at"] is None}
    story = story_of(
        options.task, events_of(options, task=options.task), bills, time.time(), waits.get(options.task, "")
    )
    try:
        out.write_text(page(story, losses) if out.suffix == ".html" else markdown(story, losses), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}") from None
    saved = sum(each.seconds for each in story.saved)
    gain = f", {duration(saved)} saved against restarts" if story.bills else ""
    print(f"{out}: {counted(len(story.bills), 'incident')}, goodput {100 * story.goodput:.2f} %{gain}")
    return 0


def losses_of(path: Path, column: str) -> list[tuple[int, float]]:
    """Return the finite values of a column by step, in order of the steps; of a repeated step the last one.

    Raises:
        ConfigError: the file cannot be read, or lacks the columns.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names = list(reader.fieldnames or ())
            if column not in names or "step" not in names:
                raise ConfigError(f"--loss {column}: {path} has the columns {names}; expected step and {column}")
            values = {int(float(row["step"])): float(row[column]) for row in reader if row[column] and row["step"]}
    except (OSError, ValueError, csv.Error) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--metrics {path}: {error}") from None
    return [(step, value) for step, value in sorted(values.items()) if math.isfinite(value)]
