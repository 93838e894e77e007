"""Hydra's callback around simulations: a progress bar while a sweep runs, and its summary at the end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from unicron_lightning.simulate.output.files import save_table
from unicron_lightning.simulate.output.pictures import WafCurve, curves_picture, losses_picture
from unicron_lightning.simulate.output.summaries import summary, with_ratio
from unicron_lightning.simulate.output.tables import as_table, console

_LOOK_SECONDS = 0.3


class SweepSummary(Callback):
    """Summary of a multirun; a single run shows its own table.

    Hydra does not call `on_multirun_end` if a job fails or the user interrupts: the command calls `end` then, so that
    results of the finished jobs are kept and shown.
    """

    running: ClassVar[SweepSummary | None] = None
    """The summary of the multirun in progress."""

    def __init__(self) -> None:
        self._bar: _Bar | None = None
        self._config: DictConfig | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._config = config
        SweepSummary.running = self
        if config.output.progress and Console(stderr=True).is_terminal:
            self._bar = _Bar(Path(config.hydra.sweep.dir), num_jobs(list(config.hydra.overrides.task)))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        self.end()

    def end(self) -> None:
        """Write and show the results of all finished jobs, once."""
        config, self._config, SweepSummary.running = self._config, None, None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if config is None:
            return
        folder = Path(config.hydra.sweep.dir)
        curves = read_curves(folder)
        if curves:
            conclude(folder, curves, config.output)
        else:
            Console(stderr=True).print(
                f"simulate: no simulation has finished of {num_jobs(list(config.hydra.overrides.task))}"
            )


def conclude(folder: Path, curves: list[WafCurve], output: Any) -> None:
    """Write and show a sweep's results: ``rows``, ``summary``, and pictures."""
    rows = with_ratio([curve.row for curve in curves], str(output.reference))
    means = summary(rows)
    save_table(folder / "rows", rows, output.format)
    save_table(folder / "summary", means, output.format)
    shown = console()
    shown.print(as_table(means, f"{len(rows)} simulations; ratio: WAF over that of {output.reference}"))
    if output.pictures:
        with suppress(ModuleNotFoundError):
            curves_picture(folder / "waf.png", curves)
            losses_picture(folder / "losses.png", means)
    shown.print(f"in {folder}: {', '.join(sorted(path.name for path in folder.iterdir() if path.is_file()))}")


def read_curves(folder: Path) -> list[WafCurve]:
    """Read all simulations of a sweep, in the order of their numbers."""
    return list(_curves(sorted(folder.glob("*/row.json"), key=lambda path: int(path.parent.name))))


def _curves(paths: list[Path]) -> Iterator[WafCurve]:
    for path in paths:
        row = json.loads(path.read_text(encoding="utf-8"))
        times, values = row.pop("curve")
        yield WafCurve(row=row, seconds=np.array(times), waf=np.array(values))


def num_jobs(overrides: list[str]) -> int:
    """Return the number of jobs that Hydra's basic sweeper creates from a command line."""
    number = 1
    for override in OverridesParser.create().parse_overrides(overrides):
        if override.is_sweep_override():
            number *= sum(1 for _ in override.sweep_iterator())
    return number


class _Bar:
    """Counts finished folders: each job, in this or another process, writes one."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self._over = threading.Event()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
        )
        self._task = self._progress.add_task("simulations", total=number)
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._progress.start()
        self._thread.start()

    def stop(self) -> None:
        """Remove the progress bar."""
        self._over.set()
        self._thread.join()
        self._progress.stop()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            done = sum(1 for _ in self._folder.glob("*/row.json"))
            self._progress.update(self._task, completed=done)
