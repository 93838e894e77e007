"""Settings that the strategy refuses, each with one error that names the value and the alternative."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import LBFGS, Optimizer

from unicron_lightning import environ
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.lightning_root import is_other, refuse
from unicron_lightning.worker import codec


def check_trainer(trainer: pl.Trainer, *, scheduled: bool) -> None:
    """Refuse trainer settings that depend on the world.

    Args:
        trainer: of the run.
        scheduled: whether the global batch may follow a schedule.

    Raises:
        ConfigError: naming the setting.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if is_other(callback):
            raise refuse(f"the callback {type(callback).__qualname__}")
        if isinstance(callback, GradientAccumulationScheduler) and not scheduled:
            raise ConfigError(
                f"GradientAccumulationScheduler(scheduling={callback.scheduling}) changes the global batch, but M is "
                "in Megatron's configuration: set Trainer(accumulate_grad_batches=...), or use "
                'Trainer(strategy="unicron_fsdp")'
            )
        if isinstance(callback, BatchSizeFinder) and environ.under_agent():
            raise ConfigError(
                f"{type(callback).__name__} changes the batch size while it trains, and each rank would find its own; "
                "the unicron strategy keeps the global batch constant (Lightning refuses it under ddp, too): find the "
                "batch size in a run on one device, without torchrun"
            )
    if type(trainer.precision_plugin).__name__ == "TransformerEnginePrecision":
        raise ConfigError(
            f"Trainer(precision={trainer.precision!r}) reduces its scaling factors over the ranks in each forward, "
            "which the unicron strategy can't do (ranks run different numbers of micro-batches); expected "
            "'bf16-mixed', 'bf16-true', '16-mixed', '32-true' or '64-true'"
        )
    if trainer._accelerator_connector._layer_sync is not None:
        raise ConfigError(
            "Trainer(sync_batchnorm=True) communicates inside the forward pass, which the unicron strategy can't do "
            "(ranks run different numbers of micro-batches); running statistics are averaged over the global batch "
            "anyway. Write instead: GroupNorm or LayerNorm, or a larger batch_size"
        )


def check_module(module: pl.LightningModule, *, manual: bool = False) -> None:
    """Refuse modules that fetch their batches themselves, or step their optimizers where that is not supported.

    Args:
        module: of the run.
        manual: whether manual optimization is supported.

    Raises:
        ConfigError: for manual optimization; for steps that take the data's iterator.
    """
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        step = getattr(module, name)
        if callable(step) and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise ConfigError(
                f"{type(module).__qualname__}.{name}(dataloader_iter) fetches its batches itself; the unicron strategy "
                f"must know which rank has which batch: define {name}(batch, batch_idx)"
            )
    if not module.automatic_optimization and not manual:
        raise ConfigError(
            f"{type(module).__qualname__}.automatic_optimization is False; models that are spread over workers need "
            'automatic optimization: set it to True, or use Trainer(strategy="unicron")'
        )


def check_optimizers(optimizers: Sequence[Optimizer], *, several: bool = False, repeats: bool = False) -> None:
    """Refuse optimizers that run the step more than once, and several optimizers, where they are not supported.

    Args:
        optimizers: of the module.
        several: whether there may be more than one.
        repeats: whether they may call their closure several times.

    Raises:
        ConfigError: naming them.
    """
    if len(optimizers) > 1 and not several:
        names = [type(optimizer).__qualname__ for optimizer in optimizers]
        raise ConfigError(f"configure_optimizers() returned {len(optimizers)} optimizers {names}; expected one")
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS) and not repeats:
            raise ConfigError(
                "LBFGS evaluates the loss several times per step; expected a first-order optimizer, or "
                'Trainer(strategy="unicron") with automatic optimization'
            )


def check_states(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers whose state cannot be sent to joiners; call it after an update, before which there is none.

    Raises:
        ConfigError: naming the optimizer, and the value.
    """
    for optimizer in optimizers:
        try:
            codec.check(optimizer.state_dict())
        except codec.NotPlainData as error:
            name = type(optimizer).__qualname__
            raise ConfigError(f"the state of the optimizer {name} cannot be sent to joiners: {error}") from error
