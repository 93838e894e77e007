"""The training run of train.py with a logger and the callbacks."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import lightning.pytorch as pl
import train
from lightning.pytorch.loggers import CSVLogger

from unicron_lightning.callbacks import ThroughputMonitor, UnicronMonitor


def monitored(**settings: Any) -> pl.Trainer:
    logger = CSVLogger(sys.argv[1], name="csv", version=0, flush_logs_every_n_steps=1)
    callbacks = [UnicronMonitor(), ThroughputMonitor(window_size=5), *settings.pop("callbacks")]
    return Trainer(**{**settings, "logger": logger, "callbacks": callbacks, "log_every_n_steps": 5})


Trainer = pl.Trainer
if __name__ == "__main__":
    train.pl.Trainer = partial(monitored)  # type: ignore[misc, assignment]
    train.main()
