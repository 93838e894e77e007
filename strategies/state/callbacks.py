"""Lightning's own callbacks on a worker that joins or resumes: state that their `state_dict` leaves out.

`ModelCheckpoint` decides by such state whether it saves, which all ranks do together. Others keep what they have loaded
for a hook of a later run. `LearningRateFinder` searches when a fit starts: the members have done so, and their learning
rate is in the optimizer's state.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.tuner.lr_finder import _determine_lr_attr_name, _LRCallback
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_setattr
from lightning.pytorch.utilities.types import LRSchedulerConfig

from unicron_lightning import wire
from unicron_lightning.checkpoints.files import located
from unicron_lightning.worker.control.thread import Control

_BEYOND: Final[Mapping[type, Sequence[str]]] = {
    ModelCheckpoint: (
        "current_score",
        "_last_global_step_saved",
        "_last_checkpoint_saved",
        "_defer_save_until_validation",
    ),
    BaseFinetuning: ("_restarting",),
    BackboneFinetuning: ("previous_backbone_lr",),
    StochasticWeightAveraging: (
        "n_averaged",
        "_init_n_averaged",
        "_scheduler_state",
        "_initialized",
        "_max_epochs",
        "_swa_lrs",
    ),
    WeightAveraging: ("_latest_update_epoch",),
}
"""Attributes of callbacks that are plain data."""
_AVERAGED: Final = -1
"""In the place of a number of schedules."""


def state(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the state that joiners need, as plain data."""
    beyond = [
        [{name: vars(each)[name] for name in names} for each in _of(trainer, kind)] for kind, names in _BEYOND.items()
    ]
    rates = [lightning_getattr(trainer.lightning_module, name) for name in _rates(trainer)]
    return {"beyond": beyond, "rates": rates, "schedules": _schedules(trainer)}


def restore(trainer: pl.Trainer, known: Mapping[str, Sequence[Any]]) -> None:
    """Set what `state` gave on a member."""
    for kind, values in zip(_BEYOND, known.get("beyond", ()), strict=False):
        for callback, each in zip(_of(trainer, kind), values, strict=False):
            vars(callback).update(each)
    for name, rate in zip(_rates(trainer), known.get("rates", ()), strict=False):
        lightning_setattr(trainer.lightning_module, name, rate)


def kept_paths(trainer: pl.Trainer) -> list[str]:
    """Return the checkpoints that callbacks know and keep."""
    found = (each for saver in _of(trainer, ModelCheckpoint) for each in (*_best(saver), saver.last_model_path) if each)
    return [*dict.fromkeys(found)]


def replaceable_paths(trainer: pl.Trainer) -> list[str]:
    """Return the checkpoints that callbacks will remove once they have written others.

    With ``save_top_k=-1`` they remove none, except the one of ``save_last``.
    """
    savers = _of(trainer, ModelCheckpoint)
    found = ((*(() if saver.save_top_k == -1 else _best(saver)), saver.last_model_path) for saver in savers)
    return [*dict.fromkeys(path for paths in found for path in paths if path)]


def note_saved(trainer: pl.Trainer, path: str, known: Sequence[str]) -> None:
    """Have the callback that has written a checkpoint know so, and remove what it would have removed then.

    Its state in the checkpoint is of the moment before.

    Args:
        trainer: has resumed from the checkpoint.
        path: of the checkpoint.
        known: checkpoints of up to that moment that callbacks replace, see `replaceable_paths`.
    """
    kept = kept_paths(trainer)
    for saver in _of(trainer, ModelCheckpoint):
        if path in map(located, (*_best(saver), saver.last_model_path)):
            saver._last_global_step_saved, saver._last_checkpoint_saved = trainer.global_step, path
            for each in known:
                if each not in kept and saver._should_remove_checkpoint(trainer, each, path):
                    saver._remove_checkpoint(trainer, each)


def _schedules(trainer: pl.Trainer) -> int:
    """Return the number of the trainer's schedules; `_AVERAGED` if it is the one of `StochasticWeightAveraging`."""
    configs = trainer.lr_scheduler_configs
    made = [averaging._swa_scheduler for averaging in _of(trainer, StochasticWeightAveraging)]
    replaced = any(config.scheduler is scheduler for config in configs for scheduler in made)
    return _AVERAGED if replaced else len(configs)


def _best(saver: ModelCheckpoint) -> Sequence[str]:
    return saver.best_model_path, *saver.best_k_models


def forget_schedules(trainer: pl.Trainer, known: Mapping[str, Any]) -> list[LRSchedulerConfig]:
    """Take the script's own schedules from a trainer if the members' are not these: they must not get their states.

    Returns:
        Them.
    """
    own = list(trainer.lr_scheduler_configs)
    if known.get("schedules", len(own)) != len(own):
        trainer.lr_scheduler_configs.clear()
    return own


def catch_up(trainer: pl.Trainer, known: Mapping[str, Any], own: Sequence[LRSchedulerConfig]) -> None:
    """Give `StochasticWeightAveraging` a scheduler if the members' has one, and the trainer the same schedules.

    The callback makes its scheduler in the first epoch in which it averages, and the trainer then has it in the place
    of the script's own. It keeps it in a further fit, and the trainer has the script's again. From a checkpoint of
    within a data epoch it makes one in the next.

    Args:
        trainer: after the hooks of a run's start.
        known: see `state`.
        own: the script's schedules.
    """
    made = _of(trainer, StochasticWeightAveraging)
    members = dict(zip(_BEYOND, known.get("beyond", ()), strict=False)).get(StochasticWeightAveraging, ())
    for averaging, member in zip(made, members, strict=False):
        if not member["_initialized"]:
            averaging._swa_scheduler = None
        elif averaging._swa_scheduler is None:
            averaging._initialized = False
            told: Any = SimpleNamespace(
                current_epoch=averaging.swa_end,  # the last one in which it makes one
                max_epochs=trainer.max_epochs,
                optimizers=trainer.optimizers,
                lr_scheduler_configs=[],
            )
            averaging.on_train_epoch_start(told, trainer.lightning_module)
    if "schedules" in known:
        averaged = [LRSchedulerConfig(each._swa_scheduler) for each in made if each._swa_scheduler is not None]
        number = known["schedules"]
        trainer.lr_scheduler_configs[:] = averaged if number == _AVERAGED else own[:number]


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


_CONFIGURATION: Final = "configuration"
"""Record of the fact that a worker of this task has saved its configuration."""


def accept_own_configuration(trainer: pl.Trainer, control: Control | None) -> None:
    """Let ``SaveConfigCallback`` overwrite what an earlier life of the task has written, before it looks."""
    savers = _savers(trainer)
    if savers and control is not None and control.welcome.life > 1 and control.lookup(_CONFIGURATION) is not None:
        for saver in savers:
            saver.overwrite = True


def note_saved_configuration(trainer: pl.Trainer, control: Control | None) -> None:
    """Record that this task has saved its configuration, after ``SaveConfigCallback`` has."""
    if control is not None and any(saver.already_saved for saver in _savers(trainer)):
        control.send(wire.Record(key=_CONFIGURATION, value="saved", lasting=True))


def _savers(trainer: pl.Trainer) -> list[Any]:
    command_line = sys.modules.get("lightning.pytorch.cli")
    if command_line is None:  # then there is none
        return []
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if isinstance(each, command_line.SaveConfigCallback)]
