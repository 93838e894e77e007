"""Descriptions of a trainer's model, settings and data, which `worker.comparison` compares between workers."""

from __future__ import annotations

import os
from collections.abc import Mapping

import lightning.pytorch as pl
import torch

from unicron_lightning import __version__
from unicron_lightning.data.combined import CombinedSteps
from unicron_lightning.data.steps import IndexedSteps, TrainingLoader, describe_order
from unicron_lightning.worker.agreement import part_of
from unicron_lightning.worker.comparison import (
    comparable,
    describe_optimizer,
    describe_parameters,
    plain_text,
    shared_state,
)
from unicron_lightning.worker.reproducible import conditions


def describe_model(trainer: pl.Trainer) -> dict[str, str]:
    """Describe the model when the optimizers exist and before anything is restored."""
    module, strategy = trainer.lightning_module, trainer.strategy
    versions = (torch.__version__, pl.__version__, __version__)
    return {
        "versions": "torch {}, lightning {}, unicron-lightning {}".format(*(v.partition("+")[0] for v in versions)),
        "seed": os.environ.get("PL_GLOBAL_SEED", "not set"),
        **(describe_parameters(module) if getattr(strategy, "names_all", True) else {}),
        "optimizer": ", ".join(describe_optimizer(each) for each in trainer.optimizers),
        "scheduler": ", ".join(
            f"{type(config.scheduler).__qualname__}({plain_text(shared_state(config.scheduler))}) per {config.interval}"
            for config in trainer.lr_scheduler_configs
        ),
        "hparams": plain_text(dict(module.hparams)),
        **(conditions(strategy.root_device) if getattr(strategy, "reproducible", False) else {}),
        **(strategy.witness.conditions(strategy.root_device) if hasattr(strategy, "witness") else {}),
    }


def describe_data(loader: TrainingLoader | CombinedSteps) -> dict[str, str]:
    """Describe the training data's order and, if it has an index, its length."""
    read = (loader.whole if isinstance(loader, CombinedSteps) else loader).steps
    order = {"data order": describe_order(read)}
    if not isinstance(read, IndexedSteps):
        return order
    datasets = [part.dataset for part in (loader.flattened if isinstance(loader, CombinedSteps) else [loader])]
    samples = " + ".join(map(_length, datasets))
    return {"data length": f"{samples} samples, {read.number(0)} steps an epoch{_schedule(read)}", **order}


def _schedule(steps: IndexedSteps) -> str:
    epochs = steps.shape.schedule
    return f", with schedule of accumulate_grad_batches {dict(epochs)}" if epochs else ""


def _length(data: object) -> str:
    try:
        return str(len(data))  # type: ignore[arg-type]
    except TypeError:
        return "?"


def further_state(trainer: pl.Trainer, names: Mapping[int, str]) -> dict[str, int]:
    """Return numbers for which parameters need gradients, the schedules, the scaler and the counters.

    The states of callbacks and data are left out: they may have values of their rank, such as a time.
    """
    frozen = [names[id(each)] for each in trainer.lightning_module.parameters() if not each.requires_grad]
    found = {"requires_grad": part_of(frozen)}
    for number, config in enumerate(trainer.lr_scheduler_configs):
        for key, value in shared_state(config.scheduler).items():
            found[f"{key} of scheduler {number}"] = part_of(comparable(value))
    for key, value in (trainer.precision_plugin.state_dict() or {}).items():
        found[f"{key} of the scaler"] = part_of(comparable(value))
    return {**found, "trainer.global_step": part_of(trainer.global_step)}
