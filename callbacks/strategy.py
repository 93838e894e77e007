"""Access of callbacks to a trainer's strategy."""

from __future__ import annotations

import lightning.pytorch as pl

from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy
from unicron_lightning.strategies.lightning_root import is_other, refuse


def strategy_of(trainer: pl.Trainer, asked_by: pl.Callback) -> FaultTolerantStrategy:
    """Return the trainer's strategy.

    Raises:
        ConfigError: the strategy is another one.
    """
    if is_other(trainer):
        raise refuse(f"the Trainer of the callback {type(asked_by).__name__}")
    strategy = trainer.strategy
    if not isinstance(strategy, FaultTolerantStrategy):
        raise ConfigError(
            f'{type(asked_by).__name__} needs Trainer(strategy="unicron"), found {type(strategy).__qualname__}'
        )
    return strategy
