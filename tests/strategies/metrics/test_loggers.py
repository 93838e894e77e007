"""Loggers of a rank that becomes rank 0: rows that the one before has not written, and none twice."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from unicron_lightning.strategies.metrics.loggers import (
    LoggedRow,
    adopt_versions,
    follow,
    lacking_and_ahead,
    take_over,
    versions,
)

STEPS: list[LoggedRow] = [({"loss": step / 10, "epoch": 0.0}, step) for step in range(6)]
VALIDATION: list[LoggedRow] = [({"val": 0.5}, 0), ({"val": 0.6}, 1), ({"val_loss": 0.55, "epoch": 0.0}, 5)]


def written(rows: list[LoggedRow]) -> list[dict[str, str]]:
    """The rows as they are read from a file, in which every row has all columns."""
    columns = {"loss": "", "val": "", "val_loss": "", "epoch": ""}
    return [{**columns, **{k: str(v) for k, v in metrics.items()}, "step": str(step)} for metrics, step in rows]


@pytest.mark.parametrize("known", range(1, 10))
@pytest.mark.parametrize("there", range(1, 10))
def test_the_ends_of_both_are_compared(known: int, there: int) -> None:
    rows = [*STEPS, *VALIDATION]
    lacking, ahead = lacking_and_ahead(rows[:known], written(rows[:there]))
    assert lacking == rows[there:known] and ahead == written(rows[known:there])


@pytest.mark.parametrize(("known", "there"), [(18, 16), (16, 18), (18, 18)])
def test_rows_of_reloaded_validation_data_repeat(known: int, there: int) -> None:
    """Their steps begin at 0 in each epoch: a row is not written because an earlier one looks the same."""
    later = [(metrics, step + 6) if "val" not in metrics else (metrics, step) for metrics, step in STEPS + VALIDATION]
    rows = [*STEPS, *VALIDATION, *later]
    lacking, ahead = lacking_and_ahead(rows[max(known - 12, 0) : known], written(rows[:there]))
    assert lacking == rows[there:known] and ahead == written(rows[known:there])


def test_a_worker_without_rows_writes_none() -> None:
    assert lacking_and_ahead([], written(STEPS)) == ([], [])
    assert lacking_and_ahead(STEPS, []) == (STEPS, [])


def test_rows_of_one_rank_only_leave_the_others() -> None:
    """Something that a script writes on rank 0 only: rows with the same step and names are not written again."""
    extra: LoggedRow = ({"images": 3.0}, 2)
    there = [{**row, "images": ""} for row in written(STEPS[:3])] + [{"images": "3.0", "step": "2"}]
    there += [{**row, "images": ""} for row in written(STEPS[3:5])]
    lacking, ahead = lacking_and_ahead(STEPS, there)
    assert lacking == STEPS[5:] and ahead == [] and extra not in lacking


@pytest.mark.filterwarnings("ignore:Experiment logs directory:UserWarning")
@pytest.mark.parametrize("prefix", ["", "run"])
@pytest.mark.parametrize(("known", "there"), [(4, 6), (6, 4), (5, 5)])
def test_every_row_is_there_once(
    prefix: str, known: int, there: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank logs all rows, and becomes rank 0 after some of them; the one before has written others."""

    def made() -> CSVLogger:
        return CSVLogger(tmp_path, "csv", version=0, prefix=prefix)

    first, second = made(), made()
    log(first, STEPS[:there])
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    follow([second])
    log(second, STEPS[:known])
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    take_over([second])
    log(second, STEPS[known:])
    with (tmp_path / "csv/version_0/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(6))
    name = f"{prefix}-loss" if prefix else "loss"
    assert [float(row[name]) for row in rows] == [metrics["loss"] for metrics, _ in STEPS]


def log(logger: Any, rows: list[LoggedRow]) -> None:
    for metrics, step in rows:
        logger.log_metrics(metrics=metrics, step=step)
        logger.save()


def test_loggers_of_services_open_the_run_of_the_rank_before(tmp_path: Path) -> None:
    """Without their packages, which the constructors of these loggers need."""

    def loggers(experiment: object) -> list[Any]:
        wandb, mlflow = WandbLogger.__new__(WandbLogger), MLFlowLogger.__new__(MLFlowLogger)
        wandb.__dict__.update(_experiment=experiment, _wandb_init={"resume": "allow"}, _id=None)
        mlflow.__dict__.update(_initialized=experiment is not None, _run_id=None)
        return [CSVLogger(tmp_path, version=3), wandb, mlflow]

    others = loggers(None)
    adopt_versions(others, [3, "w1", "m1"])
    assert versions(others[:2]) == [3, "w1"]
    assert others[1]._wandb_init == {"resume": "allow", "id": "w1"} and others[2]._run_id == "m1"
    opened = loggers(object())
    adopt_versions(opened, [3, "w1", "m1"])
    assert opened[1]._id is None and opened[2]._run_id is None, "a run that is open stays"
    adopt_versions(unknown := loggers(None), [3, None, None])
    assert unknown[1]._wandb_init == {"resume": "allow"} and unknown[2]._run_id is None
