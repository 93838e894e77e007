"""`Trainer.estimated_stepping_batches` where the data has no number of steps: the stated one, or an error."""

from __future__ import annotations

from typing import Any, Final

import lightning.pytorch as pl

from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.passes.loaders import Loaders

_LIGHTNINGS: Final[Any] = pl.Trainer.estimated_stepping_batches


def estimated_steps(trainer: pl.Trainer) -> float:
    """Return Lightning's estimate; with a strategy of this project it counts the stated steps of a stream.

    Raises:
        ConfigError: nothing limits the steps, so that Lightning gives -1.
    """
    loaders = getattr(trainer.strategy, "loaders", None)
    if not isinstance(loaders, Loaders):
        own: float = _LIGHTNINGS.fget(trainer)
        return own
    with loaders.estimating(trainer):
        found: float = _LIGHTNINGS.fget(trainer)
    if found == -1 and loaders.training is not None:  # otherwise there is no data yet
        raise ConfigError(
            "trainer.estimated_stepping_batches: the training data is iterable without a length, and so the number of "
            "steps is not known; set Trainer(max_steps=...) or Trainer(limit_train_batches=...)"
        )
    return found


def install() -> None:
    """Have trainers give this estimate, wherever a script asks for it."""
    pl.Trainer.estimated_stepping_batches = property(estimated_steps, doc=_LIGHTNINGS.__doc__)  # type: ignore[method-assign,assignment]
