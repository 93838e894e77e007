"""Continuation of loggers when another process becomes rank 0, the only one that logs."""

from __future__ import annotations

import csv
import logging
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger

logger = logging.getLogger(__name__)


def take_over(loggers: Sequence[Logger]) -> None:
    """Continue the loggers of the rank 0 that died. Data that it had not written to disk is lost.

    Lightning's `CSVLogger` starts by deleting an existing file; here the file is kept and appended to. Other loggers
    start a run, or a file of a run, of their own.
    """
    for each in loggers:
        if isinstance(each, CSVLogger):
            _continue_csv(each)


def _continue_csv(own: CSVLogger) -> None:
    path = Path(own.log_dir) / "metrics.csv"
    kept = path.with_suffix(".kept")
    if not path.is_file():
        return
    path.rename(kept)
    experiment = own.experiment  # created here, as this is rank 0 now
    with kept.open(newline="") as file:
        header = next(csv.reader(file), [])
    if path.exists():  # created earlier, with values written since
        logger.warning("csv_not_continued path=%s kept=%s", path, kept)
        return
    kept.rename(path)
    experiment.metrics_keys = list(dict.fromkeys([*header, *experiment.metrics_keys]))
