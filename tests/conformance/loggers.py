"""Scenarios of loggers and hyperparameters."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from conformance.lab import Lab
from conformance.logged import Memory
from conformance.net import Net, loader
from conformance.table import scenario
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def rows(path: Path) -> list[Any]:
    """Rows of a CSV file."""
    with path.open() as file:
        return [dict(row) for row in csv.DictReader(file)]


@scenario(csv={"of": "csv"}, every={"of": "csv", "log_every_n_steps": 1}, flushed={"of": "csv", "flush": 1})
def csv_file(lab: Lab, of: str, flush: int = 100, **settings: Any) -> None:
    logger = CSVLogger(lab.folder / "logs", flush_logs_every_n_steps=flush)

    class Kept(Net):
        def __init__(self, size: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    lab.trainer(logger=logger, **{"log_every_n_steps": 2} | settings).fit(Kept())
    lab.meet()
    lab.see(
        rows=rows(Path(logger.log_dir) / "metrics.csv"), hparams=(Path(logger.log_dir) / "hparams.yaml").read_text()
    )
    lab.see(version=logger.version, folder=logger.log_dir)


@scenario()
def versions(lab: Lab) -> None:
    for _ in range(3):
        trainer = lab.trainer(logger=True, max_epochs=1)
        trainer.fit(Net())
        lab.see(**{f"folder{trainer.logger.version}": trainer.log_dir})


@scenario(needs="tensorboardX")
def tensorboard(lab: Lab) -> None:
    logger = TensorBoardLogger(lab.folder, name="tb", version=3)
    lab.trainer(logger=logger, log_every_n_steps=1).fit(Net())
    lab.see(folder=logger.log_dir, made=len(list(Path(logger.log_dir).glob("events.*"))))


@scenario(none={"loggers": 0}, one={"loggers": 1}, two={"loggers": 2})
def number_of_loggers(lab: Lab, loggers: int) -> None:
    used = [Memory(f"m{number}") for number in range(loggers)]
    trainer = lab.trainer(logger=used, log_every_n_steps=1)
    trainer.fit(Net())
    trainer.test(Net(), verbose=False)
    lab.see(rows=[each.rows for each in used], first=trainer.logger is not None, number=len(trainer.loggers))
    lab.see(log_dir=trainer.log_dir)


@scenario()
def logger_methods(lab: Lab) -> None:
    class Direct(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.log_metrics({"direct": float(batch_idx)}, step=self.global_step)
            return self.loss(batch)

    memory = Memory()
    lab.trainer(logger=memory).fit(Direct())
    lab.see(rows=memory.rows)


@scenario()
def failing_logger(lab: Lab) -> None:
    class Failing(Memory):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            raise OSError("disk full")

    memory = Failing()
    try:
        lab.trainer(logger=memory, log_every_n_steps=1).fit(Net())
    finally:
        lab.see(rows=memory.rows)


@scenario()
def hyperparameters(lab: Lab) -> None:
    class Kept(Net):
        def __init__(self, size: int, name: str = "n", inner: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["name"])

    memory = Memory()
    lab.trainer(logger=memory).fit(Kept(3, inner={"a": [1, 2]}))
    lab.see(rows=memory.rows)


@scenario()
def hyperparameters_that_collide(lab: Lab) -> None:
    import lightning.pytorch as pl

    class Kept(Net):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Data(pl.LightningDataModule):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader()

    lab.trainer(logger=Memory()).fit(Kept(3), datamodule=Data(4))
