"""Loggers when another process becomes rank 0, the only rank that logs.

Loggers that number or name their runs (Lightning's `CSVLogger`, `TensorBoardLogger`, `WandbLogger`, `MLFlowLogger`)
get rank 0's version on all ranks, so that whichever rank logs next continues the same run. The other ranks keep the
newest rows: rank 0 may die before it has written a row of a step that the survivors have finished.
"""

from __future__ import annotations

import csv
import json
import logging
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from unicron_lightning import wire
from unicron_lightning.worker.control.thread import Control

logger = logging.getLogger(__name__)

_RECORD: Final = "log versions of fit {}"
_KEPT: Final = 32
"""Rows: more than are logged between two collectives."""
_COMPARED: Final = 4
"""Rows by which two ends are recognised as the same."""
LoggedRow = tuple[dict[str, Any], int | None]


class _Following:
    """``log_metrics`` of a logger, which keeps the newest rows on ranks that do not log.

    Args:
        own: of which the method is replaced.
    """

    def __init__(self, own: Logger) -> None:
        self.rows: deque[LoggedRow] = deque(maxlen=_KEPT)
        self.ahead: deque[Mapping[str, str]] = deque()
        """Rows that the rank 0 before this one has written, and this rank has not reached yet."""
        self._log = own.log_metrics

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        row = _row(*args, **kwargs)
        while self.ahead:
            if _is_written(row, self.ahead.popleft()):
                return
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            self.rows.clear()
        else:
            self.rows.append(row)
        self._log(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the script has put in the method's place knows, such as the calls of a mock."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._log, name)


def _row(metrics: Mapping[str, Any], step: int | None = None, **_: Any) -> LoggedRow:
    return dict(metrics), step


def follow(loggers: Sequence[Logger]) -> None:
    """Have each logger that continues keep the rows that rank 0 might not write."""
    for each in continued(loggers):
        if not isinstance(each.log_metrics, _Following):
            each.log_metrics = _Following(each)  # type: ignore[method-assign]


def versions(loggers: Sequence[Logger]) -> list[int | str | None]:
    """Return the versions of the loggers that continue, in order: numbers, or names of their runs."""
    return [each.version for each in continued(loggers)]


def adopt_versions(loggers: Sequence[Logger], known: Sequence[int | str | None]) -> None:
    """Set what `versions` gave on rank 0."""
    for each, version in zip(continued(loggers), known, strict=False):
        if isinstance(each, WandbLogger):
            if each._experiment is None and version is not None:  # Lightning sets resume="allow"
                each._id = each._wandb_init["id"] = str(version)
        elif isinstance(each, MLFlowLogger):
            if not each._initialized and version is not None:
                each._run_id = str(version)
        else:
            each._version = version


def is_log_dir(trainer: pl.Trainer, value: object) -> bool:
    """Return whether ``value`` is that of ``trainer.log_dir``: the same on all ranks once versions are shared."""
    first = trainer.loggers[0] if trainer.loggers else None
    if first is None:
        return value == trainer.default_root_dir
    return value == (first.log_dir if isinstance(first, CSVLogger | TensorBoardLogger) else first.save_dir)


def take_over(loggers: Sequence[Logger]) -> None:
    """Continue the loggers of the rank 0 that died: write the rows that it has not written, and none twice.

    Lightning's `CSVLogger` starts by deleting the file that it finds; here it is kept and appended to. A
    `TensorBoardLogger` adds a file to the run's folder, and a `WandbLogger` or an `MLFlowLogger` opens the run again;
    their newest rows may be there twice, with the same values. Other loggers start a run of their own.
    """
    for each in continued(loggers):
        following = each.log_metrics
        rows = list(following.rows) if isinstance(following, _Following) else []
        if isinstance(each, CSVLogger):
            rows, ahead = lacking_and_ahead(rows, _continue_csv(each))
            if isinstance(following, _Following):
                following.ahead.extend(ahead)
        elif not isinstance(each, WandbLogger):  # of which the process that writes may have died with unwritten rows
            rows = [row for row in rows if row[1] == rows[-1][1]]
        for metrics, step in rows:
            each.log_metrics(metrics, step)
        if rows:
            each.save()


def lacking_and_ahead(
    rows: Sequence[LoggedRow], written: Sequence[Mapping[str, str]]
) -> tuple[list[LoggedRow], list[Mapping[str, str]]]:
    """Compare the end of what another rank has written with this rank's newest rows.

    The same rows are made on all ranks, and one rank may be ahead of the other. Rows may repeat, as steps of
    validations begin again when their data are loaded again: so it counts how the ends fit together.

    Returns:
        The rows that are not written, and the written ones that this rank will make next.
    """
    for shift in range(_KEPT):
        end, other_end = len(rows) - shift, len(written) - shift
        if _fit(rows[: max(end, 0)], written):
            return list(rows[end:]), []
        if _fit(rows, written[: max(other_end, 0)]):
            return [], list(written[other_end:])
    return [row for row in rows if not any(_is_written(row, other) for other in written)], []


def _fit(rows: Sequence[LoggedRow], written: Sequence[Mapping[str, str]]) -> bool:
    """Whether the last rows of both are the same."""
    pairs = list(zip(rows[-_COMPARED:][::-1], written[-_COMPARED:][::-1], strict=False))
    return bool(pairs) and all(_is_written(row, other) for row, other in pairs)


def record_versions(loggers: Sequence[Logger], control: Control, fit: int) -> None:
    """Record the versions of a fit's loggers, as rank 0, for a new life of the task."""
    control.send(wire.Record(key=_RECORD.format(fit), value=json.dumps(versions(loggers)), lasting=True))


def continue_files(loggers: Sequence[Logger], control: Control, fit: int) -> None:
    """Continue the runs of an earlier life of the task, which a worker of a new one resumes.

    Called before any of the files is opened. Lightning would number another run, or with `CSVLogger` delete the file of
    a version that the script has chosen.
    """
    recorded = control.lookup(_RECORD.format(fit))
    if recorded is not None:
        adopt_versions(loggers, json.loads(recorded))
    for each in loggers:
        if rank_zero_only.rank == 0 and isinstance(each, CSVLogger) and each._version is not None:  # type: ignore[attr-defined]
            _continue_csv(each)


def cut_rows(loggers: Sequence[Logger], step: int) -> None:
    """Remove the rows of step ``step`` and later, which are about to be repeated; of the step before, only some are."""
    for each in loggers:
        if rank_zero_only.rank != 0 or not isinstance(each, CSVLogger) or each._version is None:  # type: ignore[attr-defined]
            continue
        path = Path(each.log_dir) / "metrics.csv"
        if not path.is_file():
            continue
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            header, rows = list(reader.fieldnames or []), [row for row in reader if int(row["step"]) < step]
        partial = path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, header)
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(path)
        if isinstance(each.log_metrics, _Following):
            each.log_metrics.ahead.extend(_as_logged(each, [row for row in rows if int(row["step"]) == step - 1]))


