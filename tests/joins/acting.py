"""Random scripts: hooks that change the state of a training, and a worker that is killed at some step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from joins.scripts import Manual, Net, Run, Script, data
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn

from unicron_lightning.callbacks import MemoryCheckpoint

Effect = Callable[[pl.Trainer, Any], None]


class Acting(pl.Callback):
    """Changes the state in hooks, by what the step and the data epoch say.

    Args:
        actions: for each hook its effects, each with the interval of steps (or of data epochs) at which it is made.
    """

    def __init__(self, actions: dict[str, list[tuple[str, int]]]) -> None:
        self._actions = actions

    def act(self, hook: str, trainer: pl.Trainer, module: Any) -> None:
        epochs = hook in ("on_train_epoch_start", "on_train_epoch_end")
        place = trainer.current_epoch if epochs else trainer.global_step
        for name, every in self._actions.get(hook, ()):
            if place % every == 0:
                with torch.no_grad():
                    EFFECTS[name](trainer, module)


def _hook(name: str) -> Callable[..., None]:
    def hook(self: Acting, trainer: pl.Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
        self.act(name, trainer, module)

    return hook


STARTS = ("on_fit_start", "on_train_start", "on_train_epoch_start")
LATER = ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_end")
for _name in (*STARTS, *LATER):
    setattr(Acting, _name, _hook(_name))


def _states(trainer: pl.Trainer) -> list[dict[str, Any]]:
    return [state for optimizer in trainer.optimizers for state in optimizer.state.values()]


def rates(trainer: pl.Trainer, module: Any) -> None:
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


def new_setting(trainer: pl.Trainer, module: Any) -> None:
    group = trainer.optimizers[0].param_groups[0]
    group["my_setting"] = group.get("my_setting", 1) + 1


def weights(trainer: pl.Trainer, module: Any) -> None:
    module.head.weight.mul_(1.1)


def buffer(trainer: pl.Trainer, module: Any) -> None:
    module.offset.add_(0.1)


def new_buffer(trainer: pl.Trainer, module: Any) -> None:
    module.offset = module.offset + 0.1


def statistics(trainer: pl.Trainer, module: Any) -> None:
    module.backbone[1].running_var = module.backbone[1].running_var * 1.1


def states(trainer: pl.Trainer, module: Any) -> None:
    for state in _states(trainer):
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(0.9)


def no_states(trainer: pl.Trainer, module: Any) -> None:
    for optimizer in trainer.optimizers:
        optimizer.state.clear()


def frozen(trainer: pl.Trainer, module: Any) -> None:
    parameter = module.backbone[0].bias
    parameter.requires_grad_(not parameter.requires_grad)


def dropout(trainer: pl.Trainer, module: Any) -> None:
    module.drop.p = min(0.3, module.drop.p + 0.05)


def mode(trainer: pl.Trainer, module: Any) -> None:
    module.backbone[1].train(not module.backbone[1].training)


def momentum(trainer: pl.Trainer, module: Any) -> None:
    module.backbone[1].momentum *= 0.9


def clipping(trainer: pl.Trainer, module: Any) -> None:
    if module.automatic_optimization:
        trainer.gradient_clip_val = 0.9 * (trainer.gradient_clip_val or 1.0)


def schedule(trainer: pl.Trainer, module: Any) -> None:
    trainer.lr_scheduler_configs[0].scheduler.last_epoch += 1


def more_epochs(trainer: pl.Trainer, module: Any) -> None:
    if trainer.fit_loop.max_epochs < 4:
        trainer.fit_loop.max_epochs += 1


def group(trainer: pl.Trainer, module: Any) -> None:
    known = {id(each) for group in trainer.optimizers[0].param_groups for each in group["params"]}
    if id(module.extra) not in known:
        trainer.optimizers[0].add_param_group({"params": [module.extra], "lr": 0.01})


EFFECTS: dict[str, Effect] = {
    each.__name__: each
    for each in (rates, new_setting, weights, buffer, new_buffer, statistics, states, no_states, frozen, dropout, mode)
} | {each.__name__: each for each in (momentum, clipping, schedule, more_epochs, group)}


class Changing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.extra = nn.Parameter(torch.zeros(1))

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + (self.drop(batch[0]).mean() - self.extra).square().sum()


class ChangingManual(Manual, Changing):
    """The same with manual optimization."""


def random_script(seed: int, *, lost: bool = False) -> Script:
    """Return the random script of a seed, in which one worker is killed; or all, whose state is kept in memory."""
    picks = random.Random(seed)
    actions: dict[str, list[tuple[str, int]]] = {}
    for _ in range(picks.randrange(2, 7)):
        hook = picks.choice((*STARTS, *STARTS, *LATER))
        actions.setdefault(hook, []).append((picks.choice(list(EFFECTS)), picks.choice((1, 1, 2, 3))))
    manual, validates = picks.random() < 0.25, picks.random() < 0.5
    averages, saves = picks.random() < 0.2, picks.random() < 0.3
    steps = picks.choice((4, 6))
    kill = picks.randrange(1, 3 * steps - 3)

    def runs(folder: Path) -> list[Run]:
        given = {"train_dataloaders": data(4 * steps)}
        settings: dict[str, Any] = {}
        if validates:
            given["val_dataloaders"] = data(8, 2)
            settings["check_val_every_n_epoch"] = 2
        callbacks: list[pl.Callback] = [Acting(actions)]
        if lost:
            callbacks.append(MemoryCheckpoint(every_n_steps=1))
        if averages:
            callbacks.append(EMAWeightAveraging(decay=0.9))
        if saves and not manual:
            callbacks.append(ModelCheckpoint(folder / "saved", every_n_train_steps=3, save_top_k=-1))
            settings["enable_checkpointing"] = True
        module = ChangingManual() if manual else Changing()
        return [Run(module=module, data=given, callbacks=callbacks, trainer=settings)]

    return Script(runs=runs, kill=(1, max(2, kill), None if lost else picks.randrange(2)))
