"""Lightning's own callbacks on a worker that joins or resumes: state that their `state_dict` leaves out.

`ModelCheckpoint` decides by such state whether it saves, which all ranks do together. `LearningRateFinder` searches
when a fit starts: the members have done so, and their learning rate is in the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner.lr_finder import _determine_lr_attr_name, _LRCallback
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_setattr

_SAVING: Final = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")


def state(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the state that joiners need, as plain data."""
    saving = [{name: getattr(saver, name) for name in _SAVING} for saver in _of(trainer, ModelCheckpoint)]
    return {"saving": saving, "rates": [lightning_getattr(trainer.lightning_module, name) for name in _rates(trainer)]}


def restore(trainer: pl.Trainer, known: Mapping[str, Sequence[Any]]) -> None:
    """Set what `state` gave on a member."""
    for saver, values in zip(_of(trainer, ModelCheckpoint), known.get("saving", ()), strict=False):
        vars(saver).update(values)
    for name, rate in zip(_rates(trainer), known.get("rates", ()), strict=False):
        lightning_setattr(trainer.lightning_module, name, rate)


def searches(trainer: pl.Trainer) -> bool:
    """Whether a search for the learning rate runs, for which Lightning replaces the callbacks and later the state."""
    return bool(_of(trainer, _LRCallback))


def skip_search(trainer: pl.Trainer) -> None:
    """Have finders do nothing until `allow_search`."""
    for finder in _of(trainer, LearningRateFinder):
        finder.lr_find = _done


def allow_search(trainer: pl.Trainer) -> None:
    """Have finders search again."""
    for finder in _of(trainer, LearningRateFinder):
        vars(finder).pop("lr_find", None)


def _done(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Stand for the search: the members have done it."""


def _rates(trainer: pl.Trainer) -> list[str]:
    """Name the module's attributes, or hyperparameters, that finders set."""
    finders = [finder for finder in _of(trainer, LearningRateFinder) if finder._update_attr]
    return [_determine_lr_attr_name(trainer.lightning_module, finder._attr_name) for finder in finders]


def _of(trainer: pl.Trainer, kind: type) -> list[Any]:
    return [each for each in trainer.callbacks if isinstance(each, kind)]  # type: ignore[attr-defined]