def continued(loggers: Sequence[Logger]) -> list[CSVLogger | TensorBoardLogger | WandbLogger | MLFlowLogger]:
    """Return the loggers whose runs another rank can continue: their rows are kept, as rank 0 might not write them."""
    kinds = (CSVLogger, TensorBoardLogger, WandbLogger, MLFlowLogger)
    return [each for each in loggers if isinstance(each, kinds)]


def _is_written(row: LoggedRow, written: Mapping[str, str]) -> bool:
    metrics, step = row
    return str(step) == written.get("step") and {*metrics, "step"} == {name for name, value in written.items() if value}


def _continue_csv(own: CSVLogger) -> list[dict[str, str]]:
    """Keep the file that is there; return its rows, with names as they were logged."""
    path = Path(own.log_dir) / "metrics.csv"
    kept = path.with_suffix(".kept")
    if not path.is_file():
        return []
    path.rename(kept)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Experiment logs directory .* will be deleted")  # they are kept
        experiment = own.experiment  # created here, as this is rank 0 now
    with kept.open(newline="") as file:
        reader = csv.DictReader(file)
        header, rows = list(reader.fieldnames or []), list(reader)
    if path.exists():  # created earlier, with values written since
        logger.warning("csv_not_continued path=%s kept=%s", path, kept)
    else:
        kept.rename(path)
        experiment.metrics_keys = list(dict.fromkeys([*header, *experiment.metrics_keys]))
    return _as_logged(own, rows)


def _as_logged(own: CSVLogger, rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return rows of a file with names as they were logged."""
    prefix = f"{own._prefix}{own.LOGGER_JOIN_CHAR}" if own._prefix else ""
    return [{name.removeprefix(prefix): value for name, value in row.items()} for row in rows]
