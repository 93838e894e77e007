"""The global batch declared by a trainer's settings, which no failure changes."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from unicron_lightning import environ
from unicron_lightning.data.order import StepShape
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.schedule import Schedule, take_schedule


def declare(trainer: pl.Trainer, num_micro_batches: int | None, shards: int, schedule: Schedule) -> StepShape:
    """Take the global batch from the trainer; from then on Lightning counts whole steps.

    Args:
        trainer: its ``accumulate_grad_batches`` becomes 1, as one of its batches is a whole step; an integer
            ``val_check_interval`` is converted from batches per device to steps.
        num_micro_batches: M, if not accumulate_grad_batches x devices x num_nodes / shards.
        shards: devices that hold the model together.
        schedule: receives the integer ``val_check_interval``.

    Raises:
        ConfigError: for a schedule of ``accumulate_grad_batches`` that contradicts other settings; if M can't be
            divided among the declared devices, or they among ``shards``, or if torchrun may start more workers than the
            step has work for.
    """
    epochs = take_schedule(trainer)
    trainer.accumulate_grad_batches = max((each for _, each in epochs), default=trainer.accumulate_grad_batches)
    if trainer.accumulate_grad_batches < 1 or trainer.accumulate_grad_batches % 1:
        raise ConfigError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches!r}): expected an integer of at least 1"
        )
    if num_micro_batches is None:
        _declare_nodes(trainer, environ.most_workers())
    elif epochs:
        raise ConfigError(
            f"num_micro_batches={num_micro_batches} and GradientAccumulationScheduler(scheduling={dict(epochs)}) both "
            "set the number of a step's micro-batches: leave one of them out"
        )
    devices, rest = divmod(trainer.num_devices * trainer.num_nodes, shards)
    if rest or devices < 1:
        raise ConfigError(
            f"devices x num_nodes = {trainer.num_devices} x {trainer.num_nodes} is no multiple of the {shards} devices "
            "that hold the model together (tensor x pipeline parallelism)"
        )
    rounds = trainer.accumulate_grad_batches
    if num_micro_batches is not None:
        rounds, rest = divmod(num_micro_batches, devices)
        if rest or rounds < 1:
            raise ConfigError(
                f"num_micro_batches={num_micro_batches} does not divide among devices x num_nodes = "
                f"{trainer.num_devices} x {trainer.num_nodes}{'' if shards == 1 else f' / {shards}'} = {devices}; "
                f"expected a multiple of {devices}"
            )
    trainer.accumulate_grad_batches = 1
    shape = StepShape(devices=devices, accumulation=rounds, schedule=epochs)
    if isinstance(interval := getattr(trainer, "val_check_interval", None), int):  # a duration is kept elsewhere
        schedule.val_check_interval = interval
        trainer.val_check_interval = shape.of(0).steps(interval)
    return shape


def _declare_nodes(trainer: pl.Trainer, workers: int) -> None:
    """Set ``num_nodes`` if the user has left it out, from the number of ``workers`` that torchrun may start.

    Under ddp the world is torchrun's whatever the trainer declares, and a difference is an error. Here a declared world
    larger than torchrun's is allowed (the step stays whole in a smaller one), a smaller one is not: workers would idle.

    Raises:
        ConfigError: quoting both worlds.
    """
    devices, nodes = trainer.num_devices, trainer.num_nodes
    if workers <= devices * nodes:
        return
    if nodes == 1 and workers % devices == 0:
        trainer.strategy.num_nodes = workers // devices  # type: ignore[attr-defined]
        rank_zero_info(f"Trainer(num_nodes={trainer.num_nodes}), from torchrun's --nnodes and --nproc-per-node")
    elif trainer.accumulate_grad_batches * devices * nodes < workers:
        raise ConfigError(
            f"Trainer(devices={devices}, num_nodes={nodes}, accumulate_grad_batches={trainer.accumulate_grad_batches}) "
            f"has work for {trainer.accumulate_grad_batches * devices * nodes} workers, but torchrun may start "
            f"{workers} (maximum of --nnodes x --nproc-per-node): set num_nodes so that devices x num_nodes is that, "
            "or UnicronStrategy(num_micro_batches=...) to have workers stand by on purpose"
        )
